from __future__ import annotations

import math

import pytest
import torch

import tempo

MASK = 0xFFFFFFFF


def philox_block(block: int, site: int, seed: int) -> list[int]:
    """Philox4x32-10 written down again in plain integers, from the paper's definition."""
    c = [block & MASK, (block >> 32) & MASK, site & MASK, (site >> 32) & MASK]
    k = [seed & MASK, (seed >> 32) & MASK]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def test_plain_philox_gives_the_published_vector() -> None:
    # Random123's known-answer test: counter and key all ones.
    ones = (1 << 64) - 1
    assert philox_block(ones, ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox_block(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 4, 6), (5, 7, 3), (2, 33_000)])
@pytest.mark.parametrize(
    ("seed", "first_sample", "site"), [(0, 0, 0), (42, 17, 5), (-3, 2**40 + 1, 71), ((1 << 63) + 5, 3, 2**33)]
)
def test_mask_is_the_function_of_seed_site_and_place(shape: tuple[int, ...], seed: int, first_sample: int, site: int) -> None:
    p = 0.3
    keep = tempo.keep_mask(shape, p, tempo.make_rng(seed, first_sample), site).flatten()
    first = first_sample * (math.prod(shape) // shape[0])
    threshold = round(p * 2**32)
    for i in [0, 1, 2, 3, 4, len(keep) // 2, len(keep) - 1]:
        if i < len(keep):
            word = philox_block((first + i) // 4, site, seed)[(first + i) % 4]
            assert bool(keep[i]) == (word >= threshold)


@pytest.mark.parametrize("per_sample", [8, 7])
def test_mask_does_not_depend_on_the_split_into_batches(per_sample: int) -> None:
    whole = tempo.keep_mask((8, per_sample), 0.5, tempo.make_rng(9, 100), 3)
    parts = [tempo.keep_mask((2, per_sample), 0.5, tempo.make_rng(9, 100 + i), 3) for i in range(0, 8, 2)]
    assert torch.equal(whole, torch.cat(parts))


def test_rate_is_right_and_sites_and_seeds_are_independent() -> None:
    n = 400_000
    masks = [tempo.keep_mask((4, n // 4), 0.1, tempo.make_rng(seed, 0), site) for seed, site in [(1, 0), (1, 1), (2, 0)]]
    sigma = math.sqrt(0.1 * 0.9 / n)
    for mask in masks:
        assert abs(mask.double().mean().item() - 0.9) < 4 * sigma
    for other in masks[1:]:
        both_dropped = (~masks[0] & ~other).double().mean().item()
        assert abs(both_dropped - 0.01) < 4 * math.sqrt(0.01 * 0.99 / n)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_probabilities(p: float) -> None:
    assert (tempo.keep_mask((50, 40), p, tempo.make_rng(1), 0) == (p == 0.0)).all()


def test_an_empty_batch_has_an_empty_mask() -> None:
    assert tempo.keep_mask((0, 5), 0.5, tempo.make_rng(1), 0).shape == (0, 5)


def test_a_scalar_has_no_batch() -> None:
    with pytest.raises(ValueError, match="batch dimension"):
        tempo.keep_mask((), 0.5, tempo.make_rng(1), 0)


@pytest.mark.parametrize("size", [8_000_000, 8_000_001])
def test_memory_is_a_small_multiple_of_the_mask(size: int) -> None:
    # All int64 temporaries of a mask at once would take 16 bytes an element and more.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        tempo.keep_mask((1, size), 0.1, tempo.make_rng(1, 1), 0)
    events = sorted((e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    assert size <= peak < 2.2 * size + 12_000_000
