"""bias + dropout + residual + LayerNorm, the end of every block of a post-LN transformer, as one operation each way.

LayerNorm(residual + dropout(x + x_bias)) keeps what the in-place LayerNorm keeps (tempo/layer_norm.py) and the 16 bytes that
the mask is drawn from (tempo/dropout.py): neither x, nor the sum, nor a mask. All is computed in float32, so nothing is rounded
between the steps.

Shapes: R rows (all leading dimensions), H columns (the last dimension), K exact columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tempo._library import arithmetic_dtype, define
from tempo.layer_norm import OneDimensionalLayerNorm, check_parameters, empty_outputs, exact_columns, gradients, normalise
from tempo.philox import check_probability, check_rng, keep_mask, keep_scale


def _drop(x: Tensor, shape: torch.Size, p: float, rng: Tensor, site: int) -> Tensor:
    """Drop elements of `x`, of any shape, that has the elements of a tensor [batch, ...] of `shape`."""
    keep = keep_mask(shape, p, rng, site).view(x.shape)
    return torch.where(keep, x * keep_scale(p), torch.zeros((), dtype=x.dtype, device=x.device))


def _forward(
    x: Tensor,
    x_bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    columns: Tensor,
    p: float,
    rng: Tensor,
    site: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = arithmetic_dtype(x.dtype)
    branch = x.contiguous().to(dtype) + x_bias.to(dtype)
    if p > 0.0:
        branch = _drop(branch, x.shape, p, rng, site)
    return normalise(branch + residual.to(dtype), x.dtype, weight, bias, eps, columns)


def _backward(
    grad: Tensor,
    y: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    columns: Tensor,
    exact_x_hat: Tensor,
    p: float,
    rng: Tensor,
    site: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dsum_RH, dweight, dbias = gradients(grad, y, rstd, weight, bias, columns, exact_x_hat)
    dresidual = dsum_RH.to(grad.dtype).view(grad.shape)
    if p == 0.0:
        dx, dx_bias = grad.new_empty(0), dsum_RH.sum(0)
    else:
        dx_RH = _drop(dsum_RH, grad.shape, p, rng, site)
        dx, dx_bias = dx_RH.to(grad.dtype).view(grad.shape), dx_RH.sum(0)
    return dx, dresidual, dx_bias.to(weight.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)


define(
    "dropout_add_layer_norm_forward(Tensor x, Tensor x_bias, Tensor residual, Tensor weight, Tensor bias, float eps,"
    " Tensor exact_columns, float p, Tensor rng, int site) -> (Tensor, Tensor, Tensor)",
    _forward,
    lambda x, x_bias, residual, weight, bias, eps, columns, p, rng, site: empty_outputs(x, columns),
)
# p = 0: the first result is empty, because the gradient of x is that of residual.
define(
    "dropout_add_layer_norm_backward(Tensor grad, Tensor y, Tensor rstd, Tensor weight, Tensor bias, Tensor exact_columns,"
    " Tensor exact_x_hat, float p, Tensor rng, int site) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    lambda grad, y, rstd, weight, bias, columns, exact, p, rng, site: (
        grad.new_empty(0 if p == 0.0 else grad.shape),
        grad.new_empty(grad.shape),
        torch.empty_like(weight),
        torch.empty_like(weight),
        torch.empty_like(bias),
    ),
)


class _DropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        p: float,
        rng: Tensor,
        site: int,
        eps: float,
    ) -> Tensor:
        columns = exact_columns(weight, bias, x.dtype)
        added = x.new_zeros(x.shape[-1]) if x_bias is None else x_bias
        y, rstd, exact_x_hat = torch.ops.tempo.dropout_add_layer_norm_forward(
            x, added, residual, weight, bias, eps, columns, p, rng, site
        )
        ctx.save_for_backward(y, rstd, weight, bias, columns, exact_x_hat, rng)
        ctx.p, ctx.site, ctx.x_bias_dtype = p, site, added.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, rng = ctx.saved_tensors
        gradients = torch.ops.tempo.dropout_add_layer_norm_backward(grad, *saved, ctx.p, rng, ctx.site)
        dx, dresidual, dx_bias, dweight, dbias = gradients
        dx = dresidual if ctx.p == 0.0 else dx
        results = (dx, dx_bias.to(ctx.x_bias_dtype), dresidual, dweight, dbias)
        needed = (result if needs else None for result, needs in zip(results, ctx.needs_input_grad[:5], strict=True))
        return *needed, None, None, None, None


def dropout_add_layer_norm(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    p: float,
    rng: Tensor | None,
    site: int,
    eps: float = 1e-12,
    training: bool = True,
) -> Tensor:
    """Return LayerNorm(residual + dropout(x + x_bias)); the backward pass needs the output, no input and no mask.

    Args:
        x: [batch, ..., H], floating dtype; the batch dimension counts samples. The arithmetic is float32 (float64 for float64).
        x_bias: [H], the bias of the linear layer that made `x`, in the dtype of `x` or float32; None where it has none.
        residual: the shape and dtype of `x`.
        weight: [H] gamma, the dtype of `x` or float32; zeros are fine.
        bias: [H] beta, likewise.
        p: dropout probability in [0, 1].
        rng: int64 [2] = (seed, first_sample), see `make_rng`; needed where p > 0 in training. The mask is that of `dropout`.
        site: number of this dropout in the model.
        eps: added to the variance; BERT uses 1e-12.
        training: False drops nothing.

    Returns:
        The shape and dtype of `x`. Kept for the backward pass: this output, 4 bytes and at least 16 elements per row, `rng`.

    Raises:
        ValueError: parameters that are not [H], a `residual` unlike `x`, an `x` that is not floating or has no elements in its
            last dimension, `p` outside [0, 1], or a missing or wrong `rng`.
    """
    check_probability(p)
    parameters = {"weight": weight, "bias": bias} | ({} if x_bias is None else {"x_bias": x_bias})
    check_parameters("dropout_add_layer_norm", x, **parameters)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual must have the shape and dtype of x, {list(x.shape)} {x.dtype}; got {list(residual.shape)} {residual.dtype}"
        )
    p = p if training else 0.0
    if rng is None:
        if p > 0.0:
            raise ValueError("dropout_add_layer_norm with dropout in training needs rng, see tempo.make_rng")
        rng = torch.zeros(2, dtype=torch.int64, device=x.device)
    check_rng(rng)
    return _DropoutAddLayerNorm.apply(x, x_bias, residual, weight, bias, p, rng, site, eps)


class DropoutAddLayerNorm(OneDimensionalLayerNorm):
    """`nn.LayerNorm` over one dimension with bias, dropout and residual before it; the parameters and state_dict of LayerNorm.

    Args:
        normalized_shape: H, or a sequence of that one number.
        p: dropout probability in [0, 1]; dropped in training only.
        site: number of this dropout in the model; different sites draw independent masks.
        eps: added to the variance.
    """

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, p: float, site: int, eps: float = 1e-12, **kwargs: Any
    ) -> None:
        super().__init__(normalized_shape, eps=eps, **kwargs)
        check_probability(p)
        self.p, self.site = p, site

    def forward(self, x: Tensor, residual: Tensor, rng: Tensor | None, x_bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return LayerNorm(residual + dropout(x + x_bias)); see `dropout_add_layer_norm`."""
        weight, bias = self.affine(x.device)
        return dropout_add_layer_norm(x, x_bias, residual, weight, bias, self.p, rng, self.site, self.eps, self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}, site={self.site}"
