"""Tiny pretraining runs for the tests: in this process, or in processes of their own that can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pretrain.config import Config, parse
from pretrain.metrics import read_metrics
from pretrain.trainer import Trainer

# Values that depend on the clock or the machine: all others of a resumed run must equal the uninterrupted run's.
VOLATILE = ("sequences_per_second", "tokens_per_second", "seconds_per_step", "peak_memory_bytes")
TINY = {
    "model.preset": "bert_tiny",
    "model.layers": "tempo",
    "model.hidden_size": 16,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.intermediate_size": 32,
    "model.max_position_embeddings": 32,
    "data.num_workers": 0,
    "data.max_predictions_per_seq": 5,
    "optimizer.learning_rate": 0.01,
    "schedule.warmup_proportion": 0.2,
    "train.max_steps": 6,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 4,
    "train.precision": "fp32",
    "train.checkpoint_every": 100,
    "train.device": "cpu",
    "train.num_threads": 1,
}
# Changes for the shard of NVIDIA's make.
NVIDIA = {"data__max_predictions_per_seq": 20, "model__max_position_embeddings": 128, "model__vocab_size": 30522}

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["pretrain.command", "pretrain.trainer", "tests.run_factory"])


def arguments(data: Path, run: Path, **changes: Any) -> list[str]:
    """The command line of a tiny run; `changes` are keys with `__` for the dot, such as model__layers="torch"."""
    values = {"data.path": data, "train.output_dir": run, **TINY, **{key.replace("__", "."): v for key, v in changes.items()}}
    spelled = {True: "true", False: "false", None: "null"}
    return [f"--{key}={spelled[v] if v is None or isinstance(v, bool) else v}" for key, v in values.items()]


def config(data: Path, run: Path, **changes: Any) -> Config:
    return parse(arguments(data, run, **changes))


def train(data: Path, run: Path, **changes: Any) -> Trainer:
    """Train in this process to the end."""
    trainer = Trainer(config(data, run, **changes))
    trainer.run()
    return trainer


def rows_of(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []


def stable_rows(run: Path) -> list[dict[str, Any]]:
    """A run's metrics without what the clock or the machine decides."""
    return [{key: value for key, value in row.items() if key not in VOLATILE} for row in rows_of(run)]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows_of(run)]


# ---- processes ----


def _main(command_line: list[str], environment: dict[str, str], log: Path) -> None:
    # A process group of its own, as a scheduler's job step has.
    os.setsid()
    os.environ.update(environment)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    from pretrain.command import main

    main(command_line)


class RunProcess:
    """`run_pretraining.py` in a process of its own, forked from one that has imported everything already.

    Attributes:
        run: the run directory.
        log: file with what the process printed.
    """

    def __init__(self, command_line: Sequence[str], run: Path, log: Path, environment: dict[str, str] | None = None) -> None:
        self.run, self.log = run, log
        self._process = _processes.Process(target=_main, args=(list(command_line), environment or {}, log))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until the condition holds or the process ends."""
        deadline = time.monotonic() + seconds
        while self._process.is_alive() and not condition():
            assert time.monotonic() < deadline, f"nothing happened within {seconds} s:\n{self.output()}"
            time.sleep(0.001)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: last_step(self.run) >= step)

    def send(self, signal_number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, signal_number)

    def send_to_group(self, signal_number: int) -> None:
        """To the process and its data workers."""
        if self._process.is_alive():
            os.killpg(self.pid, signal_number)

    def exit_code(self, seconds: float = 60.0) -> int:
        """Wait for the end; the exit code, negative for a signal that killed the process."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"the process did not end within {seconds} s:\n{self.output()}")
        return self._process.exitcode

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def last_step(run: Path) -> int:
    """The step of the last complete line of a metrics file that is being written."""
    path = run / "metrics.jsonl"
    complete = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return json.loads(complete.rpartition(b"\n")[2])["step"] if complete else 0


def start_ranks(world_size: int, command_lines: Sequence[Sequence[str]], run: Path, logs: Path) -> list[RunProcess]:
    """Start one process per rank, with the environment that torchrun gives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(RunProcess(command_lines[rank], run, logs / f"rank_{rank}.log", environment))
    return ranks
