"""Do work in processes, none of which takes the others or this one along when it fails or dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from peer.cli import set_up_logging
from protocol.errors import CoterieError, SwarmError
from sim.interrupt import ctrl_c_held_back
from sim.processes import ONE_THREAD, SAFE_PATH

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_STOP_S = 5.0
"""How long a process that was told to end may take, before it is killed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that came to nothing.

    Attributes:
        reason: Why, in one line.
    """

    reason: str


class Workers(Generic[TaskT, ResultT]):
    """A context of processes that each do one task after the other.

    They are forked from one server process that has the needed modules loaded, heed no Ctrl-C, and
    end with this process, however it does. What they print goes to a log.

    Args:
        work: Does a task; a function that its module's name finds, as pickle wants it.
        count: Number of processes.
        log: The file for their output, appended to.
        preload: Modules for the server to load.
    """

    def __init__(
        self,
        work: Callable[[TaskT], ResultT],
        count: int,
        log: Path,
        preload: Sequence[str] = (),
    ) -> None:
        self._work = work
        self._log = log
        self._count = count
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload, __name__])
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        os.environ.update(ONE_THREAD | SAFE_PATH)  # the server takes its environment from us
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.end()

    def run(self, tasks: Iterable[TaskT]) -> Iterator[tuple[TaskT, ResultT | Failure]]:
        """Do tasks, and yield each with its result as it is done.

        A task is taken from the iterable when a process is free for it. One whose process dies has
        failed; a new process takes the next.

        Raises:
            SwarmError: A process can't be started.
        """
        waiting = iter(tasks)
        busy: dict[Any, tuple[_Worker, TaskT]] = {}
        idle = list(self._workers)

        def give() -> None:
            for task in waiting:
                worker = idle.pop() if idle else self._start()
                with suppress(ConnectionError):  # it is dead, which shows when its answer is due
                    worker.connection.send(task)
                busy[worker.connection] = worker, task
                return

        for _ in range(self._count):
            give()
        while busy:
            for ready in connection.wait(list(busy)):
                worker, task = busy.pop(ready)
                outcome = self._outcome_of(worker)
                if worker in self._workers:
                    idle.append(worker)
                give()
                yield task, outcome

    def _outcome_of(self, worker: _Worker) -> ResultT | Failure:
        try:
            outcome: ResultT | Failure = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._workers.remove(worker)
            return Failure(f"its process {worker.end()}: see {self._log}")
        return outcome

    def _start(self) -> _Worker:
        with ctrl_c_held_back():  # so is the server, if it is only started now
            forkserver.ensure_running()
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._work, self._log)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise SwarmError(
                "the process that others are forked from ended: its message is above"
            ) from error
        theirs.close()  # the worker's copy is the last, so that its death is heard
        worker = _Worker(process, ours)
        self._workers.append(worker)
        return worker


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: ForkServerProcess
    connection: connection.Connection[Any, Any]

    def end(self) -> str:
        """Wait for the process to end, kill it if need be; say how it ended."""
        self.connection.close()
        self.process.join(_STOP_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _serve(
    tasks: connection.Connection[Any, Any], work: Callable[[Any], object], log: Path
) -> None:
    """Do what comes until nothing does, in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    set_up_logging()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError):
        while True:
            task = tasks.recv()
            tasks.send(_do(work, task))


def _do(work: Callable[[Any], object], task: object) -> object:
    try:
        return work(task)
    except CoterieError as error:
        traceback.print_exc()
        sys.stderr.flush()
        return Failure(str(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # whatever is being computed: nobody waits for it
