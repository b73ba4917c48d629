"""Sentence pairs by the original recipe (Devlin et al. 2018), as ranges of the token store: no token is copied until the end.

A document's sentences are gathered up to a target length; a cut among them makes A. B is the rest, or with probability 0.5 a
run of sentences from another document, and then the unused sentences go back to be gathered again. Pairs that are too long
lose tokens of the longer side, at the front or at the back. Every draw is a function of (seed, pass, document, count).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_prep.masking import mix_keys
from data_prep.token_store import TokenStore

# [CLS] A [SEP] B [SEP]
NUM_SPECIAL = 3
_WORD = (1 << 64) - 1


class Draws:
    """A stream of random numbers from a key: splitmix64 (Steele, Lea, Flood 2014)."""

    def __init__(self, key: int) -> None:
        self._state = key

    def bits(self) -> int:
        """64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _WORD
        x = self._state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        return x ^ (x >> 31)

    def below(self, limit: int) -> int:
        """Uniform in [0, limit)."""
        return (self.bits() * limit) >> 64

    def chance(self, probability: float) -> bool:
        return self.bits() < probability * 2.0**64

    def heads(self, tosses: int) -> int:
        """How many of `tosses` fair coins show heads."""
        total = 0
        while tosses > 0:
            total += (self.bits() & ((1 << min(tosses, 64)) - 1)).bit_count()
            tosses -= 64
        return total


@dataclass(frozen=True)
class PairSettings:
    """What pairs look like.

    Attributes:
        max_seq_length: longest instance, [CLS] and [SEP] included.
        short_seq_prob: probability of a shorter target length, uniform in [2, max_seq_length - 3].
        seed: of every draw.
        cls_id, sep_id: the ids of [CLS] and [SEP].
    """

    max_seq_length: int
    short_seq_prob: float
    seed: int
    cls_id: int
    sep_id: int


def truncated(a: tuple[int, int], b: tuple[int, int], limit: int, draws: Draws) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shorten two ranges to `limit` together, always the longer one, by tokens at its front or its back at random."""
    length_a, length_b = a[1] - a[0], b[1] - b[0]
    excess = length_a + length_b - limit
    if excess <= 0:
        return a, b
    from_longer = min(excess, abs(length_a - length_b))
    cut_a, cut_b = (from_longer, 0) if length_a > length_b else (0, from_longer)
    # Equally long now: they lose tokens in turns, B first.
    cut_a, cut_b = cut_a + (excess - from_longer) // 2, cut_b + (excess - from_longer + 1) // 2
    front_a, front_b = draws.heads(cut_a), draws.heads(cut_b)
    return (a[0] + front_a, a[1] - (cut_a - front_a)), (b[0] + front_b, b[1] - (cut_b - front_b))


class PairMaker:
    """Makes the pairs of documents of one split.

    Args:
        store: all documents.
        documents: int64, the numbers of the split's documents; random B's come from these.
        settings: what pairs look like.
    """

    def __init__(self, store: TokenStore, documents: np.ndarray, settings: PairSettings) -> None:
        self.store, self.documents, self.settings = store, documents, settings

    def pairs(self, place: int, pass_number: int) -> Iterator[tuple[int, int, int, int, bool]]:
        """Yield (A's start, A's end, B's start, B's end, B is random) in tokens, for document number `place` of the split."""
        document = int(self.documents[place])
        first, last = (int(self.store.document_starts[document + i]) for i in (0, 1))
        starts = self.store.sentence_starts[first : last + 1].tolist()
        num_sentences = len(starts) - 1
        draws = Draws(int(mix_keys(self.settings.seed, pass_number, document)[0]))
        limit = self.settings.max_seq_length - NUM_SPECIAL
        target = self._target(limit, draws)
        chunk_start = i = 0
        while i < num_sentences:
            if i < num_sentences - 1 and starts[i + 1] - starts[chunk_start] < target:
                i += 1
                continue
            gathered = i - chunk_start + 1
            cut = chunk_start + (1 if gathered == 1 else 1 + draws.below(gathered - 1))
            a = (starts[chunk_start], starts[cut])
            is_random = gathered == 1 or draws.chance(0.5)
            if is_random:
                b = self._random_range(place, max(target - (a[1] - a[0]), 1), draws)
                i = cut - 1  # what followed A goes back
            else:
                b = (starts[cut], starts[i + 1])
            yield (*_joined(truncated(a, b, limit, draws)), is_random)
            target = self._target(limit, draws)
            i += 1
            chunk_start = i

    def _target(self, limit: int, draws: Draws) -> int:
        return 2 + draws.below(limit - 1) if draws.chance(self.settings.short_seq_prob) else limit

    def _random_range(self, place: int, wanted: int, draws: Draws) -> tuple[int, int]:
        """A run of whole sentences of another document, from a random one on, until `wanted` tokens or its end."""
        other = draws.below(len(self.documents) - 1)
        document = int(self.documents[other + (other >= place)])
        first, last = (int(self.store.document_starts[document + i]) for i in (0, 1))
        begin = first + draws.below(last - first)
        start = int(self.store.sentence_starts[begin])
        end = begin + int(np.searchsorted(self.store.sentence_starts[begin + 1 : last + 1], start + wanted))
        return start, int(self.store.sentence_starts[min(end + 1, last)])

    def instances(self, places: range, pass_number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Make the instances of some documents.

        Returns:
            tokens [total]; lengths int64 [n]; segment_b_start uint16 [n]; is_random_next uint8 [n].
        """
        rows = [pair for place in places for pair in self.pairs(place, pass_number)]
        if not rows:
            return self.store.tokens[:0], np.zeros(0, np.int64), np.zeros(0, np.uint16), np.zeros(0, np.uint8)
        a_start, a_end, b_start, b_end, is_random = np.array(rows, dtype=np.int64).T
        length_a, length_b = a_end - a_start, b_end - b_start
        lengths = length_a + length_b + NUM_SPECIAL
        begins = np.cumsum(lengths) - lengths
        tokens = np.empty(int(lengths.sum()), dtype=self.store.tokens.dtype)
        tokens[begins] = self.settings.cls_id
        tokens[begins + 1 + length_a] = self.settings.sep_id
        tokens[begins + lengths - 1] = self.settings.sep_id
        _copy_ranges(self.store.tokens, a_start, length_a, tokens, begins + 1)
        _copy_ranges(self.store.tokens, b_start, length_b, tokens, begins + 2 + length_a)
        return tokens, lengths, (2 + length_a).astype(np.uint16), is_random.astype(np.uint8)


def _joined(ranges: tuple[tuple[int, int], tuple[int, int]]) -> tuple[int, int, int, int]:
    return (*ranges[0], *ranges[1])


def _copy_ranges(source: np.ndarray, starts: np.ndarray, lengths: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
    """target[places[k] + j] = source[starts[k] + j] for j below lengths[k], all k at once."""
    inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    target[np.repeat(places, lengths) + inside] = source[np.repeat(starts, lengths) + inside]
