from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_prep import tokenization
from data_prep.tokenization import (
    SPECIAL_TOKENS,
    Encoder,
    TokenizerSettings,
    check_case,
    read_vocabulary,
    train_vocabulary,
    vocabulary_bytes,
    vocabulary_hash,
)

ROOT = Path(__file__).parents[2]
VOCABULARY = ROOT / "tests/data/vocab_bert_uncased_30522.txt"
FUZZED_WORDS = [*SPECIAL_TOKENS, *(chr(c) for c in range(33, 500)), *(f"##{chr(c)}" for c in range(33, 500))]
AWKWARD = [
    "Hello, world! It's 3.50 € (about $4).",
    "naïve café ÅNGSTRÖM İstanbul ß ﬁne",
    "中文字符 和 日本語テキスト 한국어",
    "control\x1cchars\x0bjoin\x85here tab\tand\u2028line\u00a0space\u200bzero\u3000wide",
    "[MASK] [SEP] [CLS] in the text, [unused1] too",
    "a" * 150 + " " + "b" * 99,
    "emoji 😀👍🏽 e\u0301 combining \u0301 alone",
    "\x00 null \ufffd replacement \ufeff mark",
    "",
    "   ",
    "don't stop-believing re-entry 10^6 a_b <tag> #tag",
    "Ελληνικά кириллица עברית العربية हिन्दी ไทย",
]


def plain_tokenizer(words: list[str], lowercase: bool) -> Tokenizer:
    """The library's own way, without any cache."""
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


@pytest.mark.parametrize("lowercase", [True, False])
def test_cached_chunks_give_the_tokenizers_own_ids(lowercase: bool) -> None:
    words = read_vocabulary(VOCABULARY)
    texts = AWKWARD + [line for path in sorted(ROOT.glob("*.md")) for line in path.read_text(encoding="utf-8").splitlines()]
    encoder = Encoder(words, TokenizerSettings(lowercase=lowercase))
    reference = plain_tokenizer(words, lowercase)
    for _ in range(2):  # the second time from the cache
        tokens, lengths = encoder.encode(texts)
        expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
        assert lengths.tolist() == [len(ids) for ids in expected]
        assert tokens.tolist() == [i for ids in expected for i in ids]
    assert tokens.dtype == np.uint16


def test_every_code_point_as_a_separator_agrees() -> None:
    """White space, control and format characters between letters: where BERT joins and where it cuts."""
    words = [*SPECIAL_TOKENS, "a", "b", "##b", "ab"]
    encoder, reference = Encoder(words, TokenizerSettings()), plain_tokenizer(words, True)
    for code in [*range(0x250), *range(0x2000, 0x2070), 0x1680, 0x180E, 0x3000, 0xFEFF, 0xFFFD, 0x85]:
        text = f"a{chr(code)}b"
        assert encoder.encode([text])[0].tolist() == reference.encode(text, add_special_tokens=False).ids, hex(code)


def test_special_tokens_in_the_text_are_not_special() -> None:
    words = read_vocabulary(VOCABULARY)
    tokens, _ = Encoder(words, TokenizerSettings()).encode(["[MASK] and [SEP]"])
    assert not {words.index("[MASK]"), words.index("[SEP]")} & set(tokens.tolist())


CORPUS = [
    "the cat sat on the mat",
    "a naïve café, 中文 and кириллица",
    "cats and dogs sat; mats and bats",
    "the the the 12 121",
] * 3
TRAINER = (
    "import sys; from data_prep.tokenization import *; from tests.data_prep.test_tokenization import CORPUS\n"
    "sys.stdout.buffer.write(vocabulary_bytes(train_vocabulary(lambda: CORPUS, 120, TokenizerSettings())))"
)


def test_training_gives_the_same_bytes_in_every_process() -> None:
    command = [sys.executable, "-c", TRAINER]
    runs = {subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout for _ in range(4)}
    assert len(runs) == 1


def test_a_trained_vocabulary_is_valid_and_covers_its_corpus() -> None:
    words = train_vocabulary(lambda: CORPUS, 120, TokenizerSettings())
    assert words[: len(SPECIAL_TOKENS)] == list(SPECIAL_TOKENS)
    assert len(set(words)) == len(words) <= 120
    encoder = Encoder(words, TokenizerSettings())
    common, _ = encoder.encode(["the cat sat on the mat and"])
    assert words.index("[UNK]") not in common
    assert any(len(word) > 3 and not word.startswith("[") for word in words), "merges were learnt"


def test_cased_keeps_case_and_accents() -> None:
    words = train_vocabulary(lambda: ["The Café", "the café"] * 5, 200, TokenizerSettings(lowercase=False))
    assert "T" in words
    assert any("é" in word for word in words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n", r"lacks \[MASK\]"),
        ("word\n[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n", r"must begin with \[PAD\]"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx\nx\n", "lists 'x' twice"),
    ],
)
def test_a_vocabulary_that_cannot_serve_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_vocabulary(path)


def test_unreadable_vocabularies_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the vocabulary"):
        read_vocabulary(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"[PAD]\n\xe9\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_vocabulary(tmp_path / "latin.txt")


def test_bytes_and_windows_line_ends_round_trip(tmp_path: Path) -> None:
    words = read_vocabulary(VOCABULARY)
    path = tmp_path / "vocab.txt"
    path.write_bytes(vocabulary_bytes(words).replace(b"\n", b"\r\n"))
    assert read_vocabulary(path) == words
    assert vocabulary_hash(words) == vocabulary_hash(read_vocabulary(path))


def test_a_cased_vocabulary_needs_cased_text() -> None:
    cased = [*SPECIAL_TOKENS, *(f"Word{i}" for i in range(40)), *(f"word{i}" for i in range(100))]
    with pytest.raises(ValueError, match=r"v\.txt is of a cased model .40 of 145 entries have capital letters.: add --cased"):
        check_case(cased, TokenizerSettings(lowercase=True), "v.txt")
    check_case(cased, TokenizerSettings(lowercase=False), "v.txt")
    check_case(read_vocabulary(VOCABULARY), TokenizerSettings(lowercase=True), VOCABULARY)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=60))
def test_any_text_agrees_with_the_tokenizer(text: str) -> None:
    words = FUZZED_WORDS
    for lowercase in (True, False):
        encoder, reference = Encoder(words, TokenizerSettings(lowercase=lowercase)), plain_tokenizer(words, lowercase)
        assert encoder.encode([text])[0].tolist() == reference.encode(text, add_special_tokens=False).ids


def test_a_forgotten_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "_MAX_CACHED_CHUNKS", 5)
    words = read_vocabulary(VOCABULARY)
    small, large = Encoder(words, TokenizerSettings()), Encoder(words, TokenizerSettings())
    monkeypatch.undo()
    for text in ("one two three", "four five one", "two three four five six seven eight", "one"):
        monkeypatch.setattr(tokenization, "_MAX_CACHED_CHUNKS", 5)
        found = small.encode([text])[0].tolist()
        monkeypatch.undo()
        assert found == large.encode([text])[0].tolist()
