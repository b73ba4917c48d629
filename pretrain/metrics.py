"""metrics.jsonl is the truth about a run; Weights & Biases mirrors it and can never stop or slow training."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
_WANDB_ID_NAME = "wandb_id.txt"
_WANDB_THREAD = "tempo-bert-wandb"
# How long the end of training waits for lines that Weights & Biases has not taken yet. After a signal, the scheduler's grace
# period is running.
_FINISH_SECONDS, _STOPPED_SECONDS = 30.0, 5.0
_QUEUE_LINES = 10_000


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; a last line that a crash cut short is left out.

    Raises:
        ValueError: any other line is not JSON; it is named.
    """
    lines = path.read_bytes().splitlines()  # not as text: bytes that are none are an error of their line
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or "step" not in row:
                raise ValueError("no step")
        except ValueError:
            if number == len(lines):
                log.warning("%s: the last line is cut short and left out", path)
                break
            raise ValueError(f"{path}: line {number} is not a line of metrics: {line[:80].decode(errors='replace')!r}") from None
        rows.append(row)
    return rows


class MetricsFile:
    """Appends one JSON line per logged step."""

    def __init__(self, run: Path) -> None:
        self.path = run / METRICS_NAME

    def keep_until(self, step: int, run_before: Path | None = None) -> tuple[list[dict[str, Any]], int]:
        """Drop lines after `step`: training resumes there and will write them again.

        Args:
            step: where training resumes; 0 drops all.
            run_before: the run directory that training resumes from, whose lines are taken over where this run has none.

        Returns:
            The lines kept, and the last step that this run had logged before.
        """
        own = self.path.exists()
        source = self.path if own or run_before is None else run_before / METRICS_NAME
        if not source.exists():
            return [], 0
        rows = read_metrics(source)
        kept = [row for row in rows if row["step"] <= step]
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        unfinished.replace(self.path)
        return kept, max((row["step"] for row in rows), default=0) if own else 0

    def append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Have all lines on the disk: before a checkpoint, which must not outlive them."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


class WandbMirror:
    """Sends lines to Weights & Biases from a thread of its own; whatever fails there is one warning.

    Args:
        run: the run directory; keeps the id under which a resumed run continues.
        mode: disabled, offline or online.
        settings: project, entity, group, name, tags.
        config: the run's configuration.
        rows: lines of the part of the run before this process.
        last_logged: step of the last line that was logged before a crash; an online run does not log up to there twice.
    """

    def __init__(
        self,
        run: Path,
        mode: str,
        settings: dict[str, Any],
        config: dict[str, Any],
        rows: Sequence[dict[str, Any]] = (),
        last_logged: int = 0,
    ) -> None:
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_QUEUE_LINES)
        self._thread: threading.Thread | None = None
        # Offline, each process leaves a segment under the same id, of which the last one synced stays: it must be complete.
        starts_over = mode == "offline" or not (run / _WANDB_ID_NAME).exists()
        self._last_logged = 0 if starts_over else last_logged
        self._told_full = False
        if mode == "disabled":
            return
        settings = {**settings, "name": settings.get("name") or run.name}
        arguments = {**settings, "dir": str(run), "mode": mode, "config": config, "id": _wandb_id(run), "resume": "allow"}
        self._thread = threading.Thread(target=self._work, args=(arguments,), name=_WANDB_THREAD, daemon=True)
        self._thread.start()
        for row in rows:
            self.log(row)

    def _work(self, arguments: dict[str, Any]) -> None:
        try:
            os.environ.setdefault("WANDB_SILENT", "true")
            import wandb

            run = wandb.init(**arguments)
            for axis in ("step", "samples", "tokens"):
                run.define_metric(axis)
            run.define_metric("*", step_metric="step")
            while (row := self._lines.get()) is not None:
                run.log(row)
            run.finish()
        except BaseException as error:
            log.warning("wandb failed, and training goes on without it (metrics.jsonl is complete): %s", error)

    def log(self, row: dict[str, Any]) -> None:
        """Hand a line over; never waits."""
        if self._thread is None or not self._thread.is_alive() or row["step"] <= self._last_logged:
            return
        try:
            self._lines.put_nowait(row)
        except queue.Full:
            if not self._told_full:
                log.warning("wandb takes no lines; left out from step %s on (metrics.jsonl is complete)", row["step"])
            self._told_full = True

    def finish(self, stopped: bool = False) -> None:
        """Wait a bounded time for the lines still on their way; a short time after a signal."""
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        seconds = _STOPPED_SECONDS if stopped else _FINISH_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("wandb did not finish within %.0f s; metrics.jsonl is complete", seconds)


def wandb_is_busy() -> bool:
    """Whether Weights & Biases still hangs in a call; Python's exit would wait for it."""
    return any(thread.name == _WANDB_THREAD for thread in threading.enumerate())


def _wandb_id(run: Path) -> str:
    """The id of the run at Weights & Biases: made once, kept in the run directory."""
    path = run / _WANDB_ID_NAME
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
