"""pretrain.data and pretrain.dataset: every instance once per epoch, the same rows however the work is cut, clear errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.masking import num_predictions
from data_prep.shards import open_shard
from pretrain.data import PretrainingData, check_shared_memory, micro_batches, permutation, split_batch
from tests.shard_factory import NVIDIA_SHARD, UNK, write_directory

TENSORS = ("input_ids", "token_type_ids", "attention_mask", "masked_positions", "labels", "next_sentence_label")


def rows_of(batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in TENSORS}


def assert_equal_rows(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name in TENSORS:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


# ---- the order of training ----


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_the_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = permutation(np.arange(size), size, seed, np.full(size, epoch))
    assert order.min() == 0
    assert order.max() == size - 1
    assert len(np.unique(order)) == size


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 2**16, 2**16 + 1])
def test_sizes_at_the_edges(size: int) -> None:
    for epoch in range(3):
        order = permutation(np.arange(size), size, 7, np.full(size, epoch))
        assert sorted(order.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**31 + 11, 3 * 10**12, 2**53 + 1])
def test_huge_sizes_stay_inside_and_distinct(size: int) -> None:
    index = np.concatenate([np.arange(50_000), size - 1 - np.arange(50_000)])
    order = permutation(index, size, 3, np.zeros(len(index), dtype=np.int64))
    assert order.min() >= 0
    assert order.max() < size
    assert len(np.unique(order)) == len(index)
    assert abs(order.mean() / size - 0.5) < 3 / np.sqrt(12 * len(index))


def test_orders_differ_by_epoch_and_seed_and_look_random() -> None:
    size = 4000
    orders = [permutation(np.arange(size), size, s, np.full(size, e)) for s, e in [(0, 0), (0, 1), (1, 0), (0, 2)]]
    for a, b in itertools.combinations([np.arange(size), *orders], 2):
        assert (a == b).sum() < 12  # one is expected
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(size)
    assert abs(np.corrcoef(orders[0][:-1], orders[0][1:])[0, 1]) < 4 / np.sqrt(size)


def test_every_order_of_three_occurs() -> None:
    seen = {tuple(permutation(np.arange(3), 3, seed, np.zeros(3, dtype=np.int64)).tolist()) for seed in range(200)}
    assert len(seen) == 6


def test_a_batch_across_epochs_finishes_one_and_begins_the_next(data_dir: Path) -> None:
    data = PretrainingData(data_dir, seed=1)
    epochs, instances = data.instances_of(np.arange(3 * 77))
    assert epochs.tolist() == [0] * 77 + [1] * 77 + [2] * 77
    for epoch in range(3):
        assert sorted(instances[epochs == epoch].tolist()) == list(range(77))
    assert_equal_rows(data.batch(70, 20), rows_of([data.batch(70, 7), data.batch(77, 13)]))


# ---- rows ----


def test_rows_are_those_of_the_shards(data_dir: Path) -> None:
    data = PretrainingData(data_dir, seed=5)
    shards = [open_shard(data_dir / f"train_{k:05d}.hdf5") for k in range(2)]
    batch = data.batch(0, 77)
    assert {name: batch[name].dtype for name in TENSORS} == {
        **dict.fromkeys(TENSORS, torch.int64),
        "attention_mask": torch.bool,
    }
    assert batch["input_ids"].shape == (77, 32)
    assert batch["labels"].shape == batch["masked_positions"].shape == (77, 20)
    _, instances = data.instances_of(np.arange(77))
    for row, number in enumerate(instances.tolist()):
        shard, local = (shards[0], number) if number < 40 else (shards[1], number - 40)
        tokens = torch.from_numpy(shard.tokens[shard.offsets[local] : shard.offsets[local + 1]].astype(np.int64))
        used = batch["labels"][row] != -100
        plain = batch["input_ids"][row].clone()
        plain[batch["masked_positions"][row][used]] = batch["labels"][row][used]
        assert torch.equal(plain[: len(tokens)], tokens)
        assert not plain[len(tokens) :].any()
        assert batch["attention_mask"][row].sum() == len(tokens)
        segments = (torch.arange(32) >= int(shard.segment_b_start[local])) & batch["attention_mask"][row]
        assert torch.equal(batch["token_type_ids"][row].bool(), segments)
        assert batch["next_sentence_label"][row] == int(shard.is_random_next[local])


def test_masks_are_new_every_epoch_and_never_padding(data_dir: Path) -> None:
    data = PretrainingData(data_dir)
    by_epoch = []
    for epoch in range(2):
        batch = data.batch(77 * epoch, 77)
        _, instances = data.instances_of(np.arange(77 * epoch, 77 * (epoch + 1)))
        used = batch["labels"] != -100
        assert torch.gather(batch["attention_mask"], 1, batch["masked_positions"])[used].all()
        by_epoch.append((batch["masked_positions"] * used)[np.argsort(instances)])
    same = (by_epoch[0] == by_epoch[1]).all(1).float().mean()
    assert same < 0.3  # short rows have few places to choose from


def test_the_number_of_predictions_follows_from_lengths_alone(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = PretrainingData(data_dir, max_predictions_per_seq=4)
    expected = {}
    for first, count in [(0, 1), (5, 32), (70, 90)]:
        batch = data.batch(first, count)
        expected[first, count] = (int(batch["attention_mask"].sum()), int((batch["labels"] != -100).sum()))
    for shard in data.shards:
        monkeypatch.setitem(shard.__dict__, "tokens", None)  # reading a token would fail
    for (first, count), totals in expected.items():
        assert data.totals(first, count) == totals
        assert data.num_predictions(first, count) == totals[1]


def test_longer_padding_changes_no_mask(data_dir: Path) -> None:
    short, long = (PretrainingData(data_dir, max_seq_length=n).batch(3, 20) for n in (None, 48))
    assert long["input_ids"].shape == (20, 48)
    assert torch.equal(long["input_ids"][:, :32], short["input_ids"])
    assert torch.equal(long["labels"], short["labels"])
    assert not long["attention_mask"][:, 32:].any()


def test_a_batch_without_predictions(data_dir: Path) -> None:
    data = PretrainingData(data_dir, max_predictions_per_seq=0)
    assert data.batch(0, 4)["labels"].shape == (4, 0)
    assert data.num_predictions(0, 4) == 0


def test_compressed_shards_give_the_same_rows(tmp_path: Path) -> None:
    plain = write_directory(tmp_path / "plain", {"train": [30]})
    packed = write_directory(tmp_path / "packed", {"train": [30]}, compression="gzip")
    assert_equal_rows(PretrainingData(plain).batch(0, 30), PretrainingData(packed).batch(0, 30))


def test_token_ids_up_to_65535_survive(tmp_path: Path) -> None:
    data = PretrainingData(write_directory(tmp_path / "data", {"train": [400]}, vocab_size=65_536))
    batch = data.batch(0, 400)
    assert batch["input_ids"].max() > 60_000
    assert data.shards[0].tokens.dtype == np.uint16
    assert int(batch["labels"].max()) < 65_536


# ---- NVIDIA's shards ----


def test_nvidias_rows_are_exactly_those_of_the_file() -> None:
    data = PretrainingData(NVIDIA_SHARD)
    batch = data.batch(512, 512)
    _, instances = data.instances_of(np.arange(512, 1024))
    with h5py.File(NVIDIA_SHARD) as file:
        arrays = {name: torch.from_numpy(file[name][()][instances].astype(np.int64)) for name in file}
    assert torch.equal(batch["input_ids"], arrays["input_ids"])
    assert torch.equal(batch["attention_mask"], arrays["input_mask"].bool())
    assert torch.equal(batch["token_type_ids"], arrays["segment_ids"])
    assert torch.equal(batch["masked_positions"], arrays["masked_lm_positions"])
    ids = arrays["masked_lm_ids"]
    assert torch.equal(batch["labels"], torch.where(ids == 0, -100, ids))
    assert torch.equal(batch["next_sentence_label"], arrays["next_sentence_labels"])
    assert data.num_predictions(512, 512) == int((ids != 0).sum()) == 9116
    assert data.vocab_size is None
    assert data.min_vocab_size == 1 + int(max(arrays["input_ids"].max(), ids.max()))


def test_nvidias_counts_follow_our_rule() -> None:
    shard = open_shard(NVIDIA_SHARD)
    assert shard.static_masks is not None
    np.testing.assert_array_equal(shard.static_masks.counts, num_predictions(shard.lengths, 0.15, 20))


def test_nvidias_rows_with_more_predictions_than_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_predictions_per_seq is 10, but rows .* up to 19 predictions: set it to 19"):
        PretrainingData(NVIDIA_SHARD, max_predictions_per_seq=10)


# ---- ranks, micro-batches, workers ----


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_ranks_and_micro_batches_cover_a_global_batch_exactly_once(total: int, world_size: int, micro_batch: int) -> None:
    splits = [split_batch(total, world_size, rank, micro_batch) for rank in range(world_size)]
    assert len({len(split) for split in splits}) == 1
    covered = [i for split in splits for start, count in split for i in range(start, start + count)]
    assert covered == list(range(total))
    for split in splits:
        counts = [count for _, count in split]
        assert max(counts) <= micro_batch
        assert max(counts) - min(counts) <= 1


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("num_workers", "method"), [(1, None), (4, "fork"), (2, "spawn")])
def test_any_number_of_workers_gives_the_same_micro_batches(data_dir: Path, num_workers: int, method: str | None) -> None:
    data = PretrainingData(data_dir, seed=3)
    options: dict[str, Any] = {"first_sample": 61, "global_batch_size": 12, "micro_batch_size": 5}
    here = itertools.islice(micro_batches(data, **options), 14)
    elsewhere = micro_batches(data, **options, num_workers=num_workers, multiprocessing_context=method)
    for a, b in zip(here, elsewhere, strict=False):
        assert_equal_rows(a, b)
        for name in ("first_sample", "num_global_tokens", "num_global_predictions", "is_last"):
            assert a[name] == b[name]


def test_workers_give_nvidias_rows_too() -> None:
    data = PretrainingData(NVIDIA_SHARD)
    options: dict[str, Any] = {"first_sample": 500, "global_batch_size": 16, "micro_batch_size": 8}
    here = list(itertools.islice(micro_batches(data, **options), 6))
    for method in ("fork", "spawn"):
        elsewhere = itertools.islice(micro_batches(data, **options, num_workers=1, multiprocessing_context=method), 6)
        for a, b in zip(here, elsewhere, strict=True):
            assert_equal_rows(a, b)


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 30), (1, 7), (2, 4), (3, 3), (5, 2)])
def test_every_cut_of_the_work_sees_the_same_samples(data_dir: Path, world_size: int, micro_batch: int) -> None:
    data = PretrainingData(data_dir, seed=3)
    steps = 4
    parts: list[list[list[dict[str, Any]]]] = [[] for _ in range(steps)]
    for rank in range(world_size):
        stream = iter(
            micro_batches(
                data,
                first_sample=10,
                global_batch_size=30,
                micro_batch_size=micro_batch,
                rank=rank,
                world_size=world_size,
            )
        )
        for step in range(steps):
            mine = [next(stream)]
            while not mine[-1]["is_last"]:
                mine.append(next(stream))
            parts[step].append(mine)
    for step, of_ranks in enumerate(parts):
        assert len({len(mine) for mine in of_ranks}) == 1
        batches = [batch for mine in of_ranks for batch in mine]
        whole = data.batch(10 + 30 * step, 30)
        assert_equal_rows(rows_of(batches), whole)
        totals = {(batch["num_global_tokens"], batch["num_global_predictions"]) for batch in batches}
        assert totals == {(int(whole["attention_mask"].sum()), int((whole["labels"] != -100).sum()))}
        firsts = [batch["first_sample"] for batch in batches]
        sizes = [len(batch["labels"]) for batch in batches]
        assert firsts == [10 + 30 * step + sum(sizes[:k]) for k in range(len(sizes))]


def test_resuming_anywhere_goes_on_with_the_same_rows(data_dir: Path) -> None:
    options: dict[str, Any] = {"global_batch_size": 9, "micro_batch_size": 4}
    full = list(itertools.islice(micro_batches(PretrainingData(data_dir, seed=2), first_sample=0, **options), 60))
    for step in (1, 7, 12, 19):
        resumed = micro_batches(PretrainingData(data_dir, seed=2), first_sample=9 * step, **options)
        for a, b in zip(full[3 * step :], resumed, strict=False):
            assert_equal_rows(a, b)


def test_far_into_training_starts_as_well(data_dir: Path) -> None:
    data = PretrainingData(data_dir)
    first = 10**12
    batch = next(iter(micro_batches(data, first_sample=first, global_batch_size=8, micro_batch_size=8)))
    assert batch["first_sample"] == first
    assert batch["labels"].shape == (8, 20)


def test_batches_that_leave_a_rank_without_samples_are_refused(data_dir: Path) -> None:
    data = PretrainingData(data_dir)
    for total, world_size in [(3, 4), (5, 2)]:
        with pytest.raises(ValueError, match=rf"global_batch_size {total} leaves one of {world_size} ranks without samples"):
            micro_batches(data, first_sample=0, global_batch_size=total, micro_batch_size=1, world_size=world_size)


def test_tiny_shared_memory_is_refused_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        total = 64 * 2**20

    monkeypatch.setattr("pretrain.data.shutil.disk_usage", lambda _: Usage)
    with pytest.raises(ValueError, match=r"has 64 MiB.*--shm-size=1g.*data\.num_workers to 0"):
        check_shared_memory(tmp_path)
    check_shared_memory(tmp_path / "absent")


# ---- what is refused when the data is opened ----


def test_what_the_data_says_about_itself(data_dir: Path) -> None:
    data, held_out = PretrainingData(data_dir), PretrainingData(data_dir, split="eval")
    assert (data.num_instances, held_out.num_instances, data.max_seq_length, data.vocab_size) == (77, 20, 32, 200)
    assert data.tokenizer == {"lowercase": True}
    assert data.vocab_hash == data.shards[0].attributes.vocab_hash
    assert data.fingerprint != held_out.fingerprint
    assert json.loads(json.dumps(data.fingerprint)) == data.fingerprint == PretrainingData(data_dir, seed=8).fingerprint


def test_shards_for_longer_sequences_are_refused(data_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.max_seq_length is 16, but .* built for 32: set data\.max_seq_length to 32"):
        PretrainingData(data_dir, max_seq_length=16)


@pytest.mark.parametrize(("options", "what"), [({"max_seq_length": 40}, "max_seq_length"), ({"vocab_size": 201}, "vocabulary")])
def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path, options: dict[str, int], what: str) -> None:
    first = write_directory(tmp_path / "a", {"train": [5]})
    second = write_directory(tmp_path / "b", {"train": [5]}, **options)
    (first / "train_00001.hdf5").write_bytes((second / "train_00000.hdf5").read_bytes())
    with pytest.raises(ValueError, match=f"the shards differ in their {what}.*train_00000.*train_00001"):
        PretrainingData(first / "train_*.hdf5")


def test_native_and_nvidia_shards_together_are_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "a", {"train": [5]})
    (directory / "train_00001.hdf5").write_bytes(NVIDIA_SHARD.read_bytes())
    with pytest.raises(ValueError, match="the shards differ in their static masks"):
        PretrainingData(directory / "train_*.hdf5")


def test_a_shard_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "a", {"train": [5, 5]})
    (directory / "train_00001.hdf5").write_bytes((directory / "train_00000.hdf5").read_bytes())
    with pytest.raises(ValueError, match=r"train_00001\.hdf5 is not the shard that manifest\.json lists: .*data_prep verify"):
        PretrainingData(directory)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "a", {"train": [5, 5]})
    (directory / "train_00000.hdf5").unlink()
    with pytest.raises(ValueError, match=r"train_00000\.hdf5: listed in manifest\.json but not there"):
        PretrainingData(directory)


def test_another_or_no_vocabulary_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "a", {"train": [5]})
    vocab = directory / "vocab.txt"
    vocab.write_text(vocab.read_text() + "extra\n")
    with pytest.raises(ValueError, match=r"vocab\.txt is not the vocabulary that the shards were built with"):
        PretrainingData(directory)
    vocab.unlink()
    with pytest.raises(ValueError, match=r"vocab\.txt is missing"):
        PretrainingData(directory)


def test_no_instances_and_no_eval_split_are_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "a", {"train": [0]})
    with pytest.raises(ValueError, match="holds no instances"):
        PretrainingData(directory)
    with pytest.raises(ValueError, match="no 'eval' shards"):
        PretrainingData(directory, split="eval")


def test_empty_shards_among_others_do_no_harm(tmp_path: Path) -> None:
    data = PretrainingData(write_directory(tmp_path / "a", {"train": [1, 0, 1, 0]}))
    assert data.num_instances == 2
    assert (data.batch(0, 4)["input_ids"] != UNK).any(1).all()
