"""`python -m data_prep verify DIR`: recompute what the manifest says about every shard, and check every instance."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data_prep.shards import (
    MANIFEST_NAME,
    NVIDIA_FORMAT,
    VOCAB_NAME,
    ContentHash,
    Instances,
    MissingSplitError,
    Shard,
    find_problems,
    list_shards,
    open_shard,
    read_manifest,
    undo_masks,
    vocab_hash,
)
from data_prep.tokenization import find_vocabulary

_CHUNK_ROWS = 1 << 16
# A build whose B is random with probability 0.5 lies far inside; outside, next-sentence prediction learns the imbalance.
_BALANCE = (0.4, 0.6)
_MAX_LISTED_SHARDS = 16


@dataclass
class Report:
    """What was counted in one shard, or in several together."""

    name: str
    split: str
    num_shards: int = 1
    num_instances: int = 0
    num_tokens: int = 0
    num_places: int = 0
    num_random: int = 0
    num_unknown: int = 0
    num_predictions: int | None = None
    problems: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Count another shard in."""
        for name in ("num_instances", "num_tokens", "num_places", "num_random", "num_unknown"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.num_predictions is not None:
            self.num_predictions = (self.num_predictions or 0) + other.num_predictions
        self.problems += other.problems


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens; `unknown` and `mask` are None where no vocabulary is known."""

    cls: int
    sep: int
    pad: int = 0
    unknown: int | None = None
    mask: int | None = None

    @staticmethod
    def of(words: list[str] | None, shard: Shard) -> SpecialIds | None:
        """From the vocabulary, or from how the first instance of a shard begins and ends."""
        if words is not None:
            return SpecialIds(*(words.index(f"[{name}]") for name in ("CLS", "SEP", "PAD", "UNK", "MASK")))
        if not len(shard) or not shard.num_tokens:
            return None
        return SpecialIds(int(shard.tokens[0]), int(shard.tokens[int(shard.offsets[1]) - 1]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("path", metavar="DIR", help="a directory of shards, one shard, or a quoted pattern")
    parser.add_argument("--vocab", type=Path, metavar="FILE", help="vocabulary of shards that have no vocab.txt beside them")
    parser.add_argument(
        "--max-unknown-rate", type=float, default=0.05, metavar="RATE", help="more [UNK] than this is a problem (%(default)s)"
    )
    parser.epilog = "Exit status: 0 all is well, 1 problems were found (each is named), 2 wrong usage."


def run(args: argparse.Namespace) -> int:
    """Verify and print; 0 without problems, 1 with. Raises ValueError for wrong usage."""
    reports, problems = verify(args.path, vocab=args.vocab, max_unknown_rate=args.max_unknown_rate)
    _print_table(reports)
    problems += [problem for report in reports for problem in report.problems]
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    total = sum(report.num_instances for report in reports)
    if problems:
        print(f"{len(problems)} problem(s) in {len(reports)} shard(s)")
        return 1
    print(f"all is well: {total:,} instances in {len(reports)} shard(s)")
    return 0


def verify(path: str | Path, *, vocab: Path | None = None, max_unknown_rate: float = 0.05) -> tuple[list[Report], list[str]]:
    """Check every shard at `path`; return a report of each, and the problems of no single shard.

    Raises ValueError where there is nothing to verify.
    """
    manifest = read_manifest(path) if Path(path).is_dir() else None
    shards = _shards_with_entries(path, manifest)
    words = find_vocabulary(shards[0][1], vocab)
    problems = [] if manifest is None else list(_manifest_problems(Path(path), manifest, vocab))
    reports = []
    for split, file, entry in tqdm(shards, unit="shard", disable=None):
        reports.append(_verify_shard(split, file, entry, words))
    problems += _problems_of_all(reports, max_unknown_rate)
    if manifest is not None:
        # Duplicates of an instance stay in one shard.
        problems += _uneven(reports, int(manifest.get("creation", {}).get("duplicate_factor", 1)))
    return reports, problems


def _shards_with_entries(path: str | Path, manifest: dict[str, Any] | None) -> list[tuple[str, Path, dict[str, Any] | None]]:
    if manifest is not None:
        return [(s, Path(path) / e["name"], e) for s, entries in manifest["splits"].items() for e in entries]
    shards: list[tuple[str, Path, dict[str, Any] | None]] = [("train", file, None) for file in list_shards(path)]
    try:
        known = {file for _, file, _ in shards}
        shards += [("eval", file, None) for file in list_shards(path, "eval") if file not in known]
    except MissingSplitError:
        pass
    return shards


def _manifest_problems(directory: Path, manifest: dict[str, Any], vocab: Path | None) -> Iterator[str]:
    listed = {entry["name"] for entries in manifest["splits"].values() for entry in entries}
    for file in sorted(directory.glob("*.hdf5")):
        if file.name not in listed and not file.name.startswith("."):
            yield f"{file.name}: not listed in {MANIFEST_NAME}"
    file, recorded = vocab or directory / VOCAB_NAME, manifest.get("vocab", {}).get("hash")
    if not file.is_file():
        yield f"{file.name}: missing"
    elif recorded is not None and vocab_hash(file) != recorded:
        yield f"{file.name}: not the vocabulary that {MANIFEST_NAME} records (its bytes differ)"


def _verify_shard(split: str, path: Path, entry: dict[str, Any] | None, words: list[str] | None) -> Report:
    report = Report(path.name, split)
    try:
        shard = open_shard(path)
    except ValueError as error:
        report.problems.append(str(error))
        return report
    digest, special = ContentHash(), SpecialIds.of(words, shard)
    for start in range(0, len(shard), _CHUNK_ROWS):
        found = list(_verify_chunk(report, shard, slice(start, start + _CHUNK_ROWS), digest, special))
        report.problems += [f"{path.name}: {problem}" for problem in found]
        if found:
            break  # the rows that follow a damaged one say the same again
    report.num_places = len(shard) * shard.max_seq_length
    if not report.problems and digest.hexdigest() != shard.content_hash:
        report.problems.append(f"{path.name}: its content is not what its content_hash was made of")
    limit = shard.attributes.vocab_size
    if words is not None and limit is not None and limit != len(words):
        report.problems.append(f"{path.name}: made with a vocabulary of {limit:,}, the one here has {len(words):,}")
    report.problems += _differences(shard, entry)
    return report


def _verify_chunk(report: Report, shard: Shard, rows: slice, digest: ContentHash, special: SpecialIds | None) -> Iterator[str]:
    offsets = np.asarray(shard.offsets[rows.start : rows.stop + 1])
    if (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > shard.num_tokens:
        row = rows.start + int(np.argmax(np.diff(offsets) < 0))
        yield f"row {row}: `offsets` fall or leave the {shard.num_tokens:,} tokens stored"
        return
    instances, masks = shard[rows], None
    if shard.static_masks is not None:
        masks = shard.static_masks[rows]
        report.num_predictions = (report.num_predictions or 0) + len(masks.positions)
    digest.update(instances, masks)
    problems = list(find_problems(instances, shard.attributes, rows.start))
    yield from problems
    report.num_instances += len(instances)
    report.num_tokens += len(instances.tokens)
    report.num_random += int(np.asarray(instances.is_random_next).sum())
    if special is None or problems:
        return
    plain = instances if masks is None else undo_masks(instances, masks)
    if special.unknown is not None:
        report.num_unknown += int((plain.tokens == special.unknown).sum())
    yield from special_token_problems(plain, special, rows.start, shard.format == NVIDIA_FORMAT)


def special_token_problems(instances: Instances, special: SpecialIds, first_row: int, foreign: bool) -> Iterator[str]:
    """Yield a sentence for each misplaced special token; `foreign` text may hold them itself. Lengths are checked before."""
    tokens, starts, ends = instances.tokens, instances.offsets[:-1], instances.offsets[1:]
    end_of_a = starts + np.asarray(instances.segment_b_start) - 1
    faults = {
        "does not begin with [CLS]": tokens[starts] != special.cls,
        "does not end with [SEP]": tokens[ends - 1] != special.sep,
        "has no [SEP] before segment B": tokens[end_of_a] != special.sep,
    }
    if not foreign:
        is_special = np.isin(tokens, [i for i in (special.cls, special.sep, special.pad, special.mask) if i is not None])
        extra = np.add.reduceat(is_special, starts, dtype=np.int64) - 2 - (end_of_a != ends - 1)
        faults["has a special token inside a segment"] = (extra > 0) & ~np.logical_or.reduce(list(faults.values()))
    for what, bad in faults.items():
        if bad.any():
            yield f"row {first_row + int(np.argmax(bad))}: {what} ({int(bad.sum()):,} such rows)"


def _differences(shard: Shard, entry: dict[str, Any] | None) -> Iterator[str]:
    if entry is None:
        return
    for key, value in vars(shard.summary).items():
        if entry[key] != value:
            yield f"{shard.path.name}: {key} is {value}, {MANIFEST_NAME} says {entry[key]}"


def _problems_of_all(reports: list[Report], max_unknown_rate: float) -> Iterator[str]:
    whole = _total(reports, "all")
    if whole.num_instances:
        share, tolerance = whole.num_random / whole.num_instances, 1.5 / whole.num_instances**0.5
        if not _BALANCE[0] - tolerance <= share <= _BALANCE[1] + tolerance:
            yield (
                f"all shards: {share:.1%} of the pairs are random, about half should be (a corpus whose documents have one "
                "sentence each gives this)"
            )
    if whole.num_tokens and whole.num_unknown / whole.num_tokens > max_unknown_rate:
        yield (
            f"all shards: {whole.num_unknown / whole.num_tokens:.1%} of the tokens are [UNK], more than {max_unknown_rate:.1%}: "
            "the vocabulary does not fit the text"
        )


def _uneven(reports: list[Report], allowed: int) -> Iterator[str]:
    for split in dict.fromkeys(report.split for report in reports):
        sizes = [report.num_instances for report in reports if report.split == split and not report.problems]
        if sizes and max(sizes) - min(sizes) > allowed:
            yield f"{split} shards: {min(sizes):,} to {max(sizes):,} instances, they should differ by {allowed} at most"


def _total(reports: list[Report], split: str) -> Report:
    total = Report(f"{len(reports)} shards", split, len(reports))
    for report in reports:
        total.add(report)
    return total


def _print_table(reports: list[Report]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Shards")
    static = any(report.num_predictions is not None for report in reports)
    names = ["split", "shard", "instances", "tokens", "length", "fill", "random", "unknown", "masked"]
    for name in [*(names if static else names[:-1]), ""]:
        table.add_column(name, justify="left" if name in ("split", "shard", "") else "right", no_wrap=name != "shard")
    for split in dict.fromkeys(report.split for report in reports):
        mine = [report for report in reports if report.split == split]
        few = len(mine) <= _MAX_LISTED_SHARDS
        for report in mine if few else [r for r in mine if r.problems][:_MAX_LISTED_SHARDS]:
            table.add_row(*_cells(report, static))
        if len(mine) > 1:
            table.add_row(*_cells(_total(mine, split), static), style="bold")
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def _cells(report: Report, static: bool) -> list[str]:
    instances, tokens = max(report.num_instances, 1), max(report.num_tokens, 1)
    return [
        report.split,
        report.name,
        f"{report.num_instances:,}",
        f"{report.num_tokens:,}",
        f"{report.num_tokens / instances:.1f}",
        f"{report.num_tokens / max(report.num_places, 1):.1%}",
        f"{report.num_random / instances:.1%}",
        f"{report.num_unknown / tokens:.3%}",
        *([f"{report.num_predictions or 0:,}"] if static else []),
        f"{len(report.problems)} problem(s)" if report.problems else "ok",
    ]
