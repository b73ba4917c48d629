"""`python -m data_prep convert`: shards of other tools to ours, and ours to NVIDIA's.

Reading undoes static masks, so that training draws new ones each epoch. NVIDIA's HDF5 and LDDL's Parquet are read; native shards
and NVIDIA's HDF5 are written.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import io
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tqdm import tqdm

from data_prep.instances import Instances, ShardAttributes, ShardSummary, StaticMasks
from data_prep.masking import MaskingRules, mask_instances, mix_keys
from data_prep.shards import (
    FORMAT,
    NVIDIA_FORMAT,
    VOCAB_NAME,
    MissingSplitError,
    list_shards,
    open_shard,
    undo_masks,
    vocab_hash,
    write_manifest,
    write_nvidia_shard,
    write_shard,
)
from data_prep.tokenization import TokenizerSettings, find_vocabulary, settings_dict
from data_prep.verify import SpecialIds, special_token_problems

READERS = ("nvidia-hdf5", "lddl-parquet", "native")
_CHUNK_ROWS = 4096
_LDDL_COLUMNS = ("A", "B", "is_random_next")


@dataclass(frozen=True)
class Origin:
    """The files of one split of the input, in order, with the number of instances in each."""

    split: str
    files: list[Path]
    counts: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("source", metavar="SRC", help="a directory, one file, or a quoted pattern")
    parser.add_argument("--from", dest="reader", choices=READERS, required=True, help="format of SRC")
    parser.add_argument("--to", dest="writer", choices=("native", "nvidia-hdf5"), default="native", help="default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new or empty directory")
    parser.add_argument("--vocab", type=Path, metavar="FILE", help="the vocabulary SRC was made with; default: vocab.txt in SRC")
    parser.add_argument("--cased", action="store_true", help="record that the vocabulary is cased")
    parser.add_argument("--num-shards", type=int, metavar="N", help="shards of the training split; default: as many as files")
    parser.add_argument("--max-seq-length", type=int, metavar="N", help="default: that of SRC")
    static = parser.add_argument_group("static masks (--to nvidia-hdf5)")
    static.add_argument("--duplicate-factor", type=int, default=5, metavar="N", help="each instance N times (%(default)s)")
    static.add_argument("--max-predictions-per-seq", type=int, default=20, metavar="N", help="%(default)s")
    static.add_argument("--mask-probability", type=float, default=0.15, metavar="P", help="%(default)s")
    static.add_argument("--whole-word-masking", action="store_true")
    static.add_argument("--seed", type=int, default=0, metavar="S", help="%(default)s")


def run(args: argparse.Namespace) -> int:
    """Convert; ValueError for wrong usage."""
    origins = _find_origins(args.source, args.reader)
    vocab_file = args.vocab or origins[0].files[0].parent / VOCAB_NAME
    words = find_vocabulary(origins[0].files[0], args.vocab)
    if words is None:
        raise ValueError(f"{origins[0].files[0].parent} has no vocab.txt: name the vocabulary of these files with --vocab FILE")
    if args.num_shards is not None and args.num_shards < 1:
        raise ValueError(f"--num-shards must be at least 1, got {args.num_shards}")
    if args.duplicate_factor < 1:
        raise ValueError(f"--duplicate-factor must be at least 1, got {args.duplicate_factor}")
    attributes = _attributes(args, origins, words, vocab_hash(vocab_file))
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    with _new_directory(args.output) as directory:
        for origin in origins:
            splits[origin.split] = [vars(summary) for summary in _convert_split(args, origin, attributes, words, directory)]
        shutil.copyfile(vocab_file, directory / VOCAB_NAME)
        _write_manifest(args, attributes, splits, directory)
    instances = sum(shard["num_instances"] for shards in splits.values() for shard in shards)
    print(f"{instances:,} instances in {sum(map(len, splits.values()))} shard(s) written to {args.output}")
    return 0


@contextlib.contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """Yield a directory that becomes `output` on success, and is removed on failure: never a part of the shards."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ValueError(f"{output} holds something already: choose another --output, or delete it")
    unfinished = output.with_name(f".{output.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if output.is_dir():
            output.rmdir()
        unfinished.replace(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# ---- what is read ----


def _find_origins(source: str, reader: str) -> list[Origin]:
    if reader == "lddl-parquet":
        files = _parquet_files(source)
        return [Origin("train", files, [_lddl_rows(_open_parquet(file), file) for file in files])]
    origins = []
    files = list_shards(source)
    origins.append(Origin("train", files, [_hdf5_rows(file, reader) for file in files]))
    try:
        held_out = [file for file in list_shards(source, "eval") if file not in files]
    except MissingSplitError:
        held_out = []
    if held_out:
        origins.append(Origin("eval", held_out, [_hdf5_rows(file, reader) for file in held_out]))
    return origins


def _hdf5_rows(file: Path, reader: str) -> int:
    try:
        with h5py.File(file, "r", locking=False) as opened:
            native = "format" in opened.attrs
            rows = None if native else int(opened["input_ids"].shape[0])
    except (OSError, KeyError):
        rows, native = None, False
        open_shard(file)  # says what is wrong with it
    if native != (reader == "native"):
        raise ValueError(f"{file} is a {'native shard' if native else 'shard in NVIDIA’s format'}, --from says {reader}")
    return rows if rows is not None else len(open_shard(file))


def _parquet_files(source: str) -> list[Path]:
    path = Path(source)
    found = sorted(path.glob("*.parquet*")) if path.is_dir() else sorted(Path(name) for name in glob.glob(source))
    files = [file for file in found if file.is_file() and not file.name.startswith(".")]
    if not files:
        raise ValueError(f"{source}: no Parquet file there")
    return files


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: damaged, truncated or not Parquet ({error})") from error


def _lddl_rows(file: Any, path: Path) -> int:
    missing = [name for name in _LDDL_COLUMNS if name not in file.schema_arrow.names]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}; LDDL's files have {', '.join(_LDDL_COLUMNS)}")
    return file.metadata.num_rows


def _read_chunks(file: Path, reader: str, words: list[str], special: SpecialIds) -> Iterator[Instances]:
    """The unmasked instances of one file in chunks, their special tokens checked."""
    if reader == "lddl-parquet":
        chunks: Iterable[Instances] = _read_lddl(file, words)
    else:
        shard = open_shard(file)
        rows = (slice(start, start + _CHUNK_ROWS) for start in range(0, len(shard), _CHUNK_ROWS))
        masks = shard.static_masks
        chunks = (shard[r] if masks is None else undo_masks(shard[r], masks[r]) for r in rows)
    first_row = 0
    for chunk in chunks:
        for problem in special_token_problems(chunk, special, first_row, foreign=True):
            raise ValueError(f"{file}: {problem}; is --vocab the vocabulary it was made with?")
        first_row += len(chunk)
        yield chunk


def _read_lddl(path: Path, words: list[str]) -> Iterator[Instances]:
    ids = {word: i for i, word in enumerate(words)}
    cls, sep = ids["[CLS]"], ids["[SEP]"]
    file, first_row = _open_parquet(path), 0
    for batch in file.iter_batches(batch_size=_CHUNK_ROWS):
        rows = batch.to_pylist()
        tokens, starts = [], []
        for number, row in enumerate(rows):
            try:
                a, b = ([ids[word] for word in row[name].split()] for name in ("A", "B"))
                row_tokens = [cls, *a, sep, *b, sep]
                if row.get("masked_lm_positions") is not None:
                    positions = np.load(io.BytesIO(row["masked_lm_positions"]), allow_pickle=False).tolist()
                    for place, word in zip(positions, row["masked_lm_labels"].split(), strict=True):
                        row_tokens[place] = ids[word]
            except KeyError as error:
                raise ValueError(f"{path}: row {first_row + number}: {error} is not in the vocabulary; see --vocab") from None
            except (ValueError, IndexError) as error:
                raise ValueError(f"{path}: row {first_row + number}: its masks do not fit its tokens ({error})") from None
            tokens.append(row_tokens)
            starts.append(len(a) + 2)
        first_row += len(rows)
        yield Instances.from_lists(tokens, starts, [row["is_random_next"] for row in rows], dtype=np.uint32)


def _longest(args: argparse.Namespace, origins: list[Origin]) -> int:
    if args.reader != "lddl-parquet":
        return max(_width(file, args.reader) for origin in origins for file in origin.files)
    longest = 0
    for file in origins[0].files:
        for batch in _open_parquet(file).iter_batches(columns=["A", "B"]):
            pairs = zip(batch.column("A").to_pylist(), batch.column("B").to_pylist(), strict=True)
            longest = max([longest, *(len(a.split()) + len(b.split()) + 3 for a, b in pairs)])
    return longest


def _width(file: Path, reader: str) -> int:
    if reader == "native":
        return open_shard(file).max_seq_length
    with h5py.File(file, "r", locking=False) as opened:
        return int(opened["input_ids"].shape[1])


# ---- what is written ----


def _attributes(args: argparse.Namespace, origins: list[Origin], words: list[str], digest: str) -> ShardAttributes:
    longest = _longest(args, origins)
    creation = {"command": "convert", "from": args.reader, "to": args.writer}
    if args.writer == "nvidia-hdf5":
        names = ("duplicate_factor", "max_predictions_per_seq", "mask_probability", "whole_word_masking", "seed")
        creation |= {name: getattr(args, name) for name in names}
    settings = settings_dict(TokenizerSettings(lowercase=not args.cased))
    if args.reader == "native":
        made_with = open_shard(origins[0].files[0]).attributes
        if made_with.vocab_hash not in (None, digest):
            raise ValueError(f"{origins[0].files[0]} was made with another vocabulary than the one given")
        settings = made_with.tokenizer or settings
    return ShardAttributes(
        max_seq_length=args.max_seq_length or longest,
        vocab_size=len(words),
        vocab_hash=digest,
        tokenizer=settings,
        creation=creation,
        sources=[{"source": f"{args.reader}:{Path(args.source).name}", "instances": sum(sum(o.counts) for o in origins)}],
    )


def _convert_split(
    args: argparse.Namespace, origin: Origin, attributes: ShardAttributes, words: list[str], directory: Path
) -> Iterator[ShardSummary]:
    special = SpecialIds(*(words.index(f"[{name}]") for name in ("CLS", "SEP", "PAD", "UNK", "MASK")))
    bar = tqdm(origin.files, desc=origin.split, unit="file", disable=None)
    stream = _Stream(chunk for file in bar for chunk in _read_chunks(file, args.reader, words, special))
    total, num_shards = sum(origin.counts), len(origin.files)
    if args.num_shards is not None and origin.split == "train":
        num_shards = args.num_shards
    rules = MaskingRules.from_vocabulary(
        words,
        probability=args.mask_probability,
        max_predictions=args.max_predictions_per_seq,
        whole_word=args.whole_word_masking,
    )
    for k in range(num_shards):
        first, stop = k * total // num_shards, (k + 1) * total // num_shards
        path = directory / f"{origin.split}_{k:05d}.hdf5"
        if args.writer == "native":
            yield write_shard(path, stream.take(stop - first), attributes)
        else:
            chunks = _statically_masked(stream.take(stop - first), first, args.duplicate_factor, args.seed, rules, attributes)
            yield write_nvidia_shard(
                path, chunks, max_seq_length=attributes.max_seq_length, max_predictions_per_seq=args.max_predictions_per_seq
            )


class _Stream:
    """Chunks of instances, cut anew where shards end."""

    def __init__(self, chunks: Iterator[Instances]) -> None:
        self._chunks, self._rest = chunks, None  # type: Iterator[Instances], Instances | None

    def take(self, num_instances: int) -> Iterator[Instances]:
        """Yield the next `num_instances`, in chunks."""
        while num_instances > 0:
            chunk = self._rest if self._rest is not None else next(self._chunks)
            self._rest = chunk[num_instances:] if len(chunk) > num_instances else None
            chunk = chunk[:num_instances]
            num_instances -= len(chunk)
            yield chunk


def _statically_masked(
    chunks: Iterator[Instances], first: int, duplicates: int, seed: int, rules: MaskingRules, attributes: ShardAttributes
) -> Iterator[tuple[Instances, StaticMasks]]:
    """Each chunk once per duplicate, masked as training would in that epoch."""
    for chunk in chunks:
        numbers = np.arange(first, first + len(chunk))
        first += len(chunk)
        if chunk.lengths.max(initial=0) > attributes.max_seq_length:
            raise ValueError(f"--max-seq-length {attributes.max_seq_length}: an instance has {chunk.lengths.max()} tokens")
        for epoch in range(duplicates):
            yield draw_static_masks(chunk, mix_keys(seed, epoch, numbers), rules)


def draw_static_masks(instances: Instances, keys: np.ndarray, rules: MaskingRules) -> tuple[Instances, StaticMasks]:
    """Mask instances for good.

    Args:
        instances: N of them, unmasked.
        keys: uint64 [N], see `data_prep.masking.mix_keys`.
        rules: what may be masked.

    Returns:
        The instances with masked ids, and the masks that undo them.
    """
    lengths = instances.lengths
    real = np.arange(lengths.max(initial=1)) < lengths[:, None]
    padded = np.zeros(real.shape, dtype=np.int64)
    padded[real] = instances.tokens
    masked, positions, labels = mask_instances(padded, lengths, keys, rules)
    used = labels >= 0
    offsets = np.concatenate([[0], np.cumsum(used.sum(1), dtype=np.int64)])
    tokens = masked[real].astype(instances.tokens.dtype)
    shown = Instances(tokens, instances.offsets, instances.segment_b_start, instances.is_random_next)
    return shown, StaticMasks(offsets, positions[used].astype(np.uint16), labels[used].astype(tokens.dtype))


def _write_manifest(
    args: argparse.Namespace, attributes: ShardAttributes, splits: dict[str, list[dict[str, Any]]], directory: Path
) -> None:
    shards = [shard for listed in splits.values() for shard in listed]
    write_manifest(
        directory,
        {
            "format": FORMAT if args.writer == "native" else NVIDIA_FORMAT,
            "splits": splits,
            "max_seq_length": attributes.max_seq_length,
            "vocab": {"file": VOCAB_NAME, "size": attributes.vocab_size, "hash": attributes.vocab_hash},
            "tokenizer": attributes.tokenizer,
            "sources": attributes.sources,
            "creation": attributes.creation,
            "totals": {key: sum(shard[key] for shard in shards) for key in ("num_instances", "num_tokens")},
        },
    )
