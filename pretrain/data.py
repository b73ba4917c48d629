"""Training data as micro-batches: a rank's share of every global batch, in pieces, from any place in the training order.

Nothing here has state: the k-th micro-batch is a pure function of k, so any number of ranks and worker processes cut the same
order, and resuming costs nothing. `PretrainingData` (re-exported from `pretrain.dataset`) holds the shards.
"""

from __future__ import annotations

import itertools
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from pretrain.dataset import PretrainingData, permutation

__all__ = [
    "MODEL_INPUTS",
    "MicroBatches",
    "PretrainingData",
    "check_shared_memory",
    "micro_batches",
    "permutation",
    "split_batch",
]

# What of a batch goes to the model, by the names of its arguments; `rng` joins on the way to the device.
MODEL_INPUTS = (
    "input_ids",
    "token_type_ids",
    "attention_mask",
    "labels",
    "next_sentence_label",
    "masked_positions",
    "rng",
)
# Shared memory that the workers' batches need: below this, PyTorch's workers die or hang (Docker's default is 64 MB).
_MIN_SHARED_MEMORY_BYTES = 128 * 2**20


def split_batch(global_batch_size: int, world_size: int, rank: int, micro_batch_size: int) -> list[tuple[int, int]]:
    """Return (start, count) of a rank's micro-batches inside a global batch.

    A rank's share is contiguous; the number of micro-batches is the same on every rank, their sizes differ by at most one.
    """
    shares = [r * global_batch_size // world_size for r in range(world_size + 1)]
    largest = max(b - a for a, b in itertools.pairwise(shares))
    num_chunks = -(-largest // micro_batch_size)
    start, count = shares[rank], shares[rank + 1] - shares[rank]
    cuts = [start + k * count // num_chunks for k in range(num_chunks + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


@dataclass(frozen=True)
class MicroBatches(Dataset):
    """Item k is the k-th micro-batch of a rank, counted from `first_sample`; a pure function, so any worker may make it."""

    data: PretrainingData
    first_sample: int
    global_batch_size: int
    chunks: list[tuple[int, int]]

    def __getitem__(self, k: int) -> dict[str, Any]:
        step, chunk = divmod(k, len(self.chunks))
        batch_start = self.first_sample + step * self.global_batch_size
        start, count = self.chunks[chunk]
        batch: dict[str, Any] = dict(self.data.batch(batch_start + start, count))
        batch["first_sample"] = batch_start + start
        totals = self.data.totals(batch_start, self.global_batch_size)
        batch["num_global_tokens"], batch["num_global_predictions"] = totals
        batch["is_last"] = chunk == len(self.chunks) - 1
        return batch


def _outlive_first_signal(worker: int) -> None:
    """Set up a worker process: a signal to the whole process group is for the trainer, which still needs its batches.

    Ctrl-C and Slurm's warning are ignored, and so is the first SIGTERM; a second one, such as Python sends at exit, ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class _Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        k = 0
        while True:
            yield k
            k += 1


def check_shared_memory(path: Path = Path("/dev/shm")) -> None:
    """Refuse worker processes where shared memory is too small for their batches.

    Raises:
        ValueError: says which Docker flag helps.
    """
    if path.is_dir() and (size := shutil.disk_usage(path).total) < _MIN_SHARED_MEMORY_BYTES:
        raise ValueError(
            f"{path} has {size / 2**20:.0f} MiB, too little for data-loading workers: start the container with --ipc=host"
            " (or --shm-size=1g), or set data.num_workers to 0"
        )


def micro_batches(
    data: PretrainingData,
    *,
    first_sample: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
    multiprocessing_context: str | None = None,
) -> DataLoader:
    """Return a rank's endless micro-batches from global sample `first_sample` on.

    Each is the dict of `PretrainingData.batch` plus first_sample (int), num_global_tokens and num_global_predictions (int: of
    the whole global batch, over all ranks) and is_last (bool: the last one of its global batch). Which process makes a
    micro-batch, and how it was started (`multiprocessing_context`: "fork", "spawn", ...; None is Python's default), changes
    nothing in it.

    Raises:
        ValueError: a rank would have a micro-batch without samples, or shared memory is too small for workers.
    """
    if num_workers > 0:
        check_shared_memory()
    if any(count == 0 for r in range(world_size) for _, count in split_batch(global_batch_size, world_size, r, micro_batch_size)):
        raise ValueError(
            f"train.global_batch_size {global_batch_size} leaves one of {world_size} ranks without samples at"
            f" train.micro_batch_size {micro_batch_size}: make the global batch a multiple of the ranks"
        )
    chunks = split_batch(global_batch_size, world_size, rank, micro_batch_size)
    return DataLoader(
        MicroBatches(data, first_sample, global_batch_size, chunks),
        batch_size=None,
        sampler=_Endless(),
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=4 if num_workers else None,
        worker_init_fn=_outlive_first_signal,
        multiprocessing_context=multiprocessing_context if num_workers else None,
    )
