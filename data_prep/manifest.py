"""The manifest beside the shards, and how a path given by a user becomes a list of shard files.

Re-exported by `data_prep.shards`.
"""

import glob
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from data_prep.atomic_write import write_bytes_atomically

MANIFEST_NAME = "manifest.json"
VOCAB_NAME = "vocab.txt"
SPLITS = ("train", "eval")
FORMAT = "tempo-bert/1"
NVIDIA_FORMAT = "nvidia"
_EVAL_NAME = re.compile(r"(^|[_.-])(eval|evaluation|test|valid|validation|dev|heldout)([_.-]|\d|$)", re.IGNORECASE)


class MissingSplitError(ValueError):
    """The data exist, but the split asked for does not (training may then go without evaluation)."""


def write_manifest(directory: str | Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json into `directory`, atomically; call it last, since it declares the directory complete.

    Keys: format, splits {"train": [{name, num_instances, num_tokens, content_hash}], "eval": [...]}, max_seq_length,
    vocab {file, size, hash}, tokenizer, sources [{source, documents, ...}], creation, totals; `format` may be left out.
    """
    manifest = {"format": FORMAT, **manifest}
    _check_manifest(manifest, "the manifest to be written")
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    write_bytes_atomically(Path(directory) / MANIFEST_NAME, text.encode())


def read_manifest(directory: str | Path) -> dict[str, Any] | None:
    """Read and check manifest.json of `directory`; None where there is none, ValueError naming the file if damaged."""
    path = Path(directory) / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); run the command that made it again") from None
    _check_manifest(manifest, str(path))
    return manifest


def _check_manifest(manifest: Any, name: str) -> None:
    if not isinstance(manifest, dict):
        raise ValueError(f"{name}: a JSON object is expected, found {type(manifest).__name__}")
    if manifest.get("format") not in (FORMAT, NVIDIA_FORMAT):
        raise ValueError(f"{name}: format {manifest.get('format')!r}, this version reads {FORMAT!r}; build the data again")
    splits = manifest.get("splits")
    if not isinstance(splits, dict) or not isinstance(splits.get("train"), list):
        raise ValueError(f"{name}: `splits` must hold a list `train`")
    for split, entries in splits.items():
        for entry in entries:
            if absent := {"name", "num_instances", "num_tokens", "content_hash"} - set(entry):
                raise ValueError(f"{name}: a shard of split {split!r} lacks {sorted(absent)}")


def list_shards(path: str | Path, split: str = "train") -> list[Path]:
    """The shard files of one split, in the order that numbers their instances.

    `path` is a directory with a manifest, a directory of .hdf5/.h5 files (NVIDIA's), one file, or a glob pattern. Without
    a manifest, files named like held-out data (eval, test, valid, dev between `_`, `-`, `.` or digits) are the split
    "eval", all others "train"; files given explicitly are "train" where none has another name.
    Raises MissingSplitError when there are shards but none of this split, ValueError otherwise.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown, there are {' and '.join(SPLITS)}")
    text, path = str(path), Path(path)
    if path.is_dir():
        if (manifest := read_manifest(path)) is not None:
            return _from_manifest(path, manifest, split)
        files = sorted([*path.glob("*.hdf5"), *path.glob("*.h5")])
        files = [file for file in files if not file.name.startswith(".")]
        if not files:
            raise ValueError(f"{path}: no {MANIFEST_NAME} and no .hdf5 or .h5 file in this directory")
        return _choose(files, split, text)
    if path.is_file():
        return _choose([path], split, text)
    files = sorted(Path(name) for name in glob.glob(text, recursive=True) if Path(name).is_file())
    if not files:
        kind = "matches no file" if glob.has_magic(text) else "no such file or directory"
        raise ValueError(f"{text}: {kind}")
    return _choose(files, split, text)


def _from_manifest(directory: Path, manifest: dict[str, Any], split: str) -> list[Path]:
    entries = manifest["splits"].get(split, [])
    if not entries:
        raise MissingSplitError(
            f"{directory}: the manifest lists no {split!r} shards"
            + ("; build with a held-out part (--eval-fraction) to have them" if split == "eval" else "")
        )
    files = [directory / entry["name"] for entry in entries]
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(
            f"{missing[0]}: listed in {MANIFEST_NAME} but not there ({len(missing)} of {len(files)} shards missing); "
            "copy the directory completely or build it again"
        )
    return files


def _choose(files: list[Path], split: str, name: str) -> list[Path]:
    held_out = [file for file in files if _EVAL_NAME.search(file.stem)]
    if split == "eval":
        if not held_out:
            raise MissingSplitError(f"{name}: no held-out shard (named eval, test, valid or dev) among {len(files)}")
        return held_out
    return [file for file in files if file not in set(held_out)] or files


def vocab_hash(path: str | Path) -> str:
    """SHA-256 of the file's bytes, which shards and manifest record."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
