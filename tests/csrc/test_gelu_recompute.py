"""GELU's gradient from its input, with the output computed again in the same pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.exact_gelu import exact_derivative

ops = torch.ops.tempo


def pytorch(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_sizes(size: int, dtype: torch.dtype, approximate: str, generator: torch.Generator, three_way) -> None:
    x, grad = ((torch.randn(3, size, generator=generator) * 2).to(dtype) for _ in range(2))
    dx, y = ops.gelu_recompute_backward(grad, x, approximate)
    assert torch.equal(y, ops.gelu_forward(x, approximate, 1)[0])
    three_way(dx, pytorch(grad, x, approximate), exact_derivative(x, approximate) * grad.double(), 1e-6)
    over_grad, over_x = grad.clone(), x.clone()
    ops.gelu_recompute_backward_(over_grad, over_x, approximate)
    assert torch.equal(over_grad, dx)
    assert torch.equal(over_x, y)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_derivative_over_the_whole_range(approximate: str) -> None:
    x = torch.linspace(-14, 14, 1_000_001)
    dx, _ = ops.gelu_recompute_backward(torch.ones_like(x), x, approximate)
    error = (dx.double() - exact_derivative(x, approximate)).abs()
    assert error.max() < 5e-7
    # On the far left the gradient is small, and right to a few units of itself.
    left = x < -3.5
    assert (error[left] / exact_derivative(x, approximate)[left].abs().clamp(min=1e-30)).max() < 2e-5


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_every_bfloat16_value(approximate: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    dx, y = ops.gelu_recompute_backward(torch.ones_like(x), x, approximate)
    expected, _ = ops.gelu_forward(x, approximate, 1)
    same = (y == expected) | (y.isnan() & expected.isnan())
    assert same.all()
    assert dx[x.isnan()].isnan().all()
    finite = x.isfinite()
    exact = exact_derivative(x, approximate)[finite & (x.abs() < 1e18)]
    assert ((dx[finite & (x.abs() < 1e18)].double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()
    assert torch.equal(dx[finite & (x >= 1e18)], torch.ones_like(dx[finite & (x >= 1e18)]))
    assert torch.equal(dx[finite & (x <= -1e18)], torch.zeros_like(dx[finite & (x <= -1e18)]))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_special_values(dtype: torch.dtype, approximate: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=dtype)
    dx, y = ops.gelu_recompute_backward(torch.ones_like(x), x, approximate)
    assert dx[0].isnan()
    assert y[0].isnan()
    assert dx[1:].tolist() == [1.0, 0.0, 0.5, 0.5]
    assert y[1:].tolist() == [float("inf"), 0.0, 0.0, 0.0]
    assert torch.signbit(y[2:]).tolist() == [True, False, True]


def test_layouts_and_dtypes_that_have_no_kernel(generator: torch.Generator) -> None:
    base, grad = torch.randn(6, 10, generator=generator), torch.randn(10, 6, generator=generator)
    expected = ops.gelu_recompute_backward(grad, base.t().contiguous(), "none")
    for mine, other in zip(ops.gelu_recompute_backward(grad, base.t(), "none"), expected, strict=True):
        assert torch.equal(mine, other)
    over_grad, over_x = grad.clone(), base.clone().t()
    ops.gelu_recompute_backward_(over_grad, over_x, "none")
    # Handed to the reference, whose float32 is computed in float64.
    torch.testing.assert_close(over_grad, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(over_x, expected[1], rtol=1e-5, atol=1e-6)
    wide = torch.randn(5, dtype=torch.float64, generator=generator)
    dx, _ = ops.gelu_recompute_backward(torch.ones_like(wide), wide, "tanh")
    torch.testing.assert_close(dx, exact_derivative(wide, "tanh"))
    assert ops.gelu_recompute_backward(torch.empty(0, 3), torch.empty(0, 3), "none")[0].shape == (0, 3)


def test_does_not_depend_on_the_number_of_threads(threads, generator: torch.Generator) -> None:
    x, grad = (torch.randn(300_001, generator=generator) for _ in range(2))
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(ops.gelu_recompute_backward(grad, x, "none"))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
