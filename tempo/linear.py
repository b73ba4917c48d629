"""A linear layer that computes in its input's dtype and keeps only the input and the parameter itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _CastingLinear(torch.autograd.Function):
    """Casts the weight again in the backward pass: that costs one read of it, and saves a 16-bit copy per micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        x_2d = x.reshape(-1, x.shape[-1])
        y_2d = F.linear(x_2d, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        # Not a view for autograd, which forbids to write over one that a Function returns (in-place GELU comes next).
        return torch.ops.aten._unsafe_view(y_2d, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_2d = grad.reshape(-1, grad.shape[-1])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = (grad_2d @ weight.to(grad.dtype)).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = (grad_2d.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            dbias = grad_2d.sum(0, dtype=ctx.bias_dtype)
        return dx, dweight, dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in the dtype of `x`, whatever the parameters' dtype.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], any floating dtype; its gradient has the same.
        bias: [out_features] or None.

    Returns:
        [..., out_features], dtype of `x`.
    """
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return _CastingLinear.apply(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` for float32 parameters and activations of any dtype: no autocast, no kept copy of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
