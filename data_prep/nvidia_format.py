"""NVIDIA's HDF5 schema (DeepLearningExamples, BERT): fixed-width rows, masks drawn when the file was made.

input_ids              int32 [N, L]   masked, padded with 0
input_mask             int8  [N, L]   1 = a real token
segment_ids            int8  [N, L]
masked_lm_positions    int32 [N, P]   padded with 0
masked_lm_ids          int32 [N, P]   the original tokens, padded with 0
next_sentence_labels   int8  [N]      1 = random
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import psutil

from data_prep.shards import Instances, Shard, StaticMasks, hash_instances, token_dtype

_REQUIRED = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
# Rows read at a time.
_CHUNK_ROWS = 1 << 14


def _check_schema(path: Path, file: h5py.File) -> None:
    missing = [name for name in _REQUIRED if name not in file]
    if missing:
        raise ValueError(
            f"{path} is neither a tempo-bert shard (no 'format' attribute) nor one of NVIDIA's (no {', '.join(missing)})"
        )
    shape = file["input_ids"].shape
    if len(shape) != 2 or any(file[name].shape[0] != shape[0] for name in _REQUIRED):
        raise ValueError(f"{path}: the datasets do not have the same number of rows")
    # Tokens and masks of a row, as they are kept here.
    needed = shape[0] * (2 * shape[1] + 6 * file["masked_lm_ids"].shape[1])
    available = psutil.virtual_memory().available
    if needed > 0.5 * available:
        raise ValueError(
            f"{path} would take {needed / 2**30:.1f} GiB of memory (compressed rows cannot be memory-mapped), and"
            f" {available / 2**30:.1f} GiB are free; convert it once: python -m data_prep convert --from nvidia-hdf5 ..."
        )


def _read_rows(path: Path, file: h5py.File, rows: slice) -> tuple[np.ndarray, ...]:
    """One chunk as ragged arrays: tokens, lengths, segment_b_start, random, num_predictions, positions, labels."""
    input_ids = file["input_ids"][rows]
    real = file["input_mask"][rows].astype(bool) if "input_mask" in file else input_ids != 0
    lengths = real.sum(1)
    if not np.array_equal(real, np.arange(real.shape[1]) < lengths[:, None]):
        raise ValueError(f"{path}: the real tokens of a row (input_mask) must come before its padding")
    segment_b_start = (real & (file["segment_ids"][rows] == 0)).sum(1)
    positions, labels = file["masked_lm_positions"][rows], file["masked_lm_ids"][rows]
    # Position 0 is [CLS] and never predicted: a 0 is padding.
    predicted = positions != 0
    if (positions[predicted] >= np.broadcast_to(lengths[:, None], positions.shape)[predicted]).any():
        raise ValueError(f"{path}: a masked position lies past the end of its row")
    is_random = file["next_sentence_labels"][rows]
    return input_ids[real], lengths, segment_b_start, is_random, predicted.sum(1), positions[predicted], labels[predicted]


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def read_shard(path: Path, file: h5py.File) -> Shard:
    """Read a whole file of NVIDIA's schema into memory, padding removed.

    Raises:
        ValueError: another schema, rows that contradict themselves, or more than half of the free memory.
    """
    _check_schema(path, file)
    num_rows, width = file["input_ids"].shape
    try:
        chunks = [_read_rows(path, file, slice(i, i + _CHUNK_ROWS)) for i in range(0, num_rows, _CHUNK_ROWS)]
    except OSError as error:
        raise ValueError(f"{path} is damaged ({error}): make or copy it again") from error
    if not chunks:
        raise ValueError(f"{path} has no rows")
    tokens, lengths, segment_b_start, is_random, counts, positions, labels = (
        np.concatenate(c) for c in zip(*chunks, strict=True)
    )
    largest = int(max(tokens.max(initial=0), labels.max(initial=0)))
    dtype = token_dtype(largest + 1)
    instances = Instances(tokens.astype(dtype), _offsets(lengths), segment_b_start.astype(np.uint16), is_random.astype(np.uint8))
    masks = StaticMasks(_offsets(counts), positions.astype(np.uint16), labels.astype(dtype))
    return Shard(path, instances, width, None, hash_instances(instances), masks)


def unmask(shard: Shard) -> Instances:
    """Put the original tokens back where the file's masks were: instances for a native shard."""
    masks = shard.static_masks
    assert masks is not None, "only shards with static masks have something to undo"
    tokens = np.array(shard.instances.tokens)
    starts = np.repeat(shard.instances.offsets[:-1], np.diff(masks.offsets))
    tokens[starts + masks.positions] = masks.labels
    return Instances(tokens, shard.instances.offsets, shard.instances.segment_b_start, shard.instances.is_random_next)
