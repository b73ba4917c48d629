"""The ops of Tempo's layers on a GPU, forward and backward apart, against PyTorch's own; `python -m benchmarks.layers` runs it.

Each case states the least bytes that the operation has to move. Those bytes over the time are the achieved bandwidth, and that
over the device's copy speed says how close a kernel is to what memory allows.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import tempo
from benchmarks.gpu_timing import Clock, CudaClock, copy_bytes_per_second, driver_version, median_milliseconds
from tempo.layer_norm import exact_columns

GOAL = 0.85
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

    @staticmethod
    def for_memory(total_bytes: int) -> Sizes:
        return Sizes() if total_bytes >= _LARGE_DEVICE_BYTES else Sizes(tokens=16_384)


@dataclass(frozen=True)
class Case:
    """One direction of one op at one size.

    Attributes:
        min_bytes: the least that has to be read and written.
        before: runs untimed before each call; makes anew what the op overwrites.
        has_goal: whether it is to reach GOAL of the copy speed.
    """

    op: str
    direction: str
    size: str
    min_bytes: int
    ours: Callable[[], object]
    theirs: Callable[[], object]
    before: Callable[[], object] | None = None
    has_goal: bool = False


@dataclass(frozen=True)
class Row:
    """What was measured of a case; the times are None where the device's memory did not suffice."""

    op: str
    direction: str
    size: str
    min_bytes: int
    has_goal: bool
    ours_ms: float | None
    theirs_ms: float | None


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
    return {**gelus, **rows, **attention}


def measure(case: Case, clock: Clock, rounds: int) -> Row:
    ours_ms, theirs_ms = median_milliseconds([case.ours, case.theirs], clock, rounds, case.before)
    return Row(case.op, case.direction, case.size, case.min_bytes, case.has_goal, ours_ms, theirs_ms)


def measure_all(dtype: torch.dtype, sizes: Sizes, device: torch.device, clock: Clock, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for name, build in builders(sizes, dtype).items():
        try:
            rows += [measure(case, clock, rounds) for case in build(dtype, device)]
        except torch.OutOfMemoryError:
            rows.append(Row(name, "", "", 0, False, None, None))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def share_of_copy(row: Row, copy_speed: float) -> float:
    """Achieved bandwidth over the copy speed (bytes per second)."""
    assert row.ours_ms is not None
    return row.min_bytes / (row.ours_ms * 1e-3) / copy_speed


def table(rows: list[Row], copy_speed: float) -> list[str]:
    lines = [
        "| op | size | pass | least MB | tempo ms | GB/s | of copy speed | goal | PyTorch ms | PyTorch / tempo |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.ours_ms is None or row.theirs_ms is None:
            lines.append(f"| {row.op} | | | | out of memory | | | | | |")
            continue
        share = share_of_copy(row, copy_speed)
        cells = [
            row.op,
            row.size,
            row.direction,
            f"{row.min_bytes / 1e6:,.0f}",
            f"{row.ours_ms:.3f}",
            f"{row.min_bytes / row.ours_ms / 1e6:,.0f}",
            f"{share:.0%}",
            f"{GOAL:.0%} {'met' if share >= GOAL else 'missed'}" if row.has_goal else "",
            f"{row.theirs_ms:.3f}",
            f"{row.theirs_ms / row.ours_ms:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(rows: list[Row], copy_speed: float) -> str:
    """One line: how many of the ops with a goal reach it, and the lowest."""
    judged = [row for row in rows if row.has_goal and row.ours_ms is not None]
    if not judged:
        return "no op with a goal was measured"
    met = sum(share_of_copy(row, copy_speed) >= GOAL for row in judged)
    worst = min(judged, key=lambda row: share_of_copy(row, copy_speed))
    return (
        f"goal of {GOAL:.0%} of the copy speed: met by {met} of {len(judged)};"
        f" lowest {share_of_copy(worst, copy_speed):.0%} ({worst.op}, {worst.direction})"
    )


def device_lines(device: torch.device) -> list[str]:
    """The head of the report: what was measured on."""
    properties = torch.cuda.get_device_properties(device)
    how = tempo.kernels.summary("cuda")
    references = sorted(op for op, kind in how.items() if kind == "reference")
    return [
        f"- machine: {properties.name}, compute capability {properties.major}.{properties.minor},"
        f" {properties.total_memory / 2**30:.0f} GiB; driver {driver_version()}",
        f"- PyTorch {torch.__version__}, CUDA {torch.version.cuda}; Python {platform.python_version()}",
        f"- tempo kernels: compiled for {' '.join(tempo.kernels.cuda_architectures()) or 'no GPU'};"
        f" PyTorch references: {', '.join(references) or 'none'}",
    ]


def report_text(
    about: list[str], command: str, rounds: int, sizes: Sizes, copy_speed: float, measured: dict[str, list[Row]]
) -> str:
    """The report as Markdown.

    Args:
        about: lines about the device.
        copy_speed: bytes per second, read and written.
        measured: dtype's name -> rows.
    """
    lines = [
        "# Layers against PyTorch on a GPU",
        "",
        *about,
        f"- date: {datetime.date.today().isoformat()}; command: `{command}`",
        f"- sizes: BERT-Large, {sizes.tokens:,} tokens, S {' and '.join(map(str, sizes.sequence_lengths))}",
        f"- medians of {rounds} rounds, in turns, by CUDA events; the L2 cache is overwritten before each call",
        f"- copy speed: {copy_speed / 1e9:,.0f} GB/s (read + written)",
        "- GB/s: the least bytes that the operation has to move, over the time",
    ]
    for name, rows in measured.items():
        lines += ["", f"## {name}", "", *table(rows, copy_speed), "", verdict(rows, copy_speed)]
    return "\n".join(lines) + "\n"


def report(device: torch.device, dtypes: list[str], rounds: int, tokens: int | None, command: str) -> str:
    """Measure on a CUDA device and return the report."""
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    sizes = Sizes.for_memory(torch.cuda.get_device_properties(device).total_memory)
    if tokens is not None:
        sizes = replace(sizes, tokens=tokens)
    clock = CudaClock(device)
    copy_speed = copy_bytes_per_second(device, clock, rounds)
    measured = {name: measure_all(getattr(torch, name), sizes, device, clock, rounds) for name in dtypes}
    return report_text(device_lines(device), command, rounds, sizes, copy_speed, measured)
