"""`python -m data_prep`: dispatch and exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
NVIDIA_SHARD = ROOT / "tests/data/nvidia_seq128_512rows.hdf5"
NVIDIA_VOCAB = ROOT / "tests/data/vocab_bert_uncased_30522.txt"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_documents_itself(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: python -m data_prep {command}" in text
    assert len(text) > 400


def test_help_lists_the_commands(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text and description in text for command, description in COMMANDS.items())


@pytest.mark.parametrize("arguments", [[], ["bild"], ["build"], ["build", "--output", "x"], ["verify", "x", "--no-such-flag"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: " in capsys.readouterr().err


def test_users_mistakes_exit_with_2_and_without_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_prep", "verify", str(tmp_path / "nowhere")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("raised", "code"), [(ValueError("x"), 2), (RuntimeError("x"), 1), (OSError("x"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(raised: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise raised

    monkeypatch.setattr("data_prep.verify.run", fail)
    assert main(["verify", str(tmp_path)]) == code


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m data_prep inspect {NVIDIA_SHARD} --vocab {NVIDIA_VOCAB} --num 400 | head -c 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_heavy_libraries_load_only_where_needed() -> None:
    """`datasets` and `mwparserfromhell` cost more than a small build."""
    code = "import sys, data_prep.build; print({'datasets', 'mwparserfromhell', 'rich', 'torch', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
