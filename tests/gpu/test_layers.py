"""The layers on the GPU: near to float64, the masks of the CPU, compiled, checkpointed, on any stream and on a second GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tempo
from tests.gpu.op_cases import CASES, OpCase, flat, mapped, moved, ops, run
from tests.three_way import assert_three_way

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BATCH, HEADS, LENGTH, WIDTH, HIDDEN = 4, 4, 33, 16, 64
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(x: Tensor, rng: Tensor) -> Tensor:
    """Attention with sequences of 0, 11, 22 and 33 tokens; the mask is made on the device."""
    query, key, value = (f * x.view(BATCH, LENGTH, HEADS, WIDTH).transpose(1, 2) for f in (1.0, 0.5, 2.0))
    keep = torch.arange(LENGTH, device=x.device) < 11 * torch.arange(BATCH, device=x.device)[:, None]
    return tempo.attention(query, key, value, keep, p=0.1, rng=rng, site=1).transpose(1, 2).reshape(x.shape)


# x [batch, length, hidden], weight and bias [hidden], rng -> [batch, length, hidden]
LAYERS: dict[str, Layer] = {
    "gelu": lambda x, weight, bias, rng: tempo.gelu(x * weight, side_bits=4),
    "gelu_inplace": lambda x, weight, bias, rng: tempo.gelu(x * weight, "tanh", inplace=True),
    "layer_norm": lambda x, weight, bias, rng: tempo.layer_norm(x, weight, bias),
    "dropout": lambda x, weight, bias, rng: tempo.dropout(x * weight, 0.1, rng, 0),
    "attention": lambda x, weight, bias, rng: attend(x * weight, rng),
    "mlp": lambda x, weight, bias, rng: tempo.mlp(x, torch.outer(weight, bias), bias, torch.outer(bias, weight), 2.0 * bias),
    "chain": lambda x, weight, bias, rng: tempo.dropout_add_layer_norm(x, 2.0 * bias, 0.5 * x, weight, bias, 0.1, rng, 2),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def inputs(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, weight, bias and the gradient; the same on every device."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, LENGTH, HIDDEN), (HIDDEN,), (HIDDEN,), (BATCH, LENGTH, HIDDEN)]
    x, weight, bias, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return [t.to(dtype).to(device) for t in (x, 1.0 + 0.2 * weight, 0.1 * bias, grad)]


def forward_backward(layer: Layer, tensors: list[Tensor], rng: Tensor | None = None) -> list[Tensor]:
    """The output and the gradients of x, weight and bias."""
    *leaves, grad = (t.detach().clone() for t in tensors)
    leaves = [t.requires_grad_() for t in leaves]
    y = layer(*leaves, tempo.make_rng(9, 1000, grad.device) if rng is None else rng)
    found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


@each_dtype
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("side_bits", [1, 4])
def test_gelu_against_pytorch_and_float64(dtype: torch.dtype, approximate: str, side_bits: int, device: torch.device) -> None:
    x, _, _, grad = inputs(dtype, device)
    results = []
    for function, kind in (
        (partial(tempo.gelu, approximate=approximate, side_bits=side_bits), dtype),
        (partial(F.gelu, approximate=approximate), dtype),
        (partial(F.gelu, approximate=approximate), torch.float64),
    ):
        leaf = x.to(kind).requires_grad_()
        y = function(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, grad.to(kind))))
    # What the rounding of y costs the gradient: tempo/gelu.py.
    slack = 2e-4 if dtype == torch.float32 else 0.07 if side_bits == 1 else 0.02
    for (mine, theirs, exact), atol in zip(zip(*results, strict=True), (1e-6, slack), strict=True):
        assert_three_way(mine, theirs, exact, atol)


@each_dtype
def test_layer_norm_against_pytorch_and_float64(dtype: torch.dtype, device: torch.device) -> None:
    tensors = inputs(dtype, device)
    kinds = [(tempo.layer_norm, dtype), (F.layer_norm, dtype), (F.layer_norm, torch.float64)]
    results = []
    for function, kind in kinds:
        middle = () if function is tempo.layer_norm else ([HIDDEN],)
        results.append(
            forward_backward(lambda x, w, b, _, f=function, m=middle: f(x, *m, w, b, 1e-12), moved(tensors, dtype=kind))
        )
    slack = 1e-5 if dtype == torch.float32 else 4e-3
    for mine, theirs, exact in zip(*results, strict=True):
        assert_three_way(mine, theirs, exact, slack * max(1.0, exact.abs().max().item()))


@each_dtype
def test_attention_against_pytorch_and_float64(dtype: torch.dtype, device: torch.device) -> None:
    rng = tempo.make_rng(9, 1000, device)
    keep = tempo.keep_mask((BATCH, HEADS, LENGTH, LENGTH), 0.1, rng, 1)
    tensors = [torch.randn(BATCH, HEADS, LENGTH, WIDTH).to(dtype).to(device) for _ in range(4)]

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        probabilities = torch.softmax(query * WIDTH**-0.5 @ key.mT, -1)
        return torch.where(keep, probabilities / 0.9, 0.0).to(value.dtype) @ value

    results = []
    for function, kind in (
        (partial(tempo.attention, p=0.1, rng=rng, site=1), dtype),
        (theirs, dtype),
        (theirs, torch.float64),
    ):
        *leaves, grad = (t.to(kind) for t in tensors)
        leaves = [t.requires_grad_() for t in leaves]
        y = function(*leaves)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, grad)))
    for mine, torchs, exact in zip(*results, strict=True):
        assert_three_way(mine, torchs, exact, 1e-5 if dtype == torch.float32 else 2e-3)


@each_dtype
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("shape", [(3, 1023), (5, 7), (2, 3, 33, 33), (65_539, 5)])
def test_masks_are_those_of_the_cpu(dtype: torch.dtype, p: float, shape: tuple[int, ...], device: torch.device) -> None:
    for seed, first, site in ((0, 0, 0), (-7, 3, 72), (2**63 - 1, 10**11 + 1, 2**32 + 3)):
        on_cpu, on_device = tempo.make_rng(seed, first), tempo.make_rng(seed, first, device)
        keep = tempo.keep_mask(shape, p, on_cpu, site)
        assert torch.equal(tempo.keep_mask(shape, p, on_device, site).cpu(), keep)
        y = ops.dropout(torch.ones(shape, dtype=dtype, device=device), p, on_device, site)
        assert torch.equal(y.cpu() != 0, keep)
        assert torch.equal(y.cpu(), ops.dropout(torch.ones(shape, dtype=dtype), p, on_cpu, site))
        if len(shape) == 4:
            dropped = ops.softmax_dropout_forward(
                torch.zeros(shape, dtype=dtype, device=device), None, 1.0, p, on_device, site, False
            )
            assert torch.equal(dropped.cpu() != 0, keep)


@each_dtype
@each_layer
def test_the_gpu_gives_what_the_cpu_gives(layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
    on_cpu, on_device = (forward_backward(layer, inputs(dtype, where)) for where in (torch.device("cpu"), device))
    tolerance = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    for a, b in zip(on_device, on_cpu, strict=True):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@each_layer
def test_compiled_equals_eager(layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
    torch.compiler.reset()
    tensors = inputs(dtype, device)
    eager, compiled = (forward_backward(f, tensors) for f in (layer, torch.compile(layer, fullgraph=True)))
    # Compiled code keeps more digits between fused 16-bit operations.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for a, b in zip(compiled, eager, strict=True):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * scale)


@each_dtype
@each_layer
def test_checkpointed_equals_kept_bit_for_bit(layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
    tensors = inputs(dtype, device)
    kept = forward_backward(layer, tensors)
    again = forward_backward(lambda *arguments: checkpoint(layer, *arguments, use_reentrant=False), tensors)
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))


def test_the_host_never_waits(cuda: torch.device) -> None:
    """Neither forward nor backward copies to the host or waits for the device."""
    tensors, rng = inputs(torch.bfloat16, cuda), tempo.make_rng(1, device=cuda)

    def all_layers(x: Tensor, weight: Tensor, bias: Tensor, rng: Tensor) -> Tensor:
        for layer in LAYERS.values():
            x = layer(x, weight, bias, rng)
        return x

    forward_backward(all_layers, tensors, rng)  # handles of cuBLAS are made at the first call
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_backward(all_layers, tensors, rng)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_run_on_the_current_stream(case: OpCase, cuda: torch.device) -> None:
    """The stream first sleeps and then writes the inputs: a kernel on another stream would read what was there before."""
    arguments = case.make((64, 256), torch.bfloat16, cuda)
    expected = run(case.op, arguments)
    stale = mapped(lambda t: torch.zeros_like(t) if t.is_floating_point() else t, arguments)
    stream = torch.cuda.Stream(cuda)
    stream.wait_stream(torch.cuda.current_stream(cuda))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for old, new in zip(flat(stale), flat(arguments), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        found = run(case.op, stale)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_second_device(case: OpCase, cuda: torch.device) -> None:
    """The kernel runs where its tensors lie, whatever the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    second = torch.device("cuda:1")
    arguments = case.make((64, 100), torch.bfloat16, cuda)
    expected = run(case.op, arguments)
    found = run(case.op, moved(arguments, device=second))
    assert torch.cuda.current_device() == cuda.index
    for a, b in zip(found, expected, strict=True):
        assert a.device == second
        assert torch.equal(a.to(cuda), b)
