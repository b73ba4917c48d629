from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tempo
from tempo.layer_norm import exact_columns

ops = torch.ops.tempo
EPS, SITE = 1e-12, 2**32 + 5
RNG = tempo.make_rng(-(2**40) - 11, 10**10 + 3)


def inputs(*shape: int, dtype: torch.dtype, generator: torch.Generator, parameters: torch.dtype = torch.float32) -> list[Tensor]:
    """x, x_bias, residual, weight, bias, grad."""
    width = shape[-1]
    x, residual, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    weight = torch.rand(width, generator=generator) * 1.9 + 0.1
    bias, x_bias = (torch.randn(width, generator=generator) * 0.1 for _ in range(2))
    return [x, x_bias.to(parameters), residual, weight.to(parameters), bias.to(parameters), grad]


def ours(x, x_bias, residual, weight, bias, grad, p: float, reference: str = "") -> tuple[Tensor, ...]:
    """y, dx, dresidual, dx_bias, dweight, dbias."""
    forward = getattr(ops, f"{reference}dropout_add_layer_norm_forward")
    backward = getattr(ops, f"{reference}dropout_add_layer_norm_backward")
    columns = exact_columns(weight, bias, x.dtype)
    y, rstd, exact = forward(x, x_bias, residual, weight, bias, EPS, columns, p, RNG, SITE)
    dx, *others = backward(grad, y, rstd, weight, bias, columns, exact, p, RNG, SITE)
    return y, others[0] if p == 0.0 else dx, *others


def pytorch(x, x_bias, residual, weight, bias, grad, p: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """PyTorch's operations in `dtype`, with our mask."""
    x, x_bias, residual, weight, bias = leaves = [
        t.detach().to(dtype).requires_grad_() for t in (x, x_bias, residual, weight, bias)
    ]
    keep = tempo.keep_mask(x.shape, p, RNG, SITE)
    dropped = torch.where(keep, (x + x_bias) * (1.0 / (1.0 - p) if p < 1.0 else 0.0), 0.0)
    y = F.layer_norm(residual + dropped, x.shape[-1:], weight, bias, EPS)
    order = (x, residual, x_bias, weight, bias)
    assert len(order) == len(leaves)
    return y.detach(), *torch.autograd.grad(y, order, grad.to(dtype))


def compare(tensors: list[Tensor], p: float, three_way) -> None:
    dtype = tensors[0].dtype
    low, exact = (pytorch(*tensors, p=p, dtype=d) for d in (dtype, torch.float64))
    for mine, theirs, truth in zip(ours(*tensors, p=p), low, exact, strict=True):
        # Relative to the largest: a float32 sum of many rows, or (bfloat16) y's rounding, which x_hat is rebuilt from.
        slack = 2e-6 if dtype == torch.float32 else 4e-3
        three_way(mine, theirs, truth, slack * max(1.0, truth.abs().max().item()))


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
def test_sizes(size: int, dtype: torch.dtype, p: float, generator: torch.Generator, three_way) -> None:
    tensors = inputs(5, 7, size, dtype=dtype, generator=generator)
    if size > 1:
        compare(tensors, p, three_way)
        return
    # One column has no variance: y is the bias, and the gradients through it are rounding errors times 1 / sqrt(eps).
    y, *_, dbias = ours(*tensors, p=p)
    assert torch.equal(y, tensors[4].to(dtype).expand(5, 7, 1))
    torch.testing.assert_close(dbias, tensors[5].float().sum((0, 1)))


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.999, 1.0])
def test_equals_the_reference_op(dtype: torch.dtype, p: float, generator: torch.Generator) -> None:
    x, x_bias, residual, weight, bias, grad = inputs(3, 50, 300, dtype=dtype, generator=generator)
    columns = exact_columns(weight, bias, dtype)
    forward = (x, x_bias, residual, weight, bias, EPS, columns, p, RNG, SITE)
    saved = ops.reference_dropout_add_layer_norm_forward(*forward)
    backward = (grad, *saved[:2], weight, bias, columns, saved[2], p, RNG, SITE)
    step = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[dtype]
    mine = (*ops.dropout_add_layer_norm_forward(*forward), *ops.dropout_add_layer_norm_backward(*backward))
    for a, b in zip(mine, (*saved, *ops.reference_dropout_add_layer_norm_backward(*backward)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        # At p = 0.999 what is kept is a thousand times as large.
        torch.testing.assert_close(a, b, rtol=step, atol=step * max(1.0, b.abs().max().item() if b.numel() else 0.0))


@pytest.mark.parametrize("width", [7, 33, 64, 1024])
def test_the_mask_is_that_of_dropout(dtype: torch.dtype, width: int) -> None:
    x = torch.full((4, 3, width), 1000.0, dtype=dtype)
    zeros, ones = torch.zeros(width), torch.ones(width)
    y, dx, *_ = ours(x, zeros, torch.zeros_like(x), ones, zeros, torch.randn(x.shape).to(dtype), p=0.3)
    keep = tempo.keep_mask(x.shape, 0.3, RNG, SITE)
    assert torch.equal(keep, ops.dropout(torch.ones(x.shape), 0.3, RNG, SITE) != 0)
    mixed = keep.any(-1) & ~keep.all(-1)  # in other rows all elements are the same, and normalised to 0
    assert mixed.sum() >= 6
    assert torch.equal((y > 0)[mixed], keep[mixed])
    assert (dx[~keep] == 0).all()
    assert (dx[keep & mixed[..., None]] != 0).float().mean() > 0.95  # a gradient may vanish by chance


@pytest.mark.parametrize("num_bad", [1, 16, 40])
def test_columns_with_gamma_zero_or_tiny(dtype: torch.dtype, num_bad: int, generator: torch.Generator, three_way) -> None:
    tensors = inputs(10, 10, 256, dtype=dtype, generator=generator)
    tensors[3][:num_bad:2], tensors[3][1:num_bad:2], tensors[4][:num_bad] = 0.0, 1e-3, 1.0
    assert all(t.isfinite().all() for t in ours(*tensors, p=0.1))
    compare(tensors, 0.1, three_way)


def test_parameters_in_16_bits(generator: torch.Generator, three_way) -> None:
    tensors = inputs(31, 129, dtype=torch.bfloat16, generator=generator, parameters=torch.bfloat16)
    compare(tensors, 0.2, three_way)
    assert {t.dtype for t in ours(*tensors, p=0.2)} == {torch.bfloat16}
    # Each parameter may have its own.
    tensors[1], tensors[4] = tensors[1].float(), tensors[4].float()
    compare(tensors, 0.2, three_way)
    assert [t.dtype for t in ours(*tensors, p=0.2)[3:]] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_non_contiguous_inputs_and_gradients(dtype: torch.dtype, generator: torch.Generator) -> None:
    x, x_bias, residual, weight, bias, grad = inputs(24, 10, 33, dtype=dtype, generator=generator)
    expected = ours(x, x_bias, residual, weight, bias, grad, p=0.3)
    transposed = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, residual, grad)]
    sliced = [torch.stack([t, t], dim=-1)[..., 0] for t in (x, x_bias, residual, weight, bias, grad)]
    for tensors in (
        (transposed[0], x_bias, transposed[1], weight, bias, transposed[2]),
        (transposed[0], x_bias, residual, weight, bias, sliced[5]),
        tuple(sliced),
    ):
        assert not tensors[0].is_contiguous()
        assert all(torch.equal(a, b) for a, b in zip(ours(*tensors, p=0.3), expected, strict=True))
    expanded = grad[:1, :1].expand_as(grad)
    results = [ours(x, x_bias, residual, weight, bias, g, p=0.3) for g in (expanded, expanded.contiguous())]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif("TEMPO_LIBRARY" in os.environ, reason="only the CPU kernels write past the caches")
def test_unaligned_and_large_tensors_come_out_the_same(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Large results are written past the caches where they are aligned."""
    tensors = inputs(4200, 1024, dtype=dtype, generator=generator)
    whole = ours(*tensors, p=0.1)
    rows = 40  # a small tensor is written the plain way
    parts = [t[:rows] if t.dim() == 2 else t for t in tensors]
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in parts]
    columns = exact_columns(tensors[3], tensors[4], dtype)
    for some in (parts, shifted):
        y, rstd, exact = ops.dropout_add_layer_norm_forward(*some[:5], EPS, columns, 0.1, RNG, SITE)
        assert torch.equal(y, ours(*parts, p=0.1)[0])
        dx, dresidual, *_ = ops.dropout_add_layer_norm_backward(some[5], y, rstd, *some[3:5], columns, exact, 0.1, RNG, SITE)
        # Rows as samples: the element index of a row does not depend on how many follow.
        assert torch.equal(y, whole[0][:rows])
        assert torch.equal(dx, whole[1][:rows])
        assert torch.equal(dresidual, whole[2][:rows])


def test_more_rows_than_65535(dtype: torch.dtype, generator: torch.Generator, three_way) -> None:
    compare(inputs(65_539, 20, dtype=dtype, generator=generator), 0.1, three_way)


def test_nan_and_infinity_stay_in_their_row_and_dropped_ones_vanish(dtype: torch.dtype, generator: torch.Generator) -> None:
    tensors = inputs(4, 50, dtype=dtype, generator=generator)
    clean = ours(*tensors, p=0.5)
    keep = tempo.keep_mask((4, 50), 0.5, RNG, SITE)
    x = tensors[0].clone()
    x[~keep] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(ours(x, *tensors[1:], p=0.5), clean, strict=True))
    x[1, keep[1].nonzero()[0]], x[2, keep[2].nonzero()[-1]] = float("nan"), float("inf")
    y, dx, dresidual, dx_bias, dweight, _ = ours(x, *tensors[1:], p=0.5)
    assert y[1:3].isnan().all()
    assert dresidual[1:3].isnan().all()
    assert dx[1:3][keep[1:3]].isnan().all()
    assert (dx[~keep] == 0).all()
    assert dweight.isnan().all()
    assert torch.equal(dx_bias.isnan(), keep[1] | keep[2])
    for mine, other in zip((y, dx, dresidual), clean, strict=False):
        assert torch.equal(mine[[0, 3]], other[[0, 3]])


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_does_not_depend_on_the_number_of_threads(dtype: torch.dtype, p: float, threads, generator: torch.Generator) -> None:
    tensors = inputs(1000, 257, dtype=dtype, generator=generator)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(ours(*tensors, p=p))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_what_the_kernels_do_not_serve_reaches_the_reference(generator: torch.Generator) -> None:
    # The CUDA kernels, emulated, serve float16 themselves.
    for dtype in (torch.float64,) if "TEMPO_LIBRARY" in os.environ else (torch.float64, torch.float16):
        tensors = inputs(6, 20, dtype=dtype, generator=generator)
        expected = ours(*tensors, p=0.3, reference="reference_")
        assert all(torch.equal(a, b) for a, b in zip(ours(*tensors, p=0.3), expected, strict=True))
    tensors = inputs(0, 20, dtype=torch.float32, generator=generator)
    y, dx, dresidual, dx_bias, dweight, dbias = ours(*tensors, p=0.3)
    assert y.shape == dx.shape == dresidual.shape == (0, 20)
    assert all(torch.equal(t, torch.zeros(20)) for t in (dx_bias, dweight, dbias))


def test_shapes_that_do_not_fit_are_refused(generator: torch.Generator) -> None:
    x, x_bias, residual, weight, bias, _ = inputs(6, 20, dtype=torch.float32, generator=generator)
    columns = exact_columns(weight, bias, x.dtype)
    for wrong in (
        (x, x_bias[:5], residual, weight, bias),
        (x, x_bias, residual[:5], weight, bias),
        (x, x_bias, residual, weight[:5], bias),
    ):
        with pytest.raises(RuntimeError, match="must have"):
            ops.dropout_add_layer_norm_forward(*wrong, EPS, columns, 0.1, RNG, SITE)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_opcheck(dtype: torch.dtype, p: float, generator: torch.Generator) -> None:
    x, x_bias, residual, weight, bias, grad = inputs(6, 24, dtype=dtype, generator=generator)
    columns = exact_columns(weight, bias, dtype)
    forward = (x, x_bias, residual, weight, bias, EPS, columns, p, RNG, SITE)
    torch.library.opcheck(ops.dropout_add_layer_norm_forward.default, forward)
    y, rstd, exact = ops.dropout_add_layer_norm_forward(*forward)
    backward = (grad, y, rstd, weight, bias, columns, exact, p, RNG, SITE)
    torch.library.opcheck(ops.dropout_add_layer_norm_backward.default, backward)
