"""The shard format, and the only place that knows it.

A shard is an HDF5 file of unmasked, unpadded sentence pairs ([CLS] A [SEP] B [SEP]):

    tokens           uint16 [total]   the token ids of all instances, end to end (uint32 where the vocabulary needs it)
    offsets          int64  [N + 1]   instance i is tokens[offsets[i] : offsets[i + 1]]
    segment_b_start  uint16 [N]       place of B's first token inside the instance
    is_random_next   uint8  [N]       1 where B does not follow A

with attributes (`ShardAttributes`) and a content hash. The arrays are contiguous and uncompressed, so a shard is
memory-mapped and not read. Nothing in it depends on time or machine: the same input gives the same bytes. NVIDIA's schema is
read by `data_prep.nvidia_format`, through the same `open_shard`.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

FORMAT = "tempo-bert/1"
MANIFEST_NAME = "manifest.json"
VOCAB_NAME = "vocab.txt"
LABEL_CONVENTION = "next_sentence_label: 0 = B follows A, 1 = B is random"
_ARRAYS = ("tokens", "offsets", "segment_b_start", "is_random_next")
_SUFFIXES = (".hdf5", ".h5")
# Elements copied or hashed at a time: memory stays bounded for arrays that are themselves memory-mapped.
_CHUNK = 1 << 22


@dataclass
class Instances:
    """Sentence pairs as four arrays; see the module's description. `len()` is their number."""

    tokens: np.ndarray
    offsets: np.ndarray
    segment_b_start: np.ndarray
    is_random_next: np.ndarray

    def __len__(self) -> int:
        return len(self.segment_b_start)


@dataclass
class ShardAttributes:
    """What a shard says about how it was made.

    Attributes:
        max_seq_length: no instance is longer.
        vocab_size: entries of the vocabulary.
        vocab_hash: sha256 of the vocabulary file's bytes, hexadecimal.
        tokenizer: settings of the tokenizer (lowercase and so on).
        creation: parameters of the command that made it.
        sources: one dict per source: name, documents, sentences, tokens, ...
    """

    max_seq_length: int
    vocab_size: int
    vocab_hash: str
    tokenizer: dict[str, Any] = field(default_factory=dict)
    creation: dict[str, Any] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class StaticMasks:
    """Masks that were drawn when the shard was made: predictions of instance i are [offsets[i] : offsets[i + 1]]."""

    offsets: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


@dataclass
class Shard:
    """An opened shard. The arrays of a native one are memory-mapped; no HDF5 handle stays open."""

    path: Path
    instances: Instances
    max_seq_length: int
    attributes: ShardAttributes | None
    content_hash: str
    static_masks: StaticMasks | None = None

    @property
    def num_instances(self) -> int:
        return len(self.instances)


@dataclass
class ShardSummary:
    """A shard's line in the manifest."""

    name: str
    num_instances: int
    num_tokens: int
    content_hash: str


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def hash_instances(instances: Instances) -> str:
    """sha256 over the four arrays in order, each preceded by its name, dtype and length."""
    digest = hashlib.sha256()
    for name in _ARRAYS:
        array = getattr(instances, name)
        digest.update(f"{name} {array.dtype.str} {len(array)}\n".encode())
        for start in range(0, len(array), _CHUNK):
            digest.update(np.ascontiguousarray(array[start : start + _CHUNK]).tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success make it durable and give it its name, else remove it."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_shard(path: Path | str, instances: Instances, attributes: ShardAttributes) -> ShardSummary:
    """Write a native shard: whole or not at all.

    Args:
        path: the file to make; its directory exists.
        instances: may be memory-mapped; copied in pieces.
        attributes: stored beside the arrays.

    Returns:
        The summary that the manifest lists.
    """
    path = Path(path)
    content_hash = hash_instances(instances)
    with written_whole(path) as unfinished, h5py.File(unfinished, "w") as file:
        for name in _ARRAYS:
            array = getattr(instances, name)
            dataset = file.create_dataset(name, shape=array.shape, dtype=array.dtype, track_times=False)
            for start in range(0, len(array), _CHUNK):
                dataset[start : start + _CHUNK] = array[start : start + _CHUNK]
        file.attrs["format"] = FORMAT
        file.attrs["content_hash"] = content_hash
        file.attrs["label_convention"] = LABEL_CONVENTION
        for key, value in asdict(attributes).items():
            file.attrs[key] = value if isinstance(value, int | str) else json.dumps(value, sort_keys=True)
    return ShardSummary(path.name, len(instances), int(instances.offsets[-1]), content_hash)


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open for reading without a lock (locks fail on network file systems), with errors that say what to do."""
    try:
        file = h5py.File(path, "r", locking=False)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} is not a readable HDF5 file ({error}); it may be truncated: make or copy it again") from error
    with file:
        yield file


def _map_dataset(dataset: h5py.Dataset, path: Path) -> np.ndarray:
    """Memory-map a contiguous dataset; read a compressed or chunked one (slower, but it works)."""
    offset = dataset.id.get_offset()
    if offset is None or dataset.size == 0:
        return dataset[...]
    return np.memmap(path, dtype=dataset.dtype, mode="r", offset=offset, shape=dataset.shape)


def _read_attributes(file: h5py.File) -> ShardAttributes:
    raw = dict(file.attrs)
    return ShardAttributes(
        max_seq_length=int(raw["max_seq_length"]),
        vocab_size=int(raw["vocab_size"]),
        vocab_hash=str(raw["vocab_hash"]),
        **{name: json.loads(raw[name]) for name in ("tokenizer", "creation", "sources")},
    )


def open_shard(path: Path | str) -> Shard:
    """Open a native or an NVIDIA shard.

    Raises:
        ValueError: not an HDF5 file, a format this version does not know, or arrays that do not fit each other.
    """
    path = Path(path)
    with open_hdf5(path) as file:
        if "format" not in file.attrs:
            from data_prep import nvidia_format

            return nvidia_format.read_shard(path, file)
        if file.attrs["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {file.attrs['format']!r}, and this version reads {FORMAT!r}: build the shards again"
            )
        missing = [name for name in _ARRAYS if name not in file]
        if missing:
            raise ValueError(f"{path} lacks the datasets {', '.join(missing)}: build the shard again")
        try:
            arrays = [_map_dataset(file[name], path) for name in _ARRAYS]
            attributes = _read_attributes(file)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}): build the shard again") from error
        content_hash = str(file.attrs["content_hash"])
    instances = Instances(*arrays)
    if len(instances.offsets) != len(instances) + 1 or int(instances.offsets[-1]) != len(instances.tokens):
        raise ValueError(f"{path} is damaged (its arrays do not fit each other): build the shard again")
    return Shard(path, instances, attributes.max_seq_length, attributes, content_hash)


def write_manifest(directory: Path | str, manifest: dict[str, Any]) -> None:
    """Write manifest.json beside the shards, whole or not at all."""
    with written_whole(Path(directory) / MANIFEST_NAME) as unfinished:
        unfinished.write_text(json.dumps({"format": FORMAT, **manifest}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_manifest(directory: Path | str) -> dict[str, Any] | None:
    """Return manifest.json's content, or None where there is none.

    Raises:
        ValueError: it is not valid JSON, or of another format.
    """
    path = Path(directory) / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): build the data again") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')!r}, and this version reads {FORMAT!r}")
    return manifest


def _listed_in_manifest(directory: Path, manifest: dict[str, Any], split: str) -> list[Path]:
    splits = manifest["splits"]
    if not splits.get(split):
        hint = "; build with --eval-fraction 0.01 to hold documents out" if split == "eval" else ""
        raise ValueError(f"{directory} has no '{split}' split (it has: {', '.join(k for k in splits if splits[k])}){hint}")
    paths = [directory / shard["name"] for shard in splits[split]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"{directory} lacks {', '.join(missing[:5])}, which its manifest lists: build or copy the data again")
    return paths


def list_shards(path: Path | str, split: str = "train") -> list[Path]:
    """Return the shard files of a split, in order.

    Args:
        path: a directory that `data_prep build` made, a directory of HDF5 files, one file, or a glob pattern.
        split: "train" or "eval"; only a directory with a manifest has more than "train".

    Raises:
        ValueError: nothing there, or no such split.
    """
    directory = Path(path)
    if directory.is_dir():
        manifest = read_manifest(directory)
        if manifest is not None:
            return _listed_in_manifest(directory, manifest, split)
        found = sorted(file for file in directory.iterdir() if file.suffix in _SUFFIXES and not file.name.startswith("."))
        what = f"{directory} holds no {MANIFEST_NAME} and no .hdf5 or .h5 file"
    else:
        found = [directory] if directory.is_file() else sorted(Path(name) for name in glob.glob(str(path)))
        what = f"nothing matches '{path}'"
    if not found:
        raise ValueError(f"{what}: give the directory that 'python -m data_prep build' wrote")
    if split != "train":
        raise ValueError(f"{path} has no '{split}' split: only data with a {MANIFEST_NAME} has one")
    return found
