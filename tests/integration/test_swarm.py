"""The `coterie` command as a user runs it: swarm, inspect, resume, Ctrl-C, orphans."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from helpers_processes import COTERIE, DEADLINE_S, ENVIRONMENT, is_running, rounds_of, until

DIGITS = Path(__file__).parents[2] / "configs" / "digits.toml"
SMALL = ["--set", "partition.min_examples=20", "--set", "partition.max_examples=30"]


def coterie(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
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


def pids_of(run: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in run.glob("peers/*/ready.json")]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_swarm_learns_and_leaves_everything_behind(tmp_path, method):
    arguments = ["--peers", "4", "--rounds", "30", "--seed", "3", "--set", f"swarm.start={method}"]
    result = coterie(tmp_path, "swarm", str(DIGITS), *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "did not stop" not in result.stderr
    run = (tmp_path / "runs" / "latest").resolve()
    assert str(run.name) in result.stdout
    summary = json.loads((run / "summary.json").read_text())
    names = [f"peer-{index:02d}" for index in range(4)]
    assert summary["peers"] == names
    assert summary["rounds"] == 30
    for key in ("accuracy", "own_accuracy", "local_accuracy", "bytes_sent"):
        assert list(summary[key]) == names
    assert summary["mean"] > 0.3  # 30 steps on about 60 images; guessing gets 0.1
    assert len(summary["weights"]) == 4
    assert summary["label_groups"] in ([0, 0, 1, 1], dict(zip(names, [0, 0, 1, 1], strict=True)))
    with (run / "weights.csv").open() as file:
        assert len(list(csv.reader(file))) == 5
    assert (run / "weights.png").read_bytes().startswith(b"\x89PNG")
    assert "seed = 3" in (run / "settings.toml").read_text()
    for name in names:
        home = run / "peers" / name
        assert [each["round"] for each in rounds_of(home)] == list(range(30))
        assert (home / "checkpoint.safetensors").exists()
        assert (home / "secret.key").stat().st_mode & 0o077 == 0
        assert "Traceback" not in (home / "log.txt").read_text()
    assert not any(is_running(pid) for pid in pids_of(run))

    inspected = coterie(tmp_path, "inspect", "runs/latest", "--round", "10", "--csv", "w.csv")
    assert inspected.returncode == 0, inspected.stderr
    assert "peer-03" in inspected.stdout
    assert (tmp_path / "w.csv").exists()
    again = coterie(tmp_path, "swarm", str(run / "settings.toml"), "--rounds", "2")
    assert again.returncode == 0, again.stdout + again.stderr


def test_one_peer_alone_is_a_swarm_too(tmp_path):
    arguments = ["--peers", "1", "--rounds", "3", "--set", "partition.groups=1"]
    result = coterie(tmp_path, "swarm", str(DIGITS), *arguments)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ctrl_c_stops_every_peer_and_the_run_can_be_resumed(tmp_path):
    process, run = start_swarm(tmp_path, "--peers", "4", "--rounds", "4000")
    until(lambda: len(pids_of(run)) == 4 and rounds_of(run / "peers" / "peer-03"), "rounds")
    inspected = coterie(tmp_path, "inspect", str(run))
    assert inspected.returncode == 0, inspected.stderr
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "--resume" in output
    assert "did not stop" not in output
    assert not any(is_running(pid) for pid in pids_of(run))
    done = len(rounds_of(run / "peers" / "peer-00"))
    settings = run / "settings.toml"
    settings.write_text(settings.read_text().replace("rounds = 4000", f"rounds = {done + 5}"))
    for config in run.glob("peers/*/config.toml"):
        config.write_text(config.read_text().replace("rounds = 4000", f"rounds = {done + 5}"))
    resumed = coterie(tmp_path, "swarm", "--resume", str(run))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    rounds = [each["round"] for each in rounds_of(run / "peers" / "peer-00")]
    assert rounds[-1] == done + 4
    assert rounds == sorted(set(rounds)), "a round was done twice"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_peer_outlives_a_launcher_that_is_killed(tmp_path, method):
    process, run = start_swarm(
        tmp_path, "--peers", "3", "--rounds", "4000", "--set", f"swarm.start={method}"
    )
    until(lambda: len(pids_of(run)) == 3 and rounds_of(run / "peers" / "peer-02"), "rounds")
    family = psutil.Process(process.pid).children(recursive=True)
    pids = {*pids_of(run), *(child.pid for child in family)}
    process.kill()
    process.communicate()
    until(lambda: not any(is_running(pid) for pid in pids), "no orphans", 20)


def test_a_killed_peer_is_reported_and_the_others_finish(tmp_path):
    process, run = start_swarm(tmp_path, "--peers", "4", "--rounds", "150")
    until(lambda: len(pids_of(run)) == 4 and rounds_of(run / "peers" / "peer-01"), "rounds")
    victim = json.loads((run / "peers" / "peer-01" / "ready.json").read_text())["pid"]
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert "peer-01 is down" in output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"]["peer-01"] is None
    assert sum(value is not None for value in summary["accuracy"].values()) == 3


def test_a_peer_that_cannot_start_ends_the_swarm_with_its_reason(tmp_path):
    result = coterie(tmp_path, "swarm", str(DIGITS), *SMALL, "--set", "model=nowhere:build")
    assert result.returncode == 7
    last = result.stderr.strip().splitlines()[-1]
    assert "could not start" in last and "nowhere" in last
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["swarm", "nowhere.toml"], 2, "nowhere.toml isn't there"),
        (["swarm"], 2, "CONFIG"),
        (["swarm", str(DIGITS), "--set", "partition.groups=0"], 2, "groups"),
        (["swarm", str(DIGITS), "--set", "partition.max_examples=4000"], 2, "max_examples"),
        (["swarm", str(DIGITS), "--peers", "0"], 2, "peers"),
        (["swarm", str(DIGITS), "--set", "data=fashion-mnist", "--set", "data_folder=x"], 3, "x"),
        (["swarm", "--resume", "nowhere"], 8, "not the run folder"),
        (["inspect", "nowhere"], 8, "nowhere"),
        (["keygen", "keys/a"], 4, "exists"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_bad_input_is_one_clear_line_and_a_documented_exit_code(tmp_path, arguments, code, message):
    if arguments[0] == "keygen":
        assert coterie(tmp_path, *arguments).returncode == 0
    result = coterie(tmp_path, *arguments)
    assert result.returncode == code, result.stdout + result.stderr
    assert message in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("runs/*/swarm.json"))


def test_help_reads_well(tmp_path):
    for arguments in ([], ["swarm"], ["peer"], ["inspect"], ["keygen"]):
        result = coterie(tmp_path, *arguments, "--help")
        assert result.returncode == 0
        assert "examples:" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 100
