"""data_prep.shards: round trips, the same bytes, damaged files, and how a path becomes a list of shards."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep import memory
from data_prep.shards import (
    Instances,
    MissingSplitError,
    ShardAttributes,
    allow_open_files,
    check_total_memory,
    list_shards,
    open_shard,
    read_manifest,
    token_dtype,
    write_manifest,
    write_shard,
)
from tests.shard_factory import NVIDIA_SHARD, random_instances, write_directory

ATTRIBUTES = ShardAttributes(
    32, 200, "ab" * 32, {"lowercase": True, "名": "é"}, {"seed": 7}, [{"source": "text", "documents": 3}]
)
ARRAYS = ("tokens", "offsets", "segment_b_start", "is_random_next")


def assert_same(a: Instances, b: Instances) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    instances = random_instances(50)
    summary = write_shard(tmp_path / "train_00000.hdf5", instances, ATTRIBUTES)
    shard = open_shard(tmp_path / "train_00000.hdf5")
    assert_same(shard, instances)
    assert shard.attributes == ATTRIBUTES
    assert shard.summary == summary
    assert (summary.num_instances, summary.num_tokens) == (50, len(instances.tokens))
    assert shard.tokens.dtype == np.uint16
    assert shard.offsets.dtype == np.int64
    assert shard.static_masks is None
    assert [path.name for path in tmp_path.iterdir()] == ["train_00000.hdf5"]


def test_datasets_are_contiguous_mapped_and_aligned(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.hdf5", random_instances(33), ATTRIBUTES)
    with h5py.File(tmp_path / "a.hdf5", "r") as file:
        assert file.attrs["format"] == b"tempo-bert/1"
        for name in ARRAYS:
            assert file[name].chunks is None
            assert file[name].id.get_offset() % 64 == 0
    shard = open_shard(tmp_path / "a.hdf5")
    assert not shard.tokens.flags.owndata
    assert not shard.tokens.flags.writeable


def test_the_same_input_gives_the_same_bytes_in_one_piece_or_in_many_and_at_another_time(tmp_path: Path) -> None:
    instances = random_instances(40)
    one = write_shard(tmp_path / "one.hdf5", instances, ATTRIBUTES)
    time.sleep(1.1)  # HDF5 stores times in seconds, if it stores any
    many = write_shard(tmp_path / "many.hdf5", (instances[k : k + 7] for k in range(0, 40, 7)), ATTRIBUTES)
    assert one.content_hash == many.content_hash
    assert (tmp_path / "one.hdf5").read_bytes() == (tmp_path / "many.hdf5").read_bytes()


def test_the_content_hash_sees_every_array(tmp_path: Path) -> None:
    base = random_instances(10)
    hashes = {write_shard(tmp_path / "a.hdf5", base, ATTRIBUTES).content_hash}
    tokens, starts, labels = (np.array(getattr(base, name)) for name in ("tokens", "segment_b_start", "is_random_next"))
    tokens[1] += 1
    starts[0] = 2 if starts[0] != 2 else 3
    labels[0] ^= 1
    for changed in (
        Instances(tokens, base.offsets, base.segment_b_start, base.is_random_next),
        Instances(base.tokens, base.offsets, starts, base.is_random_next),
        Instances(base.tokens, base.offsets, base.segment_b_start, labels),
    ):
        hashes.add(write_shard(tmp_path / "a.hdf5", changed, ATTRIBUTES).content_hash)
    assert len(hashes) == 4


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_535, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_the_token_type_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    assert token_dtype(vocab_size) == dtype
    row = [3, vocab_size - 1, 4, vocab_size - 2, 4]
    instances = Instances.from_lists([row], [3], [0], dtype=np.uint32)
    write_shard(tmp_path / "a.hdf5", instances, ShardAttributes(8, vocab_size, "h"))
    shard = open_shard(tmp_path / "a.hdf5")
    assert shard.tokens.dtype == dtype
    assert shard.tokens.tolist() == row


def test_compressed_shards_are_read_too(tmp_path: Path) -> None:
    instances = random_instances(1000)
    plain = write_shard(tmp_path / "plain.hdf5", instances, ATTRIBUTES)
    gzip = write_shard(tmp_path / "gzip.hdf5", instances, ATTRIBUTES, compression="gzip")
    assert_same(open_shard(tmp_path / "gzip.hdf5"), instances)
    assert gzip.content_hash == plain.content_hash
    assert (tmp_path / "gzip.hdf5").stat().st_size < (tmp_path / "plain.hdf5").stat().st_size


def test_a_shard_without_instances(tmp_path: Path) -> None:
    summary = write_shard(tmp_path / "empty.hdf5", [], ATTRIBUTES)
    assert (summary.num_instances, summary.num_tokens) == (0, 0)
    assert len(open_shard(tmp_path / "empty.hdf5")) == 0


@pytest.mark.parametrize(
    ("rows", "starts", "labels", "message"),
    [
        ([[3, 9, 4, 9, 4], [3, 200, 4, 9, 4]], [3, 3], [0, 0], "row 1: token id 200 is not below the vocabulary's 200"),
        ([[3] + [9] * 31 + [4]], [3], [0], "row 0: longer than max_seq_length 32"),
        ([[3, 4]], [2], [0], r"row 0: shorter than \[CLS\] A \[SEP\]"),
        ([[3, 9, 4, 9, 4]], [6], [0], "row 0: segment_b_start outside"),
        ([[3, 9, 4, 9, 4]], [3], [2], "row 0: is_random_next"),
    ],
)
def test_bad_instances_are_refused_and_nothing_is_left(
    tmp_path: Path, rows: list, starts: list, labels: list, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"bad\.hdf5: {message}"):
        write_shard(tmp_path / "bad.hdf5", Instances.from_lists(rows, starts, labels), ATTRIBUTES)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_stream_leaves_the_old_shard_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    write_shard(path, random_instances(5), ATTRIBUTES)
    before = path.read_bytes()

    def broken() -> Iterator[Instances]:
        yield random_instances(3)
        raise RuntimeError("the disk of the source failed")

    with pytest.raises(RuntimeError, match="source failed"):
        write_shard(path, broken(), ATTRIBUTES)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# ---- damaged files ----


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
def test_truncated_files_are_named(tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.hdf5"
    write_shard(path, random_instances(100), ATTRIBUTES)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match=r"cut\.hdf5: (damaged, truncated or not HDF5|truncated)"):
        open_shard(path)


def test_text_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "a.hdf5").write_text("not HDF5 at all")
    with pytest.raises(ValueError, match=r"a\.hdf5: damaged, truncated or not HDF5"):
        open_shard(tmp_path / "a.hdf5")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.hdf5: no such shard file"):
        open_shard(tmp_path / "gone.hdf5")


def test_other_hdf5_files_are_described(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["weights"] = [1, 2]
    with pytest.raises(ValueError, match=r"no pretraining shard \(it holds \['weights'\]\)"):
        open_shard(tmp_path / "a.hdf5")


def change(path: Path, **attributes: object) -> None:
    with h5py.File(path, "r+") as file:
        for name, value in attributes.items():
            file.attrs[name] = value


def test_another_version_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.hdf5", random_instances(5), ATTRIBUTES)
    change(tmp_path / "a.hdf5", format="tempo-bert/2")
    with pytest.raises(ValueError, match=r"format 'tempo-bert/2', this version reads 'tempo-bert/1'"):
        open_shard(tmp_path / "a.hdf5")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_instances": 6}, "`offsets` has 6 entries, not 7"),
        ({"num_tokens": 3}, "`tokens` has"),
        ({"tokenizer": "{"}, "damaged attribute"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(tmp_path: Path, attributes: dict, message: str) -> None:
    write_shard(tmp_path / "a.hdf5", random_instances(5), ATTRIBUTES)
    change(tmp_path / "a.hdf5", **attributes)
    with pytest.raises(ValueError, match=message):
        open_shard(tmp_path / "a.hdf5")


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.hdf5", random_instances(5), ATTRIBUTES)
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        del file["tokens"]
    with pytest.raises(ValueError, match=r"a\.hdf5: .*tokens"):
        open_shard(tmp_path / "a.hdf5")


# ---- processes ----


def test_no_handle_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    write_shard(path, random_instances(5), ATTRIBUTES)
    before = len(h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE))
    shard = open_shard(path)
    assert len(h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)) == before
    path.unlink()  # the map outlives the name
    assert len(shard.tokens) == shard.num_tokens


@pytest.mark.skipif(bool(os.environ.get("HDF5_USE_FILE_LOCKING")), reason="HDF5's locking is set from outside")
def test_reading_takes_no_lock(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.hdf5", random_instances(5), ATTRIBUTES)
    (tmp_path / "b.hdf5").write_bytes(NVIDIA_SHARD.read_bytes())
    for path in (tmp_path / "a.hdf5", tmp_path / "b.hdf5"):
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(OSError, match="lock"):
                h5py.File(path, "r", locking=True)
            assert len(open_shard(path)) > 0
        check_total_memory([path])


def _sum_of_tokens(shard: Instances) -> int:
    return int(shard.tokens.sum())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_shards_survive_other_processes(tmp_path: Path, method: str) -> None:
    write_shard(tmp_path / "a.hdf5", random_instances(200), ATTRIBUTES)
    shard = open_shard(tmp_path / "a.hdf5")
    assert len(pickle.dumps(shard)) < 1000
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_sum_of_tokens, [shard] * 3) == [int(shard.tokens.sum())] * 3


def test_more_shards_than_the_hard_limit_of_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.shards.sys.version_info", (3, 12))
    monkeypatch.setattr("data_prep.shards.resource.getrlimit", lambda _: (1024, 2048))
    raised = []
    monkeypatch.setattr("data_prep.shards.resource.setrlimit", lambda _, limits: raised.append(limits))
    allow_open_files(100)
    allow_open_files(1500)
    assert raised == [(1756, 2048)]
    with pytest.raises(ValueError, match=r"5,000 shards need as many open files.*ulimit -n"):
        allow_open_files(5000)


def test_memory_is_checked_for_every_process_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    available = memory.available_memory()
    memory.check_memory(1000, "loading x", "buy more")
    with pytest.raises(ValueError, match=r"loading x needs .* GB of memory, .* are available; buy more"):
        memory.check_memory(2 * available, "loading x", "buy more")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    with pytest.raises(ValueError, match=r"in each of 100000 processes"):
        memory.check_memory(available // 10, "loading x", "buy more")


# ---- directories ----


def test_a_manifest_decides_the_shards_and_their_order(tmp_path: Path) -> None:
    write_directory(tmp_path, {"train": [3, 4], "eval": [2]})
    (tmp_path / "train_00009.hdf5").write_text("not listed")
    assert [path.name for path in list_shards(tmp_path)] == ["train_00000.hdf5", "train_00001.hdf5"]
    assert [path.name for path in list_shards(tmp_path, "eval")] == ["eval_00000.hdf5"]


def test_a_shard_of_the_manifest_that_is_gone_is_named(tmp_path: Path) -> None:
    write_directory(tmp_path, {"train": [3, 4]})
    (tmp_path / "train_00001.hdf5").unlink()
    with pytest.raises(ValueError, match=r"train_00001\.hdf5: listed in manifest\.json but not there \(1 of 2"):
        list_shards(tmp_path)


def test_no_eval_split_is_an_error_of_its_own(tmp_path: Path) -> None:
    write_directory(tmp_path, {"train": [3]})
    with pytest.raises(MissingSplitError, match=r"no 'eval' shards; .*--eval-fraction"):
        list_shards(tmp_path, "eval")
    with pytest.raises(MissingSplitError, match="no held-out shard"):
        list_shards(NVIDIA_SHARD, "eval")


def test_paths_without_a_manifest(tmp_path: Path) -> None:
    names = ["wiki_training_1.hdf5", "wiki_training_0.h5", "wiki_test_0.hdf5", "contest_a.hdf5", ".hidden.hdf5", "readme.txt"]
    for name in names:
        (tmp_path / name).touch()
    expected = ["contest_a.hdf5", "wiki_training_0.h5", "wiki_training_1.hdf5"]
    assert [path.name for path in list_shards(tmp_path)] == expected
    assert [path.name for path in list_shards(tmp_path, "eval")] == ["wiki_test_0.hdf5"]
    assert [path.name for path in list_shards(tmp_path / "wiki_training_*")] == expected[1:]
    assert [path.name for path in list_shards(tmp_path / "wiki_test_0.hdf5")] == ["wiki_test_0.hdf5"]


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such file or directory"):
        list_shards(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"\*\.hdf5: matches no file"):
        list_shards(tmp_path / "*.hdf5")
    with pytest.raises(ValueError, match=r"no manifest\.json and no \.hdf5 or \.h5 file"):
        list_shards(tmp_path)
    with pytest.raises(ValueError, match="split 'test' is unknown"):
        list_shards(tmp_path, "test")


def test_damaged_manifests_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for text, message in [
        ("{", "not valid JSON"),
        ("[]", "a JSON object is expected"),
        ('{"format": "tempo-bert/9"}', "format 'tempo-bert/9'"),
        ('{"format": "tempo-bert/1", "splits": {}}', "must hold a list `train`"),
        ('{"format": "tempo-bert/1", "splits": {"train": [{"name": "a"}]}}', "lacks"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_manifest(tmp_path)
    path.unlink()
    assert read_manifest(tmp_path) is None


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"splits": {"train": []}, "name": "é"})
    assert read_manifest(tmp_path) == {"format": "tempo-bert/1", "splits": {"train": []}, "name": "é"}
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_ranges_of_instances(tmp_path: Path) -> None:
    instances = random_instances(20)
    parts = [instances[0:0], instances[0:3], instances[3:20], instances[20:25]]
    assert [len(part) for part in parts] == [0, 3, 17, 0]
    assert_same(Instances.concatenate(parts), instances)
    with pytest.raises(ValueError, match="contiguous ranges"):
        instances[::2]
