"""The ops of Tempo's layers at BERT-Large's sizes on a GPU, forward and backward apart, each beside PyTorch's own.

A case states the least bytes that the operation has to move; benchmarks/layers_gpu.py measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import tempo
from benchmarks.foreach_lamb import ForeachLamb
from models.bert import BertForPreTraining
from models.config import BertConfig
from pretrain.optimizer import Lamb, parameter_groups
from tempo.layer_norm import exact_columns

_EPS, _P = 1e-12, 0.1
_FLOAT_BYTES = 4
# A device with less memory than this takes a quarter of the tokens.
_LARGE_DEVICE_BYTES = 32 << 30
ops = torch.ops.tempo


@dataclass(frozen=True)
class Sizes:
    """BERT-Large's, with as many tokens as make every tensor much larger than an L2 cache."""

    tokens: int = 65_536
    hidden: int = 1024
    intermediate: int = 4096
    num_heads: int = 16
    sequence_lengths: tuple[int, ...] = (128, 512)
    optimizer_preset: str = "bert_large"
    optimizer_layers: int = 4

    @staticmethod
    def for_memory(total_bytes: int) -> Sizes:
        return Sizes() if total_bytes >= _LARGE_DEVICE_BYTES else Sizes(tokens=16_384)


@dataclass(frozen=True)
class Case:
    """One direction of one op at one size.

    Attributes:
        min_bytes: the least that has to be read and written.
        before: runs untimed before each call; makes anew what the op overwrites.
        has_goal: whether it is to come near the copy speed (layers_gpu.GOAL).
    """

    op: str
    direction: str
    size: str
    min_bytes: int
    ours: Callable[[], object]
    theirs: Callable[[], object]
    before: Callable[[], object] | None = None
    has_goal: bool = False


Build = Callable[[torch.dtype, torch.device], list[Case]]


def _randn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, count: int) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]


def _backward_of(output: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> Callable[[], object]:
    """PyTorch's backward pass alone: the graph is built once, untimed, and kept."""
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def gelu_cases(sizes: Sizes, approximate: str, side_bits: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Output and side bits kept; PyTorch keeps the input."""
    x, grad = _randn((sizes.tokens, sizes.intermediate), dtype, device, 2)
    y, side = ops.gelu_forward(x, approximate, side_bits)
    name = f"GELU ({'erf' if approximate == 'none' else 'tanh'}, {side_bits} bit)"
    size = f"{sizes.tokens} x {sizes.intermediate}"
    return [
        Case(
            name,
            "forward",
            size,
            2 * x.nbytes + side.nbytes,
            lambda: ops.gelu_forward(x, approximate, side_bits),
            lambda: F.gelu(x, approximate=approximate),
            has_goal=True,
        ),
        Case(
            name,
            "backward",
            size,
            3 * x.nbytes + side.nbytes,
            lambda: ops.gelu_backward(grad, y, side, approximate, side_bits),
            lambda: torch.ops.aten.gelu_backward(grad, x, approximate=approximate),
            has_goal=True,
        ),
    ]


def gelu_recompute_cases(sizes: Sizes, approximate: str, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """The backward pass of the MLP that keeps GELU's input: its gradient, and the output once more for the next weight's."""
    x, grad = _randn((sizes.tokens, sizes.intermediate), dtype, device, 2)

    def theirs() -> object:
        return torch.ops.aten.gelu_backward(grad, x, approximate=approximate), F.gelu(x, approximate=approximate)

    return [
        Case(
            f"GELU ({'erf' if approximate == 'none' else 'tanh'}) and its output from the input",
            "backward",
            f"{sizes.tokens} x {sizes.intermediate}",
            4 * x.nbytes,
            lambda: ops.gelu_recompute_backward(grad, x, approximate),
            theirs,
            has_goal=True,
        )
    ]


def layer_norm_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[Case]:
    x, grad = _randn((sizes.tokens, sizes.hidden), dtype, device, 2)
    weight, bias = torch.ones(sizes.hidden, dtype=dtype, device=device), torch.zeros(sizes.hidden, dtype=dtype, device=device)
    columns = exact_columns(weight, bias, dtype)
    y, rstd, exact = ops.layer_norm_forward(x, weight, bias, _EPS, columns)
    shape, aten = [sizes.hidden], torch.ops.aten
    _, mean, their_rstd = aten.native_layer_norm(x, shape, weight, bias, _EPS)
    size, rstd_bytes = f"{sizes.tokens} x {sizes.hidden}", _FLOAT_BYTES * sizes.tokens
    return [
        Case(
            "LayerNorm",
            "forward",
            size,
            2 * x.nbytes + rstd_bytes,
            lambda: ops.layer_norm_forward(x, weight, bias, _EPS, columns),
            lambda: aten.native_layer_norm(x, shape, weight, bias, _EPS),
            has_goal=True,
        ),
        Case(
            "LayerNorm",
            "backward",
            size,
            3 * x.nbytes + rstd_bytes,
            lambda: ops.layer_norm_backward(grad, y, rstd, weight, bias, columns, exact),
            lambda: aten.native_layer_norm_backward(grad, x, shape, mean, their_rstd, weight, bias, [True] * 3),
            has_goal=True,
        ),
    ]


def dropout_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[Case]:
    x, grad = _randn((sizes.tokens, sizes.hidden), dtype, device, 2)
    x.requires_grad_()
    rng = tempo.make_rng(1, device=device)
    size, least = f"{sizes.tokens} x {sizes.hidden}", 2 * x.nbytes
    return [
        Case("dropout", "forward", size, least, lambda: ops.dropout(x.detach(), _P, rng, 0), lambda: F.dropout(x, _P)),
        Case(
            "dropout",
            "backward",
            size,
            least,
            lambda: ops.dropout(grad, _P, rng, 0),
            _backward_of(F.dropout(x, _P), (x,), grad),
        ),
    ]


def chain_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """bias + dropout + residual + LayerNorm in one kernel each way; PyTorch's four operations."""
    x, residual, grad = _randn((sizes.tokens, sizes.hidden), dtype, device, 3)
    x_bias, weight = torch.zeros(sizes.hidden, dtype=dtype, device=device), torch.ones(sizes.hidden, dtype=dtype, device=device)
    bias = torch.zeros_like(weight)
    columns, rng = exact_columns(weight, bias, dtype), tempo.make_rng(1, device=device)
    y, rstd, exact = ops.dropout_add_layer_norm_forward(x, x_bias, residual, weight, bias, _EPS, columns, _P, rng, 0)
    leaves = tuple(t.clone().requires_grad_() for t in (x, x_bias, residual, weight, bias))

    def theirs() -> Tensor:
        return F.layer_norm(F.dropout(leaves[0] + leaves[1], _P) + leaves[2], [sizes.hidden], leaves[3], leaves[4], _EPS)

    size, rstd_bytes = f"{sizes.tokens} x {sizes.hidden}", _FLOAT_BYTES * sizes.tokens
    return [
        Case(
            "bias, dropout, residual, LayerNorm",
            "forward",
            size,
            3 * x.nbytes + rstd_bytes,
            lambda: ops.dropout_add_layer_norm_forward(x, x_bias, residual, weight, bias, _EPS, columns, _P, rng, 0),
            theirs,
            has_goal=True,
        ),
        Case(
            "bias, dropout, residual, LayerNorm",
            "backward",
            size,
            4 * x.nbytes + rstd_bytes,
            lambda: ops.dropout_add_layer_norm_backward(grad, y, rstd, weight, bias, columns, exact, _P, rng, 0),
            _backward_of(theirs(), leaves, grad),
            has_goal=True,
        ),
    ]


def softmax_dropout_cases(sizes: Sizes, length: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Scale, padding mask, softmax and dropout over the scores of attention, in place."""
    batch = max(1, sizes.tokens // length)
    scores, grad = _randn((batch, sizes.num_heads, length, length), dtype, device, 2)
    keep = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=device)
    keep[::2, ..., -(length // 4) :] = False
    added = torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill(~keep, 0.5 * torch.finfo(dtype).min)
    rng, written, scale = tempo.make_rng(1, device=device), torch.empty_like(scores), 0.125
    probabilities = scores.clone()
    ops.softmax_dropout_forward(probabilities, keep, scale, _P, rng, 0, False)
    leaf = scores.clone().requires_grad_()

    def theirs() -> Tensor:
        return F.dropout(torch.softmax(leaf * scale + added, dim=-1), _P)

    size = f"{batch} x {sizes.num_heads} x {length} x {length}"
    return [
        Case(
            "softmax, dropout",
            "forward",
            size,
            3 * scores.nbytes,
            lambda: ops.softmax_dropout_forward(written, keep, scale, _P, rng, 0, False),
            theirs,
            before=lambda: written.copy_(scores),
        ),
        Case(
            "softmax, dropout",
            "backward",
            size,
            4 * scores.nbytes,
            lambda: ops.softmax_dropout_backward(written, probabilities, scale, _P, rng, 0),
            _backward_of(theirs(), (leaf,), grad),
            before=lambda: written.copy_(grad),
        ),
    ]


def lamb_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """A whole optimizer step over float32 parameters, the norm of all gradients included."""

    def optimizer(kind: type[Lamb]) -> Lamb:
        config = BertConfig.preset(sizes.optimizer_preset, num_layers=sizes.optimizer_layers)
        model = BertForPreTraining(config).to(device)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        return kind(parameter_groups(model, 0.01), lr=1e-4)

    ours, theirs = optimizer(Lamb), optimizer(ForeachLamb)
    decayed, undecayed = (sum(p.numel() for p in group["params"]) for group in ours.param_groups)
    # g for the norm; g, w, m, v read and m, v written; m, v, w read and w written, without a trust ratio w alone written.
    least = decayed * 11 * _FLOAT_BYTES + undecayed * 8 * _FLOAT_BYTES
    size = f"{(decayed + undecayed) / 1e6:.0f} M parameters"
    return [Case("LAMB", "step", size, least, ours.step, theirs.step)]


def builders(sizes: Sizes, dtype: torch.dtype) -> dict[str, Build]:
    """Name -> what makes the cases, one after another, so that their tensors do not lie in memory together."""
    forms = [("none", 1), ("tanh", 1)] if dtype == torch.float32 else [("none", 1), ("tanh", 1), ("none", 4)]
    gelus: dict[str, Build] = {f"GELU ({form}, {bits} bit)": partial(gelu_cases, sizes, form, bits) for form, bits in forms}
    rows: dict[str, Build] = {
        "LayerNorm": partial(layer_norm_cases, sizes),
        "dropout": partial(dropout_cases, sizes),
        "bias, dropout, residual, LayerNorm": partial(chain_cases, sizes),
    }
    attention: dict[str, Build] = {
        f"softmax, dropout S {length}": partial(softmax_dropout_cases, sizes, length) for length in sizes.sequence_lengths
    }
    recompute: dict[str, Build] = {"GELU from the input": partial(gelu_recompute_cases, sizes, "none")}
    # The parameters are float32 whatever the layers compute in.
    lamb: dict[str, Build] = {"LAMB": partial(lamb_cases, sizes)} if dtype == torch.float32 else {}
    return {**gelus, **recompute, **rows, **attention, **lamb}
