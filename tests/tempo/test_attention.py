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


def test_tensors_that_do_not_fit_are_named() -> None:
    q, k, v = qkv()
    for tensors in ((q, k[:, :1], v), (q, k, v[:, :, :4]), (q[..., :3], k, v), (q[0], k[0], v[0])):
        with pytest.raises(ValueError, match=r"query \[B, N, Q, D\]"):
            tempo.attention(*tensors)
    with pytest.raises(ValueError, match="one floating dtype"):
        tempo.attention(q, k, v.bfloat16())


def test_a_mask_that_wants_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="does not compute"):
        tempo.attention(*qkv(), torch.zeros(1, N, S, S, requires_grad=True))


def test_non_contiguous_tensors_and_gradient() -> None:
    q, k, v = (torch.randn(B, S, N, D, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(3))
    grad = torch.randn(B, S, N, D, dtype=torch.float64).transpose(1, 2)
    ours, theirs = tempo.attention(q, k, v, padding(), p=0.3, rng=RNG, site=4), eager(q, k, v, padding(), 0.3)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(theirs, (q, k, v), grad), strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivative_is_refused() -> None:
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(tempo.attention(q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("shape", [(4, 6, 6), (2, 2, 6, 6)])
def test_combined_is_softmax_dropout_matmul(shape: tuple[int, ...]) -> None:
    combined = tempo.Combined(-1, 0.25)
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    value = torch.randn(*shape[:-1], 3, dtype=torch.float64, requires_grad=True)
    before = scores.detach().clone()
    for call in range(2):
        torch.manual_seed(5 + call)
        out = combined(scores, value)
        torch.manual_seed(5 + call)
        seed = torch.randint(-(2**63), 2**63 - 1, ()).item()
        keep = tempo.keep_mask(shape, 0.25, tempo.make_rng(seed), 0)
        expected = torch.softmax(scores, -1) * keep / 0.75 @ value
        torch.testing.assert_close(out, expected)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), (scores, value)) for y in (out, expected)), strict=True):
            torch.testing.assert_close(a, b)
    assert torch.equal(scores.detach(), before)
    combined.eval()
    torch.testing.assert_close(combined(scores, value), torch.softmax(scores, -1) @ value)


def combined_mask(combined: tempo.Combined, size: int = 16) -> Tensor:
    """What `combined` keeps: uniform scores times the identity show the dropped probabilities."""
    return combined(torch.zeros(2, size, size), torch.eye(size).expand(2, size, size)) != 0


def test_combined_draws_another_mask_in_every_layer_and_call_and_repeats_after_a_seed() -> None:
    layers = [tempo.Combined(-1, 0.5), tempo.Combined(-1, 0.5)]
    torch.manual_seed(3)
    masks = [combined_mask(layer) for layer in layers * 2]
    for i, mask in enumerate(masks):
        assert all(not torch.equal(mask, other) for other in masks[:i])
    torch.manual_seed(3)
    assert torch.equal(combined_mask(layers[0]), masks[0])


def test_combined_draws_the_same_mask_again_under_checkpointing() -> None:
    combined = tempo.Combined(-1, 0.5)
    scores, value = torch.randn(2, 8, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    results = []
    for run in (combined, lambda *t: checkpoint(combined, *t, use_reentrant=False)):
        torch.manual_seed(3)
        out = run(scores, value)
        torch.randn(7)  # moves the generator on between the passes
        results.append((out, *torch.autograd.grad(out.square().sum(), (scores, value))))
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)


def test_combined_compiles_and_uses_one_mask_both_ways() -> None:
    combined = torch.compile(tempo.Combined(-1, 0.5), fullgraph=True)
    scores, size = torch.zeros(2, 16, 16), 16
    masks = []
    for _ in range(3):
        value = torch.eye(size).expand(2, size, size).clone().requires_grad_()
        out = combined(scores, value)
        (grad,) = torch.autograd.grad(out, value, torch.eye(size).expand(2, size, size))
        torch.testing.assert_close(grad, out.detach().transpose(1, 2))
        masks.append(out != 0)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


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


def test_under_autocast() -> None:
    leaves = [torch.randn(2, 2, 5, 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tempo.attention(*leaves)
        combined = tempo.Combined(-1, 0.0)(leaves[0] @ leaves[1].transpose(-2, -1), leaves[2])
    assert y.dtype == combined.dtype == torch.bfloat16
    combined.float().sum().backward()
    gradients = torch.autograd.grad(y.float().sum(), leaves)
    expected = torch.autograd.grad(tempo.attention(*leaves).sum(), leaves)
    for mine, exact in zip(gradients, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, exact, rtol=0.05, atol=0.02)
