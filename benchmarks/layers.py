"""Time each layer against PyTorch, side by side in one run.

    python -m benchmarks.layers                               prints a table; on a GPU where there is one
    python -m benchmarks.layers --output                      and writes benchmarks/results/layers_<machine>_<date>.md
    python -m benchmarks.layers --device cpu --threads 2 --dtype bfloat16 --rounds 30

On a GPU the ops are timed forward and backward apart, see layers_gpu.py; the rest of this text is about CPUs.

The contestants of a comparison take turns, so that a busy machine slows all of them alike; the medians and their ratio count.
Bandwidth is the least number of bytes that the operation has to move, divided by the time, as a share of what a copy reaches.

By default glibc hands large blocks back to the system at once and takes them anew at every call, which costs more than most
layers compute. Both sides suffer alike; --keep-memory (the default) tells it to keep them, as a training loop should;
--no-keep-memory measures the default.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import platform
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import tempo
from benchmarks import layers_gpu
from benchmarks.cpu_cases import Comparison, comparisons

RESULTS = Path(__file__).parent / "results"
# mallopt's names for "never map a block by itself" and "never give the top of the heap back".
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1


@dataclass(frozen=True)
class Timing:
    comparison: Comparison
    ours_ms: float
    theirs_ms: dict[str, float]


def keep_memory() -> bool:
    """Make glibc keep freed blocks; False where the C library is another."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def measure(comparison: Comparison, rounds: int) -> Timing:
    """Time all contestants in turns; medians, after two rounds of warming up."""
    contestants = {"": comparison.ours, **comparison.theirs}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, function in contestants.items():
            arguments = () if comparison.before is None else (comparison.before(),)
            start = time.perf_counter()
            result = function(*arguments)
            elapsed = time.perf_counter() - start
            del result, arguments
            if turn >= 2:
                seconds[name].append(elapsed)
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    return Timing(comparison, medians.pop(""), medians)


def copy_bytes_per_second(rounds: int) -> float:
    """What `Tensor.copy_` reaches between two buffers that no cache holds; bytes read plus bytes written."""
    source, target = torch.ones(1 << 26), torch.ones(1 << 26)
    copy = Comparison("copy", lambda: target.copy_(source), {}, 2 * source.nbytes, {})
    return copy.min_bytes / (measure(copy, rounds).ours_ms * 1e-3)


def table(timings: list[Timing], copy_speed: float) -> list[str]:
    lines = [
        "| forward + backward | tempo ms | PyTorch ms | ratio | target | share of copy speed |",
        "|---|---|---|---|---|---|",
    ]
    for timing in timings:
        comparison = timing.comparison
        share = comparison.min_bytes / (timing.ours_ms * 1e-3) / copy_speed
        for i, (name, milliseconds) in enumerate(timing.theirs_ms.items()):
            target = comparison.targets.get(name)
            cells = [
                comparison.name if i == 0 else "",
                f"{timing.ours_ms:.2f}" if i == 0 else "",
                f"{milliseconds:.2f} ({name})",
                f"{timing.ours_ms / milliseconds:.2f}",
                "" if target is None else f"<= {target:g}",
                f"{share:.0%}" if i == 0 else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def machine_name() -> str:
    """The CPU's name as far as it is known."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def command() -> str:
    return " ".join(["python -m benchmarks.layers", *sys.argv[1:]])


def cpu_report(arguments: argparse.Namespace) -> str:
    kept = arguments.keep_memory and keep_memory()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    copy_speed = copy_bytes_per_second(arguments.rounds)
    implementations = sorted(set(tempo.kernels.summary("cpu").values()))
    lines = [
        "# Layers against PyTorch on a CPU",
        "",
        f"- machine: {machine_name()}, {arguments.threads} threads; {platform.system()}, Python {platform.python_version()}",
        f"- PyTorch {torch.__version__}; tempo kernels: {', '.join(implementations)} ({tempo.kernels.cpu_instruction_set()})",
        f"- date: {datetime.date.today().isoformat()}; command: `{command()}`",
        f"- medians of {arguments.rounds} rounds, in turns; freed memory is {'kept' if kept else 'given back'} by malloc",
        f"- copy speed: {copy_speed / 1e9:.1f} GB/s (read + written)",
        "- GPUs: not measured here; on a GPU machine `bash benchmarks/gpu_check.sh` measures the CUDA kernels",
    ]
    for name in arguments.dtype or ["float32", "bfloat16"]:
        timings = [measure(comparison, arguments.rounds) for comparison in comparisons(getattr(torch, name))]
        lines += ["", f"## {name}", "", *table(timings, copy_speed)]
    return "\n".join(lines) + "\n"


def gpu_report(arguments: argparse.Namespace) -> str:
    dtypes = arguments.dtype or ["float32", "float16", "bfloat16"]
    return layers_gpu.report(torch.device(arguments.device), dtypes, arguments.rounds, arguments.tokens, command())


def output_path(machine: str) -> Path:
    machine = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return RESULTS / f"layers_{machine}_{datetime.date.today().isoformat()}.md"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.layers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda where PyTorch finds a device, else cpu)")
    result.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: all that PyTorch takes)"
    )
    result.add_argument("--rounds", type=int, default=20, help="timed calls of each contestant (default 20)")
    result.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "float16", "bfloat16"],
        help="default: all three on a GPU, float32 and bfloat16 on a CPU",
    )
    result.add_argument("--tokens", type=int, help="GPU: tokens of a batch (default 65536; 16384 below 32 GiB of memory)")
    result.add_argument("--keep-memory", action=argparse.BooleanOptionalAction, default=True, help="see above")
    result.add_argument(
        "--output", nargs="?", const="", default=None, metavar="FILE", help="write Markdown; default name: in benchmarks/results/"
    )
    return result


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; what makes no sense ends with exit status 2."""
    arguments = parser().parse_args(given)
    for name in ("threads", "rounds", "tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser().error(f"--{name} must be at least 1, got {value}")
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", arguments.device):
        parser().error(f"--device must be cpu, cuda or cuda:N, got {arguments.device!r}")
    if arguments.device != "cpu":
        index, count = int(arguments.device[5:] or 0), torch.cuda.device_count()
        if index >= count:
            parser().error(f"--device {arguments.device}: PyTorch {torch.__version__} finds {count} CUDA device(s)")
        arguments.device = f"cuda:{index}"
    return arguments


def main() -> None:
    arguments = parse()
    on_cpu = arguments.device == "cpu"
    text = cpu_report(arguments) if on_cpu else gpu_report(arguments)
    print(text, end="")
    if arguments.output is not None:
        machine = machine_name() if on_cpu else torch.cuda.get_device_name(arguments.device)
        path = Path(arguments.output) if arguments.output else output_path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
