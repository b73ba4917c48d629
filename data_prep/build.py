"""`python -m data_prep build`: sources -> sentences -> tokens -> pairs -> shards, in bounded memory, the same bytes whatever the
number of workers, and whole or not at all.

    read and tokenise   worker processes, some documents at a time, into a token store on disk
    pair                worker processes, some documents at a time, into one file per array
    shards              contiguous ranges of the instances: training permutes them, so none is shuffled here
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from data_prep.masking import mix_keys
from data_prep.pairs import NUM_SPECIAL, PairMaker, PairSettings
from data_prep.shards import (
    MANIFEST_NAME,
    VOCAB_NAME,
    Instances,
    ShardAttributes,
    ShardSummary,
    read_manifest,
    write_manifest,
    write_shard,
)
from data_prep.sources import RawDocument, Source, sentences_of
from data_prep.token_store import TokenisedDocuments, TokenStore, TokenStoreWriter, map_array
from data_prep.tokenization import (
    Encoder,
    TokenizerSettings,
    read_vocabulary,
    settings_dict,
    train_vocabulary,
    vocabulary_bytes,
    vocabulary_hash,
)

# Documents that a worker takes at a time: enough work to outweigh passing them, little enough to balance.
_DOCUMENTS_PER_TASK = 32
_PAIRED_DOCUMENTS_PER_TASK = 512
# With fewer instances a share of random pairs outside 0.4 to 0.6 may be chance.
_LABEL_CHECK_INSTANCES = 400
_MIN_SENTENCES_PER_DOCUMENT = 2.0
_INSTANCE_FILES = {"tokens": None, "lengths": np.int64, "segment_b_start": np.uint16, "is_random_next": np.uint8}

# Tells the draw of the held-out documents from the draws of pairs.
_HELD_OUT = 1 << 62

Task = TypeVar("Task")
Result = TypeVar("Result")


class BuildFailed(RuntimeError):
    """The machine, not the user, stopped the work; nothing half-written is left."""


@dataclass
class SourceCounts:
    """A source's line in the manifest."""

    source: str
    documents: int = 0
    sentences: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def add(self, documents: TokenisedDocuments, unknown_id: int) -> None:
        self.documents += len(documents.document_sentences)
        self.sentences += len(documents.sentence_lengths)
        self.tokens += len(documents.tokens)
        self.unknown_tokens += int((documents.tokens == unknown_id).sum())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "unknown_token_rate": self.unknown_tokens / max(self.tokens, 1)}


# ---- worker processes ----

_worker: Any = None


def _set_worker(make: Callable[..., Any], *arguments: Any) -> None:
    """Run once in every worker: build what all its tasks share."""
    global _worker  # noqa: PLW0603 - one process, one worker
    # The pool is the parallelism; threads of the tokenizer in every worker would only fight.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = make(*arguments)


def _run_task(task: Any) -> Any:
    return _worker(task)


def in_order(
    tasks: Iterable[Task], make: Callable[..., Callable[[Task], Result]], arguments: tuple[Any, ...], num_workers: int, what: str
) -> Iterator[Result]:
    """Yield `make(*arguments)(task)` for each task, in order, computed by `num_workers` processes (1: in this one).

    Raises:
        BuildFailed: a worker process died; says in which part of the work.
    """
    if num_workers == 1:
        function = make(*arguments)
        yield from map(function, tasks)
        return
    with ProcessPoolExecutor(num_workers, initializer=_set_worker, initargs=(make, *arguments)) as pool:
        waiting: list[Future] = []
        number = 0
        try:
            for task in tasks:
                waiting.append(pool.submit(_run_task, task))
                # Bounded: reading must not run ahead of the workers.
                if len(waiting) >= 4 * num_workers:
                    yield waiting.pop(0).result()
                    number += 1
            while waiting:
                yield waiting.pop(0).result()
                number += 1
        except BrokenProcessPool as error:
            raise BuildFailed(
                f"a worker process died while {what}, part {number} (out of memory? killed?); nothing was left behind: run the"
                " same command again, with fewer --workers if memory is short"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


class _Extract:
    """Documents -> their sentences; a document that breaks its parser becomes None."""

    def __init__(self, language: str) -> None:
        self.language = language

    def __call__(self, documents: list[RawDocument]) -> list[list[str] | None]:
        result: list[list[str] | None] = []
        for document in documents:
            try:
                result.append(sentences_of(document, self.language))
            except Exception:
                # One page in a million defeats the wikitext parser; it is counted, and the rest goes on.
                result.append(None)
        return result


class _Tokenise:
    """Documents -> (tokens, documents without any, documents that broke their parser)."""

    def __init__(self, words: list[str], settings: TokenizerSettings, language: str) -> None:
        self.encoder, self.extract = Encoder(words, settings), _Extract(language)

    def __call__(self, documents: list[RawDocument]) -> tuple[TokenisedDocuments, int, int]:
        extracted = self.extract(documents)
        readable = [sentences for sentences in extracted if sentences is not None]
        tokens, lengths = self.encoder.encode([s for sentences in readable for s in sentences])
        owner = np.repeat(np.arange(len(readable)), [len(sentences) for sentences in readable])
        # A sentence of nothing but control characters has no tokens, and a document may have no sentence.
        counts = np.bincount(owner[lengths > 0], minlength=len(readable))
        documents_left = counts[counts > 0].astype(np.int64)
        tokenised = TokenisedDocuments(tokens, lengths[lengths > 0], documents_left)
        return tokenised, int((counts == 0).sum()), len(extracted) - len(readable)


class _Pair:
    """A range of a split's documents -> the arrays of their instances."""

    def __init__(self, directory: Path, dtype: np.dtype, documents: np.ndarray, settings: PairSettings) -> None:
        self.maker = PairMaker(TokenStore(directory, dtype), documents, settings)

    def __call__(self, task: tuple[range, int]) -> tuple[np.ndarray, ...]:
        return self.maker.instances(*task)


# ---- the build ----


def _progress(items: Iterable[Task], what: str, unit: str, quiet: bool, total: int | None = None) -> Iterator[Task]:
    wanted = False if os.environ.get("TEMPO_PROGRESS") == "1" else None
    return iter(tqdm(items, desc=what, unit=unit, total=total, disable=True if quiet else wanted, dynamic_ncols=True))


def _in_batches(items: Iterable[RawDocument], size: int) -> Iterator[list[RawDocument]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


@dataclass
class Build:
    """One build, from its command line; `run` does it in the order of its methods."""

    arguments: argparse.Namespace
    directory: Path
    settings: TokenizerSettings
    words: list[str] = field(default_factory=list)
    counts: list[SourceCounts] = field(default_factory=list)

    @property
    def num_workers(self) -> int:
        return self.arguments.workers

    def run(self) -> dict[str, Any]:
        """Build everything inside `directory`; return the manifest."""
        sources = [Source(spec, self.arguments.text_column) for spec in self.arguments.source]
        for source in sources:
            source.files()  # a wrong path stops here, not after hours on the sources before it
        work = self.directory / "work"
        work.mkdir()
        if self.arguments.vocab:
            self.words = read_vocabulary(self.arguments.vocab)
        else:
            self.words = self._train_vocabulary(sources, work / "sentences.txt")
        if self.arguments.train_vocab:
            sources = [self._extracted(source, work) for source in sources]
        (self.directory / VOCAB_NAME).write_bytes(vocabulary_bytes(self.words))
        store = self._tokenise(sources, work / "store")
        splits = {
            split: self._make_split(split, store, documents, work / split)
            for split, documents in self._split_documents(store.num_documents).items()
        }
        shutil.rmtree(work)
        return self._write_manifest(splits)

    # ---- vocabulary ----

    def _train_vocabulary(self, sources: list[Source], path: Path) -> list[str]:
        """Extract all text once, to a file a source, and train on it; tokenising then reads these files."""
        for number, source in enumerate(sources):
            documents = _progress(source.documents(), f"reading {source.spec}", " documents", self.arguments.quiet)
            tasks = _in_batches(documents, _DOCUMENTS_PER_TASK)
            with _extracted_path(path.parent, number).open("w", encoding="utf-8") as file:
                extract = in_order(tasks, _Extract, (self.arguments.language,), self.num_workers, f"reading {source.spec}")
                for batch in extract:
                    for sentences in batch:
                        if sentences is None:
                            source.count("unparsable")
                        elif not sentences:
                            source.count("no_text")
                        else:
                            file.write(json.dumps(sentences, ensure_ascii=False) + "\n")

        def texts() -> Iterator[str]:
            for number in range(len(sources)):
                with _extracted_path(path.parent, number).open(encoding="utf-8") as file:
                    for line in file:
                        yield from json.loads(line)

        self._say(f"training a vocabulary of {self.arguments.train_vocab:,} entries")
        return train_vocabulary(texts, self.arguments.train_vocab, self.settings)

    def _extracted(self, source: Source, work: Path) -> Source:
        number = self.arguments.source.index(source.spec)
        return _ExtractedSource(source.spec, skipped=source.skipped, path=_extracted_path(work, number))

    # ---- tokens ----

    def _tokenise(self, sources: list[Source], directory: Path) -> TokenStore:
        encoder_arguments = (self.words, self.settings, self.arguments.language)
        unknown_id = self.words.index("[UNK]")
        writer = TokenStoreWriter(directory)
        for source in sources:
            counts = SourceCounts(source.spec, skipped=source.skipped)
            self.counts.append(counts)
            documents = _progress(source.documents(), f"tokenising {source.spec}", " documents", self.arguments.quiet)
            tasks = _in_batches(documents, _DOCUMENTS_PER_TASK)
            what = f"tokenising {source.spec}"
            for tokenised, no_text, unparsable in in_order(tasks, _Tokenise, encoder_arguments, self.num_workers, what):
                writer.append(tokenised)
                counts.add(tokenised, unknown_id)
                for reason, count in (("no_text", no_text), ("unparsable", unparsable)):
                    if count:
                        source.skipped[reason] = source.skipped.get(reason, 0) + count
            self._check_source(counts)
        writer.close()
        self._check_documents()
        return TokenStore(directory, Encoder(self.words, self.settings).dtype)

    def _check_source(self, counts: SourceCounts) -> None:
        if counts.documents == 0:
            left_out = f" (left out: {counts.skipped})" if counts.skipped else ""
            raise ValueError(f"--source '{counts.source}' has no document with text{left_out}: check the path and the format")
        rate = counts.unknown_tokens / counts.tokens
        if rate > self.arguments.max_unknown_rate:
            raise ValueError(
                f"--source '{counts.source}': {rate:.1%} of the tokens are [UNK], above --max-unknown-rate"
                f" {self.arguments.max_unknown_rate:.1%}: the vocabulary does not fit this text; train one with --train-vocab"
            )

    def _check_documents(self) -> None:
        documents, sentences = sum(c.documents for c in self.counts), sum(c.sentences for c in self.counts)
        if documents < 2:
            raise ValueError(
                "the corpus is a single document, and random next sentences must come from another one: separate documents by a"
                " blank line (text:) or give one file each (files:)"
            )
        if sentences < _MIN_SENTENCES_PER_DOCUMENT * documents:
            raise ValueError(
                f"the corpus has {sentences:,} sentences in {documents:,} documents, and next-sentence pairs need at least 2 per"
                " document: is there a blank line after every sentence (text:)? Blank lines separate documents only"
            )

    # ---- pairs and shards ----

    def _split_documents(self, num_documents: int) -> dict[str, np.ndarray]:
        fraction, numbers = self.arguments.eval_fraction, np.arange(num_documents)
        if fraction == 0:
            return {"train": numbers}
        held_out = np.zeros(num_documents, dtype=bool)
        # The documents whose hash is smallest: exactly the share that was asked for, at random.
        held_out[np.argsort(mix_keys(self.arguments.seed, _HELD_OUT, numbers))[: round(fraction * num_documents)]] = True
        splits = {"train": numbers[~held_out], "eval": numbers[held_out]}
        for split, documents in splits.items():
            if len(documents) < 2:
                raise ValueError(
                    f"--eval-fraction {fraction} leaves {len(documents)} of {num_documents} documents to the {split} split, which"
                    " needs at least 2: choose another fraction or --seed"
                )
        return splits

    def _make_split(self, split: str, store: TokenStore, documents: np.ndarray, directory: Path) -> list[ShardSummary]:
        pair_settings = PairSettings(
            max_seq_length=self.arguments.max_seq_length,
            short_seq_prob=self.arguments.short_seq_prob,
            seed=self.arguments.seed,
            cls_id=self.words.index("[CLS]"),
            sep_id=self.words.index("[SEP]"),
        )
        ranges = [
            range(start, min(start + _PAIRED_DOCUMENTS_PER_TASK, len(documents)))
            for start in range(0, len(documents), _PAIRED_DOCUMENTS_PER_TASK)
        ]
        tasks = [(places, number) for number in range(self.arguments.duplicate_factor) for places in ranges]
        directory.mkdir()
        files = {name: (directory / f"{name}.bin").open("wb") for name in _INSTANCE_FILES}
        arguments = (directory.parent / "store", store.tokens.dtype, documents, pair_settings)
        results = in_order(tasks, _Pair, arguments, self.num_workers, f"pairing sentences of the {split} split")
        for arrays in _progress(results, f"pairing ({split})", " parts", self.arguments.quiet, len(tasks)):
            for file, array in zip(files.values(), arrays, strict=True):
                array.tofile(file)
        for file in files.values():
            file.close()
        dtypes = {name: dtype or store.tokens.dtype for name, dtype in _INSTANCE_FILES.items()}
        return self._write_shards(split, {name: map_array(directory / f"{name}.bin", dtypes[name]) for name in _INSTANCE_FILES})

    def _write_shards(self, split: str, arrays: dict[str, np.ndarray]) -> list[ShardSummary]:
        labels = arrays["is_random_next"]
        num_instances = len(labels)
        self._check_labels(split, labels)
        wanted = self.arguments.num_shards if split == "train" else self.arguments.eval_num_shards
        if wanted > num_instances:
            raise ValueError(
                f"{wanted} shards were asked for, but the {split} split has only {num_instances} instances: lower"
                f" {'--num-shards' if split == 'train' else '--eval-num-shards'}"
            )
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(arrays["lengths"])])
        attributes = self._attributes()
        summaries = []
        for k in _progress(range(wanted), f"writing shards ({split})", " shards", self.arguments.quiet, wanted):
            first, last = k * num_instances // wanted, (k + 1) * num_instances // wanted
            instances = Instances(
                arrays["tokens"][offsets[first] : offsets[last]],
                offsets[first : last + 1] - offsets[first],
                arrays["segment_b_start"][first:last],
                labels[first:last],
            )
            summaries.append(write_shard(self.directory / f"{split}_{k:05d}.hdf5", instances, attributes))
        return summaries

    def _check_labels(self, split: str, labels: np.ndarray) -> None:
        rate = float(labels.mean()) if len(labels) else 0.0
        if len(labels) >= _LABEL_CHECK_INSTANCES and not 0.4 <= rate <= 0.6:
            raise ValueError(
                f"{rate:.0%} of the {split} split's next sentences are random, and it should be about half: most documents are a"
                " single sentence, or single sentences are longer than --max-seq-length; check the source's format (text: is one"
                " sentence a line, a blank line between documents)"
            )

    def _attributes(self) -> ShardAttributes:
        return ShardAttributes(
            max_seq_length=self.arguments.max_seq_length,
            vocab_size=len(self.words),
            vocab_hash=vocabulary_hash(self.words),
            tokenizer=settings_dict(self.settings),
            creation=creation_parameters(self.arguments),
            sources=[counts.to_dict() for counts in self.counts],
        )

    def _write_manifest(self, splits: dict[str, list[ShardSummary]]) -> dict[str, Any]:
        attributes = self._attributes()
        manifest = {
            "splits": {split: [asdict(summary) for summary in summaries] for split, summaries in splits.items()},
            "max_seq_length": attributes.max_seq_length,
            "vocab": {"file": VOCAB_NAME, "size": attributes.vocab_size, "hash": attributes.vocab_hash},
            "tokenizer": attributes.tokenizer,
            "sources": attributes.sources,
            "creation": attributes.creation,
            "totals": {
                "documents": sum(c.documents for c in self.counts),
                "sentences": sum(c.sentences for c in self.counts),
                "instances": sum(s.num_instances for summaries in splits.values() for s in summaries),
                "tokens": sum(s.num_tokens for summaries in splits.values() for s in summaries),
            },
        }
        write_manifest(self.directory, manifest)
        return manifest

    def _say(self, text: str) -> None:
        if not self.arguments.quiet:
            print(text, file=sys.stderr, flush=True)


def _extracted_path(work: Path, number: int) -> Path:
    return work / f"extracted_{number}.jsonl"


@dataclass
class _ExtractedSource(Source):
    """A source whose sentences were extracted already, for training the vocabulary."""

    path: Path = Path()

    def documents(self) -> Iterator[RawDocument]:
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                yield RawDocument(lines=json.loads(line))


def creation_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """What decides the bytes of the result: options, input files and library versions; not workers, not paths of output."""
    keys = (
        "source", "text_column", "language", "train_vocab", "cased", "max_seq_length", "short_seq_prob", "duplicate_factor",
        "num_shards", "eval_fraction", "eval_num_shards", "seed",
    )  # fmt: skip
    parameters = {key: getattr(arguments, key) for key in keys}
    files = [path for spec in arguments.source for path in Source(spec).files()]
    parameters["input_bytes"] = {path.name: path.stat().st_size for path in files}
    if arguments.vocab:
        parameters["vocab"] = vocabulary_hash(read_vocabulary(arguments.vocab))
    libraries = ("tokenizers", "sentencex", "mwparserfromhell")
    parameters["versions"] = {library: version(library) for library in libraries}
    return parameters


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
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core); same result")
    add("--seed", type=int, default=42, help="of pairs and of the held-out split (default: 42)")
    add("--overwrite", action="store_true", help="replace DIR if it holds something else")
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
    for spec in arguments.source:
        Source(spec).files()


def _is_built(output: Path, arguments: argparse.Namespace) -> bool:
    """Whether `output` holds the very result already; raises where it holds something else."""
    if not output.exists():
        return False
    if not output.is_dir():
        raise ValueError(f"--output {output} is a file; choose a directory")
    manifest = read_manifest(output)
    if manifest is not None and manifest["creation"] == json.loads(json.dumps(creation_parameters(arguments))):
        return True
    if any(output.iterdir()) and not arguments.overwrite:
        what = "shards made with other parameters or of other input" if manifest is not None else "other files"
        raise ValueError(f"--output {output} holds {what}: choose another directory, or replace it with --overwrite")
    return False


def _replace(finished: Path, output: Path) -> None:
    """Give a finished directory its name; what was there goes only once the new one is complete."""
    old = finished.with_name(finished.name + ".old")
    if output.exists():
        output.rename(old)
    finished.rename(output)
    shutil.rmtree(old, ignore_errors=True)


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


def run(arguments: argparse.Namespace) -> int:
    """Build what the command line says.

    Raises:
        ValueError: the user's mistakes.
        BuildFailed: a worker died.
    """
    _check(arguments)
    output = arguments.output.absolute()
    if _is_built(output, arguments):
        print(f"{arguments.output} is built already with these parameters; nothing to do")
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        directory.chmod(0o755)
        manifest = Build(arguments, directory, TokenizerSettings(lowercase=not arguments.cased)).run()
        _replace(directory, output)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not arguments.quiet:
        _print_summary(manifest, arguments.output)
    return 0


__all__ = ["MANIFEST_NAME", "NUM_SPECIAL", "Build", "BuildFailed", "add_arguments", "creation_parameters", "in_order", "run"]
