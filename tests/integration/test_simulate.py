"""`coterie simulate` as a user runs it: reproducible, stoppable, with the report of a swarm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_processes import COTERIE, DEADLINE_S, ENVIRONMENT, rounds_of, until

import sim.cli

DIGITS = Path(__file__).parents[2] / "configs" / "digits.toml"
SMALL = ["--set", "partition.min_examples=20", "--set", "partition.max_examples=30"]
ASYNCHRONOUS = ["--set", "simulate.mode=asynchronous"]
WALL_CLOCK = ("time_s", "seconds")
CONFIG = """
name = "both"
data = "digits"
model = "logistic"
peers = 4
rounds = 6
[partition]
kind = "permuted"
groups = 2
min_examples = 20
max_examples = 30
[simulate]
delay_s = 0.02
slow = { peer-03 = 3.0 }
churn.peer-02 = { leaves_s = 0.4, returns_s = 0.6 }
"""


def coterie(
    folder: Path, *arguments: str, prefix: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, *COTERIE, *arguments],
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def simulate_here(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str
) -> int | str | None:
    """Run the command in this process, which spares importing torch again; return its exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["coterie", "simulate", *arguments])
    try:
        return sim.cli.main()
    except SystemExit as usage:
        return usage.code


def records_of(run: Path, *, without: tuple[str, ...] = ()) -> dict[str, object]:
    """Every record and result of a run, apart from the keys named."""
    found: dict[str, object] = {}
    for home in sorted((run / "peers").iterdir()):
        lines = [*rounds_of(home), json.loads((home / "result.json").read_text())]
        found[home.name] = [
            {key: value for key, value in line.items() if key not in without} for line in lines
        ]
    return found


def bytes_of(run: Path) -> dict[str, bytes]:
    files = sorted(path for path in (run / "peers").rglob("*") if path.is_file())
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_a_simulation_ends_with_the_report_of_a_swarm_and_without_keys(tmp_path):
    result = coterie(tmp_path, "simulate", str(DIGITS), *SMALL, "--peers", "4", "--rounds", "20")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "local-only" in result.stdout and "collaboration weights" in result.stdout
    run = (tmp_path / "runs" / "latest").resolve()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["peers"] == [f"peer-0{index}" for index in range(4)]
    assert summary["mean"] > 0.5
    assert summary["label_groups"] == [0, 0, 1, 1]
    assert summary["same_group_weight"] > 0.9
    assert not summary["unfinished"]
    for name in summary["peers"]:
        home = run / "peers" / name
        assert sorted(path.name for path in home.iterdir()) == ["record.jsonl", "result.json"]
        assert [line["round"] for line in rounds_of(home)] == list(range(20))
        assert rounds_of(home)[-1]["neighbors"] == 3
    assert not (run / "keys").exists()
    inspected = coterie(tmp_path, "inspect", "--round", "10")
    assert inspected.returncode == 0, inspected.stderr
    assert "peer-03" in inspected.stdout
    resumed = coterie(tmp_path, "swarm", "--resume", str(run))
    assert resumed.returncode == 8
    assert "coterie simulate" in resumed.stderr


def test_the_same_seed_gives_the_same_bits_on_any_number_of_cores(tmp_path):
    """Two threads and one core are what this machine surely has."""
    arguments = ["simulate", str(DIGITS), *SMALL, "--peers", "4", "--rounds", "8"]
    arguments += ["--set", "swarm.local_baseline=false", "--out"]
    many = {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4", "PYTHONHASHSEED": "1"}
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "2"}
    on_one_core = ("taskset", "-c", str(min(_cores())))
    for mode, name in (([], "lockstep"), ([*ASYNCHRONOUS, "--set", "simulate.loss=0.2"], "async")):
        runs = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        first = coterie(tmp_path, *arguments, str(runs[0]), *mode, **many)
        second = coterie(tmp_path, *arguments, str(runs[1]), *mode, prefix=on_one_core, **one)
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        if mode:
            assert bytes_of(runs[0]) == bytes_of(runs[1])
        else:
            ours, theirs = (records_of(run, without=WALL_CLOCK) for run in runs)
            assert ours == theirs


def _cores() -> set[int]:

    return os.sched_getaffinity(0)


def test_one_config_serves_a_swarm_and_its_simulation_which_have_the_same_data(tmp_path):
    (tmp_path / "both.toml").write_text(CONFIG)
    swarm = coterie(tmp_path, "swarm", "both.toml", "--out", "swarm")
    simulated = coterie(tmp_path, "simulate", "both.toml", "--out", "simulated", *ASYNCHRONOUS)
    assert swarm.returncode == 0, swarm.stdout + swarm.stderr
    assert simulated.returncode == 0, simulated.stdout + simulated.stderr
    assert "on the virtual clock" in simulated.stdout
    ours, theirs = (records_of(tmp_path / run) for run in ("simulated", "swarm"))
    for name in ours:
        for key in ("local_accuracy", "num_train", "num_test", "rounds"):
            assert ours[name][-1][key] == theirs[name][-1][key]


def test_a_run_can_be_done_again_from_its_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "both.toml").write_text(CONFIG)
    arguments = ["both.toml", "--seed", "7", "--out", "first", *ASYNCHRONOUS]
    assert simulate_here(monkeypatch, tmp_path, *arguments) == 0
    assert simulate_here(monkeypatch, tmp_path, "first/settings.toml", "--out", "second") == 0
    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "second")
    assert simulate_here(monkeypatch, tmp_path, "first/settings.toml", "--out", "first") == 2
    assert "--out first exists" in capsys.readouterr().err


def test_in_lockstep_what_the_virtual_clock_needs_is_said_to_be_of_no_use(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "both.toml").write_text(CONFIG)
    assert simulate_here(monkeypatch, tmp_path, "both.toml", "--rounds", "2") == 0
    output = capsys.readouterr().out
    assert "simulate.slow, simulate.delay_s, simulate.churn: of no use" in output


@pytest.mark.parametrize("mode", [[], ASYNCHRONOUS])
def test_ctrl_c_ends_with_a_partial_report_and_whole_records(tmp_path, mode):
    run = tmp_path / "run"
    command = [*COTERIE, "simulate", str(DIGITS), *SMALL, "--rounds", "9000", "--out", str(run)]
    process = subprocess.Popen(
        [*command, *mode],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: len(rounds_of(run / "peers" / "peer-07")) > 3, "rounds")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # as `timeout` does: the same wish
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "not finished" in output and "stopped; do it again" in output
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary["unfinished"]) == 8
    for home in (run / "peers").iterdir():
        text = (home / "record.jsonl").read_text()
        assert text.endswith("\n")
        assert [json.loads(line)["round"] for line in text.splitlines()] == list(
            range(summary["rounds_done"][home.name])
        )


def test_data_that_drift_can_be_simulated_and_a_swarm_says_so(tmp_path, monkeypatch, capsys):
    drift = ["--set", "partition.kind=rotated", "--set", "partition.drifting=2"]
    arguments = [str(DIGITS), *SMALL, *drift, "--peers", "4", "--rounds", "6"]
    assert simulate_here(monkeypatch, tmp_path, *arguments, "--out", "run") == 0
    assert "change half-way" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert sorted(summary["label_groups"]) == [0, 0, 1, 1]
    assert summary["label_groups"] != [0, 0, 1, 1]  # the groups that peers end in
    assert set(summary["groups"]) == {"rotated 0°", "rotated 180°"}
    refused = coterie(tmp_path, "swarm", *arguments, "--out", "swarm")
    assert refused.returncode == 2
    assert "coterie simulate" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "swarm").exists()


def test_peers_that_come_and_go_are_reported(tmp_path, monkeypatch, capsys):
    churn = ["--set", "simulate.churn.peer-01.leaves_s=0.5"]
    churn += ["--set", "simulate.churn.peer-02.joins_s=0.3"]
    arguments = [str(DIGITS), *SMALL, "--peers", "4", "--rounds", "10", *ASYNCHRONOUS, *churn]
    assert simulate_here(monkeypatch, tmp_path, *arguments, "--out", "run") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["unfinished"] == ["peer-01"]
    assert 0 < summary["rounds_done"]["peer-01"] < 10
    neighbors = [line["neighbors"] for line in rounds_of(tmp_path / "run" / "peers" / "peer-00")]
    assert (neighbors[0], max(neighbors), neighbors[-1]) == (2, 3, 2)
    first = rounds_of(tmp_path / "run" / "peers" / "peer-02")[0]
    assert first["time_s"] > 0.3
    assert "not finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.toml"], 2, "nowhere.toml isn't there"),
        ([], 2, "CONFIG"),
        ([str(DIGITS), "--resume", "x"], 2, "--resume"),
        ([str(DIGITS), "--peers", "0"], 2, "peers"),
        ([str(DIGITS), "--set", "simulate.mode=sometimes"], 2, "simulate.mode"),
        ([str(DIGITS), "--set", "simulate.delay_s=-1"], 2, "simulate.delay_s"),
        ([str(DIGITS), "--set", "simulate.lost=0.1"], 2, "did you mean simulate.loss"),
        ([str(DIGITS), "--set", "simulate.slow.peer-08=2"], 2, "peer-00 to peer-07"),
        ([str(DIGITS), "--set", "simulate.churn.alice.leaves_s=2"], 2, "'alice'"),
        ([str(DIGITS), "--set", "simulate.churn.peer-01.goes_s=2"], 2, "goes_s"),
        ([str(DIGITS), "--set", "model=nowhere:build"], 3, "nowhere"),
        ([str(DIGITS), "--set", "data=fashion-mnist", "--set", "data_folder=x"], 3, "x"),
        ([str(DIGITS), "--out", "/dev/null/x"], 10, "/dev/null/x"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_no_run_behind(
    tmp_path, monkeypatch, capsys, arguments, code, message
):
    assert simulate_here(monkeypatch, tmp_path, *arguments) == code
    errors = capsys.readouterr().err
    assert message in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


def test_when_churn_takes_everybody_away_at_once_that_is_an_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone.toml").write_text(
        CONFIG.replace("peers = 4", "peers = 2").replace("peer-03", "peer-01")
        + "churn.peer-00 = { leaves_s = 0.01 }\nchurn.peer-01 = { leaves_s = 0.01 }\n"
    )
    text = (tmp_path / "gone.toml").read_text()
    (tmp_path / "gone.toml").write_text(text.replace("churn.peer-02", "# churn.peer-02"))
    assert simulate_here(monkeypatch, tmp_path, "gone.toml", *ASYNCHRONOUS) == 7
    assert "simulate.churn" in capsys.readouterr().err


def test_help_reads_well(tmp_path):
    result = coterie(tmp_path, "simulate", "--help")
    assert result.returncode == 0
    assert "examples:" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "simulate" in coterie(tmp_path, "--help").stdout
