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


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    if os.uname().machine != "x86_64":
        pytest.skip("the instruction sets are those of x86-64")
    folder = tmp_path_factory.mktemp("sanitized")
    command = ["g++", "-std=c++17", *SANITIZE, f"-I{ROOT}/csrc", "-c"]
    jobs = []
    for source in sorted((ROOT / "csrc").glob("*/*_cpu.cpp")):
        for name, flags in instruction_sets().items():
            jobs.append([*command, *flags, f"-DTEMPO_ISA={name}", str(source), "-o", str(folder / f"{source.stem}_{name}.o")])
    for source in (ROOT / "csrc/common/cpu_dispatch.cpp", Path(__file__).with_name("sanitizer_harness.cpp")):
        jobs.append([*command, str(source), "-o", str(folder / f"{source.stem}.o")])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: subprocess.run(job, check=True), jobs))
    program = folder / "harness"
    subprocess.run(["g++", *SANITIZE, *map(str, folder.glob("*.o")), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("wanted", ["baseline", "avx2", "avx512"])
def test_no_kernel_touches_a_byte_beyond_its_buffers(harness: Path, wanted: str) -> None:
    environment = {**os.environ, "TEMPO_CPU_ISA": wanted, "ASAN_OPTIONS": "detect_leaks=1"}
    environment.pop("LD_PRELOAD", None)
    result = subprocess.run([str(harness)], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    name, checksum = result.stdout.split()
    order = ["baseline", "avx2", "avx512"]
    assert order.index(name) <= order.index(wanted)
    assert float(checksum) > 0
