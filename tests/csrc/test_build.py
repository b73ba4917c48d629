from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tempo

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    package = Path(tempo.__file__).parents[1]
    variables = {**os.environ, "PYTHONPATH": str(package), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, cwd=variables["PYTHONPATH"], check=False
    )


def test_every_op_is_compiled() -> None:
    assert set(tempo.kernels.summary("cpu").values()) == {"compiled"}
    tempo.kernels.require("cpu")


def test_a_missing_cuda_kernel_is_an_error_where_kernels_are_required() -> None:
    with pytest.raises(ValueError, match=r"no compiled cuda kernel is installed for: .*gelu_forward"):
        tempo.kernels.require("cuda")


@pytest.mark.parametrize("wanted", ["baseline", "avx2", "avx512"])
def test_the_instruction_set_can_be_limited(wanted: str) -> None:
    result = run("import tempo; print(tempo.kernels.cpu_instruction_set())", TEMPO_CPU_ISA=wanted)
    order = ["baseline", "avx2", "avx512"]
    assert order.index(result.stdout.strip()) <= order.index(wanted)


def test_a_library_that_does_not_load_is_a_loud_error(tmp_path: Path) -> None:
    package = tmp_path / "tempo"
    package.mkdir()
    for source in Path(tempo.__file__).parent.glob("*.py"):
        (package / source.name).write_text(source.read_text())
    (package / "_C.so").write_bytes(b"not a library")
    result = run("import tempo", PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert re.search(r"the compiled kernels .*_C\.so do not load with torch", result.stderr)
    (package / "_C.so").unlink()
    result = run("import tempo; print(set(tempo.kernels.summary().values()))", PYTHONPATH=str(tmp_path))
    assert result.stdout.strip() == "{'reference'}"


def test_only_the_bindings_see_torch() -> None:
    sources = [s for s in sorted((ROOT / "csrc").glob("*/*")) if s.suffix in (".cpp", ".cu", ".h", ".cuh")]
    seen = {s.name for s in sources if re.search(r'#include\s*(<(torch|ATen|c10)/|"common/op.h")', s.read_text())}
    assert {name for name in seen if not name.endswith(("_op.cpp", "_op.h"))} == {"op.h"}


def test_kernel_files_include_no_standard_cpp_header() -> None:
    """Shared inline functions compiled for AVX-512 could be the copies that the linker keeps."""
    sources = [*(ROOT / "csrc").glob("*/*_cpu.cpp"), ROOT / "csrc/common/simd.h", ROOT / "csrc/common/philox.h"]
    for source in sources:
        assert not re.findall(r"#include\s*<(?!\w+\.h>)[^>]*>", source.read_text()), source


@pytest.mark.parametrize(("script", "header"), [("fit_tables", "gelu_tables"), ("fit_bfloat16", "gelu_bfloat16_tables")])
def test_the_gelu_tables_are_what_the_script_fits(script: str, header: str) -> None:
    command = [sys.executable, str(ROOT / f"csrc/gelu/{script}.py"), "--print"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    written = (ROOT / f"csrc/gelu/{header}.h").read_text()
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?f"
    fitted_numbers, written_numbers = (re.findall(number, text) for text in (result.stdout, written))
    assert re.sub(number, "#", result.stdout) == re.sub(number, "#", written)
    for fitted, kept in zip(fitted_numbers, written_numbers, strict=True):
        # Other builds of LAPACK round the last bits of a least-squares solution differently.
        assert float(fitted[:-1]) == pytest.approx(float(kept[:-1]), rel=1e-3, abs=1e-8)


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py's build into `folder`."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


NEEDS_NVCC = pytest.mark.skipif(
    shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists(), reason="needs nvcc"
)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CXX": "no-such-compiler", "TEMPO_CUDA": "0"}, "the C++ compiler 'no-such-compiler' was not found"),
        ({"TEMPO_CUDA": "yes"}, "TEMPO_CUDA='yes': must be auto, 0 or 1"),
        pytest.param(
            {"TEMPO_CUDA_ARCHS": "80 ninety", "TEMPO_CUDA": "1"}, "'ninety' is not a compute capability", marks=NEEDS_NVCC
        ),
        pytest.param({"TEMPO_CUDA_ARCHS": "35", "TEMPO_CUDA": "1"}, "does not know '35', only 7", marks=NEEDS_NVCC),
    ],
)
def test_a_wrong_setting_is_named(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    result = build(tmp_path, **environment)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_compile_error_fails_the_build(tmp_path: Path) -> None:
    """`false` compiles nothing: the installation must not end as if it had."""
    result = build(tmp_path, CXX="false", TEMPO_CUDA="0")
    assert result.returncode != 0
    assert "compiling tempo-bert's kernels failed" in result.stderr
    assert not list(tmp_path.rglob("_C.so"))


# ---- which GPUs the CUDA kernels run on ----


@pytest.mark.parametrize(
    ("architectures", "capability", "covered"),
    [
        ("75 80 90", (8, 6), True),  # machine code runs on later minor numbers
        ("86", (8, 0), False),
        ("75 80 90", (10, 0), False),
        ("75 80 90+PTX", (10, 0), True),  # PTX on all that come later
        ("75+PTX", (7, 0), False),
        ("90a", (9, 0), True),
        ("90a", (9, 1), False),
        ("8.0 12.0+PTX", (12, 1), True),
        ("", (8, 0), False),
    ],
)
def test_which_gpus_are_covered(architectures: str, capability: tuple[int, int], covered: bool) -> None:
    assert tempo.kernels.covers(architectures.split(), capability) is covered


def test_a_gpu_that_the_kernels_miss_is_named_with_the_cure() -> None:
    gpus = [("Tesla V100", (7, 0)), ("A100", (8, 0)), ("Tesla V100", (7, 0))]
    with pytest.warns(UserWarning, match=r"not for Tesla V100 \(7\.0\).*TEMPO_CUDA_ARCHS=70 with a CUDA 12 toolkit") as caught:
        tempo.kernels._warn_of_uncovered_gpus(["75", "80", "90+PTX"], gpus)
    assert len(caught) == 1


def test_the_description_says_what_is_compiled() -> None:
    text = tempo.kernels.describe()
    assert re.search(r"compiled kernels for (\d+) of \1 ops; CPU: (baseline|avx2|avx512); CUDA: ", text), text
