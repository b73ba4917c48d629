"""`python -m data_prep build`: sources -> sentences -> tokens -> pairs -> shards, in bounded memory, the same bytes whatever the
number of workers, and whole or not at all.

    read and tokenise   worker processes, some documents at a time, into a token store on disk     data_prep.corpus
    pair                worker processes, some documents at a time, into one file per array        data_prep.instance_building
    shards              contiguous ranges of the instances
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_prep.corpus import CorpusReader, SourceCounts, no_document
from data_prep.instance_building import InstanceBuilder, split_documents
from data_prep.pairs import PairSettings
from data_prep.progress import progress
from data_prep.shards import MANIFEST_NAME, VOCAB_NAME, ShardAttributes, ShardSummary, read_manifest, write_manifest
from data_prep.sources import Source
from data_prep.tokenization import (
    TokenizerSettings,
    check_case,
    read_vocabulary,
    settings_dict,
    vocabulary_bytes,
    vocabulary_hash,
)

_HASHED_BYTES = 1 << 20


def _num_cores() -> int:
    """The cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Turn text into shards of sentence pairs for pretraining."
    parser.epilog = """sources:
  --source wikipedia-dump:enwiki-latest-pages-articles.xml.bz2   a MediaWiki dump
  --source wikipedia:20231101.en                                 Wikipedia through the datasets library
  --source hf:bookcorpus --text-column text                      any dataset of the datasets library, or a local one
  --source 'text:corpus/*.txt'                                   one sentence a line, a blank line between documents
  --source 'files:books/**/*.txt'                                one document a file

example:
  python -m data_prep build --source wikipedia-dump:FILE.xml.bz2 --train-vocab 30522 --output data/wikipedia --num-shards 256"""
    add = parser.add_argument
    add("--source", action="append", required=True, metavar="KIND:WHERE", help="where text comes from; may be given again")
    add("--output", type=Path, required=True, metavar="DIR", help="directory to make")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--vocab", type=Path, metavar="FILE", help="vocabulary to use: vocab.txt, one token a line")
    vocabulary.add_argument("--train-vocab", type=int, metavar="SIZE", help="train a vocabulary of this size on the sources")
    add("--cased", action="store_true", help="keep letter case and accents (default: lower-cased, accents stripped)")
    add("--language", default="en", help="language of sentence splitting (default: en)")
    add("--text-column", default="text", help="column of the text in hf: and wikipedia: datasets (default: text)")
    add("--max-seq-length", type=int, default=128, metavar="N", help="longest instance, special tokens included (default: 128)")
    add("--short-seq-prob", type=float, default=0.1, metavar="P", help="share of shorter instances (default: 0.1)")
    add("--duplicate-factor", type=int, default=1, metavar="N", help="passes over the text, each with other pairs (default: 1)")
    add("--num-shards", type=int, default=1, metavar="N", help="training shards (default: 1)")
    add("--eval-fraction", type=float, default=0.0, metavar="F", help="share of the documents to hold out (default: 0)")
    add("--eval-num-shards", type=int, default=1, metavar="N", help="held-out shards (default: 1)")
    add("--max-unknown-rate", type=float, default=0.05, metavar="R", help="refuse a source with more [UNK] (default: 0.05)")
    add(
        "--workers",
        type=int,
        default=_num_cores(),
        metavar="N",
        help="processes (default: one a core); same result",
    )
    add("--seed", type=int, default=42, help="of pairs and of the held-out split (default: 42)")
    add("--overwrite", action="store_true", help="replace what DIR holds")
    add("--quiet", action="store_true", help="no progress, no summary")


def _check(arguments: argparse.Namespace) -> None:
    limits = {
        "max_seq_length": (8, 65_535), "duplicate_factor": (1, 1000), "num_shards": (1, 100_000), "workers": (1, 4096),
        "eval_num_shards": (1, 100_000), "short_seq_prob": (0.0, 1.0), "max_unknown_rate": (0.0, 1.0),
    }  # fmt: skip
    for name, (low, high) in limits.items():
        value = getattr(arguments, name)
        if not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} must lie between {low} and {high}, got {value}")
    if not 0.0 <= arguments.eval_fraction < 1.0:
        raise ValueError(f"--eval-fraction must lie in [0, 1), got {arguments.eval_fraction}")
    if arguments.train_vocab is not None and arguments.train_vocab < 100:
        raise ValueError(f"--train-vocab must be at least 100, got {arguments.train_vocab}")


def creation_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """What decides the bytes of the result: options, input files and library versions; not workers, not paths of output."""
    keys = (
        "source", "text_column", "language", "train_vocab", "cased", "max_seq_length", "short_seq_prob", "duplicate_factor",
        "num_shards", "eval_fraction", "eval_num_shards", "seed",
    )  # fmt: skip
    parameters = {key: getattr(arguments, key) for key in keys}
    files = [path for spec in arguments.source for path in Source(spec).files()]
    parameters["input"] = _input_digest(progress(files, "checking the input", " files", arguments.quiet, len(files)))
    if arguments.vocab:
        parameters["vocab"] = vocabulary_hash(read_vocabulary(arguments.vocab))
    libraries = ("tokenizers", "sentencex", "mwparserfromhell")
    parameters["versions"] = {library: version(library) for library in libraries}
    return parameters


def _input_digest(files: Iterable[Path]) -> dict[str, Any]:
    """One hash over all input files, since names and sizes do not tell that a file has changed."""
    digest = hashlib.sha256()
    num_files = num_bytes = 0
    for path in files:
        num_files += 1
        try:
            with path.open("rb") as file:
                while block := file.read(_HASHED_BYTES):
                    num_bytes += len(block)
                    digest.update(block)
        except OSError as error:
            raise ValueError(f"cannot read the input {path}: {error.strerror}") from error
        digest.update(b"%d;" % num_bytes)
    return {"files": num_files, "bytes": num_bytes, "sha256": digest.hexdigest()}


def _is_built(output: Path, creation: dict[str, Any], overwrite: bool) -> bool:
    """Whether `output` holds the very result already; raises where it holds something that must not go."""
    if not output.exists():
        return False
    if not output.is_dir():
        raise ValueError(f"--output {output} is a file; choose a directory")
    if os.path.ismount(output):
        raise ValueError(f"--output {output} is a mount point, and the result must appear by renaming: choose a directory inside")
    try:
        manifest = read_manifest(output)
    except ValueError:
        if not overwrite:
            raise
        manifest = None
    if manifest is not None and manifest.get("creation") == json.loads(json.dumps(creation)):
        entries = [entry["name"] for entries in manifest["splits"].values() for entry in entries]
        if all((output / name).is_file() for name in [*entries, VOCAB_NAME]):
            return True
    if any(output.iterdir()) and not overwrite:
        what = "shards made with other parameters or of other input" if manifest is not None else "other files"
        raise ValueError(f"--output {output} holds {what}: choose another directory, or replace it with --overwrite")
    return False


def _check_replaceable(output: Path, inputs: list[Path]) -> None:
    """Refuse to replace a directory that is certainly more than old shards."""
    if not output.is_dir():
        return
    if folder := next((path for path in output.iterdir() if path.is_dir()), None):
        raise ValueError(
            f"--output {output} has folders in it ({folder.name}), which --overwrite does not delete: choose another"
        )
    if inside := next((path for path in inputs if output in path.resolve().parents), None):
        raise ValueError(f"--output {output} has the input {inside.name} in it, which --overwrite would delete: choose another")


def _temporary_sibling(output: Path) -> Path:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise ValueError(f"--output {output} cannot be made: {error.strerror}: {error.filename}") from error


def _replace(finished: Path, output: Path) -> None:
    """Give a finished directory its name; what was there goes only once the new one is complete."""
    old = finished.with_name(finished.name + ".old")
    if output.exists():
        output.rename(old)
    finished.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _build(arguments: argparse.Namespace, creation: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Build everything inside `directory`; return the manifest."""
    settings = TokenizerSettings(lowercase=not arguments.cased)
    sources = [Source(spec, arguments.text_column) for spec in arguments.source]
    work = directory / "work"
    work.mkdir()
    reader = CorpusReader(arguments.language, arguments.workers, arguments.quiet)
    if arguments.vocab:
        words = read_vocabulary(arguments.vocab)
        check_case(words, settings, arguments.vocab)
    else:
        words, sources = reader.train_vocabulary(sources, arguments.train_vocab, settings, work)
    (directory / VOCAB_NAME).write_bytes(vocabulary_bytes(words))
    store, counts = reader.tokenise(sources, words, settings, arguments.max_unknown_rate, work / "store")
    builder = InstanceBuilder(
        store_directory=work / "store",
        token_dtype=store.tokens.dtype,
        settings=PairSettings(
            max_seq_length=arguments.max_seq_length,
            short_seq_prob=arguments.short_seq_prob,
            seed=arguments.seed,
            cls_id=words.index("[CLS]"),
            sep_id=words.index("[SEP]"),
        ),
        num_passes=arguments.duplicate_factor,
        num_workers=arguments.workers,
        quiet=arguments.quiet,
    )
    splits = split_documents(store.num_documents, arguments.eval_fraction, arguments.seed)
    instances = {split: builder.pair(split, documents, counts, work / split) for split, documents in splits.items()}
    attributes = ShardAttributes(
        max_seq_length=arguments.max_seq_length,
        vocab_size=len(words),
        vocab_hash=vocabulary_hash(words),
        tokenizer=settings_dict(settings),
        creation=creation,
        sources=[count.to_dict() for count in counts],
    )
    num_shards = {"train": arguments.num_shards, "eval": arguments.eval_num_shards}
    shards = {
        split: builder.write_shards(split, found, num_shards[split], attributes, directory) for split, found in instances.items()
    }
    shutil.rmtree(work)
    manifest = _manifest(shards, attributes, counts)
    write_manifest(directory, manifest)
    return manifest


def _manifest(splits: dict[str, list[ShardSummary]], attributes: ShardAttributes, counts: list[SourceCounts]) -> dict[str, Any]:
    return {
        "splits": {split: [asdict(summary) for summary in summaries] for split, summaries in splits.items()},
        "max_seq_length": attributes.max_seq_length,
        "vocab": {"file": VOCAB_NAME, "size": attributes.vocab_size, "hash": attributes.vocab_hash},
        "tokenizer": attributes.tokenizer,
        "sources": attributes.sources,
        "creation": attributes.creation,
        "totals": {
            "documents": sum(c.documents for c in counts),
            "sentences": sum(c.sentences for c in counts),
            "instances": sum(s.num_instances for summaries in splits.values() for s in summaries),
            "tokens": sum(s.num_tokens for summaries in splits.values() for s in summaries),
        },
    }


def _print_summary(manifest: dict[str, Any], output: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("source", "documents", "sentences", "tokens", "unknown", "left out", box=box.SIMPLE_HEAD)
    for row in manifest["sources"]:
        skipped = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in row["skipped"].items()) or "-"
        counts = (f"{row[key]:,}" for key in ("documents", "sentences", "tokens"))
        table.add_row(row["source"], *counts, f"{row['unknown_token_rate']:.2%}", skipped)
    console.print(table)
    for split, shards in manifest["splits"].items():
        instances, tokens = sum(s["num_instances"] for s in shards), sum(s["num_tokens"] for s in shards)
        fill = tokens / (instances * manifest["max_seq_length"])
        console.print(f"{split}: {instances:,} instances in {len(shards)} shard(s), rows {fill:.0%} full")
    console.print(f"vocabulary: {manifest['vocab']['size']:,} entries; written to {output}")


def _check_sources(arguments: argparse.Namespace) -> None:
    """Stop at once where a source has nothing to read, not after hours on the sources before it."""
    sources = [Source(spec, arguments.text_column) for spec in arguments.source]
    for source in sources:
        source.files()
    for source in sources[1:]:  # the first one is read right away
        if next(source.documents(), None) is None:
            raise no_document(source.spec, source.skipped)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM (a batch system's time limit, `docker stop`) end the work as Ctrl-C does, so that nothing is left behind."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: someone else's program decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: argparse.Namespace) -> int:
    """Build what the command line says.

    Raises:
        ValueError: the user's mistakes.
        WorkerDied: a worker died.
    """
    _check(arguments)
    _check_sources(arguments)
    # A link stays; what it points to is replaced.
    output = arguments.output.resolve()
    creation = creation_parameters(arguments)
    if _is_built(output, creation, arguments.overwrite):
        print(f"{arguments.output} is built already with these parameters; nothing to do")
        return 0
    _check_replaceable(output, [path for spec in arguments.source for path in Source(spec).files()])
    with _ended_by_sigterm():
        directory = _temporary_sibling(output)
        try:
            directory.chmod(0o755)
            manifest = _build(arguments, creation, directory)
            _replace(directory, output)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    if not arguments.quiet:
        _print_summary(manifest, arguments.output)
    return 0


__all__ = ["MANIFEST_NAME", "add_arguments", "creation_parameters", "run"]
