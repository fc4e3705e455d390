"""Real processes for the integration tests; whatever a test does, none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tomli_w

COTERIE = [sys.executable, "-P", "-m", "sim"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
DEADLINE_S = 60.0
DIGITS = Path(__file__).parents[1] / "configs" / "digits.toml"
SMALL = ["--set", "partition.min_examples=20", "--set", "partition.max_examples=30"]


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until a condition about other processes holds."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def rounds_of(state: Path) -> list[dict[str, object]]:
    """The whole lines of a peer's record."""
    path = state / "record.jsonl"
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def coterie(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*COTERIE, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def start_swarm(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
    """Start a small swarm; return its launcher and its run folder."""
    run = folder / "run"
    command = [*COTERIE, "swarm", str(DIGITS), *SMALL, "--out", str(run), *arguments]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, run


class Peers:
    """Peers started by hand, in a folder with a config file, keys and state for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.prefix: dict[str, list[str]] = {}

    def make(self, *names: str, **settings: object) -> None:
        """Write keys and configs; the ports are told by ready files into a neighbors file."""
        for index, name in enumerate(names):
            keys = self.folder / "keys" / name
            subprocess.run([*COTERIE, "keygen", str(keys)], check=True, capture_output=True)
            config = {
                "name": name,
                "data": "digits",
                "part": [index, len(names)],
                "model": "mlp",
                "rounds": 0,
                "checkpoint_every_s": 0.5,
                "network": {
                    "secret_key": f"keys/{name}.key",
                    "allow": "keys",
                    "neighbors_file": "neighbors.toml",
                    "fetch_timeout_s": 2.0,
                },
                **settings,
            }
            (self.folder / f"{name}.toml").write_text(tomli_w.dumps(config))

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        (self.folder / f"{name}.ready").unlink(missing_ok=True)
        command = [
            *self.prefix.get(name, []),
            *COTERIE,
            "peer",
            f"{name}.toml",
            "--ready-file",
            f"{name}.ready",
            *arguments,
        ]
        log = (self.folder / f"{name}.log").open("a")
        with log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=ENVIRONMENT, stdout=log, stderr=log, text=True
            )
        self.processes[name] = process
        return process

    def introduce(self, *names: str) -> None:
        """Wait until these listen, then tell everybody where."""
        endpoints = {}
        for name in names:
            ready = self.folder / f"{name}.ready"
            until(
                lambda ready=ready, name=name: ready.exists() or self.ended(name), f"{name} listens"
            )
            assert ready.exists(), self.log(name)
            endpoints[name] = json.loads(ready.read_text())["endpoint"]
        (self.folder / "neighbors.toml").write_text(tomli_w.dumps(endpoints))

    def ended(self, name: str) -> bool:
        return self.processes[name].poll() is not None

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def rounds(self, name: str) -> list[dict[str, object]]:
        return rounds_of(self.folder / "state" / name)

    def stop(self, name: str, number: signal.Signals = signal.SIGINT) -> int:
        self.processes[name].send_signal(number)
        return self.processes[name].wait(timeout=20)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()
