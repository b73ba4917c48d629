"""Builds tempo/_C.so, the compiled kernels: csrc/*/*_op.cpp (LibTorch's stable ABI) and the kernels, which know no torch.

One library serves PyTorch 2.10 and newer under any Python, with or without CUDA. Environment variables:

TEMPO_CUDA        auto (default: CUDA kernels where nvcc is found), 1 (a missing nvcc is an error), 0 (CPU kernels only)
TEMPO_CUDA_ARCHS  compute capabilities, default those of "75 80 90 100 120+PTX" that nvcc knows; 70 (V100) needs CUDA 12
TORCH_DIR         folder of the torch package, if it is not in the environment that is installed into
CUDA_HOME         the toolkit; default: where nvcc on PATH lies, /usr/local/cuda, the newest /usr/local/cuda-*
CXX, MAX_JOBS     the compiler (default g++), how many run at once (default: one per CPU)
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # without build isolation pip does not look at what pyproject.toml requires
    raise SystemExit(
        f"error: tempo-bert needs setuptools 77 or newer to build, found {setuptools.__version__}; pip install -U setuptools"
    ) from None

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
DEFAULT_CUDA_ARCHS = "75 80 90 100 120+PTX"
OLDEST_TORCH = (2, 10)
TORCH_TARGET = "0x020a000000000000"

COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", f"-I{SOURCES}"]
# Without the last two gcc vectorises none of these loops; -ffast-math would lose NaN.
KERNEL_FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-maybe-uninitialized"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mbmi2"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
# Each kernel file is compiled once per set; the best that the CPU has is picked when the library runs.
INSTRUCTION_SETS: dict[str, list[str]] = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {"avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS}

Command = list[str]


class BuildError(SystemExit):
    """Ends the installation with a message instead of a traceback."""


def torch_dir() -> Path:
    """Find the headers of torch; pip's build isolation hides the environment from sys.path, but not from sysconfig."""
    folders = [os.environ.get("TORCH_DIR")]
    folders += [os.path.join(path, "torch") for path in sys.path if path]
    folders += [os.path.join(sysconfig.get_path(key), "torch") for key in ("purelib", "platlib")]
    environment = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if environment:
        folders += sorted(map(str, Path(environment).glob("lib/python3*/site-packages/torch")))
    for folder in filter(None, folders):
        if os.path.isfile(os.path.join(folder, "include/torch/csrc/stable/library.h")):
            return check_torch_version(Path(folder))
    raise BuildError(
        "error: torch 2.10 to 2.14 was not found in the environment that tempo-bert is installed into: install it first"
        " (https://pytorch.org/get-started/locally), or set TORCH_DIR to the folder of the torch package"
    )


def check_torch_version(folder: Path) -> Path:
    version_file = folder / "version.py"
    found = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", version_file.read_text()) if version_file.exists() else None
    if found and (int(found[2]), int(found[3])) < OLDEST_TORCH:
        raise BuildError(f"error: tempo-bert needs torch 2.10 or newer, found {found[1]} in {folder}")
    return folder


def cuda_home() -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:  # ask nvcc: the file on PATH may be a wrapper outside the toolkit
        dry_run = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
        homes += [line.split("=", 1)[1].strip() for line in dry_run.stderr.splitlines() if line.startswith("#$ TOP=")]
    homes += ["/usr/local/cuda", *sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)]
    for home in filter(None, homes):
        if os.path.isfile(os.path.join(home, "bin/nvcc")):
            return Path(os.path.realpath(home))
    return None


def number_of(arch: str) -> str:
    """ "9.0" and "90+PTX" -> "90"."""
    return arch.removesuffix("+PTX").replace(".", "")


def cuda_archs(home: Path) -> str:
    """Return the compute capabilities to build for: what TEMPO_CUDA_ARCHS asks for, or the default as far as nvcc knows it."""
    listed = subprocess.run([f"{home}/bin/nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    known = re.findall(r"compute_(\d+)", listed)
    asked = os.environ.get("TEMPO_CUDA_ARCHS", "").replace(";", " ").split()
    for arch in asked:
        if not re.fullmatch(r"\d+[a-z]?", number_of(arch)):
            raise BuildError(
                f"error: TEMPO_CUDA_ARCHS={' '.join(asked)!r}: {arch!r} is not a compute capability such as 80, 9.0 or 120+PTX"
            )
        if number_of(arch).rstrip("abcf") not in known:
            cure = "; CUDA 12 is the last toolkit that builds for it" if int(number_of(arch).rstrip("abcf")) < 75 else ""
            raise BuildError(
                f"error: TEMPO_CUDA_ARCHS={' '.join(asked)!r}: {home}/bin/nvcc does not know {arch!r},"
                f" only {', '.join(known)}{cure}"
            )
    if asked:
        return " ".join(asked)
    archs = [arch for arch in DEFAULT_CUDA_ARCHS.split() if number_of(arch) in known]
    if not archs:
        raise BuildError(
            f"error: {home}/bin/nvcc knows none of {DEFAULT_CUDA_ARCHS}, only {', '.join(known)}: set TEMPO_CUDA_ARCHS"
        )
    # Newer GPUs compile the PTX of the newest.
    return " ".join([*archs[:-1], archs[-1].removesuffix("+PTX") + "+PTX"])


def gencode_flags(archs: str) -> list[str]:
    flags = []
    for arch in archs.split():
        number = number_of(arch)
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def cuda_commands() -> tuple[dict[str, tuple[Path, Command]], list[str]]:
    """Return the nvcc commands by object name and the libraries to link; both empty where CUDA kernels are left out."""
    mode = os.environ.get("TEMPO_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise BuildError(f"error: TEMPO_CUDA={mode!r}: must be auto, 0 or 1")
    sources = sorted(SOURCES.glob("*/*.cu"))
    home = cuda_home() if mode != "0" else None
    if mode == "1" and home is None:
        raise BuildError("error: TEMPO_CUDA=1, but no nvcc was found on PATH, in CUDA_HOME or in /usr/local/cuda*")
    if mode == "1" and not sources:
        raise BuildError("error: TEMPO_CUDA=1, but this version has no CUDA kernels; TEMPO_CUDA=auto or 0 builds the CPU kernels")
    if home is None or not sources:
        why = "TEMPO_CUDA=0" if mode == "0" else "no nvcc found" if home is None else "this version has none"
        say(f"CUDA kernels: left out ({why}); on a GPU the layers run as their PyTorch references")
        return {}, []
    archs = cuda_archs(home)
    say(f"CUDA kernels: compute capabilities {archs}, {home}/bin/nvcc")
    nvcc = [f"{home}/bin/nvcc", "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", f"-I{SOURCES}"]
    nvcc += [f'-DTEMPO_CUDA_ARCHS="{archs}"', *gencode_flags(archs), "-c"]
    folders = [home / name for name in ("lib64", "lib", "targets/x86_64-linux/lib")]
    library = next((folder for folder in folders if (folder / "libcudart_static.a").exists()), folders[0])
    link = [f"-L{library}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return {source.stem: (source, nvcc) for source in sources}, link


def say(message: str) -> None:
    print(f"tempo-bert: {message}", file=sys.stderr, flush=True)


class BuildKernels(build_ext):
    """Compiles in parallel and keeps objects whose source, headers and command did not change."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # nothing of Python in it, so no tag of a Python either

    def build_extension(self, ext: Extension) -> None:
        torch = torch_dir()
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        if shutil.which(compiler[0]) is None:
            raise BuildError(f"error: the C++ compiler {compiler[0]!r} was not found; install g++ 11 or newer, or set CXX")
        jobs, link = cuda_commands()
        defines = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", *(["-DTEMPO_CUDA"] if jobs else [])]
        binding = [*compiler, *COMMON_FLAGS, "-O2", *defines, "-isystem", f"{torch}/include", "-c"]
        jobs |= {source.stem: (source, binding) for source in sorted(SOURCES.glob("*/*_op.cpp"))}
        jobs["cpu_dispatch"] = (SOURCES / "common/cpu_dispatch.cpp", [*compiler, *COMMON_FLAGS, "-O2", "-c"])
        for source in sorted(SOURCES.glob("*/*_cpu.cpp")):
            for name, flags in INSTRUCTION_SETS.items():
                command = [*compiler, *COMMON_FLAGS, *KERNEL_FLAGS, *flags, f"-DTEMPO_ISA={name}", "-c"]
                jobs[f"{source.stem}_{name}"] = (source, command)
        say(f"CPU kernels: {', '.join(INSTRUCTION_SETS)}; torch headers of {torch}")
        objects = self.compile_all(jobs)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # libtorch.so needs libtorch_cuda.so where there is one: CUDA symbols are then found without naming it here.
        torch_libraries = [f"-L{torch}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"]
        unfinished = target.with_suffix(f".{os.getpid()}.part")
        run([*compiler, "-shared", "-o", str(unfinished), *objects, *torch_libraries, "-Wl,--exclude-libs,ALL", *link])
        unfinished.replace(target)  # a process that has the old library loaded keeps it

    def compile_all(self, jobs: dict[str, tuple[Path, Command]]) -> list[str]:
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*/*.*h")) + sorted(SOURCES.glob("*/*.h")))

        def compile_one(name: str) -> str:
            source, command = jobs[name]
            key = hashlib.sha256(repr(command).encode() + source.read_bytes() + headers).hexdigest()[:16]
            target = folder / f"{name}-{key}.o"
            if not target.exists():
                unfinished = target.with_suffix(f".{os.getpid()}.part")
                run([*command, str(source), "-o", str(unfinished)])
                unfinished.replace(target)
            return str(target)

        workers = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return list(pool.map(compile_one, jobs))


def run(command: Command) -> None:
    print(shlex.join(command), flush=True)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(result.stderr)
    if result.returncode != 0:
        raise BuildError(f"error: compiling tempo-bert's kernels failed (exit status {result.returncode}): {shlex.join(command)}")


class Wheel(bdist_wheel):
    """One wheel per platform, whatever the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[Extension("tempo._C", [])], cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel})
