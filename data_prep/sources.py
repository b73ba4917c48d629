"""Where text comes from: each source yields documents.

wikipedia-dump:FILE      a MediaWiki XML dump, .bz2 or plain
wikipedia:20231101.en    Wikipedia through the `datasets` library
hf:NAME[:CONFIG]         any dataset of the `datasets` library, or a directory or file it can load
text:GLOB                one sentence a line, a blank line between documents
files:GLOB               one document a file
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.sentences import split_sentences
from data_prep.wikitext import Page, paragraphs, read_dump

KINDS = ("wikipedia-dump", "wikipedia", "hf", "text", "files")
_LOCAL_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}


@dataclass(frozen=True)
class RawDocument:
    """A document as it was read; `sentences_of` does the work that a worker process should do.

    Exactly one field is set: a wiki page, plain text to split, or lines that are sentences already.
    """

    page: Page | None = None
    text: str | None = None
    lines: list[str] | None = None


def sentences_of(document: RawDocument, language: str) -> list[str]:
    """Return a document's sentences."""
    if document.lines is not None:
        return document.lines
    blocks = paragraphs(document.page) if document.page is not None else (document.text or "").splitlines()
    return [sentence for block in blocks if block.strip() for sentence in split_sentences(block, language)]


@dataclass
class Source:
    """A source by its specification, such as "text:corpus/*.txt".

    Attributes:
        spec: as given on the command line.
        skipped: what was left out, by reason; filled while reading.
    """

    spec: str
    text_column: str = "text"
    skipped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kind, colon, self.argument = self.spec.partition(":")
        if self.kind not in KINDS or not colon or not self.argument:
            raise ValueError(f"--source '{self.spec}' must be one of {', '.join(k + ':…' for k in KINDS)}")

    def files(self) -> list[Path]:
        """Return the files that the source reads, in order; none for datasets.

        Raises:
            ValueError: nothing matches.
        """
        if self.kind in ("wikipedia", "hf"):
            return []
        found = sorted(Path(name) for name in glob.glob(self.argument, recursive=True) if Path(name).is_file())
        if not found:
            raise ValueError(f"--source '{self.spec}': no file matches '{self.argument}'")
        return found

    def count(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def documents(self) -> Iterator[RawDocument]:
        """Yield the documents, in a fixed order."""
        readers: dict[str, Callable[[], Iterator[RawDocument]]] = {
            "wikipedia-dump": self._from_dump,
            "wikipedia": lambda: self._from_datasets("wikimedia/wikipedia", self.argument),
            "hf": self._from_any_dataset,
            "text": self._from_text,
            "files": self._from_files,
        }
        return readers[self.kind]()

    def _from_dump(self) -> Iterator[RawDocument]:
        for path in self.files():
            for page in read_dump(path, self.skipped):
                yield RawDocument(page=page)

    def _from_any_dataset(self) -> Iterator[RawDocument]:
        path = Path(self.argument)
        if path.is_file() and path.suffix in _LOCAL_BUILDERS:
            return self._from_datasets(_LOCAL_BUILDERS[path.suffix], None, data_files=str(path))
        if path.exists():
            return self._from_datasets(self.argument, None)
        name, _, config = self.argument.partition(":")
        return self._from_datasets(name, config or None)

    def _from_datasets(self, name: str, config: str | None, **arguments: Any) -> Iterator[RawDocument]:
        import datasets

        try:
            dataset = datasets.load_dataset(name, config, split="train", streaming=True, **arguments)
            columns = dataset.column_names or list(next(iter(dataset)))
        except StopIteration:
            return
        except Exception as error:
            raise ValueError(
                f"--source '{self.spec}': the datasets library cannot load it ({type(error).__name__}: {error})"
            ) from error
        if self.text_column not in columns:
            raise ValueError(
                f"--source '{self.spec}' has no column '{self.text_column}' (it has: {', '.join(columns)}): name the right one"
                " with --text-column"
            )
        for row in dataset:
            yield RawDocument(text=row[self.text_column] or "")

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            self.count("invalid_utf8_replaced")
            return raw.decode("utf-8-sig", errors="replace")

    def _from_text(self) -> Iterator[RawDocument]:
        for path in self.files():
            lines: list[str] = []
            with path.open("rb") as file:
                for raw in file:
                    line = self._decoded(raw).strip()
                    if line:
                        lines.append(line)
                    elif lines:
                        yield RawDocument(lines=lines)
                        lines = []
            if lines:
                yield RawDocument(lines=lines)

    def _from_files(self) -> Iterator[RawDocument]:
        for path in self.files():
            yield RawDocument(text=self._decoded(path.read_bytes()))
