"""Loss curves as pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pretrain.metrics import METRICS_NAME, read_metrics

Rows = list[dict[str, Any]]

# Solid and thick below, dashed and thin above: curves that coincide are both seen.
_STYLES = (("-", 3.0), ("--", 1.6), (":", 1.8), ("-.", 1.4))
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


def series(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the points of the rows that have `y`."""
    points = [(row[x], row[y]) for row in rows if y in row and x in row]
    return [p[0] for p in points], [p[1] for p in points]


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place (of fewer at the start)."""
    result, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        result.append(total / min(i + 1, window))
    return result


def draw_losses(axes: Any, runs: dict[str, Rows], x: str, window: int = 1) -> None:
    """Draw the training loss of each run over `x` ("step" or "tokens"), and its evaluations as points."""
    for number, (name, rows) in enumerate(runs.items()):
        style, width = _STYLES[number % len(_STYLES)]
        colour = COLOURS[number % len(COLOURS)]
        xs, losses = series(rows, x, "loss")
        axes.plot(xs, smooth(losses, window), style, color=colour, linewidth=width, label=name, alpha=0.9)
        xs, losses = series(rows, x, "eval_loss")
        if xs:
            axes.plot(xs, losses, "o", color=colour, markersize=7 - 2 * (number % 3), label=f"{name}, held out")
    axes.set_xlabel({"step": "optimizer step", "tokens": "tokens seen (padding not counted)"}.get(x, x))
    axes.set_ylabel("loss (masked tokens + next sentence)")
    axes.grid(alpha=0.3)
    axes.legend()


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG whole, and free the figure."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    figure.savefig(unfinished, format="png", dpi=130)
    pyplot.close(figure)
    os.replace(unfinished, path)


def plot_run(run: Path) -> Path | None:
    """Draw a run's loss_curve.png from its metrics; None where there is nothing to draw."""
    metrics = run / METRICS_NAME
    rows = read_metrics(metrics) if metrics.exists() else []
    if not rows:
        return None
    figure, axes = new_figure(1, 1, 8, 5)
    draw_losses(axes[0][0], {run.name: rows}, "step")
    axes[0][0].set_title(f"{run.name}: loss {rows[-1]['loss']:.3f} at step {rows[-1]['step']}")
    save_figure(figure, run / "loss_curve.png")
    return run / "loss_curve.png"
