"""Compare runs: `python -m pretrain.compare RUN_A RUN_B --output compare.png`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.metrics import METRICS_NAME, read_metrics
from pretrain.plotting import COLOURS, Rows, draw_losses, new_figure, save_figure, series

# The final loss is the mean of this share of the last lines (at least one): a single step is noise.
_FINAL_SHARE = 0.05


@dataclass
class Run:
    """A run to compare: its metrics, and what environment.json says of it."""

    name: str
    rows: Rows
    environment: dict[str, Any]


@dataclass
class Summary:
    """One row of the table; differences are against the first run, over the steps both have."""

    name: str
    steps: int
    final_loss: float
    mlm_accuracy: float
    eval_mlm_loss: float | None
    sequences_per_second: float
    peak_memory_bytes: int
    saved_bytes_per_token: float | None
    largest_difference: float | None = None
    final_difference: float | None = None


def load_run(path: Path) -> Run:
    """Read a run directory.

    Raises:
        ValueError: no metrics there, none written yet, or a broken line.
    """
    metrics = path / METRICS_NAME
    if not metrics.is_file():
        raise ValueError(f"{path} is not a run directory: it has no {METRICS_NAME}")
    rows = read_metrics(metrics)
    if not rows:
        raise ValueError(f"{metrics} is empty: the run has not logged a step yet")
    environment = path / "environment.json"
    return Run(path.name, rows, json.loads(environment.read_text(encoding="utf-8")) if environment.is_file() else {})


def load_wandb(project: str, group: str | None) -> list[Run]:
    """Read the runs of a Weights & Biases project (entity/project), where it can be reached.

    Raises:
        ValueError: wandb cannot be reached, or the project has no runs with a loss.
    """
    try:
        import wandb

        found = wandb.Api(timeout=20).runs(project, filters={"group": group} if group else None)
        runs = [Run(run.name, [r for r in run.scan_history() if r.get("loss") is not None], {}) for run in found]
    except Exception as error:
        raise ValueError(f"cannot read '{project}' from wandb ({error}); give run directories instead") from error
    runs = [run for run in runs if run.rows]
    if not runs:
        raise ValueError(f"wandb's project '{project}' has no runs with a loss" + (f" in group '{group}'" if group else ""))
    return runs


def distinct_names(runs: list[Run], paths: list[Path]) -> None:
    """Name runs by as many of the last parts of their paths as tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    for run, name in zip(runs, names, strict=True):
        run.name = name


def summarise(run: Run, first: Run) -> Summary:
    """Return the run's row of the table."""
    losses = [row["loss"] for row in run.rows]
    tail = run.rows[-max(1, round(len(run.rows) * _FINAL_SHARE)) :]
    evaluations = series(run.rows, "step", "eval_mlm_loss")[1]
    summary = Summary(
        name=run.name,
        steps=run.rows[-1]["step"],
        final_loss=statistics.fmean(losses[-len(tail) :]),
        mlm_accuracy=statistics.fmean(row["mlm_accuracy"] for row in tail),
        eval_mlm_loss=evaluations[-1] if evaluations else None,
        sequences_per_second=statistics.median(row["sequences_per_second"] for row in run.rows),
        peak_memory_bytes=max(row["peak_memory_bytes"] for row in run.rows),
        saved_bytes_per_token=run.environment.get("saved_bytes_per_token"),
    )
    if run is not first:
        other = {row["step"]: row["loss"] for row in first.rows}
        differences = [row["loss"] - other[row["step"]] for row in run.rows if row["step"] in other]
        if differences:
            summary.largest_difference = max(differences, key=abs)
            summary.final_difference = differences[-1]
    return summary


def print_table(summaries: list[Summary]) -> None:
    """Print the comparison, one run a row."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, pattern: str) -> str:
        return "-" if value is None else format(value, pattern)

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", no_wrap=True)
    heads = (
        "steps",
        "final\nloss",
        "MLM\naccuracy",
        "held-out\nMLM loss",
        "sequences\n/s",
        "saved bytes\n/token",
        "peak\nmemory",
    )
    for head in (*heads, "largest\ndifference", "final\ndifference"):
        table.add_column(head, justify="right", no_wrap=True)
    for s in summaries:
        table.add_row(
            s.name,
            f"{s.steps:,}",
            f"{s.final_loss:.4f}",
            f"{s.mlm_accuracy:.1%}",
            number(s.eval_mlm_loss, ".4f"),
            f"{s.sequences_per_second:,.1f}",
            number(s.saved_bytes_per_token, ",.0f"),
            f"{s.peak_memory_bytes / 2**30:.2f} GiB",
            number(s.largest_difference, "+.4f"),
            number(s.final_difference, "+.4f"),
        )
    console = Console()
    # A pipe or a narrow terminal must not cut columns off.
    console.width = max(console.width, 130)
    console.print(table)


def _draw_bars(axes: Any, summaries: list[Summary], values: list[float | None], title: str, pattern: str) -> None:
    known = [(i, s.name, v) for i, (s, v) in enumerate(zip(summaries, values, strict=True)) if v is not None]
    bars = axes.bar([name for _, name, _ in known], [v for _, _, v in known], width=0.55)
    for bar, (i, _, value) in zip(bars, known, strict=True):
        bar.set_color(COLOURS[i % len(COLOURS)])
        axes.annotate(format(value, pattern), (bar.get_x() + bar.get_width() / 2, bar.get_height()), ha="center", va="bottom")
    axes.set_title(title)
    axes.margins(y=0.15)
    axes.set_xlim(-0.75, max(len(known), 2) - 0.25)


def draw(runs: list[Run], summaries: list[Summary], path: Path, window: int) -> None:
    """Write the picture: loss over steps and over tokens, throughput, and bytes kept for the backward pass."""
    figure, axes = new_figure(2, 2, 13, 9)
    curves = {run.name: run.rows for run in runs}
    for place, x in enumerate(("step", "tokens")):
        draw_losses(axes[0][place], curves, x, window)
    axes[0][0].set_title("loss over steps" + (f" (mean of {window})" if window > 1 else ""))
    axes[0][1].set_title("loss over tokens")
    _draw_bars(axes[1][0], summaries, [s.sequences_per_second for s in summaries], "throughput, sequences/s", ",.1f")
    saved = [s.saved_bytes_per_token for s in summaries]
    if any(value is not None for value in saved):
        _draw_bars(axes[1][1], summaries, saved, "kept for the backward pass, bytes per token", ",.0f")
    else:
        peak: list[float | None] = [s.peak_memory_bytes / 2**30 for s in summaries]
        _draw_bars(axes[1][1], summaries, peak, "peak memory, GiB", ".2f")
    save_figure(figure, path)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.compare",
        description="Compare training runs: a table and a picture of loss, throughput and memory.",
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories; differences are against the first")
    parser.add_argument("--output", type=Path, default=Path("compare.png"), help="picture to write (default: compare.png)")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="draw the mean of the last N points")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's numbers as JSON too")
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="read the runs of this project at Weights & Biases instead")
    parser.add_argument("--group", help="with --wandb: only runs of this group")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line says.

    Raises:
        ValueError: nothing to compare.
    """
    if bool(arguments.runs) == bool(arguments.wandb):
        raise ValueError("give run directories, or --wandb ENTITY/PROJECT")
    if arguments.smooth < 1:
        raise ValueError(f"--smooth must be at least 1, got {arguments.smooth}")
    if arguments.wandb:
        runs = load_wandb(arguments.wandb, arguments.group)
    else:
        runs = [load_run(path) for path in arguments.runs]
        distinct_names(runs, arguments.runs)
    summaries = [summarise(r, runs[0]) for r in runs]
    print_table(summaries)
    for summary in summaries[1:]:
        if summary.largest_difference is None:
            print(f"{summary.name} and {runs[0].name} have no step in common: no difference to show")
    draw(runs, summaries, arguments.output, arguments.smooth)
    print(f"picture: {arguments.output}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(s) for s in summaries], indent=2) + "\n", encoding="utf-8")


def main() -> int:
    arguments = build_parser().parse_args()
    try:
        run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
