"""Every op on the GPU: against its reference on the same device and in float64, at odd sizes and in odd layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tempo
from tests.gpu.op_cases import CASES, OpCase, moved, ops, run

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 7, 33, 1023, 1024, 1500, 4097)
# Two roundings to a neighbour, relative to the largest value of the result.
STEP = {torch.float32: 2e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
# A 16-bit result may be rounded the other way; float32's derivative of GELU is as good as y's rounding allows.
SLACK = {torch.float32: 5e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
LAYOUTS = ("strided", "transposed", "unaligned")
SMALL = (12, 100)


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


each_case = pytest.mark.parametrize("case", CASES, ids=name_of)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def assert_close(mine: list[Tensor], others: list[Tensor], dtype: torch.dtype, exact_integers: bool = True) -> None:
    """Within a few roundings of the largest value; NaN and infinities in the same places."""
    assert len(mine) == len(others)
    for a, b in zip(mine, others, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        if not a.is_floating_point():
            assert not exact_integers or torch.equal(a, b)
        elif a.numel() > 0:
            finite = b[b.isfinite()]
            scale = max(1.0, finite.double().abs().max().item()) if finite.numel() else 1.0
            torch.testing.assert_close(a, b, rtol=STEP[dtype], atol=STEP[dtype] * scale, equal_nan=True)


def assert_three_way(mine: list[Tensor], references: list[Tensor], exacts: list[Tensor], dtype: torch.dtype) -> None:
    """The error against float64 is at most twice the reference's in the same dtype, and some slack."""
    for a, b, exact in zip(mine, references, exacts, strict=True):
        if not a.is_floating_point() or a.numel() == 0:
            continue
        error, allowed = ((t.double() - exact).abs().max().item() for t in (a, b))
        slack = SLACK[dtype] * max(1.0, exact.abs().max().item())
        assert error <= 2.0 * allowed + slack, f"error {error:.3g}, the reference's {allowed:.3g}, slack {slack:.3g}"


@each_dtype
@each_case
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_reference_and_is_as_near_to_float64(
    case: OpCase, dtype: torch.dtype, size: int, device: torch.device
) -> None:
    arguments = case.make((12, size), dtype, device)
    mine, reference = (run(prefix + case.op, arguments) for prefix in ("", "reference_"))
    assert_close(mine, reference, dtype, case.exact_integers)
    exact = run(f"reference_{case.op}", moved(arguments, dtype=torch.float64))
    assert_three_way(mine, reference, exact, dtype)


@each_dtype
@each_case
def test_more_rows_than_65535(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    arguments = case.make((4 * 65_539, 5), dtype, device)
    assert_close(*(run(prefix + case.op, arguments) for prefix in ("", "reference_")), dtype, case.exact_integers)


@each_dtype
@each_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(case: OpCase, dtype: torch.dtype, layout: str, device: torch.device) -> None:
    """Inputs and gradients that are not contiguous, or whose memory does not start at a multiple of 16 bytes."""
    arguments = case.make(SMALL, dtype, device)
    assert_close(run(case.op, arguments, layout, case.dense), run(case.op, arguments), dtype, case.exact_integers)


@each_dtype
@each_case
def test_two_runs_give_the_same_bits(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    arguments = case.make((3000, 257), dtype, device)
    first, second = (run(case.op, arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_opcheck(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    torch.library.opcheck(getattr(ops, case.op).default, case.make((4, 24), dtype, device))


# A forward op's first argument; what a backward op gets has been through one.
TAKE_ANY_INPUT = [case for case in CASES if not any(word in case.op for word in ("backward", "lamb", "exact_columns"))]
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38, -3e38, -50.0, 50.0, 1.0, -0.75]


@each_dtype
@pytest.mark.parametrize("case", TAKE_ANY_INPUT, ids=name_of)
def test_special_values_in_the_input(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """Each in a row of its own: NaN and infinity come out where the reference has them, and nowhere else."""
    first, *rest = case.make((4 * len(SPECIAL), 24), dtype, device)
    flat_rows = first.view(-1, 24)
    flat_rows[: len(SPECIAL), 5] = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).to(device)
    mine, reference = (run(prefix + case.op, (first, *rest)) for prefix in ("", "reference_"))
    for a, b in zip(mine, reference, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    assert_close(mine, reference, dtype, exact_integers=False)


def test_a_compiled_kernel_serves_every_op(device: torch.device) -> None:
    assert {op for op, how in tempo.kernels.summary(device.type).items() if how == "reference"} == set()
