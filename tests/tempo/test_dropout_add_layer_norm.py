from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

import tempo
from tempo.layer_norm import exact_columns
from tests.three_way import LOW_PRECISION, ODD_SIZES, assert_three_way

EPS, P, SITE = 1e-12, 0.3, 2
RNG = tempo.make_rng(3, 5)
ops = torch.ops.tempo


def inputs(*shape: int, dtype: torch.dtype = torch.float32, parameters: torch.dtype = torch.float32) -> list[Tensor]:
    """x, x_bias, residual, weight, bias, and a gradient that is correlated with x_hat, as a trained network's is."""
    width = shape[-1]
    x, residual = torch.randn(shape) * 2 + 0.5, torch.randn(shape)
    grad = torch.randn(shape) + 0.5 * F.layer_norm(x + residual, (width,))
    weight, bias, x_bias = torch.rand(width) * 1.9 + 0.1, torch.randn(width) * 0.1, torch.randn(width)
    tensors = [x.to(dtype), x_bias.to(parameters), residual.to(dtype), weight.to(parameters), bias.to(parameters), grad.to(dtype)]
    return [t.contiguous() for t in tensors]


def run(chain, x, x_bias, residual, weight, bias, grad, p: float = P) -> list[Tensor]:
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, x_bias, residual, weight, bias)]
    y = chain(*leaves, p)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def ours(x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float) -> Tensor:
    return tempo.dropout_add_layer_norm(x, x_bias, residual, weight, bias, p, RNG, SITE, EPS)


def pytorch(x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float) -> Tensor:
    """PyTorch's operations, with our mask."""
    dtype = x.dtype
    keep = tempo.keep_mask(x.shape, p, RNG, SITE)
    dropped = torch.where(keep, (x + x_bias.to(dtype)) * (1.0 / (1.0 - p) if p < 1.0 else 0.0), 0.0)
    return F.layer_norm(residual + dropped, x.shape[-1:], weight.to(dtype), bias.to(dtype), EPS)


def composition(x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float) -> Tensor:
    return tempo.layer_norm(residual + tempo.dropout(x + x_bias, p, RNG, SITE), weight, bias, EPS)


def in_double(tensors: list[Tensor], p: float = P) -> list[Tensor]:
    return run(pytorch, *(t.double() for t in tensors), p=p)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("width", [w for w in ODD_SIZES if w > 1])
def test_fp32_agrees_with_float64(width: int, p: float) -> None:
    tensors = inputs(3, 5, width)
    for mine, exact in zip(run(ours, *tensors, p=p), in_double(tensors, p), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=2e-5 * max(1.0, exact.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("p", [0.0, P, 1.0])
def test_equals_the_composition_of_dropout_and_layer_norm(dtype: torch.dtype, p: float) -> None:
    tensors = inputs(4, 6, 40, dtype=dtype, parameters=dtype)
    for a, b in zip(run(ours, *tensors, p=p), run(composition, *tensors, p=p), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("width", [33, 1024])
@pytest.mark.parametrize("parameters_fp32", [False, True])
def test_16_bit_holds_the_three_way_rule(dtype: torch.dtype, width: int, parameters_fp32: bool) -> None:
    tensors = inputs(8, 8, width, dtype=dtype, parameters=torch.float32 if parameters_fp32 else dtype)
    for mine, torchs, true in zip(run(ours, *tensors), run(pytorch, *tensors), in_double(tensors), strict=True):
        assert_three_way(mine, torchs, true, atol=2e-3 * true.abs().max().item())


def test_gradients_come_in_the_dtype_of_what_they_belong_to() -> None:
    x, x_bias, residual, weight, bias, grad = inputs(4, 32, dtype=torch.bfloat16)
    dtypes = [t.dtype for t in run(ours, x, x_bias.bfloat16(), residual, weight, bias, grad)]
    assert dtypes == [torch.bfloat16] * 4 + [torch.float32] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [7, 33, 64])
def test_masks_are_those_of_dropout_forward_and_backward(dtype: torch.dtype, width: int) -> None:
    x = torch.full((4, 3, width), 1000.0, dtype=dtype)
    zeros, ones = torch.zeros(width, dtype=dtype), torch.ones(width, dtype=dtype)
    y = tempo.dropout_add_layer_norm(x, None, torch.zeros_like(x), ones, zeros, P, RNG, SITE)
    kept = tempo.dropout(x, P, RNG, SITE) != 0
    mixed = kept.any(-1) & ~kept.all(-1)  # in other rows all elements are the same, and normalised to 0
    assert torch.equal((y > 0)[mixed], kept[mixed])

    _, dx, _, dresidual, *_ = run(ours, *inputs(4, 3, width, dtype=dtype))
    expected = tempo.dropout(dresidual, P, RNG, SITE)
    assert torch.equal(dx == 0, expected == 0)
    torch.testing.assert_close(dx, expected, rtol=2.0**-7, atol=0.0)


@pytest.mark.parametrize("p", [0.0, P])
def test_gradcheck_with_a_zero_gamma(p: float) -> None:
    tensors = [t.double() for t in inputs(2, 3, 20)[:5]]
    tensors[3][3] = 0.0
    leaves = tuple(t.requires_grad_() for t in tensors)
    assert torch.autograd.gradcheck(lambda *t: tempo.dropout_add_layer_norm(*t, p, RNG, SITE, 1e-5), leaves)


@pytest.mark.parametrize("num_zero", [1, 8, 40, 64])
def test_gamma_zero_works_in_any_number_of_columns(num_zero: int) -> None:
    tensors = inputs(32, 64)
    tensors[3][:num_zero] = 0.0
    for mine, exact in zip(run(ours, *tensors), in_double(tensors), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


def test_more_than_65535_rows() -> None:
    tensors = inputs(65_600, 8)
    mine, exact = run(ours, *tensors), in_double(tensors)
    torch.testing.assert_close(mine[1][-80:].double(), exact[1][-80:], rtol=1e-4, atol=1e-4)
    for a, b in zip(mine[2:], exact[2:], strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


def test_non_contiguous_inputs_and_gradient() -> None:
    x, x_bias, residual, weight, bias, grad = inputs(24, 5, 40)
    expected = run(ours, x, x_bias, residual, weight, bias, grad)
    sliced = torch.stack([x, x], dim=-1)[..., 0]
    transposed = residual.transpose(0, 1).contiguous().transpose(0, 1)
    assert not sliced.is_contiguous()
    assert not transposed.is_contiguous()
    for other in (grad.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([grad, grad], dim=-1)[..., 1]):
        y = run(ours, sliced, x_bias, transposed, weight, bias, other)
        for a, b in zip(y, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_eval_and_p_zero_drop_nothing_and_need_no_rng() -> None:
    x, x_bias, residual, weight, bias, _ = inputs(3, 12)
    expected = F.layer_norm(residual + x + x_bias, (12,), weight, bias, EPS)
    for p, training in ((0.5, False), (0.0, True)):
        y = tempo.dropout_add_layer_norm(x, x_bias, residual, weight, bias, p, None, SITE, training=training)
        torch.testing.assert_close(y, expected)
    all_dropped = tempo.dropout_add_layer_norm(x, x_bias, residual, weight, bias, 1.0, RNG, SITE)
    torch.testing.assert_close(all_dropped, F.layer_norm(residual, (12,), weight, bias, EPS))


def test_a_p_so_small_that_nothing_is_dropped_has_all_gradients() -> None:
    tensors = inputs(3, 12)
    for a, b in zip(run(ours, *tensors, p=1e-12), run(ours, *tensors, p=0.0), strict=True):
        torch.testing.assert_close(a, b)


def test_a_dropped_nan_does_no_harm() -> None:
    x, x_bias, residual, weight, bias, grad = inputs(4, 40)
    x[~tempo.keep_mask(x.shape, P, RNG, SITE)] = float("nan")
    for result in run(ours, x, x_bias, residual, weight, bias, grad):
        assert torch.isfinite(result).all()


def test_without_a_bias_it_is_that_of_a_zero_bias() -> None:
    x, x_bias, residual, weight, bias, _ = inputs(3, 12)
    y = tempo.dropout_add_layer_norm(x.requires_grad_(), None, residual, weight, bias, P, RNG, SITE)
    assert torch.equal(y, ours(x, torch.zeros_like(x_bias), residual, weight, bias, P))
    y.sum().backward()
    assert x.grad is not None


def test_what_it_keeps() -> None:
    norm = tempo.DropoutAddLayerNorm(1024, p=0.1, site=1)
    x, residual = (torch.randn(4, 128, 1024).bfloat16().requires_grad_() for _ in range(2))
    x_bias = torch.zeros(1024, requires_grad=True)
    kept = tempo.saved_bytes(norm, x, residual, RNG, x_bias)
    # y, rstd, x_hat of 16 columns; which columns these are, and rng
    assert kept.total_bytes == 4 * 128 * (2 * 1024 + 4 + 2 * 16) + 16 * 8 + 16


def test_module_is_a_layer_norm_with_the_same_state() -> None:
    theirs = nn.LayerNorm(12, eps=EPS)
    nn.init.normal_(theirs.weight)
    module = tempo.DropoutAddLayerNorm(12, p=0.4, site=7)
    module.load_state_dict(theirs.state_dict())
    assert isinstance(module, nn.LayerNorm)
    assert module.state_dict().keys() == theirs.state_dict().keys()
    x, residual, x_bias = torch.randn(2, 5, 12), torch.randn(2, 5, 12), torch.randn(12)
    torch.testing.assert_close(module(x, residual, RNG, x_bias), theirs(residual + tempo.dropout(x + x_bias, 0.4, RNG, 7)))
    torch.testing.assert_close(module.eval()(x, residual, None), theirs(residual + x))
    plain = tempo.DropoutAddLayerNorm(12, p=0.4, site=7, elementwise_affine=False)
    assert plain(x, residual, RNG).shape == x.shape
    assert "p=0.4, site=7" in repr(module)


def test_frozen_inputs_get_no_gradient() -> None:
    x, x_bias, residual, weight, bias, _ = inputs(3, 8)
    ours(x.requires_grad_(), x_bias, residual, weight, bias.requires_grad_(), P).square().sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    assert x_bias.grad is residual.grad is weight.grad is None


def test_one_tensor_as_both_inputs() -> None:
    x, x_bias, _, weight, bias, grad = inputs(3, 12)
    for p in (0.0, P):
        results = []
        for chain in (ours, pytorch):
            leaf = x.clone().requires_grad_()
            results.append(torch.autograd.grad(chain(leaf, x_bias, leaf, weight, bias, p), leaf, grad)[0])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_same_under_activation_checkpointing() -> None:
    x, x_bias, residual, weight, bias, grad = inputs(4, 32)
    expected = run(ours, x, x_bias, residual, weight, bias, grad)
    mine = run(lambda *t: checkpoint(ours, *t, use_reentrant=False), x, x_bias, residual, weight, bias, grad)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_the_same_under_ddp() -> None:
    x, _, residual, weight, _, grad = inputs(4, 32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = tempo.DropoutAddLayerNorm(32, p=P, site=SITE)
            self.norm.weight.data.copy_(weight)

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return self.norm(x, residual, RNG)

    alone = Model()
    alone(x, residual).backward(grad)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Model())
        y = model(x, residual)
        y.backward(grad)
    finally:
        distributed.destroy_process_group()
    assert torch.equal(y, alone(x, residual))
    torch.testing.assert_close(model.module.norm.weight.grad, alone.norm.weight.grad)


@pytest.mark.parametrize("p", [0.0, P])
def test_compiled_equals_eager(p: float) -> None:
    tensors = inputs(6, 24)
    for a, b in zip(run(torch.compile(ours, fullgraph=True), *tensors, p=p), run(ours, *tensors, p=p), strict=True):
        torch.testing.assert_close(a, b)


def test_an_output_that_is_overwritten_is_an_error_and_so_is_a_second_derivative() -> None:
    tensors = inputs(4, 8)[:5]
    x = tensors[0].requires_grad_()
    y = ours(*tensors, P)
    (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_rows_and_one_column() -> None:
    for shape in ((0, 4), (2, 0, 4), (3, 1)):
        tensors = inputs(*shape)
        tensors[5].fill_(1.0)  # one column has no variance: rstd multiplies rounding errors by a million
        y, dx, _, dresidual, dweight, dbias = run(ours, *tensors)
        assert y.shape == dx.shape == dresidual.shape == shape
        assert torch.equal(y, tensors[4].expand(shape)) or shape[-1] > 1
        assert (dx == 0).all()
        assert (dweight == 0).all()
        torch.testing.assert_close(dbias, tensors[5].reshape(-1, shape[-1]).sum(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 4, dtype=torch.int64)}, "needs a floating-point tensor"),
        ({"x": torch.tensor(1.0)}, "needs a last dimension"),
        ({"x": torch.ones(3, 0)}, "needs a last dimension"),
        ({"weight": torch.ones(3)}, r"weight and bias and x_bias must be \[4\].*got \[3\] and \[4\] and \[4\]"),
        ({"x_bias": torch.ones(5)}, r"must be \[4\].*\[5\]"),
        ({"residual": torch.ones(3, 4)}, r"residual must have the shape and dtype of x, \[2, 4\].*got \[3, 4\]"),
        ({"residual": torch.ones(2, 4).bfloat16()}, "residual must have .*bfloat16"),
        ({"p": 1.5}, r"must lie in \[0, 1\], got 1.5"),
        ({"rng": None}, "needs rng"),
        ({"rng": torch.zeros(2)}, "make_rng"),
    ],
)
def test_mistakes_are_refused(change: dict, message: str) -> None:
    x, parameter = torch.ones(2, 4), torch.ones(4)
    arguments = {
        "x": x,
        "x_bias": parameter,
        "residual": x,
        "weight": parameter,
        "bias": parameter,
        "p": 0.1,
        "rng": RNG,
        "site": 0,
    }
    with pytest.raises(ValueError, match=message):
        tempo.dropout_add_layer_norm(**arguments | change)


def test_a_module_refuses_two_dimensions_and_a_wrong_probability() -> None:
    with pytest.raises(ValueError, match="DropoutAddLayerNorm normalises one dimension"):
        tempo.DropoutAddLayerNorm([3, 4], p=0.1, site=0)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        tempo.DropoutAddLayerNorm(4, p=-0.1, site=0)


@pytest.mark.parametrize("p", [0.0, P])
def test_opcheck(p: float) -> None:
    x, x_bias, residual, weight, bias, grad = inputs(6, 24)
    columns = exact_columns(weight, bias, x.dtype)
    forward = (x, x_bias, residual, weight, bias, EPS, columns, p, RNG, SITE)
    torch.library.opcheck(ops.dropout_add_layer_norm_forward.default, forward)
    y, rstd, kept = ops.dropout_add_layer_norm_forward(*forward)
    backward = (grad, y, rstd, weight, bias, columns, kept, p, RNG, SITE)
    torch.library.opcheck(ops.dropout_add_layer_norm_backward.default, backward)
