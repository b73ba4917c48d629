"""Shards in the schema of NVIDIA's create_pretraining_data.py (DeepLearningExamples, BERT): padded, statically masked.

input_ids int32 [N, L], input_mask int8 [N, L], segment_ids int8 [N, L], masked_lm_positions int32 [N, P] and
masked_lm_ids int32 [N, P] (zero-padded), next_sentence_labels int8 [N] (1 = random), gzip. Older files lack input_mask
or use other integer types. In memory they are kept ragged: about a third of the bytes of the padded arrays.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep.atomic_write import written_whole
from data_prep.instances import ContentHash, Instances, IntArray, ShardAttributes, ShardSummary, StaticMasks
from data_prep.memory import check_memory

REQUIRED = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
_BLOCK_ROWS = 4096


def is_nvidia(file: h5py.File) -> bool:
    """Whether an open file has at least one dataset of NVIDIA's schema."""
    return "input_ids" in file or "masked_lm_ids" in file


def read_nvidia(file: h5py.File, path: Path) -> tuple[ShardAttributes, Instances, StaticMasks, str]:
    """Load a shard compactly: attributes, instances (ids as masked in the file), masks, content hash.

    Raises ValueError naming the file for missing datasets, shapes that disagree, rows that are not
    tokens-then-padding with segments 0 then 1, and for a file that does not fit into memory.
    """
    max_seq_length, max_predictions = _check_schema(file, path)
    check_memory(_memory_needed(file), f"loading {path}", _REMEDY)
    digest = ContentHash()
    parts, masks = [], []
    for instances, mask in _blocks(file, path):
        parts.append(instances)
        masks.append(mask)
    instances, mask = Instances.concatenate(parts), _concatenate_masks(masks)
    digest.update(instances, mask)
    attributes = ShardAttributes(
        max_seq_length, None, None, creation={"max_predictions_per_seq": max_predictions, "masks": "static"}
    )
    return attributes, instances, mask, digest.hexdigest()


_REMEDY = (
    "shards in NVIDIA's format are held in memory; `python -m data_prep convert --from nvidia-hdf5` makes native shards, "
    "which are mapped instead"
)


def check_total_memory(paths: list[Path]) -> None:
    """Refuse a set of shards whose files in NVIDIA's format do not fit into memory together, before any is loaded."""
    total = 0
    for path in paths:
        try:
            with h5py.File(path, "r", locking=False) as file:
                total += _memory_needed(file) if is_nvidia(file) else 0
        except (OSError, KeyError, RuntimeError, ValueError, IndexError):
            continue  # open_shard says what is wrong with it
    if total:
        check_memory(total, f"loading {len(paths)} shards such as {paths[0]}", _REMEDY)


def _memory_needed(file: h5py.File) -> int:
    """Upper bound of the bytes that an open shard takes once loaded."""
    rows, length = file["input_ids"].shape
    return rows * (2 * length + 4 * file["masked_lm_ids"].shape[1] + 8 + 8 + 2 + 1)


def _check_schema(file: h5py.File, path: Path) -> tuple[int, int]:
    if missing := [name for name in REQUIRED if name not in file]:
        raise ValueError(f"{path}: looks like NVIDIA's format, but has no {', '.join(missing)}")
    if file["input_ids"].ndim != 2 or file["masked_lm_ids"].ndim != 2:
        raise ValueError(f"{path}: input_ids and masked_lm_ids must be two-dimensional")
    rows, length = file["input_ids"].shape
    max_predictions = file["masked_lm_ids"].shape[1]
    if length > 1 << 16:
        raise ValueError(f"{path}: sequences of {length:,} tokens; at most 65,536 are supported")
    if rows == 0:
        raise ValueError(f"{path}: holds no instance")
    shapes = {name: (rows, length) for name in ("segment_ids", "input_mask") if name in file}
    shapes |= {"masked_lm_positions": (rows, max_predictions)}
    for name, shape in shapes.items():
        if file[name].shape != shape:
            raise ValueError(f"{path}: {name} has shape {file[name].shape}, by input_ids it should be {shape}")
    if file["next_sentence_labels"].size != rows:
        raise ValueError(f"{path}: {file['next_sentence_labels'].size:,} next_sentence_labels for {rows:,} rows")
    for name in [*REQUIRED, *shapes]:
        if file[name].dtype.kind not in "iub":
            raise ValueError(f"{path}: {name} has type {file[name].dtype}, integers are expected")
    return length, max_predictions


def _blocks(file: h5py.File, path: Path) -> Iterator[tuple[Instances, StaticMasks]]:
    rows = file["input_ids"].shape[0]
    for start in range(0, rows, _BLOCK_ROWS):
        block = slice(start, min(start + _BLOCK_ROWS, rows))
        yield _read_block(file, path, block)


def _read_block(file: h5py.File, path: Path, block: slice) -> tuple[Instances, StaticMasks]:
    ids_RL = file["input_ids"][block]
    segments_RL = file["segment_ids"][block]
    columns = np.arange(ids_RL.shape[1])
    if "input_mask" in file:
        present_RL = file["input_mask"][block] != 0
        lengths = present_RL.sum(axis=1)
    else:  # the last token is [SEP], never [PAD] = 0
        lengths = ids_RL.shape[1] - np.argmax(ids_RL[:, ::-1] != 0, axis=1)
        lengths[~(ids_RL != 0).any(axis=1)] = 0
        present_RL = columns < lengths[:, None]
    in_b = segments_RL != 0
    b_start = np.where(in_b.any(axis=1), np.argmax(in_b, axis=1), lengths)
    _check_rows(
        path,
        block.start,
        {
            "is not tokens followed by padding": (present_RL != (columns < lengths[:, None])).any(axis=1),
            "is empty": lengths == 0,
            "has segment ids that are not 0 for A and padding, 1 for B": (
                (segments_RL == 1) != ((columns >= b_start[:, None]) & present_RL)
            ).any(axis=1)
            | (segments_RL > 1).any(axis=1),
            "has token ids beyond its length": ((ids_RL != 0) & ~present_RL).any(axis=1),
            "has negative token ids": (ids_RL < 0).any(axis=1),
        },
    )
    labels = file["next_sentence_labels"][block.start : block.stop].ravel()
    _check_rows(path, block.start, {"has a next_sentence_label other than 0 and 1": (labels != 0) & (labels != 1)})
    instances = Instances(_narrow(ids_RL[present_RL]), _offsets(lengths), b_start.astype("<u2"), labels.astype("<u1"))
    return instances, _read_masks(file, path, block, lengths)


def _read_masks(file: h5py.File, path: Path, block: slice, lengths: NDArray[Any]) -> StaticMasks:
    positions_RP, ids_RP = file["masked_lm_positions"][block], file["masked_lm_ids"][block]
    # Padding is zero; position 0 is [CLS], which is never masked, and id 0 is [PAD], which is never a target.
    padding_RP = ids_RP == 0
    counts = np.where(padding_RP.any(axis=1), np.argmax(padding_RP, axis=1), ids_RP.shape[1])
    real_RP = np.arange(ids_RP.shape[1]) < counts[:, None]
    outside = (real_RP & ((positions_RP <= 0) | (positions_RP >= lengths[:, None]))).any(axis=1)
    _check_rows(
        path,
        block.start,
        {
            "has a masked position outside its tokens": outside,
            "has negative masked_lm_ids": (ids_RP < 0).any(axis=1),
        },
    )
    return StaticMasks(_offsets(counts), positions_RP[real_RP].astype("<u2"), _narrow(ids_RP[real_RP]))


def _check_rows(path: Path, first_row: int, faults: dict[str, NDArray[np.bool_]]) -> None:
    for what, bad in faults.items():
        if bad.any():
            raise ValueError(f"{path}: row {first_row + int(np.argmax(bad))} {what}")


def _offsets(lengths: NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _narrow(ids: IntArray) -> IntArray:
    return ids.astype("<u2" if not ids.size or ids.max() < 1 << 16 else "<u4")


def _concatenate_masks(parts: list[StaticMasks]) -> StaticMasks:
    counts = np.concatenate([part.counts for part in parts])
    positions = np.concatenate([part.positions for part in parts])
    return StaticMasks(_offsets(counts), positions, np.concatenate([part.labels for part in parts]))


def write_nvidia_shard(
    path: str | Path,
    chunks: Iterable[tuple[Instances, StaticMasks]],
    *,
    max_seq_length: int,
    max_predictions_per_seq: int,
) -> ShardSummary:
    """Write a shard that NVIDIA's run_pretraining.py reads; instances carry the ids as masked. Atomic, same bytes again.

    Raises ValueError for a row that does not fit max_seq_length or max_predictions_per_seq.
    """
    path = Path(path)
    digest, num_rows, num_tokens = ContentHash(), 0, 0
    with written_whole(path) as temporary, h5py.File(temporary, "w", libver=("v108", "v108"), locking=False) as file:
        widths = {"input_ids": max_seq_length, "input_mask": max_seq_length, "segment_ids": max_seq_length}
        widths |= {"masked_lm_positions": max_predictions_per_seq, "masked_lm_ids": max_predictions_per_seq}
        for name, width in widths.items():
            dtype = "<i1" if name in ("input_mask", "segment_ids") else "<i4"
            _create_dataset(file, name, (width,), dtype)
        _create_dataset(file, "next_sentence_labels", (), "<i1")
        for instances, masks in chunks:
            rows = padded_rows(instances, masks, max_seq_length, max_predictions_per_seq, str(path))
            for name, values in rows.items():
                file[name].resize(num_rows + len(instances), axis=0)
                file[name][num_rows:] = values
            num_rows += len(instances)
            num_tokens += len(instances.tokens)
            digest.update(instances, masks)
    return ShardSummary(path.name, num_rows, num_tokens, digest.hexdigest())


def _create_dataset(file: h5py.File, name: str, width: tuple[int, ...], dtype: str) -> None:
    file.create_dataset(
        name, (0, *width), dtype, maxshape=(None, *width), chunks=(256, *(max(w, 1) for w in width)), compression="gzip",
        track_times=False,
    )  # fmt: skip


def padded_rows(
    instances: Instances, masks: StaticMasks, max_seq_length: int, max_predictions: int, name: str
) -> dict[str, IntArray]:
    """The six arrays of NVIDIA's schema for some instances; `name` begins error messages."""
    lengths, counts = instances.lengths, masks.counts
    for values, limit, what in (
        (lengths, max_seq_length, "tokens, max_seq_length is"),
        (counts, max_predictions, "predictions, max_predictions_per_seq is"),
    ):
        if len(values) and values.max() > limit:
            raise ValueError(f"{name}: row {int(values.argmax())} has {int(values.max())} {what} {limit}")
    present = np.arange(max_seq_length) < lengths[:, None]
    real = np.arange(max_predictions) < counts[:, None]
    ids = np.zeros(present.shape, "<i4")
    positions, labels = np.zeros(real.shape, "<i4"), np.zeros(real.shape, "<i4")
    ids[present], positions[real], labels[real] = instances.tokens, masks.positions, masks.labels
    in_b = present & (np.arange(max_seq_length) >= np.asarray(instances.segment_b_start)[:, None])
    return {
        "input_ids": ids,
        "input_mask": present.astype("<i1"),
        "segment_ids": in_b.astype("<i1"),
        "masked_lm_positions": positions,
        "masked_lm_ids": labels,
        "next_sentence_labels": np.asarray(instances.is_random_next).astype("<i1"),
    }


def undo_masks(instances: Instances, masks: StaticMasks) -> Instances:
    """Put the original tokens back where masks were drawn: instances fit for a native shard."""
    dtype = np.promote_types(instances.tokens.dtype, masks.labels.dtype)
    tokens = np.array(instances.tokens, dtype=dtype)
    starts = np.repeat(np.asarray(instances.offsets[:-1]), masks.counts)
    tokens[starts + masks.positions] = masks.labels
    return Instances(tokens, instances.offsets, instances.segment_b_start, instances.is_random_next)
