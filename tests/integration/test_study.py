"""`coterie study` as a user runs it: a report, more of it, Ctrl-C and on again, wrong input."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from helpers_processes import COTERIE, DEADLINE_S, ENVIRONMENT, coterie, until

SMALL = ["--peers", "12", "--clusters", "3", "--dim", "4", "--starts", "2", "--out", "out"]
LINEAR = [*SMALL, "--problem", "linear"]


def test_a_study_reports_and_is_gone_on_with(tmp_path):
    first = coterie(tmp_path, "study", "odcl", *LINEAR, "--examples", "3,30", "--seeds", "1")
    assert first.returncode == 0, first.stderr
    assert "2 of 2: linear, n = 30, seed 1" in first.stdout
    assert "least norm" in first.stdout and "claims, linear" in first.stdout
    out = tmp_path / "out"
    assert f"results: {out}/results.json, .csv, .png" in first.stdout
    assert {path.name for path in out.iterdir()} == {
        *("lock", "problems", "study.json", "results.json", "results.csv", "results.png")
    }
    told = json.loads((out / "results.json").read_text())
    assert told["design"] == {"peers": 12, "clusters": 3, "dim": 4}
    assert {row["examples"] for row in told["rows"]} == {3, 30}
    more = coterie(tmp_path, "study", "odcl", *SMALL, "--examples", "30", "--seeds", "1")
    assert more.returncode == 0, more.stderr
    assert "1 of 1: logistic, n = 30, seed 1" in more.stdout
    again = json.loads((out / "results.json").read_text())
    assert [row for row in again["rows"] if row["kind"] == "linear"] == [
        row for row in told["rows"] if row["examples"] == 30
    ]


def test_ctrl_c_stops_a_study_that_the_same_command_ends(tmp_path):
    command = ["study", "odcl", *LINEAR, "--examples", "20", "--seeds", "100"]
    running = subprocess.Popen(
        [*COTERIE, *command],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: list(tmp_path.glob("out/problems/*.json")), "a problem is done")
        running.send_signal(signal.SIGINT)
        shown, _ = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, shown
    assert "of 100 problems done: go on by the same command" in shown
    assert "Traceback" not in shown
    rest = coterie(tmp_path, *command[:-1], "1")
    assert rest.returncode == 0, rest.stderr
    assert "1 of them were done before" in rest.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["idcl"], "unknown study 'idcl'; known are odcl"),
        (["odcl", "--problem", "cubic"], "unknown problem 'cubic'; known are linear, logistic"),
        (["odcl", "--problem", ""], "at least one problem"),
        (["odcl", "--peers", "5"], "clusters = 10: with 5 peers it must be from 2 to 5"),
        (["odcl", "--dim", "0"], "dim = 0"),
        (["odcl", "--examples", "25,-1"], "'-1' is no whole number of 1 or more"),
        (["odcl", "--seeds", "0"], "seeds = 0"),
        (["odcl", "--out", "full"], "not the folder of a study"),
    ],
)
def test_wrong_input_is_one_clear_line(tmp_path, arguments, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = coterie(tmp_path, "study", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
