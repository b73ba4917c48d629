"""data_prep.masking: counts, the 80/10/10 rule, special tokens, independence of the batch, whole words."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.masking import MaskingRules, mask_instances, mix_keys, num_predictions
from tests.shard_factory import CLS, MASK, PAD, SEP, SPECIALS, UNK, words_of

VOCAB_SIZE = 300
WORDS = words_of(VOCAB_SIZE)
IGNORED = -100


def rules(**options: object) -> MaskingRules:
    return MaskingRules.from_vocabulary(WORDS, **options)  # type: ignore[arg-type]


def rows(num: int, width: int = 64, seed: int = 0, unknown_share: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Padded random instances: tokens [num, width], lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, width + 1, num)
    tokens = rng.integers(len(SPECIALS), VOCAB_SIZE, (num, width))
    tokens[rng.random((num, width)) < unknown_share] = UNK
    place = np.arange(width)
    tokens[:, 0] = CLS
    tokens[place == lengths[:, None] // 2] = SEP
    tokens[place == lengths[:, None] - 1] = SEP
    tokens[place >= lengths[:, None]] = PAD
    return tokens, lengths


def test_counts_follow_the_recipe() -> None:
    lengths = np.arange(3, 129)
    expected = [min(20, max(1, round(0.15 * int(length)))) for length in lengths]
    assert num_predictions(lengths, 0.15, 20).tolist() == expected
    assert num_predictions(np.array([30]), 0.15, 20).tolist() == [4]  # round half to even, as the recipe's round()
    assert num_predictions(lengths, 0.0, 20).sum() == 0
    assert num_predictions(lengths, 0.15, 0).sum() == 0


@pytest.mark.parametrize("whole_word", [False, True])
def test_every_row_has_the_number_that_its_length_says(whole_word: bool) -> None:
    tokens, lengths = rows(2000)
    _, positions, labels = mask_instances(tokens, lengths, mix_keys(1, 0, np.arange(2000)), rules(whole_word=whole_word))
    used = labels != IGNORED
    assert (used.sum(1) == num_predictions(lengths, 0.15, 20)).all()
    assert (positions[~used] == 0).all()
    ascending = np.where(used, positions, np.arange(10_000, 10_020))
    assert (np.diff(ascending, axis=1) > 0).all()
    assert (np.take_along_axis(tokens, positions, 1)[used] == labels[used]).all()


def test_rates_are_80_10_10_and_nothing_else_changes() -> None:
    tokens, lengths = rows(8000)
    masked, positions, labels = mask_instances(tokens, lengths, mix_keys(3, 2, np.arange(8000)), rules())
    used = labels != IGNORED
    shown, original = np.take_along_axis(masked, positions, 1)[used], labels[used]
    num = used.sum()
    ordinary = VOCAB_SIZE - len(SPECIALS)
    for share, count in [
        (0.8, (shown == MASK).sum()),
        (0.1 * (1 - 1 / ordinary), ((shown != MASK) & (shown != original)).sum()),
        (0.1 + 0.1 / ordinary, (shown == original).sum()),
    ]:
        assert abs(count - share * num) < 3 * np.sqrt(num * share * (1 - share))
    elsewhere = np.ones(tokens.shape, dtype=bool)
    elsewhere[np.nonzero(used)[0], positions[used]] = False
    assert (masked[elsewhere] == tokens[elsewhere]).all()


def test_random_words_are_uniform_over_ordinary_ones() -> None:
    tokens, lengths = rows(20_000)
    masked, positions, labels = mask_instances(tokens, lengths, mix_keys(5, 0, np.arange(20_000)), rules())
    used = labels != IGNORED
    shown = np.take_along_axis(masked, positions, 1)[used]
    words = shown[(shown != MASK) & (shown != labels[used])]
    counts = np.bincount(words, minlength=VOCAB_SIZE)
    assert counts[: len(SPECIALS)].sum() == 0
    expected = len(words) / (VOCAB_SIZE - len(SPECIALS))
    cells = VOCAB_SIZE - len(SPECIALS)
    chi_square = ((counts[len(SPECIALS) :] - expected) ** 2 / expected).sum()
    assert abs(chi_square - (cells - 1)) < 3 * np.sqrt(2 * cells)


def test_every_place_is_as_likely() -> None:
    width, num = 32, 20_000
    tokens, _ = rows(num, width)
    tokens[:, :] = np.where(tokens < len(SPECIALS), 50, tokens)
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    _, positions, labels = mask_instances(tokens, np.full(num, width), mix_keys(5, 0, np.arange(num)), rules())
    counts = np.bincount(positions[labels != IGNORED], minlength=width)
    assert counts[0] == counts[-1] == 0
    share = round(0.15 * width) / (width - 2)
    deviation = (counts[1:-1] - share * num) / np.sqrt(num * share * (1 - share))
    assert np.abs(deviation).max() < 4.2  # 30 places
    assert np.sqrt((deviation**2).mean()) < 1.5


@pytest.mark.parametrize("whole_word", [False, True])
def test_special_tokens_are_never_masked_nor_drawn(whole_word: bool) -> None:
    tokens, lengths = rows(3000, unknown_share=0.3)
    tokens[:, 1] = MASK  # as a text that speaks of [MASK] could have, were it tokenised so
    masked, _, labels = mask_instances(tokens, lengths, mix_keys(1, 0, np.arange(3000)), rules(whole_word=whole_word))
    assert not np.isin(labels, [PAD, UNK, CLS, SEP, MASK]).any()
    new = masked != tokens
    assert not np.isin(masked[new], [PAD, 1, UNK, CLS, SEP]).any()


def test_a_row_with_too_few_words_has_fewer_predictions() -> None:
    tokens = np.array([[CLS, UNK, UNK, SEP, UNK, SEP], [CLS, 50, UNK, SEP, UNK, SEP]])
    _, _, labels = mask_instances(tokens, np.array([6, 6]), mix_keys(1, 0, np.arange(2)), rules(probability=0.5))
    assert (labels != IGNORED).sum(1).tolist() == [0, 1]


@pytest.mark.parametrize("whole_word", [False, True])
def test_a_row_does_not_depend_on_its_batch_nor_on_padding(whole_word: bool) -> None:
    tokens, lengths = rows(64)
    keys = mix_keys(9, 4, np.arange(64))
    whole = mask_instances(tokens, lengths, keys, rules(whole_word=whole_word))
    order = np.random.default_rng(0).permutation(64)[:20]
    part = mask_instances(tokens[order], lengths[order], keys[order], rules(whole_word=whole_word))
    wide = mask_instances(np.pad(tokens, ((0, 0), (0, 100))), lengths, keys, rules(whole_word=whole_word))
    for k in range(3):
        np.testing.assert_array_equal(part[k], whole[k][order])
        np.testing.assert_array_equal(wide[k][:, : whole[k].shape[1]], whole[k])


def test_masks_differ_by_seed_epoch_and_instance() -> None:
    tokens, _ = rows(1)
    tokens, lengths = np.repeat(np.where(tokens < len(SPECIALS), 50, tokens), 4, axis=0), np.full(4, 64)
    keys = np.concatenate(
        [mix_keys(seed, epoch, np.array([i])) for seed, epoch, i in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    )
    _, positions, _ = mask_instances(tokens, lengths, keys, rules())
    assert len(np.unique(positions, axis=0)) == 4


def test_whole_words_are_masked_whole_but_for_the_last_one() -> None:
    tokens, lengths = rows(3000)
    _, positions, labels = mask_instances(tokens, lengths, mix_keys(2, 0, np.arange(3000)), rules(whole_word=True))
    chosen = np.zeros(tokens.shape, dtype=bool)
    used = labels != IGNORED
    chosen[np.nonzero(used)[0], positions[used]] = True
    first_continuation = next(i for i, word in enumerate(WORDS) if word.startswith("##"))
    cut = np.zeros(len(tokens), dtype=int)
    num_whole = 0
    for row in range(len(tokens)):
        words: list[list[int]] = []
        for place in range(1, lengths[row] - 1):
            if tokens[row, place] >= first_continuation and tokens[row, place - 1] not in (CLS, SEP):
                words[-1].append(place)
            else:
                words.append([place])
        for word in words:
            hit = chosen[row, word].sum()
            cut[row] += 0 < hit < len(word)
            num_whole += hit == len(word) > 1
    assert cut.max() <= 1
    assert num_whole > 1000


def test_no_prediction_at_all_can_be_represented() -> None:
    tokens, lengths = rows(4)
    masked, positions, labels = mask_instances(tokens, lengths, mix_keys(0, 0, np.arange(4)), rules(max_predictions=0))
    assert positions.shape == labels.shape == (4, 0)
    np.testing.assert_array_equal(masked, tokens)
    _, _, labels = mask_instances(tokens, lengths, mix_keys(0, 0, np.arange(4)), rules(probability=0.0))
    assert (labels == IGNORED).all()


def test_a_vocabulary_without_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no \[MASK\]"):
        MaskingRules.from_vocabulary(["[PAD]", "a"])


def test_brackets_are_ordinary_words() -> None:
    made = MaskingRules.from_vocabulary(["[PAD]", "[MASK]", "[unused7]", "[", "]", "a", "##b"])
    assert made.ordinary_ids.tolist() == [3, 4, 5, 6]
    assert made.is_special.tolist() == [True, True, False, False, False, False, False]
