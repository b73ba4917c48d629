"""Order, errors, deaths of the worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from data_prep.worker_pool import WorkerDied, in_order


class Square:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, task: int) -> tuple[int, int]:
        time.sleep(0.01 * (task % 3))  # later tasks overtake earlier ones
        return task * task + self.offset, os.getpid()


class Fragile:
    """Dies, or raises, at one task."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, task: tuple[int, bytes]) -> tuple[int, bytes]:
        if task[0] == 11 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if task[0] == 11 and self.how == "exit":
            os._exit(3)
        if task[0] == 11 and self.how == "raise":
            raise ValueError("task 11 is not to be had")
        return task


class Unmakable:
    def __init__(self) -> None:
        raise ValueError("cannot be made")


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_results_come_in_order(num_workers: int) -> None:
    results = list(in_order(range(40), Square, (7,), num_workers, "squaring"))
    assert [value for value, _ in results] == [i * i + 7 for i in range(40)]
    assert len({process for _, process in results} - {os.getpid()}) == (0 if num_workers == 1 else num_workers)


def test_no_task_is_read_far_ahead_of_the_results() -> None:
    num_read = 0

    def tasks() -> Iterator[int]:
        nonlocal num_read
        for i in range(200):
            num_read = i + 1
            yield i

    for num_taken, _ in enumerate(in_order(tasks(), Square, (0,), 2, "squaring")):
        assert num_read <= num_taken + 7


def test_no_task_gives_no_result() -> None:
    assert list(in_order([], Square, (0,), 2, "squaring")) == []


@pytest.mark.parametrize(("how", "said"), [("kill", "signal SIGKILL"), ("exit", "exit code 3")])
@pytest.mark.parametrize("num_bytes", [10, 3_000_000])
def test_a_worker_that_dies_ends_the_work(how: str, said: str, num_bytes: int) -> None:
    # Large tasks fill the pipes, so that the death comes while others are being sent.
    tasks = ((i, bytes(num_bytes)) for i in range(40))
    with pytest.raises(WorkerDied, match=f"died while weighing.*{said}.*fewer --workers"):
        list(in_order(tasks, Fragile, (how,), 2, "weighing"))


def test_what_a_task_raises_arrives() -> None:
    tasks = ((i, bytes(1_000_000)) for i in range(40))
    with pytest.raises(ValueError, match="task 11 is not to be had"):
        list(in_order(tasks, Fragile, ("raise",), 2, "weighing"))
    with pytest.raises(ValueError, match="cannot be made"):
        list(in_order([1], Unmakable, (), 2, "making"))


def test_leaving_early_ends_the_workers() -> None:
    results = in_order(range(10_000), Square, (0,), 2, "squaring")
    processes = {next(results)[1] for _ in range(6)}
    results.close()  # type: ignore[attr-defined]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
