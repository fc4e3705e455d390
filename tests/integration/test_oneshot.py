"""Real peers that exchange their models once, cluster them and average."""

from __future__ import annotations

import json
import re
import subprocess

from helpers_processes import COTERIE, ENVIRONMENT, Peers, until

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
    assert all(abs(row[0] - 0.25) < 1e-5 or row[0] == 0 for row in summary["weights"])
    notes = {
        re.search(r"clustered (8 models: 2 clusters.*)", (home / "log.txt").read_text()).group(1)
        for home in sorted((run / "peers").iterdir())
    }
    assert len(notes) == 1
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


def test_who_comes_late_clusters_what_the_others_learned_alone(peers: Peers):
    names = ("alice", "bob", "carol")
    peers.make(*names)
    arguments = [part for setting in ONE_SHOT for part in ("--set", setting)]
    arguments += ["--rounds", "1", "--keep-serving"]
    for name in names[:2]:
        peers.start(name, *arguments)
    peers.introduce(*names[:2])
    until(lambda: all("clustered 2 models" in peers.log(n) for n in names[:2]), "the first two")
    peers.start("carol", *arguments)
    peers.introduce(*names)
    until(lambda: "clustered 3 models" in peers.log("carol"), "the late one clusters")
    until(lambda: "finished: accuracy" in peers.log("carol"), "the late one finishes")
