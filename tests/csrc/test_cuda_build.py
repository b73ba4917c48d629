"""What nvcc makes of the CUDA kernels: no spills, 16-byte accesses, and nothing that a V100 lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc").glob("*/*_cuda.cu"))
ARCHS = ("75", "80", "90", "100", "120")
# The kernels for shapes and layouts that vectors do not fit, and those whose threads work on single elements.
SCALAR = re.compile("general|add_partials|exact_columns|norms_kernel|begin_kernel")


def find_tool(name: str) -> str | None:
    """A program of the toolkit, or of the packages in requirements-dev.txt."""
    for package in ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm", "nvidia-cuda-nvcc-cu12"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == name and file.parent.name == "bin":
                return str(file.locate())
    return None if name == "ptxas" else shutil.which(name)


NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def nvcc(source: Path, target: Path, *flags: str) -> str:
    """Compile and return what ptxas reports."""
    command = [str(NVCC), "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-Xptxas", "-v", *flags, str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, str]:
    """Source name -> ptxas's report for all architectures; the objects lie in `folder`."""
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = {s.stem: pool.submit(nvcc, s, folder / f"{s.stem}.o", "-c", *gencode) for s in SOURCES}
    return {name: report.result() for name, report in compiled.items()}


def test_no_kernel_spills_or_has_a_stack_frame(reports: dict[str, str]) -> None:
    num_kernels = 0
    for name, report in reports.items():
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
        num_kernels += len(frames)
        assert set(frames) <= {("0", "0", "0")}, f"{name}: {report}"
    assert num_kernels >= 95 * len(ARCHS), "the report has another form, or kernels are missing"


def machine_code(library: Path, arch: str) -> dict[str, str]:
    """Kernel name -> its machine code."""
    tool = find_tool("cuobjdump")
    if tool is None or find_tool("nvdisasm") is None:
        pytest.skip("needs cuobjdump and nvdisasm (requirements-dev.txt)")
    environment = {**os.environ, "PATH": f"{Path(str(find_tool('nvdisasm'))).parent}:{os.environ['PATH']}"}
    result = subprocess.run(
        [tool, "-sass", "-arch", f"sm_{arch}", str(library)], capture_output=True, text=True, env=environment, check=True
    )
    parts = re.split(r"Function : (\S+)", result.stdout)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("arch", ["75", "90"])
def test_kernels_move_16_bytes_at_a_time(reports: dict[str, str], folder: Path, arch: str) -> None:
    num_checked = 0
    for name in reports:
        for kernel, code in machine_code(folder / f"{name}.o", arch).items():
            if SCALAR.search(kernel):
                continue
            num_checked += 1
            assert re.search(r"LDG\.E\.128", code), f"{name}: {kernel} loads no 16 bytes at once"
            assert re.search(r"STG\.E\.128", code), f"{name}: {kernel} stores no 16 bytes at once"
            assert "LDL" not in code
            assert "STL" not in code
    assert num_checked >= 40


def test_the_v100_s_assembler_takes_every_kernel(folder: Path) -> None:
    """CUDA 13 has no sm_70: its PTX for sm_75, relabelled, goes through the assembler of CUDA 12."""
    ptxas = find_tool("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas of CUDA 12 (nvidia-cuda-nvcc-cu12, requirements-dev.txt)")

    def assemble(source: Path) -> str:
        ptx = folder / f"{source.stem}.ptx"
        nvcc(source, ptx, "-ptx", "-arch=compute_75")
        text = re.sub(r"\.version \d+\.\d+", ".version 8.0", ptx.read_text())
        ptx.write_text(re.sub(r"\.target sm_75", ".target sm_70", text))
        command = [ptxas, "-v", "-arch=sm_70", str(ptx), "-o", str(folder / f"{source.stem}.cubin")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{source.name}: {result.stderr[-2000:]}"
        return result.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for report in pool.map(assemble, [s for s in SOURCES if s.stem != "device_cuda"]):
            frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
            assert frames
            assert set(frames) == {("0", "0", "0")}


def test_kernels_use_nothing_newer_than_sm_70_unguarded() -> None:
    newer = r"\b(cp\.async|__pipeline|cuda::barrier|wgmma|ldmatrix|__reduce_\w+_sync|__nanosleep|cooperative_groups|redux\.)"
    for source in [*SOURCES, *(ROOT / "csrc").glob("*/*.cuh")]:
        assert not re.search(newer, source.read_text()), source
