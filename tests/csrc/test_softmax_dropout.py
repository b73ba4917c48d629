from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tempo

ops = torch.ops.tempo
# One unit in the last place of a 16-bit type.
STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SCALE = 0.125


def masks(batch: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> dict[str, Tensor | None]:
    padding = torch.rand(batch, 1, 1, keys, generator=generator) < 0.7
    padding[0] = False  # a fully masked sample
    added = torch.zeros(batch, 1, 1, keys).masked_fill(~padding, torch.finfo(torch.float32).min)
    return {
        "none": None,
        "padding": padding,
        "added": added,
        "added bfloat16": torch.zeros_like(added).masked_fill(~padding, torch.finfo(torch.bfloat16).min).bfloat16(),
        "added float16": torch.zeros_like(added).masked_fill(~padding, torch.finfo(torch.float16).min).half(),
        "infinite": torch.zeros(batch, 1, 1, keys).masked_fill(~padding, -torch.inf),
        "full": torch.rand(batch, heads, queries, keys, generator=generator) < 0.5,
        "per head": torch.randn(1, heads, queries, keys, generator=generator),
        "per query": torch.rand(batch, 1, queries, 1, generator=generator) < 0.5,
        "transposed": torch.randn(batch, heads, keys, queries, generator=generator).transpose(2, 3),
    }


def both(scores: Tensor, mask: Tensor | None, p: float, causal: bool, site: int = 3) -> list[tuple[Tensor, Tensor]]:
    """(probabilities, dropped) of the kernel and of the reference."""
    results = []
    for op in (ops.softmax_dropout_forward, ops.reference_softmax_dropout_forward):
        probabilities = scores.clone()
        dropped = op(probabilities, mask, SCALE, p, tempo.make_rng(11, 5), site, causal)
        results.append((probabilities, dropped))
    return results


@pytest.mark.parametrize("causal", [False, True])
def test_masks(dtype: torch.dtype, causal: bool, generator: torch.Generator) -> None:
    shape = (2, 3, 5, 37)
    scores = (torch.randn(shape, generator=generator) * 20).to(dtype)
    for name, mask in masks(*shape, generator).items():
        (mine, dropped), (expected, expected_dropped) = both(scores, mask, 0.2, causal)
        assert mine.isfinite().all(), name
        # One unit of the dtype at most: the sums are taken in another order.
        torch.testing.assert_close(mine, expected, rtol=STEP[dtype], atol=1e-7, msg=name)
        assert torch.equal(dropped == 0, (expected_dropped == 0)), name
        assert torch.equal(mine == 0, expected == 0), name


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
def test_sizes(size: int, dtype: torch.dtype, p: float, generator: torch.Generator, three_way) -> None:
    scores = (torch.randn(2, 2, 3, size, generator=generator) * 10).to(dtype)
    grad = torch.randn(2, 2, 3, size, generator=generator).to(dtype)
    rng = tempo.make_rng(7, 1)
    probabilities = scores.clone()
    dropped = ops.softmax_dropout_forward(probabilities, None, SCALE, p, rng, 2, False)
    exact = torch.softmax(scores.double() * SCALE, -1)
    three_way(probabilities, torch.softmax(scores * SCALE, -1), exact, 1e-7)
    keep = tempo.keep_mask(scores.shape, p, rng, 2)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    assert dropped.shape == ((0,) if p == 0.0 else scores.shape)
    if p > 0.0:
        assert torch.equal(dropped, torch.where(keep, probabilities * scale, 0.0).to(dtype))

    dscores = grad.clone()
    rebuilt = ops.softmax_dropout_backward(dscores, probabilities, SCALE, p, rng, 2)
    assert torch.equal(rebuilt, dropped)
    leaf = scores.double().requires_grad_()
    chain = torch.softmax(leaf * SCALE, -1) * keep * scale
    (truth,) = torch.autograd.grad(chain, leaf, grad.double())
    low = scores.clone().requires_grad_()
    (pytorch,) = torch.autograd.grad(torch.softmax(low * SCALE, -1) * keep * scale, low, grad)
    three_way(dscores, pytorch, truth, 1e-6)


def test_backward_equals_the_reference(dtype: torch.dtype, generator: torch.Generator) -> None:
    probabilities = torch.softmax(torch.randn(3, 4, 9, 65, generator=generator), -1).to(dtype)
    grad = torch.randn(3, 4, 9, 65, generator=generator).to(dtype)
    results = []
    for op in (ops.softmax_dropout_backward, ops.reference_softmax_dropout_backward):
        written = grad.clone()
        results.append((written, op(written, probabilities, SCALE, 0.3, tempo.make_rng(1, 2), 6)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=STEP[dtype], atol=1e-6)
    assert torch.equal(results[0][1], results[1][1])


def test_extreme_scores(dtype: torch.dtype) -> None:
    scores = torch.zeros(1, 1, 5, 20)
    scores[0, 0, 0, 3] = float("nan")
    largest = 0.9 * torch.finfo(dtype).max
    scores[0, 0, 1, 3] = largest
    scores[0, 0, 2, 3] = -float("inf")
    scores[0, 0, 3] = -largest
    scores[0, 0, 4, 3] = float("inf")
    (mine, _), (expected, _) = both(scores.to(dtype), None, 0.0, False)
    torch.testing.assert_close(mine, expected, equal_nan=True)
    assert mine[0, 0, 0].isnan().all()
    assert mine[0, 0, 1, 3] == 1
    assert mine[0, 0, 2, 3] == 0
    assert (mine[0, 0, 3] == mine[0, 0, 3, 0]).all()


def test_causal_with_more_queries_than_keys_is_finite(dtype: torch.dtype, generator: torch.Generator) -> None:
    scores = torch.randn(1, 2, 9, 4, generator=generator).to(dtype)
    (mine, _), (expected, _) = both(scores, None, 0.0, True)
    torch.testing.assert_close(mine, expected)
    assert (mine[:, :, 0] == 0.25).all()


def test_three_dimensions_and_more_rows_than_65535(dtype: torch.dtype, generator: torch.Generator) -> None:
    scores = torch.randn(3, 22_000, 5, generator=generator).to(dtype)
    (mine, dropped), (expected, expected_dropped) = both(scores, None, 0.1, False)
    torch.testing.assert_close(mine, expected, rtol=STEP[dtype], atol=1e-7)
    assert torch.equal(dropped == 0, expected_dropped == 0)


def test_non_contiguous_tensors_are_written_in_place(dtype: torch.dtype, generator: torch.Generator) -> None:
    scores = torch.randn(2, 3, 8, 6, generator=generator).to(dtype).transpose(2, 3)
    (mine, dropped), (expected, expected_dropped) = both(scores, None, 0.1, False)
    assert torch.equal(mine, expected)
    assert torch.equal(dropped, expected_dropped)
    written = scores.clone(memory_format=torch.preserve_format)
    ops.softmax_dropout_backward(written, expected, SCALE, 0.1, tempo.make_rng(11, 5), 3)
    contiguous = scores.contiguous()
    ops.softmax_dropout_backward(contiguous, expected.contiguous(), SCALE, 0.1, tempo.make_rng(11, 5), 3)
    torch.testing.assert_close(written, contiguous, rtol=2**-7, atol=1e-6)


def test_writing_is_counted(dtype: torch.dtype) -> None:
    scores = torch.randn(1, 1, 2, 8).to(dtype)
    version = scores._version
    ops.softmax_dropout_forward(scores, None, 1.0, 0.1, tempo.make_rng(1), 0, False)
    assert scores._version > version


def test_attention_agrees_with_the_reference_ops(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(2, 4, 19, 16, generator=generator, requires_grad=True) for _ in range(3)]
    mask = torch.rand(2, 19, generator=generator) < 0.8
    grad = torch.randn(2, 4, 19, 16, generator=generator)

    def run() -> list[Tensor]:
        out = tempo.attention(*inputs, mask, p=0.1, rng=tempo.make_rng(4, 9), site=1)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    mine = run()
    monkeypatch.setattr(ops, "softmax_dropout_forward", ops.reference_softmax_dropout_forward)
    monkeypatch.setattr(ops, "softmax_dropout_backward", ops.reference_softmax_dropout_backward)
    for a, b in zip(mine, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_other_dtypes_reach_the_reference() -> None:
    for dtype in (torch.float64, torch.float16):
        (mine, dropped), (expected, expected_dropped) = both(torch.randn(2, 2, 3, 9, dtype=dtype), None, 0.1, False)
        assert torch.equal(mine, expected)
        assert torch.equal(dropped, expected_dropped)


def test_does_not_depend_on_the_number_of_threads(threads, generator: torch.Generator) -> None:
    scores = torch.randn(4, 4, 100, 101, generator=generator)
    results = []
    for count in (1, 2, 3):
        threads(count)
        (mine, dropped), _ = both(scores, None, 0.1, False)
        results.append((mine, dropped))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_opcheck(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 2, 3, 9).to(dtype)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    rng = tempo.make_rng(1)
    torch.library.opcheck(ops.softmax_dropout_forward.default, (scores, mask, 0.5, 0.1, rng, 0, False))
    torch.library.opcheck(ops.softmax_dropout_forward.default, (scores, None, 0.5, 0.0, rng, 0, True))
    probabilities = torch.softmax(scores, -1)
    torch.library.opcheck(ops.softmax_dropout_backward.default, (torch.randn_like(scores), probabilities, 0.5, 0.1, rng, 0))
