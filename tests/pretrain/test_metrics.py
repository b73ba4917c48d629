"""pretrain.metrics: the file survives crashes and resumes; Weights & Biases can neither stop nor slow training."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain import metrics
from pretrain.metrics import MetricsFile, WandbMirror, read_metrics
from tests.run_factory import losses, rows_of, train

SETTINGS = {"project": "p", "entity": None, "group": "g", "name": None, "tags": ["t"]}


def row(step: int) -> dict[str, Any]:
    return {"step": step, "samples": 8 * step, "tokens": 100 * step, "loss": 1.0 / step}


# ---- metrics.jsonl ----


def test_rows_are_on_disk_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in (1, 2):
        file.append(row(step))
        assert read_metrics(file.path) == [row(s) for s in range(1, step + 1)]


def test_a_resume_drops_later_lines_and_a_line_cut_short(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in range(1, 6):
        file.append(row(step))
    with file.path.open("a") as raw:
        raw.write('{"step": 6, "los')
    kept, last_logged = file.keep_until(3)
    assert kept == read_metrics(file.path) == [row(1), row(2), row(3)]
    assert last_logged == 5
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_without_its_newline_is_kept_whole(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.path.write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2)))
    file.keep_until(2)
    file.append(row(3))
    assert [r["step"] for r in read_metrics(file.path)] == [1, 2, 3]


def test_a_new_run_that_resumes_from_another_takes_its_lines_over(tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    for directory in (before, now):
        directory.mkdir()
    for step in (1, 2, 3):
        MetricsFile(before).append(row(step))
    assert MetricsFile(now).keep_until(2, before) == ([row(1), row(2)], 0)
    assert read_metrics(now / "metrics.jsonl") == [row(1), row(2)]
    assert len(read_metrics(before / "metrics.jsonl")) == 3


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\ngarbage\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"line 2 is not a line of metrics: 'garbage'"):
        read_metrics(path)
    path.write_text('{"loss": 1}\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_metrics(path)


# ---- Weights & Biases ----


class FakeRun:
    def __init__(self, module: FakeWandb) -> None:
        self._module = module

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._module.may_fail("define_metric")
        self._module.axes[name] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self._module.may_fail("log")
        self._module.logged.append(values)

    def finish(self) -> None:
        self._module.may_fail("finish")
        self._module.finished = True


class FakeWandb(types.ModuleType):
    """Records calls; raises or hangs where told to."""

    def __init__(self, fails_at: str | None = None, hangs_at: str | None = None) -> None:
        super().__init__("wandb")
        self.fails_at, self.hangs_at = fails_at, hangs_at
        self.init_arguments: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {}
        self.logged: list[dict[str, Any]] = []
        self.finished = False
        self.release = threading.Event()

    def may_fail(self, call: str) -> None:
        if call == self.fails_at:
            raise RuntimeError(f"no network at {call}")
        if call == self.hangs_at:
            self.release.wait(60)

    def init(self, **arguments: Any) -> FakeRun:
        self.init_arguments.append(arguments)
        self.may_fail("init")
        return FakeRun(self)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    modules: list[FakeWandb] = []

    def replace(**options: Any) -> FakeWandb:
        modules.append(FakeWandb(**options))
        monkeypatch.setitem(sys.modules, "wandb", modules[-1])
        return modules[-1]

    yield replace
    for module in modules:
        module.release.set()


def mirror(run: Path, mode: str = "online", **options: Any) -> WandbMirror:
    return WandbMirror(run, mode, SETTINGS, {"model": {"layers": "tempo"}}, **options)


def test_lines_are_mirrored_on_their_own_axis(tmp_path: Path, install: Any) -> None:
    wandb = install()
    wandb_mirror = mirror(tmp_path)
    for step in (1, 2, 3):
        wandb_mirror.log(row(step))
    wandb_mirror.finish()
    assert wandb.logged == [row(1), row(2), row(3)]
    assert wandb.finished
    assert wandb.axes["*"] == "step"
    assert {"step", "samples", "tokens"} <= set(wandb.axes)
    (arguments,) = wandb.init_arguments
    assert (arguments["project"], arguments["group"], arguments["tags"], arguments["mode"]) == ("p", "g", ["t"], "online")
    assert (arguments["name"], arguments["resume"]) == (tmp_path.name, "allow")
    assert arguments["config"] == {"model": {"layers": "tempo"}}


def test_disabled_never_imports_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    wandb_mirror = mirror(tmp_path, "disabled")
    wandb_mirror.log(row(1))
    wandb_mirror.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_online_run_has_the_same_id_and_no_line_twice(tmp_path: Path, install: Any) -> None:
    wandb = install()
    first = mirror(tmp_path)
    for step in range(1, 6):
        first.log(row(step))
    first.finish()
    # Killed after step 5, resumed from the checkpoint of step 3: steps 4 and 5 are trained, and written, again.
    second = mirror(tmp_path, rows=[row(1), row(2), row(3)], last_logged=5)
    for step in range(4, 8):
        second.log(row(step))
    second.finish()
    assert [r["step"] for r in wandb.logged] == [1, 2, 3, 4, 5, 6, 7]
    assert wandb.init_arguments[0]["id"] == wandb.init_arguments[1]["id"]


def test_each_offline_segment_is_complete(tmp_path: Path, install: Any) -> None:
    wandb = install()
    mirror(tmp_path, "offline").finish()
    second = mirror(tmp_path, "offline", rows=[row(1), row(2), row(3)], last_logged=5)
    second.log(row(4))
    second.finish()
    assert [r["step"] for r in wandb.logged] == [1, 2, 3, 4]


def test_a_run_that_is_mirrored_only_after_its_resume_gets_the_lines_before(tmp_path: Path, install: Any) -> None:
    wandb = install()
    wandb_mirror = mirror(tmp_path, rows=[row(1), row(2)], last_logged=3)
    wandb_mirror.log(row(3))
    wandb_mirror.finish()
    assert [r["step"] for r in wandb.logged] == [1, 2, 3]


@pytest.mark.parametrize("call", ["init", "define_metric", "log", "finish"])
def test_a_failure_at_any_call_is_one_warning(tmp_path: Path, install: Any, caplog: pytest.LogCaptureFixture, call: str) -> None:
    install(fails_at=call)
    wandb_mirror = mirror(tmp_path)
    for step in range(1, 4):
        wandb_mirror.log(row(step))
    wandb_mirror.finish()
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1
    assert f"no network at {call}" in warnings[0]
    assert "training goes on without it" in warnings[0]


def test_a_missing_module_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    wandb_mirror = mirror(tmp_path)
    wandb_mirror.log(row(1))
    wandb_mirror.finish()
    assert len(caplog.records) == 1
    assert "wandb" in caplog.text


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_hanging_call_never_blocks_logging_and_blocks_the_end_for_a_bounded_time(
    tmp_path: Path, install: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    monkeypatch.setattr(metrics, "_FINISH_SECONDS", 0.2)
    monkeypatch.setattr(metrics, "_QUEUE_LINES", 5)
    install(hangs_at=call)
    wandb_mirror = mirror(tmp_path)
    # More lines than the queue takes: they are left out, with one warning.
    done = threading.Event()
    thread = threading.Thread(
        target=lambda: ([wandb_mirror.log(row(s)) for s in range(1, 50)], wandb_mirror.finish(), done.set())
    )
    thread.start()
    assert done.wait(20), "logging waits for wandb"
    thread.join()
    assert metrics.wandb_is_busy()
    with caplog.at_level(logging.WARNING):
        assert sum("takes no lines" in record.message for record in caplog.records) <= 1


@pytest.mark.parametrize("options", [{"fails_at": "init"}, {"fails_at": "log"}, {"hangs_at": "init"}])
def test_training_is_the_same_whatever_wandb_does(
    data_dir: Path, tmp_path: Path, install: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    monkeypatch.setattr(metrics, "_FINISH_SECONDS", 0.2)
    install(**options)
    train(data_dir, tmp_path / "with", wandb__mode="online")
    train(data_dir, tmp_path / "without")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_a_run_is_mirrored_line_by_line(data_dir: Path, tmp_path: Path, install: Any) -> None:
    wandb = install()
    train(data_dir, tmp_path, wandb__mode="online", wandb__name="my-run", train__eval_every=3)
    assert wandb.logged == rows_of(tmp_path)
    assert wandb.init_arguments[0]["name"] == "my-run"
    assert wandb.init_arguments[0]["config"]["train"]["max_steps"] == 6


REAL_RUN = """
import sys
from pathlib import Path
from pretrain.metrics import WandbMirror
run = Path(sys.argv[1])
mirror = WandbMirror(run, "offline", {"project": "p", "entity": None, "group": None, "name": None, "tags": []}, {"a": 1})
for step in range(1, 4):
    mirror.log({"step": step, "samples": 8 * step, "tokens": step, "loss": 1.0 / step})
mirror.finish()
"""


def test_the_real_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    done = subprocess.run(
        [sys.executable, "-c", REAL_RUN, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "wandb failed" not in done.stderr, done.stderr
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert written.stat().st_size > 0
    assert (tmp_path / "wandb_id.txt").read_text().strip() in written.name
