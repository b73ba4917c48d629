"""pretrain.startup: data, model and machine that do not fit each other are refused before anything is written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config import UserError
from tests.run_factory import NVIDIA, config, train
from tests.shard_factory import NVIDIA_SHARD, write_directory


def refusal(*arguments: Any, **changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        train(*arguments, **changes)
    return str(error.value)


def test_a_missing_data_directory_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in refusal(tmp_path / "nothing", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_is_not_the_datas_is_refused(data_dir: Path, tmp_path: Path) -> None:
    message = refusal(data_dir, tmp_path, model__vocab_size=300)
    assert "model.vocab_size is 300" in message
    assert "a vocabulary of 200" in message
    message = refusal(NVIDIA_SHARD, tmp_path, **{**NVIDIA, "model__vocab_size": 100})
    assert "holds token id" in message
    assert "set model.vocab_size to" in message


def test_rows_longer_than_the_position_table_are_refused(data_dir: Path, tmp_path: Path) -> None:
    message = refusal(data_dir, tmp_path, model__max_position_embeddings=16)
    assert "are 32 long, but model.max_position_embeddings is 16" in message


def test_held_out_data_of_another_vocabulary_is_refused(data_dir: Path, tmp_path: Path) -> None:
    other = write_directory(tmp_path / "other", {"train": [4], "eval": [4]}, vocab_size=199)
    message = refusal(data_dir, tmp_path / "run", data__eval_path=other, train__eval_every=1)
    assert "another vocabulary" in message
    assert str(other) in message


def test_compiled_kernels_that_are_required_and_missing_are_an_error(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempo.kernels.implementation", lambda op, device: "reference")
    assert "tempo.kernels is 'required'" in refusal(data_dir, tmp_path, tempo__kernels="required")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error(data_dir: Path, tmp_path: Path) -> None:
    assert "train.device is 'cuda', but PyTorch sees no GPU" in refusal(data_dir, tmp_path, train__device="cuda")


def test_a_run_directory_that_cannot_be_made_is_an_error(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(data_dir, tmp_path / "file")
    assert "cannot be written: Not a directory" in refusal(data_dir, tmp_path / "file" / "run")


def test_the_deterministic_flag_and_threads_reach_pytorch(
    data_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(data_dir, tmp_path, train__deterministic=True, train__num_threads=1, train__max_steps=2)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1
    with pytest.raises(UserError):
        config(data_dir, tmp_path, train__num_threads=-1)
