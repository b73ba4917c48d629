"""The configuration from a YAML file and `--section.key value` on the command line, checked; `sections` says what there is."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from models.config import suggest
from pretrain.schedule import check_schedule
from pretrain.sections import Config, UserError, to_dict

set_parsing_settings(docstring_parse_attribute_docstrings=False)


_SECTIONS = {f.name: f.default_factory for f in dataclasses.fields(Config)}
_KEYS = {
    f"{section}.{f.name}": f
    for section, kind in _SECTIONS.items()
    for f in dataclasses.fields(kind)  # type: ignore[arg-type]
}
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "two numbers such as [0.9, 0.999]",
    list: "a list such as [a, b]",
    NoneType: "null",
}


def _refuse_unknown(key: str, where: str) -> None:
    if key in _KEYS:
        return
    section, _, name = key.partition(".")
    bare = [k for k in _KEYS if k.split(".")[1] == (name or section)]
    hint = f" (did you mean '{bare[0]}'?)" if bare else suggest(key, list(_KEYS))
    raise UserError(f"unknown key '{key}' in {where}{hint}; see python run_pretraining.py --help")


def _check_file(path: str) -> None:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config: cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config: {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config: {path} must hold sections ({', '.join(_SECTIONS)}), each with its keys")
    for section, values in content.items():
        if section not in _SECTIONS:
            raise UserError(f"unknown section '{section}' in {path}{suggest(section, list(_SECTIONS))}")
        if not isinstance(values, dict):
            raise UserError(f"section '{section}' in {path} must hold keys, got {values!r}")
        for name in values:
            _refuse_unknown(f"{section}.{name}", path)


def _check_unknown(arguments: list[str]) -> None:
    """Refuse unknown keys with a suggestion, which jsonargparse does not make."""
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--config":
            value = value or (arguments[position + 1] if position + 1 < len(arguments) else "")
            _check_file(value)
        elif name.startswith("--") and name not in ("--help", "--print_config"):
            _refuse_unknown(name[2:], "the command line")


def _describe_type(kind: Any) -> str:
    """What a key of this type takes, in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    name = get_origin(kind) or kind
    return _TYPE_NAMES[name] if name in _TYPE_NAMES else " or ".join(map(_describe_type, get_args(kind)))


def _say_what_is_allowed(message: str) -> str:
    """Turn jsonargparse's message about an ill-typed value into one that a user can act on; others stay as they are."""
    found = re.search(r'Parser key "([\w.]+)".*(?:Got|Given) value: (.*)', message, re.DOTALL)
    if found is None or found[1] not in _KEYS:
        return message
    key, value = found[1], found[2].strip()
    section, name = key.split(".")
    kind = get_type_hints(_SECTIONS[section])[name]
    hint = suggest(value, [str(choice) for choice in get_args(kind)]) if get_origin(kind) is Literal else ""
    return f"{key} must be {_describe_type(kind)}, got {value!r}{hint}"


def build_parser() -> ArgumentParser:
    """Return the command line's parser; every key of every section is an option."""
    parser = ArgumentParser(
        prog="run_pretraining.py",
        description="Pretrain BERT. Keys come from --config and are overridden by --section.key value. Under torchrun the same"
        " command trains on any number of ranks.",
        epilog="example: python run_pretraining.py --config configs/bert_large_phase1.yaml --data.path DIR"
        " --train.output_dir RUN",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with the sections below")
    for section, kind in _SECTIONS.items():
        parser.add_class_arguments(kind, section)
    return parser


def _check(config: Config) -> None:
    """Raise UserError for values that make no sense, alone or together."""
    train, data = config.train, config.data
    if not data.path:
        raise UserError("data.path is not set: give the directory that 'python -m data_prep build' wrote (--data.path DIR)")
    if not train.output_dir:
        raise UserError("train.output_dir is not set: say where the run goes (--train.output_dir RUN)")
    at_least = {
        "train.max_steps": 1, "train.global_batch_size": 1, "train.micro_batch_size": 1, "train.log_every": 1,
        "train.eval_every": 0, "train.eval_samples": 1, "train.checkpoint_every": 1, "train.keep_checkpoints": 1,
        "train.num_threads": 0, "train.max_consecutive_skips": 1, "data.num_workers": 0, "data.max_predictions_per_seq": 1,
        "optimizer.eps": 0, "optimizer.weight_decay": 0, "optimizer.max_grad_norm": 0,
        "train.stop_after_steps": 1,
    }  # fmt: skip
    for key, least in at_least.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not value >= least:
            raise UserError(f"{key} must be at least {least}, got {value}")
    if not 0.0 < config.optimizer.learning_rate < math.inf:
        raise UserError(f"optimizer.learning_rate must be positive and finite, got {config.optimizer.learning_rate}")
    if not 0.0 < data.mask_probability < 1.0:
        raise UserError(f"data.mask_probability must lie between 0 and 1, got {data.mask_probability}")
    if not train.initial_loss_scale > 0:
        raise UserError(f"train.initial_loss_scale must be positive, got {train.initial_loss_scale}")
    if not all(0.0 <= beta < 1.0 for beta in config.optimizer.betas):
        raise UserError(f"optimizer.betas must lie in [0, 1), got {config.optimizer.betas}")
    length = data.max_seq_length
    if length is not None and not 8 <= length <= config.model.max_position_embeddings:
        raise UserError(
            f"data.max_seq_length is {length}, and must lie between 8 and model.max_position_embeddings"
            f" ({config.model.max_position_embeddings})"
        )
    check_schedule(config.schedule.name, config.schedule.warmup_proportion, train.max_steps)
    # The sizes are checked now, with any vocabulary, rather than after minutes of reading data.
    config.model.bert_config(config.model.vocab_size if config.model.vocab_size is not None else 30522)


def parse(arguments: list[str] | None = None) -> Config:
    """Parse a command line into a checked configuration.

    Raises:
        UserError: says which key is wrong, what was seen and what is allowed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not any(argument in ("--help", "-h") for argument in arguments):
        _check_unknown(arguments)
    parser = build_parser()
    try:
        namespace = parser.parse_args(arguments)
    except ArgumentError as error:
        raise UserError(_say_what_is_allowed(str(error))) from error
    sections = {
        section: kind(**{f.name: namespace[section][f.name] for f in dataclasses.fields(kind)})  # type: ignore
        for section, kind in _SECTIONS.items()
    }
    config = Config(**sections)
    try:
        _check(config)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    return config


__all__ = ["Config", "UserError", "build_parser", "parse", "to_dict"]
