from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.pairs import Draws, PairMaker, PairSettings, truncated
from data_prep.token_store import TokenisedDocuments, TokenStore, TokenStoreWriter

CLS, SEP = 2, 3


def make_store(tmp_path: Path, documents: list[list[int]]) -> TokenStore:
    """Documents by the lengths of their sentences; token values count up, so that every token says where it is from."""
    lengths = np.array([n for document in documents for n in document], dtype=np.int64)
    writer = TokenStoreWriter(tmp_path / "store")
    tokens = np.arange(10, 10 + lengths.sum(), dtype=np.uint16)
    writer.append(TokenisedDocuments(tokens, lengths, np.array([len(d) for d in documents], dtype=np.int64)))
    writer.close()
    return TokenStore(tmp_path / "store", np.dtype(np.uint16))


def make_pairs(store: TokenStore, max_seq_length: int = 32, short: float = 0.1, seed: int = 0) -> PairMaker:
    return PairMaker(store, np.arange(store.num_documents), PairSettings(max_seq_length, short, seed, CLS, SEP))


def random_documents(num: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 15, size=rng.integers(2, 20)).tolist() for _ in range(num)]


def document_of(store: TokenStore, token: int) -> int:
    sentence = int(np.searchsorted(store.sentence_starts, token, side="right")) - 1
    return int(np.searchsorted(store.document_starts, sentence, side="right")) - 1


def test_instances_keep_the_rules(tmp_path: Path) -> None:
    store = make_store(tmp_path, random_documents(60))
    maker = make_pairs(store)
    tokens, lengths, b_start, is_random = maker.instances(range(60), 0)
    ends = np.cumsum(lengths)
    assert lengths.max() <= 32
    for end, length, b, random in zip(ends, lengths, b_start, is_random, strict=True):
        row = tokens[end - length : end].astype(int)
        assert row[0] == CLS
        assert row[b - 1] == SEP
        assert row[-1] == SEP
        a, second = row[1 : b - 1], row[b:-1]
        assert len(a) >= 1
        assert len(second) >= 1
        # Each side is one run of consecutive tokens of one document.
        assert (np.diff(a) == 1).all()
        assert (np.diff(second) == 1).all()
        documents = {document_of(store, a[0] - 10), document_of(store, a[-1] - 10)}
        others = {document_of(store, second[0] - 10), document_of(store, second[-1] - 10)}
        assert len(documents) == len(others) == 1
        assert (documents != others) == bool(random)
        if not random:
            assert second[0] > a[-1]


def test_about_half_of_the_pairs_are_random_and_rows_are_full(tmp_path: Path) -> None:
    store = make_store(tmp_path, random_documents(400))
    _, lengths, _, is_random = make_pairs(store, max_seq_length=48).instances(range(400), 0)
    n = len(is_random)
    # A document's last sentence alone can only go with a random one, so the rate lies a little above one half.
    assert 0.5 - 3 * 0.5 / n**0.5 < is_random.mean() < 0.6
    assert lengths.mean() > 0.7 * 48


def test_every_token_of_the_corpus_is_used_by_some_a_or_following_b(tmp_path: Path) -> None:
    store = make_store(tmp_path, [[3, 4, 5], [2, 2], [6, 1, 1, 1]])
    tokens, *_ = make_pairs(store, max_seq_length=64, short=0.0).instances(range(3), 0)
    assert set(range(10, 10 + len(store.tokens))) <= set(tokens.tolist())


def test_draws_depend_on_seed_pass_and_document_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path, random_documents(40))

    def rows(seed: int = 0, number: int = 0) -> list[tuple]:
        return [pair for place in range(40) for pair in make_pairs(store, seed=seed).pairs(place, number)]

    assert rows() == rows()
    assert rows() != rows(seed=1)
    assert rows() != rows(number=1)
    whole = make_pairs(store).instances(range(40), 0)
    parts = [make_pairs(store).instances(range(i, i + 8), 0) for i in range(0, 40, 8)]
    for a, b in zip(whole, (np.concatenate(x) for x in zip(*parts, strict=True)), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("documents", [[[1], [1]], [[500], [3]], [[1] * 50, [200, 200]]])
def test_one_sentence_and_over_long_sentences(tmp_path: Path, documents: list[list[int]]) -> None:
    store = make_store(tmp_path, documents)
    tokens, lengths, _, is_random = make_pairs(store, max_seq_length=16).instances(range(2), 0)
    assert len(lengths) >= 2
    assert lengths.max() <= 16
    assert lengths.min() >= 5
    assert int(lengths.sum()) == len(tokens)
    if all(len(document) == 1 for document in documents):
        assert is_random.all()


def test_a_range_without_documents_has_no_instances(tmp_path: Path) -> None:
    store = make_store(tmp_path, [[1, 2], [3]])
    assert all(len(array) == 0 for array in make_pairs(store).instances(range(0), 0))


def test_truncation_takes_from_the_longer_side() -> None:
    draws = Draws(1)
    for length_a, length_b, limit in [(10, 3, 8), (3, 10, 8), (7, 7, 9), (1, 50, 2), (4, 4, 8), (100, 90, 61)]:
        (a0, a1), (b0, b1) = truncated((1000, 1000 + length_a), (2000, 2000 + length_b), limit, draws)
        kept_a, kept_b = a1 - a0, b1 - b0
        assert kept_a + kept_b == min(limit, length_a + length_b)
        assert 1000 <= a0 <= a1 <= 1000 + length_a
        assert 2000 <= b0 <= b1 <= 2000 + length_b
        if kept_a < length_a and kept_b < length_b:
            assert abs(kept_a - kept_b) <= 1
        elif kept_a < length_a:
            assert kept_a >= kept_b


def test_draws_are_uniform() -> None:
    draws = Draws(7)
    values = np.array([draws.below(10) for _ in range(20_000)])
    counts = np.bincount(values, minlength=10)
    assert (abs(counts - 2000) < 4 * np.sqrt(2000 * 0.9)).all()
    heads = np.array([draws.heads(100) for _ in range(2000)])
    assert abs(heads.mean() - 50) < 4 * 5 / 2000**0.5
