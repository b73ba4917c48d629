"""Throughput and the largest micro-batch of BERT's layers on a GPU, PyTorch's against Tempo's.

    python -m benchmarks.step                          BERT-Large's 24 layers at S = 128 and 512
    python -m benchmarks.step --seconds 200 --output   more time; writes benchmarks/results/step_<machine>_<date>.md

One step is the forward and backward pass of the encoder; parameters and gradients are float32, activations bfloat16, no
optimizer. The micro-batch doubles until memory is full, then the gap is halved until it is known to a sixteenth.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import tempo
from benchmarks.layers_gpu import device_lines
from models.bert import BertEncoder
from models.config import PRESETS, BertConfig

RESULTS = Path(__file__).parent / "results"
_FIRST_BATCH = 8
# A measurement takes at least this many steps and, time allowing, this long.
_MIN_STEPS, _MEASURE_SECONDS = 3, 2.0


@dataclass
class Result:
    """One kind of layers at one sequence length.

    Attributes:
        batch: the largest micro-batch that fits; 0 where none does.
        is_exact: False where the time ran out before a larger one was refused.
        peak_bytes: the allocator's peak at that batch.
        sequences_per_second: at that batch.
        at_common_batch: sequences per second at the first kind's largest micro-batch.
    """

    length: int
    layers: str
    batch: int
    is_exact: bool
    peak_bytes: int = 0
    sequences_per_second: float = 0.0
    at_common_batch: float | None = None


class Stack:
    """The encoder of one kind on a device, ready to take steps."""

    def __init__(self, config: BertConfig, length: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.encoder, self.device = BertEncoder(config).to(device), device
        self.length, self.hidden_size = length, config.hidden_size
        self.rng = tempo.make_rng(1, device=device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, batch: int, seconds: float, min_steps: int) -> float:
        """Take at least `min_steps` steps and for at least so many seconds, after one; return the seconds per step."""
        shape = (batch, self.length, self.hidden_size)
        x = torch.randn(shape, dtype=torch.bfloat16, device=self.device, requires_grad=True)
        grad = torch.ones_like(x)
        mask = torch.ones(batch, self.length, dtype=torch.bool, device=self.device)
        num_steps, start = -1, 0.0
        while num_steps < min_steps or time.perf_counter() - start < seconds:
            x.grad = None
            self.encoder(x, mask, self.rng).backward(grad)
            self.synchronize()
            num_steps += 1
            if num_steps == 0:
                start = time.perf_counter()
        return (time.perf_counter() - start) / num_steps

    def fits(self, batch: int) -> bool:
        try:
            self.run(batch, 0.0, 1)
        except torch.OutOfMemoryError:
            fitted = False
        else:
            fitted = True
        self.release()
        print(f"S {self.length}: micro-batch {batch} {'fits' if fitted else 'does not fit'}", file=sys.stderr, flush=True)
        return fitted

    def measure(self, batch: int) -> tuple[float, int]:
        """Sequences per second and peak bytes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = self.run(batch, _MEASURE_SECONDS, _MIN_STEPS)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        self.release()
        return batch / seconds, peak

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def largest_batch(fits: Callable[[int], bool], limit: int, is_late: Callable[[], bool]) -> tuple[int, bool]:
    """Find the largest batch up to `limit` that fits, to a sixteenth.

    Returns:
        The batch (0 where 1 does not fit), and whether the search came to its end before it was late.
    """
    fitting, refused = 0, limit + 1
    candidate = min(_FIRST_BATCH, limit)
    while refused - fitting > max(1, fitting // 16):
        if is_late():
            return fitting, False
        if fits(candidate):
            fitting = candidate
        else:
            refused = candidate
        candidate = min(2 * fitting, limit) if refused > limit else (fitting + refused) // 2
    return fitting, True


def is_past(deadline: float) -> bool:
    return time.monotonic() > deadline


def measure_length(length: int, kinds: list[str], build: Callable[[str, int], Stack], limit: int, seconds: float) -> list[Result]:
    """Search and measure each kind of layers, in `seconds` and a last measurement."""
    results: list[Result] = []
    for position, layers in enumerate(kinds, start=1):
        stack = build(layers, length)
        deadline = time.monotonic() + seconds / len(kinds)
        batch, is_exact = largest_batch(stack.fits, limit, partial(is_past, deadline))
        result = Result(length, layers, batch, is_exact)
        results.append(result)
        while result.batch > 0 and result.sequences_per_second == 0.0:
            try:
                result.sequences_per_second, result.peak_bytes = stack.measure(result.batch)
            except torch.OutOfMemoryError:  # it fitted once, but memory was cut up differently then
                result.batch = result.batch * 15 // 16
        common = results[0].batch
        if position > 1 and 0 < common <= result.batch:
            result.at_common_batch, _ = stack.measure(common)
        del stack
        gc.collect()
    return results


def table(results: list[Result]) -> list[str]:
    lines = [
        "| S | layers | largest micro-batch | peak memory | sequences/s | sequences/s at the first row's batch |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        first = next(other for other in results if other.length == r.length)
        batch = f"{r.batch:,}{'' if r.is_exact else ' or more'}"
        ratios = [
            f" ({r.batch / first.batch:.2f} x)" if r is not first and first.batch else "",
            f" ({r.sequences_per_second / first.sequences_per_second:.2f} x)" if r is not first and first.batch else "",
        ]
        common = "" if r.at_common_batch is None else f"{r.at_common_batch:,.1f}"
        peak = f"{r.peak_bytes / 2**30:.1f} GiB" if r.peak_bytes else ""
        cells = [r.length, r.layers, batch + ratios[0], peak, f"{r.sequences_per_second:,.1f}{ratios[1]}", common]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def report_text(about: list[str], command: str, model: str, results: list[Result]) -> str:
    lines = [
        "# Layers of BERT on a GPU: largest micro-batch and throughput",
        "",
        *about,
        f"- date: {datetime.date.today().isoformat()}; command: `{command}`",
        f"- {model}; forward + backward, float32 parameters and gradients, bfloat16 activations, no optimizer",
        "",
        *table(results),
    ]
    return "\n".join(lines) + "\n"


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what makes no sense ends with exit status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (a CPU needs --max-batch) (default: cuda)")
    parser.add_argument("--preset", choices=list(PRESETS), default="bert_large")
    parser.add_argument("--num-layers", type=int, help="encoder layers (default: the preset's)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], metavar="S")
    parser.add_argument("--layers", nargs="+", choices=["torch", "tempo"], default=["torch", "tempo"])
    parser.add_argument("--max-batch", type=int, default=1 << 16)
    parser.add_argument("--seconds", type=float, default=80.0, help="for the search of all (default 80)")
    parser.add_argument(
        "--output", nargs="?", const="", metavar="FILE", help="write Markdown; default name: in benchmarks/results/"
    )
    arguments = parser.parse_args(given)
    for name in ("max_batch", "num_layers", "seconds"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", arguments.device):
        parser.error(f"--device must be cpu, cuda or cuda:N, got {arguments.device!r}")
    if min(arguments.lengths) < 1 or max(arguments.lengths) > BertConfig().max_position_embeddings:
        parser.error(f"--lengths must lie between 1 and {BertConfig().max_position_embeddings}, got {arguments.lengths}")
    if arguments.device != "cpu":
        index, count = int(arguments.device[5:] or 0), torch.cuda.device_count()
        if index >= count:
            parser.error(f"--device {arguments.device}: PyTorch {torch.__version__} finds {count} CUDA device(s)")
        arguments.device = f"cuda:{index}"
    elif arguments.max_batch > 1024:
        parser.error("--device cpu needs --max-batch of at most 1024: memory of a CPU gives no end to the search")
    return arguments


def main(given: list[str] | None = None) -> None:
    arguments = parse(given)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    overrides = {} if arguments.num_layers is None else {"num_layers": arguments.num_layers}

    def build(layers: str, length: int) -> Stack:
        return Stack(BertConfig.preset(arguments.preset, layers=layers, **overrides), length, device)

    results: list[Result] = []
    for length in arguments.lengths:
        share = arguments.seconds / len(arguments.lengths)
        results += measure_length(length, arguments.layers, build, arguments.max_batch, share)
    config = BertConfig.preset(arguments.preset, **overrides)
    model = f"{arguments.preset}: {config.num_layers} layers, hidden size {config.hidden_size}"
    about = device_lines(device) if device.type == "cuda" else ["- machine: a CPU"]
    text = report_text(
        about, " ".join(["python -m benchmarks.step", *(sys.argv[1:] if given is None else given)]), model, results
    )
    print(text, end="")
    if arguments.output is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        machine = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        path = Path(arguments.output or RESULTS / f"step_{machine}_{datetime.date.today().isoformat()}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
