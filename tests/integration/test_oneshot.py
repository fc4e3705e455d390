"""Real peers that exchange their models once, cluster them and average."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from helpers_processes import COTERIE, ENVIRONMENT, Peers, coterie, until
from safetensors.numpy import load_file

from protocol.identity import AllowList, peer_id_of

ONE_SHOT = ("algorithm.profile=odcl", "algorithm.start_steps=60")
PATIENT = "network.fetch_timeout_s=40"  # the machine may be busy


def test_a_swarm_finds_its_groups_in_one_round_and_all_find_the_same(tmp_path):
    run = tmp_path / "run"
    command = [*COTERIE, "swarm", "configs/digits.toml", "--rounds", "1", "--out", str(run)]
    for setting in (*ONE_SHOT, "swarm.local_baseline=false"):
        command += ["--set", setting]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["same_group_weight"] == 1.0
    sizes = list(summary["num_train"].values())
    for group, row in zip(summary["label_groups"], summary["weights"], strict=True):
        total = sum(
            n for n, other in zip(sizes, summary["label_groups"], strict=True) if other == group
        )
        for n, other, weight in zip(sizes, summary["label_groups"], row, strict=True):
            assert weight == pytest.approx(n / total if other == group else 0, abs=1e-5)
    (digest,) = set(summary["clusterings"].values())
    assert f"all 8 peers found the same clustering (digest {digest})" in done.stdout
    notes = {
        re.search(r"clustered (8 models: 2 clusters.*)", (home / "log.txt").read_text()).group(1)
        for home in sorted((run / "peers").iterdir())
    }
    (note,) = notes
    assert note.endswith(digest)
    # Each has sent its model, a few kB, to seven others, and nothing else.
    assert max(summary["bytes_sent"].values()) < 200_000


def in_order(peers: Peers) -> list[str]:
    """Return the names of all peers by their ids: the first is the one who clusters."""
    names = AllowList(peers.folder / "keys").names()
    return [names[key] for key in sorted(names, key=peer_id_of)]


def start_all(peers: Peers, names: list[str], *settings: str, late: str = "") -> None:
    arguments = [part for setting in (*ONE_SHOT, *settings) for part in ("--set", setting)]
    for name in names:
        more = ("--set", "algorithm.start_steps=8000") if name == late else ()
        peers.start(name, "--rounds", "1", "--keep-serving", *arguments, *more)
    peers.introduce(*names)


def found_by(peers: Peers, names: list[str]) -> dict[str, tuple[object, object]]:
    """Wait until all have finished; return the digest that each went by, and who told of it."""
    for name in names:
        until(lambda name=name: peers.rounds(name), f"{name} finishes its round")
    rounds = {name: peers.rounds(name)[0] for name in names}
    return {name: (each["clustering"], each["clustered_by"]) for name, each in rounds.items()}


def test_one_who_clusters_tells_the_others_what_all_would_have_found(peers: Peers):
    peers.make("alice", "bob", "carol", "dave")
    names = in_order(peers)
    found = {}
    for clustered_by in ("all", "one"):
        start_all(peers, names, f"algorithm.clustered_by={clustered_by}", PATIENT)
        found[clustered_by] = found_by(peers, names)
        for name in names:
            peers.stop(name)
        shutil.rmtree(peers.folder / "state")
        (peers.folder / "neighbors.toml").unlink()
    (digest,) = {digest for digest, _ in found["all"].values()}
    assert found["all"] == {name: (digest, name) for name in names}
    assert found["one"] == {name: (digest, names[0]) for name in names}
    for name in names[1:]:
        assert f"{names[0]} told who belongs together: digest {digest}" in peers.log(name)


def test_when_the_one_who_clusters_is_killed_in_the_middle_another_does(peers: Peers):
    peers.make("alice", "bob", "carol", "dave")
    names = in_order(peers)
    first, second, third, slow = names
    # It is waited for, by whoever clusters.
    start_all(peers, names, "algorithm.clustered_by=one", PATIENT, late=slow)
    for name in (second, third):
        until(lambda name=name: "asking" in peers.log(name), f"{name} asks")
    peers.processes[first].kill()
    found = found_by(peers, names[1:])
    assert "clustered 3 models" in peers.log(second)
    (digest,) = {digest for digest, _ in found.values()}
    assert found == dict.fromkeys(names[1:], (digest, second))
    assert not peers.rounds(first)


def test_models_that_started_elsewhere_are_refused_by_name(peers: Peers):
    peers.make("alice", "bob")
    config = peers.folder / "bob.toml"
    text = config.read_text().replace("\n", "\nmodel_seed = 7\n", 1)
    config.write_text(text)
    for name in ("alice", "bob"):
        arguments = [part for setting in ONE_SHOT for part in ("--set", setting)]
        peers.start(name, "--rounds", "1", "--keep-serving", *arguments)
    peers.introduce("alice", "bob")
    for name in ("alice", "bob"):
        until(lambda name=name: "started from" in peers.log(name), "the reason in both logs")


@pytest.mark.parametrize("clustered_by", ["all", "one"])
def test_who_comes_late_clusters_what_the_others_learned_alone_before_they_were_restarted(
    peers: Peers, clustered_by: str
):
    names = ("alice", "bob", "carol")
    peers.make(*names)
    (peers.folder / "ops").mkdir()
    coterie(peers.folder, "keygen", "ops/ada")
    one = ("algorithm.clustering=kmeans", "algorithm.num_clusters=1")  # whoever else is there
    by = f"algorithm.clustered_by={clustered_by}"
    settings = (*ONE_SHOT, *one, by, "network.operators=ops")
    arguments = [part for setting in settings for part in ("--set", setting)]
    arguments += ["--rounds", "1", "--keep-serving"]
    for name in names[:2]:
        peers.start(name, *arguments)
    peers.introduce(*names[:2])
    until(lambda: "clustered 2 models" in peers.log("alice") + peers.log("bob"), "the first two")
    for name in names[:2]:
        until(lambda name=name: "finished: accuracy" in peers.log(name), f"{name} is done")
    peers.stop("bob")
    bob = load_file(peers.folder / "state" / "bob" / "checkpoint.safetensors")
    peers.start("bob", *arguments)
    peers.introduce(*names[:2])
    peers.start("carol", *arguments)  # once it is known where to find both
    until(lambda: "clustered 3 models" in peers.log("carol"), "the late one clusters")
    until(lambda: "finished: accuracy" in peers.log("carol"), "the late one finishes")
    status = ("status", "state/carol", "--key", "ops/ada.key", "--crawl")
    shown = " ".join(coterie(peers.folder, *status).stdout.split())
    assert "1 of 3 peers found one clustering" in shown
    assert "found another:" in shown and "clustered nothing: bob (" in shown
    peers.stop("carol")
    carol = load_file(peers.folder / "state" / "carol" / "checkpoint.safetensors")
    peer_id = json.loads((peers.folder / "bob.ready").read_text())["peer_id"]
    prefix = f"models/{peer_id}/"
    fetched = {key.removeprefix(prefix): carol[key] for key in carol if key.startswith(prefix)}
    assert fetched
    for name, array in fetched.items():
        np.testing.assert_allclose(array, bob[f"shown/{name}"], rtol=1e-3, atol=1e-6)
    assert any(np.abs(array - bob[f"own/{name}"]).max() > 0.01 for name, array in fetched.items())
