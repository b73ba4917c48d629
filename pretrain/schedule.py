"""Learning rate as a pure function of the step: nothing to save, and a skipped step does not move it."""

from __future__ import annotations

import math

NAMES = ("poly", "linear", "cosine", "constant")


def check_schedule(name: str, warmup_proportion: float, total_steps: int) -> None:
    """Raise ValueError where the arguments of `learning_rate` make no sense, naming the key."""
    if name not in NAMES:
        raise ValueError(f"schedule.name must be one of {', '.join(NAMES)}, got {name!r}")
    if not 0.0 <= warmup_proportion < 1.0:
        raise ValueError(f"schedule.warmup_proportion must lie in [0, 1), got {warmup_proportion}")
    if total_steps < 1:
        raise ValueError(f"train.max_steps must be at least 1, got {total_steps}")


def learning_rate(step: int, *, name: str, base: float, warmup_proportion: float, total_steps: int) -> float:
    """Return the rate for optimizer step `step`.

    With p = step / total_steps and w = warmup_proportion: base * p / w while p < w; then
    poly: base * (1 - p) ** 0.5, NVIDIA's published recipe (it does not join the warm-up: it starts at base * (1 - w) ** 0.5);
    linear: down to 0 in a straight line; cosine: down to 0 along a half cosine; constant: base.

    Args:
        step: 1 for the first, total_steps for the last, where all but "constant" reach 0.
        name: one of `NAMES`.
        base: peak rate.
        warmup_proportion: share of the steps that warm up, in [0, 1).
        total_steps: length of the schedule.
    """
    check_schedule(name, warmup_proportion, total_steps)
    if not 1 <= step <= total_steps:
        raise ValueError(f"the step must lie in [1, {total_steps}] (train.max_steps is {total_steps}), got {step}")
    progress = step / total_steps
    if progress < warmup_proportion:
        return base * progress / warmup_proportion
    if name == "poly":
        return base * (1.0 - progress) ** 0.5
    remaining = (1.0 - progress) / (1.0 - warmup_proportion)
    if name == "linear":
        return base * remaining
    if name == "cosine":
        return base * 0.5 * (1.0 + math.cos(math.pi * (1.0 - remaining)))
    return base
