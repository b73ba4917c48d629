"""Shards in NVIDIA's schema: what is read is what the file says, in every variant seen in the wild; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from data_prep.nvidia_format import check_total_memory, padded_rows
from data_prep.shards import NVIDIA_FORMAT, open_shard, undo_masks, write_nvidia_shard
from tests.shard_factory import NVIDIA_SHARD

NAMES = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")


def load(path: Path = NVIDIA_SHARD) -> dict[str, np.ndarray]:
    with h5py.File(path, "r") as file:
        return {name: file[name][()] for name in file}


def save(path: Path, arrays: dict[str, np.ndarray], **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)
    return path


def assert_rows_equal(path: Path, arrays: dict[str, np.ndarray]) -> None:
    shard = open_shard(path)
    assert shard.static_masks is not None
    width, predictions = arrays["input_ids"].shape[1], arrays["masked_lm_ids"].shape[1]
    for name, values in padded_rows(shard, shard.static_masks, width, predictions, "x").items():
        np.testing.assert_array_equal(values, arrays[name], err_msg=name)


def test_rows_are_those_of_the_file() -> None:
    assert_rows_equal(NVIDIA_SHARD, load())
    shard = open_shard(NVIDIA_SHARD)
    assert shard.format == NVIDIA_FORMAT
    assert (len(shard), shard.max_seq_length, shard.attributes.vocab_size) == (512, 128, None)
    assert shard.tokens.dtype == np.uint16
    assert not any(file for file in h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE))


VARIANTS: dict[str, Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]] = {
    "without input_mask": lambda a: {k: v for k, v in a.items() if k != "input_mask"},
    "int64": lambda a: {k: v.astype(np.int64) for k, v in a.items()},
    "uint16": lambda a: {k: v.astype(np.uint16) for k, v in a.items()},
    "labels as a column": lambda a: {**a, "next_sentence_labels": a["next_sentence_labels"][:, None]},
    "no padding anywhere": lambda a: {k: v[a["input_mask"].all(1)] for k, v in a.items()},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("compression", ["gzip", "lzf", None])
def test_variants_of_the_schema_are_read(tmp_path: Path, variant: str, compression: str | None) -> None:
    arrays = VARIANTS[variant](load())
    path = save(tmp_path / "a.hdf5", arrays, compression=compression)
    expected = {**load(), **arrays}
    if variant == "no padding anywhere":
        expected = arrays
    expected["next_sentence_labels"] = expected["next_sentence_labels"].ravel()
    assert_rows_equal(path, expected)


def test_ids_beyond_16_bits_are_kept(tmp_path: Path) -> None:
    arrays = load()
    arrays["input_ids"][3, 5] = 100_000
    arrays["masked_lm_ids"][4, 0] = 119_546
    assert_rows_equal(save(tmp_path / "a.hdf5", arrays), arrays)


def test_a_file_of_several_blocks_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_shard(NVIDIA_SHARD)
    monkeypatch.setattr("data_prep.nvidia_format._BLOCK_ROWS", 100)
    assert_rows_equal(NVIDIA_SHARD, load())
    assert open_shard(NVIDIA_SHARD).content_hash == whole.content_hash


@pytest.mark.parametrize("name", NAMES)
def test_the_content_hash_sees_every_array(tmp_path: Path, name: str) -> None:
    arrays = load()
    row = int(np.argmax(arrays["input_mask"].sum(1) == 128))  # of full length
    place = int(arrays["masked_lm_positions"][row, 0]) if "masked" not in name else 0
    if name == "input_mask":  # one token less
        arrays[name][row, -1] = arrays["segment_ids"][row, -1] = arrays["input_ids"][row, -1] = 0
    elif name == "segment_ids":  # B starts one token later
        arrays[name][row, np.argmax(arrays[name][row])] = 0
    elif name == "next_sentence_labels":
        arrays[name][row] ^= 1
    else:
        arrays[name][row, place] += 1
    assert open_shard(save(tmp_path / "a.hdf5", arrays)).content_hash != open_shard(NVIDIA_SHARD).content_hash


def test_predictions_end_at_the_first_zero_id(tmp_path: Path) -> None:
    arrays = load()
    arrays["masked_lm_ids"][0, 2:] = 0
    arrays["masked_lm_positions"][1, :] = 0
    arrays["masked_lm_ids"][1, :] = 0
    shard = open_shard(save(tmp_path / "a.hdf5", arrays))
    assert shard.static_masks is not None
    assert shard.static_masks.counts[:2].tolist() == [2, 0]


def test_undone_masks_give_the_original_words() -> None:
    arrays = load()
    shard = open_shard(NVIDIA_SHARD)
    assert shard.static_masks is not None
    plain = undo_masks(shard, shard.static_masks)
    expected = arrays["input_ids"].copy()
    for row in range(len(expected)):
        for place, word in zip(arrays["masked_lm_positions"][row], arrays["masked_lm_ids"][row], strict=True):
            if word:
                expected[row, place] = word
    np.testing.assert_array_equal(plain.tokens, expected[arrays["input_mask"] == 1])
    assert (plain.tokens == 103).sum() == 0  # no [MASK] is left


def edit(name: str, index: Any, value: int) -> Callable[[dict[str, np.ndarray]], None]:
    def apply(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][index] = value

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("input_mask", (7, 2), 0), "row 7 is not tokens followed by padding"),
        (edit("input_mask", (7, slice(None)), 0), "row 7 is empty"),
        (edit("segment_ids", (7, 0), 1), "row 7 has segment ids"),
        (edit("segment_ids", (7, 127), 2), "row 7 has segment ids"),
        (edit("input_ids", (7, 3), -1), "row 7 has negative token ids"),
        (edit("masked_lm_positions", (7, 0), 128), "row 7 has a masked position outside"),
        (edit("masked_lm_positions", (7, 0), 0), "row 7 has a masked position outside"),
        (edit("next_sentence_labels", 7, 2), "row 7 has a next_sentence_label other than 0 and 1"),
        (lambda a: a.pop("masked_lm_ids"), "has no masked_lm_ids"),
        (lambda a: a.update(segment_ids=a["segment_ids"][:500]), r"segment_ids has shape \(500, 128\)"),
        (lambda a: a.update(next_sentence_labels=a["next_sentence_labels"][:9]), "9 next_sentence_labels for 512 rows"),
        (lambda a: a.update(input_ids=a["input_ids"].astype(np.float32)), "input_ids has type float32"),
        (lambda a: a.update({k: v[:0] for k, v in a.items()}), "holds no instance"),
    ],
)
def test_rows_that_contradict_themselves_are_named(tmp_path: Path, change: Callable, message: str) -> None:
    arrays = load()
    change(arrays)
    with pytest.raises(ValueError, match=rf"bad\.hdf5: .*{message}"):
        open_shard(save(tmp_path / "bad.hdf5", arrays))


def test_a_file_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    content = bytearray(NVIDIA_SHARD.read_bytes())
    start = len(content) // 3
    content[start : start + 2000] = b"\0" * 2000
    (tmp_path / "bad.hdf5").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.hdf5: damaged"):
        open_shard(tmp_path / "bad.hdf5")


def test_shards_that_do_not_fit_into_memory_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.memory.available_memory", lambda: 100_000)
    cure = "data_prep convert --from nvidia-hdf5"
    with pytest.raises(ValueError, match=cure):
        open_shard(NVIDIA_SHARD)
    monkeypatch.setattr("data_prep.memory.available_memory", lambda: 300_000)
    check_total_memory([NVIDIA_SHARD])
    with pytest.raises(ValueError, match=cure):
        check_total_memory([NVIDIA_SHARD] * 2)


def test_what_we_write_has_nvidias_types_and_the_same_rows(tmp_path: Path) -> None:
    shard = open_shard(NVIDIA_SHARD)
    masks = shard.static_masks
    assert masks is not None
    chunks = [(shard[k : k + 200], masks[k : k + 200]) for k in range(0, 512, 200)]
    summary = write_nvidia_shard(tmp_path / "a.hdf5", chunks, max_seq_length=128, max_predictions_per_seq=20)
    assert (summary.num_instances, summary.content_hash) == (512, shard.content_hash)
    with h5py.File(tmp_path / "a.hdf5", "r") as ours, h5py.File(NVIDIA_SHARD, "r") as theirs:
        assert sorted(ours) == sorted(NAMES)
        for name in NAMES:
            assert (ours[name].dtype, ours[name].shape, ours[name].compression) == (
                theirs[name].dtype,
                theirs[name].shape,
                theirs[name].compression,
            )
            np.testing.assert_array_equal(ours[name][()], theirs[name][()])


def test_writing_refuses_rows_that_are_too_long(tmp_path: Path) -> None:
    shard = open_shard(NVIDIA_SHARD)
    assert shard.static_masks is not None
    for length, predictions, message in [(100, 20, "max_seq_length is 100"), (128, 10, "max_predictions_per_seq is 10")]:
        with pytest.raises(ValueError, match=message):
            write_nvidia_shard(
                tmp_path / "a.hdf5",
                [(shard, shard.static_masks)],
                max_seq_length=length,
                max_predictions_per_seq=predictions,
            )
    assert list(tmp_path.iterdir()) == []
