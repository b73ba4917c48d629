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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tempo
from benchmarks import layers_gpu
from tempo.layer_norm import exact_columns

RESULTS = Path(__file__).parent / "results"
# mallopt's names for "never map a block by itself" and "never give the top of the heap back".
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1
ops = torch.ops.tempo


@dataclass(frozen=True)
class Comparison:
    """What is timed, the least bytes `ours` moves, and the ratio to stay below.

    `before` runs untimed before each call and hands its result to it: inputs that are overwritten are made anew there.
    """

    name: str
    ours: Callable[..., object]
    theirs: dict[str, Callable[..., object]]
    min_bytes: int
    targets: dict[str, float]
    before: Callable[[], object] | None = None


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


def gelu_comparison(dtype: torch.dtype, approximate: str, side_bits: int) -> Comparison:
    """In-place GELU forward and backward, against F.gelu under autograd and against preallocated outputs."""
    x, grad = (torch.randn(4096, 4096).to(dtype) for _ in range(2))
    out, dx = torch.empty_like(x), torch.empty_like(x)
    leaf = x.clone().requires_grad_()

    def ours(given: Tensor) -> object:
        # The clone's own backward hands the gradient on as it is.
        return torch.autograd.grad(tempo.gelu(given, approximate, side_bits, inplace=True), leaf, grad)

    def theirs(given: Tensor) -> object:
        return torch.autograd.grad(F.gelu(given, approximate=approximate), leaf, grad)

    def preallocated(_: Tensor) -> object:
        torch.ops.aten.gelu.out(x, approximate=approximate, out=out)
        return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=dx)

    least = x.numel() * (5 * x.element_size() + side_bits // 4)
    name = f"GELU ({'erf' if approximate == 'none' else 'tanh'}, {side_bits} bit) 4096 x 4096"
    targets = {"F.gelu, autograd": 0.6, "preallocated": 1.0}
    return Comparison(name, ours, {"F.gelu, autograd": theirs, "preallocated": preallocated}, least, targets, leaf.clone)


def layer_norm_comparison(dtype: torch.dtype) -> Comparison:
    x, grad = (torch.randn(4096, 1024).to(dtype) for _ in range(2))
    leaf = x.clone().requires_grad_()
    ours, theirs = tempo.InplaceLayerNorm(1024, dtype=dtype), torch.nn.LayerNorm(1024, eps=1e-12, dtype=dtype)

    def run(layer: torch.nn.LayerNorm) -> object:
        return torch.autograd.grad(layer(leaf), (leaf, layer.weight, layer.bias), grad)

    least = 5 * x.numel() * x.element_size()
    return Comparison(
        "LayerNorm 4096 x 1024", lambda: run(ours), {"nn.LayerNorm": lambda: run(theirs)}, least, {"nn.LayerNorm": 0.8}
    )


def dropout_comparison(dtype: torch.dtype) -> Comparison:
    leaf = torch.randn(4096, 1024).to(dtype).requires_grad_()
    grad = torch.randn(4096, 1024).to(dtype)
    rng = tempo.make_rng(1)

    def ours() -> object:
        return torch.autograd.grad(tempo.dropout(leaf, 0.1, rng, 0), leaf, grad)

    def theirs() -> object:
        return torch.autograd.grad(F.dropout(leaf, 0.1), leaf, grad)

    least = 4 * leaf.numel() * leaf.element_size()
    return Comparison("dropout 4096 x 1024", ours, {"F.dropout": theirs}, least, {})


def chain_comparison(dtype: torch.dtype) -> Comparison:
    """bias + dropout + residual + LayerNorm in one kernel each way, against PyTorch's four operations."""
    x, residual = (torch.randn(4096, 1024).to(dtype).requires_grad_() for _ in range(2))
    bias = torch.zeros(1024, dtype=dtype, requires_grad=True)
    grad = torch.randn(4096, 1024).to(dtype)
    mine = tempo.DropoutAddLayerNorm(1024, p=0.1, site=0, dtype=dtype)
    torchs = torch.nn.LayerNorm(1024, eps=1e-12, dtype=dtype)
    rng = tempo.make_rng(1)

    def ours() -> object:
        return torch.autograd.grad(mine(x, residual, rng, bias), (x, bias, residual, mine.weight, mine.bias), grad)

    def theirs() -> object:
        y = torchs(F.dropout(x + bias, 0.1) + residual)
        return torch.autograd.grad(y, (x, bias, residual, torchs.weight, torchs.bias), grad)

    least = 7 * x.numel() * x.element_size()
    return Comparison("bias, dropout, residual, LayerNorm 4096 x 1024", ours, {"PyTorch": theirs}, least, {"PyTorch": 0.3})


def attention_comparison(dtype: torch.dtype) -> Comparison:
    shape = (4, 16, 512, 64)
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape).to(dtype)
    keep = torch.ones(4, 512, dtype=torch.bool)
    keep[1:, 400:] = False
    added = torch.zeros(4, 1, 1, 512).masked_fill(~keep[:, None, None], torch.finfo(dtype).min).to(dtype)
    rng = tempo.make_rng(1)

    def ours() -> object:
        return torch.autograd.grad(tempo.attention(*leaves, keep, p=0.1, rng=rng, site=0), leaves, grad)

    def theirs() -> object:
        query, key, value = leaves
        scores = query @ key.transpose(-2, -1) * 64**-0.5 + added
        return torch.autograd.grad(F.dropout(torch.softmax(scores, -1), 0.1) @ value, leaves, grad)

    scores_bytes = 4 * 16 * 512 * 512 * leaves[0].element_size()
    name = "attention with dropout 4 x 16 heads, S 512, D 64"
    return Comparison(name, ours, {"eager": theirs}, 14 * scores_bytes, {"eager": 0.6})


def kernel_comparisons(dtype: torch.dtype) -> list[Comparison]:
    """The forward kernels of the ops alone, against PyTorch's."""
    x = torch.randn(4096, 1024).to(dtype)
    weight, bias = torch.ones(1024, dtype=dtype), torch.zeros(1024, dtype=dtype)
    columns = exact_columns(weight, bias, dtype)
    scores = torch.randn(4, 16, 512, 512).to(dtype)
    rng = tempo.make_rng(1)
    return [
        Comparison(
            "layer_norm_forward 4096 x 1024",
            lambda: ops.layer_norm_forward(x, weight, bias, 1e-12, columns),
            {"F.layer_norm": lambda: F.layer_norm(x, (1024,), weight, bias, 1e-12)},
            2 * x.numel() * x.element_size(),
            {},
        ),
        Comparison(
            "softmax_dropout_forward 4 x 16 x 512 x 512",
            lambda: ops.softmax_dropout_forward(scores, None, 1.0, 0.1, rng, 0, False),
            {"softmax, F.dropout": lambda: F.dropout(torch.softmax(scores, -1), 0.1)},
            3 * scores.numel() * scores.element_size(),
            {},
        ),
    ]


def comparisons(dtype: torch.dtype) -> list[Comparison]:
    gelus = [gelu_comparison(dtype, approximate, 1) for approximate in ("none", "tanh")]
    if dtype != torch.float32:
        gelus.append(gelu_comparison(dtype, "none", 4))
    layers = [layer_norm_comparison(dtype), dropout_comparison(dtype), chain_comparison(dtype), attention_comparison(dtype)]
    return [*gelus, *layers, *kernel_comparisons(dtype)]


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
