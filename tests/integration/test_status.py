"""`coterie status` asks running peers, and only operators are answered."""

from __future__ import annotations

import json
import signal

import pytest
from helpers_processes import DEADLINE_S, Peers, coterie, rounds_of, start_swarm, until


def test_the_peers_of_a_running_swarm_tell_their_rounds_and_the_whole_weight_matrix(tmp_path):
    process, run = start_swarm(tmp_path, "--peers", "3", "--rounds", "100000")
    try:
        until(
            lambda: all(len(rounds_of(run / "peers" / f"peer-0{i}")) > 1 for i in range(3)),
            "all learn",
        )
        answer = coterie(tmp_path, "status", "run")
        assert answer.returncode == 0, answer.stderr
        assert "3 peers answered" in answer.stdout
        assert "models fetched" in answer.stdout
        told = json.loads(coterie(tmp_path, "status", "run", "--json").stdout)
        assert [len(each["members"]) for each in told] == [2, 2, 2]
        assert all(each["round_number"] > 0 for each in told)
        assert all(abs(sum(w for _, w in each["weights"]) - 1) < 1e-6 for each in told)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    gone = coterie(tmp_path, "status", "run")
    assert gone.returncode == 9
    assert "none of 3 peers answered" in gone.stderr


def test_a_peer_started_by_hand_answers_whose_key_is_among_its_operators(peers: Peers):
    peers.make("alice", "bob")
    (peers.folder / "ops").mkdir()
    coterie(peers.folder, "keygen", "ops/ada")
    coterie(peers.folder, "keygen", "eve")
    for name in ("alice", "bob"):
        peers.start(name, "--set", "network.operators=ops")
    peers.introduce("alice", "bob")
    until(lambda: peers.rounds("alice"), "alice learns")
    alone = coterie(peers.folder, "status", "state/alice", "--key", "ops/ada.key")
    assert alone.returncode == 0, alone.stderr
    assert "bob" in alone.stdout
    endpoint = json.loads((peers.folder / "alice.ready").read_text())["endpoint"]
    where = [endpoint, "--peer", "keys/alice.pub"]
    both = coterie(peers.folder, "status", *where, "--key", "ops/ada.key", "--crawl")
    assert "2 peers answered" in both.stdout
    eve = coterie(peers.folder, "status", *where, "--key", "eve.key")
    assert eve.returncode == 9
    assert "refuses our key" in eve.stderr
    again = coterie(peers.folder, "status", "state/alice", "--key", "ops/ada.key")
    assert "refused at the door 1 times" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tcp://127.0.0.1:9"], 2, "--peer FILE is missing"),
        (["tcp://nowhere", "--peer", "ada.pub", "--key", "ada.key"], 2, "tcp://HOST:PORT"),
        (["tcp://127.0.0.1:9", "--peer", "ada.pub"], 2, "--key FILE is missing"),
        (["tcp://127.0.0.1:9", "--peer", "ada.pub", "--key", "ada.pub"], 4, "readable by others"),
        (["tcp://127.0.0.1:9", "--peer", "ada.pub", "--key", "ada.key"], 9, "nobody listens"),
        (["nowhere"], 8, "nowhere"),
    ],
)
def test_bad_input_is_one_clear_line_and_a_documented_exit_code(tmp_path, arguments, code, message):
    coterie(tmp_path, "keygen", "ada")
    result = coterie(tmp_path, "status", *arguments)
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
