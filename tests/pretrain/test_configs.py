"""configs/: every file parses, builds its model, and holds NVIDIA's published recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from models.bert import BertForPreTraining
from pretrain.config import Config, parse, to_dict

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# max_seq_length, max_predictions_per_seq, global batch, learning rate, warm-up, steps (DeepLearningExamples, BERT, LAMB).
PHASES = {"phase1": (128, 20, 65536, 6e-3, 0.2843, 7038), "phase2": (512, 80, 32768, 4e-3, 0.128, 1563)}
PARAMETERS = {"bert_large": 336_232_258, "bert_base": 110_111_042}


def load(path: Path, *more: str) -> Config:
    return parse([f"--config={path}", "--data.path=somewhere", "--train.output_dir=run", *more])


def test_the_recipes_are_all_there() -> None:
    expected = {f"{size}_{phase}{twin}" for size in PARAMETERS for phase in PHASES for twin in ("", "_baseline")}
    assert {path.stem for path in CONFIGS} >= expected | {"quickstart"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_parses_and_builds_its_model(path: Path) -> None:
    config = load(path)
    model_config = config.model.bert_config(30528, config.train.activation_checkpointing)
    with torch.device("meta"):
        model = BertForPreTraining(model_config, torch.bfloat16)
    size = path.stem.partition("_phase")[0]
    if size in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[size]
    assert path.read_text().startswith("#"), "says what it is for"


@pytest.mark.parametrize("path", [p for p in CONFIGS if "_phase" in p.stem], ids=lambda path: path.stem)
def test_recipes_are_nvidias(path: Path) -> None:
    config = load(path)
    length, predictions, batch, rate, warmup, steps = next(recipe for phase, recipe in PHASES.items() if phase in path.stem)
    assert (config.data.max_seq_length, config.data.max_predictions_per_seq) == (length, predictions)
    assert (config.train.global_batch_size, config.train.max_steps) == (batch, steps)
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("lamb", rate)
    assert (config.schedule.name, config.schedule.warmup_proportion) == ("poly", warmup)
    optimizer = config.optimizer
    assert (optimizer.eps, optimizer.weight_decay, optimizer.betas, optimizer.max_grad_norm) == (1e-6, 0.01, (0.9, 0.999), 1.0)
    # The position table is that of phase 2 already.
    assert config.model.max_position_embeddings == 512
    assert config.train.precision == "bf16"
    assert config.model.preset in path.stem


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem.endswith("_baseline")], ids=lambda path: path.stem)
def test_a_baseline_differs_from_its_twin_in_layers_and_micro_batch_alone(path: Path) -> None:
    baseline, twin = load(path), load(path.with_name(path.name.replace("_baseline", "")))
    assert (baseline.model.layers, twin.model.layers) == ("torch", "tempo")
    ours, theirs = to_dict(baseline), to_dict(twin)
    # The baseline keeps more for the backward pass and takes fewer sequences at a time: the curve does not depend on that.
    assert ours["train"].pop("micro_batch_size") <= theirs["train"].pop("micro_batch_size")
    ours["model"].pop("layers")
    theirs["model"].pop("layers")
    assert ours == theirs


def test_yaml_files_hold_no_key_twice() -> None:
    class Strict(yaml.SafeLoader):
        pass

    def no_duplicates(loader: Strict, node: yaml.MappingNode) -> dict[object, object]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key twice in {keys}"
        return {loader.construct_object(k): loader.construct_object(v, deep=True) for k, v in node.value}

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, no_duplicates)
    for path in CONFIGS:
        assert isinstance(yaml.load(path.read_text(), Strict), dict)
