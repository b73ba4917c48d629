"""HDF5 shards of pretraining instances: the only place (with the modules it re-exports) that knows the formats.

Native format `tempo-bert/1`: the four arrays of `Instances` as one-dimensional datasets, contiguous and uncompressed, so
that a reader maps the file into memory at each dataset's offset and needs HDF5 only to find it. Root attributes: format,
content_hash, num_instances, num_tokens, max_seq_length, vocab_size, vocab_hash, label_convention, and as JSON tokenizer,
creation, sources. Shards in NVIDIA's schema are recognised and read as well (`data_prep.nvidia_format`).

No HDF5 handle outlives a call and no HDF5 lock is taken, so shards may be opened before or after a fork, in any number
of processes, on network file systems.
"""

import json
import mmap
import resource
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from data_prep.atomic_write import write_bytes_atomically, written_whole
from data_prep.instances import (
    ContentHash,
    Instances,
    IntArray,
    ShardAttributes,
    ShardSummary,
    StaticMasks,
    check_instances,
    find_problems,
    token_dtype,
)
from data_prep.manifest import (
    FORMAT,
    MANIFEST_NAME,
    NVIDIA_FORMAT,
    VOCAB_NAME,
    MissingSplitError,
    list_shards,
    read_manifest,
    vocab_hash,
    write_manifest,
)
from data_prep.memory import check_memory
from data_prep.nvidia_format import check_total_memory, is_nvidia, read_nvidia, undo_masks, write_nvidia_shard

__all__ = [
    "FORMAT",
    "MANIFEST_NAME",
    "NVIDIA_FORMAT",
    "VOCAB_NAME",
    "ContentHash",
    "Instances",
    "MissingSplitError",
    "Shard",
    "ShardAttributes",
    "ShardSummary",
    "StaticMasks",
    "allow_open_files",
    "check_instances",
    "check_total_memory",
    "find_problems",
    "list_shards",
    "open_shard",
    "read_manifest",
    "token_dtype",
    "undo_masks",
    "vocab_hash",
    "write_bytes_atomically",
    "write_manifest",
    "write_nvidia_shard",
    "write_shard",
    "written_whole",
]

LABEL_CONVENTION = "is_random_next: 0 = B follows A in its document, 1 = B is from another document"
_DATASETS = {"offsets": 1, "tokens": 0, "segment_b_start": 0, "is_random_next": 0}  # name -> entries beyond N or total
_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Shard(Instances):
    """One open shard: `Instances` (arrays mapped from the file, read-only) and what the file says about them.

    `format` is "tempo-bert/1" or "nvidia"; NVIDIA's have `static_masks`, and `tokens` as masked in the file.
    Pickling stores the path only: a worker process opens the shard itself.
    """

    path: Path
    format: str
    attributes: ShardAttributes
    content_hash: str
    static_masks: StaticMasks | None = None

    @property
    def max_seq_length(self) -> int:
        """No instance is longer."""
        return self.attributes.max_seq_length

    @property
    def num_instances(self) -> int:
        """Instances in this shard."""
        return len(self)

    @property
    def num_tokens(self) -> int:
        """Tokens of all instances, special tokens included, padding not."""
        return len(self.tokens)

    @property
    def summary(self) -> ShardSummary:
        """The manifest's entry for this shard."""
        return ShardSummary(self.path.name, self.num_instances, self.num_tokens, self.content_hash)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_shard, (self.path,)


def write_shard(
    path: str | Path,
    instances: Instances | Iterable[Instances],
    attributes: ShardAttributes,
    *,
    compression: str | None = None,
) -> ShardSummary:
    """Write a native shard to `path`, which appears complete or not at all; same input, same bytes.

    `instances` may be an iterable of chunks: then memory stays bounded by one chunk plus 11 bytes per instance (tokens are
    spooled to a temporary file beside `path`, since contiguous datasets need their size beforehand).
    `compression` ("gzip", "lzf") makes a smaller file that cannot be mapped: every reader holds it in memory.
    Raises ValueError, naming path and row, for instances that break the format's rules.
    """
    path = Path(path)
    chunks = [instances] if isinstance(instances, Instances) else instances
    with tempfile.TemporaryFile(dir=path.parent) as spool:
        arrays, content_hash = _collect(path, chunks, attributes, spool)
        num_instances, num_tokens = len(arrays["is_random_next"]), int(arrays["offsets"][-1])
        with written_whole(path) as temporary, _create(temporary) as file:
            _write_attributes(file, attributes, num_instances, num_tokens, content_hash)
            options = {"compression": compression, "shuffle": True} if compression else {}
            for name in ("offsets", "segment_b_start", "is_random_next"):
                filters = options if arrays[name].size else {}
                file.create_dataset(name, data=arrays[name], track_times=False, **filters)
            dtype = token_dtype(attributes.vocab_size)
            filters = options if num_tokens else {}
            tokens = file.create_dataset("tokens", (num_tokens,), dtype, track_times=False, **filters)
            _copy_spool(spool, tokens, dtype)
    return ShardSummary(path.name, num_instances, num_tokens, content_hash)


def _create(path: Path) -> h5py.File:
    # Fixed bounds keep the bytes the same under every HDF5 version; alignment lets readers map int64 directly.
    return h5py.File(path, "w", libver=("v108", "v108"), locking=False, alignment_threshold=1, alignment_interval=64)


def _collect(
    path: Path, chunks: Iterable[Instances], attributes: ShardAttributes, spool: IO[bytes]
) -> tuple[dict[str, IntArray], str]:
    digest = ContentHash()
    dtype = token_dtype(attributes.vocab_size)
    lengths, b_starts, labels = [], [], []
    num_rows = 0
    for chunk in chunks:
        check_instances(chunk, attributes, str(path), num_rows)
        chunk = Instances(
            np.ascontiguousarray(chunk.tokens, dtype=dtype),
            chunk.offsets,
            np.asarray(chunk.segment_b_start, dtype="<u2"),
            np.asarray(chunk.is_random_next, dtype="<u1"),
        )
        num_rows += len(chunk)
        digest.update(chunk)
        spool.write(chunk.tokens.tobytes())
        lengths.append(chunk.lengths)
        b_starts.append(chunk.segment_b_start)
        labels.append(chunk.is_random_next)
    offsets = np.zeros(num_rows + 1, dtype="<i8")
    if num_rows:
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return {
        "offsets": offsets,
        "segment_b_start": np.concatenate(b_starts) if num_rows else np.zeros(0, "<u2"),
        "is_random_next": np.concatenate(labels) if num_rows else np.zeros(0, "<u1"),
    }, digest.hexdigest()


def _copy_spool(spool: IO[bytes], dataset: h5py.Dataset, dtype: np.dtype[Any]) -> None:
    spool.seek(0)
    position = 0
    while block := spool.read(_COPY_BYTES):
        values = np.frombuffer(block, dtype)
        dataset[position : position + len(values)] = values
        position += len(values)


def _write_attributes(
    file: h5py.File, attributes: ShardAttributes, num_instances: int, num_tokens: int, content_hash: str
) -> None:
    file.attrs["format"] = np.bytes_(FORMAT)
    file.attrs["content_hash"] = np.bytes_(content_hash)
    file.attrs["label_convention"] = np.bytes_(LABEL_CONVENTION)
    file.attrs["vocab_hash"] = np.bytes_(attributes.vocab_hash or "none")
    numbers = {
        "num_instances": num_instances,
        "num_tokens": num_tokens,
        "max_seq_length": attributes.max_seq_length,
        "vocab_size": attributes.vocab_size or 0,
    }
    for name, value in numbers.items():
        file.attrs[name] = np.int64(value)
    for name in ("tokenizer", "creation", "sources"):
        file.attrs[name] = np.bytes_(json.dumps(getattr(attributes, name), sort_keys=True))


def open_shard(path: str | Path) -> Shard:
    """Open a shard, native or NVIDIA's, and close its HDF5 handle before returning.

    Native arrays are mapped into memory (read when touched); compressed ones and NVIDIA's are loaded.
    Raises ValueError, naming the file and what to do, for anything that is not a complete shard.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such shard file")
    try:
        with h5py.File(path, "r", locking=False) as file:
            found = _text(file.attrs.get("format", ""))
            if found == FORMAT:
                return _read_native(file, path)
            if found:
                raise ValueError(
                    f"{path}: written in format {found!r}, this version reads {FORMAT!r}; "
                    "rebuild it with `python -m data_prep build`"
                )
            if is_nvidia(file):
                attributes, instances, masks, digest = read_nvidia(file, path)
                return Shard(**vars(instances), path=path, format=NVIDIA_FORMAT, attributes=attributes,
                             content_hash=digest, static_masks=masks)  # fmt: skip
            raise ValueError(
                f"{path}: an HDF5 file, but no pretraining shard (it holds {sorted(file) or 'nothing'}); shards come "
                "from `python -m data_prep build` or NVIDIA's create_pretraining_data.py"
            )
    except (OSError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"{path}: damaged, truncated or not HDF5 ({error}); shards come from `python -m data_prep build`: build or copy"
            " a broken one again, and turn text into shards first"
        ) from error


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _read_native(file: h5py.File, path: Path) -> Shard:
    try:
        attributes = ShardAttributes(
            max_seq_length=int(file.attrs["max_seq_length"]),
            vocab_size=int(file.attrs["vocab_size"]) or None,
            vocab_hash=None if (text := _text(file.attrs["vocab_hash"])) == "none" else text,
            **{name: json.loads(_text(file.attrs[name])) for name in ("tokenizer", "creation", "sources")},
        )
        counts = (int(file.attrs["num_instances"]), int(file.attrs["num_tokens"]))
        content_hash = _text(file.attrs["content_hash"])
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: a {FORMAT} shard with a damaged attribute ({error}); build it again") from None
    arrays = dict(_read_arrays(file, path))
    expected = {"offsets": counts[0] + 1, "tokens": counts[1], "segment_b_start": counts[0]}
    for name, size in (expected | {"is_random_next": counts[0]}).items():
        if len(arrays[name]) != size:
            raise ValueError(f"{path}: `{name}` has {len(arrays[name]):,} entries, not {size:,}; build it again")
    if int(arrays["offsets"][0]) != 0 or int(arrays["offsets"][-1]) != counts[1]:
        raise ValueError(f"{path}: `offsets` do not end at the {counts[1]:,} tokens stored; build it again")
    return Shard(**vars(Instances(**arrays)), path=path, format=FORMAT, attributes=attributes, content_hash=content_hash)


def _read_arrays(file: h5py.File, path: Path) -> Iterator[tuple[str, IntArray]]:
    mapped = _map_file(path)
    for name in _DATASETS:
        dataset = file[name]
        if dataset.ndim != 1 or dataset.dtype.kind not in "iu":
            raise ValueError(f"{path}: `{name}` is {dataset.dtype} {dataset.shape}, not a list of integers")
        offset = dataset.id.get_offset()
        if dataset.size and offset is not None:
            if offset + dataset.size * dataset.dtype.itemsize > len(mapped):
                raise ValueError(f"{path}: truncated inside `{name}`; delete it and build it again")
            yield name, np.frombuffer(mapped, dataset.dtype, dataset.size, offset)
        else:  # compressed or empty
            check_memory(dataset.size * dataset.dtype.itemsize, f"loading {path}, which is compressed", "build it uncompressed")
            yield name, dataset[()]


def allow_open_files(num_files: int) -> None:
    """Raise this process's limit of open files for `num_files` shards, where the system lets it.

    Python before 3.13 keeps a descriptor for every mapped file, and 1,024 is a common limit.

    Raises:
        ValueError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_files + 256
    if sys.version_info >= (3, 13) or soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"{num_files:,} shards need as many open files, and the system allows {hard:,}: raise `ulimit -n`, or build with"
            " fewer shards (--num-shards)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _map_file(path: Path) -> mmap.mmap:
    # One map per shard, not per array: see allow_open_files.
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options)
