"""Which checkpoint a run goes on from, and whether configuration and data still are what it was trained with."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
from pathlib import Path
from typing import IO, Any

from models.config import BertConfig
from pretrain import checkpoint
from pretrain.config import Config, UserError, to_dict
from pretrain.data import PretrainingData
from pretrain.metrics import METRICS_NAME
from pretrain.sections import ModelSection

log = logging.getLogger(__name__)

_LOCK_NAME = ".lock"

# Keys that must not change between the parts of one training: each would silently bend the curve, or be overruled by the
# optimizer's saved state.
_FIXED_KEYS = (
    "train.seed",
    "train.global_batch_size",
    "data.max_seq_length",
    "data.max_predictions_per_seq",
    "data.mask_probability",
    "data.whole_word_masking",
    "optimizer.name",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
)
# Of the model, what the weights were trained for; `layers` and its techniques compute the same and may change.
_ARCHITECTURE = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "intermediate_size",
    "max_position_embeddings",
    "gelu",
    "layer_norm_eps",
)
# Keys that change nothing in the curve.
_HARMLESS_SECTIONS = ("wandb", "tempo")
_HARMLESS_KEYS = (
    "data.path",
    "data.eval_path",
    "data.num_workers",
    "train.output_dir",
    "train.log_every",
    "train.eval_every",
    "train.eval_samples",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.micro_batch_size",
    "train.resume",
    "train.init_from",
    "train.activation_checkpointing",
    "train.num_threads",
    "train.device",
    "train.max_consecutive_skips",
    "train.stop_after_steps",
    "model.vocab_size",
)


def holds_run(run: Path) -> bool:
    """Whether a directory has metrics or checkpoints of a run."""
    return (run / METRICS_NAME).exists() or bool(checkpoint.list_checkpoints(run))


def hold_run(run: Path) -> IO[str]:
    """Make the run directory this process's own until it ends: two trainings would write into each other's metrics.

    Returns:
        The locked file; the lock lasts as long as it is open. A record lock, which data workers do not inherit, so a run that
        was killed can be started again at once.

    Raises:
        UserError: another process trains there, or the directory cannot be made.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = (run / _LOCK_NAME).open("w")
    except OSError as error:
        raise UserError(f"train.output_dir {run} cannot be written: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise UserError(
            f"another process is training in {run}: wait for it or stop it, or choose another train.output_dir"
        ) from None
    except OSError as error:
        log.warning("%s cannot be locked (%s); see to it that no other process trains there", run, error)
    return file


def find_checkpoint(config: Config) -> Path | None:
    """Return the checkpoint to resume from, as `train.resume` says; None starts anew.

    Raises:
        UserError: the run directory cannot take this run.
    """
    run, resume = Path(config.train.output_dir), config.train.resume
    if run.exists() and not run.is_dir():
        raise UserError(f"train.output_dir {run} is a file; choose a directory")
    if resume == "auto":
        latest = checkpoint.find_latest_valid(run)
        if latest is None and (broken := checkpoint.list_checkpoints(run)):
            raise UserError(
                f"no checkpoint of {run} can be loaded ({broken[-1].name}: {checkpoint.problem_with(broken[-1])}), and starting"
                f" anew would overwrite its metrics: repair {broken[-1].parent}, or choose another train.output_dir"
            )
        return latest
    if resume == "never":
        if holds_run(run):
            raise UserError(
                f"{run} holds a run already, and train.resume is 'never': choose another train.output_dir, delete {run}, or"
                " use --train.resume auto to go on"
            )
        return None
    try:
        found = checkpoint.resolve(resume)
    except ValueError as error:
        raise UserError(f"train.resume must be auto, never, or a run directory or checkpoint: {error}") from error
    if holds_run(run) and found.parent.parent.resolve() != run.resolve():
        raise UserError(
            f"train.resume is {resume}, but train.output_dir {run} holds another run: choose another train.output_dir, or"
            " use --train.resume auto to go on with that one"
        )
    return found


def _get(config: dict[str, Any], key: str) -> Any:
    section, name = key.split(".")
    return config.get(section, {}).get(name)


def _model(config: dict[str, Any]) -> BertConfig:
    known = {field.name for field in dataclasses.fields(ModelSection)}
    section = ModelSection(**{name: value for name, value in config["model"].items() if name in known})
    return section.bert_config(vocab_size=section.vocab_size or 30522)


def check_same_model(config: Config, saved: dict[str, Any], path: Path) -> None:
    """Refuse weights that were trained for a model that computes something else; equal shapes do not show it.

    Raises:
        UserError: names the key and both values.
    """
    before, now = _model(saved["config"]), _model(to_dict(config))
    for name in _ARCHITECTURE:
        if getattr(before, name) != getattr(now, name):
            raise UserError(
                f"{path} was trained with model.{name} = {getattr(before, name)}, and now it is {getattr(now, name)}:"
                " set it back, or train a new model in another train.output_dir"
            )


def check_same_vocabulary(data: PretrainingData, saved: dict[str, Any], path: Path) -> None:
    """Refuse weights whose token ids mean other words.

    Raises:
        UserError: says so.
    """
    before = saved.get("vocab_hash")
    if None not in (before, data.vocab_hash) and before != data.vocab_hash:
        raise UserError(
            f"{path} was trained with another vocabulary than the data in {data.path} was made with (vocab.txt differs):"
            " build the data again with --vocab and the vocab.txt of the first training"
        )


def check_resumable(config: Config, data: PretrainingData, saved: dict[str, Any], path: Path) -> None:
    """Refuse to go on with another seed, batch, model or data: the curve would bend and nobody would know why.

    Other changes, such as a lower learning rate after a divergence, are the user's decision and named in a warning.

    Raises:
        UserError: names the key and both values.
    """
    now = to_dict(config)
    elsewhere = f"start a new run with --train.init_from {path} and another --train.output_dir"
    for key in _FIXED_KEYS:
        before, after = _get(saved["config"], key), _get(now, key)
        if before != after:
            raise UserError(f"{path} was trained with {key} = {before}, and now it is {after}: set it back, or {elsewhere}")
    check_same_model(config, saved, path)
    if saved["data"] != data.fingerprint:
        raise UserError(
            f"{path} was trained on other data than {data.path} holds (content hashes differ): set data.path back, or {elsewhere}"
        )
    keys = [f"{section}.{name}" for section, values in now.items() for name in values]
    for key in keys:
        before, after = _get(saved["config"], key), _get(now, key)
        if before != after and key not in _HARMLESS_KEYS and key.split(".")[0] not in _HARMLESS_SECTIONS:
            log.warning("%s was %s until step %s, and is %s from here on", key, before, saved["step"], after)
