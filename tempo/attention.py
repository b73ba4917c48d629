"""Attention that keeps the probabilities once: the dropped ones are rebuilt in the backward pass (Tempo paper, section on
sub-layer dropout recomputation), here with the mask drawn again by Philox instead of kept.

Shapes: B batch, N heads, Q queries, K keys, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tempo._library import arithmetic_dtype, cast_for_matmul, define
from tempo.philox import check_probability, check_rng, fresh_rng, keep_mask, keep_scale


def _masked_scores(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Scale and mask in float32. Masked places hold its lowest number: a row with none left stays finite and uniform."""
    wide = scores.to(arithmetic_dtype(scores.dtype)) * scale
    lowest = torch.finfo(wide.dtype).min
    if mask is not None and mask.dtype == torch.bool:
        wide = wide.masked_fill(~mask, lowest)
    elif mask is not None:
        # An additive mask hides where it holds its own dtype's lowest number or -inf, whatever the score there.
        wide = (wide + mask).masked_fill(mask <= torch.finfo(mask.dtype).min, lowest)
    if causal:
        num_queries, num_keys = scores.shape[-2:]
        future = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
        wide = wide.masked_fill(future.triu(num_keys - num_queries + 1), lowest)
    return wide


def _drop(x: Tensor, p: float, rng: Tensor, site: int) -> Tensor:
    keep = keep_mask(x.shape, p, rng, site)
    return torch.where(keep, x * keep_scale(p), torch.zeros((), dtype=x.dtype, device=x.device))


def _forward(scores: Tensor, mask: Tensor | None, scale: float, p: float, rng: Tensor, site: int, causal: bool) -> Tensor:
    scores.copy_(torch.softmax(_masked_scores(scores, mask, scale, causal), dim=-1))
    if p == 0.0:
        return scores.new_empty(0)
    return _drop(scores, p, rng, site)


def _backward(grad_dropped: Tensor, probabilities: Tensor, scale: float, p: float, rng: Tensor, site: int) -> Tensor:
    dtype = arithmetic_dtype(probabilities.dtype)
    grad = grad_dropped.to(dtype) if p == 0.0 else _drop(grad_dropped.to(dtype), p, rng, site)
    wide = probabilities.to(dtype)
    grad_dropped.copy_((grad - (grad * wide).sum(-1, keepdim=True)) * wide * scale)
    return probabilities.new_empty(0) if p == 0.0 else _drop(probabilities, p, rng, site)


define(
    "softmax_dropout_forward(Tensor(a!) scores, Tensor? mask, float scale, float p, Tensor rng, int site, bool causal) -> Tensor",
    _forward,
    lambda scores, mask, scale, p, rng, site, causal: scores.new_empty(0) if p == 0.0 else torch.empty_like(scores),
)
define(
    "softmax_dropout_backward(Tensor(a!) grad_dropped, Tensor probabilities, float scale, float p, Tensor rng, int site)"
    " -> Tensor",
    _backward,
    lambda grad_dropped, probabilities, scale, p, rng, site: (
        probabilities.new_empty(0) if p == 0.0 else torch.empty_like(probabilities)
    ),
)


def _dropped_probabilities(
    scores: Tensor, mask: Tensor | None, scale: float, p: float, rng: Tensor, site: int, causal: bool
) -> Tensor:
    """Turn `scores` into probabilities in place and return the dropped ones (the same tensor where p = 0)."""
    dropped = torch.ops.tempo.softmax_dropout_forward(scores, mask, scale, p, rng, site, causal)
    return scores if p == 0.0 else dropped


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        p: float,
        rng: Tensor,
        site: int,
        scale: float,
        causal: bool,
    ) -> Tensor:
        probabilities = torch.matmul(query, key.transpose(-2, -1))
        dropped = _dropped_probabilities(probabilities, mask, scale, p, rng, site, causal)
        ctx.save_for_backward(query, key, value, probabilities, rng)
        ctx.p, ctx.site, ctx.scale = p, site, scale
        return torch.matmul(dropped, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, probabilities, rng = ctx.saved_tensors
        grad_scores = torch.matmul(grad, value.transpose(-2, -1))
        dropped = torch.ops.tempo.softmax_dropout_backward(grad_scores, probabilities, ctx.scale, ctx.p, rng, ctx.site)
        grad_value = torch.matmul((probabilities if ctx.p == 0.0 else dropped).transpose(-2, -1), grad)
        grad_query = torch.matmul(grad_scores, key)
        grad_key = torch.matmul(grad_scores.transpose(-2, -1), query)
        return grad_query, grad_key, grad_value, None, None, None, None, None, None


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    tensors = {"query": query, "key": key, "value": value}
    fits = all(t.dim() == 4 for t in tensors.values())
    fits = fits and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not fits or key.shape[2] != value.shape[2] or query.shape[3] != key.shape[3]:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"attention needs query [B, N, Q, D], key [B, N, K, D], value [B, N, K, D]; got {shapes}")
    if not query.is_floating_point() or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must have one floating dtype, got {query.dtype}, {key.dtype}, {value.dtype}")


def _check_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    batch, _, num_queries, _ = query.shape
    num_keys = key.shape[-2]
    if mask.dtype == torch.bool and mask.shape == (batch, num_keys):
        return mask[:, None, None, :]
    full = (batch, query.shape[1], num_queries, num_keys)
    fits = mask.dim() == 4 and all(m in (1, f) for m, f in zip(mask.shape, full, strict=True))
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"attention_mask must be bool [batch, keys] (True = attend) = [{batch}, {num_keys}], or bool or additive floating"
            f" and broadcast to {list(full)}; got {mask.dtype} {list(mask.shape)}"
        )
    if mask.requires_grad:
        raise ValueError("attention_mask requires a gradient, which attention does not compute: detach it")
    return mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
    scale: float | None = None,
    causal: bool = False,
    training: bool = True,
) -> Tensor:
    """softmax(query key^T * scale) -> dropout -> times value; keeps query, key, value and the undropped probabilities only.

    Args:
        query: [B, N, Q, D], floating dtype.
        key: [B, N, K, D].
        value: [B, N, K, D].
        attention_mask: bool [B, K], True = attend; or bool or additive floating, broadcast to [B, N, Q, K]. A row with
            nothing to attend to is uniform and finite.
        p: dropout probability of the probabilities.
        rng: int64 [2] = (seed, first_sample), needed where p > 0 in training.
        site: number of this dropout in the model.
        scale: default D ** -0.5.
        causal: query i sees keys up to i + K - Q.
        training: False drops nothing.

    Returns:
        [B, N, Q, D], dtype of `query` (under autocast, its dtype).

    Raises:
        ValueError: tensors or a mask that do not fit, a mask that requires a gradient, p outside [0, 1], or a missing or
            wrong `rng`.
    """
    check_probability(p)
    _check_shapes(query, key, value)
    query, key, value = cast_for_matmul(query, key, value)
    p = p if training else 0.0
    if rng is None:
        if p > 0.0:
            raise ValueError("attention with dropout in training needs rng, see tempo.make_rng")
        rng = torch.zeros(2, dtype=torch.int64, device=query.device)
    check_rng(rng)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = _check_mask(attention_mask, query, key)
    return _Attention.apply(query, key, value, mask, p, rng, site, scale, causal)


class _SoftmaxDropoutMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor, p: float, rng: Tensor) -> Tensor:
        # The caller's scores stay as they are: something else may need them.
        probabilities = scores.clone(memory_format=torch.contiguous_format)
        dropped = _dropped_probabilities(probabilities, None, 1.0, p, rng, 0, False)
        ctx.save_for_backward(probabilities, value, rng)
        ctx.p = p
        return torch.matmul(dropped, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, value, rng = ctx.saved_tensors
        grad_scores = torch.matmul(grad, value.transpose(-2, -1))
        dropped = torch.ops.tempo.softmax_dropout_backward(grad_scores, probabilities, 1.0, ctx.p, rng, 0)
        kept = probabilities if ctx.p == 0.0 else dropped
        return grad_scores, torch.matmul(kept.transpose(-2, -1), grad), None, None


class Combined(nn.Module):
    """softmax -> dropout -> matmul as one layer, under the name and the signature of the paper's code.

    Args:
        dim: the dimension of the softmax; the last one only.
        p: probability of dropping an element.

    Draws a fresh seed for the mask from PyTorch's generator at every call in training, as `nn.Dropout` draws its mask: layers
    are independent of one another, `torch.manual_seed` repeats a run, and activation checkpointing, which restores that
    generator, draws the same mask again. For masks that do not depend on how a batch is split, use `attention` with `rng`.
    """

    def __init__(self, dim: int, p: float) -> None:
        super().__init__()
        check_probability(p)
        self.dim, self.p = dim, p

    def forward(self, scores: Tensor, value: Tensor) -> Tensor:
        """Return dropout(softmax(scores)) @ value: [..., Q, K] and [..., K, D] give [..., Q, D]."""
        if self.dim not in (-1, scores.dim() - 1):
            raise ValueError(f"Combined takes the softmax over the last dimension only, got dim={self.dim}")
        p = self.p if self.training else 0.0
        rng = fresh_rng(scores.device) if p > 0.0 else torch.zeros(2, dtype=torch.int64, device=scores.device)
        scores, value = cast_for_matmul(scores, value)
        return _SoftmaxDropoutMatmul.apply(scores, value, p, rng)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, p={self.p}"
