"""Start, watch and stop the peer processes of a run; whatever happens, none is left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from peer.files import locked
from peer.record import CHECKPOINT_FILE, READY_FILE, RECORD_FILE, RESULT_FILE
from protocol.errors import ConfigError, RunError, SwarmError
from sim.experiment import SwarmSettings
from sim.plan import NEIGHBORS_FILE, write_toml
from sim.processes import ForkStarter, PeerProcess, SpawnStarter, Starter
from sim.progress import SwarmProgress
from sim.records import Run

logger = logging.getLogger(__name__)

POLL_S = 0.05
WATCH_S = 0.25
STOP_TIMEOUT_S = 15.0
MEMORY_PER_PEER = {"fork": 60 << 20, "spawn": 300 << 20}
"""Bytes that a peer with a small model takes, generously."""


class Launcher:
    """Runs the peers of one run folder.

    Args:
        run: The laid-out run.
        settings: The swarm's.
        console: Where to show progress.
        debug: Whether peers show tracebacks of their errors.

    Raises:
        ConfigError: So many peers don't fit this machine's memory.
    """

    def __init__(
        self, run: Run, settings: SwarmSettings, console: Console, *, debug: bool = False
    ) -> None:
        self._run = run
        self._settings = settings
        self._console = console
        method = _start_method(settings)
        _check_memory(settings.peers, method)
        starter = ForkStarter if method == "fork" else SpawnStarter
        self._starter: Starter = starter(debug=debug)
        self._processes: dict[str, PeerProcess] = {}
        self._endpoints: dict[str, str] = {}

    def run(self, on_ready: Callable[[], None]) -> float:
        """Run until every peer has finished or is down; return the seconds it took.

        Args:
            on_ready: Called once all peers listen.

        Raises:
            CoterieError: The run is running already.
            RunError: A peer's folder is not whole.
            SwarmError: A peer could not start, or none finished.
            KeyboardInterrupt: Ctrl-C; the peers have been stopped.
        """
        began = time.monotonic()
        with locked(self._run.folder, "a running swarm"):
            try:
                self._start()
                on_ready()
                ready_s = time.monotonic() - began
                self._console.print(f"{len(self._processes)} peers ready after {ready_s:.1f} s")
                self._watch()
            finally:
                self._stop()
        return time.monotonic() - began

    def without_checkpoint(self) -> list[str]:
        """Return the peers that left none, and would begin anew."""
        return [n for n in self._run.names if not (self._home(n) / CHECKPOINT_FILE).exists()]

    def _home(self, name: str) -> Path:
        return self._run.folder / "peers" / name

    def _start(self) -> None:
        """Start all peers, wait until all listen, then tell each where the others are."""
        for name in self._run.names:
            config = self._home(name) / "config.toml"
            if not config.is_file():
                raise RunError(f"{config} isn't there: the run folder is not whole; start anew")
        (self._run.folder / NEIGHBORS_FILE).unlink(missing_ok=True)
        for name in self._run.names:
            for stale in (READY_FILE, RESULT_FILE):
                (self._home(name) / stale).unlink(missing_ok=True)
        for name in self._run.names:
            home = self._home(name)
            self._processes[name] = self._starter.start(home / "config.toml", home / "log.txt")
        deadline = time.monotonic() + self._settings.swarm.ready_timeout_s
        while not self._read_endpoints():
            for name, process in self._processes.items():
                if (code := process.exit_code()) is not None:
                    error = SwarmError(f"{name} could not start: {self._last_words(name)}")
                    error.exit_code = code if code > 1 else error.exit_code
                    raise error
            if time.monotonic() > deadline:
                missing = [name for name in self._run.names if name not in self._endpoints]
                raise SwarmError(
                    f"{', '.join(missing[:5])} did not listen within "
                    f"{self._settings.swarm.ready_timeout_s:g} s: see log.txt in "
                    f"{self._home(missing[0])}, or raise swarm.ready_timeout_s"
                )
            time.sleep(POLL_S)  # a ready file announces itself to nobody

    def _watch(self) -> None:
        """Show progress until no peer is running any more."""
        total = self._settings.rounds
        with SwarmProgress(self._run, self._console, total) as progress:
            while True:
                states = {name: self._state(name) for name in self._run.names}
                progress.update(states)
                if "running" not in states.values() or self._has_stalled(states):
                    break
                self._read_endpoints()
                time.sleep(WATCH_S)  # the pace of the display; records and peers are polled at it
        if "finished" not in states.values():
            name = self._run.names[0]
            raise SwarmError(f"no peer finished; {name}: {self._last_words(name)}")

    def _has_stalled(self, states: Mapping[str, str]) -> bool:
        """Whether some have finished, and the others have recorded nothing for too long."""
        limit_s = self._settings.swarm.stall_timeout_s
        silent = [name for name, state in states.items() if state == "running"]
        now = time.time()  # compared with times of files on this very machine
        if "finished" not in states.values() or any(
            now - self._last_sign(name) < limit_s for name in silent
        ):
            return False
        logger.warning("%s: no sign of life for %g s: given up", ", ".join(silent), limit_s)
        return True

    def _last_sign(self, name: str) -> float:
        files = (self._home(name) / file for file in (RECORD_FILE, "log.txt", READY_FILE))
        return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)

    def _state(self, name: str) -> str:
        if (self._home(name) / RESULT_FILE).exists():
            return "finished"
        if self._processes[name].exit_code() is None:
            return "running"
        # It may have been started again by hand.
        pid = (_read_json(self._home(name) / READY_FILE) or {}).get("pid")
        if pid is not None and pid != self._processes[name].pid and _is_alive(pid):
            return "running"
        return "down"

    def _read_endpoints(self) -> bool:
        """Read where peers listen, pass on what is new once all did; return whether all did."""
        before = dict(self._endpoints)
        for name in self._run.names:
            facts = _read_json(self._home(name) / READY_FILE)
            if facts is not None:
                self._endpoints[name] = facts["endpoint"]
        complete = len(self._endpoints) == len(self._processes)
        if complete and self._endpoints != before:
            write_toml(self._run.folder / NEIGHBORS_FILE, self._endpoints)
        return complete

    def _stop(self) -> None:
        """Ask every peer to stop, and make sure that it does; a second Ctrl-C doesn't wait."""
        try:
            self._signal_all(signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while self._alive() and time.monotonic() < deadline:
                time.sleep(POLL_S)  # forked and spawned processes have no wait in common
        finally:
            for name in self._alive():
                logger.warning("%s did not stop within %g s: killed", name, STOP_TIMEOUT_S)
            self._signal_all(signal.SIGKILL)

    def _alive(self) -> list[str]:
        return [name for name, each in self._processes.items() if each.exit_code() is None]

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.signal(number)

    def _last_words(self, name: str) -> str:
        """The last line of a peer's log, or how it ended."""
        try:
            lines = (self._home(name) / "log.txt").read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        words = [line.removeprefix("coterie: ") for line in lines if line.strip()]
        return words[-1] if words else f"exit code {self._processes[name].exit_code()}"


def _start_method(settings: SwarmSettings) -> str:
    """Choose how to start peers; CUDA and systems other than Linux don't survive a fork."""
    wanted = settings.swarm.start
    can_fork = sys.platform == "linux" and settings.training.device == "cpu"
    if wanted == "fork" and not can_fork:
        raise ConfigError(
            'swarm.start = "fork" needs Linux and training.device = "cpu": use "auto" or "spawn"'
        )
    return ("fork" if can_fork else "spawn") if wanted == "auto" else wanted


def _check_memory(num_peers: int, method: str) -> None:
    needed = num_peers * MEMORY_PER_PEER[method]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        available = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return  # unknown here: let the system say
    if needed > available:
        raise ConfigError(
            f"{num_peers} peers need about {needed >> 20} MiB, and {available >> 20} MiB are free: "
            "use fewer peers"
        )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return value
