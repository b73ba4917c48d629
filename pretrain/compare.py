"""Compare runs: `python -m pretrain.compare RUN_A RUN_B --output compare.png`."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pretrain.metrics import METRICS_NAME, read_metrics
from pretrain.plotting import Rows, draw_bars, draw_differences, draw_losses, new_figure, save_figure, series

# The final loss is the mean of this share of the last lines (at least one): a single step is noise.
_FINAL_SHARE = 0.05
# Keys that differ between any two runs and explain nothing.
_NAMES_OF_THE_RUN = ("train.output_dir", "train.resume", "train.stop_after_steps", "wandb.name", "wandb.mode", "wandb.tags")
_MAX_KEYS_SHOWN = 12


@dataclass
class Run:
    """A run to compare: its metrics, and what environment.json and config.yaml say of it.

    Attributes:
        name: as the table and the picture show it.
        rows: lines of metrics, each with a step and a loss.
        environment: saved_bytes_per_token and so on; empty where not known.
        config: section.key -> value; empty where not known.
    """

    name: str
    rows: Rows
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Summary:
    """One row of the table; differences are against the first run, over the steps both have. None: not known."""

    name: str
    steps: int
    final_loss: float
    mlm_accuracy: float | None
    eval_mlm_loss: float | None
    sequences_per_second: float | None
    peak_memory_bytes: float | None
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
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("loss"), int | float):
            raise ValueError(f"{metrics}: line {number} (step {row['step']}) has no loss")
    environment = _read_mapping(path / "environment.json", json.loads)
    config = _flatten(_read_mapping(path / "config.yaml", yaml.safe_load))
    return Run(path.absolute().name, rows, environment, config)


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: it is no mapping")
    return content


def _flatten(config: dict[str, Any]) -> dict[str, Any]:
    sections = {name: values for name, values in config.items() if isinstance(values, dict)}
    return {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}


def load_wandb(project: str, group: str | None) -> list[Run]:
    """Read the runs of a Weights & Biases project (entity/project), where it can be reached.

    Raises:
        ValueError: wandb cannot be reached, or the project has no runs with a loss.
    """
    try:
        import wandb

        found = wandb.Api(timeout=20).runs(project, filters={"group": group} if group else None)
        runs = [_from_wandb(run) for run in found]
    except Exception as error:
        raise ValueError(f"cannot read '{project}' from wandb ({error}); give run directories instead") from error
    runs = [run for run in runs if run.rows]
    if not runs:
        raise ValueError(f"wandb's project '{project}' has no runs with a loss" + (f" in group '{group}'" if group else ""))
    return runs


def _from_wandb(run: Any) -> Run:
    rows = [row for row in run.scan_history() if row.get("loss") is not None and row.get("step") is not None]
    return Run(run.name, sorted(rows, key=lambda row: row["step"]), {}, _flatten(dict(getattr(run, "config", {}))))


def distinct_names(runs: list[Run], paths: list[Path]) -> None:
    """Name runs by as many of the last parts of their paths as tell them apart."""
    parts = [path.absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    for run, name in zip(runs, names, strict=True):
        run.name = name
    number_duplicates(runs)


def number_duplicates(runs: list[Run]) -> None:
    """Put a number behind names that came before: one directory given twice, or namesakes at Weights & Biases."""
    seen: dict[str, int] = {}
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        if seen[run.name] > 1:
            run.name = f"{run.name} ({seen[run.name]})"


def summarise(run: Run, first: Run) -> Summary:
    """Return the run's row of the table."""
    tail = run.rows[-max(1, round(len(run.rows) * _FINAL_SHARE)) :]

    def values(name: str, rows: Rows = run.rows) -> list[float]:
        return series(rows, "step", name)[1]

    accuracies, evaluations = values("mlm_accuracy", tail), values("eval_mlm_loss")
    speeds, peaks = values("sequences_per_second"), values("peak_memory_bytes")
    summary = Summary(
        name=run.name,
        steps=run.rows[-1]["step"],
        final_loss=statistics.fmean(values("loss", tail)),
        mlm_accuracy=statistics.fmean(accuracies) if accuracies else None,
        eval_mlm_loss=evaluations[-1] if evaluations else None,
        sequences_per_second=statistics.median(speeds) if speeds else None,
        peak_memory_bytes=max(peaks) if peaks else None,
        saved_bytes_per_token=run.environment.get("saved_bytes_per_token"),
    )
    if run is not first:
        other = {row["step"]: row["loss"] for row in first.rows}
        differences = [row["loss"] - other[row["step"]] for row in run.rows if row["step"] in other]
        if differences:
            # A NaN is the largest difference there can be.
            summary.largest_difference = max(differences, key=lambda d: math.inf if math.isnan(d) else abs(d))
            summary.final_difference = differences[-1]
    return summary


def config_differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the configuration keys in which the runs differ, each with the value of every run (None: not set there)."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _NAMES_OF_THE_RUN)
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    known = all(run.config for run in runs)
    return {key: row for key, row in values.items() if known and any(value != row[0] for value in row)}


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _difference(value: float | None) -> str:
    small = value is not None and 0 < abs(value) < 1e-3
    return _number(value, "+.1e" if small else "+.4f")


def print_tables(runs: list[Run], summaries: list[Summary]) -> None:
    """Print the comparison, one run a row, and in what the runs' configurations differ."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", no_wrap=True)
    heads = ("steps", "final\nloss", "MLM\naccuracy", "held-out\nMLM loss", "sequences\n/s")
    for head in (*heads, "saved bytes\n/token", "peak\nmemory", "largest\ndifference", "final\ndifference"):
        table.add_column(head, justify="right", no_wrap=True)
    for s in summaries:
        table.add_row(
            Text(s.name),  # not a string: brackets in it would be taken for colours
            f"{s.steps:,}",
            f"{s.final_loss:.4f}",
            _number(s.mlm_accuracy, ".1%"),
            _number(s.eval_mlm_loss, ".4f"),
            _number(s.sequences_per_second, ",.1f"),
            _number(s.saved_bytes_per_token, ",.0f"),
            "-" if s.peak_memory_bytes is None else f"{s.peak_memory_bytes / 2**30:.2f} GiB",
            _difference(s.largest_difference),
            _difference(s.final_difference),
        )
    console = Console()
    # A pipe or a narrow terminal must not cut columns off.
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum)
    console.print(table)
    differing = config_differences(runs)
    for key, values in list(differing.items())[:_MAX_KEYS_SHOWN]:
        console.print(Text(f"  {key}: " + " | ".join(map(str, values))), soft_wrap=True)
    if len(differing) > _MAX_KEYS_SHOWN:
        console.print(f"  and {len(differing) - _MAX_KEYS_SHOWN} more keys differ")


def draw(runs: list[Run], summaries: list[Summary], path: Path, window: int) -> None:
    """Write the picture: loss over steps and tokens, its differences, throughput, peak memory and bytes kept per token."""
    curves = {run.name: run.rows for run in runs}
    peaks = [s.peak_memory_bytes and s.peak_memory_bytes / 2**30 for s in summaries]
    # On a CPU that is the resident size of Python and all, which says little about what a layer keeps.
    whose = " of the process" if any(str(run.environment.get("device", "")).startswith("cpu") for run in runs) else ""
    bars: dict[str, tuple[list[float | None], str]] = {
        "throughput, sequences/s": ([s.sequences_per_second for s in summaries], ",.1f"),
        f"peak memory{whose}, GiB": (peaks, ".2f"),
        "kept for backward, bytes/token": ([s.saved_bytes_per_token for s in summaries], ",.0f"),
    }
    bars = {title: bar for title, bar in bars.items() if any(value is not None for value in bar[0])}
    below = [*(["differences"] if len(runs) > 1 else []), *bars]
    # Twelve columns hold two, three or four parts side by side.
    rows = [["step"] * 6 + ["tokens"] * 6, *([[name for name in below for _ in range(12 // len(below))]] if below else [])]
    figure, parts = new_figure(rows, 14, 9 if below else 5)
    for x in ("step", "tokens"):
        draw_losses(parts[x], curves, x, window)
    parts["step"].set_title("loss over steps" + (f" (mean of {window} points)" if window > 1 else ""))
    parts["tokens"].set_title("loss over tokens")
    if "differences" in parts:
        draw_differences(parts["differences"], curves)
    for title, (values, pattern) in bars.items():
        draw_bars(parts[title], list(curves), values, title, pattern)
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
    if arguments.output.is_dir():
        raise ValueError(f"--output {arguments.output} is a directory: name a file, such as {arguments.output / 'compare.png'}")
    if arguments.wandb:
        runs = load_wandb(arguments.wandb, arguments.group)
        number_duplicates(runs)
    else:
        runs = [load_run(path) for path in arguments.runs]
        distinct_names(runs, arguments.runs)
    summaries = [summarise(r, runs[0]) for r in runs]
    print_tables(runs, summaries)
    for summary in summaries[1:]:
        if summary.largest_difference is None:
            print(f"{summary.name} and {runs[0].name} have no step in common: no difference to show")
    draw(runs, summaries, arguments.output, arguments.smooth)
    print(f"picture: {arguments.output}")
    if arguments.json:
        numbers = [
            {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in asdict(s).items()} for s in summaries
        ]
        unfinished = arguments.json.with_name(f".{arguments.json.name}.part")
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, arguments.json)


def main(command_line: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 2 for a user's mistake."""
    arguments = build_parser().parse_args(command_line)
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
