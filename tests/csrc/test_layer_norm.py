from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tempo.layer_norm import exact_columns

ops = torch.ops.tempo
EPS = 1e-12


def parameters(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    weight = torch.rand(size, generator=generator) * 1.9 + 0.1
    bias = torch.randn(size, generator=generator) * 0.1
    return weight, bias


def ours(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    columns = exact_columns(weight, bias, x.dtype)
    y, rstd, exact = ops.layer_norm_forward(x, weight, bias, EPS, columns)
    return y, *ops.layer_norm_backward(grad, y, rstd, weight, bias, columns, exact)


def pytorch(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
    y = F.layer_norm(leaves[0], x.shape[-1:], leaves[1], leaves[2], EPS)
    return y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))


def compare(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, three_way) -> None:
    results = ours(x, weight, bias, grad)
    low = pytorch(x, weight, bias, grad, x.dtype)
    exact = pytorch(x, weight, bias, grad, torch.float64)
    for mine, theirs, truth in zip(results, low, exact, strict=True):
        # Relative to the largest: a float32 sum of many rows, or (bfloat16) y's rounding, which x_hat is rebuilt from.
        slack = 2e-6 if x.dtype == torch.float32 else 4e-3
        three_way(mine, theirs, truth, slack * max(1.0, truth.abs().max().item()))


def test_sizes(size: int, dtype: torch.dtype, generator: torch.Generator, three_way) -> None:
    if size == 1:
        return  # one column has no variance: 1 / sqrt(eps) times rounding errors
    x = (torch.randn(5, 7, size, generator=generator) * 3 + 0.5).to(dtype)
    grad = torch.randn(5, 7, size, generator=generator).to(dtype)
    compare(x, *parameters(size, generator), grad, three_way)


def test_one_column_is_its_bias(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0], [-1.0]]).to(dtype)
    y, *_ = ours(x, torch.tensor([2.0]), torch.tensor([0.5]), torch.ones_like(x))
    assert torch.equal(y, torch.full_like(x, 0.5))


def test_gradient_correlated_with_x_hat(dtype: torch.dtype, generator: torch.Generator, three_way) -> None:
    x = torch.randn(64, 768, generator=generator).to(dtype)
    grad = (F.layer_norm(x.float(), (768,)) + 0.1 * torch.randn(64, 768, generator=generator)).to(dtype)
    compare(x, *parameters(768, generator), grad, three_way)


def test_equals_the_reference_op(dtype: torch.dtype, generator: torch.Generator) -> None:
    x, grad = (torch.randn(50, 300, generator=generator).to(dtype) for _ in range(2))
    weight, bias = parameters(300, generator)
    columns = exact_columns(weight, bias, dtype)
    y, rstd, exact = ops.reference_layer_norm_forward(x, weight, bias, EPS, columns)
    mine = ops.layer_norm_forward(x, weight, bias, EPS, columns)
    step = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[dtype]
    for a, b in zip(mine, (y, rstd, exact), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=step, atol=step)
    results = ops.layer_norm_backward(grad, y, rstd, weight, bias, columns, exact)
    expected = ops.reference_layer_norm_backward(grad, y, rstd, weight, bias, columns, exact)
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=step, atol=step)


@pytest.mark.parametrize("num_bad", [1, 16, 40])
def test_columns_with_gamma_zero_or_tiny(dtype: torch.dtype, num_bad: int, generator: torch.Generator, three_way) -> None:
    weight, bias = parameters(256, generator)
    weight[:num_bad:2], weight[1:num_bad:2] = 0.0, 1e-3
    bias[:num_bad] = 1.0
    x, grad = (torch.randn(100, 256, generator=generator).to(dtype) for _ in range(2))
    results = ours(x, weight, bias, grad)
    assert all(t.isfinite().all() for t in results)
    compare(x, weight, bias, grad, three_way)


def test_parameters_in_16_bits(generator: torch.Generator, three_way) -> None:
    weight, bias = (t.bfloat16() for t in parameters(129, generator))
    x, grad = (torch.randn(31, 129, generator=generator).bfloat16() for _ in range(2))
    compare(x, weight, bias, grad, three_way)
    _, _, dweight, dbias = ours(x, weight, bias, grad)
    assert dweight.dtype == dbias.dtype == torch.bfloat16


def test_large_mean_does_not_cancel(generator: torch.Generator, three_way) -> None:
    x = torch.randn(16, 1000, generator=generator) + 1000.0
    compare(x, *parameters(1000, generator), torch.randn(16, 1000, generator=generator), three_way)


def test_non_contiguous_input_and_gradient(dtype: torch.dtype, generator: torch.Generator) -> None:
    weight, bias = parameters(33, generator)
    base, grad_base = (torch.randn(33, 40, generator=generator).to(dtype) for _ in range(2))
    expected = ours(base.t().contiguous(), weight, bias, grad_base.t().contiguous())
    for mine, other in zip(ours(base.t(), weight, bias, grad_base.t()), expected, strict=True):
        assert torch.equal(mine, other)
    wide = torch.randn(40, 66, generator=generator).to(dtype)
    expected = ours(wide[:, ::2].contiguous(), weight, bias, wide[:1, :33].expand(40, 33).contiguous())
    for mine, other in zip(ours(wide[:, ::2], weight, bias, wide[:1, :33].expand(40, 33)), expected, strict=True):
        assert torch.equal(mine, other)


def test_more_rows_than_65535(dtype: torch.dtype, generator: torch.Generator, three_way) -> None:
    x, grad = (torch.randn(65_539, 20, generator=generator).to(dtype) for _ in range(2))
    compare(x, *parameters(20, generator), grad, three_way)


def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype, generator: torch.Generator) -> None:
    weight, bias = parameters(50, generator)
    clean = torch.randn(4, 50, generator=generator).to(dtype)
    x = clean.clone()
    x[1, 3], x[2, 7] = float("nan"), float("inf")
    y, dx, dweight, _ = ours(x, weight, bias, torch.ones_like(x))
    assert y[1].isnan().all()
    assert y[2].isnan().all()
    assert dx[1:3].isnan().all()
    assert dweight.isnan().all()
    rows = torch.tensor([0, 3])
    y_clean, dx_clean, *_ = ours(clean, weight, bias, torch.ones_like(x))
    assert torch.equal(y[rows], y_clean[rows])
    assert torch.equal(dx[rows], dx_clean[rows])


def test_does_not_depend_on_the_number_of_threads(dtype: torch.dtype, threads, generator: torch.Generator) -> None:
    x, grad = (torch.randn(1000, 257, generator=generator).to(dtype) for _ in range(2))
    weight, bias = parameters(257, generator)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(ours(x, weight, bias, grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_other_dtypes_and_no_rows_reach_the_reference() -> None:
    weight, bias = torch.rand(20) + 0.5, torch.randn(20)
    # The CUDA kernels, emulated, serve float16 themselves.
    for dtype in (torch.float64,) if "TEMPO_LIBRARY" in os.environ else (torch.float64, torch.float16):
        x = torch.randn(6, 20).to(dtype)
        columns = exact_columns(weight, bias, dtype)
        mine = ops.layer_norm_forward(x, weight, bias, EPS, columns)
        expected = ops.reference_layer_norm_forward(x, weight, bias, EPS, columns)
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    columns = exact_columns(weight, bias, torch.float32)
    y, rstd, exact = ops.layer_norm_forward(torch.empty(0, 20), weight, bias, EPS, columns)
    assert (y.shape, rstd.shape, exact.shape) == ((0, 20), (0,), (0, 16))
    dx, dweight, _ = ops.layer_norm_backward(y, y, rstd, weight, bias, columns, exact)
    assert dx.shape == (0, 20)
    assert torch.equal(dweight, torch.zeros(20))


@pytest.mark.parametrize("dtype_of_parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_bad", [0, 5, 16, 90])
def test_exact_columns_are_those_of_the_reference(
    size: int, num_bad: int, dtype_of_parameters: torch.dtype, generator: torch.Generator
) -> None:
    weight, bias = (t.to(dtype_of_parameters) for t in parameters(size, generator))
    weight[:num_bad:2], weight[1:num_bad:3], bias[2:num_bad:5] = 0.0, 1e-3, 1.0
    gamma, beta = weight.double().abs(), bias.double().abs()
    ratio = torch.where(gamma == 0.0, torch.inf, beta / gamma)
    for all_unsafe in (False, True):
        columns = ops.layer_norm_exact_columns(weight, bias, 1e-37, all_unsafe)
        expected = ops.reference_layer_norm_exact_columns(weight, bias, 1e-37, all_unsafe)
        assert columns.dtype == torch.int64
        assert columns.unique().numel() == columns.numel() == expected.numel()
        # Which of several equally bad ones is open. bfloat16 has many: compare the ratios.
        assert torch.equal(ratio[columns].sort().values, ratio[expected].sort().values)


def test_exact_columns_fear_what_is_not_a_number_most() -> None:
    weight, bias = torch.ones(100), torch.arange(100) / 1000.0
    weight[7], bias[60], weight[8], bias[8] = float("nan"), float("nan"), 0.0, 0.0
    columns = ops.layer_norm_exact_columns(weight, bias, 1e-37, False).tolist()
    assert {7, 8, 60} <= set(columns)
    assert set(columns) - {7, 8, 60} == set(range(87, 100))
    # float16 fears small numbers, too.
    weight = torch.ones(100)
    weight[20:40] = 2.0**-11
    assert set(ops.layer_norm_exact_columns(weight, torch.zeros(100), 2.0**-10, False).tolist()) <= set(range(20, 40))
    assert ops.layer_norm_exact_columns(weight, torch.zeros(100), 2.0**-10, True).tolist() == list(range(20, 40))


@pytest.mark.skipif("TEMPO_LIBRARY" in os.environ, reason="only the CPU kernels write past the caches")
def test_large_results_are_those_of_small_ones(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Large results are written past the caches where they are aligned."""
    x, grad = (torch.randn(4200, 1024, generator=generator).to(dtype) for _ in range(2))
    weight, bias = parameters(1024, generator)
    y, dx, *_ = ours(x, weight, bias, grad)
    for first in (0, 4160):
        some = slice(first, first + 40)
        y_some, dx_some, *_ = ours(x[some], weight, bias, grad[some])
        assert torch.equal(y[some], y_some)
        assert torch.equal(dx[some], dx_some)
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (x, grad)]
    for a, b in zip(ours(shifted[0], weight, bias, shifted[1])[:2], (y, dx), strict=True):
        assert torch.equal(a, b)


def test_opcheck(dtype: torch.dtype) -> None:
    weight, bias = torch.rand(24) + 0.5, torch.randn(24)
    x = torch.randn(6, 24).to(dtype)
    torch.library.opcheck(ops.layer_norm_exact_columns.default, (weight, bias, 1e-37, False))
    columns = exact_columns(weight, bias, dtype)
    torch.library.opcheck(ops.layer_norm_forward.default, (x, weight, bias, EPS, columns))
    y, rstd, exact = ops.layer_norm_forward(x, weight, bias, EPS, columns)
    torch.library.opcheck(ops.layer_norm_backward.default, (torch.randn_like(x), y, rstd, weight, bias, columns, exact))
