"""Measure the ops of Tempo's layers on a GPU against PyTorch's own; `python -m benchmarks.layers` runs it.

The least bytes that an operation has to move over its time are the achieved bandwidth, and that over the device's copy speed
says how close a kernel is to what memory allows.
"""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass, replace

import torch

import tempo
from benchmarks.gpu_cases import Case, Sizes, builders
from benchmarks.gpu_timing import Clock, CudaClock, copy_bytes_per_second, driver_version, median_milliseconds

GOAL = 0.85


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
