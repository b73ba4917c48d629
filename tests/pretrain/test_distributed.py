"""Several ranks on this machine (gloo): the curve of one rank, one writer, and an end for all when one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain import checkpoint
from pretrain.distributed import Ranks, start
from tests.run_factory import RunProcess, arguments, last_step, losses, rows_of, stable_rows, start_ranks, train

ROOT = Path(__file__).parent.parent.parent
TWO_RANKS = {"train__eval_every": 3, "train__eval_samples": 9, "train__micro_batch_size": 2}


def train_ranks(data: Path, run: Path, world_size: int = 2, *, per_rank: Any = None, **changes: Any) -> list[RunProcess]:
    """Start the ranks; `per_rank` maps a rank to changes of its own, which no user would make."""
    lines = [arguments(data, run, **{**changes, **(per_rank or {}).get(rank, {})}) for rank in range(world_size)]
    return start_ranks(world_size, lines, run, run.parent)


def assert_all_end(ranks: list[RunProcess], seconds: float = 60.0) -> list[int]:
    return [rank.exit_code(seconds) for rank in ranks]


@pytest.mark.parametrize(
    "changes",
    [
        {"model__layers": "tempo"},
        {"model__layers": "torch", "model__dropout_generator": "philox", "optimizer__name": "adamw"},
        {"model__layers": "torch", "model__hidden_dropout": 0.0, "model__attention_dropout": 0.0},
    ],
    ids=["tempo", "torch with Philox", "torch without dropout"],
)
def test_two_ranks_give_the_curve_of_one(data_dir: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    ranks = train_ranks(data_dir, tmp_path / "two", **TWO_RANKS, **changes)
    train(data_dir, tmp_path / "one", **TWO_RANKS, **changes)
    assert assert_all_end(ranks) == [0, 0], ranks[0].output() + ranks[1].output()
    ours, theirs = stable_rows(tmp_path / "two"), stable_rows(tmp_path / "one")
    assert len(ours) == len(theirs) == 6
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert our_row == pytest.approx(their_row, rel=1e-5)
    # One writer: every line once, and rank 1 says nothing.
    assert "parameters" in ranks[0].output()
    own_lines = [line for line in ranks[1].output().splitlines() if not line.startswith("[Gloo]")]
    assert own_lines == []


def test_three_uneven_ranks_give_the_curve_of_one(data_dir: Path, tmp_path: Path) -> None:
    ranks = train_ranks(data_dir, tmp_path / "three", 3, train__max_steps=4, train__micro_batch_size=2)
    train(data_dir, tmp_path / "one", train__max_steps=4)
    assert assert_all_end(ranks) == [0, 0, 0], ranks[0].output()
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_run_of_two_ranks_resumes_on_one(data_dir: Path, tmp_path: Path) -> None:
    ranks = train_ranks(data_dir, tmp_path / "run", train__stop_after_steps=3)
    train(data_dir, tmp_path / "one")
    assert assert_all_end(ranks) == [0, 0], ranks[0].output()
    train(data_dir, tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_with_code_0(data_dir: Path, tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    ranks = train_ranks(data_dir, run, train__max_steps=500)
    ranks[0].wait_for_step(5)
    ranks[rank].send(signal.SIGTERM)
    assert assert_all_end(ranks) == [0, 0], ranks[0].output() + ranks[1].output()
    latest = checkpoint.find_latest_valid(run)
    assert latest is not None
    assert checkpoint.step_of(latest) == last_step(run) < 500
    assert f"saved step {last_step(run)}" in ranks[0].output()


def test_a_rank_that_is_killed_ends_the_others(data_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = train_ranks(data_dir, run, train__max_steps=5000)
    ranks[0].wait_for_step(5)
    ranks[1].send(signal.SIGKILL)
    codes = assert_all_end(ranks)
    assert codes == [1, -signal.SIGKILL], ranks[0].output()
    assert "error: " in ranks[0].output()


def test_an_exception_on_one_rank_ends_all(data_dir: Path, tmp_path: Path) -> None:
    # Rank 1 has other data, whose rows are too long for the model.
    ranks = train_ranks(data_dir, tmp_path / "run", per_rank={1: {"model__max_position_embeddings": 16}})
    codes = assert_all_end(ranks)
    assert codes[1] == 2
    assert codes[0] != 0
    assert "error: " in ranks[1].output()


def test_ranks_with_different_weights_are_noticed(data_dir: Path, tmp_path: Path) -> None:
    # A rank with another learning rate stands for one whose memory or network fails.
    ranks = train_ranks(data_dir, tmp_path / "run", per_rank={1: {"optimizer__learning_rate": 0.5}})
    assert assert_all_end(ranks) == [1, 1]
    assert "the ranks hold different weights at step 6" in ranks[0].output()
    assert checkpoint.find_latest_valid(tmp_path / "run") is None


def test_skips_in_a_row_end_all_ranks(data_dir: Path, tmp_path: Path) -> None:
    changes = {"train__precision": "fp16", "train__initial_loss_scale": 2.0**120, "train__max_consecutive_skips": 3}
    ranks = train_ranks(data_dir, tmp_path / "run", **changes)
    assert assert_all_end(ranks) == [1, 1]
    for rank in ranks:
        assert "error: the gradient was not finite 3 times in a row after step 0" in rank.output()
    assert rows_of(tmp_path / "run") == []


def test_a_batch_smaller_than_the_ranks_is_refused(data_dir: Path, tmp_path: Path) -> None:
    ranks = train_ranks(data_dir, tmp_path / "run", train__global_batch_size=1)
    assert assert_all_end(ranks) == [2, 2]
    assert "train.global_batch_size 1 leaves one of 2 ranks without samples" in ranks[0].output()
    assert not (tmp_path / "run").exists()


def test_torchrun_runs_the_command_of_the_readme(data_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "run_pretraining.py"]
    done = subprocess.run(
        [*command, *arguments(data_dir, tmp_path / "run", train__max_steps=2)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]
    assert "on 2 rank(s)" in done.stdout


def test_one_process_is_its_own_group() -> None:
    ranks = start("cpu")
    assert (ranks.rank, ranks.world_size, ranks.is_main, ranks.device.type) == (0, 1, True, "cpu")
    assert ranks.any(True)
    assert not ranks.any(False)
    assert ranks.from_main("x") == "x"
    assert isinstance(ranks, Ranks)
