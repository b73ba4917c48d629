"""Curves and bars as pictures."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

from pretrain.metrics import METRICS_NAME, read_metrics

log = logging.getLogger(__name__)

Rows = list[dict[str, Any]]

# Solid and thick below, dashed and thin above: curves that coincide are both seen.
_STYLES = (("-", 4.0), ("--", 1.7), (":", 1.9), ("-.", 1.4))
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_AXES = {"step": "optimizer step", "tokens": "tokens seen (padding not counted)"}


def colour_of(number: int) -> str:
    """The colour of the run in this place, the same in every part of a picture."""
    return _COLOURS[number % len(_COLOURS)]


def as_label(name: str) -> str:
    """A run's name as matplotlib shows it: it would read $ as mathematics, and leave out names that begin with _."""
    name = name.replace("$", r"\$")
    return f"\u200b{name}" if name.startswith("_") else name


def series(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the points of the rows that have `y`."""
    points = [(row[x], row[y]) for row in rows if row.get(x) is not None and row.get(y) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place (of fewer at the start); a NaN spoils no more than its window."""
    parts = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def draw_losses(axes: Any, runs: dict[str, Rows], x: str, window: int = 1) -> None:
    """Draw the training loss of each run over `x` ("step" or "tokens"), and its evaluations as points."""
    from matplotlib.ticker import EngFormatter

    evaluated = False
    for number, (name, rows) in enumerate(runs.items()):
        style, width = _STYLES[number % len(_STYLES)] if len(runs) > 1 else ("-", 1.8)
        colour = colour_of(number)
        xs, losses = series(rows, x, "loss")
        if window > 1:
            axes.plot(xs, losses, color=colour, linewidth=0.8, alpha=0.25)
        axes.plot(xs, smooth(losses, window), style, color=colour, linewidth=width, label=as_label(name), alpha=0.9)
        xs, losses = series(rows, x, "eval_loss")
        size = 10 - 2 * (number % 4)  # points that coincide are seen too
        axes.plot(xs, losses, "o", color=colour, markersize=size, markeredgecolor="white", markeredgewidth=0.8)
        evaluated = evaluated or bool(xs)
    if evaluated:
        axes.plot([], [], "o", color="grey", label="on held-out data")
    axes.set_xlabel(_AXES.get(x, x))
    axes.set_ylabel("loss (masked tokens + next sentence)")
    if x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend()


def draw_differences(axes: Any, runs: dict[str, Rows]) -> None:
    """Draw by how much each run's loss differs from the first run's at the same step, on a logarithmic scale."""
    first_name, first = next(iter(runs.items()))
    losses = {row["step"]: row["loss"] for row in first}
    drawn = False
    for number, rows in enumerate(runs.values()):
        points = [(row["step"], abs(row["loss"] - losses[row["step"]])) for row in rows if row["step"] in losses]
        # A logarithm has no place for equality.
        points = [(step, size) for step, size in points if size > 0 and math.isfinite(size)] if number else []
        if points:
            axes.plot([p[0] for p in points], [p[1] for p in points], ".-", color=colour_of(number), linewidth=1, markersize=4)
            drawn = True
    if drawn:
        axes.set_yscale("log")
    else:
        axes.text(0.5, 0.5, "none at any step they share", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
    axes.set_title(f"|difference of loss from {as_label(first_name)}|")
    axes.set_xlabel(_AXES["step"])
    axes.grid(alpha=0.3)


def draw_bars(axes: Any, names: list[str], values: list[float | None], title: str, pattern: str) -> None:
    """Draw one horizontal bar a run, its name and its value written above it; a run without a value says so."""
    from matplotlib.ticker import MaxNLocator

    axes.barh(range(len(names)), [value or 0.0 for value in values], height=0.42, color=[*map(colour_of, range(len(names)))])
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        text = "not known" if value is None else format(value, pattern)
        axes.text(
            0.01, number - 0.27, f"{as_label(name)}: {text}", transform=axes.get_yaxis_transform(), va="bottom", clip_on=True
        )
    axes.set_ylim(max(len(names), 2) - 0.6, -0.75)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title)


def new_figure(layout: list[list[str]], width: float, height: float) -> tuple[Any, dict[str, Any]]:
    """A figure that needs no display, with its parts by the names in `layout`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [3, 2][: len(layout)]
    return pyplot.subplot_mosaic(layout, figsize=(width, height), height_ratios=heights, layout="constrained")  # type: ignore[arg-type]


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG whole, and free the figure."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(unfinished, format="png", dpi=130)
        os.replace(unfinished, path)
    finally:
        pyplot.close(figure)
        unfinished.unlink(missing_ok=True)


def plot_run(run: Path) -> Path | None:
    """Draw a run's loss_curve.png from its metrics.

    Returns:
        The picture; None where there is nothing to draw, or where drawing fails: a warning, for it must not end a training.
    """
    metrics, picture = run / METRICS_NAME, run / "loss_curve.png"
    try:
        rows = read_metrics(metrics) if metrics.exists() else []
        if not rows:
            return None
        figure, parts = new_figure([["loss"]], 8, 5)
        name = run.absolute().name
        draw_losses(parts["loss"], {name: rows}, "step")
        parts["loss"].set_title(f"{as_label(name)}: loss {rows[-1]['loss']:.3f} at step {rows[-1]['step']}")
        save_figure(figure, picture)
    except Exception as error:
        log.warning("%s could not be drawn, and training goes on: %s", picture, error)
        return None
    return picture
