"""pretrain.trainer: the curve does not depend on how a batch is split, layers agree, skips touch nothing, user errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import tempo
from pretrain import checkpoint
from pretrain.progress import Progress
from pretrain.schedule import learning_rate
from pretrain.trainer import Trainer, TrainingFailed
from tests.run_factory import NVIDIA, config, losses, rows_of, stable_rows, train
from tests.shard_factory import NVIDIA_SHARD, NVIDIA_VOCAB, write_directory

FIELDS = {
    "step", "samples", "tokens", "epoch", "loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate",
    "grad_norm", "sequences_per_second", "tokens_per_second", "peak_memory_bytes", "skipped_steps",
}  # fmt: skip
EVALUATED = {"eval_loss", "eval_mlm_loss", "eval_nsp_loss", "eval_mlm_accuracy", "eval_nsp_accuracy"}


# ---- what a run leaves ----


def test_a_run_directory_is_complete(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    trainer = train(
        data_dir, run, train__eval_every=4, train__eval_samples=16, train__checkpoint_every=2, train__keep_checkpoints=2
    )
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [set(row) >= FIELDS for row in rows] == [True] * 6
    # Evaluated every four steps and at the end.
    assert [row["step"] for row in rows if set(row) >= EVALUATED] == [4, 6]
    assert [path.name for path in checkpoint.list_checkpoints(run)] == ["step_00000004", "step_00000006"]
    assert (run / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["max_steps"] == 6
    environment = json.loads((run / "environment.json").read_text())
    assert environment["num_parameters"] == sum(p.numel() for p in trainer.model.parameters())
    assert environment["tokens_per_step"] == 8 * 32
    assert environment["saved_bytes_per_token"] > 0
    assert set(environment["kernels"].values()) <= {"reference", "compiled"}
    summary = capsys.readouterr().out
    for part in (
        f"{environment['num_parameters']:,} parameters",
        "77 sequences of up to 32 tokens",
        "256 tokens",
        "gelu_forward_",
    ):
        assert part in summary


def test_rows_count_samples_tokens_and_epochs(data_dir: Path, tmp_path: Path) -> None:
    trainer = train(data_dir, tmp_path, train__max_steps=11)
    last = rows_of(tmp_path)[-1]
    assert last["samples"] == 11 * 8
    assert last["tokens"] == trainer.data.totals(0, 88)[0]
    assert last["epoch"] == pytest.approx(88 / 77)


def test_lines_are_logged_every_so_often_and_at_the_end(data_dir: Path, tmp_path: Path) -> None:
    train(data_dir, tmp_path, train__log_every=4)
    assert [row["step"] for row in rows_of(tmp_path)] == [4, 6]


def test_the_learning_rate_follows_the_schedule(data_dir: Path, tmp_path: Path) -> None:
    train(data_dir, tmp_path)
    expected = [learning_rate(t, name="poly", base=0.01, warmup_proportion=0.2, total_steps=6) for t in range(1, 7)]
    assert [row["learning_rate"] for row in rows_of(tmp_path)] == expected


def test_training_on_real_text_learns(tmp_path: Path) -> None:
    changes = {"train__max_steps": 15, "optimizer__learning_rate": 0.05, "optimizer__name": "adamw", "train__micro_batch_size": 8}
    train(NVIDIA_SHARD, tmp_path, **NVIDIA, **changes)
    curve = losses(tmp_path)
    assert curve[-1] < curve[0] - 2.0


@pytest.mark.parametrize("changes", [{"train__precision": "bf16"}, {"train__precision": "fp16"}, {"optimizer__name": "adamw"}])
@pytest.mark.parametrize("layers", ["torch", "tempo"])
def test_precisions_and_optimizers_train_in_both_layer_modes(
    data_dir: Path, tmp_path: Path, layers: str, changes: dict[str, Any]
) -> None:
    trainer = train(data_dir, tmp_path, model__layers=layers, train__max_steps=20, **changes)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    assert ("loss_scale" in rows_of(tmp_path)[-1]) == (changes.get("train__precision") == "fp16")


def test_nvidias_shard_trains_directly(tmp_path: Path) -> None:
    directory = tmp_path / "nvidia"
    directory.mkdir()
    shutil.copy(NVIDIA_SHARD, directory)
    shutil.copy(NVIDIA_VOCAB, directory / "vocab.txt")
    for number, path in enumerate((NVIDIA_SHARD, directory / NVIDIA_SHARD.name)):
        run = tmp_path / f"run_{number}"
        trainer = train(path, run, **NVIDIA, train__max_steps=3)
        assert trainer.data.max_seq_length == 128
        assert losses(run)[-1] < losses(run)[0]
    assert losses(tmp_path / "run_0") == losses(tmp_path / "run_1")


# ---- the curve is a function of configuration and data alone ----


@pytest.mark.parametrize(
    "changes", [{"model__layers": "tempo"}, {"model__layers": "torch", "model__dropout_generator": "philox"}]
)
def test_micro_batches_do_not_change_the_curve(data_dir: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    for size in (8, 3, 1):
        train(data_dir, tmp_path / str(size), train__micro_batch_size=size, **changes)
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "8"), rel=1e-5)
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "8"), rel=1e-5)


def test_runs_repeat_bit_for_bit_and_workers_change_nothing(data_dir: Path, tmp_path: Path) -> None:
    for name, changes in {"a": {}, "b": {}, "workers": {"data__num_workers": 2}, "seed": {"train__seed": 1}}.items():
        # PyTorch's own generator for the dropout: seeded for every micro-batch.
        train(data_dir, tmp_path / name, model__layers="torch", **changes)
        torch.rand(3)
    assert stable_rows(tmp_path / "b") == stable_rows(tmp_path / "a")
    assert stable_rows(tmp_path / "workers") == stable_rows(tmp_path / "a")
    assert losses(tmp_path / "seed")[0] != losses(tmp_path / "a")[0]


@pytest.mark.parametrize("generator", ["philox", "torch"])
def test_activation_checkpointing_does_not_change_the_curve(data_dir: Path, tmp_path: Path, generator: str) -> None:
    for name, on in (("plain", False), ("checkpointed", True)):
        changes = {"model__layers": "torch", "model__dropout_generator": generator}
        train(data_dir, tmp_path / name, train__activation_checkpointing=on, **changes)
    assert losses(tmp_path / "checkpointed") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)


def both_layers(data: Path, directory: Path, steps: int, **changes: Any) -> tuple[list[float], list[float]]:
    changes = {"train__max_steps": steps, "model__dropout_generator": "philox", "model__hidden_size": 32, **changes}
    for layers in ("torch", "tempo"):
        train(data, directory / layers, model__layers=layers, **changes)
    return losses(directory / "torch"), losses(directory / "tempo")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_torch_and_tempo_layers_give_the_same_curve_for_20_steps(
    data_dir: Path, tmp_path: Path, dropout: float, gelu: str
) -> None:
    changes = {"model__hidden_dropout": dropout, "model__attention_dropout": dropout, "model__gelu": gelu}
    reference, tempo = both_layers(data_dir, tmp_path, 20, **changes)
    assert len(reference) == 20
    assert tempo == pytest.approx(reference, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torch_and_tempo_layers_give_the_same_curve_for_200_steps(data_dir: Path, tmp_path: Path, dropout: float) -> None:
    changes = {"model__hidden_dropout": dropout, "model__attention_dropout": dropout}
    reference, tempo = both_layers(data_dir, tmp_path, 200, **changes)
    assert tempo == pytest.approx(reference, rel=1e-3)


def test_the_gradient_is_that_of_the_mean_over_the_global_batch(data_dir: Path, tmp_path: Path) -> None:
    """One step of plain BERT on the whole batch, by hand, against the trainer's accumulated gradient."""
    changes = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0, "train__micro_batch_size": 3}
    trainer = Trainer(config(data_dir, tmp_path, **changes))
    trainer.model.train()
    batch = trainer.data.batch(0, 8)
    output = trainer.model(**batch)
    output.loss.backward()
    expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.optimizer.step = lambda **kwargs: None
    sums, _ = trainer._train_step(iter(trainer._micro_batches()))
    assert sums.means(trainer.ranks)["loss"] == pytest.approx(output.loss.item(), rel=1e-6)
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-7)


# ---- gradients that are not finite ----


def poison(trainer: Trainer, batches: set[int]) -> None:
    """Make the loss of some global batches infinite."""
    forward = trainer._forward

    def poisoned(batch: dict[str, Any]) -> Any:
        output = forward(batch)
        if trainer.model.training and batch["first_sample"] // trainer.config.train.global_batch_size in batches:
            output.mlm_loss_sum = output.mlm_loss_sum * float("inf")
        return output

    trainer._forward = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_a_skipped_step_touches_no_state(data_dir: Path, tmp_path: Path, optimizer: str) -> None:
    trainer = Trainer(config(data_dir, tmp_path, optimizer__name=optimizer, train__micro_batch_size=8))
    poison(trainer, {2})
    batches = iter(trainer._micro_batches())
    trainer._train_step(batches)
    trainer._train_step(batches)
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    before = json.dumps(describe(trainer.optimizer.state_dict()))
    trainer._train_step(batches)
    assert trainer.progress.step == 2
    assert (trainer.progress.samples, trainer.progress.skipped_steps) == (24, 1)
    assert json.dumps(describe(trainer.optimizer.state_dict())) == before
    assert all(torch.equal(p, w) for p, w in zip(trainer.model.parameters(), weights, strict=True))
    trainer._train_step(batches)
    assert trainer.progress.step == 3
    assert trainer.optimizer.param_groups[0]["lr"] == learning_rate(
        3, name="poly", base=0.01, warmup_proportion=0.2, total_steps=6
    )


def describe(state: Any) -> Any:
    """Tensors as lists, so that states can be compared."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {str(key): describe(value) for key, value in state.items()}
    return [describe(value) for value in state] if isinstance(state, (list, tuple)) else state


def test_non_finite_values_never_enter_the_metrics(data_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(data_dir, tmp_path, train__max_steps=5))
    poison(trainer, {1, 3})
    trainer.run()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 2, 2, 2]
    assert [row["samples"] for row in rows] == [8, 24, 40, 48, 56]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert "Infinity" not in (tmp_path / "metrics.jsonl").read_text()


def test_skips_in_a_row_end_the_run_and_keep_the_last_checkpoint(data_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(data_dir, tmp_path, train__checkpoint_every=2, train__max_consecutive_skips=3))
    poison(trainer, {1, 3, 4, 5})
    with pytest.raises(TrainingFailed, match=r"not finite 3 times in a row after step 2 .*step_00000002"):
        trainer.run()
    assert trainer.progress.skipped_steps == 4
    latest = checkpoint.find_latest_valid(tmp_path)
    assert latest is not None
    assert latest.name == "step_00000002"


def test_a_hopeless_loss_scale_ends_the_run(data_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(data_dir, tmp_path, train__precision="fp16", train__initial_loss_scale=2.0**-13))
    poison(trainer, set(range(6)))
    with pytest.raises(TrainingFailed, match=r"2 times in a row after step 0 \(loss scale 3\.05.*none yet"):
        trainer.run()


def test_fp16_recovers_from_a_loss_scale_that_is_too_large(data_dir: Path, tmp_path: Path) -> None:
    trainer = train(
        data_dir, tmp_path, train__precision="fp16", train__initial_loss_scale=2.0**40, train__max_consecutive_skips=50
    )
    assert trainer.progress.skipped_steps > 0
    last = rows_of(tmp_path)[-1]
    assert last["step"] == 6
    assert last["loss_scale"] == 2.0 ** (40 - trainer.progress.skipped_steps)


def test_a_batch_without_predictions_is_finite(data_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(data_dir, tmp_path, train__max_steps=2))
    batch = trainer.data.batch
    trainer.data.batch = lambda first, num: {**batch(first, num), "labels": torch.full((num, 5), -100)}
    trainer.run()
    assert [row["mlm_loss"] for row in rows_of(tmp_path)] == [0.0, 0.0]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


# ---- evaluation ----


def test_evaluation_is_the_same_each_time_and_leaves_training_alone(data_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(data_dir, tmp_path / "a", train__eval_every=2, train__eval_samples=11))
    first = trainer._evaluate()
    trainer.config = config(data_dir, tmp_path / "a", train__eval_every=2, train__eval_samples=11, train__micro_batch_size=7)
    assert trainer._evaluate() == pytest.approx(first, rel=1e-6)
    for name, every in (("with", 2), ("without", 0)):
        train(data_dir, tmp_path / name, model__layers="torch", train__eval_every=every)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_evaluation_is_the_loss_without_dropout_over_all_held_out_tokens(data_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(config(data_dir, tmp_path, train__eval_every=1))
    assert trainer.eval_data is not None
    measured = trainer._evaluate()
    with torch.no_grad():
        output = trainer.model.eval()(**trainer.eval_data.batch(0, 20))
    assert measured["eval_mlm_loss"] == pytest.approx(output.mlm_loss.item(), rel=1e-6)
    assert measured["eval_nsp_loss"] == pytest.approx(output.nsp_loss.item(), rel=1e-6)
    assert measured["eval_mlm_accuracy"] == pytest.approx(output.num_mlm_correct.item() / output.num_masked.item())
    assert measured["eval_nsp_accuracy"] == pytest.approx(output.num_nsp_correct.item() / 20)


def test_held_out_data_may_lie_elsewhere(data_dir: Path, tmp_path: Path) -> None:
    other = write_directory(tmp_path / "other", {"train": [9]})
    trainer = Trainer(config(data_dir, tmp_path / "run", data__eval_path=other, train__eval_every=1))
    assert trainer.eval_data is not None
    assert trainer.eval_data.num_instances == 9
    # Where there is an eval split, that is what is held out.
    trainer = Trainer(config(data_dir, tmp_path / "run", data__eval_path=data_dir, train__eval_every=1))
    assert trainer.eval_data is not None
    assert trainer.eval_data.num_instances == 20


def test_data_without_a_held_out_split_trains_without_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_directory(tmp_path / "data", {"train": [16]})
    train(data, tmp_path / "run", train__eval_every=1, train__max_steps=1)
    assert "training goes on without evaluation" in caplog.text
    assert not set(rows_of(tmp_path / "run")[0]) & EVALUATED


@pytest.mark.parametrize(("num_bad", "device", "warns"), [(17, "cuda", True), (16, "cuda", False), (17, "cpu", False)])
def test_more_unsafe_columns_than_a_gpu_keeps_exact_are_reported_once(
    num_bad: int, device: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Sequential(tempo.InplaceLayerNorm(32), tempo.InplaceLayerNorm(32))
    with torch.no_grad():
        model[1].weight[:num_bad], model[1].bias[:num_bad] = 0.1, 1.0
    config = SimpleNamespace(train=SimpleNamespace(precision="bf16"))
    trainer: Any = SimpleNamespace(
        device=torch.device(device), warned_of_columns=False, model=model, config=config, progress=Progress(step=7)
    )
    for _ in range(2):
        Trainer._warn_of_unsafe_columns(trainer)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warns
    assert all("step 7" in message and "17 columns" in message for message in messages)
