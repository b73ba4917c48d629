"""The configuration's sections: what can be set, with its default; one frozen dataclass each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import BertConfig


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
        eval_path: where the held-out data lies: its eval split, or all of it where there is none; null takes path's eval split.
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


def to_dict(config: Config) -> dict[str, Any]:
    """Return plain dicts, lists and numbers."""
    result = dataclasses.asdict(config)
    result["optimizer"]["betas"] = list(config.optimizer.betas)
    return result
