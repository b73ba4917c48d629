"""Sources -> sentences -> vocabulary -> a token store on disk, by worker processes, some documents at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.progress import progress
from data_prep.sources import RawDocument, Source, sentences_of
from data_prep.token_store import TokenisedDocuments, TokenStore, TokenStoreWriter
from data_prep.tokenization import Encoder, TokenizerSettings, train_vocabulary
from data_prep.worker_pool import in_order

# What a worker takes at a time: enough to outweigh passing it, little enough to balance and to fit into memory many times.
_DOCUMENTS_PER_TASK = 32
_CHARACTERS_PER_TASK = 1_000_000
_MIN_SENTENCES_PER_DOCUMENT = 2.0


@dataclass
class SourceCounts:
    """A source's line in the manifest."""

    source: str
    documents: int = 0
    sentences: int = 0
    tokens: int = 0
    instances: int = 0
    unknown_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def add(self, documents: TokenisedDocuments, unknown_id: int) -> None:
        self.documents += len(documents.document_sentences)
        self.sentences += len(documents.sentence_lengths)
        self.tokens += len(documents.tokens)
        self.unknown_tokens += int((documents.tokens == unknown_id).sum())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "unknown_token_rate": self.unknown_tokens / max(self.tokens, 1)}


class Extract:
    """Documents -> their sentences; a document that breaks its parser becomes None. Runs in a worker process."""

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


class Tokenise:
    """Documents -> (tokens, documents without any, documents that broke their parser). Runs in a worker process."""

    def __init__(self, words: list[str], settings: TokenizerSettings, language: str) -> None:
        self.encoder, self.extract = Encoder(words, settings), Extract(language)

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


def in_batches(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    """Group documents for the workers, by number and by size."""
    batch: list[RawDocument] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_characters
        if len(batch) == _DOCUMENTS_PER_TASK or size >= _CHARACTERS_PER_TASK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class CorpusReader:
    """Reads all sources.

    Attributes:
        language: of sentence splitting.
        num_workers: processes.
        quiet: show no progress.
    """

    language: str
    num_workers: int
    quiet: bool

    def train_vocabulary(
        self, sources: list[Source], size: int, settings: TokenizerSettings, work: Path
    ) -> tuple[list[str], list[Source]]:
        """Extract all sentences once, to a file a source in `work`, and train on them.

        Returns:
            The words, and sources that read the extracted sentences.
        """
        extracted: list[Source] = []
        paths = [work / f"extracted_{number}.jsonl" for number in range(len(sources))]
        for source, path in zip(sources, paths, strict=True):
            with path.open("w", encoding="utf-8") as file:
                for sentences in self._extract(source):
                    file.write(json.dumps(sentences, ensure_ascii=False) + "\n")
            if path.stat().st_size == 0:
                raise no_document(source.spec, source.skipped)
            extracted.append(_ExtractedSource(source.spec, skipped=source.skipped, path=path))

        def texts() -> Iterator[str]:
            for path in paths:
                with path.open(encoding="utf-8") as file:
                    for line in file:
                        yield from json.loads(line)

        if not self.quiet:
            print(f"training a vocabulary of {size:,} entries", file=sys.stderr, flush=True)
        return train_vocabulary(texts, size, settings), extracted

    def _extract(self, source: Source) -> Iterator[list[str]]:
        what = f"reading {source.spec}"
        tasks = in_batches(progress(source.documents(), what, " documents", self.quiet))
        for batch in in_order(tasks, Extract, (self.language,), self.num_workers, what):
            for sentences in batch:
                if sentences:
                    yield sentences
                else:
                    source.count("no_text" if sentences is not None else "unparsable")

    def tokenise(
        self, sources: list[Source], words: list[str], settings: TokenizerSettings, max_unknown_rate: float, directory: Path
    ) -> tuple[TokenStore, list[SourceCounts]]:
        """Write every document's tokens to a token store in `directory`.

        Raises:
            ValueError: a source without text, too many unknown tokens, too few documents or sentences to make pairs.
        """
        unknown_id = words.index("[UNK]")
        writer = TokenStoreWriter(directory)
        all_counts = []
        for source in sources:
            counts = SourceCounts(source.spec, skipped=source.skipped)
            all_counts.append(counts)
            what = f"tokenising {source.spec}"
            tasks = in_batches(progress(source.documents(), what, " documents", self.quiet))
            results = in_order(tasks, Tokenise, (words, settings, self.language), self.num_workers, what)
            for tokenised, no_text, unparsable in results:
                writer.append(tokenised)
                counts.add(tokenised, unknown_id)
                source.count("no_text", no_text)
                source.count("unparsable", unparsable)
            _check_source(counts, max_unknown_rate)
        writer.close()
        _check_documents(all_counts)
        return TokenStore(directory, Encoder(words, settings).dtype), all_counts


@dataclass
class _ExtractedSource(Source):
    """A source whose sentences were extracted already, for training the vocabulary."""

    path: Path = Path()

    def documents(self) -> Iterator[RawDocument]:
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                yield RawDocument(lines=json.loads(line))


def no_document(spec: str, skipped: dict[str, int]) -> ValueError:
    left_out = f" (left out: {', '.join(f'{count:,} {reason}' for reason, count in skipped.items())})" if skipped else ""
    return ValueError(f"--source '{spec}' has no document with text{left_out}: check the path and the format")


def _check_source(counts: SourceCounts, max_unknown_rate: float) -> None:
    if counts.documents == 0:
        raise no_document(counts.source, counts.skipped)
    rate = counts.unknown_tokens / counts.tokens
    if rate > max_unknown_rate:
        raise ValueError(
            f"--source '{counts.source}': {rate:.1%} of the tokens are [UNK], above --max-unknown-rate"
            f" {max_unknown_rate:.1%}: the vocabulary does not fit this text; train one with --train-vocab"
        )


def _check_documents(all_counts: list[SourceCounts]) -> None:
    documents, sentences = sum(c.documents for c in all_counts), sum(c.sentences for c in all_counts)
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
