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
from helpers_processes import (
    COTERIE,
    DEADLINE_S,
    DIGITS,
    ENVIRONMENT,
    SMALL,
    coterie,
    is_running,
    rounds_of,
    start_swarm,
    until,
)


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
    assert summary["label_groups"] == [0, 0, 1, 1]
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
    assert result.returncode == 3  # the peer's own
    assert not (tmp_path / "runs" / "latest").exists()
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


def test_a_killed_peer_started_again_by_hand_is_used_again(tmp_path):
    process, run = start_swarm(tmp_path, "--peers", "3", "--rounds", "9000")
    witness, victim = run / "peers" / "peer-00", run / "peers" / "peer-01"
    until(lambda: len(pids_of(run)) == 3 and len(rounds_of(victim)) > 3, "rounds")
    os.kill(json.loads((victim / "ready.json").read_text())["pid"], signal.SIGKILL)
    until(lambda: rounds_of(witness)[-1]["neighbors"] == 1, "the others miss it")
    again = subprocess.Popen(
        [*COTERIE, "peer", str(victim / "config.toml")], env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: rounds_of(witness)[-1]["neighbors"] == 2, "the others see it again")
    finally:
        again.kill()
        again.wait()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "peer-01 is down" in output and "peer-01 is running" in output


def test_a_run_that_is_running_is_not_resumed_and_stays_whole(tmp_path):
    process, run = start_swarm(tmp_path, "--peers", "2", "--rounds", "300")
    until(lambda: len(pids_of(run)) == 2 and rounds_of(run / "peers" / "peer-01"), "rounds")
    second = coterie(tmp_path, "swarm", "--resume", str(run))
    assert second.returncode == 1
    assert "in use by a running swarm" in second.stderr
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text())
    resumed = coterie(tmp_path, "swarm", "--resume", str(run))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    again = json.loads((run / "summary.json").read_text())
    assert again["accuracy"] == summary["accuracy"]
    for name in summary["peers"]:
        assert again["bytes_sent"][name] >= summary["bytes_sent"][name]
    assert again["seconds"] >= summary["seconds"] * 0.5


def test_ctrl_c_during_the_final_evaluation_loses_no_round(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom torch import nn\n"
        "class Slow(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        time.sleep(0.02)\n"
        "        return self.inner(x.flatten(1))\n"
    )
    process, run = start_swarm(
        tmp_path,
        *("--peers", "2", "--rounds", "60", "--set", "model=slow:Slow"),
        *("--set", f"import_paths=['{tmp_path}']", "--set", "swarm.checkpoint_every_s=600"),
    )
    homes = [run / "peers" / f"peer-0{index}" for index in range(2)]
    until(lambda: any(len(rounds_of(home)) == 60 for home in homes), "the last round")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "did not stop" not in output and "no checkpoint" not in output
    assert all((home / "checkpoint.safetensors").exists() for home in homes)
    resumed = coterie(tmp_path, "swarm", "--resume", str(run))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    for home in homes:
        assert [each["round"] for each in rounds_of(home)] == list(range(60))


def test_ctrl_c_while_starting_is_quiet(tmp_path):
    process, run = start_swarm(tmp_path, "--peers", "3")
    until(lambda: (run / "swarm.json").exists(), "the run folder")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    until(lambda: not any(is_running(pid) for pid in pids_of(run)), "no orphans")


def test_modules_in_the_current_folder_do_not_stand_in_for_the_librarys(tmp_path):
    for name in ("queue", "peer", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    result = coterie(tmp_path, "swarm", str(DIGITS), *SMALL, "--peers", "2", "--rounds", "2")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["swarm", str(DIGITS), "--out", "/dev/null/x"],
        ["swarm", str(DIGITS), "--out", "x" * 300],
        ["keygen", "/dev/null/x/alice"],
        ["inspect", "/dev/null/x"],
    ],
)
def test_what_the_file_system_refuses_is_one_line(tmp_path, arguments):
    result = coterie(tmp_path, *arguments)
    assert result.returncode in (4, 8, 10)
    assert result.stderr.startswith("coterie: ") and result.stderr.count("\n") == 1


def test_a_run_folder_that_is_not_whole_is_named(tmp_path):
    assert coterie(tmp_path, "swarm", str(DIGITS), *SMALL, "--rounds", "2").returncode == 0
    run = tmp_path / "runs" / "latest"
    (run / "peers" / "peer-02" / "config.toml").unlink()
    result = coterie(tmp_path, "swarm", "--resume", str(run))
    assert result.returncode == 8
    assert "peer-02" in result.stderr and "not whole" in result.stderr
