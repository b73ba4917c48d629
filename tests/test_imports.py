"""Who may import whom (DESIGN 2): read from the source, so that imports inside functions count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("data_prep", "models", "tempo", "pretrain")
# Of our own packages; a package may always import itself.
ALLOWED = {
    "data_prep": set(),
    "tempo": set(),
    "models": {"tempo"},
    "pretrain": {"models", "tempo", "data_prep"},
}


def imported_by(file: Path) -> set[str]:
    """Dotted names that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the package's name"
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def files_of(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no files"
    return files


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_arrows_allow(package: str) -> None:
    for file in files_of(package):
        ours = top(imported_by(file)) & {*PACKAGES, "benchmarks", "tests", "run_pretraining"}
        assert ours - {package} <= ALLOWED[package], f"{file} imports {sorted(ours - {package} - ALLOWED[package])}"


def test_data_prep_never_imports_torch() -> None:
    for file in files_of("data_prep"):
        assert "torch" not in top(imported_by(file)), file


def test_tempo_imports_torch_and_the_standard_library_only() -> None:
    for file in files_of("tempo"):
        # Whoever converts a model of transformers has it.
        allowed = {"torch", "tempo", "__future__"} | ({"transformers"} if file.name == "convert_attention.py" else set())
        others = top(imported_by(file)) - allowed - set(sys.stdlib_module_names)
        assert not others, f"{file} imports {sorted(others)}"


def test_run_pretraining_imports_pretrain_only() -> None:
    assert top(imported_by(ROOT / "run_pretraining.py")) <= {"pretrain"}


def test_importing_data_prep_loads_no_torch() -> None:
    code = "import sys, data_prep.shards, data_prep.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_importing_tempo_loads_no_transformers() -> None:
    code = "import sys, tempo; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
