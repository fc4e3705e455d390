"""Real peer processes that are started by hand, learn, die and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers_processes import COTERIE, ENVIRONMENT, Peers, until

NAMES = ("alice", "bob", "carol")


def round_number(peers: Peers, name: str) -> int:
    rounds = peers.rounds(name)
    return rounds[-1]["round"] if rounds else -1


def weights(peers: Peers, name: str) -> dict[str, float]:
    return peers.rounds(name)[-1]["weights"]


def test_three_peers_learn_and_one_that_is_killed_is_missed_and_used_again(peers: Peers):
    peers.make(*NAMES, min_round_s=0.02)
    for name in NAMES:
        peers.start(name)
    peers.introduce(*NAMES)
    until(lambda: all(round_number(peers, name) >= 20 for name in NAMES), "20 rounds")
    assert all(set(weights(peers, name)) <= set(NAMES) for name in NAMES)
    assert any(len(weights(peers, name)) > 1 for name in NAMES), "nobody collaborates"

    peers.processes["carol"].kill()
    peers.processes["carol"].wait()
    killed_at = {name: round_number(peers, name) for name in ("alice", "bob")}
    until(
        lambda: all(round_number(peers, name) >= killed_at[name] + 30 for name in killed_at),
        "30 rounds without carol",
    )
    for name, last in killed_at.items():
        after = [each for each in peers.rounds(name) if each["round"] > last]
        # a round may wait for carol for one deadline of 2 s, but not for two
        assert max(each["seconds"]["total"] for each in after) < 2 * 2.0
        assert after[-1]["neighbors"] == 1

    peers.start("carol")
    peers.introduce(*NAMES)
    until(lambda: peers.rounds("alice")[-1]["neighbors"] == 2, "alice sees carol again")
    back_at = round_number(peers, "alice")
    until(
        lambda: any(
            "carol" in each["sampled"] and each["seconds"]["total"] < 1.0
            for each in peers.rounds("alice")
            if each["round"] > back_at
        ),
        "alice samples carol again",
    )
    log = peers.log("carol")
    assert "resuming from round" in log

    for name in NAMES:
        assert peers.stop(name) == 0, peers.log(name)
        assert "Traceback" not in peers.log(name)


def test_two_peers_with_config_files_alone_find_each_other_and_finish(peers: Peers):
    first = 20_000 + 2 * (os.getpid() % 5_000)  # known beforehand, and other suites' differ
    ports = {"alice": first, "bob": first + 1}
    rounds = {"alice": 150, "bob": 30}  # alice is still at it when bob has started
    peers.make("alice", "bob", min_round_s=0.05)
    for name, other in (("alice", "bob"), ("bob", "alice")):
        config = (peers.folder / f"{name}.toml").read_text()
        config = config.replace(
            'neighbors_file = "neighbors.toml"', f'listen = "tcp://127.0.0.1:{ports[name]}"'
        )
        config += f'\n[network.neighbors]\n{other} = "tcp://127.0.0.1:{ports[other]}"\n'
        (peers.folder / f"{name}.toml").write_text(config)
    peers.start("alice", "--rounds", str(rounds["alice"]))
    until(lambda: round_number(peers, "alice") >= 1, "alice learns alone")
    peers.start("bob", "--rounds", str(rounds["bob"]))
    for name in ("alice", "bob"):
        assert peers.processes[name].wait(timeout=60) == 0, peers.log(name)
        result = json.loads((peers.folder / "state" / name / "result.json").read_text())
        assert result["rounds"] == rounds[name]
        assert result["accuracy"] > 0.5  # 30 steps on half of the digits reach about 0.85
    assert any("alice" in each["sampled"] for each in peers.rounds("bob"))
    assert any("bob" in each["weights"] for each in peers.rounds("alice"))


def test_the_first_ctrl_c_stops_a_peer_with_a_checkpoint_and_it_resumes(peers: Peers):
    peers.make("alice")
    peers.start("alice", "--set", "network.neighbors_file=")
    until(lambda: round_number(peers, "alice") >= 3, "three rounds")
    assert peers.stop("alice", signal.SIGINT) == 0
    stopped_at = round_number(peers, "alice")
    peers.start("alice", "--set", "network.neighbors_file=", "--rounds", str(stopped_at + 4))
    assert peers.processes["alice"].wait(timeout=60) == 0, peers.log("alice")
    assert [each["round"] for each in peers.rounds("alice")] == list(range(stopped_at + 4))
    assert f"resuming from round {stopped_at + 1}" in peers.log("alice")


def test_a_peer_waiting_for_its_neighbors_file_stops_on_ctrl_c_too(peers: Peers):
    peers.make("alice")
    peers.start("alice")
    until(lambda: (peers.folder / "alice.ready").exists(), "alice listens")
    assert peers.stop("alice", signal.SIGTERM) == 0


def test_two_processes_never_share_one_state(peers: Peers):
    peers.make("alice")
    peers.start("alice")
    until(lambda: (peers.folder / "alice.ready").exists(), "alice listens")
    second = run_peer(peers.folder, "alice.toml")
    assert second.returncode != 0
    assert "in use by another running peer" in second.stderr


def run_peer(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COTERIE, "peer", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (["--set", "network.secret_key=nowhere.key"], 4, "nowhere.key isn't there"),
        (["--set", "network.secret_key=public.key"], 4, "holds the public key of alice"),
        (["--set", "network.allow=nowhere"], 4, "the allow-list"),
        (["--set", "data=nowhere.npz"], 3, "nowhere.npz"),
        (["--set", "data=nothing"], 3, "nothing"),
        (["--set", "model=resnet"], 3, "resnet"),
        (["--set", "model=cnn", "--set", "data=points:load"], 3, "points"),
        (["--set", "classes=5"], 3, "classes"),
        (["--set", "labels=[11]"], 3, "label"),
        (["--set", "networ.listen=x"], 2, "did you mean network?"),
        (["--set", "network.listen=localhost"], 2, "must read tcp://HOST:PORT"),
        (["--set", "network.listen=tcp://127.0.0.1:99999"], 2, "port number"),
        (["--set", "network.neighbors={zoe='tcp://127.0.0.1:1'}"], 4, "zoe.pub isn't there"),
        (["--set", "training.device=nowhere"], 3, "training.device"),
        (["--rounds", "-1"], 2, "rounds"),
    ],
)
def test_bad_input_is_one_clear_line_and_a_documented_exit_code(peers, change, code, message):
    peers.make("alice")
    (peers.folder / "public.key").write_text((peers.folder / "keys" / "alice.pub").read_text())
    (peers.folder / "public.key").chmod(0o600)
    change = [*change, "--set", "network.neighbors_file="]
    result = run_peer(peers.folder, "alice.toml", *change)
    assert result.returncode == code, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("coterie: ")
    assert message in last
    assert "Traceback" not in result.stderr


def test_a_secret_key_that_others_can_read_is_refused(peers: Peers):
    peers.make("alice")
    (peers.folder / "keys" / "alice.key").chmod(0o644)
    result = run_peer(peers.folder, "alice.toml")
    assert result.returncode == 4
    assert "chmod 600" in result.stderr


def test_a_port_in_use_is_named(peers: Peers):
    peers.make("alice", "bob")
    peers.start("alice")
    until(lambda: (peers.folder / "alice.ready").exists(), "alice listens")
    endpoint = json.loads((peers.folder / "alice.ready").read_text())["endpoint"]
    result = run_peer(peers.folder, "bob.toml", "--set", f"network.listen={endpoint}")
    assert result.returncode == 5
    assert endpoint.rpartition(":")[2] in result.stderr


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(peers: Peers):
    peers.make("alice")
    alone = ["--set", "network.neighbors_file=", "--rounds"]
    assert run_peer(peers.folder, "alice.toml", *alone, "3").returncode == 0
    checkpoint = peers.folder / "state" / "alice" / "checkpoint.safetensors"
    damaged = checkpoint.read_bytes()[:-50]
    checkpoint.write_bytes(damaged)
    result = run_peer(peers.folder, "alice.toml", *alone, "6")
    assert result.returncode == 0
    assert "the checkpoint before it is used" in result.stderr
    assert "resuming from round" in result.stderr
    assert checkpoint.with_name(f"{checkpoint.name}.damaged").read_bytes() == damaged


def test_where_no_checkpoint_can_be_used_the_peer_says_so_and_nothing_is_lost(peers: Peers):
    peers.make("alice")
    alone = ["--set", "network.neighbors_file=", "--rounds", "3"]
    assert run_peer(peers.folder, "alice.toml", *alone).returncode == 0
    checkpoints = sorted((peers.folder / "state" / "alice").glob("checkpoint*"))
    for path in checkpoints:
        path.write_bytes(path.read_bytes()[:-50])
    before = {path: path.read_bytes() for path in checkpoints}
    result = run_peer(peers.folder, "alice.toml", *alone)
    assert result.returncode == 6
    assert "move it away to begin anew" in result.stderr
    assert before == {path: path.read_bytes() for path in checkpoints}


@pytest.mark.parametrize("number", [1, 2])
def test_a_slice_of_very_few_examples_works(peers: Peers, number: int):
    peers.make("alice")
    (peers.folder / "few.py").write_text(
        "import numpy as np\n"
        f"def load(): return ((np.ones(({number}, 4)), np.arange({number}) % 2), None)\n"
    )
    change = ["--set", "data=few:load", "--set", "classes=2", "--rounds", "3"]
    result = run_peer(
        peers.folder,
        "alice.toml",
        *change,
        "--set",
        "network.neighbors_file=",
        "--set",
        "part=[0, 1]",
    )
    assert result.returncode == 0, result.stderr
    written = json.loads((peers.folder / "state" / "alice" / "result.json").read_text())
    assert written["num_test"] == 0
    assert written["accuracy"] is None
    assert "no test examples" in result.stderr


def test_peers_with_other_models_refuse_each_other_by_name_and_live_on(peers: Peers):
    peers.make("alice", "bob", min_round_s=0.02)
    peers.start("alice")
    peers.start("bob", "--set", "model=logistic")
    peers.introduce("alice", "bob")
    until(lambda: all(round_number(peers, name) >= 10 for name in ("alice", "bob")), "rounds")
    until(lambda: all("tensor" in peers.log(name) for name in ("alice", "bob")), "the difference")
    for name, other in (("alice", "bob"), ("bob", "alice")):
        lines = [line for line in peers.log(name).splitlines() if "tensor" in line]
        assert all(other in line and "1.bias" in line for line in lines)
        assert len(lines) <= 2  # once as who asks, once as who answers
        assert peers.rounds(name)[-1]["neighbors"] == 0
        assert peers.stop(name) == 0
