"""Tokenised documents on disk, memory-mapped: what sentence pairs are made from, whatever the size of the corpus.

Files in a directory: tokens.bin (uint16 or uint32), sentence_lengths.bin (int64), document_sentences.bin (int64).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

_FILES = ("tokens.bin", "sentence_lengths.bin", "document_sentences.bin")


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
        self._files = [(directory / name).open("wb") for name in _FILES]

    def append(self, documents: TokenisedDocuments) -> None:
        arrays = (documents.tokens, documents.sentence_lengths, documents.document_sentences)
        for file, array in zip(self._files, arrays, strict=True):
            array.tofile(file)

    def close(self) -> None:
        for file in self._files:
            file.close()


def map_array(path: Path, dtype: np.dtype | type) -> np.ndarray:
    """Memory-map a file of numbers; an empty one is an empty array."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


class TokenStore:
    """The documents, addressed by number.

    Attributes:
        tokens: [total], memory-mapped.
        sentence_starts: int64 [sentences + 1], places in `tokens`.
        document_starts: int64 [documents + 1], numbers of sentences.
    """

    def __init__(self, directory: Path, dtype: np.dtype) -> None:
        self.tokens = map_array(directory / _FILES[0], dtype)
        self.sentence_starts = _starts(map_array(directory / _FILES[1], np.int64))
        self.document_starts = _starts(map_array(directory / _FILES[2], np.int64))

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
