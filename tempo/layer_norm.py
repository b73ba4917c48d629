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


def _min_gamma(dtype: torch.dtype) -> float:
    """The least |gamma| whose y does not lie among the dtype's subnormal numbers.

    2^-10 for float16, whose y has too few significant bits below it; for the other dtypes next to nothing.
    """
    return 16.0 * torch.finfo(dtype).tiny


def _ratio(weight: Tensor, bias: Tensor, min_gamma: float) -> Tensor:
    """|beta / gamma| per column; infinite where |gamma| is 0 or below `min_gamma`."""
    gamma, beta = weight.detach().double().abs(), bias.detach().double().abs()
    return torch.where(gamma < min_gamma, torch.inf, beta / gamma)


def num_unsafe_columns(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the columns whose x_hat cannot be rebuilt well from y of `dtype`.

    On a GPU and under torch.compile only the 16 worst columns keep x_hat (choosing their number would stop the stream every
    call); more unsafe columns than that lose accuracy, and a trainer should report them: with gamma = 0 such a column gets
    gamma's gradient 0 and the part of dx that its x_hat gives is missing. Elsewhere every unsafe column keeps it.

    Returns:
        int64 scalar tensor.
    """
    return (_ratio(weight, bias, _min_gamma(dtype)) > _UNSAFE_RATIO).sum()


def _choose_columns(weight: Tensor, bias: Tensor, min_gamma: float, all_unsafe: bool) -> Tensor:
    ratio = _ratio(weight, bias, min_gamma)
    num_columns = min(NUM_EXACT_COLUMNS, ratio.numel())
    if all_unsafe:
        num_columns = max(num_columns, int((ratio > _UNSAFE_RATIO).sum()))
    return ratio.topk(num_columns).indices.sort().values


def _choose_columns_fake(weight: Tensor, bias: Tensor, min_gamma: float, all_unsafe: bool) -> Tensor:
    num_columns = torch.library.get_ctx().new_dynamic_size() if all_unsafe else min(NUM_EXACT_COLUMNS, weight.numel())
    return weight.new_empty(num_columns, dtype=torch.int64)


def exact_columns(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Choose the columns that keep x_hat: the 16 worst, and on a CPU all unsafe ones; int64 [K]."""
    all_unsafe = weight.device.type == "cpu" and not torch.compiler.is_compiling()
    return torch.ops.tempo.layer_norm_exact_columns(weight.detach(), bias.detach(), _min_gamma(dtype), all_unsafe)


def normalise(
    x: Tensor, dtype: torch.dtype, weight: Tensor, bias: Tensor, eps: float, columns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and exact_x_hat in `dtype` and rstd, of a contiguous `x` in the dtype of the arithmetic."""
    # In the shape of x throughout: autograd forbids to write over a view that a Function returns.
    centred = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    x_hat = centred.mul_(rstd)
    y = torch.addcmul(bias.to(x.dtype), x_hat, weight.to(x.dtype)).to(dtype)
    return y, rstd.flatten(), x_hat[..., columns].reshape(-1, columns.shape[0]).to(dtype)


def empty_outputs(x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `normalise` does, of unknown values."""
    rows = x.numel() // x.shape[-1]
    rstd = x.new_empty(rows, dtype=arithmetic_dtype(x.dtype))
    return x.new_empty(x.shape), rstd, x.new_empty(rows, columns.shape[0])


def gradients(
    grad: Tensor, y: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, columns: Tensor, exact_x_hat: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x [R, H], weight and bias [H], all in the dtype of the arithmetic."""
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
    dx_RH = (dx_hat_RH - mean_dx_hat - x_hat_RH * mean_dx_hat_x_hat) * rstd[:, None]
    return dx_RH, (dy_RH * x_hat_RH).sum(0), dy_RH.sum(0)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return normalise(x.contiguous().to(arithmetic_dtype(x.dtype)), x.dtype, weight, bias, eps, columns)


def _backward(
    grad: Tensor, y: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, columns: Tensor, exact_x_hat: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx_RH, dweight, dbias = gradients(grad, y, rstd, weight, bias, columns, exact_x_hat)
    return dx_RH.to(grad.dtype).view(grad.shape), dweight.to(weight.dtype), dbias.to(bias.dtype)


define(
    "layer_norm_exact_columns(Tensor weight, Tensor bias, float min_gamma, bool all_unsafe) -> Tensor",
    _choose_columns,
    _choose_columns_fake,
)
define(
    "layer_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps, Tensor exact_columns) -> (Tensor, Tensor, Tensor)",
    _forward,
    lambda x, weight, bias, eps, columns: empty_outputs(x, columns),
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


def check_parameters(name: str, x: Tensor, **parameters: Tensor) -> None:
    """Refuse an `x` that cannot be normalised by the function `name`, and parameters that are not [H].

    Raises:
        ValueError: says which.
    """
    if not x.is_floating_point():
        raise ValueError(f"{name} needs a floating-point tensor, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} needs a last dimension with at least one element, got shape {list(x.shape)}")
    if any(parameter.shape != x.shape[-1:] for parameter in parameters.values()):
        names, shapes = " and ".join(parameters), " and ".join(str(list(p.shape)) for p in parameters.values())
        raise ValueError(f"{names} must be [{x.shape[-1]}], the last dimension of x; got {shapes}")


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
    check_parameters("layer_norm", x, weight=weight, bias=bias)
    return _LayerNorm.apply(x, weight, bias, eps)


class OneDimensionalLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over one dimension: what the layers here share.

    Args:
        normalized_shape: H, or a sequence of that one number.
        eps: added to the variance.
    """

    def __init__(self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-12, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps=eps, **kwargs)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"{type(self).__name__} normalises one dimension, got {list(self.normalized_shape)}")

    def affine(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return gamma and beta; ones and zeros where the module has none."""
        width = self.normalized_shape[0]
        weight = torch.ones(width, device=device) if self.weight is None else self.weight
        bias = torch.zeros(width, device=device) if self.bias is None else self.bias
        return weight, bias


class InplaceLayerNorm(OneDimensionalLayerNorm):
    """`nn.LayerNorm` over one dimension that keeps its output for the backward pass; the same parameters and state_dict.

    Args:
        normalized_shape: H, or a sequence of that one number.
        eps: added to the variance.
    """

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, *self.affine(input.device), self.eps)
