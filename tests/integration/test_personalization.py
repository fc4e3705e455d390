"""Peers with a memory as real processes: reported, fed while they run, killed and restored."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from helpers_processes import Peers, coterie, until

from peer.sources import load_source

ALONE = ["--set", "network.neighbors_file="]
KNN = {"kind": "knn", "watch": "inbox", "every": 5}


def make_alice(peers: Peers, **personalization: object) -> None:
    peers.make("alice", part=[0, 20], min_round_s=0.02, personalization=KNN | personalization)


def start(peers: Peers, *arguments: str) -> None:
    peers.start("alice", *ALONE, *arguments)
    until(lambda: memory(peers) or peers.ended("alice"), "the memory's first record")


def memory(peers: Peers) -> dict[str, object]:
    rounds = peers.rounds("alice")
    return (rounds[-1].get("memory") or {}) if rounds else {}


def num_offered(peers: Peers) -> int:
    return int(str(memory(peers).get("num_offered", 0)))


def new_file(path: Path, part: int = 1, count: int = 12) -> Path:
    dataset = load_source("digits", part=(part, 20))
    train = dataset.train
    np.savez(path, train_inputs=train.inputs[:count], train_labels=train.labels[:count])
    return path


def kill(peers: Peers) -> None:
    peers.processes["alice"].kill()
    peers.processes["alice"].wait()


def test_a_swarm_reports_model_memory_blend_and_lambda_of_each_peer(tmp_path):
    config = Path(__file__).parents[2] / "configs" / "digits.toml"
    arguments = ["--peers", "4", "--rounds", "12", "--set", "personalization.kind=knn"]
    done = coterie(tmp_path, "swarm", str(config), *arguments, "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    header = next(line for line in done.stdout.splitlines() if line.startswith("peer "))
    assert header.split()[1:6] == ["test", "mix", "mem", "both", "lam"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["personalized"]
    for name in summary["peers"]:
        result = json.loads((tmp_path / "run" / "peers" / name / "result.json").read_text())
        for key in ("memory_accuracy", "blend_accuracy", "lam"):
            assert 0 <= result[key] <= 1
            assert summary[key][name] == result[key]
        lines = (tmp_path / "run" / "peers" / name / "record.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])["memory"]
        assert last["num_entries"] == result["num_train"]
        # The holdout is trained on from round 3 of 12; or later, but from 8, by who still searches.
        assert 3 <= last["tuned_round"] <= 8
        assert last["lam"] == result["lam"]


def test_without_personalization_nothing_is_said_of_it(tmp_path):
    config = Path(__file__).parents[2] / "configs" / "digits.toml"
    done = coterie(tmp_path, "swarm", str(config), "--peers", "2", "--rounds", "3", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    home = tmp_path / "run" / "peers" / "peer-00"
    assert "personalization" not in (home / "config.toml").read_text()
    assert "memory" not in (home / "record.jsonl").read_text()
    assert "blend_accuracy" not in (home / "result.json").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["blend_accuracy"] is None


def test_new_examples_are_remembered_at_once_and_trained_on_and_wrong_files_named_once(peers):
    make_alice(peers)
    start(peers)
    before = num_offered(peers)
    inbox = peers.folder / "inbox"
    (inbox / "half.npz").write_bytes(b"PK\x03\x04 half")
    np.savez(inbox / "shape.npz", train_inputs=np.ones((2, 5)), train_labels=np.arange(2))
    whole = new_file(peers.folder / "new.npz")
    done = coterie(peers.folder, "remember", "alice.toml", "new.npz")
    assert done.returncode == 0, done.stderr
    assert "alice: 12 examples of new.npz" in done.stdout
    until(lambda: num_offered(peers) == before + 12, "twelve more")
    (inbox / "half.npz").write_bytes(whole.read_bytes())  # the rest has come
    until(lambda: num_offered(peers) == before + 24, "twelve more again")
    until(lambda: "shape.npz is refused" in peers.log("alice"), "a refusal")
    later = len(peers.rounds("alice")) + 10
    until(lambda: len(peers.rounds("alice")) > later, "ten more rounds")
    assert peers.stop("alice", signal.SIGINT) == 0
    log = peers.log("alice")
    assert len(re.findall("shape.npz is refused", log)) == 1
    assert "the model takes" in log
    assert "Traceback" not in log
    assert (inbox / "shape.npz").exists()
    assert len(list((inbox / "taken").glob("*.npz"))) == 2
    start(peers, "--rounds", str(len(peers.rounds("alice")) + 2))
    assert peers.processes["alice"].wait(timeout=30) == 0
    result = json.loads((peers.folder / "state" / "alice" / "result.json").read_text())
    assert result["num_train"] == before + 24


def test_kills_at_any_moment_lose_nothing_and_double_nothing(peers: Peers):
    make_alice(peers, strategy="fifo", capacity=1000)
    start(peers)
    before = num_offered(peers)
    inbox = peers.folder / "inbox"
    for number in range(3):
        new_file(inbox / f"running-{number}.npz", number + 1)
        if number % 2:  # about when it is taken
            until(lambda: not list(inbox.glob("*.npz")), "taken")
        kill(peers)
        new_file(inbox / f"down-{number}.npz", number + 4)
        start(peers)
    until(lambda: num_offered(peers) >= before + 72, "all of them")
    again = len(peers.rounds("alice")) + 20
    until(lambda: len(peers.rounds("alice")) > again, "twenty more rounds")
    assert num_offered(peers) == before + 72
    assert memory(peers)["num_entries"] == before + 72
    assert len(list((inbox / "taken").glob("*.npz"))) == 6
    kill(peers)
    start(peers)
    assert num_offered(peers) == before + 72
    assert "built anew" not in peers.log("alice")


def test_lambda_is_kept_by_a_peer_that_is_killed_after_the_holdout_was_trained_on(peers: Peers):
    make_alice(peers)
    rounds = ["--rounds", "60"]
    start(peers, *rounds)
    until(lambda: len(peers.rounds("alice")) > 45 or peers.ended("alice"), "round 45 of 60")
    kill(peers)
    tuned = {key: memory(peers)[key] for key in ("lam", "accuracy", "num_validation")}
    start(peers, *rounds)
    assert peers.processes["alice"].wait(timeout=30) == 0
    last = memory(peers)
    assert last["tuned_round"] == 12  # the last before which no model has seen the holdout
    assert last["round"] == 55
    assert {key: last[key] for key in tuned} == tuned
    result = json.loads((peers.folder / "state" / "alice" / "result.json").read_text())
    assert result["lam"] == tuned["lam"]


def test_a_store_of_other_examples_is_refused_by_name_and_built_anew(peers: Peers):
    make_alice(peers)
    new_file(peers.folder / "new.npz")
    start(peers)
    before = num_offered(peers)
    assert coterie(peers.folder, "remember", "alice.toml", "new.npz").returncode == 0
    until(lambda: num_offered(peers) == before + 12, "twelve more")
    assert peers.stop("alice", signal.SIGINT) == 0
    (taken,) = (peers.folder / "inbox" / "taken").glob("*.npz")
    taken.write_bytes(b"damaged")
    start(peers)
    until(lambda: num_offered(peers) == before, "without the damaged file")
    log = peers.log("alice")
    assert "is left out now" in log
    assert "of other examples than there are now: it is built anew" in log
    assert peers.stop("alice", signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["alice.toml", "wrong.npz"], 3, "the model takes"),
        (["alice.toml", "right.npz", "wrong.npz"], 3, "the model takes"),
        (["alice.toml", "label.npz"], 3, "a label is 10"),
        (["alice.toml", "nan.npz"], 3, "not finite"),
        (["alice.toml", "nowhere.npz"], 3, "nowhere.npz isn't there"),
        (["alice.toml", "alice.toml"], 3, "is no .npz file"),
        (["alice.toml", "right.npz", "right.npz"], 3, "named twice"),
        (["bob.toml", "right.npz"], 2, "watches no folder"),
        (["nobody.toml", "right.npz"], 2, "nobody.toml isn't there"),
        (["keys", "right.npz"], 2, "config.toml isn't there"),
    ],
)
def test_what_cannot_be_remembered_is_one_clear_line_and_nothing_is_put(
    tmp_path, arguments, code, message
):
    config = {"data": "digits", "model": "mlp", "network": {"secret_key": "key", "allow": "keys"}}
    for name, section in (("alice", KNN), ("bob", {"kind": "knn"})):
        tree = {"name": name, **config, "personalization": section}
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(tree))
    (tmp_path / "keys").mkdir()
    images = np.zeros((2, *load_source("digits", part=(0, 20)).input_shape), np.float32)
    files = {
        "right": (images, [0, 1]),
        "wrong": (images[..., :3], [0, 1]),
        "label": (images, [0, 10]),
        "nan": (images + np.nan, [0, 1]),
    }
    for name, (inputs, labels) in files.items():
        np.savez(tmp_path / f"{name}.npz", train_inputs=inputs, train_labels=np.array(labels))
    done = coterie(tmp_path, "remember", *arguments)
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("coterie: ")
    assert message in last
    assert not (tmp_path / "inbox").exists()


def test_a_newcomer_predicts_within_seconds_by_its_best_collaborators_without_a_gradient(
    peers: Peers,
):
    """Two of three trained peers know the newcomer's digits, the third has seen none of them."""
    low, high = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]
    owners = {"alice": low, "bob": low, "carol": high}
    for number, (name, labels) in enumerate({**owners, "dave": low}.items()):
        peers.make(name, part=[number, 10], labels=labels, classes=10, min_round_s=0.02)
    for name in owners:
        peers.start(name)
    peers.introduce(*owners)
    until(lambda: all(len(peers.rounds(name)) > 40 for name in owners), "trained models")
    began = time.monotonic()
    newcomer = ["--rounds", "1", "--set", "algorithm.profile=newcomer"]
    peers.start("dave", *newcomer, "--set", "personalization.kind=knn")
    assert peers.processes["dave"].wait(timeout=30) == 0, peers.log("dave")
    took = time.monotonic() - began
    result = json.loads((peers.folder / "state" / "dave" / "result.json").read_text())
    (only,) = peers.rounds("dave")
    assert only["work"]["differentiated"] == 0
    assert only["memory"]["num_entries"] == result["num_train"]
    assert set(result["weights"]) == {"alice", "bob", "dave"}
    assert took < 20  # 3 s were seen, most of them imports
    assert result["seconds"] < 5
    # Five classes; untrained, it would be 0.2: 0.94 to 1.00 were seen.
    for key in ("accuracy", "own_accuracy", "blend_accuracy"):
        assert result[key] > 0.75


def test_lambda_follows_new_examples_of_the_last_rounds(peers: Peers):
    make_alice(peers, strategy="fifo", capacity=60)
    rounds = ["--rounds", "400"]  # the holdout is trained on from round 80
    start(peers, *rounds)
    until(lambda: len(peers.rounds("alice")) > 85 or peers.ended("alice"), "the last rounds")
    assert memory(peers)["tuned_round"] == 80
    train = load_source("digits", part=(1, 20)).train
    shifted = (train.labels[:60] + 1) % 10
    np.savez(peers.folder / "new.npz", train_inputs=train.inputs[:60], train_labels=shifted)
    assert coterie(peers.folder, "remember", "alice.toml", "new.npz").returncode == 0
    until(lambda: int(str(memory(peers)["tuned_round"])) > 80 or peers.ended("alice"), "a choice")
    last = memory(peers)
    assert last["num_validation"] == 60
    assert last["model_accuracy"] < 0.3  # it calls them by their former names
    assert peers.stop("alice", signal.SIGINT) == 0
    assert "Traceback" not in peers.log("alice")


def test_two_peers_never_take_from_one_folder(peers: Peers):
    make_alice(peers)
    start(peers)
    other = ["--set", "name=bob", "--set", "state=state/bob"]
    second = coterie(peers.folder, "peer", "alice.toml", *other, *ALONE)
    assert second.returncode != 0
    assert "in use by another running peer" in second.stderr
    assert "inbox" in second.stderr
