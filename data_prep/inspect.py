"""`python -m data_prep inspect DIR`: instances in words, with the masks that training would draw for them.

The masks come from `data_prep.masking`, keyed as in training by (seed, epoch, instance), so what is shown is what the model
sees in that epoch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from data_prep.masking import MaskingRules, mask_instances, mix_keys
from data_prep.shards import NVIDIA_FORMAT, Shard, list_shards, open_shard, undo_masks
from data_prep.tokenization import find_vocabulary

SEGMENT_STYLES = {"A": "cyan", "B": "green"}
MASK_STYLES = {"mask": "bold white on red", "random": "bold black on yellow", "kept": "bold underline magenta"}
_MEANINGS = {
    "mask": "[MASK](word): hidden, to be predicted",
    "random": "~other~(word): replaced by a random word, to be predicted",
    "kept": "=word=: left as it is, to be predicted",
}


@dataclass(frozen=True)
class MaskedInstance:
    """One instance as training sees it.

    Attributes:
        number: its place in the split, from 0.
        shard: name of its file.
        row: its place in that file.
        shown: the ids after masking, [length].
        original: the ids before masking, [length].
        positions: predicted places, ascending.
        segment_b_start: where B starts.
        is_random: B is from another document.
    """

    number: int
    shard: str
    row: int
    shown: list[int]
    original: list[int]
    positions: list[int]
    segment_b_start: int
    is_random: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("path", metavar="DIR", help="a directory of shards, one shard, or a quoted pattern")
    parser.add_argument("--num", type=int, default=3, metavar="N", help="how many instances (%(default)s)")
    parser.add_argument(
        "--index", type=int, metavar="I", help="the first of them, counted over the split; default: spread over it"
    )
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument("--epoch", type=int, default=0, metavar="E", help="masks of this epoch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="masks of this seed: train.seed (%(default)s)")
    parser.add_argument("--mask-probability", type=float, default=0.15, metavar="P", help="data.mask_probability (%(default)s)")
    parser.add_argument(
        "--max-predictions-per-seq", type=int, default=20, metavar="N", help="data.max_predictions_per_seq (%(default)s)"
    )
    parser.add_argument("--whole-word-masking", action="store_true", help="data.whole_word_masking")
    parser.add_argument("--vocab", type=Path, metavar="FILE", help="vocabulary of shards that have no vocab.txt beside them")
    parser.epilog = "Colour is left out where the output is no terminal, or NO_COLOR is set."


def run(args: argparse.Namespace) -> int:
    """Print the instances; ValueError for wrong usage."""
    files = list_shards(args.path, args.split)
    words = find_vocabulary(files[0], args.vocab)
    if words is None:
        raise ValueError(f"{files[0].parent} has no vocab.txt: name the vocabulary with --vocab FILE")
    rules = MaskingRules.from_vocabulary(
        words,
        probability=args.mask_probability,
        max_predictions=args.max_predictions_per_seq,
        whole_word=args.whole_word_masking,
    )
    shards = [open_shard(file) for file in files]
    numbers = _choose(sum(len(shard) for shard in shards), args.num, args.index)
    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal
    for number in numbers:
        console.print(render(mask_instance(shards, number, rules, seed=args.seed, epoch=args.epoch), words))
    console.print(_legend(any(shard.format == NVIDIA_FORMAT for shard in shards), args.epoch, args.seed))
    return 0


def _choose(num_instances: int, num: int, index: int | None) -> list[int]:
    if num_instances == 0:
        raise ValueError("these shards hold no instance")
    if num < 1:
        raise ValueError(f"--num must be at least 1, got {num}")
    if index is None:
        return np.unique(np.linspace(0, num_instances - 1, min(num, num_instances)).round().astype(int)).tolist()
    if not 0 <= index < num_instances:
        raise ValueError(f"--index must lie between 0 and {num_instances - 1:,}, got {index}")
    return list(range(index, min(index + num, num_instances)))


def mask_instance(shards: list[Shard], number: int, rules: MaskingRules, *, seed: int, epoch: int) -> MaskedInstance:
    """Return instance `number` of a split with its masks: those of the file, or drawn as training draws them."""
    first = np.cumsum([0] + [len(shard) for shard in shards])
    k = int(np.searchsorted(first, number, side="right")) - 1
    shard, row = shards[k], int(number - first[k])
    instance = shard[row : row + 1]
    tokens = np.asarray(instance.tokens, dtype=np.int64)
    if tokens.max(initial=0) >= len(rules.is_special):
        raise ValueError(f"{shard.path} holds token id {tokens.max()}, the vocabulary has {len(rules.is_special):,} entries")
    if shard.static_masks is not None:
        masks = shard.static_masks[row : row + 1]
        shown, original = tokens, np.asarray(undo_masks(instance, masks).tokens)
        positions = np.asarray(masks.positions)
    else:
        masked, places, labels = mask_instances(tokens[None], instance.lengths, mix_keys(seed, epoch, np.array([number])), rules)
        shown, original, positions = masked[0], tokens, places[0][labels[0] >= 0]
    return MaskedInstance(
        number=number,
        shard=shard.path.name,
        row=row,
        shown=shown.tolist(),
        original=original.tolist(),
        positions=positions.tolist(),
        segment_b_start=int(instance.segment_b_start[0]),
        is_random=bool(instance.is_random_next[0]),
    )


def render(instance: MaskedInstance, words: list[str]) -> Text:
    """Lay an instance out: a heading, segment A, segment B; predicted words marked, readable without colour too."""
    length, b_start = len(instance.original), instance.segment_b_start
    label = "1 = B is random, from another document" if instance.is_random else "0 = B follows A"
    text = Text()
    text.append(f"instance {instance.number:,}", style="bold")
    text.append(f"  ({instance.shard}, row {instance.row:,})  {length} tokens, {len(instance.positions)} predicted\n")
    text.append(f"next_sentence_label {label}\n", style="bold")
    for name, start, stop in (("A", 0, b_start), ("B", b_start, length)):
        if start < stop:
            text.append(f"  {name}  ", style="bold " + SEGMENT_STYLES[name])
            text.append_text(_segment(instance, words, start, stop, SEGMENT_STYLES[name]))
            text.append("\n")
    return text


def _segment(instance: MaskedInstance, words: list[str], start: int, stop: int, style: str) -> Text:
    predicted, text = set(instance.positions), Text()
    for place in range(start, stop):
        shown, original = words[instance.shown[place]], words[instance.original[place]]
        if place not in predicted:
            special = original in ("[CLS]", "[SEP]", "[UNK]")
            joined = original.startswith("##") and place - 1 not in predicted and place > start
            text.append(original[2:] if joined else (" " if place > start else "") + original, style="dim" if special else style)
            continue
        kind = "mask" if shown == "[MASK]" else "kept" if shown == original else "random"
        text.append(" " if place > start else "")
        text.append({"mask": "[MASK]", "kept": f"={shown}=", "random": f"~{shown}~"}[kind], style=MASK_STYLES[kind])
        if kind != "kept":
            text.append(f"({original})", style="italic " + style)
    return text


def _legend(static: bool, epoch: int, seed: int) -> Text:
    text = Text("legend  ", style="bold")
    text.append("segment A", style=SEGMENT_STYLES["A"])
    text.append("  ")
    text.append("segment B", style=SEGMENT_STYLES["B"])
    for kind, meaning in _MEANINGS.items():
        text.append("\n        ")
        text.append(meaning, style=MASK_STYLES[kind])
    drawn = "the masks are those of the file" if static else f"masks as drawn in epoch {epoch} with seed {seed}"
    return text.append(f"\n        {drawn}")
