from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tempo


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_fp32_parameters_with_16_bit_input(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layer = tempo.Linear(8, 6)
    x = torch.randn(shape).to(dtype).requires_grad_()
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (dtype, dtype, torch.float32)
    exact_x, weight, bias = (t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias))
    exact = F.linear(exact_x, weight, bias)
    exact.backward(grad.double())
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2)
    for ours, true in ((x, exact_x), (layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(ours.grad.double(), true.grad, rtol=3e-2, atol=3e-2)


def test_no_cast_copy_of_the_weight_is_kept() -> None:
    layer = tempo.Linear(64, 64)
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    assert tempo.saved_bytes(layer, x).total_bytes == x.numel() * 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (8,)])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_it_returns_may_be_overwritten(shape: tuple[int, ...], bias: bool, compiled: bool) -> None:
    layer = tempo.Linear(8, 6, bias=bias)
    x = torch.randn(shape).bfloat16().requires_grad_()

    def f(x: Tensor) -> Tensor:
        return tempo.gelu(layer(x), inplace=True)

    y = torch.compile(f, fullgraph=True)(x) if compiled else f(x)
    expected = F.gelu(layer(x))
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    grads = [torch.autograd.grad(out.float().sum(), (x, layer.weight)) for out in (y, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_a_second_derivative_is_refused() -> None:
    layer = tempo.Linear(4, 3)
    x = torch.randn(2, 4).bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_frozen_parameters_get_no_gradient() -> None:
    layer = tempo.Linear(4, 3).requires_grad_(False)
    x = torch.randn(2, 4).bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is layer.bias.grad is None


def test_same_dtype_is_the_plain_linear() -> None:
    layer = tempo.Linear(4, 3)
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_saved_bytes_counts_a_shared_storage_once() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    kept = tempo.saved_bytes(lambda t: torch.sigmoid(t).view(20, 5).t() @ torch.ones(20, 2), x)
    assert kept.total_bytes == 100 * 4 + 20 * 2 * 4
    assert "total" in str(kept)


def test_kernels_summary_and_require() -> None:
    summary = tempo.kernels.summary()
    assert set(summary) >= {"gelu_forward", "layer_norm_backward", "dropout", "softmax_dropout_forward"}
    if "reference" in summary.values():
        with pytest.raises(ValueError, match=r"tempo\.kernels"):
            tempo.kernels.require("cpu")
    else:
        tempo.kernels.require("cpu")
