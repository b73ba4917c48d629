"""Checkpoints: written whole or not at all, checked by hash, the newest valid one wins.

    checkpoints/step_00000200/model.pt       state_dict, float32
                              optimizer.pt   optimizer and loss scaler
                              progress.json  where training stands, the configuration, and the sha256 of the others

There is no generator state: order, masks and dropout are functions of (seed, sample).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

DIRECTORY = "checkpoints"
_PREFIX = "step_"
_UNFINISHED = ".unfinished_"
# Where a checkpoint lies for the moment in which another of the same step takes its place.
_REPLACED = ".replaced"
# Less free space than this after a failed write means that it failed for want of space.
_FULL_BYTES = 1 << 20
_MODEL, _OPTIMIZER, _PROGRESS = "model.pt", "optimizer.pt", "progress.json"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint directory's name."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def path_of(run: Path, step: int) -> Path:
    """Where a run's checkpoint of a step lies."""
    return run / DIRECTORY / f"{_PREFIX}{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoint directories, oldest first; complete or not."""
    found = [p for p in (run / DIRECTORY).glob(_PREFIX + "*") if p.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=step_of)


def _clean_up_after_a_killed_save(directory: Path) -> None:
    for leftover in directory.glob(_UNFINISHED + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for old in directory.glob(_PREFIX + "*" + _REPLACED):
        if old.with_suffix("").exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(old.with_suffix(""))


def save(run: Path, step: int, *, model: Mapping[str, Any], optimizer: Mapping[str, Any], progress: dict[str, Any]) -> Path:
    """Write a checkpoint of `step`.

    Args:
        run: the run directory.
        step: optimizer steps done.
        model: state_dict.
        optimizer: state of the optimizer and the scaler.
        progress: JSON: where training stands, and the configuration.

    Returns:
        The checkpoint's directory. On any failure (a full disk) older checkpoints are untouched.
    """
    directory = run / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    _clean_up_after_a_killed_save(directory)
    target = path_of(run, step)
    unfinished = directory / f"{_UNFINISHED}{target.name}"
    unfinished.mkdir()
    try:
        torch.save(dict(model), unfinished / _MODEL)
        torch.save(dict(optimizer), unfinished / _OPTIMIZER)
        hashes = {name: _sha256(unfinished / name) for name in (_MODEL, _OPTIMIZER)}
        text = json.dumps({**progress, "step": step, "sha256": hashes}, indent=2, sort_keys=True)
        (unfinished / _PROGRESS).write_text(text + "\n", encoding="utf-8")
        for name in (_MODEL, _OPTIMIZER, _PROGRESS):
            _sync(unfinished / name)
        _sync(unfinished)
        if target.exists():
            # Saved again after a resume from an older one: the name is free only once the old directory is out of the way.
            # Until the new one is in place, `find_latest_valid` finds the old one under its other name.
            old = target.with_name(target.name + _REPLACED)
            target.rename(old)
            unfinished.rename(target)
            _sync(directory)
            shutil.rmtree(old, ignore_errors=True)
        else:
            unfinished.rename(target)
        _sync(directory)
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(directory).free
        shutil.rmtree(unfinished, ignore_errors=True)
        # PyTorch's writer reports a full disk as a position in its archive.
        full = f"the disk is full, {free / 2**20:,.0f} MiB were left" if free < _FULL_BYTES else str(error)
        raise OSError(f"could not write the checkpoint {target}: {full}; older checkpoints are intact") from error
    return target


def problem_with(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint directory, or None where it is complete and its hashes are right."""
    try:
        hashes = json.loads((checkpoint / _PROGRESS).read_text(encoding="utf-8"))["sha256"]
        for name in (_MODEL, _OPTIMIZER):
            if _sha256(checkpoint / name) != hashes[name]:
                return f"{name} does not have the hash that {_PROGRESS} lists"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_PROGRESS} is not readable ({error})"
    return None


def find_latest_valid(run: Path) -> Path | None:
    """Return a run's newest complete checkpoint; broken ones are named in a warning and skipped."""
    replaced = {p.with_suffix("").name: p for p in (run / DIRECTORY).glob(_PREFIX + "*" + _REPLACED)}
    names = {p.name: p for p in list_checkpoints(run)}
    newest_first = sorted(replaced.keys() | names.keys(), key=lambda name: step_of(Path(name)), reverse=True)
    for checkpoint in [places[name] for name in newest_first for places in (names, replaced) if name in places]:
        problem = problem_with(checkpoint)
        if problem is None:
            return checkpoint
        log.warning("skipping the broken checkpoint %s: %s", checkpoint, problem)
    return None


def resolve(path: Path | str) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest valid one of a run directory.

    Raises:
        ValueError: there is none, or it is broken.
    """
    path = Path(path)
    if path.name == DIRECTORY and not (path / _PROGRESS).exists():
        path = path.parent
    if (path / DIRECTORY).is_dir():
        latest = find_latest_valid(path)
        if latest is None:
            raise ValueError(f"{path} has no valid checkpoint under {DIRECTORY}/")
        return latest
    if not any((path / name).exists() for name in (_MODEL, _OPTIMIZER, _PROGRESS)):
        why = f"it holds neither {DIRECTORY}/ nor {_PROGRESS}" if path.is_dir() else "there is no such directory"
        raise ValueError(f"{path} is neither a run directory nor a checkpoint (such as {_PREFIX}00000200): {why}")
    problem = problem_with(path)
    if problem is not None:
        raise ValueError(f"{path} is not a valid checkpoint: {problem}")
    return path


def load_progress(checkpoint: Path) -> dict[str, Any]:
    """Return progress.json's content."""
    return json.loads((checkpoint / _PROGRESS).read_text(encoding="utf-8"))


def load_optimizer(checkpoint: Path) -> dict[str, Any]:
    """Return the state of the optimizer and the scaler, on the CPU."""
    return torch.load(checkpoint / _OPTIMIZER, map_location="cpu", weights_only=True)


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights into `model`.

    Raises:
        ValueError: keys or shapes differ; every one is named.
    """
    state = torch.load(checkpoint / _MODEL, map_location="cpu", weights_only=True)
    own = model.state_dict()
    problems = [f"missing {key}" for key in own.keys() - state.keys()]
    problems += [f"unexpected {key}" for key in state.keys() - own.keys()]
    problems += [
        f"{key} is {list(state[key].shape)} there and {list(own[key].shape)} here"
        for key in own.keys() & state.keys()
        if own[key].shape != state[key].shape
    ]
    if problems:
        raise ValueError(f"the checkpoint {checkpoint} is of another model: {'; '.join(sorted(problems))}")
    model.load_state_dict(state)


def _remove(checkpoint: Path) -> None:
    # Renamed first: a half-removed directory must not look like a checkpoint.
    doomed = checkpoint.with_name(f"{_UNFINISHED}pruned_{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def discard_later(run: Path, step: int) -> None:
    """Remove checkpoints after `step`, where training goes on: they are not of this training, and must not be resumed from."""
    for checkpoint in list_checkpoints(run):
        if step_of(checkpoint) > step:
            log.warning("going on from step %d: removing the later checkpoint %s", step, checkpoint)
            _remove(checkpoint)


def prune(run: Path, keep: int, step: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints (at least one), of those up to `step`, which was saved just now.

    Later ones count for nothing: broken ones, or those of a training that was abandoned.
    """
    discard_later(run, step if step is not None else sys.maxsize)
    for old in list_checkpoints(run)[: -max(keep, 1)]:
        _remove(old)
