"""`python -m data_prep convert`: nothing is lost on the way, masks are undone and drawn, mistakes leave nothing behind."""

from __future__ import annotations

import io
import json
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet
import pytest

from data_prep.__main__ import main
from data_prep.convert import draw_static_masks
from data_prep.masking import MaskingRules, mix_keys, num_predictions
from data_prep.shards import Instances, list_shards, open_shard, read_manifest, undo_masks
from data_prep.verify import verify
from pretrain.dataset import PretrainingData
from tests.shard_factory import LDDL_FILE, NVIDIA_SHARD, NVIDIA_VOCAB, random_instances, words_of, write_directory

ARRAYS = ("tokens", "offsets", "segment_b_start", "is_random_next")


def convert(reader: str, source: Path, output: Path, *more: object) -> int:
    return main(["convert", "--from", reader, str(source), "--output", str(output), *map(str, more)])


def read_split(directory: Path, split: str = "train") -> Instances:
    return Instances.concatenate([open_shard(path) for path in list_shards(directory, split)])


def assert_same(a: Instances, b: Instances) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def assert_sound(directory: Path) -> None:
    reports, problems = verify(directory)
    assert problems + [problem for report in reports for problem in report.problems] == []


def test_nvidia_to_native_undoes_the_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("nvidia-hdf5", NVIDIA_SHARD, tmp_path / "out", "--vocab", NVIDIA_VOCAB, "--num-shards", 3) == 0
    assert "512 instances in 3 shard(s)" in capsys.readouterr().out
    source = open_shard(NVIDIA_SHARD)
    assert source.static_masks is not None
    assert_same(read_split(tmp_path / "out"), undo_masks(source, source.static_masks))
    assert [len(open_shard(path)) for path in list_shards(tmp_path / "out")] == [170, 171, 171]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert (manifest["max_seq_length"], manifest["vocab"]["size"]) == (128, 30522)
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == NVIDIA_VOCAB.read_bytes()
    assert_sound(tmp_path / "out")
    assert PretrainingData(tmp_path / "out").vocab_size == 30522


def test_held_out_files_stay_held_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("wiki_training_0.hdf5", "wiki_training_1.hdf5", "wiki_test_0.hdf5"):
        (source / name).write_bytes(NVIDIA_SHARD.read_bytes())
    assert convert("nvidia-hdf5", source, tmp_path / "out", "--vocab", NVIDIA_VOCAB) == 0
    assert len(read_split(tmp_path / "out")) == 1024
    assert len(read_split(tmp_path / "out", "eval")) == 512


def test_native_to_nvidia_and_back_is_the_same(tmp_path: Path) -> None:
    native = write_directory(tmp_path / "native", {"train": [20, 21], "eval": [7]})
    assert convert("native", native, tmp_path / "nvidia", "--to", "nvidia-hdf5", "--duplicate-factor", 1) == 0
    assert_sound(tmp_path / "nvidia")
    assert convert("nvidia-hdf5", tmp_path / "nvidia", tmp_path / "back") == 0
    for split in ("train", "eval"):
        assert_same(read_split(native, split), read_split(tmp_path / "back", split))


def test_duplicates_are_the_masks_of_as_many_epochs(tmp_path: Path) -> None:
    native = write_directory(tmp_path / "native", {"train": [20]})
    assert convert("native", native, tmp_path / "nvidia", "--to", "nvidia-hdf5", "--duplicate-factor", 3, "--seed", 5) == 0
    shard = open_shard(tmp_path / "nvidia" / "train_00000.hdf5")
    assert len(shard) == 60
    data = PretrainingData(native, seed=5)
    samples = np.arange(60)
    epochs, numbers = data.instances_of(samples)
    batch = data.batch(0, 60)
    with h5py.File(tmp_path / "nvidia" / "train_00000.hdf5") as file:
        for row, (epoch, number) in enumerate(zip(epochs, numbers, strict=True)):
            np.testing.assert_array_equal(file["input_ids"][epoch * 20 + number], batch["input_ids"][row])
    assert PretrainingData(tmp_path / "nvidia").vocab_size == 200


def test_static_masks_do_not_depend_on_how_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = write_directory(tmp_path / "native", {"train": [10, 11]})
    rows = []
    for chunk_rows in (100, 4):
        monkeypatch.setattr("data_prep.convert._CHUNK_ROWS", chunk_rows)
        out = tmp_path / str(chunk_rows)
        assert convert("native", native, out, "--to", "nvidia-hdf5", "--duplicate-factor", 2, "--num-shards", 1) == 0
        with h5py.File(out / "train_00000.hdf5") as file:
            rows.append(sorted(file["input_ids"][()].tolist()))
    assert rows[0] == rows[1]


def test_static_masks_can_be_undone() -> None:
    instances = random_instances(200)
    rules = MaskingRules.from_vocabulary(words_of(200))
    shown, masks = draw_static_masks(instances, mix_keys(1, 0, np.arange(200)), rules)
    np.testing.assert_array_equal(masks.counts, num_predictions(instances.lengths, 0.15, 20))
    assert (shown.tokens != instances.tokens).any()
    assert_same(undo_masks(shown, masks), instances)


# ---- LDDL ----


@pytest.fixture(scope="module")
def lddl_vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = pyarrow.parquet.read_table(LDDL_FILE).to_pylist()
    words = {word for row in rows for name in ("A", "B", "masked_lm_labels") for word in row[name].split()}
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join([*specials, *sorted(words - set(specials))]) + "\n")
    return path


def test_lddl_to_native_undoes_the_masks(tmp_path: Path, lddl_vocab: Path) -> None:
    assert convert("lddl-parquet", LDDL_FILE, tmp_path / "out", "--vocab", lddl_vocab) == 0
    words = lddl_vocab.read_text().splitlines()
    ours = read_split(tmp_path / "out")
    rows = pyarrow.parquet.read_table(LDDL_FILE).to_pylist()
    assert len(ours) == len(rows) == 300
    for k, row in enumerate(rows):
        expected = ["[CLS]", *row["A"].split(), "[SEP]", *row["B"].split(), "[SEP]"]
        assert len(expected) == row["num_tokens"]
        positions = np.load(io.BytesIO(row["masked_lm_positions"]))
        for place, word in zip(positions, row["masked_lm_labels"].split(), strict=True):
            expected[place] = word
        assert [words[i] for i in ours.tokens[ours.offsets[k] : ours.offsets[k + 1]]] == expected
        assert ours.segment_b_start[k] == len(row["A"].split()) + 2
        assert ours.is_random_next[k] == row["is_random_next"]
    assert words.index("[MASK]") not in ours.tokens
    assert open_shard(list_shards(tmp_path / "out")[0]).max_seq_length == 128
    assert_sound(tmp_path / "out")


def test_lddl_without_static_masks(tmp_path: Path, lddl_vocab: Path) -> None:
    table = pyarrow.parquet.read_table(LDDL_FILE).select(["A", "B", "is_random_next", "num_tokens"])
    (tmp_path / "source").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "source" / "part.0.parquet_0")
    assert convert("lddl-parquet", tmp_path / "source", tmp_path / "out", "--vocab", lddl_vocab) == 0
    assert len(read_split(tmp_path / "out")) == 300


# ---- mistakes ----


def fails(capsys: pytest.CaptureFixture[str], message: str, code: int, output: Path) -> None:
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not output.exists()
    assert not [path for path in output.parent.iterdir() if path.name.startswith(".")]


def test_another_vocabulary_is_noticed(tmp_path: Path, lddl_vocab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    fails(capsys, "row 0: 'att' is not in the vocabulary", convert("lddl-parquet", LDDL_FILE, out, "--vocab", NVIDIA_VOCAB), out)
    code = convert("nvidia-hdf5", NVIDIA_SHARD, out, "--vocab", lddl_vocab)
    fails(capsys, "does not begin with [CLS]", code, out)
    native = write_directory(tmp_path / "native", {"train": [5]})
    fails(capsys, "another vocabulary", convert("native", native, out, "--vocab", lddl_vocab), out)


def test_a_missing_vocabulary_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.hdf5").write_bytes(NVIDIA_SHARD.read_bytes())
    fails(capsys, "--vocab FILE", convert("nvidia-hdf5", tmp_path / "source", tmp_path / "out"), tmp_path / "out")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--num-shards", 0, "--num-shards must be at least 1, got 0"),
        ("--duplicate-factor", 0, "--duplicate-factor must be at least 1, got 0"),
        ("--max-seq-length", 8, "longer than max_seq_length 8"),
    ],
)
def test_values_out_of_range_are_named(
    tmp_path: Path, option: str, value: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    native = write_directory(tmp_path / "native", {"train": [20]})
    fails(capsys, message, convert("native", native, tmp_path / "out", option, value), tmp_path / "out")


@pytest.mark.parametrize(
    ("reader", "source", "message"),
    [
        ("nvidia-hdf5", "native", "is a native shard, --from says nvidia-hdf5"),
        ("native", NVIDIA_SHARD, "is a shard in NVIDIA’s format, --from says native"),
        ("lddl-parquet", "native", "no Parquet file there"),
        ("nvidia-hdf5", LDDL_FILE, "damaged, truncated or not HDF5"),
        ("nvidia-hdf5", "nowhere", "no such file or directory"),
    ],
)
def test_a_source_of_another_kind_is_named(
    tmp_path: Path, reader: str, source: Path | str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_directory(tmp_path / "native", {"train": [5]})
    code = convert(reader, tmp_path / source, tmp_path / "out", "--vocab", NVIDIA_VOCAB)
    fails(capsys, message, code, tmp_path / "out")


def test_damaged_parquet_is_named(tmp_path: Path, lddl_vocab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.parquet"
    out = tmp_path / "out"
    bad.write_bytes(LDDL_FILE.read_bytes()[:5000])
    fails(capsys, "bad.parquet", convert("lddl-parquet", bad, out, "--vocab", lddl_vocab), out)
    table = pyarrow.parquet.read_table(LDDL_FILE)
    pyarrow.parquet.write_table(table.drop_columns(["B"]), bad)
    fails(capsys, "no column B", convert("lddl-parquet", bad, out, "--vocab", lddl_vocab), out)
    rows = table.slice(0, 3).to_pylist()
    rows[1]["masked_lm_labels"] += " and"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), bad)
    fails(capsys, "row 1: its masks do not fit", convert("lddl-parquet", bad, out, "--vocab", lddl_vocab), out)


def test_what_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native = write_directory(tmp_path / "native", {"train": [5]})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert convert("native", native, tmp_path / "out") == 2
    assert "holds something already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    assert json.loads((native / "manifest.json").read_text())["splits"]["train"][0]["num_instances"] == 5
