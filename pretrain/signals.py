"""Signals that ask training to stop: SIGTERM, SIGUSR1 (Slurm's warning) and Ctrl-C."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignal:
    """Inside the `with` block a signal only sets `requested`, so that the step can be finished; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._number is not None

    @property
    def name(self) -> str:
        """Name of the signal; empty where another rank got it."""
        return "" if self._number is None else signal.Signals(self._number).name

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self._number = number
        print(f"{self.name}: finishing the step", file=sys.stderr, flush=True)

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
