from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tempo
from tempo.gelu_coefficients import COEFFICIENTS
from tests.three_way import ODD_SIZES

FORMS = ["none", "tanh"]


def exact_derivative(x: Tensor, approximate: str) -> Tensor:
    x = x.double().requires_grad_()
    (grad,) = torch.autograd.grad(F.gelu(x, approximate=approximate).sum(), x)
    return grad


def our_derivative(x: Tensor, approximate: str, side_bits: int = 1) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(tempo.gelu(x, approximate, side_bits).sum(), x)
    return grad


def all_16_bit(dtype: torch.dtype) -> Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[torch.isfinite(values) & (values.abs() <= 10)]


@pytest.mark.parametrize("approximate", FORMS)
def test_fp32_derivative_from_y_is_within_the_rounding_limit(approximate: str) -> None:
    x = torch.linspace(-10, 10, 2_000_001)
    error = our_derivative(x, approximate).double() - exact_derivative(x, approximate)
    assert error.abs().max() < 5.5e-5  # 4.7e-5 erf, 5.0e-5 tanh; rounding y alone costs 3.9e-5
    weight = torch.exp(-0.5 * x.double() ** 2)
    assert (weight * error**2).sum().div(weight.sum()).sqrt() < 5e-7


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize(("dtype", "bound_1", "bound_4"), [(torch.bfloat16, 1.6e-2, 5e-3), (torch.float16, 7.5e-3, 8e-4)])
def test_16_bit_derivative_over_every_input(approximate: str, dtype: torch.dtype, bound_1: float, bound_4: float) -> None:
    x = all_16_bit(dtype)
    exact = exact_derivative(x, approximate)
    for side_bits, bound in ((1, bound_1), (4, bound_4)):
        assert (our_derivative(x, approximate, side_bits).double() - exact).abs().max() < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1.75e-3), (torch.float16, 2.4e-4)])
def test_four_bits_are_as_good_as_the_exact_derivative(dtype: torch.dtype, bound: float) -> None:
    x, g = torch.randn(400_000).to(dtype), torch.randn(400_000).to(dtype)
    exact = g.double() * exact_derivative(x, "none")
    x.requires_grad_()
    (dx,) = torch.autograd.grad(tempo.gelu(x, "none", side_bits=4), x, g)
    relative = ((dx.double() - exact).norm() / exact.norm()).item()
    rounding_alone = ((exact.to(dtype).double() - exact).norm() / exact.norm()).item()
    assert relative < bound
    assert relative < 1.15 * rounding_alone


@pytest.mark.parametrize("approximate", FORMS)
def test_forward_is_right_to_half_a_unit_near_the_minimum(approximate: str) -> None:
    x = torch.linspace(-0.9, -0.6, 200_001)
    exact = F.gelu(x.double(), approximate=approximate)
    unit = 2.0**-26  # the spacing of float32 in [0.125, 0.25)
    # 0.501 for the reference, 0.55 for the float32 arithmetic of the kernels; F.gelu has 5 to 8.
    assert ((tempo.gelu(x, approximate).double() - exact).abs() / unit).max() < 0.6


@pytest.mark.parametrize("approximate", FORMS)
def test_the_coefficients_name_the_true_minimum(approximate: str) -> None:
    c = COEFFICIENTS[approximate]
    x_min = torch.tensor(c["x_min"], dtype=torch.float64)
    assert abs(exact_derivative(x_min, approximate).item()) < 1e-14
    y_min = F.gelu(x_min, approximate=approximate).item()
    assert abs(c["y_min_high"] + c["y_min_low"] - y_min) < 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_special_values(dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, -60.0, torch.finfo(dtype).max, torch.finfo(dtype).min]).to(dtype)
    for approximate in FORMS:
        for side_bits in (1, 4):
            y = tempo.gelu(x, approximate, side_bits)
            grad = our_derivative(x, approximate, side_bits)
            assert y.isnan().tolist() == [True] + [False] * 7
            assert grad.isnan().tolist() == [True] + [False] * 7
            assert y[1:].tolist() == [math.inf, 0.0, 0.0, 0.0, 0.0, torch.finfo(dtype).max, 0.0]
            torch.testing.assert_close(grad[1:], torch.tensor([1, 0, 0.5, 0.5, 0, 1, 0]).to(dtype), atol=2e-4, rtol=0)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_derivative_is_small_and_has_the_right_sign_beside_the_minimum(approximate: str, dtype: torch.dtype) -> None:
    x_min = torch.tensor(COEFFICIENTS[approximate]["x_min"]).to(dtype)
    below = torch.nextafter(x_min, torch.tensor(-1.0).to(dtype))
    above = torch.nextafter(x_min, torch.tensor(0.0).to(dtype))
    for side_bits in (1, 4):
        grad = our_derivative(torch.stack([below, x_min, above]), approximate, side_bits)
        assert grad[0] <= 0 <= grad[2]
        assert (grad.double().abs() <= {torch.float32: 5e-5, torch.float16: 7.5e-3, torch.bfloat16: 1.6e-2}[dtype]).all()


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_least_y_itself_has_derivative_zero(approximate: str, dtype: torch.dtype) -> None:
    c = COEFFICIENTS[approximate]
    # The first value of the dtype at or below y_min: y - y_min is then not positive.
    y = torch.tensor([c["y_min_high"] + c["y_min_low"]]).to(dtype)
    while y.double() > c["y_min_high"] + c["y_min_low"]:
        y = torch.nextafter(y, torch.tensor(-1.0).to(dtype))
    for side in (0, 1):
        grad = torch.ops.tempo.gelu_backward(torch.ones_like(y), y, torch.tensor([side], dtype=torch.uint8), approximate, 1)
        assert abs(grad.item()) < 1e-3


def test_side_is_one_bit_or_four_in_the_stated_order() -> None:
    x = torch.tensor([-3.0, 1.0, -3.0, 2.0, 0.0, -3.0, -3.0, -3.0, 5.0, -3.0])
    _, side = torch.ops.tempo.gelu_forward(x, "none", 1)
    assert side.tolist() == [0b00011010, 0b00000001]
    _, side = torch.ops.tempo.gelu_forward(x, "none", 4)
    assert side.tolist() == [0x80, 0x80, 0x08, 0x00, 0x08]


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("side_bits", [1, 4])
def test_it_keeps_its_output_and_the_side_bits_only(size: int, side_bits: int) -> None:
    x = torch.randn(3, size).bfloat16().requires_grad_()
    kept = tempo.saved_bytes(lambda t: tempo.gelu(t, side_bits=side_bits), x)
    assert kept.total_bytes == 2 * 3 * size + -(-3 * size * side_bits // 8)


@pytest.mark.parametrize("approximate", FORMS)
def test_gradcheck(approximate: str) -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: tempo.gelu(t, approximate), (x,))
    assert torch.autograd.gradcheck(lambda t: tempo.gelu(t * 1.0, approximate, 4, inplace=True), (x,))


def test_inplace_overwrites_its_input_and_gives_the_same_gradient() -> None:
    x = torch.randn(4, 9, requires_grad=True)
    hidden = x * 2.0
    y = tempo.gelu(hidden, inplace=True)
    assert y.data_ptr() == hidden.data_ptr()
    y.sum().backward()
    expected = 2.0 * our_derivative(x.detach() * 2.0, "none")
    torch.testing.assert_close(x.grad, expected)


def test_inplace_on_a_tensor_that_something_else_needs_is_an_error() -> None:
    x = torch.randn(4, requires_grad=True)
    hidden = torch.sigmoid(x)  # keeps its output
    y = tempo.InplaceGelu()(hidden)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_leaf_is_refused_by_the_function_and_spared_by_the_module() -> None:
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(ValueError, match="inplace=False"):
        tempo.gelu(x, inplace=True)
    before = x.detach().clone()
    tempo.InplaceGelu()(x).sum().backward()
    assert torch.equal(x.detach(), before)
    assert x.grad is not None


def test_compiled_equals_eager_in_place_or_not() -> None:
    def f(x: Tensor) -> Tensor:
        return tempo.gelu(x * 1.5, inplace=True) + tempo.gelu(x, "tanh", 4)

    x = torch.randn(8, 33, requires_grad=True)
    eager, compiled = f(x), torch.compile(f, fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager)
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (eager, compiled)]
    torch.testing.assert_close(grads[1], grads[0])


def test_non_contiguous_input_and_gradient() -> None:
    base = torch.randn(6, 10, requires_grad=True)
    y = tempo.gelu(base.t())
    (grad,) = torch.autograd.grad(y, base, torch.ones(6, 10).t())
    torch.testing.assert_close(grad, our_derivative(base.detach(), "none"))


def test_inplace_never_writes_before_it_refuses() -> None:
    leaf = torch.randn(4, 6, requires_grad=True)
    narrow = torch.randn(1, 6)
    for x in (leaf, leaf[1:], narrow.expand(3, 6), torch.randn(8).as_strided((4, 3), (1, 2))):
        before = x.detach().clone()
        with pytest.raises(ValueError, match="inplace=False"):
            tempo.gelu(x, inplace=True)
        assert torch.equal(x.detach(), before)
        # The module writes elsewhere.
        torch.testing.assert_close(tempo.InplaceGelu()(x), F.gelu(x))
        assert torch.equal(x.detach(), before)


def test_inplace_on_a_view_and_on_a_transposed_tensor() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def on_rows(x: Tensor) -> Tensor:
        hidden = x * 2.0
        tempo.gelu(hidden[1:3], inplace=True)
        return hidden * 1.0

    assert torch.autograd.gradcheck(on_rows, (x,))
    assert torch.autograd.gradcheck(lambda x: tempo.gelu((x * 2.0).t(), inplace=True), (x,))
    strided = torch.randn(6, 10)[:, ::2]
    expected = F.gelu(strided)
    torch.testing.assert_close(tempo.gelu(strided, inplace=True), expected)


def test_a_result_that_is_overwritten_later_is_an_error() -> None:
    y = tempo.gelu(torch.randn(4, requires_grad=True) * 1.0, inplace=True)
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_compiled_inplace_overwrites_its_input_too() -> None:
    def f(x: Tensor) -> Tensor:
        hidden = x * 1.5
        tempo.gelu(hidden, inplace=True)
        return hidden * 1.0

    x = torch.randn(8, 33, requires_grad=True)
    eager, compiled = f(x), torch.compile(f, fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (eager, compiled)]
    torch.testing.assert_close(grads[1], grads[0])
    # A compiled module on its own, in an eager model.
    hidden = x * 1.0
    y = torch.compile(tempo.InplaceGelu(), fullgraph=True)(hidden)
    torch.testing.assert_close(hidden, F.gelu(x))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], our_derivative(x.detach(), "none"))


def test_compiled_inplace_on_what_an_earlier_operation_kept_is_an_error() -> None:
    def f(x: Tensor) -> Tensor:
        return tempo.gelu(torch.sigmoid(x), inplace=True)

    with pytest.raises(Exception, match="modified by an inplace operation"):
        torch.compile(f, fullgraph=True)(torch.randn(8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    (grad,) = torch.autograd.grad(tempo.gelu(x, side_bits=4).sum(), x)
    torch.testing.assert_close(grad.double(), exact_derivative(x.detach(), "none"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_other_than_floating_tensors_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="floating-point"):
        tempo.gelu(torch.ones(3, dtype=dtype))


def test_double_backward_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(tempo.gelu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(("arguments", "message"), [(("erf", 1), "'none' or 'tanh'"), (("none", 2), "1 or 4")])
def test_wrong_arguments_are_named(arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tempo.gelu(torch.ones(2), *arguments)


@pytest.mark.parametrize("side_bits", [1, 4])
def test_opcheck(side_bits: int) -> None:
    x = torch.randn(5, 7)
    torch.library.opcheck(torch.ops.tempo.gelu_forward.default, (x, "none", side_bits))
    torch.library.opcheck(torch.ops.tempo.gelu_forward_.default, (x.clone(), "tanh", side_bits))
    y, side = torch.ops.tempo.gelu_forward(x, "none", side_bits)
    torch.library.opcheck(torch.ops.tempo.gelu_backward.default, (torch.ones_like(y), y, side, "none", side_bits))


def test_official_import_path() -> None:
    from tempo.inplace_gelu import InplaceGelu

    assert InplaceGelu is tempo.InplaceGelu
