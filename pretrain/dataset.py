"""The opened shards of one split, addressed by their place in the endless training order; masked when read.

"Sample g" is a place in the endless order of training: epoch = g // N, instance = permutation(seed, epoch)(g % N). The
permutation is computed, not stored, so resuming anywhere costs nothing, every instance comes exactly once per epoch, and any
number of ranks and workers cut the same order.

Legend: B instances, S max_seq_length, P max_predictions_per_seq, N instances in the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.masking import IGNORED_LABEL, MaskingRules, mask_instances, mix, mix_keys, num_predictions
from data_prep.shards import (
    VOCAB_NAME,
    Shard,
    allow_open_files,
    check_total_memory,
    list_shards,
    open_shard,
    read_manifest,
)
from data_prep.tokenization import read_vocabulary

_FEISTEL_ROUNDS = 6


def permutation(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Map places 0..size-1 of an epoch to instances, one to one: a Feistel network with cycle walking.

    Args:
        index: int64 [n], each in [0, size).
        size: N.
        seed: of the training order.
        epoch: int64 [n], the epoch of each place.

    Returns:
        int64 [n], each in [0, size).
    """
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    low_mask = np.uint64((1 << int(half_bits)) - 1)
    keys = mix_keys(seed, epoch)

    def encrypt(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = x >> half_bits, x & low_mask
        for round_number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (mix(right ^ mix(keys + np.uint64(round_number))) & low_mask)
        return (left << half_bits) | right

    result = encrypt(index.astype(np.uint64), keys)
    # The network permutes the next power of four; a value outside is encrypted again until it falls inside.
    while (outside := result >= np.uint64(size)).any():
        result[outside] = encrypt(result[outside], keys[outside])
    return result.astype(np.int64)


class PretrainingData:
    """The opened shards of one split, addressed by sample.

    Args:
        path: see `data_prep.shards.list_shards`.
        split: "train" or "eval".
        max_seq_length: S; None takes the shards'. May be larger than theirs, never smaller.
        max_predictions_per_seq: P.
        mask_probability: share of the tokens to predict.
        whole_word_masking: mask whole words.
        seed: of the order and the masks.

    Attributes:
        num_instances: N.
        vocab_size: entries of the vocabulary; None where the data does not say (NVIDIA's shards).
        min_vocab_size: one more than the largest token id that may occur.
        fingerprint: content hashes of the shards, which a checkpoint keeps.

    Raises:
        ValueError: nothing at `path`, shards that do not belong together, or a `max_seq_length` below theirs.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        split: str = "train",
        max_seq_length: int | None = None,
        max_predictions_per_seq: int = 20,
        mask_probability: float = 0.15,
        whole_word_masking: bool = False,
        seed: int = 0,
    ) -> None:
        self.path, self.seed = Path(path), seed
        self._arguments = {
            "split": split,
            "max_seq_length": max_seq_length,
            "max_predictions_per_seq": max_predictions_per_seq,
            "mask_probability": mask_probability,
            "whole_word_masking": whole_word_masking,
            "seed": seed,
        }
        self._last_totals: tuple[tuple[int, int], tuple[int, int]] | None = None
        files = list_shards(path, split)
        allow_open_files(len(files))
        check_total_memory(files)
        self.shards = [open_shard(file) for file in files]
        self._first = np.cumsum([0] + [shard.num_instances for shard in self.shards])
        self.num_instances = int(self._first[-1])
        if self.num_instances == 0:
            raise ValueError(f"{path} holds no instances")
        self.static = _all_equal(self.shards, "static masks", lambda shard: shard.static_masks is not None)
        self.max_seq_length = self._checked_length(max_seq_length)
        self.max_predictions, self.mask_probability = max_predictions_per_seq, mask_probability
        self._check_manifest(split)
        self.rules = None if self.static else self._masking_rules(whole_word_masking)
        self._check_static_predictions()
        self.fingerprint = {"shards": [shard.content_hash for shard in self.shards], "num_instances": self.num_instances}

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process that is not forked opens the shards itself: pickling would copy what is memory-mapped.
        return _reopen, (self.path, self._arguments)

    # ---- what was opened ----

    def _checked_length(self, wanted: int | None) -> int:
        longest = _all_equal(self.shards, "max_seq_length", lambda shard: shard.max_seq_length)
        if wanted is not None and wanted < longest:
            raise ValueError(
                f"data.max_seq_length is {wanted}, but the shards in {self.path} were built for {longest}:"
                f" set data.max_seq_length to {longest}, or build shards with --max-seq-length {wanted}"
            )
        return wanted or longest

    def _check_manifest(self, split: str) -> None:
        self._vocab_in_manifest = None
        manifest = read_manifest(self.path) if self.path.is_dir() else None
        if manifest is None:
            return
        self._vocab_in_manifest = manifest.get("vocab", {}).get("size")
        for shard, listed in zip(self.shards, manifest["splits"][split], strict=True):
            if (shard.num_instances, shard.content_hash) != (listed["num_instances"], listed["content_hash"]):
                raise ValueError(
                    f"{shard.path} is not the shard that manifest.json lists: run 'python -m data_prep verify {self.path}',"
                    " then build or copy the data again"
                )

    def _masking_rules(self, whole_word: bool) -> MaskingRules:
        vocab_hash = _all_equal(self.shards, "vocabulary", lambda shard: shard.attributes.vocab_hash)
        file = self.shards[0].path.parent / VOCAB_NAME
        if not file.is_file():
            raise ValueError(f"{file} is missing: it belongs beside the shards, whose masks are drawn from it")
        if hashlib.sha256(file.read_bytes()).hexdigest() != vocab_hash:
            raise ValueError(f"{file} is not the vocabulary that the shards were built with: build or copy the data again")
        return MaskingRules.from_vocabulary(
            read_vocabulary(file),
            probability=self.mask_probability,
            max_predictions=self.max_predictions,
            whole_word=whole_word,
        )

    def _check_static_predictions(self) -> None:
        if not self.static:
            return
        most = max(int(np.diff(shard.static_masks.offsets).max(initial=0)) for shard in self.shards)  # type: ignore[union-attr]
        if most > self.max_predictions:
            raise ValueError(
                f"data.max_predictions_per_seq is {self.max_predictions}, but rows of {self.path} have up to {most}"
                f" predictions: set it to {most}"
            )

    @property
    def vocab_size(self) -> int | None:
        """Entries of the vocabulary; None where the data does not say (NVIDIA's shards without our manifest)."""
        return self.shards[0].attributes.vocab_size or self._vocab_in_manifest

    @property
    def vocab_hash(self) -> str | None:
        """SHA-256 of vocab.txt; None for NVIDIA's shards."""
        return self.shards[0].attributes.vocab_hash

    @property
    def tokenizer(self) -> dict[str, Any]:
        """The settings that made the token ids; empty for NVIDIA's shards."""
        return self.shards[0].attributes.tokenizer

    @property
    def min_vocab_size(self) -> int:
        if self.vocab_size is not None:
            return self.vocab_size
        arrays = [a for s in self.shards for a in (s.tokens, s.static_masks.labels)]  # type: ignore[union-attr]
        return 1 + max(int(array.max(initial=0)) for array in arrays)

    # ---- the training order ----

    def instances_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epoch, instance) of each sample, int64."""
        epoch = samples // self.num_instances
        return epoch, permutation(samples % self.num_instances, self.num_instances, self.seed, epoch)

    def _by_shard(self, instance: np.ndarray) -> Iterator[tuple[Shard, np.ndarray, np.ndarray]]:
        """Group instances by shard: (shard, rows of `instance`, their numbers inside the shard)."""
        if len(instance) == 0:
            return
        owner = np.searchsorted(self._first, instance, side="right") - 1
        order = np.argsort(owner, kind="stable")
        shards, starts = np.unique(owner[order], return_index=True)
        for shard, rows in zip(shards, np.split(order, starts[1:]), strict=True):
            yield self.shards[shard], rows, instance[rows] - self._first[shard]

    def totals(self, first_sample: int, num_samples: int) -> tuple[int, int]:
        """Return (real tokens, predicted tokens) of a range of samples; from lengths alone, no token is read."""
        # Every micro-batch of a global batch asks for the same range.
        if self._last_totals is not None and self._last_totals[0] == (first_sample, num_samples):
            return self._last_totals[1]
        _, instance = self.instances_of(np.arange(first_sample, first_sample + num_samples))
        num_tokens = num_predicted = 0
        for shard, _, local in self._by_shard(instance):
            lengths = _spans(shard.offsets, local)
            num_tokens += int(lengths.sum())
            if shard.static_masks is not None:
                num_predicted += int(_spans(shard.static_masks.offsets, local).sum())
            else:
                num_predicted += int(num_predictions(lengths, self.mask_probability, self.max_predictions).sum())
        self._last_totals = ((first_sample, num_samples), (num_tokens, num_predicted))
        return num_tokens, num_predicted

    def num_predictions(self, first_sample: int, num_samples: int) -> int:
        """Return the predicted tokens of a range of samples; from lengths alone, no token is read."""
        return self.totals(first_sample, num_samples)[1]

    def batch(self, first_sample: int, num_samples: int) -> dict[str, Tensor]:
        """Return samples first_sample ... first_sample + num_samples - 1, masked and padded to S.

        Returns:
            input_ids, token_type_ids int64 [B, S]; attention_mask bool [B, S]; masked_positions int64 [B, P] (0 where
            unused); labels int64 [B, P] (-100 there); next_sentence_label int64 [B], 1 = random.
        """
        epoch, instance = self.instances_of(np.arange(first_sample, first_sample + num_samples))
        tokens = np.zeros((num_samples, self.max_seq_length), dtype=np.int64)
        lengths, segment_b_start, is_random = (np.zeros(num_samples, dtype=np.int64) for _ in range(3))
        for shard, rows, local in self._by_shard(instance):
            lengths[rows], segment_b_start[rows], is_random[rows] = _read_rows(shard, local, tokens, rows)
        if self.rules is None:
            positions, labels = self._static_masks(instance)
        else:
            tokens, positions, labels = mask_instances(tokens, lengths, mix_keys(self.seed, epoch, instance), self.rules)
        place = np.arange(self.max_seq_length)
        real = place < lengths[:, None]
        arrays = {
            "input_ids": tokens,
            "token_type_ids": (real & (place >= segment_b_start[:, None])).astype(np.int64),
            "attention_mask": real,
            "masked_positions": positions,
            "labels": labels,
            "next_sentence_label": is_random,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _static_masks(self, instance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = np.zeros((len(instance), self.max_predictions), dtype=np.int64)
        labels = np.full((len(instance), self.max_predictions), IGNORED_LABEL, dtype=np.int64)
        for shard, rows, local in self._by_shard(instance):
            masks = shard.static_masks
            assert masks is not None
            for row, i in zip(rows, local, strict=True):
                span = slice(int(masks.offsets[i]), int(masks.offsets[i + 1]))
                positions[row, : span.stop - span.start] = masks.positions[span]
                labels[row, : span.stop - span.start] = masks.labels[span]
        return positions, labels


def _reopen(path: Path, arguments: dict[str, Any]) -> PretrainingData:
    return PretrainingData(path, **arguments)


def _all_equal(shards: list[Shard], what: str, get: Any) -> Any:
    first = get(shards[0])
    for shard in shards[1:]:
        if get(shard) != first:
            raise ValueError(
                f"the shards differ in their {what}: {shards[0].path.name} has {first}, {shard.path.name} has {get(shard)};"
                " build them together"
            )
    return first


def _spans(offsets: np.ndarray, index: np.ndarray) -> np.ndarray:
    return offsets[index + 1] - offsets[index]


def _read_rows(
    shard: Shard, local: np.ndarray, tokens: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copy instances `local` of a shard into `tokens[rows]`; return lengths, segment_b_start, is_random_next."""
    starts, lengths = shard.offsets[local], _spans(shard.offsets, local)
    # A handful of rows per shard and batch: plain slices beat an index per token.
    for row, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        tokens[row, :length] = shard.tokens[start : start + length]
    return lengths, shard.segment_b_start[local], shard.is_random_next[local]
