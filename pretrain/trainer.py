"""The training loop, top-down: `Trainer.run` -> `_train_step` -> `models.bert.BertForPreTraining`.

Everything random is a function of (seed, sample): the order, the masks, the dropout. So a checkpoint holds no generator
state, and neither the micro-batch size nor the number of ranks changes the curve.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

import tempo
from data_prep.masking import mix_keys
from models.bert import BertForPreTraining, BertOutput
from models.layers import most_unsafe_columns
from pretrain import checkpoint, distributed, resume, startup
from pretrain.config import Config, to_dict
from pretrain.data import MODEL_INPUTS, micro_batches, split_batch
from pretrain.metrics import MetricsFile, WandbMirror
from pretrain.optimizer import Lamb, build_optimizer, global_grad_norm
from pretrain.plotting import plot_run
from pretrain.progress import Clock, Progress, ProgressBar, Sums
from pretrain.schedule import learning_rate
from pretrain.signals import StopSignal
from tempo.layer_norm import NUM_EXACT_COLUMNS

log = logging.getLogger(__name__)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Below this loss scale, float16 gradients of BERT carry nothing: the run is broken, not the scale.
MIN_LOSS_SCALE = 2.0**-14


class TrainingFailed(RuntimeError):
    """Training cannot go on; the message says why and which checkpoint is good."""


class Trainer:
    """One training run, from its configuration.

    Args:
        config: checked by `pretrain.config.parse`.

    Raises:
        UserError: data, checkpoint and configuration do not fit each other.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.run_dir = config, Path(config.train.output_dir)
        startup.prepare_process(config)
        self.ranks = distributed.start(config.train.device)
        self.device = self.ranks.device
        self.data, self.eval_data = startup.open_data(config)
        bert_config = startup.model_config(config, self.data, self.eval_data)
        torch.manual_seed(config.train.seed)
        self.model = BertForPreTraining(bert_config, PRECISIONS[config.train.precision]).to(self.device)
        self.optimizer = build_optimizer(self.model, **asdict(config.optimizer))
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=config.train.initial_loss_scale, enabled=config.train.precision == "fp16"
        )
        self.progress = Progress()
        self.last_checkpoint = self._load_weights()
        self.ranked_model = self.ranks.wrap(self.model)
        self.consecutive_skips = 0
        self.warned_of_columns = False
        self.stop = StopSignal()

    # ---- the loop ----

    def run(self) -> None:
        """Train to the last step, or until a signal; the run directory is complete either way."""
        train, progress = self.config.train, self.progress
        last_step = min(train.max_steps, train.stop_after_steps or train.max_steps)
        if progress.step >= last_step:
            self._say(f"{self.run_dir} is complete at step {progress.step}; nothing to do")
            return
        loader = self._micro_batches()
        self._open_outputs()
        stopped = False
        with self.stop, ProgressBar(progress.step, last_step, self.ranks.is_main) as bar:
            batches = iter(loader)
            clock = Clock()
            while progress.step < last_step and not (stopped := self.ranks.any(self.stop.requested)):
                step_before = progress.step
                sums, grad_norm = self._train_step(batches)
                clock.add(train.global_batch_size)
                if progress.step == step_before:
                    continue
                bar.step()
                evaluates = self._due(train.eval_every) and self.eval_data is not None
                saves = self._due(train.checkpoint_every)
                if self._due(train.log_every) or evaluates:
                    self._log(sums, grad_norm, clock.read(), evaluates, bar)
                if saves:
                    self._save()
                if evaluates or saves:
                    clock.restart()
            self._finish(stopped)

    def _due(self, every: int) -> bool:
        """Whether something that happens every so many steps (0: never), and at the very last, happens now."""
        step = self.progress.step
        return every > 0 and (step % every == 0 or step == self.config.train.max_steps)

    def _train_step(self, batches: Any) -> tuple[Sums, float]:
        """One global batch: forward and backward over its micro-batches, then one optimizer step or none."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums(self.device)
        batch: dict[str, Any] = {"is_last": False}
        while not batch["is_last"]:
            batch = self._to_device(next(batches))
            with self._reducing_gradients(batch["is_last"]):
                output = self._forward(batch)
                # Means over the global batch, so that no split of it changes the gradient; DDP divides by the ranks again.
                loss = output.mlm_loss_sum / max(batch["num_global_predictions"], 1)
                loss = loss + output.nsp_loss_sum / self.config.train.global_batch_size  # type: ignore[operator]
                self.scaler.scale(loss * self.ranks.world_size).backward()
            sums.add(output, len(batch["input_ids"]))
        grad_norm = self._optimizer_step()
        self.progress.samples += self.config.train.global_batch_size
        self.progress.tokens += batch["num_global_tokens"]
        return sums, grad_norm

    def _forward(self, batch: dict[str, Any]) -> BertOutput:
        if not self.model.config.uses_philox:
            # PyTorch's generator is seeded for every micro-batch: no state to keep, and a resumed run draws the same masks.
            torch.manual_seed(int(mix_keys(self.config.train.seed, batch["first_sample"])[0]) >> 1)
        return self.ranked_model(**{name: batch[name] for name in MODEL_INPUTS})

    def _optimizer_step(self) -> float:
        """Clip and step; where the gradient is not finite, touch nothing at all but the loss scale."""
        train = self.config.train
        self.scaler.unscale_(self.optimizer)
        norm = global_grad_norm(self.model.parameters())
        # The one wait for the device per step: whether to step is the host's decision, and the learning rate follows it.
        norm_value = norm.item()
        if math.isfinite(norm_value):
            self.progress.step += 1
            self.consecutive_skips = 0
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate()
            if isinstance(self.optimizer, Lamb):
                self.optimizer.step(grad_norm=norm)
            else:
                if self.config.optimizer.max_grad_norm > 0:
                    clip_grads_with_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm, norm)
                self.optimizer.step()
        else:
            self.progress.skipped_steps += 1
            self.consecutive_skips += 1
        self.scaler.update()
        # Reading the loss scale waits for the device: only after a skip, which alone lowers it.
        hopeless = self.consecutive_skips >= train.max_consecutive_skips
        if hopeless or (self.consecutive_skips > 0 and self.scaler.get_scale() < MIN_LOSS_SCALE):
            raise TrainingFailed(
                f"the gradient was not finite {self.consecutive_skips} times in a row after step {self.progress.step}"
                f" (loss scale {self.scaler.get_scale():g}); no weight was touched. Lower optimizer.learning_rate or use bf16;"
                f" last good checkpoint: {self.last_checkpoint or 'none yet'}"
            )
        return norm_value

    def _learning_rate(self) -> float:
        schedule, train = self.config.schedule, self.config.train
        return learning_rate(
            self.progress.step,
            name=schedule.name,
            base=self.config.optimizer.learning_rate,
            warmup_proportion=schedule.warmup_proportion,
            total_steps=train.max_steps,
        )

    def _reducing_gradients(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Gradients cross the ranks once per step: with the last micro-batch."""
        if self.ranks.world_size == 1 or is_last:
            return contextlib.nullcontext()
        return self.ranked_model.no_sync()  # type: ignore[operator]

    def _micro_batches(self) -> Any:
        train = self.config.train
        return micro_batches(
            self.data,
            first_sample=self.progress.samples,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            num_workers=self.config.data.num_workers,
            pin_memory=self.device.type == "cuda",
        )

    def _to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch = {**batch, "rng": tempo.make_rng(self.config.train.seed, batch["first_sample"])}
        return {k: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}

    # ---- evaluation and logging ----

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Held-out losses: the same sequences with the same masks each time, shared out over the ranks."""
        assert self.eval_data is not None
        self.model.eval()
        sums = Sums(self.device)
        num_samples = min(self.config.train.eval_samples, self.eval_data.num_instances)
        chunks = split_batch(num_samples, self.ranks.world_size, self.ranks.rank, self.config.train.micro_batch_size)
        for start, count in chunks:
            batch = self._to_device({**self.eval_data.batch(start, count), "first_sample": start})
            sums.add(self._forward(batch), count)
        return {f"eval_{name}": value for name, value in sums.means(self.ranks).items()}

    def _log(self, sums: Sums, grad_norm: float, rates: tuple[float, float], evaluates: bool, bar: ProgressBar) -> None:
        means = sums.means(self.ranks)
        if evaluates:
            means.update(self._evaluate())
        if not self.ranks.is_main:
            return
        self._warn_of_unsafe_columns()
        sequences_per_second, seconds_per_step = rates
        progress = self.progress
        row: dict[str, Any] = {
            "step": progress.step,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "epoch": progress.samples / self.data.num_instances,
            **means,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "sequences_per_second": sequences_per_second,
            "tokens_per_second": progress.tokens / max(progress.samples, 1) * sequences_per_second,
            "seconds_per_step": seconds_per_step,
            "peak_memory_bytes": startup.peak_memory_bytes(self.device),
            "skipped_steps": progress.skipped_steps,
        }
        if self.scaler.is_enabled():
            row["loss_scale"] = self.scaler.get_scale()
        self.metrics.append(row)
        self.wandb.log(row)
        bar.show(means["loss"], sequences_per_second, seconds_per_step)

    def _warn_of_unsafe_columns(self) -> None:
        """Once, where LayerNorms have more columns with a small gamma than a GPU keeps exact."""
        if self.device.type == "cpu" or self.warned_of_columns:  # a CPU keeps every one of them
            return
        worst = most_unsafe_columns(self.model, PRECISIONS[self.config.train.precision])
        if worst > NUM_EXACT_COLUMNS:
            self.warned_of_columns = True
            log.warning(
                "step %d: a LayerNorm has %d columns with |gamma| < |beta| / 8, of which in-place LayerNorm keeps %d exact; the"
                " gradients of the others lose accuracy. model.inplace_layer_norm: false computes them exactly",
                self.progress.step,
                worst,
                NUM_EXACT_COLUMNS,
            )

    def _say(self, text: str) -> None:
        if self.ranks.is_main:
            print(text, flush=True)

    # ---- outputs, checkpoints, signals ----

    def _open_outputs(self) -> None:
        if not self.ranks.is_main:
            return
        self.lock = resume.hold_run(self.run_dir)
        self.metrics = MetricsFile(self.run_dir)
        before = self.last_checkpoint.parent.parent if self.last_checkpoint else self.run_dir
        # Before the metrics are cut to this step: a run killed now must not resume from a checkpoint whose metrics are gone.
        checkpoint.discard_later(self.run_dir, self.progress.step)
        kept, last_logged = self.metrics.keep_until(self.progress.step, before)
        resolved = to_dict(self.config)
        (self.run_dir / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")
        settings = {k: v for k, v in asdict(self.config.wandb).items() if k != "mode"}
        self.wandb = WandbMirror(self.run_dir, self.config.wandb.mode, settings, resolved, kept, last_logged)
        self._say(startup.describe_run(self))

    def _load_weights(self) -> Path | None:
        """Resume, or start from another run's weights, or from the seed; rank 0 decides for all."""
        train = self.config.train
        found = self.ranks.from_main(resume.find_checkpoint(self.config) if self.ranks.is_main else None)
        if found is not None:
            saved = checkpoint.load_progress(found)
            resume.check_resumable(self.config, self.data, saved, found)
            checkpoint.load_model(found, self.model)
            state = checkpoint.load_optimizer(found)
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scaler.is_enabled() and state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
            self.progress = Progress(**saved["progress"])
            self._say(f"resuming from {found} (step {self.progress.step})")
            if train.init_from is not None:
                self._say(f"train.init_from {train.init_from} is not read: this run has gone on from its own start already")
        elif train.init_from is not None:
            source = checkpoint.resolve(train.init_from)
            saved = checkpoint.load_progress(source)
            resume.check_same_model(self.config, saved, source)
            resume.check_same_vocabulary(self.data, saved, source)
            checkpoint.load_model(source, self.model)
            self._say(f"starting from the weights of {source}")
        return found

    def _save(self) -> None:
        if not self.ranks.agree_on(self.model.parameters()):
            raise TrainingFailed(
                f"the ranks hold different weights at step {self.progress.step}: something is wrong with a device or the network;"
                f" last good checkpoint: {self.last_checkpoint or 'none yet'}"
            )
        if self.ranks.is_main:
            self.metrics.sync()
            checkpoint.save(
                self.run_dir,
                self.progress.step,
                model=self.model.state_dict(),
                optimizer={"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()},
                progress={
                    "progress": asdict(self.progress),
                    "data": self.data.fingerprint,
                    "vocab_hash": self.data.vocab_hash,
                    "config": to_dict(self.config),
                },
            )
            checkpoint.prune(self.run_dir, self.config.train.keep_checkpoints, self.progress.step)
            plot_run(self.run_dir)
        self.last_checkpoint = checkpoint.path_of(self.run_dir, self.progress.step)

    def _finish(self, stopped: bool) -> None:
        # A checkpoint of another run, from which this one was resumed, does not count.
        if self.progress.step > 0 and self.last_checkpoint != checkpoint.path_of(self.run_dir, self.progress.step):
            self._save()
        if not self.ranks.is_main:
            return
        self.wandb.finish(stopped)
        if stopped:
            reason = self.stop.name or "another rank was stopped"
            self._say(f"{reason}: saved step {self.progress.step}; the same command goes on from there")
        else:
            self._say(f"done: step {self.progress.step}; curve in {self.run_dir / 'loss_curve.png'}")
