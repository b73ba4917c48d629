"""Dropout whose mask is drawn again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tempo._library import define
from tempo.philox import check_batched, check_probability, check_rng, keep_mask, keep_scale


def _dropout_reference(x: Tensor, p: float, rng: Tensor, site: int) -> Tensor:
    if p == 0.0:
        return x.clone()
    keep = keep_mask(x.shape, p, rng, site)
    # A select, not a product: a dropped NaN or infinity becomes 0, forward and backward.
    return torch.where(keep, x * keep_scale(p), torch.zeros((), dtype=x.dtype, device=x.device))


def _dropout_fake(x: Tensor, p: float, rng: Tensor, site: int) -> Tensor:
    return torch.empty_like(x)


define("dropout(Tensor x, float p, Tensor rng, int site) -> Tensor", _dropout_reference, _dropout_fake)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, rng: Tensor, site: int) -> Tensor:
        ctx.save_for_backward(rng)
        ctx.p, ctx.site = p, site
        return torch.ops.tempo.dropout(x, p, rng, site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (rng,) = ctx.saved_tensors
        return torch.ops.tempo.dropout(grad, ctx.p, rng, ctx.site), None, None, None


def dropout(x: Tensor, p: float, rng: Tensor, site: int, training: bool = True) -> Tensor:
    """Zero elements of `x` with probability `p` and scale the others by 1 / (1 - p); keeps 16 bytes for the backward pass.

    Args:
        x: [batch, ...], any floating dtype; the batch dimension counts samples.
        p: probability in [0, 1].
        rng: int64 [2] = (seed, first_sample), see `make_rng`.
        site: number of this dropout in the model; different sites draw independent masks.
        training: False returns `x` as it is.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: `p` outside [0, 1], an `rng` of another dtype or shape, or an `x` that is not floating or has no batch.
    """
    check_probability(p)
    if not training or p == 0.0:
        return x
    check_rng(rng)
    check_batched(x.shape)
    if not x.is_floating_point():
        raise ValueError(f"dropout needs a floating-point tensor, got {x.dtype}")
    return _Dropout.apply(x, p, rng, site)


class SampleCounter(nn.Module):
    """Counts the samples of training forward passes, for layers that are used without a trainer's `rng`.

    The seed is `torch.initial_seed()`, so `torch.manual_seed` makes a run repeatable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_samples = 0

    @torch.compiler.disable(reason="counting samples is Python's work: pass `rng` to compile the model as one graph")
    def next(self, batch: int, device: torch.device) -> Tensor:
        """Return int64 [2] = (seed, first_sample) for the next `batch` samples.

        Raises:
            RuntimeError: called in a backward pass, where activation checkpointing runs the forward pass again: it would draw
                the masks of other samples.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "activation checkpointing runs a forward pass again that counts its own samples, and would draw other dropout"
                " masks: pass rng = tempo.make_rng(seed, first_sample)"
            )
        rng = torch.tensor([torch.initial_seed() & 0x7FFFFFFFFFFFFFFF, self.num_samples], dtype=torch.int64, device=device)
        self.num_samples += batch
        return rng
