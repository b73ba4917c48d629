"""What happens once, before the first step: checks of data against model, what to resume, and the start-up summary."""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import sys
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch

import tempo
from data_prep.shards import MissingSplitError
from models.config import BertConfig
from pretrain.config import Config, UserError
from pretrain.data import MODEL_INPUTS, PretrainingData

if TYPE_CHECKING:
    from pretrain.trainer import Trainer

log = logging.getLogger(__name__)

ENVIRONMENT_NAME = "environment.json"


def prepare_process(config: Config) -> None:
    """Threads, determinism and matrix precision of this process."""
    if config.train.num_threads > 0:
        torch.set_num_threads(config.train.num_threads)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # fp32 means fp32: TensorFloat-32 stays off unless the precision is 16-bit, where it does not matter.
    torch.set_float32_matmul_precision("highest")
    if config.tempo.kernels == "required":
        device = "cuda" if config.train.device != "cpu" and torch.cuda.is_available() else "cpu"
        tempo.kernels.require(device)


def open_data(config: Config) -> tuple[PretrainingData, PretrainingData | None]:
    """Open the training data, and the held-out data where evaluation is wanted."""
    data = config.data
    settings: dict[str, Any] = {
        "max_seq_length": data.max_seq_length,
        "max_predictions_per_seq": data.max_predictions_per_seq,
        "mask_probability": data.mask_probability,
        "whole_word_masking": data.whole_word_masking,
        "seed": config.train.seed,
    }
    train_data = PretrainingData(data.path, **settings)
    if config.train.eval_every == 0:
        return train_data, None
    try:
        eval_data = PretrainingData(data.eval_path or data.path, split="eval", **settings)
    except MissingSplitError as error:
        if data.eval_path is None:
            log.warning("training goes on without evaluation: %s", error)
            return train_data, None
        eval_data = PretrainingData(data.eval_path, **settings)
    _check_same_tokens(train_data, eval_data)
    return train_data, eval_data


def _check_same_tokens(train_data: PretrainingData, eval_data: PretrainingData) -> None:
    for what in ("vocab_hash", "tokenizer"):
        one, other = getattr(train_data, what), getattr(eval_data, what)
        if one and other and one != other:
            raise UserError(
                f"the held-out data in {eval_data.path} was made with another vocabulary or tokenizer than the training data in"
                f" {train_data.path} ({what} {other} and {one}): build both with the same --vocab"
            )


def model_config(config: Config, data: PretrainingData, eval_data: PretrainingData | None = None) -> BertConfig:
    """Return the model's configuration; its vocabulary and length are checked against the data."""
    wanted, known = config.model.vocab_size, data.vocab_size
    if known is not None and wanted is not None and wanted != known:
        raise UserError(
            f"model.vocab_size is {wanted}, but the data in {data.path} was made with a vocabulary of {known}:"
            " leave model.vocab_size at null"
        )
    vocab_size = known or wanted or 30522
    for opened in (data, eval_data) if eval_data is not None else (data,):
        if vocab_size < opened.min_vocab_size:
            raise UserError(
                f"the data in {opened.path} holds token id {opened.min_vocab_size - 1}, but the model's vocabulary has"
                f" {vocab_size} entries: set model.vocab_size to {opened.min_vocab_size} or more"
            )
        if opened.max_seq_length > config.model.max_position_embeddings:
            raise UserError(
                f"the rows of {opened.path} are {opened.max_seq_length} long, but model.max_position_embeddings is"
                f" {config.model.max_position_embeddings}"
            )
    return config.model.bert_config(vocab_size, config.train.activation_checkpointing)


# ---- what is going to run ----


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: of the allocator on a GPU, of the process (resident) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _saved_bytes_per_token(trainer: Trainer) -> float:
    """Bytes that the forward pass of one small micro-batch keeps, per place in the padded rows."""
    count = min(trainer.config.train.micro_batch_size, 4)
    batch = trainer._to_device({**trainer.data.batch(0, count), "first_sample": 0})
    trainer.model.train()
    saved = tempo.saved_bytes(trainer.model, **{name: batch[name] for name in MODEL_INPUTS})
    return saved.total_bytes / batch["input_ids"].numel()


def _environment(trainer: Trainer) -> dict[str, Any]:
    config, device = trainer.config, trainer.device
    tokens_per_step = config.train.global_batch_size * trainer.data.max_seq_length
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "tempo": tempo.__version__,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "world_size": trainer.ranks.world_size,
        "kernels": tempo.kernels.summary(device.type),
        "num_parameters": sum(p.numel() for p in trainer.model.parameters()),
        "tokens_per_step": tokens_per_step,
        "saved_bytes_per_token": _saved_bytes_per_token(trainer),
    }


def _describe_kernels(trainer: Trainer) -> str:
    config = trainer.model.config
    used = []
    if config.uses_inplace_gelu:
        used += ["gelu_forward_", "gelu_backward"]
    if config.uses_inplace_layer_norm:
        used += ["layer_norm_forward", "layer_norm_backward"]
    if config.uses_dropout_recomputation:
        used += ["dropout", "softmax_dropout_forward", "softmax_dropout_backward"]
    kernels = tempo.kernels.summary(trainer.device.type)
    groups = {"compiled": [], "reference": []}  # type: dict[str, list[str]]
    for op in used:
        groups[kernels[op]].append(op)
    names = {"compiled": "compiled", "reference": "PyTorch reference"}
    return "; ".join(f"{names[how]}: {', '.join(ops)}" for how, ops in groups.items() if ops) or "PyTorch's own"


def describe_run(trainer: Trainer) -> str:
    """Write environment.json and return the start-up summary."""
    environment = _environment(trainer)
    text = json.dumps(environment, indent=2) + "\n"
    (trainer.run_dir / ENVIRONMENT_NAME).write_text(text, encoding="utf-8")
    train, bert, data = trainer.config.train, trainer.model.config, trainer.data
    epochs = train.max_steps * train.global_batch_size / data.num_instances
    lines = {
        "run": trainer.run_dir,
        "model": f"{environment['num_parameters']:,} parameters: {bert.num_layers} layers, hidden {bert.hidden_size},"
        f" {bert.num_heads} heads, vocabulary {bert.vocab_size:,}",
        "layers": f"{bert.layers} ({_describe_kernels(trainer)})",
        "kept for backward": f"{environment['saved_bytes_per_token']:,.0f} bytes per token",
        "data": f"{data.num_instances:,} sequences of up to {data.max_seq_length} tokens in {len(data.shards)} shard(s);"
        f" {epochs:.1f} epochs in {train.max_steps:,} steps",
        "batch": f"{train.global_batch_size:,} sequences ({environment['tokens_per_step']:,} tokens, padding included) per step,"
        f" {train.micro_batch_size} at a time on {trainer.ranks.world_size} rank(s)",
        "optimizer": f"{trainer.config.optimizer.name}, {trainer.config.schedule.name} schedule, {train.precision}",
        "device": f"{environment['device']}, PyTorch {environment['torch']}",
    }
    return "\n".join(f"{name:>18}  {value}" for name, value in lines.items())
