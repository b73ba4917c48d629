"""`python -m data_prep verify`: sound data passes, each kind of damage is named with file and row."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.verify import verify
from tests.shard_factory import CLS, MASK, NVIDIA_SHARD, NVIDIA_VOCAB, SEP, UNK, write_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "data", {"train": [30, 31], "eval": [8]})


def problems_of(directory: Path) -> list[str]:
    reports, problems = verify(directory)
    return problems + [problem for report in reports for problem in report.problems]


def overwrite(path: Path, dataset: str, index: int, value: int) -> None:
    with h5py.File(path, "r+") as file:
        file[dataset][index] = value


def place_in(path: Path, row: int, place: int) -> int:
    with h5py.File(path, "r") as file:
        return int(file["offsets"][row]) + place


def test_sound_data_passes_with_a_table(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(directory)]) == 0
    output = capsys.readouterr().out
    assert "all is well: 69 instances in 3 shard(s)" in output
    assert "train_00001.hdf5" in output
    assert "eval_00000.hdf5" in output


def test_counts_are_those_of_the_shards(directory: Path) -> None:
    reports, _ = verify(directory)
    with h5py.File(directory / "train_00000.hdf5") as file:
        tokens, labels = file["tokens"][()], file["is_random_next"][()]
    first = reports[0]
    assert (first.split, first.num_instances, first.num_tokens) == ("train", 30, len(tokens))
    assert first.num_places == 30 * 32
    assert first.num_random == labels.sum()
    assert first.num_unknown == (tokens == UNK).sum()


def test_problems_end_with_1_on_stderr(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "train_00001.hdf5").unlink()
    assert main(["verify", str(directory)]) == 1
    captured = capsys.readouterr()
    assert "problem: " in captured.err
    assert "train_00001.hdf5: no such shard file" in captured.err
    assert "1 problem(s) in 3 shard(s)" in captured.out


@pytest.mark.parametrize("path", ["nowhere", ""])
def test_wrong_usage_ends_with_2(tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_changed_token_breaks_the_content_hash(directory: Path) -> None:
    path = directory / "train_00000.hdf5"
    place = place_in(path, 4, 1)
    with h5py.File(path) as file:
        value = int(file["tokens"][place])
    overwrite(path, "tokens", place, value - 1 if value > 100 else value + 1)
    assert problems_of(directory) == ["train_00000.hdf5: its content is not what its content_hash was made of"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 50, "row 4: does not begin with [CLS]"),
        (-1, 50, "row 4: does not end with [SEP]"),
        (1, CLS, "row 4: has a special token inside a segment"),
        (1, MASK, "row 4: has a special token inside a segment"),
        (1, 200, "row 4: token id 200 is not below the vocabulary's 200 entries"),
    ],
)
def test_tokens_out_of_place_are_named(directory: Path, place: int, value: int, message: str) -> None:
    path = directory / "train_00000.hdf5"
    overwrite(path, "tokens", place_in(path, 4 + (place < 0), place), value)
    found = problems_of(directory)
    assert len(found) == 1
    assert found[0].startswith(f"train_00000.hdf5: {message}")


def test_a_second_chunk_names_its_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.verify._CHUNK_ROWS", 7)
    assert problems_of(directory) == []
    path = directory / "train_00000.hdf5"
    overwrite(path, "tokens", place_in(path, 16, 0), SEP)
    assert problems_of(directory)[0].startswith("train_00000.hdf5: row 16: does not begin with [CLS]")


@pytest.mark.parametrize(
    ("dataset", "index", "value", "message"),
    [
        ("segment_b_start", 4, 40, "row 4: segment_b_start outside the instance"),
        ("segment_b_start", 4, 1, "row 4: segment_b_start outside the instance"),
        ("is_random_next", 4, 7, "row 4: is_random_next is neither 0 nor 1"),
        ("offsets", 4, 10**9, "row 4: `offsets` fall or leave"),
        ("offsets", 4, 0, "row 3: `offsets` fall or leave"),
    ],
)
def test_other_arrays_out_of_range_are_named(directory: Path, dataset: str, index: int, value: int, message: str) -> None:
    overwrite(directory / "train_00000.hdf5", dataset, index, value)
    assert any(problem.startswith(f"train_00000.hdf5: {message}") for problem in problems_of(directory))


def test_too_long_instances_are_named(directory: Path) -> None:
    with h5py.File(directory / "train_00000.hdf5", "r+") as file:
        lengths = np.diff(file["offsets"][()])
        file.attrs["max_seq_length"] = int(lengths.max()) - 1
    found = problems_of(directory)
    assert any(f"row {lengths.argmax()}: longer than max_seq_length" in problem for problem in found)


def test_a_truncated_shard_is_named(directory: Path) -> None:
    path = directory / "eval_00000.hdf5"
    path.write_bytes(path.read_bytes()[:-100])
    found = problems_of(directory)
    assert len(found) == 1
    assert "eval_00000.hdf5: damaged, truncated" in found[0]


def change_manifest(directory: Path, **entry: object) -> None:
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"][1].update(entry)
    path.write_text(json.dumps(manifest))


def test_a_manifest_that_says_otherwise_is_named(directory: Path) -> None:
    change_manifest(directory, num_instances=32, content_hash="0" * 64)
    found = problems_of(directory)
    assert "train_00001.hdf5: num_instances is 31, manifest.json says 32" in found
    assert any("content_hash is" in problem for problem in found)


def test_foreign_files_and_another_vocabulary_are_named(directory: Path) -> None:
    (directory / "train_00007.hdf5").write_bytes((directory / "train_00000.hdf5").read_bytes())
    vocab = directory / "vocab.txt"
    vocab.write_text(vocab.read_text().replace("w1\n", "other\n"))
    found = problems_of(directory)
    assert "train_00007.hdf5: not listed in manifest.json" in found
    assert any(problem.startswith("vocab.txt: not the vocabulary") for problem in found)
    vocab.unlink()
    assert "vocab.txt: missing" in problems_of(directory)


def test_uneven_shards_are_a_problem(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "data", {"train": [10, 13]})
    assert problems_of(directory) == ["train shards: 10 to 13 instances, they should differ by 1 at most"]


def test_one_sided_labels_are_a_problem(directory: Path) -> None:
    for name in ("train_00000.hdf5", "train_00001.hdf5", "eval_00000.hdf5"):
        with h5py.File(directory / name, "r+") as file:
            file["is_random_next"][:] = 1
    assert any("100.0% of the pairs are random" in problem for problem in problems_of(directory))


def test_many_unknown_tokens_are_a_problem(directory: Path) -> None:
    with h5py.File(directory / "train_00000.hdf5", "r+") as file:
        tokens = file["tokens"][()]
        tokens[tokens > MASK] = UNK
        file["tokens"][:] = tokens
    assert any("of the tokens are [UNK], more than 5.0%" in problem for problem in problems_of(directory))
    _, problems = verify(directory, max_unknown_rate=0.99)
    assert not any("[UNK]" in problem for problem in problems)


def test_nvidias_shards_are_verified_with_and_without_a_vocabulary() -> None:
    for vocab in (None, NVIDIA_VOCAB):
        reports, problems = verify(NVIDIA_SHARD, vocab=vocab)
        assert problems == reports[0].problems == []
        assert (reports[0].num_instances, reports[0].num_predictions) == (512, 9116)


def test_nvidias_damaged_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    path.write_bytes(NVIDIA_SHARD.read_bytes())
    with h5py.File(path, "r+") as file:
        file["input_ids"][9, 0] = 5
    reports, _ = verify(path)
    assert reports[0].problems == ["a.hdf5: row 9: does not begin with [CLS] (1 such rows)"]
