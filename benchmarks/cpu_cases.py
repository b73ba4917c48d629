"""The layers beside PyTorch's on a CPU, at the sizes of BERT; benchmarks/layers.py measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tempo
from benchmarks.foreach_lamb import ForeachLamb
from models.bert import BertForPreTraining
from models.config import BertConfig
from pretrain.optimizer import Lamb, parameter_groups
from tempo.layer_norm import exact_columns

ops = torch.ops.tempo


@dataclass(frozen=True)
class Comparison:
    """What is timed, the least bytes `ours` moves, and the ratio to stay below.

    `before` runs untimed before each call and hands its result to it: inputs that are overwritten are made anew there.
    """

    name: str
    ours: Callable[..., object]
    theirs: dict[str, Callable[..., object]]
    min_bytes: int
    targets: dict[str, float]
    before: Callable[[], object] | None = None


def gelu_comparison(dtype: torch.dtype, approximate: str, side_bits: int) -> Comparison:
    """In-place GELU forward and backward, against F.gelu under autograd and against preallocated outputs."""
    x, grad = (torch.randn(4096, 4096).to(dtype) for _ in range(2))
    out, dx = torch.empty_like(x), torch.empty_like(x)
    leaf = x.clone().requires_grad_()

    def ours(given: Tensor) -> object:
        # The clone's own backward hands the gradient on as it is.
        return torch.autograd.grad(tempo.gelu(given, approximate, side_bits, inplace=True), leaf, grad)

    def theirs(given: Tensor) -> object:
        return torch.autograd.grad(F.gelu(given, approximate=approximate), leaf, grad)

    def preallocated(_: Tensor) -> object:
        torch.ops.aten.gelu.out(x, approximate=approximate, out=out)
        return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=dx)

    least = x.numel() * (5 * x.element_size() + side_bits // 4)
    name = f"GELU ({'erf' if approximate == 'none' else 'tanh'}, {side_bits} bit) 4096 x 4096"
    targets = {"F.gelu, autograd": 0.6, "preallocated": 1.0}
    return Comparison(name, ours, {"F.gelu, autograd": theirs, "preallocated": preallocated}, least, targets, leaf.clone)


def layer_norm_comparison(dtype: torch.dtype) -> Comparison:
    x, grad = (torch.randn(4096, 1024).to(dtype) for _ in range(2))
    leaf = x.clone().requires_grad_()
    ours, theirs = tempo.InplaceLayerNorm(1024, dtype=dtype), torch.nn.LayerNorm(1024, eps=1e-12, dtype=dtype)

    def run(layer: torch.nn.LayerNorm) -> object:
        return torch.autograd.grad(layer(leaf), (leaf, layer.weight, layer.bias), grad)

    least = 5 * x.numel() * x.element_size()
    return Comparison(
        "LayerNorm 4096 x 1024", lambda: run(ours), {"nn.LayerNorm": lambda: run(theirs)}, least, {"nn.LayerNorm": 0.8}
    )


def dropout_comparison(dtype: torch.dtype) -> Comparison:
    leaf = torch.randn(4096, 1024).to(dtype).requires_grad_()
    grad = torch.randn(4096, 1024).to(dtype)
    rng = tempo.make_rng(1)

    def ours() -> object:
        return torch.autograd.grad(tempo.dropout(leaf, 0.1, rng, 0), leaf, grad)

    def theirs() -> object:
        return torch.autograd.grad(F.dropout(leaf, 0.1), leaf, grad)

    least = 4 * leaf.numel() * leaf.element_size()
    return Comparison("dropout 4096 x 1024", ours, {"F.dropout": theirs}, least, {})


def chain_comparison(dtype: torch.dtype) -> Comparison:
    """bias + dropout + residual + LayerNorm in one kernel each way, against PyTorch's four operations."""
    x, residual = (torch.randn(4096, 1024).to(dtype).requires_grad_() for _ in range(2))
    bias = torch.zeros(1024, dtype=dtype, requires_grad=True)
    grad = torch.randn(4096, 1024).to(dtype)
    mine = tempo.DropoutAddLayerNorm(1024, p=0.1, site=0, dtype=dtype)
    torchs = torch.nn.LayerNorm(1024, eps=1e-12, dtype=dtype)
    rng = tempo.make_rng(1)

    def ours() -> object:
        return torch.autograd.grad(mine(x, residual, rng, bias), (x, bias, residual, mine.weight, mine.bias), grad)

    def theirs() -> object:
        y = torchs(F.dropout(x + bias, 0.1) + residual)
        return torch.autograd.grad(y, (x, bias, residual, torchs.weight, torchs.bias), grad)

    least = 7 * x.numel() * x.element_size()
    return Comparison("bias, dropout, residual, LayerNorm 4096 x 1024", ours, {"PyTorch": theirs}, least, {"PyTorch": 0.3})


def mlp_comparison(dtype: torch.dtype) -> Comparison:
    """A whole MLP. It is there for the bytes it keeps, which its name says; its time should be that of the three layers."""
    x, grad = (torch.randn(512, 1024).to(dtype) for _ in range(2))
    x.requires_grad_()
    mine = tempo.MLP(1024, 4096, dtype=dtype)
    torchs = torch.nn.Sequential(mine.dense_in, torch.nn.GELU(), mine.dense_out)
    leaves = [x, *mine.parameters()]
    kept, others = (tempo.saved_bytes(layer, x).total_bytes / 2**20 for layer in (mine, torchs))

    def ours() -> object:
        return torch.autograd.grad(mine(x), leaves, grad)

    def theirs() -> object:
        return torch.autograd.grad(torchs(x), leaves, grad)

    # Per weight: read in either pass, gradient written. Per [..., 4096]: six in GEMMs, two in GELU, four in its gradient.
    weights, wide, narrow = 2 * 1024 * 4096, 512 * 4096, 512 * 1024
    least = (3 * weights + 12 * wide + 6 * narrow) * x.element_size()
    name = f"MLP 512 x 1024 x 4096 (keeps {kept:.0f} MiB, PyTorch {others:.0f} MiB)"
    return Comparison(name, ours, {"Linear, GELU, Linear": theirs}, least, {"Linear, GELU, Linear": 1.05})


def attention_comparison(dtype: torch.dtype) -> Comparison:
    shape = (4, 16, 512, 64)
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape).to(dtype)
    keep = torch.ones(4, 512, dtype=torch.bool)
    keep[1:, 400:] = False
    added = torch.zeros(4, 1, 1, 512).masked_fill(~keep[:, None, None], torch.finfo(dtype).min).to(dtype)
    rng = tempo.make_rng(1)

    def ours() -> object:
        return torch.autograd.grad(tempo.attention(*leaves, keep, p=0.1, rng=rng, site=0), leaves, grad)

    def theirs() -> object:
        query, key, value = leaves
        scores = query @ key.transpose(-2, -1) * 64**-0.5 + added
        return torch.autograd.grad(F.dropout(torch.softmax(scores, -1), 0.1) @ value, leaves, grad)

    scores_bytes = 4 * 16 * 512 * 512 * leaves[0].element_size()
    name = "attention with dropout 4 x 16 heads, S 512, D 64"
    return Comparison(name, ours, {"eager": theirs}, 14 * scores_bytes, {"eager": 0.6})


def lamb_comparison(preset: str = "bert_base") -> Comparison:
    """A whole optimizer step, norm of all gradients included, over the tensors of a BERT with float32 parameters."""

    def optimizer(kind: type[Lamb]) -> Lamb:
        model = BertForPreTraining(BertConfig.preset(preset))
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        return kind(parameter_groups(model, 0.01), lr=1e-4)

    ours, theirs = optimizer(Lamb), optimizer(ForeachLamb)
    decayed, undecayed = (sum(p.numel() for p in group["params"]) for group in ours.param_groups)
    # g for the norm; g, w, m, v read and m, v written; m, v, w read and w written, without a trust ratio w alone written.
    least = decayed * (4 + 24 + 16) + undecayed * (4 + 28)
    num_tensors = sum(len(group["params"]) for group in ours.param_groups)
    name = f"LAMB, {num_tensors} tensors of {preset}, {(decayed + undecayed) / 1e6:.0f} M parameters"
    return Comparison(name, ours.step, {"_foreach": theirs.step}, least, {"_foreach": 0.6})


def kernel_comparisons(dtype: torch.dtype) -> list[Comparison]:
    """The forward kernels of the ops alone, against PyTorch's."""
    x = torch.randn(4096, 1024).to(dtype)
    weight, bias = torch.ones(1024, dtype=dtype), torch.zeros(1024, dtype=dtype)
    columns = exact_columns(weight, bias, dtype)
    scores = torch.randn(4, 16, 512, 512).to(dtype)
    rng = tempo.make_rng(1)
    return [
        Comparison(
            "layer_norm_forward 4096 x 1024",
            lambda: ops.layer_norm_forward(x, weight, bias, 1e-12, columns),
            {"F.layer_norm": lambda: F.layer_norm(x, (1024,), weight, bias, 1e-12)},
            2 * x.numel() * x.element_size(),
            {},
        ),
        Comparison(
            "softmax_dropout_forward 4 x 16 x 512 x 512",
            lambda: ops.softmax_dropout_forward(scores, None, 1.0, 0.1, rng, 0, False),
            {"softmax, F.dropout": lambda: F.dropout(torch.softmax(scores, -1), 0.1)},
            3 * scores.numel() * scores.element_size(),
            {},
        ),
    ]


def comparisons(dtype: torch.dtype) -> list[Comparison]:
    gelus = [gelu_comparison(dtype, approximate, 1) for approximate in ("none", "tanh")]
    if dtype != torch.float32:
        gelus.append(gelu_comparison(dtype, "none", 4))
    layers = [layer_norm_comparison(dtype), dropout_comparison(dtype), chain_comparison(dtype), attention_comparison(dtype)]
    layers.append(mlp_comparison(dtype))
    lamb = [lamb_comparison()] if dtype == torch.float32 else []  # the parameters are float32 whatever the layers compute in
    return [*gelus, *layers, *lamb, *kernel_comparisons(dtype)]
