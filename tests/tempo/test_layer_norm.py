from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tempo
from tempo.layer_norm import exact_columns, num_unsafe_columns
from tests.three_way import LOW_PRECISION, ODD_SIZES, assert_three_way

EPS = 1e-12


def run(norm, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    y = norm(x, weight, bias)
    return y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad)


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return tempo.layer_norm(x, weight, bias, EPS)


def theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), EPS)


def inputs(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(rows, width) * 2 + 0.5
    weight, bias = torch.rand(width) * 1.9 + 0.1, torch.randn(width) * 0.1
    # A gradient correlated with x_hat, as a trained network's is.
    grad = torch.randn(rows, width) + 0.5 * F.layer_norm(x, (width,))
    return x, weight, bias, grad


def in_double(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return run(theirs, *(t.double() for t in tensors))


@pytest.mark.parametrize("width", [w for w in ODD_SIZES if w > 1])
def test_fp32_agrees_with_float64(width: int) -> None:
    tensors = inputs(19, width)
    for mine, exact in zip(run(ours, *tensors), in_double(tensors), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("width", [33, 1024])
@pytest.mark.parametrize("weights_fp32", [False, True])
def test_16_bit_holds_the_three_way_rule(dtype: torch.dtype, width: int, weights_fp32: bool) -> None:
    x, weight, bias, grad = inputs(64, width)
    x, grad = x.to(dtype), grad.to(dtype)
    if not weights_fp32:
        weight, bias = weight.to(dtype), bias.to(dtype)
    exact = run(theirs, x.double(), weight.double(), bias.double(), grad.double())
    for mine, torchs, true in zip(run(ours, x, weight, bias, grad), run(theirs, x, weight, bias, grad), exact, strict=True):
        assert_three_way(mine, torchs, true, atol=2e-3 * true.abs().max().item())


def test_gradients_come_in_the_parameters_dtype() -> None:
    x, weight, bias, grad = inputs(4, 32)
    _, dx, dweight, dbias = run(ours, x.bfloat16(), weight, bias, grad.bfloat16())
    assert (dx.dtype, dweight.dtype, dbias.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("num_zero", [1, 8, 40, 64])
def test_gamma_zero_works_in_any_number_of_columns(num_zero: int) -> None:
    x, weight, bias, grad = inputs(32, 64)
    weight[:num_zero] = 0.0
    for mine, exact in zip(run(ours, x, weight, bias, grad), in_double((x, weight, bias, grad)), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_large_beta_over_gamma_keeps_x_hat(dtype: torch.dtype) -> None:
    x, weight, bias, grad = inputs(256, 64)
    weight[:8], bias[:8] = 1e-3, 0.1
    x, grad = x.to(dtype), grad.to(dtype)
    exact = run(theirs, x.double(), weight.double(), bias.double(), grad.double())
    mine = run(ours, x, weight, bias, grad)
    for got, true in zip(mine[1:3], exact[1:3], strict=True):
        assert (got.double() - true).norm() / true.norm() < 5e-3
    assert (mine[2][:8].double() - exact[2][:8]).norm() / exact[2][:8].norm() < 5e-3


def test_constant_gamma_does_not_shrink_the_choice() -> None:
    weight, bias = torch.ones(1024), torch.zeros(1024)
    assert exact_columns(weight, bias, torch.float32).shape == (16,)
    assert exact_columns(weight[:5], bias[:5], torch.float32).shape == (5,)
    weight[100:140] = 0.0
    columns = exact_columns(weight, bias, torch.float32)
    assert columns.tolist() == list(range(100, 140))
    assert num_unsafe_columns(weight, bias, torch.float32) == 40


@pytest.mark.parametrize("reference", ["", "reference_"])
def test_gamma_zero_in_more_columns_than_are_kept_stays_finite(reference: str) -> None:
    x, weight, bias, grad = inputs(16, 64)
    weight[:40] = 0.0
    columns = torch.arange(16)
    y, rstd, kept = getattr(torch.ops.tempo, f"{reference}layer_norm_forward")(x, weight, bias, EPS, columns)
    backward = getattr(torch.ops.tempo, f"{reference}layer_norm_backward")
    dx, dweight, dbias = backward(grad, y, rstd, weight, bias, columns, kept)
    _, exact_dx, exact_dweight, exact_dbias = in_double((x, weight, bias, grad))
    known = [*range(16), *range(40, 64)]
    torch.testing.assert_close(dx[:, known].double(), exact_dx[:, known], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dweight[known].double(), exact_dweight[known], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dbias.double(), exact_dbias, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(dx).all()
    assert (dweight[16:40] == 0).all()


def test_a_compiled_layer_with_gamma_zero_everywhere_stays_finite() -> None:
    norm = tempo.InplaceLayerNorm(64)
    torch.nn.init.zeros_(norm.weight)
    x = torch.randn(8, 64, requires_grad=True)
    torch.compile(norm, fullgraph=True)(x).square().sum().backward()
    assert (x.grad == 0).all()
    assert torch.isfinite(norm.weight.grad).all()


def test_subnormal_gamma_keeps_x_hat() -> None:
    x, weight, bias, grad = inputs(16, 32)
    weight[:3], bias[:3] = 1e-40, 0.0
    for mine, exact in zip(run(ours, x, weight, bias, grad)[1:], in_double((x, weight, bias, grad))[1:], strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


def test_float16_also_fears_a_small_gamma() -> None:
    weight, bias = torch.full((64,), 2.0**-11), torch.zeros(64)
    assert num_unsafe_columns(weight, bias, torch.float16) == 64
    assert num_unsafe_columns(weight, bias, torch.bfloat16) == 0


def test_more_than_65535_rows() -> None:
    x, weight, bias, grad = inputs(65_600, 8)
    mine, exact = run(ours, x, weight, bias, grad), in_double((x, weight, bias, grad))
    torch.testing.assert_close(mine[1][-80:].double(), exact[1][-80:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine[2].double(), exact[2], rtol=1e-4, atol=1e-1)


def test_non_contiguous_input_and_gradient() -> None:
    x, weight, bias, grad = inputs(24, 40)
    strided = (torch.stack([x, x], dim=-1)[..., 0], weight, bias, torch.stack([grad, grad], dim=-1)[..., 1])
    assert not strided[0].is_contiguous()
    for a, b in zip(run(ours, *strided), run(ours, x, weight, bias, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_what_it_keeps() -> None:
    norm = tempo.InplaceLayerNorm(1024)
    x = torch.randn(4, 128, 1024).bfloat16()
    rows = 4 * 128
    kept = tempo.saved_bytes(norm, x.requires_grad_())
    # y, rstd, x_hat of 16 columns, and which columns these are
    assert kept.total_bytes == rows * (2 * 1024 + 4 + 2 * 16) + 16 * 8


def test_gradcheck_with_a_zero_gamma() -> None:
    x, weight, bias = torch.randn(4, 20), torch.randn(20), torch.randn(20)
    weight[3] = 0.0
    tensors = tuple(t.double().requires_grad_() for t in (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *t: tempo.layer_norm(*t, 1e-5), tensors)


def test_frozen_parameters_get_no_gradient() -> None:
    norm = tempo.InplaceLayerNorm(8)
    norm.weight.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    norm(x).square().sum().backward()
    assert norm.weight.grad is None
    assert norm.bias.grad is not None
    assert x.grad is not None


def test_module_is_a_layer_norm_with_the_same_state() -> None:
    theirs_module = torch.nn.LayerNorm(12, eps=1e-12)
    torch.nn.init.normal_(theirs_module.weight)
    module = tempo.InplaceLayerNorm(12)
    module.load_state_dict(theirs_module.state_dict())
    assert isinstance(module, torch.nn.LayerNorm)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(module(x), theirs_module(x))
    assert tempo.InplaceLayerNorm(12, elementwise_affine=False)(x).shape == x.shape


def test_two_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        tempo.InplaceLayerNorm([3, 4])


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[4\]"):
        tempo.layer_norm(torch.ones(2, 4), torch.ones(3), torch.ones(4))


@pytest.mark.parametrize("x", [torch.ones(2, 4, dtype=torch.int64), torch.tensor(1.0), torch.ones(3, 0)])
def test_inputs_that_cannot_be_normalised_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"layer_norm needs"):
        tempo.layer_norm(x, torch.ones(x.shape[-1:]), torch.ones(x.shape[-1:]))


def test_no_rows_and_one_column() -> None:
    for shape in ((0, 4), (2, 0, 4), (3, 1)):
        x, weight, bias = torch.randn(shape), torch.rand(shape[-1]), torch.randn(shape[-1])
        y, dx, dweight, dbias = run(ours, x, weight, bias, torch.ones(shape))
        torch.testing.assert_close(y, F.layer_norm(x, shape[-1:], weight, bias, EPS))
        assert dx.shape == x.shape
        assert (dx == 0).all()
        assert (dweight == 0).all()
        assert (dbias == x.numel() // shape[-1]).all()


def test_without_bias_or_without_parameters_it_is_the_plain_layer_norm() -> None:
    x = torch.randn(3, 5, 20, dtype=torch.float64, requires_grad=True)
    for options in ({"bias": False}, {"elementwise_affine": False}):
        module = tempo.InplaceLayerNorm(20, **options).double()
        expected = F.layer_norm(x, (20,), module.weight, module.bias, 1e-12)
        torch.testing.assert_close(module(x), expected)
        grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (module(x), expected)]
        torch.testing.assert_close(*grads)


def test_an_output_that_is_overwritten_is_an_error_and_so_is_a_second_derivative() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    y = tempo.InplaceLayerNorm(8)(x)
    (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_compiled_equals_eager() -> None:
    x, weight, bias, grad = inputs(6, 24)
    eager = run(ours, x, weight, bias, grad)
    compiled = run(torch.compile(ours, fullgraph=True), x, weight, bias, grad)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b)


def test_opcheck() -> None:
    x, weight, bias, grad = inputs(6, 24)
    columns = exact_columns(weight, bias, x.dtype)
    torch.library.opcheck(torch.ops.tempo.layer_norm_forward.default, (x, weight, bias, EPS, columns))
    y, rstd, kept = torch.ops.tempo.layer_norm_forward(x, weight, bias, EPS, columns)
    torch.library.opcheck(torch.ops.tempo.layer_norm_backward.default, (grad, y, rstd, weight, bias, columns, kept))
