from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from pretrain import checkpoint


def save(run: Path, step: int, value: float = 1.0) -> Path:
    state = {"weight": torch.full((3, 2), value), "bias": torch.zeros(3)}
    return checkpoint.save(run, step, model=state, optimizer={"optimizer": {"step": step}}, progress={"progress": {"step": step}})


def test_a_checkpoint_holds_what_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path, 200, 7.0)
    assert path.name == "step_00000200"
    model = nn.Linear(2, 3)
    checkpoint.load_model(path, model)
    assert (model.weight == 7.0).all()
    assert checkpoint.load_optimizer(path)["optimizer"] == {"step": 200}
    assert checkpoint.load_progress(path)["progress"] == {"step": 200}
    assert sorted(p.name for p in path.iterdir()) == ["model.pt", "optimizer.pt", "progress.json"]


def test_the_newest_valid_one_wins_and_broken_ones_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[3] / "progress.json").unlink()
    content = (paths[2] / "model.pt").read_bytes()
    (paths[2] / "model.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert checkpoint.find_latest_valid(tmp_path) == paths[1]
    assert "step_00000004: progress.json is missing" in caplog.text
    assert "step_00000003: model.pt does not have the hash" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"sha256": 3}', '{"sha256": {}}'])
def test_a_broken_progress_file_is_a_broken_checkpoint(tmp_path: Path, content: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "progress.json").write_text(content)
    assert checkpoint.find_latest_valid(tmp_path) == tmp_path / "checkpoints/step_00000001"


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.find_latest_valid(tmp_path) is None
    assert checkpoint.find_latest_valid(tmp_path / "nowhere") is None


def test_resolve_takes_a_run_or_a_checkpoint_and_explains_the_rest(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    assert checkpoint.resolve(tmp_path) == path
    assert checkpoint.resolve(path) == path
    with pytest.raises(ValueError, match=r"nowhere is neither a run directory nor a checkpoint .*: there is no such directory"):
        checkpoint.resolve(tmp_path / "nowhere")
    assert checkpoint.resolve(tmp_path / "checkpoints") == path
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match=r"bare is neither a run .*: it holds neither checkpoints/ nor progress\.json"):
        checkpoint.resolve(tmp_path / "bare")
    renamed = path.rename(tmp_path / "best")
    assert checkpoint.resolve(renamed) == renamed
    renamed.rename(path)
    (path / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing"):
        checkpoint.resolve(path)
    with pytest.raises(ValueError, match="no valid checkpoint"):
        checkpoint.resolve(tmp_path)


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"weight is \[3, 2\] there and \[3, 4\] here"):
        checkpoint.load_model(path, nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"missing 0\.bias; missing 0\.weight; unexpected bias; unexpected weight"):
        checkpoint.load_model(path, nn.Sequential(nn.Linear(2, 3)))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, 1.0)
    path = save(tmp_path, 3, 2.0)
    model = nn.Linear(2, 3)
    checkpoint.load_model(path, model)
    assert (model.weight == 2.0).all()
    assert [p.name for p in path.parent.iterdir()] == ["step_00000003"]


@pytest.mark.parametrize("renames_done", [1, 2])
def test_a_kill_while_a_step_is_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames_done: int
) -> None:
    """The only checkpoint is saved again, and the process dies after the first or the second rename."""
    save(tmp_path, 3, 1.0)
    rename, done = Path.rename, []

    def rename_until_killed(self: Path, target: Path) -> Path:
        if len(done) == renames_done:
            raise KeyboardInterrupt
        done.append(self)
        return rename(self, target)

    def rmtree(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename_until_killed)
        patched.setattr(checkpoint.shutil, "rmtree", rmtree)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 3, 2.0)
    found = checkpoint.find_latest_valid(tmp_path)
    assert found is not None
    model = nn.Linear(2, 3)
    checkpoint.load_model(found, model)
    assert (model.weight == float(renames_done)).all()
    save(tmp_path, 4)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_00000003", "step_00000004"]
    checkpoint.load_model(checkpoint.path_of(tmp_path, 3), model)
    assert (model.weight == float(renames_done)).all()


def test_pruning_never_removes_the_one_just_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (save(tmp_path, 9) / "model.pt").write_bytes(b"broken")
    saved = save(tmp_path, 5)
    checkpoint.prune(tmp_path, 1, 5)
    assert checkpoint.list_checkpoints(tmp_path) == [saved]
    assert "removing the later checkpoint" in caplog.text
    assert "step_00000009" in caplog.text


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2)
    assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(tmp_path)] == [10, 11]
    checkpoint.prune(tmp_path, 0)
    assert [checkpoint.step_of(p) for p in checkpoint.list_checkpoints(tmp_path)] == [11]


def test_a_full_disk_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left on device.*older checkpoints are intact"):
        save(tmp_path, 2)
    assert checkpoint.find_latest_valid(tmp_path) == good
    assert [p.name for p in good.parent.iterdir()] == ["step_00000001"]


def test_leftovers_of_a_killed_save_are_cleaned(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".unfinished_step_00000007"
    leftover.mkdir(parents=True)
    (leftover / "model.pt").write_bytes(b"half")
    assert checkpoint.list_checkpoints(tmp_path) == []
    save(tmp_path, 8)
    assert not leftover.exists()


def test_sigkill_while_saving_never_loses_the_newest_valid_one(tmp_path: Path) -> None:
    """A process saves without pause and is killed at several moments; what is found afterwards is always whole."""
    program = (
        "import sys, torch; from pathlib import Path; from pretrain import checkpoint\n"
        "run = Path(sys.argv[1]); step = int(sys.argv[2])\n"
        "while True:\n"
        "    step += 1\n"
        "    checkpoint.save(run, step, model={'w': torch.full((50_000,), float(step))}, optimizer={}, progress={})\n"
        "    checkpoint.prune(run, 2)\n"
        "    print(step, flush=True)\n"
    )
    last = 0
    for attempt in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(last)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        assert process.stdout is not None
        first = process.stdout.readline()  # it is saving now
        time.sleep(0.003 * (1 + 7 * attempt))
        os.kill(process.pid, signal.SIGKILL)
        finished = [int(line) for line in [first, *process.stdout.read().splitlines()] if line.strip()]
        process.wait()
        newest = checkpoint.find_latest_valid(tmp_path)
        assert newest is not None
        step = checkpoint.step_of(newest)
        assert step >= finished[-1]
        weights = torch.load(newest / "model.pt", weights_only=True)["w"]
        assert (weights == float(step)).all()
        assert json.loads((newest / "progress.json").read_text())["step"] == step
        last = step
