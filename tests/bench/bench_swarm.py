"""What a swarm costs beside the bare arithmetic: CPU seconds, time to start, memory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from peer.config import read_settings
from protocol.errors import DataError
from sim.experiment import SwarmSettings

COTERIE = [sys.executable, "-m", "sim"]
CONFIG = "configs/fashion-mnist.toml"
REPEATS = 5
# What the plain loop doesn't do either.
WITHOUT_EVALUATION = ["--set", "swarm.local_baseline=false", "--set", "partition.test_examples=20"]


def bench() -> list[dict[str, object]]:
    """Return all rows of this module."""
    return [*bench_cpu(), *bench_many_peers()]


def bench_cpu() -> list[dict[str, object]]:
    """CPU seconds of a whole swarm command against one plain loop of the same work."""
    swarms, loops = [], []
    ratios: dict[str, list[float]] = {"one": [], "two": [], "gradients": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            swarm_s = _cpu_seconds(
                [*COTERIE, "swarm", CONFIG, "--out", str(run), *WITHOUT_EVALUATION]
            )
            work = _work_of(run)
            loop = [sys.executable, str(Path(__file__).with_name("plain_loop.py")), str(run)]
            loop += [str(work["differentiated"]), str(work["steps"])]
            loop_s, both_s = (_cpu_seconds([*loop, str(work["measured"])], n) for n in (1, 2))
            gradients_s = _cpu_seconds([*loop, "0"])
        swarms.append(swarm_s)
        loops.append(loop_s)
        for name, seconds in zip(ratios, (loop_s, both_s / 2, gradients_s), strict=True):
            ratios[name].append(swarm_s / seconds)
    command = "make bench only=swarm"
    return [
        _row("swarm of 8, CPU", swarms, "s", "", command),
        _row("plain loop of the same work, CPU", loops, "s", "", command),
        _row("swarm / plain loop", ratios["one"], "x", "same gradients and measurements", command),
        _row("swarm / one of two such loops", ratios["two"], "x", "both cores busy", command),
        _row("swarm / gradients alone", ratios["gradients"], "x", "same gradients only", command),
    ]


def bench_many_peers(peers: int = 64) -> list[dict[str, object]]:
    """Seconds until 64 peers are ready, and their memory after some rounds."""
    ready, memory = [], []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            seconds, pss = _start_many(run, peers)
            ready.append(seconds)
            memory.append(pss)
    command = "make bench only=swarm"
    return [
        _row(f"{peers} peers ready after", ready, "s", "at most 10 s", command),
        _row(f"{peers} peers, PSS of each after 10 rounds", memory, "MB", "at most 45 MB", command),
    ]


def _start_many(run: Path, peers: int) -> tuple[float, float]:
    command = [*COTERIE, "swarm", "configs/digits.toml", "--peers", str(peers), "--out", str(run)]
    command += ["--rounds", "1000", "--set", "partition.min_examples=15"]
    command += ["--set", "partition.max_examples=20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        began = time.monotonic()
        for line in process.stdout:
            if re.search(r"peers ready", line):
                break
        seconds = time.monotonic() - began
        records = [run / "peers" / p / "record.jsonl" for p in sorted(os.listdir(run / "peers"))]
        while min(_lines(record) for record in records) < 10:
            if process.poll() is not None:
                raise RuntimeError("the swarm ended early")
            time.sleep(0.2)
        pids = [json.loads((r.parent / "ready.json").read_text())["pid"] for r in records]
        sizes = [psutil.Process(pid).memory_full_info().pss / 1e6 for pid in pids]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    return seconds, statistics.median(sizes)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _work_of(run: Path) -> dict[str, int]:
    settings = read_settings(run / "settings.toml", SwarmSettings)
    steps = settings.peers * settings.algorithm.steps_after(settings.rounds, closed=True)
    total = {"measured": 0, "differentiated": 0, "steps": steps}
    for record in run.glob("peers/*/record.jsonl"):
        for line in record.read_text().splitlines():
            for key, value in json.loads(line)["work"].items():
                total[key] += value
    return total


def _cpu_seconds(command: list[str], times: int = 1) -> float:
    """CPU seconds of a command, so many times at once, and of all descendants, orphans included."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)
    others = {child.pid for child in psutil.Process().children()}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    for process in [subprocess.Popen(command, env=environment, **pipes) for _ in range(times)]:
        _, errors = process.communicate()
        if process.returncode == DataError.exit_code:
            raise DataError(errors.strip())
        if process.returncode:
            raise RuntimeError(errors.strip())
    while orphans := {child.pid for child in psutil.Process().children()} - others:
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _row(
    name: str, values: list[float], unit: str, compared_with: str, command: str
) -> dict[str, object]:
    return {
        "name": name,
        "value": round(statistics.median(values), 3),
        "spread": [round(min(values), 3), round(max(values), 3)],
        "unit": unit,
        "compared_with": compared_with,
        "command": command,
    }
