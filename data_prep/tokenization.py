"""WordPiece through `tokenizers`: vocabularies given or trained, and a fast exact encoder."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.shards import VOCAB_NAME, token_dtype

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# BERT's cleaning deletes these control characters, so that their neighbours join; str.split would cut there.
_DELETED = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
# Distinct white-space-separated chunks whose ids are remembered; about 200 bytes each.
_MAX_CACHED_CHUNKS = 1_000_000


@dataclass(frozen=True)
class TokenizerSettings:
    """How text becomes tokens; travels with the shards.

    Attributes:
        lowercase: uncased model: letters lower-cased, accents stripped.
        word_pieces_prefix: marks the continuation of a word.
        max_characters_per_word: longer words become [UNK].
    """

    lowercase: bool = True
    word_pieces_prefix: str = "##"
    max_characters_per_word: int = 100


def check_vocabulary(words: list[str], path: Path | str) -> None:
    """Raise ValueError where a vocabulary cannot serve BERT."""
    missing = [token for token in SPECIAL_TOKENS if token not in words]
    if missing:
        raise ValueError(f"the vocabulary {path} lacks {', '.join(missing)}: BERT needs {', '.join(SPECIAL_TOKENS)}, one a line")
    if words[0] != "[PAD]":
        raise ValueError(f"the vocabulary {path} must begin with [PAD] (padding is token 0), but begins with {words[0]!r}")
    if len(set(words)) < len(words):
        seen: set[str] = set()
        twice = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise ValueError(f"the vocabulary {path} lists {twice!r} twice")


def check_case(words: list[str], settings: TokenizerSettings, path: Path | str) -> None:
    """Raise ValueError where text would be lower-cased for a vocabulary of a cased model: its capitals could never occur."""
    num_capital = sum(word != word.lower() for word in words if not word.startswith("["))
    if settings.lowercase and num_capital > len(words) // 10:
        raise ValueError(
            f"the vocabulary {path} is of a cased model ({num_capital:,} of {len(words):,} entries have capital letters):"
            " add --cased"
        )


def read_vocabulary(path: Path) -> list[str]:
    """Return the words of a vocab.txt, one a line, in id order.

    Raises:
        ValueError: unreadable, not UTF-8, or without BERT's special tokens.
    """
    try:
        words = path.read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read the vocabulary {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the vocabulary {path} is not UTF-8 ({error})") from error
    words = [word.rstrip("\r") for word in words]
    while words and not words[-1]:
        words.pop()
    check_vocabulary(words, path)
    return words


def find_vocabulary(shard: Path, given: Path | None = None) -> list[str] | None:
    """Return the words of the vocabulary named by the user, or of vocab.txt beside a shard; None where there is neither."""
    if given is not None:
        return read_vocabulary(given)
    beside = shard.parent / VOCAB_NAME
    return read_vocabulary(beside) if beside.is_file() else None


def vocabulary_bytes(words: list[str]) -> bytes:
    """The content of vocab.txt."""
    return ("\n".join(words) + "\n").encode("utf-8")


def vocabulary_hash(words: list[str]) -> str:
    return hashlib.sha256(vocabulary_bytes(words)).hexdigest()


def _normalizer(settings: TokenizerSettings) -> Any:
    from tokenizers import normalizers

    return normalizers.BertNormalizer(lowercase=settings.lowercase)


def _new_tokenizer(model: Any, settings: TokenizerSettings) -> Any:
    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(settings)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _alphabet(texts: Iterable[str], settings: TokenizerSettings, limit: int) -> list[str]:
    """The `limit` most frequent characters after normalisation; ties by code point."""
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(text)
    normalise = _normalizer(settings).normalize_str
    counts: Counter[str] = Counter()
    for character, count in raw.items():
        # Character by character, since few are distinct: BERT's normalisation does not look at neighbours.
        for normalised in normalise(character):
            if not normalised.isspace():
                counts[normalised] += count
    return sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:limit]


def _train(texts: Iterable[str], size: int, settings: TokenizerSettings, reserved: list[str], alphabet: list[str]) -> list[str]:
    from tokenizers import models, trainers

    tokenizer = _new_tokenizer(models.WordPiece(unk_token="[UNK]"), settings)
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=reserved,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=settings.word_pieces_prefix,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(ids, key=ids.__getitem__)


def train_vocabulary(texts: Callable[[], Iterable[str]], size: int, settings: TokenizerSettings) -> list[str]:
    """Train a WordPiece vocabulary; the same texts give the same words in the same order, run after run.

    The library numbers the continuing characters (##a, ##b, ...) in the order of a hash table that differs from process to
    process, and breaks ties between merges by these numbers. So a first pass without merges finds them, and they are handed
    to the second in sorted order. At most a quarter of the vocabulary is single characters; the rarest become [UNK].

    Args:
        texts: returns the pieces of text; called once a pass.
        size: entries wanted; a small corpus gives fewer.
    """
    alphabet = _alphabet(texts(), settings, max(size // 8, 1))
    prefix = settings.word_pieces_prefix
    found = _train(texts(), 0, settings, list(SPECIAL_TOKENS), alphabet)
    continuing = sorted(word for word in found if word.startswith(prefix) and len(word) == len(prefix) + 1)
    return _train(texts(), size, settings, [*SPECIAL_TOKENS, *continuing], alphabet)


class Encoder:
    """Encodes text exactly as the tokenizer does, remembering the ids of white-space-separated chunks.

    BERT's pre-tokenizer never joins across white space, so a text's ids are its chunks' ids, end to end.
    """

    def __init__(self, words: list[str], settings: TokenizerSettings) -> None:
        from tokenizers import models

        # No special token is registered: "[MASK]" in a text is a bracket, a word and a bracket.
        self._tokenizer = _new_tokenizer(
            models.WordPiece(
                {word: i for i, word in enumerate(words)},
                unk_token="[UNK]",
                continuing_subword_prefix=settings.word_pieces_prefix,
                max_input_chars_per_word=settings.max_characters_per_word,
            ),
            settings,
        )
        self.dtype = token_dtype(len(words))
        self.unknown_id = words.index("[UNK]")
        self._cache: dict[str, list[int]] = {}

    def encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of all sentences end to end, and the number of each sentence's tokens (int64)."""
        chunks = [(_DELETED.sub("", s) if _DELETED.search(s) else s).split() for s in sentences]
        cache = self._cache
        new = list({chunk: None for parts in chunks for chunk in parts if chunk not in cache})
        if len(cache) + len(new) > _MAX_CACHED_CHUNKS:
            cache.clear()
            new = list({chunk: None for parts in chunks for chunk in parts})
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False) if new else []
        cache.update((chunk, encoding.ids) for chunk, encoding in zip(new, encodings, strict=True))
        ids = [[i for chunk in parts for i in cache[chunk]] for parts in chunks]
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        tokens = np.fromiter((i for sentence in ids for i in sentence), dtype=self.dtype, count=int(lengths.sum()))
        return tokens, lengths


def settings_dict(settings: TokenizerSettings) -> dict[str, Any]:
    return {"type": "WordPiece", **asdict(settings)}
