"""A swarm whose peers can be killed, frozen, started again, or be somebody else's."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from peer.config import read_settings
from sim.experiment import SwarmSettings
from sim.plan import NEIGHBORS_FILE, make_run, write_toml
from sim.processes import ForkStarter, PeerProcess

READY_TIMEOUT_S = 60.0
POISONER = Path(__file__).with_name("poisoner.py")


class Field:
    """The peers of one run, forked like those of `coterie swarm`, but under our hand.

    Args:
        folder: Where the run is laid out.
        config: The swarm's.
        overrides: `section.key=value`.
        network: Settings to add to every peer's `[network]`.
        min_round_s: Shortest time for a round.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        overrides: Sequence[str] = (),
        *,
        network: Mapping[str, Any] | None = None,
        min_round_s: float = 0.0,
    ) -> None:
        self.settings = read_settings(config, SwarmSettings, list(overrides))
        self.folder = make_run(self.settings, config.parent.resolve(), folder)
        self.names = sorted(path.name for path in (self.folder / "peers").iterdir())
        for name in self.names:
            self.configure(name, {"min_round_s": min_round_s}, network or {})
        self._starter = ForkStarter(debug=False)
        self._processes: dict[str, PeerProcess] = {}
        self._spawned: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGKILL)
        for spawned in self._spawned:
            spawned.kill()
            spawned.wait()

    def home(self, name: str) -> Path:
        return self.folder / "peers" / name

    def configure(self, name: str, settings: Mapping[str, Any], network: Mapping[str, Any]) -> None:
        """Change settings of a peer before it is started."""
        path = self.home(name) / "config.toml"
        tree = tomllib.loads(path.read_text()) | settings
        tree["network"] |= network
        write_toml(path, tree)

    def start(self, *names: str) -> None:
        """Start peers, and tell all others where they are once they listen."""
        self.launch(*names)
        self._introduce(names)

    def launch(self, *names: str) -> None:
        """Start peers without waiting for them; `introduce` those that listen."""
        for name in names:
            (self.home(name) / "ready.json").unlink(missing_ok=True)
            config = self.home(name) / "config.toml"
            self._processes[name] = self._starter.start(config, self.home(name) / "log.txt")

    def listens(self, name: str) -> bool:
        """Whether a peer that was started can be reached."""
        return (self.home(name) / "ready.json").exists()

    def poison(self, kind: str, *names: str) -> None:
        """Start peers that send or serve poison, or are otherwise odd."""
        self.spawn([sys.executable, str(POISONER), kind], *names)

    def spawn(self, command: Sequence[str], *names: str) -> None:
        """Start peers by a command of their own, which is given the path of their config."""
        for name in names:
            home = self.home(name)
            (home / "ready.json").unlink(missing_ok=True)
            with (home / "log.txt").open("ab") as log:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                whole = [*command, str(home / "config.toml")]
                self._spawned.append(
                    subprocess.Popen(whole, stdout=log, stderr=log, env=environment)
                )
        self._introduce(names)

    def signal(self, number: signal.Signals, *names: str) -> None:
        for name in names:
            self._processes[name].signal(number)

    def until(self, condition: Callable[[], object], what: str, timeout_s: float) -> float:
        """Poll until it holds; return the seconds that took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}")
            time.sleep(0.1)
        return time.monotonic() - began

    def rounds(self, name: str) -> list[dict[str, Any]]:
        path = self.home(name) / "record.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole if line]

    def results(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        found = {}
        for name in names:
            path = self.home(name) / "result.json"
            if path.exists():
                found[name] = json.loads(path.read_text())
        return found

    def until_finished(self, names: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
        """Wait for the results of peers, and return them."""
        self.until(lambda: len(self.results(names)) == len(names), "all finish", timeout_s)
        return self.results(names)

    def pid(self, name: str) -> int:
        pid: int = json.loads((self.home(name) / "ready.json").read_text())["pid"]
        return pid

    def _introduce(self, names: Sequence[str]) -> None:
        def ready() -> bool:
            return all(self.listens(name) for name in names)

        self.until(ready, f"{', '.join(names)} listen", READY_TIMEOUT_S)
        self.introduce()

    def introduce(self) -> None:
        """Tell all peers where those are that listen."""
        endpoints = {
            name: json.loads((self.home(name) / "ready.json").read_text())["endpoint"]
            for name in self.names
            if self.listens(name)
        }
        write_toml(self.folder / NEIGHBORS_FILE, endpoints)


def is_finite(home: Path) -> bool:
    """Whether every number of the own model in a peer's checkpoint is finite."""
    tensors = load_file(home / "checkpoint.safetensors")
    return all(np.isfinite(array).all() for name, array in tensors.items() if name[:4] == "own/")


def mean_accuracy(results: Mapping[str, Mapping[str, Any]]) -> float:
    return statistics.fmean(result["accuracy"] for result in results.values())


def percentile(values: Iterable[float], part: float) -> float:
    return float(np.percentile(list(values), part))


def row(name: str, value: float, bound: float | None, unit: str = "") -> dict[str, Any]:
    """One line of the table; without a bound it is only told."""
    return {
        "name": name,
        "value": round(value, 4),
        "at_most": bound if bound is None else round(bound, 4),
        "unit": unit,
        "holds": bound is None or value <= bound,
    }
