"""Builds the CUDA kernels for the CPU: one fiber per CUDA thread, see cuemu.h.

    python tests/cuda_emulation/build.py library OUTPUT.so     torch.ops.tempo.* that run the CUDA kernels on CPU tensors
    python tests/cuda_emulation/build.py program OUTPUT [asan|tsan] [-DNAME ...]   kernel_harness.cpp, as a program

`TEMPO_LIBRARY=OUTPUT.so` makes tempo load the library instead of its own, and every test of the layers then tests the CUDA
kernels and their bindings.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "csrc"
TORCH_TARGET = "0x020a000000000000"
SANITIZE = {
    "": [],
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"],
    "tsan": ["-fsanitize=thread"],
}


def cuda_include() -> Path | None:
    """The toolkit's headers (cuda_fp16.h, cuda_bf16.h run on a CPU too); None where there is no toolkit."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", *sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)]
    for home in filter(None, homes):
        for folder in ("include", "targets/x86_64-linux/include"):
            if (Path(home) / folder / "cuda_bf16.h").exists():
                return Path(home) / folder
    return None


def compile_all(jobs: list[tuple[Path, list[str]]], folder: Path) -> list[str]:
    """Compile each (source, command) unless its object is there already; return the objects."""
    folder.mkdir(parents=True, exist_ok=True)
    headers = b"".join(p.read_bytes() for pattern in ("*.h", "*/*.h", "*/*.cuh") for p in sorted(SOURCES.glob(pattern)))
    headers += (HERE / "cuemu.h").read_bytes()

    def compile_one(job: tuple[Path, list[str]]) -> str:
        source, command = job
        key = hashlib.sha256(repr(command).encode() + source.read_bytes() + headers).hexdigest()[:16]
        target = folder / f"{source.stem}-{key}.o"
        if not target.exists():
            unfinished = target.with_suffix(f".{os.getpid()}.part")
            subprocess.run([*command, "-c", str(source), "-o", str(unfinished)], check=True)
            unfinished.replace(target)
        return str(target)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, jobs))


def kernel_jobs(mode: str, defines: list[str]) -> list[tuple[Path, list[str]]]:
    """The kernels and the scheduler, which ThreadSanitizer must not look into."""
    flags = ["-std=c++17", "-O2", "-g", "-fPIC", "-DCUEMU", f"-I{HERE}", f"-I{SOURCES}", "-isystem", str(cuda_include())]
    scheduler = {"": [], "asan": ["-fsanitize=address"], "tsan": ["-DCUEMU_TSAN"]}[mode]
    kernels = ["-Wall", "-Wno-unknown-pragmas", *SANITIZE[mode], *defines]
    jobs = [(source, ["g++", "-x", "c++", *flags, *kernels]) for source in sorted(SOURCES.glob("*/*_cuda.cu"))]
    return [*jobs, (HERE / "cuemu.cpp", ["g++", *flags, *scheduler])]


def build_library(target: Path) -> Path:
    """torch.ops.tempo.* on CPU tensors, computed by the emulated CUDA kernels."""
    import torch

    torch_folder = Path(torch.__file__).parent
    binding = ["g++", "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-DTEMPO_EMULATED"]
    binding += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", f"-I{SOURCES}", "-isystem", f"{torch_folder}/include"]
    jobs = kernel_jobs("", []) + [(source, binding) for source in sorted(SOURCES.glob("*/*_op.cpp"))]
    jobs.append((SOURCES / "common/cpu_dispatch.cpp", binding))
    objects = compile_all(jobs, target.parent / "objects")
    torch_libraries = [f"-L{torch_folder}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    subprocess.run(["g++", "-shared", "-o", str(target), *objects, *torch_libraries], check=True)
    return target


def build_program(target: Path, main: Path, mode: str = "", defines: list[str] | None = None) -> Path:
    """A program of `main` and the kernels; mode: "", "asan" (with UBSan) or "tsan"."""
    defines = defines or []
    flags = ["g++", "-std=c++17", "-O1", "-g", "-DCUEMU", f"-I{HERE}", f"-I{SOURCES}", "-isystem", str(cuda_include())]
    jobs = [*kernel_jobs(mode, defines), (main, [*flags, *SANITIZE[mode], *defines])]
    objects = compile_all(jobs, target.parent / f"objects-{mode or 'plain'}")
    subprocess.run(["g++", *SANITIZE[mode], "-o", str(target), *objects], check=True)
    return target


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("library", "program"):
        raise SystemExit(__doc__)
    output = Path(sys.argv[2]).resolve()
    if sys.argv[1] == "library":
        build_library(output)
    else:
        rest = sys.argv[3:]
        mode = next((word for word in rest if not word.startswith("-")), "")
        build_program(output, HERE / "kernel_harness.cpp", mode, [word for word in rest if word.startswith("-")])
