"""benchmarks/gpu_check.sh where there is no GPU: it refuses; with a pretended one it runs all parts and reports each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_check.sh"
PARTS = ["found", "build", "tests", "layers", "curves", "step"]

# Answers in place of Python on a GPU machine; what is to fail, or to hang, is named in the environment.
PRETENDED = r"""#!/bin/bash
echo "$*" | tr '\n' ' ' >>"$CALLS"; echo >>"$CALLS"
[[ "$*" == *"$HANGS"* && -n "$HANGS" ]] && sleep 60
[[ "$*" == *"$FAILS"* && -n "$FAILS" ]] && { echo "it broke"; exit 3; }
case "$*" in
  *"print(torch.cuda.get_device_name(0))"*) echo "Pretended GPU (80 GB)" ;;
  *"-m benchmarks.layers"* | *"-m benchmarks.step"*) printf '# Title\n\n- head\n\n## float32\n\n| op |\n' >"${@: -1}" ;;
  *) echo "answer" ;;
esac
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the script looks at, without .git, in a folder of its own."""
    root = tmp_path / "copy"
    (root / "benchmarks").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "benchmarks")
    (root / "csrc").mkdir()
    (root / "setup.py").touch()
    pretended = root / "python"
    pretended.write_text(PRETENDED)
    pretended.chmod(0o755)
    return root


def run(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHON": str(root / "python"),
        "CALLS": str(root / "calls"),
        "FAILS": "",
        "HANGS": "",
        **variables,
    }
    command = ["bash", str(root / "benchmarks/gpu_check.sh"), *arguments]
    return subprocess.run(command, cwd=root.parent, env=environment, capture_output=True, text=True, check=False)


def report_of(root: Path) -> str:
    (path,) = (root / "benchmarks/results").iterdir()
    assert re.fullmatch(r"gpu_check_pretended-gpu-80-gb_\d{4}-\d\d-\d\d\.md", path.name)
    return path.read_text()


def test_without_a_gpu_it_says_what_it_needs() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "needs an NVIDIA GPU with its driver and a PyTorch built for CUDA" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ((), {"PYTHON": "no-such-python"}, "'no-such-python' was not found"),
        (("--fast",), {}, "unknown argument '--fast'"),
        (("--part", "none"), {}, "unknown part 'none'"),
        ((), {"GPU_CHECK_SECONDS": "soon"}, "must be a number of seconds, got 'soon'"),
        (("/proc/none",), {}, "cannot be written to"),
    ],
)
def test_mistakes_end_with_a_sentence(copy: Path, arguments: tuple[str, ...], variables: dict[str, str], message: str) -> None:
    result = run(copy, *arguments, **variables)
    assert result.returncode == 2
    assert message in result.stderr


def test_all_parts_run_and_the_report_has_each(copy: Path) -> None:
    result = run(copy)
    assert result.returncode == 0, result.stdout + result.stderr
    report = report_of(copy)
    assert len(re.findall(r"^\| .* \| passed \| \d+ s \|$", report, flags=re.MULTILINE)) == len(PARTS)
    for part in ("- machine: Pretended GPU (80 GB)", "commit: unknown", "all parts passed", "### float32\n\n| op |", "- head"):
        assert part in report
    calls = (copy / "calls").read_text()
    for call in ("setup.py build_ext --inplace", "-m gpu tests/gpu", "-m benchmarks.layers --device cuda", "-m benchmarks.step"):
        assert call in calls
    for layers in ("torch", "tempo"):
        assert f"--model.layers {layers} --model.dropout_generator philox --train.device cuda --train.precision bf16" in calls


@pytest.mark.parametrize("broken", ["setup.py", "-m pytest", "benchmarks.layers", "run_pretraining", "benchmarks.step"])
def test_a_part_that_fails_is_recorded_and_the_others_run(copy: Path, broken: str) -> None:
    result = run(copy, FAILS=broken)
    assert result.returncode == 1
    report = report_of(copy)
    assert report.count("| passed |") == len(PARTS) - 1
    assert report.count("| **failed**: exit status 3 |") == 1
    assert "it broke" in report
    assert "**some parts failed**" in report
    assert "    it broke" in result.stdout


def test_a_part_that_hangs_is_ended_and_the_next_ones_get_their_time(copy: Path) -> None:
    result = run(copy, HANGS="get_device_properties", GPU_CHECK_SECONDS="90")  # 3 s of them for the first part
    assert result.returncode == 1
    report = report_of(copy)
    assert re.search(r"\| What was found \| \*\*failed\*\*: ran out of its 3 s \|", report)
    assert report.count("| passed |") == len(PARTS) - 1


def test_kernels_that_are_newer_than_their_sources_are_not_built_again(copy: Path) -> None:
    (copy / "tempo").mkdir()
    (copy / "tempo/_C.so").touch()
    for source in (copy / "setup.py", copy / "csrc"):
        os.utime(source, (1, 1))
    assert run(copy).returncode == 0
    assert "built already" in report_of(copy)
    assert "build_ext" not in (copy / "calls").read_text()
    (copy / "csrc/new.cu").touch()
    os.utime(copy / "tempo/_C.so", (2, 2))
    (copy / "calls").unlink()
    assert run(copy).returncode == 0
    assert "build_ext" in (copy / "calls").read_text()


def test_results_go_where_the_user_says_seen_from_where_the_user_is(copy: Path) -> None:
    assert run(copy, "my results").returncode == 0
    assert len(list((copy.parent / "my results").iterdir())) == 1
    assert not (copy / "benchmarks/results").exists()


# Trains nothing: writes the curve that the test wants, and leaves the comparison to the real Python.
CURVES = r"""#!/bin/bash
case "$*" in
  run_pretraining.py*)
    directory="${@: -1}"; mkdir -p "$directory"
    [[ "$*" == *"--model.layers tempo"* ]] && shift_by=$SHIFT || shift_by=0
    for step in 1 2 3 4 5; do
      python3 -c "print('{\"step\": %d, \"loss\": %f}' % ($step, 9.0 - $FALL * $step / 5 + $shift_by))"
    done >"$directory/metrics.jsonl" ;;
  *) exec "$REAL" "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("fall", "shift", "status", "message"),
    [
        ("2.0", "0.01", 0, "largest difference 0.0"),
        ("2.0", "0.2", 1, "the curves differ by more than 0.1"),
        ("0.5", "0.0", 1, "the loss did not fall by 1"),
    ],
)
def test_curves_must_agree_and_fall(tmp_path: Path, fall: str, shift: str, status: int, message: str) -> None:
    pretended = tmp_path / "python"
    pretended.write_text(CURVES)
    pretended.chmod(0o755)
    variables = {"PYTHON": str(pretended), "REAL": sys.executable, "GPU_CHECK_WORK": str(tmp_path), "FALL": fall, "SHIFT": shift}
    result = subprocess.run(
        ["bash", str(SCRIPT), "--part", "curves"], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert (result.returncode == 0) == (status == 0), result.stdout + result.stderr
    assert message in result.stdout + result.stderr
    if status == 0:
        assert json.loads((tmp_path / "compare.json").read_text())[1]["largest_difference"] == pytest.approx(0.01)
