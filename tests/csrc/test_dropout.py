from __future__ import annotations

import pytest
import torch

import tempo

ops = torch.ops.tempo


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.999, 1.0])
def test_equals_the_reference_bit_for_bit(size: int, dtype: torch.dtype, p: float, generator: torch.Generator) -> None:
    x = torch.randn(3, size, generator=generator).to(dtype)
    for seed, first in ((0, 0), (-7, 3), (2**63 - 1, 10**11 + 1)):
        rng = tempo.make_rng(seed, first)
        assert torch.equal(ops.dropout(x, p, rng, 5), ops.reference_dropout(x, p, rng, 5))


@pytest.mark.parametrize("site", [0, 72, 2**32 + 3])
def test_the_mask_is_keep_mask(site: int) -> None:
    rng = tempo.make_rng(99, 12)
    kept = ops.dropout(torch.ones(5, 3, 77), 0.3, rng, site) != 0
    assert torch.equal(kept, tempo.keep_mask((5, 3, 77), 0.3, rng, site))


def test_a_batch_gets_the_masks_of_its_samples(dtype: torch.dtype) -> None:
    x = torch.ones(6, 33, 5, dtype=dtype)
    whole = ops.dropout(x, 0.2, tempo.make_rng(1, 10), 4)
    for first, count in ((0, 2), (2, 1), (3, 3)):
        assert torch.equal(whole[first : first + count], ops.dropout(x[:count], 0.2, tempo.make_rng(1, 10 + first), 4))


def test_dropped_nan_and_infinity_become_zero_and_kept_ones_stay(dtype: torch.dtype) -> None:
    rng = tempo.make_rng(3)
    keep = tempo.keep_mask((4, 100), 0.5, rng, 0)
    for value in (float("nan"), float("inf"), -float("inf")):
        y = ops.dropout(torch.full((4, 100), value, dtype=dtype), 0.5, rng, 0)
        assert (y[~keep] == 0).all()
        assert torch.equal(y[keep], torch.full_like(y[keep], value)) or torch.isnan(y[keep]).all()
    y = ops.dropout(torch.full((4, 100), -0.0, dtype=dtype), 0.5, rng, 0)
    assert torch.equal(torch.signbit(y), keep)


def test_non_contiguous_input(dtype: torch.dtype, generator: torch.Generator) -> None:
    rng = tempo.make_rng(5, 2)
    base = torch.randn(6, 40, 33, generator=generator).to(dtype)
    for x in (base.transpose(1, 2), base[:, ::2], base[:, :, 1:], base[:1].expand(6, 40, 33)):
        y = ops.dropout(x, 0.25, rng, 1)
        assert torch.equal(y, ops.dropout(x.contiguous(), 0.25, rng, 1))
        assert y.stride() == torch.empty_like(x).stride()


def test_more_rows_than_65535(dtype: torch.dtype) -> None:
    x = torch.ones(65_539, 6, dtype=dtype)
    rng = tempo.make_rng(8, 1)
    assert torch.equal(ops.dropout(x, 0.1, rng, 2), ops.reference_dropout(x, 0.1, rng, 2))


def test_other_dtypes_and_empty_tensors_reach_the_reference() -> None:
    rng = tempo.make_rng(1)
    for dtype in (torch.float64, torch.float16):
        x = torch.randn(3, 50, dtype=dtype)
        assert torch.equal(ops.dropout(x, 0.4, rng, 0), ops.reference_dropout(x, 0.4, rng, 0))
    assert ops.dropout(torch.empty(0, 4), 0.4, rng, 0).shape == (0, 4)


def test_does_not_depend_on_the_number_of_threads(threads, generator: torch.Generator) -> None:
    x = torch.randn(64, 3001, generator=generator)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(ops.dropout(x, 0.1, tempo.make_rng(2), 3))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_opcheck(dtype: torch.dtype) -> None:
    torch.library.opcheck(ops.dropout.default, (torch.randn(3, 20).to(dtype), 0.3, tempo.make_rng(1), 2))
