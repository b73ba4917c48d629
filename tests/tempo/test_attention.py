from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tempo
from tests.three_way import LOW_PRECISION, assert_three_way

RNG = tempo.make_rng(11, 6)
B, N, S, D = 3, 2, 9, 5


def qkv(dtype: torch.dtype = torch.float32, queries: int = S, keys: int = S) -> list[Tensor]:
    return [torch.randn(B, N, length, D).to(dtype).requires_grad_() for length in (queries, keys, keys)]


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool = False) -> Tensor:
    """softmax, dropout, matmul, in PyTorch's operations and with the mask spelled out."""
    scores = q @ k.transpose(-2, -1) * D**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
    if causal:
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(k.shape[-2] - q.shape[-2] + 1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    probabilities = torch.softmax(scores, -1)
    if p > 0:
        probabilities = probabilities * tempo.keep_mask(probabilities.shape, p, RNG, 4) / (1 - p)
    return probabilities @ v


def padding() -> Tensor:
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[1, 4:] = False
    mask[2, 1:] = False
    return mask


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradients_agree_with_eager(p: float, masked: bool, causal: bool) -> None:
    tensors, mask = qkv(torch.float64), padding() if masked else None
    ours = tempo.attention(*tensors, mask, p=p, rng=RNG, site=4, causal=causal)
    theirs = eager(*tensors, mask, p, causal)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, tensors, grad), torch.autograd.grad(theirs, tensors, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_16_bit_holds_the_three_way_rule(dtype: torch.dtype) -> None:
    low = qkv(dtype)
    exact = [t.detach().double().requires_grad_() for t in low]
    grad = torch.randn(B, N, S, D).to(dtype)
    outputs = [
        (y := f(*t), *torch.autograd.grad(y, t, grad.to(y.dtype)))
        for f, t in [
            (lambda *t: tempo.attention(*t, padding(), p=0.2, rng=RNG, site=4), low),
            (lambda *t: eager(*t, padding(), 0.2), low),
            (lambda *t: eager(*t, padding(), 0.2), exact),
        ]
    ]
    for ours, theirs, true in zip(*outputs, strict=True):
        assert_three_way(ours, theirs, true, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
@pytest.mark.parametrize("form", ["bool", "infinite", "finite"])
def test_a_fully_masked_row_is_uniform_and_finite(dtype: torch.dtype, form: str) -> None:
    tensors = qkv(dtype)
    keep = torch.ones(B, S, dtype=torch.bool)
    keep[1] = False
    mask = keep
    if form != "bool":
        lowest = -torch.inf if form == "infinite" else torch.finfo(dtype).min
        mask = torch.where(keep, 0.0, lowest).to(dtype)[:, None, None, :]
    out = tempo.attention(*[t * 3 for t in tensors], mask)
    torch.testing.assert_close(
        out[1], (tensors[2][1] * 3).float().mean(1, keepdim=True).expand(N, S, D).to(dtype), rtol=2e-2, atol=2e-2
    )
    for grad in torch.autograd.grad(out.float().square().sum(), tensors):
        assert torch.isfinite(grad).all()


def test_it_keeps_query_key_value_and_the_probabilities_only() -> None:
    q, k, v = (torch.randn(2, 4, 64, 16).bfloat16().requires_grad_() for _ in range(3))
    kept = tempo.saved_bytes(lambda *t: tempo.attention(*t, p=0.1, rng=RNG), q, k, v)
    assert sorted(item.num_bytes for item in kept.items) == sorted([16, *[q.numel() * 2] * 3, 2 * 4 * 64 * 64 * 2])


def test_masks_are_the_same_under_checkpointing_and_compile() -> None:
    tensors = qkv()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tempo.attention(q, k, v, p=0.4, rng=RNG, site=2)

    plain = f(*tensors)
    grads = torch.autograd.grad(plain.square().sum(), tensors)
    for other in (lambda *t: checkpoint(f, *t, use_reentrant=False), torch.compile(f, fullgraph=True)):
        out = other(*tensors)
        torch.testing.assert_close(out, plain)
        for a, b in zip(torch.autograd.grad(out.square().sum(), tensors), grads, strict=True):
            torch.testing.assert_close(a, b)


def test_other_lengths_of_queries_and_keys() -> None:
    tensors = qkv(torch.float64, queries=4, keys=7)
    torch.testing.assert_close(tempo.attention(*tensors, causal=True), eager(*tensors, None, 0.0, causal=True))


def test_gradcheck() -> None:
    tensors = qkv(torch.float64)
    assert torch.autograd.gradcheck(lambda *t: tempo.attention(*t, padding(), p=0.3, rng=RNG, site=1), tensors)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_probabilities(p: float) -> None:
    tensors = qkv()
    out = tempo.attention(*tensors, p=p, rng=RNG)
    expected = eager(*tensors, None, 0.0) if p == 0 else torch.zeros_like(out)
    torch.testing.assert_close(out, expected)


def test_missing_generator_and_wrong_masks_are_named() -> None:
    tensors = qkv()
    with pytest.raises(ValueError, match="make_rng"):
        tempo.attention(*tensors, p=0.1)
    for mask in (torch.ones(B, S + 1, dtype=torch.bool), torch.ones(B, 1, 1, S, dtype=torch.int64), torch.ones(2, 1, 1, S)):
        with pytest.raises(ValueError, match="attention_mask"):
            tempo.attention(*tensors, mask)


@pytest.mark.parametrize("shape", [(4, 6, 6), (2, 2, 6, 6)])
def test_combined_is_softmax_dropout_matmul(shape: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    combined = tempo.Combined(-1, 0.25)
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    value = torch.randn(*shape[:-1], 3, dtype=torch.float64, requires_grad=True)
    before = scores.detach().clone()
    for call in range(2):
        out = combined(scores, value)
        keep = tempo.keep_mask(shape, 0.25, tempo.make_rng(5, call * shape[0]), 0)
        expected = torch.softmax(scores, -1) * keep / 0.75 @ value
        torch.testing.assert_close(out, expected)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), (scores, value)) for y in (out, expected)), strict=True):
            torch.testing.assert_close(a, b)
    assert torch.equal(scores.detach(), before)
    combined.eval()
    torch.testing.assert_close(combined(scores, value), torch.softmax(scores, -1) @ value)


def test_combined_takes_the_last_dimension_only() -> None:
    from tempo.combined import Combined

    with pytest.raises(ValueError, match="last dimension"):
        Combined(1, 0.1)(torch.ones(2, 3, 3), torch.ones(2, 3, 3))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_opcheck(p: float) -> None:
    scores = torch.randn(2, 2, 4, 4)
    torch.library.opcheck(torch.ops.tempo.softmax_dropout_forward.default, (scores.clone(), None, 0.5, p, RNG, 1, True))
    probabilities = torch.softmax(scores, -1)
    torch.library.opcheck(
        torch.ops.tempo.softmax_dropout_backward.default, (torch.randn_like(scores), probabilities, 0.5, p, RNG, 1)
    )
