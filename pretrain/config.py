"""The configuration: one frozen dataclass per section, from a YAML file and `--section.key value` on the command line."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from models.config import BertConfig, suggest
from pretrain.schedule import check_schedule

set_parsing_settings(docstring_parse_attribute_docstrings=False)


class UserError(ValueError):
    """A mistake that the user can mend; the command line prints it and exits with code 2."""


@dataclass(frozen=True)
class ModelSection:
    """The model. Fields left at null come from the preset.

    Args:
        preset: bert_tiny, bert_mini, bert_small, bert_medium, bert_base or bert_large.
        layers: torch (the paper's baseline) or tempo.
        gelu: erf (exact) or tanh.
        vocab_size: entries of the vocabulary; null takes the data's.
        hidden_size: width of the model.
        num_layers: encoder layers.
        num_heads: attention heads per layer.
        intermediate_size: width inside the MLP.
        max_position_embeddings: longest sequence the model can take; stays 512 while training at 128.
        hidden_dropout: dropout after embeddings, attention and MLP.
        attention_dropout: dropout of the attention probabilities.
        layer_norm_eps: added to the variance in LayerNorm.
        initializer_range: standard deviation of the initial weights.
        inplace_gelu: switch this technique alone on or off; null follows layers.
        inplace_layer_norm: switch this technique alone on or off; null follows layers.
        dropout_recomputation: switch this technique alone on or off; null follows layers.
        gelu_side_bits: bits that in-place GELU keeps per element beside its output: 1, or 4 (16-bit gradients as good as exact).
        dropout_generator: torch, philox (masks that depend on seed, sample and place alone), or auto (philox where recomputed).
    """

    preset: str = "bert_large"
    layers: Literal["torch", "tempo"] = "tempo"
    gelu: Literal["erf", "tanh"] = "erf"
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 512
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    inplace_gelu: bool | None = None
    inplace_layer_norm: bool | None = None
    dropout_recomputation: bool | None = None
    gelu_side_bits: Literal[1, 4] = 1
    dropout_generator: Literal["auto", "torch", "philox"] = "auto"

    def bert_config(self, vocab_size: int, activation_checkpointing: bool = False) -> BertConfig:
        """Return the model's configuration for a vocabulary of `vocab_size`."""
        values = dataclasses.asdict(self)
        preset = values.pop("preset")
        values["vocab_size"] = vocab_size
        sizes = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
        overrides = {key: value for key, value in values.items() if value is not None or key not in sizes}
        return BertConfig.preset(preset, **overrides, activation_checkpointing=activation_checkpointing)


@dataclass(frozen=True)
class DataSection:
    """The training data.

    Args:
        path: directory that `python -m data_prep build` wrote, or NVIDIA HDF5 files (a directory, a file or a glob).
        eval_path: where the held-out data lies; null takes the eval split of path, if it has one.
        max_seq_length: length of every row; null takes the shards'.
        max_predictions_per_seq: most predicted tokens per sequence.
        mask_probability: share of the tokens to predict.
        whole_word_masking: mask whole words.
        num_workers: processes that make batches; 0 makes them in the training process.
    """

    path: str = ""
    eval_path: str | None = None
    max_seq_length: int | None = None
    max_predictions_per_seq: int = 20
    mask_probability: float = 0.15
    whole_word_masking: bool = False
    num_workers: int = 2


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer.

    Args:
        name: lamb or adamw.
        learning_rate: peak rate.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: decay of all weights but biases and LayerNorm.
        max_grad_norm: global gradient clipping; 0 does not clip.
        nvlamb: LAMB's trust ratio for undecayed parameters too.
    """

    name: Literal["lamb", "adamw"] = "lamb"
    learning_rate: float = 6e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    nvlamb: bool = False


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the steps.

    Args:
        name: poly (NVIDIA's recipe), linear, cosine or constant.
        warmup_proportion: share of the steps that warm up.
    """

    name: Literal["poly", "linear", "cosine", "constant"] = "poly"
    warmup_proportion: float = 0.2843


@dataclass(frozen=True)
class TrainSection:
    """The run.

    Args:
        output_dir: the run directory: config.yaml, metrics.jsonl, loss_curve.png, checkpoints/, environment.json.
        max_steps: optimizer steps of the whole schedule.
        global_batch_size: sequences per optimizer step, over all ranks and micro-batches.
        micro_batch_size: most sequences per forward pass of one rank.
        precision: dtype of activations and matrix products: fp32, bf16, or fp16 with dynamic loss scaling. Weights stay fp32.
        seed: of weights, data order, masks and dropout.
        log_every: steps between lines of metrics.jsonl.
        eval_every: steps between evaluations on held-out data; 0 never evaluates.
        eval_samples: held-out sequences per evaluation.
        checkpoint_every: steps between checkpoints; there is one at the end in any case.
        keep_checkpoints: newest checkpoints to keep.
        resume: auto (newest valid checkpoint of output_dir, or from the start), never, or a run directory or checkpoint.
        init_from: run directory or checkpoint whose weights to start from, with a new schedule: phase 2 after phase 1.
        activation_checkpointing: keep only each layer's input and run layers again in the backward pass.
        deterministic: use deterministic algorithms only.
        device: auto, cpu or cuda.
        num_threads: CPU threads per process; 0 leaves PyTorch's choice.
        initial_loss_scale: first loss scale of fp16.
        max_consecutive_skips: steps skipped in a row, for gradients that are not finite, before the run ends with an error.
        stop_after_steps: end this run early, with a checkpoint, after so many optimizer steps in all; null runs to max_steps.
    """

    output_dir: str = ""
    max_steps: int = 7038
    global_batch_size: int = 65536
    micro_batch_size: int = 32
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    seed: int = 42
    log_every: int = 1
    eval_every: int = 0
    eval_samples: int = 1024
    checkpoint_every: int = 200
    keep_checkpoints: int = 3
    resume: str = "auto"
    init_from: str | None = None
    activation_checkpointing: bool = False
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int = 0
    initial_loss_scale: float = 65536.0
    max_consecutive_skips: int = 20
    stop_after_steps: int | None = None


@dataclass(frozen=True)
class TempoSection:
    """The layers' kernels.

    Args:
        kernels: auto (compiled where there are any), required (an op without a compiled kernel is an error).
    """

    kernels: Literal["auto", "required"] = "auto"


@dataclass(frozen=True)
class WandbSection:
    """Mirror of metrics.jsonl in Weights & Biases; its failures never touch training.

    Args:
        mode: disabled, offline (sync later with `wandb sync`) or online.
        project: project to log to.
        entity: user or team; null takes the account's default.
        group: groups runs to compare, such as a baseline and its Tempo twin.
        name: name of the run; null takes the run directory's.
        tags: labels of the run.
    """

    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "tempo-bert"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Config:
    """Everything that a run is made of."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    tempo: TempoSection = field(default_factory=TempoSection)
    wandb: WandbSection = field(default_factory=WandbSection)


_SECTIONS = {f.name: f.default_factory for f in dataclasses.fields(Config)}  # type: ignore[misc]
_KEYS = {
    f"{section}.{f.name}": f
    for section, kind in _SECTIONS.items()
    for f in dataclasses.fields(kind)  # type: ignore[arg-type]
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
        parser.add_class_arguments(kind, section)  # type: ignore[arg-type]
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
        "optimizer.learning_rate": 0, "optimizer.eps": 0, "optimizer.weight_decay": 0, "optimizer.max_grad_norm": 0,
    }  # fmt: skip
    for key, least in at_least.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if not value >= least:
            raise UserError(f"{key} must be at least {least}, got {value}")
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
        raise UserError(str(error)) from error
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


def to_dict(config: Config) -> dict[str, Any]:
    """Return plain dicts, lists and numbers."""
    result = dataclasses.asdict(config)
    result["optimizer"]["betas"] = list(config.optimizer.betas)
    return result
