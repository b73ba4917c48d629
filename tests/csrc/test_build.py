from __future__ import annotations

import os
import re
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
    assert {name for name in seen if not name.endswith("_op.cpp")} == {"op.h"}


def test_kernel_files_include_no_standard_cpp_header() -> None:
    """Shared inline functions compiled for AVX-512 could be the copies that the linker keeps."""
    sources = [*(ROOT / "csrc").glob("*/*_cpu.cpp"), ROOT / "csrc/common/simd.h", ROOT / "csrc/common/philox.h"]
    for source in sources:
        assert not re.findall(r"#include\s*<(?!\w+\.h>)[^>]*>", source.read_text()), source


def test_the_gelu_tables_are_what_the_script_fits() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "csrc/gelu/fit_tables.py"), "--print"], capture_output=True, text=True, check=True
    )
    written = (ROOT / "csrc/gelu/gelu_tables.h").read_text()
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?f"
    fitted_numbers, written_numbers = (re.findall(number, text) for text in (result.stdout, written))
    assert re.sub(number, "#", result.stdout) == re.sub(number, "#", written)
    for fitted, kept in zip(fitted_numbers, written_numbers, strict=True):
        # Other builds of LAPACK round the last bits of a least-squares solution differently.
        assert float(fitted[:-1]) == pytest.approx(float(kept[:-1]), rel=1e-3, abs=1e-8)


def test_setup_names_a_missing_compiler(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": "no-such-compiler"},
        check=False,
    )
    assert result.returncode != 0
    assert "the C++ compiler 'no-such-compiler' was not found" in result.stderr


def test_setup_refuses_an_unknown_setting(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TEMPO_CUDA": "yes"},
        check=False,
    )
    assert result.returncode != 0
    assert "TEMPO_CUDA='yes': must be auto, 0 or 1" in result.stderr


def test_a_compile_error_fails_the_build(tmp_path: Path) -> None:
    """`false` compiles nothing: the installation must not end as if it had."""
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": "false"},
        check=False,
    )
    assert result.returncode != 0
    assert "compiling tempo-bert's kernels failed" in result.stderr
    assert not list(tmp_path.rglob("_C.so"))
