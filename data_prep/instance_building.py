"""A token store -> splits -> sentence pairs -> shards, in memory that does not grow with the corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.corpus import SourceCounts
from data_prep.masking import mix_keys
from data_prep.pairs import PairMaker, PairSettings
from data_prep.progress import progress
from data_prep.shards import Instances, ShardAttributes, ShardSummary, write_shard
from data_prep.token_store import TokenStore, map_array
from data_prep.worker_pool import in_order

_DOCUMENTS_PER_TASK = 512
_INSTANCES_PER_CHUNK = 16_384
# With fewer instances a share of random pairs outside 0.4 to 0.6 may be chance.
_LABEL_CHECK_INSTANCES = 400
# Tells the draw of the held-out documents from the draws of pairs.
_HELD_OUT = 1 << 62
_DOCUMENTS_NAME = "documents.bin"


def split_documents(num_documents: int, eval_fraction: float, seed: int) -> dict[str, np.ndarray]:
    """Return the numbers of each split's documents, int64, ascending; a document is in one split only.

    Raises:
        ValueError: a split is left with fewer than two documents.
    """
    numbers = np.arange(num_documents)
    if eval_fraction == 0:
        return {"train": numbers}
    held_out = np.zeros(num_documents, dtype=bool)
    # The documents whose hash is smallest: exactly the share that was asked for, at random.
    held_out[np.argsort(mix_keys(seed, _HELD_OUT, numbers))[: round(eval_fraction * num_documents)]] = True
    splits = {"train": numbers[~held_out], "eval": numbers[held_out]}
    for split, documents in splits.items():
        if len(documents) < 2:
            raise ValueError(
                f"--eval-fraction {eval_fraction} leaves {len(documents)} of {num_documents} documents to the {split} split,"
                " which needs at least 2: choose another fraction or --seed"
            )
    return splits


class Pair:
    """(Places in a split's documents, pass) -> the arrays of their instances. Runs in a worker process."""

    def __init__(self, store: Path, dtype: np.dtype, split: Path, settings: PairSettings) -> None:
        self.maker = PairMaker(TokenStore(store, dtype), map_array(split / _DOCUMENTS_NAME, np.int64), settings)

    def __call__(self, task: tuple[range, int]) -> tuple[np.ndarray, ...]:
        return self.maker.instances(*task)


@dataclass(frozen=True)
class InstanceFiles:
    """A split's instances, mapped from disk.

    Attributes:
        tokens: [total].
        lengths: int64 [n].
        segment_b_start: uint16 [n].
        is_random_next: uint8 [n].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    segment_b_start: np.ndarray
    is_random_next: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class InstanceBuilder:
    """Makes a split's instances and its shards.

    Attributes:
        store_directory, token_dtype: the token store's.
        settings: what pairs look like.
        num_passes: over the documents (--duplicate-factor).
        num_workers: processes.
        quiet: show no progress.
    """

    store_directory: Path
    token_dtype: np.dtype
    settings: PairSettings
    num_passes: int
    num_workers: int
    quiet: bool

    def pair(self, split: str, documents: np.ndarray, counts: list[SourceCounts], directory: Path) -> InstanceFiles:
        """Write the instances of a split's documents to files in `directory`; add to each source's count of instances."""
        directory.mkdir()
        documents.astype(np.int64, copy=False).tofile(directory / _DOCUMENTS_NAME)
        tasks = [(task, number) for number in range(self.num_passes) for task in _tasks(documents, counts)]
        dtypes: dict[str, np.dtype | type] = {
            "tokens": self.token_dtype,
            "lengths": np.int64,
            "segment_b_start": np.uint16,
            "is_random_next": np.uint8,
        }
        paths = {name: directory / f"{name}.bin" for name in dtypes}
        files = [path.open("wb") for path in paths.values()]
        arguments = (self.store_directory, self.token_dtype, directory, self.settings)
        what = f"pairing sentences ({split})"
        places = [(places, number) for (places, _), number in tasks]
        results = in_order(places, Pair, arguments, self.num_workers, what)
        sources = (source for (_, source), _ in tasks)
        for arrays in progress(results, what, " parts", self.quiet, len(tasks)):
            next(sources).instances += len(arrays[1])
            for file, array in zip(files, arrays, strict=True):
                array.tofile(file)
        for file in files:
            file.close()
        instances = InstanceFiles(**{name: map_array(path, dtypes[name]) for name, path in paths.items()})
        _check_labels(split, instances.is_random_next)
        return instances

    def write_shards(
        self, split: str, instances: InstanceFiles, num_shards: int, attributes: ShardAttributes, directory: Path
    ) -> list[ShardSummary]:
        """Write shard k of K with instances [k*N//K, (k+1)*N//K): contiguous, since training permutes all of them anyway."""
        total = len(instances)
        if num_shards > total:
            raise ValueError(
                f"{num_shards} shards were asked for, but the {split} split has only {total} instances: lower"
                f" {'--num-shards' if split == 'train' else '--eval-num-shards'}"
            )
        summaries = []
        token = 0
        for k in progress(range(num_shards), f"writing shards ({split})", " shards", self.quiet, num_shards):
            rows = range(k * total // num_shards, (k + 1) * total // num_shards)
            summaries.append(write_shard(directory / f"{split}_{k:05d}.hdf5", _chunks(instances, rows, token), attributes))
            token += summaries[-1].num_tokens
        return summaries


def _tasks(documents: np.ndarray, counts: list[SourceCounts]) -> list[tuple[range, SourceCounts]]:
    """Cut a split's documents into pieces of work, none with documents of two sources."""
    tasks = []
    ends = np.searchsorted(documents, np.cumsum([source.documents for source in counts])).tolist()
    for source, first, last in zip(counts, [0, *ends[:-1]], ends, strict=True):
        for start in range(first, last, _DOCUMENTS_PER_TASK):
            tasks.append((range(start, min(start + _DOCUMENTS_PER_TASK, last)), source))
    return tasks


def _chunks(instances: InstanceFiles, rows: range, token: int) -> Iterator[Instances]:
    """Instances of some rows, whose first token is number `token`, a bounded number at a time."""
    for start in range(rows.start, rows.stop, _INSTANCES_PER_CHUNK):
        part = slice(start, min(start + _INSTANCES_PER_CHUNK, rows.stop))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(instances.lengths[part])])
        tokens = instances.tokens[token : token + int(offsets[-1])]
        token += len(tokens)
        yield Instances(tokens, offsets, instances.segment_b_start[part], instances.is_random_next[part])


def _check_labels(split: str, labels: np.ndarray) -> None:
    rate = float(labels.mean()) if len(labels) else 0.0
    if len(labels) >= _LABEL_CHECK_INSTANCES and not 0.4 <= rate <= 0.6:
        raise ValueError(
            f"{rate:.0%} of the {split} split's next sentences are random, and it should be about half: most documents have only"
            " one to three sentences, or single sentences are longer than --max-seq-length; check the source's format (text: is"
            " one sentence a line, a blank line between documents)"
        )
