"""LayerNorm that keeps its output instead of its input (Tempo paper, section on in-place LayerNorm).

y = x_hat * gamma + beta, so the backward pass rebuilds x_hat = (y - beta) / gamma from y, which the next layer keeps anyway,
and needs only rstd besides. What y's rounding costs grows with |beta / gamma|, and gamma = 0 loses x_hat altogether: the
columns where that ratio is worst keep x_hat itself.

Shapes: R rows (all leading dimensions), H columns (the last dimension), K exact columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tempo._library import arithmetic_dtype, define

# How many columns always keep x_hat. A fixed number needs no look at the weights from the host.
NUM_EXACT_COLUMNS = 16
# A column is unsafe where |gamma| < |beta| / 8: bfloat16's error of x_hat is then above 0.013.
_UNSAFE_RATIO = 8.0


def _ratio(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """|beta / gamma| per column; infinite where gamma is 0, or so small that y lies among the dtype's subnormal numbers."""
    gamma, beta = weight.detach().double().abs(), bias.detach().double().abs()
    # 2^-10 for float16, whose y has too few significant bits below it; for the other dtypes next to nothing.
    lost = gamma < 16.0 * torch.finfo(dtype).tiny
    return torch.where(lost, torch.inf, beta / gamma)


def num_unsafe_columns(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the columns whose x_hat cannot be rebuilt well from y of `dtype`.

    On a GPU and under torch.compile only the 16 worst columns keep x_hat (choosing their number would stop the stream every
    call); more unsafe columns than that lose accuracy, and a trainer should report them: with gamma = 0 such a column gets
    gamma's gradient 0 and the part of dx that its x_hat gives is missing. Elsewhere every unsafe column keeps it.

    Returns:
        int64 scalar tensor.
    """
    return (_ratio(weight, bias, dtype) > _UNSAFE_RATIO).sum()


def exact_columns(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Choose the columns that keep x_hat: the 16 worst, and on a CPU all unsafe ones; int64 [K]."""
    ratio = _ratio(weight, bias, dtype)
    num_columns = min(NUM_EXACT_COLUMNS, ratio.numel())
    if ratio.device.type == "cpu" and not torch.compiler.is_compiling():
        num_columns = max(num_columns, int((ratio > _UNSAFE_RATIO).sum()))
    return ratio.topk(num_columns).indices.sort().values


def _forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # In the shape of x throughout: autograd forbids to write over a view that a Function returns.
    wide = x.contiguous().to(arithmetic_dtype(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    x_hat = centred.mul_(rstd)
    y = torch.addcmul(bias.to(wide.dtype), x_hat, weight.to(wide.dtype)).to(x.dtype)
    return y, rstd.flatten(), x_hat[..., columns].reshape(-1, columns.shape[0]).to(x.dtype)


def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    rstd = x.new_empty(rows, dtype=arithmetic_dtype(x.dtype))
    return x.new_empty(x.shape), rstd, x.new_empty(rows, columns.shape[0])


def _backward(
    grad: Tensor, y: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, columns: Tensor, exact_x_hat: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = arithmetic_dtype(y.dtype)
    dy_RH = grad.reshape(-1, y.shape[-1]).to(dtype)
    gamma, beta = weight.to(dtype), bias.to(dtype)
    shifted_RH = y.reshape(dy_RH.shape).to(dtype) - beta
    exact_RK = exact_x_hat.to(dtype)

    # gamma * x_hat, where y has it undivided: the row sums then do not see the division's error.
    scaled_RH = shifted_RH.index_copy(1, columns, exact_RK * gamma[columns])
    # gamma = 0 in more columns than are kept must not spread NaN over the row.
    inverse_gamma = torch.where(gamma.abs() < torch.finfo(dtype).tiny, 0.0, 1.0 / gamma)
    x_hat_RH = (shifted_RH * inverse_gamma).index_copy_(1, columns, exact_RK)
    dx_hat_RH = dy_RH * gamma
    mean_dx_hat = dx_hat_RH.mean(1, keepdim=True)
    mean_dx_hat_x_hat = (dy_RH * scaled_RH).mean(1, keepdim=True)
    dx = (dx_hat_RH - mean_dx_hat - x_hat_RH * mean_dx_hat_x_hat) * rstd[:, None]
    dweight = (dy_RH * x_hat_RH).sum(0).to(weight.dtype)
    return dx.to(grad.dtype).view(grad.shape), dweight, dy_RH.sum(0).to(bias.dtype)


define(
    "layer_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps, Tensor exact_columns) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
define(
    "layer_norm_backward(Tensor grad, Tensor y, Tensor rstd, Tensor weight, Tensor bias, Tensor exact_columns,"
    " Tensor exact_x_hat) -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda grad, y, rstd, weight, bias, columns, exact: (
        grad.new_empty(grad.shape),
        torch.empty_like(weight),
        torch.empty_like(bias),
    ),
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        columns = exact_columns(weight, bias, x.dtype)
        y, rstd, exact_x_hat = torch.ops.tempo.layer_norm_forward(x, weight, bias, eps, columns)
        ctx.save_for_backward(y, rstd, weight, bias, columns, exact_x_hat)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        dx, dweight, dbias = torch.ops.tempo.layer_norm_backward(grad, *ctx.saved_tensors)
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return dx, dweight if needs_weight else None, dbias if needs_bias else None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-12) -> Tensor:
    """Normalise the last dimension; the backward pass needs the output, not the input.

    Args:
        x: [..., H], floating dtype; the arithmetic is float32 (float64 for float64).
        weight: [H] gamma, the dtype of `x` or float32; zeros are fine.
        bias: [H] beta, likewise.
        eps: added to the variance; BERT uses 1e-12.

    Returns:
        The shape and dtype of `x`. Kept for the backward pass: this output, 4 bytes and at least 16 elements per row.

    Raises:
        ValueError: `weight` or `bias` is not [H], or `x` is not floating or has no elements in its last dimension.
    """
    if not x.is_floating_point():
        raise ValueError(f"layer_norm needs a floating-point tensor, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"layer_norm needs a last dimension with at least one element, got shape {list(x.shape)}")
    if weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        raise ValueError(
            f"weight and bias must be [{x.shape[-1]}], the last dimension of x; got {list(weight.shape)} and {list(bias.shape)}"
        )
    return _LayerNorm.apply(x, weight, bias, eps)


class InplaceLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over one dimension that keeps its output for the backward pass; the same parameters and state_dict.

    Args:
        normalized_shape: H, or a sequence of that one number.
        eps: added to the variance.
    """

    def __init__(self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-12, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps=eps, **kwargs)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"InplaceLayerNorm normalises one dimension, got {list(self.normalized_shape)}")

    def forward(self, input: Tensor) -> Tensor:
        width, device = self.normalized_shape[0], input.device
        weight = torch.ones(width, device=device) if self.weight is None else self.weight
        bias = torch.zeros(width, device=device) if self.bias is None else self.bias
        return layer_norm(input, weight, bias, self.eps)
