"""Runs that are stopped and resumed: the same metrics as an uninterrupted run, whenever and however they end."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain import checkpoint
from pretrain.config import UserError
from pretrain.resume import hold_run
from pretrain.trainer import Trainer
from tests.run_factory import RunProcess, arguments, config, last_step, losses, rows_of, stable_rows, train

STEPS = 24
# PyTorch's own generator for the dropout, and evaluation in between: what might have state.
RUN = {
    "train__max_steps": STEPS,
    "train__checkpoint_every": 5,
    "train__eval_every": 8,
    "train__eval_samples": 8,
    "model__layers": "torch",
}


@pytest.fixture(scope="module")
def uninterrupted(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(data_dir, run, **RUN)
    return run


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / f"step_{STEPS:08d}" / "model.pt", weights_only=True)


def assert_same_run(run: Path, other: Path) -> None:
    assert [row["step"] for row in stable_rows(run)] == list(range(1, STEPS + 1))
    assert stable_rows(run) == stable_rows(other)
    ours, theirs = weights_of(run), weights_of(other)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in other.iterdir())
    assert [path.name for path in (run / "checkpoints").glob("*")] != []


def start(data: Path, run: Path, **changes: Any) -> RunProcess:
    return RunProcess(arguments(data, run, **{**RUN, **changes}), run, run.parent / "log.txt")


# ---- ends by a signal ----


@pytest.mark.parametrize("step", [1, 12])
def test_a_run_killed_at_any_moment_resumes_to_the_same_metrics(
    data_dir: Path, tmp_path: Path, uninterrupted: Path, step: int
) -> None:
    run = tmp_path / "run"
    process = start(data_dir, run)
    process.wait_for_step(step)
    process.send(signal.SIGKILL)
    assert process.exit_code() == -signal.SIGKILL, process.output()
    assert 0 < last_step(run) < STEPS
    train(data_dir, run, **RUN)
    assert_same_run(run, uninterrupted)


def test_a_run_killed_while_it_saves_resumes_to_the_same_metrics(data_dir: Path, tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    process = start(data_dir, run, train__checkpoint_every=1)
    process.wait_until(lambda: last_step(run) >= 3 and any((run / "checkpoints").glob(".unfinished_*")))
    process.send(signal.SIGKILL)
    process.exit_code()
    train(data_dir, run, **RUN)
    assert stable_rows(run) == stable_rows(uninterrupted)
    assert not list((run / "checkpoints").glob(".unfinished_*"))


def test_a_run_killed_several_times_resumes_to_the_same_metrics(data_dir: Path, tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    for step in (6, 11, 12):
        process = start(data_dir, run)
        process.wait_for_step(step)
        process.send(signal.SIGKILL)
        assert process.exit_code() == -signal.SIGKILL
    process = start(data_dir, run)
    assert process.exit_code() == 0
    assert_same_run(run, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_the_step_and_ends_with_code_0(
    data_dir: Path, tmp_path: Path, uninterrupted: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start(data_dir, run)
    process.wait_for_step(7)
    process.send(number)
    assert process.exit_code() == 0, process.output()
    latest = checkpoint.find_latest_valid(run)
    assert latest is not None
    stopped_at = checkpoint.step_of(latest)
    assert 7 <= stopped_at < STEPS
    assert last_step(run) == stopped_at
    assert f"{number.name}: saved step {stopped_at}" in process.output()
    train(data_dir, run, **RUN)
    assert_same_run(run, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_process_group_still_saves(
    data_dir: Path, tmp_path: Path, uninterrupted: Path, number: signal.Signals
) -> None:
    """Slurm's scancel, and Ctrl-C on a terminal, reach the data workers too."""
    run = tmp_path / "run"
    process = start(data_dir, run, data__num_workers=2)
    process.wait_for_step(6)
    process.send_to_group(number)
    assert process.exit_code() == 0, process.output()
    assert process.output().count("finishing the step") == 1
    latest = checkpoint.find_latest_valid(run)
    assert latest is not None
    assert 6 <= checkpoint.step_of(latest) < STEPS
    train(data_dir, run, **RUN)
    assert_same_run(run, uninterrupted)


def test_a_second_ctrl_c_ends_at_once(data_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(data_dir, tmp_path / "run", **RUN))
    with trainer.stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert trainer.stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- ends early by configuration, and resumes with another split ----


@pytest.mark.parametrize("generator", ["torch", "philox"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_in_two_parts_equals_one(data_dir: Path, tmp_path: Path, generator: str, precision: str) -> None:
    changes = {**RUN, "train__max_steps": 10, "model__dropout_generator": generator, "train__precision": precision}
    # Every second step is logged; the stop falls between two.
    changes |= {"train__log_every": 2, "optimizer__name": "adamw", "train__initial_loss_scale": 2.0**20}
    train(data_dir, tmp_path / "one", **changes)
    train(data_dir, tmp_path / "two", **changes, train__stop_after_steps=5)
    assert [row["step"] for row in rows_of(tmp_path / "two")] == [2, 4]
    train(data_dir, tmp_path / "two", **changes)
    assert stable_rows(tmp_path / "two") == stable_rows(tmp_path / "one")


def test_other_micro_batches_and_workers_after_a_resume_keep_the_curve(data_dir: Path, tmp_path: Path) -> None:
    changes = {**RUN, "train__max_steps": 10, "model__layers": "tempo"}
    train(data_dir, tmp_path / "one", **changes)
    train(data_dir, tmp_path / "two", **changes, train__stop_after_steps=5)
    train(data_dir, tmp_path / "two", **changes, train__micro_batch_size=3, data__num_workers=1)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "two")[:5] == losses(tmp_path / "one")[:5]


def test_resuming_reads_nothing_of_what_was_trained(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(data_dir, tmp_path, **RUN, train__stop_after_steps=20)
    trainer = Trainer(config(data_dir, tmp_path, **RUN))
    asked: list[int] = []
    batch = trainer.data.batch
    monkeypatch.setattr(trainer.data, "batch", lambda first, num: (asked.append(first), batch(first, num))[1])
    trainer.run()
    # The start-up summary looks at the first samples; training begins at sample 160.
    assert [first for first in asked if first != 0] == list(range(160, 192, 4))


# ---- which checkpoint ----


def test_a_complete_run_is_left_alone(data_dir: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    train(data_dir, uninterrupted, **RUN)
    assert f"complete at step {STEPS}; nothing to do" in capsys.readouterr().out
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def test_auto_starts_fresh_where_there_is_nothing(data_dir: Path, tmp_path: Path) -> None:
    assert Trainer(config(data_dir, tmp_path / "run", train__resume="auto")).progress.step == 0


def test_a_broken_newest_checkpoint_is_named_and_skipped(
    data_dir: Path, tmp_path: Path, uninterrupted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    newest = run / "checkpoints" / f"step_{STEPS:08d}"
    content = bytearray((newest / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "model.pt").write_bytes(content)
    train(data_dir, run, **RUN)
    assert f"skipping the broken checkpoint {newest}: model.pt" in caplog.text
    assert_same_run(run, uninterrupted)


def test_going_back_to_an_older_checkpoint_removes_the_later_ones(data_dir: Path, tmp_path: Path) -> None:
    changes = {**RUN, "train__max_steps": 20, "train__keep_checkpoints": 2}
    train(data_dir, tmp_path, **changes)
    older = tmp_path / "checkpoints" / "step_00000015"
    # Another learning rate from there on: what came later is of another training.
    changed = {**changes, "train__resume": older, "optimizer__learning_rate": 0.001, "train__stop_after_steps": 17}
    train(data_dir, tmp_path, **changed)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_00000015", "step_00000017"]
    assert last_step(tmp_path) == 17


def test_going_back_and_being_killed_does_not_jump_forward_again(data_dir: Path, tmp_path: Path) -> None:
    """The metrics are cut where training goes on, so the later checkpoints go then too, not with the next save."""
    changes = {**RUN, "train__max_steps": 20, "train__keep_checkpoints": 2}
    train(data_dir, tmp_path, **changes)
    trainer = Trainer(config(data_dir, tmp_path, **changes, train__resume=tmp_path / "checkpoints" / "step_00000015"))
    trainer._open_outputs()
    trainer.lock.close()
    assert last_step(tmp_path) == 15
    assert Trainer(config(data_dir, tmp_path, **changes)).progress.step == 15


def test_auto_does_not_start_over_where_every_checkpoint_is_broken(data_dir: Path, tmp_path: Path) -> None:
    train(data_dir, tmp_path, **{**RUN, "train__max_steps": 5})
    for path in checkpoint.list_checkpoints(tmp_path):
        (path / "model.pt").unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint of .* can be loaded \(step_00000005: model\.pt is missing\)"):
        Trainer(config(data_dir, tmp_path, **{**RUN, "train__max_steps": 5}))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resuming_another_run_in_a_new_directory_takes_its_lines_over(
    data_dir: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    train(data_dir, tmp_path / "one", **RUN, train__stop_after_steps=9)
    for where in (tmp_path / "one", tmp_path / "one" / "checkpoints" / "step_00000009"):
        train(data_dir, tmp_path / "two", **RUN, train__resume=where)
        assert stable_rows(tmp_path / "two") == stable_rows(uninterrupted)
        shutil.rmtree(tmp_path / "two")
    assert last_step(tmp_path / "one") == 9


# ---- phase 2 ----


def test_phase_2_starts_from_phase_1s_weights_with_a_new_schedule(data_dir: Path, tmp_path: Path) -> None:
    one = train(data_dir, tmp_path / "one", train__max_steps=4, data__max_seq_length=32)
    changes = {"train__init_from": tmp_path / "one", "train__max_steps": 6, "optimizer__learning_rate": 0.004}
    two = Trainer(config(data_dir, tmp_path / "two", **changes))
    expected = one.model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in two.model.state_dict().items())
    assert two.progress.step == two.progress.samples == 0
    assert two.optimizer.state_dict()["state"] == {}
    two.run()
    rates = [row["learning_rate"] for row in rows_of(tmp_path / "two")]
    assert len(rates) == 6
    assert max(rates[:-1]) > 0
    # The schedule ends at 0 and nowhere before.
    assert all(rate > 0 for rate in rates[:-1])
    assert losses(tmp_path / "two")[0] < losses(tmp_path / "one")[0]
    # Resumed, phase 2 goes on from its own checkpoint.
    again = Trainer(config(data_dir, tmp_path / "two", **changes))
    assert again.progress.step == 6


# ---- refusals ----


def refusal(data: Path, run: Path, **changes: Any) -> str:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError) as error:
        train(data, run, **{**RUN, **changes})
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before, "a refused run changed something"
    return str(error.value)


@pytest.fixture(scope="module")
def stopped(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("stopped") / "run"
    train(data_dir, run, **RUN, train__stop_after_steps=5)
    return run


def test_never_refuses_a_directory_that_holds_a_run(data_dir: Path, stopped: Path) -> None:
    message = refusal(data_dir, stopped, train__resume="never")
    assert f"{stopped} holds a run already" in message
    assert "choose another train.output_dir" in message
    assert "--train.resume auto" in message


@pytest.mark.parametrize(
    ("changes", "before", "now"),
    [
        ({"train__seed": 7}, "train.seed = 42", "7"),
        ({"train__global_batch_size": 16}, "train.global_batch_size = 8", "16"),
        ({"data__mask_probability": 0.2}, "data.mask_probability = 0.15", "0.2"),
        ({"optimizer__name": "adamw"}, "optimizer.name = lamb", "adamw"),
        ({"optimizer__weight_decay": 0.02}, "optimizer.weight_decay = 0.01", "0.02"),
        ({"model__num_heads": 4}, "model.num_heads = 2", "4"),
        ({"model__gelu": "tanh"}, "model.gelu = erf", "tanh"),
        ({"model__hidden_size": 32}, "model.hidden_size = 16", "32"),
    ],
)
def test_another_training_is_refused_with_both_values(
    data_dir: Path, stopped: Path, changes: dict[str, Any], before: str, now: str
) -> None:
    message = refusal(data_dir, stopped, **changes)
    assert f"was trained with {before}, and now it is {now}" in message
    assert str(stopped / "checkpoints" / "step_00000005") in message


def test_other_data_is_refused(data_dir: Path, stopped: Path) -> None:
    message = refusal(data_dir / "eval_00000.hdf5", stopped, data__eval_path=data_dir)
    assert "was trained on other data" in message
    assert "content hashes differ" in message


def test_harmless_changes_are_accepted_and_others_are_named(
    data_dir: Path, tmp_path: Path, stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    changes = {**RUN, "train__log_every": 3, "train__micro_batch_size": 2, "train__keep_checkpoints": 1, "model__layers": "tempo"}
    with caplog.at_level(logging.WARNING):
        Trainer(config(data_dir, tmp_path / "run", **{**changes, "optimizer__learning_rate": 0.005}))
    messages = [record.message for record in caplog.records]
    assert messages == [
        "model.layers was torch until step 5, and is tempo from here on",
        "optimizer.learning_rate was 0.01 until step 5, and is 0.005 from here on",
    ]


def test_paths_that_are_no_checkpoint_are_refused(data_dir: Path, tmp_path: Path, stopped: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = refusal(data_dir, tmp_path / "run", train__resume=tmp_path / "nowhere")
    assert "train.resume must be auto, never, or a run directory or checkpoint" in message
    assert str(tmp_path / "nowhere") in message
    assert str(tmp_path / "empty") in refusal(data_dir, tmp_path / "run", train__resume=tmp_path / "empty")
    assert str(tmp_path / "nowhere") in refusal(data_dir, tmp_path / "run", train__init_from=tmp_path / "nowhere")
    message = refusal(data_dir, stopped, train__resume=tmp_path / "empty")
    assert str(tmp_path / "empty") in message


def test_resuming_one_run_over_another_is_refused(data_dir: Path, tmp_path: Path, stopped: Path) -> None:
    shutil.copytree(stopped, tmp_path / "other")
    message = refusal(data_dir, stopped, train__resume=tmp_path / "other")
    assert f"{stopped} holds another run" in message


def test_weights_of_another_vocabulary_are_refused(data_dir: Path, tmp_path: Path, stopped: Path) -> None:
    other = tmp_path / "weights"
    shutil.copytree(stopped, other)
    progress = other / "checkpoints" / "step_00000005" / "progress.json"
    hash_now = Trainer(config(data_dir, tmp_path / "x", **RUN)).data.vocab_hash
    assert hash_now is not None
    progress.write_text(progress.read_text().replace(hash_now, "0" * 64))
    assert "another vocabulary" in refusal(data_dir, tmp_path / "run", train__init_from=other)
    assert "model.gelu = erf" in refusal(data_dir, tmp_path / "run", train__init_from=stopped, model__gelu="tanh")


def test_user_errors_are_of_the_class_that_the_command_reports() -> None:
    assert issubclass(UserError, ValueError)


def test_two_trainings_in_one_directory_are_refused(data_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lock = "import sys; from pathlib import Path; from pretrain.resume import hold_run; hold = hold_run(Path(sys.argv[1]));"
    command = [sys.executable, "-c", lock + "print('held', flush=True); sys.stdin.read()", str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=r"another process is training in .*run"):
            hold_run(run)
        other.kill()
        other.wait()
        hold_run(run).close()
