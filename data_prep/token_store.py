"""Tokenised documents on disk, memory-mapped: what sentence pairs are made from, whatever the size of the corpus.

Files in a directory: tokens.bin (uint16 or uint32), sentence_starts.bin (int64), document_starts.bin (int64).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

_TOKENS, _SENTENCES, _DOCUMENTS = "tokens.bin", "sentence_starts.bin", "document_starts.bin"


@dataclass(frozen=True)
class TokenisedDocuments:
    """Some documents: all tokens end to end, the length of each sentence, the number of sentences of each document."""

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    document_sentences: np.ndarray


class TokenStoreWriter:
    """Appends documents in order."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._tokens = (directory / _TOKENS).open("wb")
        self._starts = [_StartsFile(directory / name) for name in (_SENTENCES, _DOCUMENTS)]

    def append(self, documents: TokenisedDocuments) -> None:
        documents.tokens.tofile(self._tokens)
        self._starts[0].append(documents.sentence_lengths)
        self._starts[1].append(documents.document_sentences)

    def close(self) -> None:
        for file in (self._tokens, *(starts.file for starts in self._starts)):
            file.close()


class _StartsFile:
    """Where each of consecutive things starts, and where the last one ends; on disk, since a large corpus has 10^8 sentences."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self._end = 0
        np.zeros(1, np.int64).tofile(self.file)

    def append(self, lengths: np.ndarray) -> None:
        if len(lengths):
            ends = self._end + np.cumsum(lengths, dtype=np.int64)
            ends.tofile(self.file)
            self._end = int(ends[-1])


def map_array(path: Path, dtype: np.dtype | type) -> np.ndarray:
    """Memory-map a file of numbers; an empty one is an empty array."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    # As a plain array: np.memmap makes every small slice slow.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


class TokenStore:
    """The documents, addressed by number; nothing is held in memory.

    Attributes:
        tokens: [total].
        sentence_starts: int64 [sentences + 1], places in `tokens`.
        document_starts: int64 [documents + 1], numbers of sentences.
    """

    def __init__(self, directory: Path, dtype: np.dtype) -> None:
        self.tokens = map_array(directory / _TOKENS, dtype)
        self.sentence_starts = map_array(directory / _SENTENCES, np.int64)
        self.document_starts = map_array(directory / _DOCUMENTS, np.int64)

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1
