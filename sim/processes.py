"""Start and stop peer processes: forked from a preloaded server, or as fresh interpreters."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from peer.cli import report_errors, set_up_logging
from protocol.errors import SwarmError
from sim.interrupt import ctrl_c_held_back

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""For the environment of peers: each library would take as many threads as there are cores."""

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""For the same: a `queue.py` in the current folder must not stand in for the library's."""


class PeerProcess(Protocol):
    """A running or ended peer process."""

    @property
    def pid(self) -> int | None:
        """Its process id."""

    def exit_code(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""


class Starter(Protocol):
    """Starts peers; none of them outlives this process, however it ends."""

    def start(self, config: Path, log: Path) -> PeerProcess:
        """Start a peer that serves until it is told to stop; it writes `ready.json`."""


class ForkStarter:
    """Forks peers from one server process that has loaded torch and taken a step already."""

    def __init__(self, *, debug: bool) -> None:
        self._debug = debug
        os.environ.update(ONE_THREAD | SAFE_PATH)  # the server takes its environment from us
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["peer.preload", "sim.cli", "sim.processes"])
        # Ctrl-C is for us alone; the server would die of it with a traceback while it loads.
        with ctrl_c_held_back():
            forkserver.ensure_running()

    def start(self, config: Path, log: Path) -> PeerProcess:
        """Fork a peer.

        Raises:
            SwarmError: The server could not load what peers need.
        """
        arguments = (config, log, self._debug)
        process = self._context.Process(target=_forked_peer, args=arguments, daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise SwarmError(
                "the process that peers are forked from ended: its message is above; "
                'swarm.start = "spawn" does without it'
            ) from error
        return _Forked(process)


class SpawnStarter:
    """Starts a fresh interpreter for each peer."""

    def __init__(self, *, debug: bool) -> None:
        self._debug = debug

    def start(self, config: Path, log: Path) -> PeerProcess:
        """Spawn a peer whose standard input is its lifeline: it ends when we do."""
        environment = os.environ | ONE_THREAD | SAFE_PATH
        command = [sys.executable, "-P", "-m", "peer", *(["--debug"] if self._debug else [])]
        command += [str(config), "--keep-serving", "--lifeline", "0"]
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        return _Spawned(process)


class _Forked:
    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.exitcode

    def signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it may end just now
                os.kill(self._process.pid, number)


class _Spawned:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


def _forked_peer(config: Path, log: Path, debug: bool) -> None:
    """Run one peer in a forked process: in a session of its own, its output in a log."""
    os.setsid()  # Ctrl-C reaches the launcher alone, which then stops its peers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the peer listens to it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as the server has it
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    set_up_logging()
    sys.exit(report_errors(lambda: _run(config), debug=debug))


def _run(config: Path) -> int:
    from peer.config import PeerSettings, read_settings
    from peer.process import RunOptions, run_peer

    parent = multiprocessing.parent_process()
    options = RunOptions(
        lifeline=parent.sentinel if parent is not None else None,
        keep_serving=True,
    )
    run_peer(read_settings(config, PeerSettings), config.parent, options)
    return 0
