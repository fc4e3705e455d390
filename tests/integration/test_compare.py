"""`coterie compare` as a user runs it: a report, Ctrl-C and on again, failures, wrong input."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from helpers_processes import COTERIE, DEADLINE_S, ENVIRONMENT, is_running, until

SMALL = {
    "name": "small",
    "data": "digits",
    "model": "logistic",
    "peers": 4,
    "steps": 6,
    "methods": ["local", "fedavg"],
    "regimes": ["rotated"],
    "seeds": [1, 2],
    "partition": {"max_examples": 30, "test_examples": 20},
    "tune": {"learning_rate": [0.01, 0.1], "local_steps": [3], "seeds": [7]},
}
NUM_TRIALS = 2 * 2 + 2 * 2
SLOW = ["--set", "model=slow:Slow", "--set", "tune.seeds=[7,8,9]"]
BURSTING = """
import multiprocessing
import os
import signal
import time
from pathlib import Path
from torch import nn

class Slow(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
    def forward(self, inputs):
        time.sleep(0.01)
        return super().forward(inputs)

class Bursting(Slow):
    '''Does at the first step that any worker takes what a file named `burst` says.'''
    def forward(self, inputs):
        burst = Path(__file__).with_name("burst")
        if burst.exists() and multiprocessing.parent_process() is not None:
            what = burst.read_text()
            burst.unlink()
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("it burst")
        return super().forward(inputs)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(tomli_w.dumps(SMALL))
    (tmp_path / "slow.py").write_text(BURSTING)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [*COTERIE, "compare", "small.toml", *arguments]


def compare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trials(out: Path) -> dict[str, dict[str, Any]]:
    """What the trials came to, without the seconds they took and the code that did them."""
    paths = sorted((out / "trials").rglob("*.json"))
    found = {str(path.relative_to(out)): json.loads(path.read_text()) for path in paths}
    for each in found.values():
        del each["seconds"], each["code"]  # others may be at work on the code
    return found


def test_a_comparison_reports_and_can_be_extended(folder):
    result = compare(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    out = folder / "runs" / "compare-small"
    assert f"{NUM_TRIALS} of {NUM_TRIALS} trials" in result.stdout
    assert "small: rotated, 4 peers, 6 steps each" in result.stdout
    assert str(out) in result.stdout
    assert len(trials(out)) == NUM_TRIALS
    results = json.loads((out / "results.json").read_text())
    assert {each["method"] for each in results["standings"]} == {"local", "fedavg"}
    for each in results["standings"]:
        assert 0.2 < each["mean"] <= 1 and each["tested"] == 8
        assert each["gradients"] == 6 and each["seconds"] > 0
        assert (each["mb_received"] == 0) == (each["method"] == "local")
        assert each["learning_rate"] in (0.01, 0.1) and each["validation"] is not None
    with (out / "results.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == [
            each["method"] for each in results["standings"]
        ]
    assert "| method |" in (out / "results.md").read_text()
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "log.txt").read_text()

    before = {path: path.read_bytes() for path in (out / "trials").rglob("*.json")}
    more = compare(folder, "--methods", "local,fedavg,oracle", "--seeds", "1,2,3")
    assert more.returncode == 0, more.stdout + more.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert len(trials(out)) == NUM_TRIALS + 2 + 5
    assert "oracle: no honest method" in more.stdout

    path = out / "trials" / "rotated" / "local" / "report-seed1-lr0.01.json"
    path = path if path.exists() else path.with_name("report-seed1-lr0.1.json")
    kept = path.read_bytes()
    path.write_bytes(kept.replace(b'"code": "', b'"code": "other-'))
    older = compare(folder)
    assert older.returncode == 0, older.stdout + older.stderr
    assert "done by an earlier state of the code" in " ".join(older.stdout.split())

    other = compare(folder, "--steps", "7")
    assert other.returncode == 2
    assert "steps is 6 there and 7 here" in other.stderr
    assert len(trials(out)) == NUM_TRIALS + 2 + 5


def test_after_ctrl_c_the_same_command_does_the_rest_and_comes_to_the_same(folder):
    whole = compare(folder, *SLOW, "--out", "whole", "--jobs", "1")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    process = start(folder, *SLOW, "--out", "stopped", "--jobs", "2")
    until(lambda: list((folder / "stopped").rglob("tune-*.json")), "a trial")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "go on by the same command" in output and "Traceback" not in output
    until(lambda: not any(is_running(child.pid) for child in family), "no orphans")
    done = len(trials(folder / "stopped"))
    assert 0 < done < len(trials(folder / "whole"))
    assert not (folder / "stopped" / "results.json").exists()
    resumed = compare(folder, *SLOW, "--out", "stopped", "--jobs", "2")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert trials(folder / "stopped") == trials(folder / "whole")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("die", "its process was killed by SIGKILL"),
        ("raise", "raised RuntimeError: it burst (at"),
    ],
)
def test_a_trial_that_fails_is_named_and_harms_no_other(folder, what, message):
    (folder / "burst").write_text(what)
    arguments = ["--set", "model=slow:Bursting", "--set", "tune.learning_rate=[0.1]"]
    result = compare(folder, *arguments)
    assert result.returncode == 7, result.stdout + result.stderr
    assert "failed: " in result.stdout and message in " ".join(result.stdout.split())
    assert result.stderr.startswith("coterie: 1 of 4 trials failed")
    assert "Traceback" not in result.stdout + result.stderr
    out = folder / "runs" / "compare-small"
    assert len(trials(out)) == 3
    assert len(json.loads((out / "results.json").read_text())["standings"]) == 1
    again = compare(folder, *arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(trials(out)) == 4
    assert len(json.loads((out / "results.json").read_text())["standings"]) == 2


def test_when_nothing_works_not_all_of_it_is_tried(folder):
    broken = (
        "\nclass Broken(Slow):\n"
        "    def forward(self, inputs):\n"
        "        return 1 / 0 if multiprocessing.parent_process() else super().forward(inputs)\n"
    )
    (folder / "slow.py").write_text(BURSTING + broken)
    result = compare(folder, "--set", "model=slow:Broken", "--set", "tune.seeds=[7,8,9]")
    assert result.returncode == 7, result.stdout + result.stderr
    assert result.stderr == "coterie: the first 8 trials failed, all of them: see above\n"
    assert result.stdout.count("failed: ") == 8


def test_no_worker_outlives_a_comparison_that_is_killed(folder):
    process = start(folder, *SLOW, "--set", "steps=2000")
    workers = lambda: psutil.Process(process.pid).children(recursive=True)  # noqa: E731
    until(lambda: sum(child.cpu_times().user > 0.05 for child in workers()) >= 2, "work")
    family = workers()
    process.kill()
    process.communicate()
    until(lambda: not any(is_running(child.pid) for child in family), "no orphans", 20)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--methods", "local,fedavrg"], 2, "unknown method fedavrg; did you mean fedavg?"),
        (["--regimes", "rotate"], 2, "unknown regime rotate; did you mean rotated?"),
        (["--regimes", "unbalanced"], 2, "unbalanced, seed 1: partition.group_sizes"),
        (["--peers", "2"], 2, "rotated, seed 1: partition.groups = 4"),
        (["--peers", "900"], 2, "rotated, seed 1: partition.max_examples = 30"),
        (["--seeds", "1,7"], 2, "tune.seeds: 7 is one of seeds, too"),
        (["--seeds", "x"], 2, "--seeds: 'x' must be a whole number"),
        (["--jobs", "0"], 2, "--jobs: '0' must be a whole number, 1 or more"),
        (["--set", "model=cnnn"], 3, "cnn"),
        (["--set", "data=nowhere.npz"], 3, "nowhere.npz isn't there"),
        (["--set", "partition.kind=rotated"], 2, "unknown setting partition.kind"),
        (["--set", "options.ditto.lamb=1.0"], 2, "unknown option lamb; did you mean lam?"),
        (["--out", "small.toml"], 2, "small.toml is no folder"),
        (["--out", "."], 2, "not the folder of a comparison"),
    ],
)
def test_wrong_input_is_one_clear_line_before_anything_is_begun(folder, arguments, code, message):
    result = compare(folder, *arguments)
    assert result.returncode == code, result.stdout + result.stderr
    assert message in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not list(folder.rglob("comparison.json"))


def test_help_reads_well(folder):
    result = compare(folder, "--help")
    assert result.returncode == 0
    assert "examples:" in result.stdout and "Tuning never" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
