"""Where training stands, what it has summed up since the last line, how fast it goes, and the bar that shows it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from tqdm import tqdm

from models.bert import BertOutput
from pretrain.distributed import Ranks

# A log file wants to know that training goes on, not every step.
_SECONDS_PER_LINE = 30.0


@dataclass
class Progress:
    """Where training stands; the part of a checkpoint that is not tensors.

    Attributes:
        step: optimizer steps done; a skipped step does not count, and does not move the learning rate.
        samples: sequences consumed, those of skipped steps included.
        tokens: real tokens consumed.
        skipped_steps: global batches whose gradient was not finite.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0


@dataclass
class Sums:
    """Sums over the micro-batches of one rank, kept on the device until a line is logged."""

    device: torch.device
    values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # mlm loss, nsp loss, mlm hits, nsp hits, predicted tokens, sequences
        self.values = torch.zeros(6, dtype=torch.float64, device=self.device)

    def add(self, output: BertOutput, num_sequences: int) -> None:
        parts = (output.mlm_loss_sum, output.nsp_loss_sum, output.num_mlm_correct, output.num_nsp_correct, output.num_masked)
        self.values[:5] += torch.stack([part.detach().double() for part in parts])  # type: ignore[union-attr]
        self.values[5] += num_sequences

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Sum over the ranks and divide; waits for the device, so only where a line is logged."""
        mlm, nsp, mlm_hits, nsp_hits, predicted, sequences = ranks.sum_(self.values.clone()).tolist()
        predicted, sequences = max(predicted, 1.0), max(sequences, 1.0)
        return {
            "loss": mlm / predicted + nsp / sequences,
            "mlm_loss": mlm / predicted,
            "nsp_loss": nsp / sequences,
            "mlm_accuracy": mlm_hits / predicted,
            "nsp_accuracy": nsp_hits / sequences,
        }


class Clock:
    """Throughput since the last reading, evaluation and checkpoints left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._start, self._samples, self._steps = time.perf_counter(), 0, 0

    def add(self, samples: int) -> None:
        self._samples += samples
        self._steps += 1

    def read(self) -> tuple[float, float]:
        """Return (sequences per second, seconds per step) and start again."""
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        rates = self._samples / elapsed, elapsed / max(self._steps, 1)
        self.restart()
        return rates


class ProgressBar:
    """Steps done, loss, speed and time left: a bar on a terminal, a line now and then where the output goes to a file.

    Args:
        start, total: steps done before, and in all.
        visible: False on all ranks but one.
    """

    def __init__(self, start: int, total: int, visible: bool) -> None:
        forced = os.environ.get("TEMPO_PROGRESS") == "1"
        shown = visible and (forced or sys.stderr.isatty())
        self._bar = tqdm(desc="pretraining", initial=start, total=total, unit="step", disable=not shown, dynamic_ncols=True)
        self._prints_lines = visible and not shown
        self._step, self._total, self._last_line = start, total, time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def step(self) -> None:
        self._step += 1
        self._bar.update()

    def show(self, loss: float, sequences_per_second: float, seconds_per_step: float) -> None:
        """Show the values of the step that was logged last."""
        self._bar.set_postfix(loss=f"{loss:.3f}", seq_per_s=f"{sequences_per_second:.0f}")
        now = time.monotonic()
        if self._prints_lines and now - self._last_line >= _SECONDS_PER_LINE:
            self._last_line = now
            left = timedelta(seconds=round((self._total - self._step) * seconds_per_step))
            speed = f"{sequences_per_second:,.0f} sequences/s"
            print(f"step {self._step:,} of {self._total:,}: loss {loss:.3f}, {speed}, {left} left", flush=True)
