from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tempo

ops = torch.ops.tempo
H, INNER = 24, 56


def parameters(dtype: torch.dtype, bias: bool = True) -> list[Tensor | None]:
    torch.manual_seed(1)
    made = [torch.randn(INNER, H), torch.randn(INNER), torch.randn(H, INNER), torch.randn(H)]
    return [None if t.dim() == 1 and not bias else (t * 0.2).to(dtype).requires_grad_() for t in made]


def plain(
    x: Tensor, weight_in: Tensor, bias_in: Tensor | None, weight_out: Tensor, bias_out: Tensor | None, approximate: str
) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight_in, bias_in), approximate=approximate), weight_out, bias_out)


def gradients(run, x: Tensor, given: list[Tensor | None], approximate: str) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), *(None if t is None else t.detach().requires_grad_() for t in given)]
    y = run(*leaves, approximate)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], grad)]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(approximate: str, bias: bool) -> None:
    x = torch.randn(2, 3, H, dtype=torch.float64, requires_grad=True)
    given = parameters(torch.float64, bias)
    leaves = (x, *(t for t in given if t is not None))
    assert torch.autograd.gradcheck(lambda *leaves: tempo.mlp(*fill(leaves, given), approximate), leaves)


def fill(leaves: tuple[Tensor, ...], given: list[Tensor | None]) -> list[Tensor | None]:
    """Put None where `given` has None."""
    x, *rest = leaves
    remaining = iter(rest)
    return [x, *(None if t is None else next(remaining) for t in given)]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_way(dtype: torch.dtype, approximate: str) -> None:
    x, given = torch.randn(65, 3, H).to(dtype), parameters(dtype)
    ours, pytorch = gradients(tempo.mlp, x, given, approximate), gradients(plain, x, given, approximate)
    exact = gradients(plain, x.double(), [None if t is None else t.double() for t in given], approximate)
    for mine, theirs, truth in zip(ours, pytorch, exact, strict=True):
        allowed = 2.0 * (theirs.double() - truth).abs().max() + 1e-6 * truth.abs().max()
        assert (mine.double() - truth).abs().max() <= allowed


def test_float32_parameters_with_16_bit_activations() -> None:
    x, given = torch.randn(5, 7, H).bfloat16(), parameters(torch.float32)
    ours = gradients(tempo.mlp, x, given, "none")
    lower = gradients(plain, x, [None if t is None else t.bfloat16() for t in given], "none")
    assert [t.dtype for t in ours] == [torch.bfloat16] * 2 + [torch.float32] * 4
    for mine, theirs in zip(ours, lower, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.05, atol=0.05 * float(theirs.abs().max()))


def test_a_second_backward_gives_the_same_gradients() -> None:
    x, given = torch.randn(4, H), parameters(torch.float32)
    leaves = [x.requires_grad_(), *given]
    y = tempo.mlp(*leaves)
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    third = torch.autograd.grad(y.sum(), leaves)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), leaves)


def test_only_the_last_backward_writes_over_what_was_kept() -> None:
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        if t.shape == (4, INNER):
            kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = tempo.mlp(torch.randn(4, H, requires_grad=True), *parameters(torch.float32))
    (pre,) = kept
    before = pre.clone()
    y.sum().backward(retain_graph=True)
    assert torch.equal(pre, before)
    y.sum().backward()
    assert torch.equal(pre, ops.gelu_forward(before, "none", 1)[0])


@pytest.mark.parametrize("rows", [1, 7, 33, 1023])
def test_odd_numbers_of_rows_and_a_transposed_input(rows: int) -> None:
    base, given = torch.randn(H, rows), parameters(torch.float32)
    ours, expected = (gradients(run, base.t(), given, "tanh") for run in (tempo.mlp, plain))
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert tempo.mlp(torch.empty(0, 3, H), *given).shape == (0, 3, H)


def test_the_same_layer_twice() -> None:
    x, given = torch.randn(9, H), parameters(torch.float32)
    results = gradients(lambda x, *rest: tempo.mlp(tempo.mlp(x, *rest), *rest), x, given, "none")
    expected = gradients(lambda x, *rest: plain(plain(x, *rest), *rest), x, given, "none")
    for mine, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", range(5))
def test_any_single_gradient(wanted: int) -> None:
    leaves = [torch.randn(3, H), *(t.detach() for t in parameters(torch.float32) if t is not None)]
    leaves[wanted].requires_grad_()
    (gradient,) = torch.autograd.grad(tempo.mlp(*leaves).square().sum(), leaves[wanted])
    (expected,) = torch.autograd.grad(plain(*leaves, "none").square().sum(), leaves[wanted])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def test_it_keeps_its_input_and_what_enters_gelu() -> None:
    layer = tempo.MLP(H, INNER)
    x = torch.randn(8, H, requires_grad=True)
    kept = tempo.saved_bytes(layer, x)
    assert sorted((item.shape, item.num_bytes) for item in kept.items) == [((8, H), 8 * H * 4), ((8, INNER), 8 * INNER * 4)]


def test_compiled_equals_eager() -> None:
    layer = tempo.MLP(H, INNER, approximate="tanh")
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(6, H, requires_grad=True)
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        y = run(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        y.square().sum().backward(inputs=list(layer.parameters()))
        results.append([y.detach(), dx, *(p.grad.clone() for p in layer.parameters())])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(eager, other)


def test_under_activation_checkpointing() -> None:
    layer, x = tempo.MLP(H, INNER), torch.randn(6, H, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    (dx,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)
    assert torch.equal(dx, expected)


def test_opcheck() -> None:
    grad, x = torch.randn(5, 8), torch.randn(5, 8)
    torch.library.opcheck(ops.gelu_recompute_backward.default, (grad, x, "none"))
    torch.library.opcheck(ops.gelu_recompute_backward_.default, (grad.clone(), x.clone(), "tanh"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_in": torch.zeros(INNER, H + 1)}, r"needs weight_in \[I, 24\]"),
        ({"bias_in": torch.zeros(H)}, "bias_in"),
        ({"weight_out": torch.zeros(H, INNER + 1)}, "weight_out"),
        ({"bias_out": torch.zeros(H + 1)}, "bias_out"),
        ({"x": torch.zeros(2, H, dtype=torch.int64)}, "floating-point"),
        ({"approximate": "relu"}, "approximate must be 'none' or 'tanh', got 'relu'"),
    ],
)
def test_mistakes_are_named(change: dict, message: str) -> None:
    names = ("weight_in", "bias_in", "weight_out", "bias_out")
    given = dict(zip(names, parameters(torch.float32), strict=True)) | {"x": torch.zeros(2, H), "approximate": "none"}
    with pytest.raises(ValueError, match=message):
        tempo.mlp(**(given | change))


def test_under_autocast() -> None:
    layer, x = tempo.MLP(H, INNER), torch.randn(6, H, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
