"""Work done in order by several processes, where a process that dies ends the work with an error instead of a wait.

`concurrent.futures` can wait for ever when a worker is killed while a large task is on its way to it (CPython issues 94777
and 107219), so each worker has a pipe of its own here: a death closes it, at either end. Processes come from a fork server,
since forking a process that has threads (those of `datasets`, say) may leave a lock taken for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

# What every worker needs; the fork server imports it once.
_PRELOADED = ["data_prep.corpus", "data_prep.instance_building", "tokenizers"]
# Tasks given to a worker before its results are taken: one in work, the others ready.
_TASKS_PER_WORKER = 3

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerDied(RuntimeError):
    """The machine, not the user, stopped the work."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    num_tasks: int = 0


def in_order(
    tasks: Iterable[Task], make: Callable[..., Callable[[Task], Result]], arguments: tuple[Any, ...], num_workers: int, what: str
) -> Iterator[Result]:
    """Yield `make(*arguments)(task)` for each task, in order, computed by `num_workers` processes (1: in this one).

    No more than a few tasks a worker are read ahead. `make`, the arguments and the tasks are pickled.

    Raises:
        WorkerDied: a worker process died; says in which part of the work.
        Exception: what a task raised.
    """
    if num_workers == 1:
        yield from map(make(*arguments), tasks)
        return
    workers = _start(make, arguments, num_workers)
    try:
        yield from _distribute(iter(tasks), workers, what)
    finally:
        for worker in workers:
            worker.connection.close()  # which ends the worker
        for worker in workers:
            worker.process.join()


def _start(make: Callable[..., Any], arguments: tuple[Any, ...], num_workers: int) -> list[_Worker]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    workers = []
    for _ in range(num_workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        process.start()
        theirs.close()  # the worker's end must close with the worker
        workers.append(_Worker(process, ours))
    return workers


def _distribute(tasks: Iterator[Any], workers: list[_Worker], what: str) -> Iterator[Any]:
    results: dict[int, Any] = {}
    num_read = num_yielded = 0
    exhausted = False
    while True:
        # Results that wait for an earlier one count too, so that memory is bounded.
        while not exhausted and num_read - num_yielded < _TASKS_PER_WORKER * len(workers):
            try:
                task = next(tasks)
            except StopIteration:
                exhausted = True
                break
            worker = min(workers, key=lambda worker: worker.num_tasks)
            _send(worker, (num_read, task), what)
            num_read += 1
        if num_yielded == num_read:
            return
        for ready in wait([worker.connection for worker in workers if worker.num_tasks]):
            number, succeeded, value = _receive(next(worker for worker in workers if worker.connection is ready), what)
            if not succeeded:
                raise value
            results[number] = value
        while num_yielded in results:
            yield results.pop(num_yielded)
            num_yielded += 1


def _send(worker: _Worker, message: Any, what: str) -> None:
    try:
        worker.connection.send(message)
    except OSError as error:
        raise _death(worker, what) from error
    worker.num_tasks += 1


def _receive(worker: _Worker, what: str) -> Any:
    try:
        message = worker.connection.recv()
    except (EOFError, OSError) as error:
        raise _death(worker, what) from error
    worker.num_tasks -= 1
    return message


def _death(worker: _Worker, what: str) -> WorkerDied:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return WorkerDied(
        f"a worker process died while {what} ({how}; out of memory? killed?); nothing was left behind: run the same command"
        " again, with fewer --workers if memory is short"
    )


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """A worker's life: it ends with the connection, so when the command ends, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself ends its workers
    # The workers are the parallelism; threads of the tokenizer in each would only fight.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tasks: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def read() -> None:
        # In a thread, so that sending a task never waits for a worker that waits for its result to be taken.
        try:
            while True:
                tasks.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    function: Callable[[Any], Any] | None = None
    while True:
        number, task = tasks.get()
        try:
            function = function or make(*arguments)
            answer = (number, True, function(task))
        except Exception as error:
            answer = (number, False, error)
        try:
            connection.send(answer)
        except OSError:  # the command was killed, and nobody takes the result
            os._exit(0)
