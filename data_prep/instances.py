"""The arrays of pretraining instances, in memory: ragged token ids, segment boundaries, labels, static masks.

Re-exported by `data_prep.shards`, which reads and writes them.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """uint16, or uint32 where a vocabulary has more than 65,536 entries."""
    return np.dtype("<u2" if vocab_size is None or vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Instances:
    """N instances, each `[CLS] A [SEP] B [SEP]`, one after another without padding.

    tokens           [total]  uint16 (uint32 for vocabularies above 65,536): token ids
    offsets          [N+1]    int64: instance i is tokens[offsets[i]:offsets[i+1]]
    segment_b_start  [N]      uint16: where B starts, counted from the instance's [CLS]; its length if there is no B
    is_random_next   [N]      uint8: 0 = B follows A in its document, 1 = B is from another document
    """

    tokens: IntArray
    offsets: IntArray
    segment_b_start: IntArray
    is_random_next: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] int64: tokens of each instance, special tokens included."""
        return np.diff(np.asarray(self.offsets)).astype(np.int64, copy=False)

    def __getitem__(self, rows: slice) -> "Instances":
        """A contiguous range of instances; its offsets start at 0, its tokens are a view."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"instances are taken in contiguous ranges, not with step {step}")
        stop = max(start, stop)
        offsets = np.asarray(self.offsets[start : stop + 1], dtype=np.int64)
        return Instances(
            tokens=self.tokens[offsets[0] : offsets[-1]],
            offsets=offsets - offsets[0],
            segment_b_start=self.segment_b_start[start:stop],
            is_random_next=self.is_random_next[start:stop],
        )

    @staticmethod
    def from_lists(
        tokens: Sequence[Sequence[int]],
        segment_b_start: Sequence[int],
        is_random_next: Sequence[int],
        dtype: Any = "<u2",
    ) -> "Instances":
        """Build from one list of token ids per instance (tests, converters of other formats)."""
        offsets = np.zeros(len(tokens) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in tokens], out=offsets[1:])
        flat = np.fromiter((token for row in tokens for token in row), dtype=dtype, count=int(offsets[-1]))
        return Instances(flat, offsets, np.asarray(segment_b_start, dtype="<u2"), np.asarray(is_random_next, dtype="<u1"))

    @staticmethod
    def concatenate(parts: Sequence["Instances"]) -> "Instances":
        """One after another; at least one part."""
        lengths = np.concatenate([part.lengths for part in parts])
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Instances(
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=offsets,
            segment_b_start=np.concatenate([part.segment_b_start for part in parts]),
            is_random_next=np.concatenate([part.is_random_next for part in parts]),
        )


@dataclass(frozen=True)
class StaticMasks:
    """Masks drawn when the file was made, ragged: M predictions of N instances.

    offsets    [N+1] int64: the predictions of instance i are [offsets[i], offsets[i+1])
    positions  [M]   uint16: ascending places inside the instance
    labels     [M]   uint16 or uint32: the original token there
    """

    offsets: IntArray
    positions: IntArray
    labels: IntArray

    @property
    def counts(self) -> NDArray[np.int64]:
        """[N] int64: predictions of each instance."""
        return np.diff(np.asarray(self.offsets)).astype(np.int64, copy=False)

    def __getitem__(self, rows: slice) -> "StaticMasks":
        """The masks of a contiguous range of instances."""
        start, stop, _ = rows.indices(len(self.offsets) - 1)
        offsets = np.asarray(self.offsets[start : max(start, stop) + 1], dtype=np.int64)
        inside = slice(offsets[0], offsets[-1])
        return StaticMasks(offsets - offsets[0], self.positions[inside], self.labels[inside])


@dataclass(frozen=True)
class ShardAttributes:
    """What a shard says about itself beside its arrays.

    `vocab_hash` is the SHA-256 of the bytes of vocab.txt; both vocabulary fields are None for shards in NVIDIA's
    format, which does not record them. `tokenizer` are the settings that made the ids (lowercase, strip_accents, ...),
    `creation` the parameters of the command, `sources` names and counts.
    """

    max_seq_length: int
    vocab_size: int | None
    vocab_hash: str | None
    tokenizer: dict[str, Any] = field(default_factory=dict)
    creation: dict[str, Any] = field(default_factory=dict)
    sources: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class ShardSummary:
    """What the manifest records about one shard."""

    name: str
    num_instances: int
    num_tokens: int
    content_hash: str


class ContentHash:
    """SHA-256 over the arrays of a shard, fed in any chunking, independent of how the file stores them."""

    def __init__(self) -> None:
        self._tokens = hashlib.sha256()
        self._lengths = hashlib.sha256()
        self._segment_b_start = hashlib.sha256()
        self._is_random_next = hashlib.sha256()
        self._masks = [hashlib.sha256() for _ in range(3)]
        self._num_masks = 0

    def update(self, instances: Instances, masks: StaticMasks | None = None) -> None:
        """Add the next instances (values decide, not dtypes)."""
        self._tokens.update(_little_endian(instances.tokens, "<u4"))
        self._lengths.update(_little_endian(instances.lengths, "<i8"))
        self._segment_b_start.update(_little_endian(instances.segment_b_start, "<u2"))
        self._is_random_next.update(_little_endian(instances.is_random_next, "<u1"))
        if masks is not None:
            self._num_masks += len(masks.positions)
            for part, array in zip(self._masks, (masks.counts, masks.positions, masks.labels), strict=True):
                part.update(_little_endian(array, "<i8"))

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        parts = [self._tokens, self._lengths, self._segment_b_start, self._is_random_next]
        parts += self._masks if self._num_masks else []
        return hashlib.sha256(b"".join(part.digest() for part in parts)).hexdigest()


def _little_endian(array: IntArray, dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).view(np.uint8).data


def check_instances(instances: Instances, attributes: ShardAttributes, name: str, first_row: int = 0) -> None:
    """Refuse instances that a shard may not hold: ValueError naming `name` and the first offending row."""
    for problem in find_problems(instances, attributes, first_row):
        raise ValueError(f"{name}: {problem}")


def find_problems(instances: Instances, attributes: ShardAttributes, first_row: int = 0) -> Iterator[str]:
    """Yield a sentence for each kind of fault, naming the first row that has it and how many do."""
    offsets, num = np.asarray(instances.offsets), len(instances)
    sizes = (len(instances.segment_b_start), len(instances.is_random_next))
    if num < 0 or sizes != (num, num):
        yield f"{num} instances by `offsets`, but {sizes[0]} segment starts and {sizes[1]} labels"
        return
    lengths = instances.lengths
    if (lengths < 0).any() or offsets[0] != 0 or offsets[-1] != len(instances.tokens):
        row = first_row + int(np.argmax(lengths < 0)) if (lengths < 0).any() else first_row
        yield (
            f"row {row}: `offsets` must rise from 0 to the {len(instances.tokens):,} tokens stored, "
            f"they go from {offsets[0]:,} to {offsets[-1]:,}"
        )
        return
    b_start = np.asarray(instances.segment_b_start)
    limit = attributes.max_seq_length
    yield from _rows(lengths > limit, first_row, f"longer than max_seq_length {limit}")
    yield from _rows(lengths < 3, first_row, "shorter than [CLS] A [SEP]")
    yield from _rows((b_start < 2) | (b_start > lengths), first_row, "segment_b_start outside the instance")
    yield from _rows(np.asarray(instances.is_random_next) > 1, first_row, "is_random_next is neither 0 nor 1")
    if attributes.vocab_size is not None and len(instances.tokens):
        too_large = np.flatnonzero(np.asarray(instances.tokens) >= attributes.vocab_size)
        if len(too_large):
            row = first_row + int(np.searchsorted(offsets, too_large[0], side="right")) - 1
            yield (
                f"row {row}: token id {int(instances.tokens[too_large[0]])} is not below the vocabulary's "
                f"{attributes.vocab_size:,} entries ({len(too_large):,} such tokens)"
            )


def _rows(bad: NDArray[np.bool_], first_row: int, what: str) -> Iterable[str]:
    if bad.any():
        yield f"row {first_row + int(np.argmax(bad))}: {what} ({int(bad.sum()):,} such rows)"
