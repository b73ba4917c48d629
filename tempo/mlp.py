"""The MLP of a transformer as one operation that keeps its input and what enters GELU, nothing else.

y = GELU(pre), pre = x W_in^T + b_in, out = y W_out^T + b_out. The backward pass needs y once, for the gradient of W_out: it is
computed again from `pre` in the pass that computes GELU's gradient, so neither y nor a side bit is kept, and both are exact.

Shapes: R rows (all leading dimensions), H in and out, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tempo._library import cast_for_matmul
from tempo.gelu import COEFFICIENTS


def _backward_runs_once() -> bool:
    """Whether the running backward pass frees what was kept; unknown counts as no."""
    if torch.compiler.is_compiling():
        return False
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps_graph is not None and not keeps_graph()


def _gelu_gradient_and_output(dy_RI: Tensor, pre_RI: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of `pre_RI` and GELU of it: over `dy_RI` and `pre_RI` where no other backward pass can come."""
    if _backward_runs_once():
        torch.ops.tempo.gelu_recompute_backward_(dy_RI, pre_RI, approximate)
        return dy_RI, pre_RI
    return torch.ops.tempo.gelu_recompute_backward(dy_RI, pre_RI, approximate)


class _Mlp(torch.autograd.Function):
    """Casts parameters to the activations' dtype, and again in the backward pass, as `tempo.linear` does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_in: Tensor,
        bias_in: Tensor | None,
        weight_out: Tensor,
        bias_out: Tensor | None,
        approximate: str,
    ) -> Tensor:
        def cast(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else parameter.to(x.dtype)

        x_RH = x.reshape(-1, x.shape[-1])
        pre_RI = F.linear(x_RH, weight_in.to(x.dtype), cast(bias_in))
        y_RI, _ = torch.ops.tempo.gelu_forward(pre_RI, approximate, 1)
        out_RH = F.linear(y_RI, weight_out.to(x.dtype), cast(bias_out))
        ctx.save_for_backward(x, pre_RI, weight_in, weight_out)
        ctx.approximate = approximate
        ctx.bias_dtypes = tuple(None if bias is None else bias.dtype for bias in (bias_in, bias_out))
        return torch.ops.aten._unsafe_view(out_RH, (*x.shape[:-1], weight_out.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, pre_RI, weight_in, weight_out = ctx.saved_tensors
        needs_x, needs_weight_in, needs_bias_in, needs_weight_out, needs_bias_out, _ = ctx.needs_input_grad
        x_RH, grad_RH = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        dx = dweight_in = dbias_in = dweight_out = dbias_out = None
        y_RI = None
        if needs_x or needs_weight_in or needs_bias_in:
            dpre_RI, y_RI = _gelu_gradient_and_output(grad_RH @ weight_out.to(grad.dtype), pre_RI, ctx.approximate)
            if needs_x:
                dx = (dpre_RI @ weight_in.to(grad.dtype)).view(x.shape)
            if needs_weight_in:
                dweight_in = (dpre_RI.t() @ x_RH).to(weight_in.dtype)
            if needs_bias_in and ctx.bias_dtypes[0] is not None:
                dbias_in = dpre_RI.sum(0, dtype=ctx.bias_dtypes[0])
        elif needs_weight_out:
            y_RI, _ = torch.ops.tempo.gelu_forward(pre_RI, ctx.approximate, 1)
        if needs_weight_out and y_RI is not None:
            dweight_out = (grad_RH.t() @ y_RI).to(weight_out.dtype)
        if needs_bias_out and ctx.bias_dtypes[1] is not None:
            dbias_out = grad_RH.sum(0, dtype=ctx.bias_dtypes[1])
        return dx, dweight_in, dbias_in, dweight_out, dbias_out, None


def mlp(
    x: Tensor,
    weight_in: Tensor,
    bias_in: Tensor | None,
    weight_out: Tensor,
    bias_out: Tensor | None,
    approximate: str = "none",
) -> Tensor:
    """Return Linear(GELU(Linear(x))) in the dtype of `x`, whatever the parameters' dtype.

    Args:
        x: [..., H], floating dtype.
        weight_in: [I, H], floating dtype; its gradient has the same.
        bias_in: [I] or None.
        weight_out: [O, I].
        bias_out: [O] or None.
        approximate: "none" for x * Phi(x), "tanh" for the tanh form.

    Returns:
        [..., O], dtype of `x` (under autocast, its dtype). Kept for the backward pass: `x`, and one [..., I] in the dtype of `x`.

    Raises:
        ValueError: shapes that do not fit, an `x` that is not floating, or an unknown `approximate`.
    """
    if approximate not in COEFFICIENTS:
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"mlp needs a floating-point tensor [..., H], got {x.dtype} {list(x.shape)}")
    fits = weight_in.dim() == weight_out.dim() == 2
    fits = fits and weight_in.shape[1] == x.shape[-1] and weight_out.shape[1] == weight_in.shape[0]
    fits = fits and (bias_in is None or bias_in.shape == weight_in.shape[:1])
    fits = fits and (bias_out is None or bias_out.shape == weight_out.shape[:1])
    if not fits:
        given = {"weight_in": weight_in, "bias_in": bias_in, "weight_out": weight_out, "bias_out": bias_out}
        shapes = ", ".join(f"{name} {None if t is None else list(t.shape)}" for name, t in given.items())
        raise ValueError(
            f"mlp of x [..., {x.shape[-1]}] needs weight_in [I, {x.shape[-1]}], bias_in [I], weight_out [O, I], bias_out [O];"
            f" got {shapes}"
        )
    (x,) = cast_for_matmul(x)
    return _Mlp.apply(x, weight_in, bias_in, weight_out, bias_out, approximate)


class MLP(nn.Module):
    """Linear, GELU, Linear as one layer that keeps its input and what enters GELU.

    Args:
        hidden_size: H, the width of the input and of the output.
        intermediate_size: I.
        approximate: "none" or "tanh", as in `torch.nn.GELU`.
        bias: whether the linear layers add a bias.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, approximate: str = "none", bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__()
        if approximate not in COEFFICIENTS:
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        self.dense_in = nn.Linear(hidden_size, intermediate_size, bias=bias, **kwargs)
        self.dense_out = nn.Linear(intermediate_size, hidden_size, bias=bias, **kwargs)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        dense_in, dense_out = self.dense_in, self.dense_out
        return mlp(x, dense_in.weight, dense_in.bias, dense_out.weight, dense_out.bias, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
