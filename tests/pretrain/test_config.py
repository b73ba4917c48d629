"""pretrain.config: YAML and command line, refusals with their messages, --help."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pretrain.config import Config, UserError, build_parser, parse, to_dict
from pretrain.sections import DataSection, ModelSection, TrainSection

ROOT = Path(__file__).parent.parent.parent
NEEDED = ["--data.path=somewhere", "--train.output_dir=run"]


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as error:
        parse([*NEEDED, *arguments])
    return str(error.value)


def write(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return f"--config={path}"


def test_defaults_are_nvidias_phase_1() -> None:
    config = parse(NEEDED)
    assert (config.model.preset, config.optimizer.name, config.schedule.name) == ("bert_large", "lamb", "poly")
    assert (config.train.max_steps, config.train.global_batch_size, config.optimizer.learning_rate) == (7038, 65536, 6e-3)
    assert config.optimizer.betas == (0.9, 0.999)


def test_command_line_wins_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", {"train": {"seed": 7, "max_steps": 10}, "optimizer": {"betas": [0.8, 0.9]}})
    config = parse([file, *NEEDED, "--train.seed", "8"])
    assert (config.train.seed, config.train.max_steps, config.train.log_every) == (8, 10, 1)
    assert config.optimizer.betas == (0.8, 0.9)


def test_numbers_in_exponent_form_are_numbers(tmp_path: Path) -> None:
    # YAML 1.1 reads 6e-3 as text.
    assert parse([write(tmp_path / "c.yaml", "optimizer: {learning_rate: 6e-3}"), *NEEDED]).optimizer.learning_rate == 6e-3
    assert parse([*NEEDED, "--optimizer.learning_rate=4e-3"]).optimizer.learning_rate == 4e-3


def test_null_lists_and_booleans_from_the_command_line() -> None:
    config = parse([*NEEDED, "--wandb.tags=[a, b]", "--model.inplace_gelu=false", "--data.max_seq_length=null"])
    assert config.wandb.tags == ["a", "b"]
    assert config.model.inplace_gelu is False
    assert config.model.inplace_layer_norm is None
    assert config.data.max_seq_length is None


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = parse([*NEEDED, "--model.layers=torch", "--optimizer.betas=[0.5,0.6]", "--wandb.tags=[x]"])
    assert parse([write(tmp_path / "config.yaml", to_dict(config))]) == config


def test_sections_are_frozen() -> None:
    config = parse(NEEDED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argument", "key", "suggestion"),
    [
        ("--train.max_step=3", "train.max_step", "did you mean 'train.max_steps'?"),
        ("--modl.layers=tempo", "modl.layers", "did you mean 'model.layers'?"),
        ("--max_steps=3", "max_steps", "did you mean 'train.max_steps'?"),
        ("--optimizer.lerning_rate=1", "optimizer.lerning_rate", "did you mean 'optimizer.learning_rate'?"),
    ],
)
def test_unknown_keys_on_the_command_line_are_refused_with_a_suggestion(argument: str, key: str, suggestion: str) -> None:
    message = refusal(argument)
    assert f"unknown key '{key}' in the command line" in message
    assert suggestion in message


def test_unknown_keys_and_sections_in_yaml_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    message = refusal(write(path, {"train": {"micro_batchsize": 3}}))
    assert f"unknown key 'train.micro_batchsize' in {path}" in message
    assert "did you mean 'train.micro_batch_size'?" in message
    message = refusal(write(path, {"optimiser": {"name": "lamb"}}))
    assert f"unknown section 'optimiser' in {path}" in message
    assert "did you mean 'optimizer'?" in message


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--model.layers=tempoo", ["model.layers", "'tempoo'", "torch, tempo", "did you mean 'tempo'?"]),
        ("--train.precision=fp8", ["train.precision", "'fp8'", "fp32, bf16, fp16"]),
        ("--model.gelu_side_bits=3", ["model.gelu_side_bits", "3", "1, 4"]),
        ("--train.max_steps=many", ["train.max_steps", "'many'", "a whole number"]),
        ("--train.seed=1.5", ["train.seed", "1.5", "a whole number"]),
        ("--optimizer.eps=small", ["optimizer.eps", "'small'", "a number"]),
        ("--optimizer.betas=0.9", ["optimizer.betas", "0.9", "two numbers"]),
        ("--optimizer.betas=[a, b]", ["optimizer.betas", "two numbers"]),
        ("--optimizer.betas=[0.1, 0.2, 0.3]", ["optimizer.betas", "0.3", "two numbers"]),
        ("--wandb.tags=x", ["wandb.tags", "'x'", "a list"]),
        ("--optimizer.nvlamb=perhaps", ["optimizer.nvlamb", "'perhaps'", "true or false"]),
        ("--data.max_seq_length=long", ["data.max_seq_length", "'long'", "a whole number or null"]),
        ("--model.preset=bert_lage", ["model.preset", "'bert_lage'", "bert_tiny, bert_mini", "did you mean 'bert_large'?"]),
    ],
)
def test_ill_typed_values_are_refused_naming_key_value_and_what_is_allowed(argument: str, parts: list[str]) -> None:
    message = refusal(argument)
    for part in parts:
        assert part in message


def test_ill_typed_values_in_yaml_are_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "c.yaml", {"train": {"max_steps": "many"}}))
    assert "train.max_steps" in message
    assert "'many'" in message
    assert "a whole number" in message


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("--train.max_steps=0", "train.max_steps must be at least 1, got 0"),
        ("--train.global_batch_size=0", "train.global_batch_size must be at least 1, got 0"),
        ("--train.micro_batch_size=-4", "train.micro_batch_size must be at least 1, got -4"),
        ("--train.eval_every=-1", "train.eval_every must be at least 0, got -1"),
        ("--train.eval_samples=0", "train.eval_samples must be at least 1, got 0"),
        ("--train.stop_after_steps=0", "train.stop_after_steps must be at least 1, got 0"),
        ("--data.num_workers=-1", "data.num_workers must be at least 0, got -1"),
        ("--data.mask_probability=1.5", "data.mask_probability must lie between 0 and 1, got 1.5"),
        ("--schedule.warmup_proportion=1.0", "schedule.warmup_proportion must lie in [0, 1), got 1.0"),
        ("--optimizer.learning_rate=0", "optimizer.learning_rate must be positive and finite, got 0.0"),
        ("--optimizer.learning_rate=.inf", "optimizer.learning_rate must be positive and finite, got inf"),
        ("--optimizer.weight_decay=.nan", "optimizer.weight_decay must be at least 0, got nan"),
        ("--optimizer.betas=[0.9, 1.0]", "optimizer.betas must lie in [0, 1), got (0.9, 1.0)"),
        ("--train.initial_loss_scale=0", "train.initial_loss_scale must be positive, got 0"),
        ("--model.hidden_dropout=1.2", "model.hidden_dropout must lie in [0, 1], got 1.2"),
        ("--model.num_heads=5", "model.hidden_size"),
        ("--data.max_seq_length=1024", "model.max_position_embeddings (512)"),
        ("--data.max_seq_length=4", "data.max_seq_length is 4"),
    ],
)
def test_values_out_of_range_are_refused_with_key_and_range(argument: str, part: str) -> None:
    assert part in refusal(argument)


def test_what_a_run_cannot_do_without_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"data\.path is not set: .*--data\.path DIR"):
        parse(["--train.output_dir=run"])
    with pytest.raises(UserError, match=r"train\.output_dir is not set: .*--train\.output_dir RUN"):
        parse(["--data.path=somewhere"])


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("train: [", "is not valid YAML"),
        ("- 1\n- 2\n", "must hold sections"),
        ("", "must hold sections"),
        ("train: 3", "section 'train'"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, content: str, part: str) -> None:
    message = refusal(write(tmp_path / "c.yaml", content))
    assert part in message
    assert str(tmp_path / "c.yaml") in message


def test_a_missing_file_is_named() -> None:
    assert "--config: cannot read /nowhere/c.yaml: No such file or directory" in refusal("--config=/nowhere/c.yaml")
    assert "/nowhere/c.yaml" in refusal("--config", "/nowhere/c.yaml")


def test_stray_words_and_missing_values_are_refused() -> None:
    assert "word" in refusal("word")
    assert "train.device" in refusal("--train.device")


def test_help_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = build_parser().format_help()
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):  # type: ignore[arg-type]
            assert f"--{section.name}.{field.name} " in text
            described = (section.default_factory.__doc__ or "").partition(f"        {field.name}: ")[2]  # type: ignore[union-attr]
            assert described, f"{section.name}.{field.name} is not documented"
            first_words = " ".join(described.partition("\n")[0].split()[:3])
            assert first_words.rstrip(".") in " ".join(text.split())
    with pytest.raises(SystemExit) as exit_info:
        parse(["--help"])
    assert exit_info.value.code == 0
    assert "--train.max_steps" in capsys.readouterr().out


def test_print_config_prints_yaml_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse([*NEEDED, "--train.seed=9", "--print_config"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert parse([write(tmp_path / "c.yaml", printed)]) == parse([*NEEDED, "--train.seed=9"])


def test_model_section_takes_sizes_from_the_preset_and_overrides() -> None:
    model = ModelSection(preset="bert_base", num_layers=3, gelu="tanh").bert_config(vocab_size=100, activation_checkpointing=True)
    assert (model.hidden_size, model.num_heads, model.intermediate_size) == (768, 12, 3072)
    assert (model.num_layers, model.vocab_size, model.gelu, model.activation_checkpointing) == (3, 100, "tanh", True)


def test_every_field_of_the_model_can_be_set() -> None:
    own = {f.name for f in dataclasses.fields(ModelSection)}
    bert = {f.name for f in dataclasses.fields(ModelSection().bert_config(100))}
    # BERT's two segments are not a choice; activation checkpointing is train's.
    assert bert - own == {"type_vocab_size", "activation_checkpointing"}
    assert "activation_checkpointing" in {f.name for f in dataclasses.fields(TrainSection)}
    assert DataSection().path == ""


def test_the_command_exits_with_2_and_one_line() -> None:
    command = [sys.executable, "run_pretraining.py", *NEEDED, "--model.layers=tempoo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.layers")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
