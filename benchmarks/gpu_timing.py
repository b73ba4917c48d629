"""Time operations on a GPU: CUDA events, a cold L2 cache and a queue that never runs dry; and the device's copy speed."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

_MIN_FLUSH_BYTES = 1 << 28
# About two milliseconds at 2 GHz: longer than the host takes to enqueue any of the timed calls.
_SLEEP_CYCLES = 4_000_000
_WARM_UP_ROUNDS = 3
_COPY_BYTES = 1 << 30


class Clock(Protocol):
    """Something that tells how long a call takes."""

    def milliseconds(self, function: Callable[[], object]) -> float: ...


class CudaClock:
    """Times calls on a CUDA device by the GPU's own clock.

    Before each call the GPU sleeps, so that the host has enqueued all of the call when it starts (what is timed is the GPU's
    work, not the host's launches), and writes a buffer larger than the L2 cache, so that every call reads from memory.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._flush = torch.empty(max(4 * l2_bytes, _MIN_FLUSH_BYTES), dtype=torch.uint8, device=device)

    def milliseconds(self, function: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SLEEP_CYCLES)
        self._flush.zero_()
        start.record()
        result = function()
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end)


def median_milliseconds(
    contestants: Sequence[Callable[[], object]], clock: Clock, rounds: int, before: Callable[[], object] | None = None
) -> list[float]:
    """Time the contestants in turns, after a warm-up; `before` runs untimed before each call."""
    times: list[list[float]] = [[] for _ in contestants]
    for turn in range(_WARM_UP_ROUNDS + rounds):
        for values, function in zip(times, contestants, strict=True):
            if before is not None:
                before()
            elapsed = clock.milliseconds(function)
            if turn >= _WARM_UP_ROUNDS:
                values.append(elapsed)
    return [statistics.median(values) for values in times]


def copy_bytes_per_second(device: torch.device, clock: Clock, rounds: int, num_bytes: int = _COPY_BYTES) -> float:
    """What `Tensor.copy_` reaches between two buffers on the device; bytes read plus bytes written."""
    source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    (elapsed,) = median_milliseconds([lambda: target.copy_(source)], clock, rounds)
    return 2 * source.nbytes / (elapsed * 1e-3)


def driver_version() -> str:
    """The NVIDIA driver's version as nvidia-smi tells it; "unknown" where it does not."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = result.stdout.split()
    return lines[0] if result.returncode == 0 and lines else "unknown"
