"""The CUDA kernels without a GPU: emulated on the CPU, in several thread orders, under sanitizers, and bound to torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_emulation.build import HERE, ROOT, build_library, build_program, cuda_include

ORDERS = ["fwd", "rev", "rand:1", "rand:2", "rand:3"]
# ThreadSanitizer sees races whatever the order, and is slow.
SANITIZED_ORDERS = [("asan", "fwd"), ("asan", "rand:4"), ("tsan", "rand:5")]

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None or cuda_include() is None or os.uname().machine != "x86_64",
        reason="needs g++ on x86-64 and the headers of a CUDA toolkit (cuda_bf16.h)",
    ),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulation")


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    return build_library(folder / "emulated.so")


@pytest.fixture(scope="module")
def programs(folder: Path) -> dict[str, Path]:
    return {mode: build_program(folder / f"harness-{mode}", HERE / "kernel_harness.cpp", mode) for mode in ("", "asan", "tsan")}


def run(program: Path, *arguments: str, order: str = "fwd") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUEMU_ORDER": order, "ASAN_OPTIONS": "detect_leaks=0"}  # fibers are kept for the next launch
    environment.pop("LD_PRELOAD", None)
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, env=environment, check=False)


def test_results_do_not_depend_on_the_order_of_threads(programs: dict[str, Path]) -> None:
    results = {order: run(programs[""], order=order) for order in ORDERS}
    assert {result.returncode for result in results.values()} == {0}, results
    assert len({result.stdout for result in results.values()}) == 1, {order: result.stdout for order, result in results.items()}
    assert float(results["fwd"].stdout) > 0


@pytest.mark.parametrize(("mode", "order"), SANITIZED_ORDERS)
def test_kernels_under_sanitizers(programs: dict[str, Path], mode: str, order: str) -> None:
    """On buffers with no byte to spare, aligned and not."""
    result = run(programs[mode], order=order)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert float(result.stdout) > 0


# What the layers' own tests cannot hold when the kernels for GPUs answer: half is served, the error bound of GELU is another.
NOT_FOR_CUDA = (
    "not build and not test_convert and not sanitizers and not instruction_set and not references and not test_emulation"
)
# A block per row, 65,539 rows: once, in float32.
NOT_FOR_CUDA += " and not (65535 and float16)"


@pytest.mark.parametrize(("order", "tests"), [("rand:6", "tests/csrc"), ("rev", "tests/tempo")])
def test_the_layers_hold_on_emulated_cuda_kernels(library: Path, order: str, tests: str) -> None:
    """Schemas, autograd, compile, layouts, odd sizes, special values: all that the CPU kernels are tested for."""
    environment = {**os.environ, "TEMPO_LIBRARY": str(library), "CUEMU_ORDER": order}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", NOT_FOR_CUDA, tests]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout[-4000:]
    assert int(result.stdout.split(" passed")[0].split()[-1]) > 100


# ---- the emulator itself: what must work, and the mistakes that it must find ----


@pytest.fixture(scope="module")
def selftests(folder: Path) -> dict[str, Path]:
    main = HERE / "emulator_selftest.cpp"
    return {mode: build_program(folder / f"selftest-{mode}", main, mode) for mode in ("", "asan", "tsan")}


@pytest.mark.parametrize("order", ["fwd", "rev", "rand:1"])
def test_the_emulator_computes_what_cuda_computes(selftests: dict[str, Path], order: str) -> None:
    result = run(selftests[""], "all", order=order)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "selftest passed" in result.stdout


@pytest.mark.parametrize(
    ("mode", "mistake", "message"),
    [
        ("", "divergent", "divergent __syncthreads"),
        ("", "hang", "deadlock"),
        ("", "mask", "not in the mask"),
        ("", "big_smem", "dynamic shared"),
        ("", "big_block", "not launchable"),
        ("asan", "static_oob", "out of bounds"),
        ("asan", "misaligned", "misaligned address"),
        ("tsan", "block_race", "data race"),
        ("tsan", "warp_race", "data race"),
    ],
)
def test_the_emulator_finds_mistakes(selftests: dict[str, Path], mode: str, mistake: str, message: str) -> None:
    result = run(selftests[mode], mistake)
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
