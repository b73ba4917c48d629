"""Where text comes from: each source yields documents.

wikipedia-dump:FILE      a MediaWiki XML dump, .bz2 or plain
wikipedia:20231101.en    Wikipedia through the `datasets` library
hf:NAME[:CONFIG]         any dataset of the `datasets` library, or a directory or file it can load
text:GLOB                one sentence a line, a blank line between documents
files:GLOB               one document a file
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.sentences import split_sentences
from data_prep.wikitext import Page, paragraphs, read_dump

KINDS = ("wikipedia-dump", "wikipedia", "hf", "text", "files")
# A larger document is a corpus whose documents were not separated; it would have to be held in memory.
MAX_DOCUMENT_BYTES = 64 << 20
_MAX_WRAPPED_WIDTH = 100
_SENTENCE_ENDS = ".!?:;\"'”’)"
_END_INSIDE = re.compile(r"[a-z][.!?][\"'”’)]*\s+[A-Z]")
# As `grep` and `git` do: a file with a null byte at its beginning is not text.
_PROBED_BYTES = 8192
_LOCAL_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}


@dataclass(frozen=True)
class RawDocument:
    """A document as it was read; `sentences_of` does the work that a worker process should do.

    Exactly one field is set: a wiki page, plain text to split, or lines that are sentences already.
    """

    page: Page | None = None
    text: str | None = None
    lines: list[str] | None = None

    @property
    def num_characters(self) -> int:
        """How much there is to do; lines count as their number of average ones, which is quicker than adding them up."""
        if self.lines is not None:
            return 100 * len(self.lines)
        return len(self.text or "") + (len(self.page.text) if self.page is not None else 0)


def sentences_of(document: RawDocument, language: str) -> list[str]:
    """Return a document's sentences."""
    if document.lines is not None:
        return document.lines
    blocks = paragraphs(document.page) if document.page is not None else (document.text or "").splitlines()
    return [sentence for block in blocks if block.strip() for sentence in split_sentences(block, language)]


def unwrapped(text: str) -> str:
    """Join the lines of text that was broken at a fixed width, as books often are; return other text as it is.

    Such text has no long line, most lines stop in mid-sentence, and sentences end inside lines.
    """
    lines = [line.strip() for line in text.splitlines()]
    followed = [line for line, following in itertools.pairwise(lines) if line and following]
    in_mid_sentence = sum(line[-1] not in _SENTENCE_ENDS for line in followed)
    if not followed or max(map(len, lines)) > _MAX_WRAPPED_WIDTH or 2 * in_mid_sentence < len(followed):
        return text
    if sum(_END_INSIDE.search(line) is not None for line in followed) < len(followed) // 20 + 1:
        return text
    return re.sub(r"(?<=\S)[ \t]*\n[ \t]*(?=\S)", " ", "\n".join(lines))


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
        """Return the files that the source reads, in order; none for datasets from elsewhere.

        Raises:
            ValueError: nothing matches.
        """
        if self.kind == "wikipedia":
            return []
        if self.kind == "hf":
            path = Path(self.argument)
            return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        found = sorted(Path(name) for name in glob.glob(self.argument, recursive=True) if Path(name).is_file())
        if not found:
            hint = f": for a directory say '{self.kind}:{self.argument}/*.txt'" if Path(self.argument).is_dir() else ""
            raise ValueError(f"--source '{self.spec}': no file matches '{self.argument}'{hint}")
        return found

    def count(self, reason: str, times: int = 1) -> None:
        if times:
            self.skipped[reason] = self.skipped.get(reason, 0) + times

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
        try:
            for row in dataset:
                yield RawDocument(text=self._text_of(row[self.text_column]))
        except (ValueError, OSError):
            raise
        except Exception as error:
            raise RuntimeError(f"--source '{self.spec}': reading stopped ({type(error).__name__}: {error})") from error

    def _text_of(self, value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ValueError(
                f"--source '{self.spec}': column '{self.text_column}' holds {type(value).__name__}, not text: name another"
                " one with --text-column"
            )
        return value

    def _decoded(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            self.count("invalid_utf8_replaced")
            return raw.decode("utf-8-sig", errors="replace")

    def _check_text(self, path: Path) -> None:
        with path.open("rb") as file:
            if b"\0" in file.read(_PROBED_BYTES):
                raise ValueError(
                    f"--source '{self.spec}': {path} is not UTF-8 text (it has null bytes: compressed, binary or UTF-16?);"
                    " decompress it, or convert it with iconv -t UTF-8"
                )

    def _check_size(self, path: Path, num_bytes: int, cure: str) -> None:
        if num_bytes > MAX_DOCUMENT_BYTES:
            raise ValueError(f"--source '{self.spec}': a document of {path} has more than {MAX_DOCUMENT_BYTES >> 20} MiB; {cure}")

    def _from_text(self) -> Iterator[RawDocument]:
        for path in self.files():
            self._check_text(path)
            lines: list[str] = []
            size = 0
            with path.open("rb") as file:
                # A limit to the line too: reading one without an end would fill the memory.
                while raw := file.readline(MAX_DOCUMENT_BYTES + 1):
                    size += len(raw)
                    self._check_size(path, size, "put a blank line between documents, one sentence a line")
                    line = self._decoded(raw).strip()
                    if line:
                        lines.append(line)
                    else:
                        size = 0
                        if lines:
                            yield RawDocument(lines=lines)
                        lines = []
            if lines:
                yield RawDocument(lines=lines)

    def _from_files(self) -> Iterator[RawDocument]:
        for path in self.files():
            self._check_text(path)
            self._check_size(path, path.stat().st_size, "files: is one document a file, so cut it")
            yield RawDocument(text=unwrapped(self._decoded(path.read_bytes())))
