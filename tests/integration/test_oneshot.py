"""Real peers that exchange their models once, cluster them and average."""

from __future__ import annotations

import json
import re
import subprocess

import numpy as np
import pytest
from helpers_processes import COTERIE, ENVIRONMENT, Peers, coterie, until
from safetensors.numpy import load_file

ONE_SHOT = ("algorithm.profile=odcl", "algorithm.start_steps=60")


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


def test_who_comes_late_clusters_what_the_others_learned_alone_before_they_were_restarted(
    peers: Peers,
):
    names = ("alice", "bob", "carol")
    peers.make(*names)
    (peers.folder / "ops").mkdir()
    coterie(peers.folder, "keygen", "ops/ada")
    one = ("algorithm.clustering=kmeans", "algorithm.num_clusters=1")  # whoever else is there
    settings = (*ONE_SHOT, *one, "network.operators=ops")
    arguments = [part for setting in settings for part in ("--set", setting)]
    arguments += ["--rounds", "1", "--keep-serving"]
    for name in names[:2]:
        peers.start(name, *arguments)
    peers.introduce(*names[:2])
    until(lambda: all("clustered 2 models" in peers.log(n) for n in names[:2]), "the first two")
    until(lambda: "finished: accuracy" in peers.log("bob"), "bob is done")
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
