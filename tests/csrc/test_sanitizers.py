"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on buffers with no byte to spare."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]


def instruction_sets() -> dict[str, list[str]]:
    """The flags of setup.py, read from its text: importing it would run it."""
    names = ("AVX2_FLAGS", "AVX512_FLAGS", "KERNEL_FLAGS")
    lines = [line for line in (ROOT / "setup.py").read_text().splitlines() if line.startswith(names)]
    flags: dict[str, list[str]] = {}
    exec("\n".join(lines), flags)
    common = [flag for flag in flags["KERNEL_FLAGS"] if flag != "-O3"]
    return {"baseline": common, "avx2": [*common, *flags["AVX2_FLAGS"]], "avx512": [*common, *flags["AVX512_FLAGS"]]}


def build(folder: Path, instruction_sets: dict[str, list[str]], *defines: str) -> Path:
    """Compile kernels and harness into a program in `folder`."""
    command = ["g++", "-std=c++17", *SANITIZE, f"-I{ROOT}/csrc", *defines, "-c"]
    jobs = []
    for source in sorted((ROOT / "csrc").glob("*/*_cpu.cpp")):
        for name, flags in instruction_sets.items():
            jobs.append([*command, *flags, f"-DTEMPO_ISA={name}", str(source), "-o", str(folder / f"{source.stem}_{name}.o")])
    for source in (ROOT / "csrc/common/cpu_dispatch.cpp", Path(__file__).with_name("sanitizer_harness.cpp")):
        jobs.append([*command, str(source), "-o", str(folder / f"{source.stem}.o")])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: subprocess.run(job, check=True), jobs))
    program = folder / "harness"
    subprocess.run(["g++", *SANITIZE, *map(str, folder.glob("*.o")), "-o", str(program)], check=True)
    return program


def run(program: Path, wanted: str) -> tuple[str, float]:
    """Return the instruction set that ran and the checksum of its results; a sanitizer's report fails."""
    environment = {**os.environ, "TEMPO_CPU_ISA": wanted, "ASAN_OPTIONS": "detect_leaks=1"}
    environment.pop("LD_PRELOAD", None)
    result = subprocess.run([str(program)], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    name, checksum = result.stdout.split()
    return name, float(checksum)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    if os.uname().machine != "x86_64":
        pytest.skip("the instruction sets are those of x86-64")
    return build(tmp_path_factory.mktemp("sanitized"), instruction_sets())


@pytest.mark.parametrize("wanted", ["baseline", "avx2", "avx512"])
def test_no_kernel_touches_a_byte_beyond_its_buffers(harness: Path, wanted: str) -> None:
    name, checksum = run(harness, wanted)
    order = ["baseline", "avx2", "avx512"]
    assert order.index(name) <= order.index(wanted)
    assert checksum > 0


def test_the_path_without_intrinsics_computes_the_same_bits(harness: Path, tmp_path: Path) -> None:
    plain = build(tmp_path, {"baseline": instruction_sets()["baseline"]}, "-DTEMPO_PLAIN")
    assert run(plain, "") == run(harness, "baseline")
