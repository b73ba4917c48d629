"""Masked-token selection: a pure function of (seed, epoch, instance), vectorised, no generator state.

The original recipe (Devlin et al. 2018): about 15 % of the tokens are predicted; of those 80 % become [MASK], 10 % a random
word, 10 % stay. Draws come from a 64-bit mixing hash (Steele, Lea, Flood 2014, "splitmix64") of a counter, so rows do not
depend on what else is in the batch.

Shapes: B instances, S padded length, P most predictions per instance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORED_LABEL = -100
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_POSITION_BITS = np.uint64(0xFFFF)
_LAST = np.uint64(0xFFFFFFFFFFFFFFFF)


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64: every output bit depends on every input bit."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_keys(seed: int, *parts: np.ndarray | int) -> np.ndarray:
    """One well-mixed uint64 key from a seed and integers (arrays broadcast)."""
    key = mix(np.asarray([seed & int(_LAST)], dtype=np.uint64))
    for part in parts:
        key = mix(key ^ np.asarray(part, dtype=np.uint64))
    return key


@dataclass(frozen=True)
class MaskingRules:
    """What may be masked, and with what.

    Attributes:
        mask_id: the id of [MASK].
        is_special: bool [vocab], tokens that are never masked.
        ordinary_ids: int [n], what a random replacement is drawn from.
        is_continuation: bool [vocab], tokens that continue a word (##...); used by whole_word.
        probability: share of the tokens to predict.
        max_predictions: P.
        whole_word: mask whole words; the last one chosen is cut where the number of predictions is reached, so that this
            number follows from the length alone in both modes.
    """

    mask_id: int
    is_special: np.ndarray
    ordinary_ids: np.ndarray
    is_continuation: np.ndarray
    probability: float = 0.15
    max_predictions: int = 20
    whole_word: bool = False

    @staticmethod
    def from_vocabulary(
        vocabulary: list[str], *, probability: float = 0.15, max_predictions: int = 20, whole_word: bool = False
    ) -> MaskingRules:
        """Derive the tables from the words of a vocabulary, id by id."""
        bracketed = np.array([word.startswith("[") and word.endswith("]") and len(word) > 2 for word in vocabulary])
        unused = np.array([word.startswith("[unused") for word in vocabulary])
        if "[MASK]" not in vocabulary:
            raise ValueError("the vocabulary has no [MASK]")
        return MaskingRules(
            mask_id=vocabulary.index("[MASK]"),
            is_special=bracketed & ~unused,
            ordinary_ids=np.flatnonzero(~bracketed),
            is_continuation=np.array([word.startswith("##") for word in vocabulary]),
            probability=probability,
            max_predictions=max_predictions,
            whole_word=whole_word,
        )


def num_predictions(lengths: np.ndarray, probability: float, max_predictions: int) -> np.ndarray:
    """min(max_predictions, max(1, round(probability * length))), special tokens counted in the length; int64.

    A half is rounded to the even neighbour, as Python's round does in the original recipe. Probability 0 predicts nothing.
    """
    least = 1 if probability > 0 else 0
    return np.minimum(max_predictions, np.maximum(least, np.rint(probability * lengths))).astype(np.int64)


def _choose(tokens: np.ndarray, lengths: np.ndarray, keys: np.ndarray, rules: MaskingRules) -> np.ndarray:
    """The chosen places in ascending order, int64 [B, P]; places beyond a row's number hold S."""
    num_rows, width = tokens.shape
    place = np.arange(width, dtype=np.uint64)
    draw = mix(keys[:, None] + place * _GOLDEN)
    allowed = (place < lengths[:, None]) & ~rules.is_special[tokens]
    if rules.whole_word:
        # Every token takes the draw of its word's first one: sorted by draw, words stay together.
        starts = ~rules.is_continuation[tokens]
        starts[:, 0] = True
        first = np.maximum.accumulate(np.where(starts, np.arange(width), 0), axis=1)
        draw = np.take_along_axis(draw, first, axis=1)
    packed = np.where(allowed, (draw & ~_POSITION_BITS) | place, _LAST)
    limit = min(rules.max_predictions, width)
    if limit < width:
        packed = np.partition(packed, limit - 1, axis=1)[:, :limit]
    packed.sort(axis=1)
    counts = num_predictions(lengths, rules.probability, rules.max_predictions)
    chosen = (np.arange(limit) < counts[:, None]) & (packed != _LAST)
    places = np.full((num_rows, rules.max_predictions), width, dtype=np.int64)
    places[:, :limit] = np.where(chosen, (packed & _POSITION_BITS).astype(np.int64), width)
    places.sort(axis=1)
    return places


def mask_instances(
    tokens: np.ndarray, lengths: np.ndarray, keys: np.ndarray, rules: MaskingRules
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose and replace tokens.

    Args:
        tokens: int64 [B, S], padded; not changed.
        lengths: int64 [B], real tokens.
        keys: uint64 [B], one per (seed, epoch, instance), see `mix_keys`.
        rules: what may be masked.

    Returns:
        masked tokens int64 [B, S]; positions int64 [B, P], ascending, 0 where unused; labels int64 [B, P], -100 there. A
        row with fewer maskable tokens than its number of predictions has fewer.
    """
    width = tokens.shape[1]
    places = _choose(tokens, lengths, keys, rules)
    used = places < width
    positions = np.where(used, places, 0)
    originals = np.take_along_axis(tokens, positions, axis=1)
    draw = mix(mix(keys)[:, None] + positions.astype(np.uint64) * _GOLDEN)
    low, high = draw & np.uint64(0xFFFFFFFF), draw >> np.uint64(32)
    word = rules.ordinary_ids[((high * np.uint64(len(rules.ordinary_ids))) >> np.uint64(32)).astype(np.int64)]
    share = low.astype(np.float64) / 2.0**32
    replacement = np.where(share < 0.8, rules.mask_id, np.where(share < 0.9, word, originals))
    masked = tokens.copy()
    rows, columns = np.nonzero(used)
    masked[rows, positions[rows, columns]] = replacement[rows, columns]
    return masked, positions, np.where(used, originals, IGNORED_LABEL)
