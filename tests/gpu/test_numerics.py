"""How near the kernels come on the device itself, whose fast square roots and exponentials no emulation has; special values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tempo
from tempo.layer_norm import exact_columns
from tests.exact_gelu import X_MIN, exact_gelu
from tests.gpu.op_cases import EPS, ops

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_form = pytest.mark.parametrize("approximate", ["none", "tanh"])
# Half a spacing relative to the value and the error before rounding, a twentieth of it; and what is lost next to 0.
ROUNDING = {torch.float16: (1.05 * 2.0**-11, 2.0**-24), torch.bfloat16: (1.05 * 2.0**-8, 1e-36)}


def exact_gradient(x: Tensor, grad: Tensor, approximate: str) -> Tensor:
    leaf = x.double().requires_grad_()
    (result,) = torch.autograd.grad(F.gelu(leaf, approximate=approximate), leaf, grad.double())
    return result


def all_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)


@each_form
def test_float32_gelu_and_its_derivative(approximate: str, device: torch.device) -> None:
    """Half a unit near the minimum, where the derivative needs it; the derivative within what y's rounding costs."""
    x = torch.linspace(-10, 10, 1_000_001, device=device)
    y, side = ops.gelu_forward(x, approximate, 1)
    error = (y.double() - exact_gelu(x, approximate)).abs()
    distance = (x - X_MIN[approximate]).abs()
    assert error[distance < 0.1].max() < 0.7 * 2.0**-26
    relative = error / exact_gelu(x, approximate).abs().clamp(min=1e-30)
    assert relative[x > -3].max() < 2e-6
    assert relative.max() < (2e-5 if approximate == "none" else 6e-5)
    ones = torch.ones_like(x)
    error = (ops.gelu_backward(ones, y, side, approximate, 1) - exact_gradient(x, ones, approximate)).abs()
    assert error.max() < 6e-5
    assert error[distance > 0.02].max() < 4e-6
    weights = torch.exp(-0.5 * x.double() ** 2)
    assert ((weights * error**2).sum() / weights.sum()).sqrt() < 8e-7


@each_form
@pytest.mark.parametrize("side_bits", [1, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 8e-3), (torch.bfloat16, 1.8e-2)])
def test_gelu_of_every_16_bit_value(
    approximate: str, side_bits: int, dtype: torch.dtype, bound: float, device: torch.device
) -> None:
    x = all_values(dtype, device)
    y, side = ops.gelu_forward(x, approximate, side_bits)
    finite, exact = x.isfinite(), exact_gelu(x, approximate)
    relative, absolute = ROUNDING[dtype]
    assert ((y[finite].double() - exact[finite]).abs() <= relative * exact[finite].abs() + absolute).all()
    assert torch.equal(y.isnan(), x.isnan())
    ones = torch.ones_like(x)
    dx = ops.gelu_backward(ones, y, side, approximate, side_bits)
    assert torch.equal(dx.isnan(), x.isnan() | (x.isinf() & y.isnan()))
    assert (dx - exact_gradient(x, ones, approximate))[finite].abs().max() < bound


@each_form
@pytest.mark.parametrize(
    ("dtype", "side_bits", "bound"),
    [(torch.float16, 1, 8e-4), (torch.float16, 4, 2.6e-4), (torch.bfloat16, 1, 3.1e-3), (torch.bfloat16, 4, 1.8e-3)],
)
def test_relative_error_of_the_16_bit_gradient(
    approximate: str, dtype: torch.dtype, side_bits: int, bound: float, device: torch.device
) -> None:
    x, grad = (torch.randn(1_000_000).to(dtype).to(device) for _ in range(2))
    y, side = ops.gelu_forward(x, approximate, side_bits)
    exact = exact_gradient(x, grad, approximate)
    dx = ops.gelu_backward(grad, y, side, approximate, side_bits)
    assert (dx - exact).norm() / exact.norm() < bound


@each_dtype
@each_form
@pytest.mark.parametrize("side_bits", [1, 4])
def test_gelu_of_special_values(dtype: torch.dtype, approximate: str, side_bits: int, device: torch.device) -> None:
    x = torch.tensor([float("nan"), math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, -3e38, -50.0, 50.0]).to(dtype).to(device)
    y, side = ops.gelu_forward(x, approximate, side_bits)
    assert y.isnan().tolist() == [True] + [False] * 9
    assert y[1].item() == math.inf
    assert (y[2:5] == 0).all()
    assert torch.signbit(y[2:5]).tolist() == [True, False, True]
    dx = ops.gelu_backward(torch.ones_like(x), y, side, approximate, side_bits).float().cpu()
    assert math.isnan(dx[0].item())
    torch.testing.assert_close(dx[1:], torch.tensor([1.0, 0.0, 0.5, 0.5, 0.5, 1.0, 0.0, 0.0, 1.0]), atol=3e-3, rtol=0)


@each_dtype
def test_layer_norm_keeps_nan_and_infinity_in_their_rows(dtype: torch.dtype, device: torch.device) -> None:
    weight, bias = torch.rand(50, device=device) + 0.1, torch.randn(50, device=device)
    clean = torch.randn(4, 50).to(dtype).to(device)
    x = clean.clone()
    x[1, 3], x[2, 7] = float("nan"), math.inf
    columns, results = exact_columns(weight, bias, dtype), []
    for value in (x, clean):
        y, rstd, exact = ops.layer_norm_forward(value, weight, bias, EPS, columns)
        results.append((y, ops.layer_norm_backward(torch.ones_like(y), y, rstd, weight, bias, columns, exact)[0]))
    (y, dx), (y_clean, dx_clean) = results
    assert y[1:3].isnan().all()
    assert dx[1:3].isnan().all()
    assert torch.equal(y[[0, 3]], y_clean[[0, 3]])
    assert torch.equal(dx[[0, 3]], dx_clean[[0, 3]])


@each_dtype
@pytest.mark.parametrize("num_zero", [1, 8, 16])
def test_layer_norm_with_gamma_zero_or_tiny(dtype: torch.dtype, num_zero: int, device: torch.device) -> None:
    """A GPU keeps x_hat of the 16 worst columns."""
    weight, bias = torch.rand(256) + 0.5, torch.randn(256) * 0.1
    weight[:num_zero:2], weight[1:num_zero:2], bias[:num_zero] = 0.0, 1e-3, 1.0
    x, grad = (torch.randn(100, 256).to(dtype) for _ in range(2))
    results = []
    for function, kind in ((tempo.layer_norm, dtype), (lambda x, w, b: F.layer_norm(x, (256,), w, b, EPS), torch.float64)):
        wide = torch.float64 if kind == torch.float64 else torch.float32
        leaves = [x.to(kind).to(device), weight.to(wide).to(device), bias.to(wide).to(device)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        results.append(torch.autograd.grad(function(*leaves), leaves, grad.to(kind).to(device)))
    for mine, exact in zip(*results, strict=True):
        error = (mine.double() - exact).norm() / exact.norm()
        assert error < (1e-5 if dtype == torch.float32 else 6e-3)


@each_dtype
def test_attention_with_nothing_to_attend_to_is_uniform(dtype: torch.dtype, device: torch.device) -> None:
    scores = (torch.randn(2, 2, 3, 20) * 50).to(dtype).to(device)
    scores[1, 0, 0, 4] = -math.inf
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool, device=device)
    mask[0] = False
    ops.softmax_dropout_forward(scores, mask, 1.0, 0.0, tempo.make_rng(1, device=device), 0, False)
    torch.testing.assert_close(scores[0].float(), torch.full((2, 3, 20), 0.05, device=device), rtol=2**-8, atol=0.0)
    assert scores.isfinite().all()
    assert scores[1, 0, 0, 4] == 0


@each_dtype
def test_a_dropped_nan_or_infinity_is_zero_and_a_kept_one_stays(dtype: torch.dtype, device: torch.device) -> None:
    rng = tempo.make_rng(3, device=device)
    keep = tempo.keep_mask((4, 100), 0.5, rng, 0)
    for value in (float("nan"), math.inf, -math.inf):
        y = ops.dropout(torch.full((4, 100), value, dtype=dtype, device=device), 0.5, rng, 0)
        assert (y[~keep] == 0).all()
        torch.testing.assert_close(y[keep], torch.full_like(y[keep], value), equal_nan=True)
    y = ops.dropout(torch.full((4, 100), -0.0, dtype=dtype, device=device), 0.5, rng, 0)
    assert torch.equal(torch.signbit(y), keep)
