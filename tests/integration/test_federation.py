"""Real peers find each other from one address or by a broker, and notice who comes and goes."""

from __future__ import annotations

import json
from pathlib import Path

from helpers_mqtt import Mosquitto, needs_mosquitto
from helpers_processes import Peers, coterie, until

from protocol.identity import read_key_pair

NAMES = ("alice", "bob", "carol")
PASSWORD = "correct horse"


def neighbors(peers: Peers, name: str) -> object:
    rounds = peers.rounds(name)
    return rounds[-1]["neighbors"] if rounds else None


def all_see(peers: Peers, *names: str) -> bool:
    return all(neighbors(peers, name) == len(names) - 1 for name in names)


def states(peers: Peers, name: str) -> dict[str, str]:
    told = coterie(peers.folder, "status", f"state/{name}", "--key", "ops.key", "--json")
    assert told.returncode == 0, told.stderr
    return {each["name"]: each["state"] for each in json.loads(told.stdout)[0]["members"]}


def make(peers: Peers) -> None:
    peers.make(*NAMES, min_round_s=0.02)
    coterie(peers.folder, "keygen", "ops")
    (peers.folder / "ops").mkdir()
    (peers.folder / "ops.pub").rename(peers.folder / "ops" / "ops.pub")


def start(peers: Peers, name: str, seeds: dict[str, str], *sets: str) -> None:
    known = ", ".join(f"{seed} = '{endpoint}'" for seed, endpoint in seeds.items())
    peers.start(
        name,
        *("--set", "network.neighbors_file=''", "--set", f"network.neighbors={{{known}}}"),
        *("--set", "network.operators=ops"),
        *(part for each in sets for part in ("--set", each)),
    )


def endpoint(peers: Peers, name: str) -> str:
    ready = peers.folder / f"{name}.ready"
    until(lambda: ready.exists() or peers.ended(name), f"{name} listens")
    assert ready.exists(), peers.log(name)
    told: str = json.loads(ready.read_text())["endpoint"]
    return told


def test_with_one_address_known_all_find_all_and_notice_who_goes_and_returns(peers: Peers):
    make(peers)
    start(peers, "alice", {})
    seed = {"alice": endpoint(peers, "alice")}
    for name in ("bob", "carol"):
        start(peers, name, seed)
    until(lambda: all_see(peers, *NAMES), "all see all, though bob and carol know alice alone")
    assert states(peers, "bob") == {"alice": "alive", "carol": "alive"}

    peers.processes["carol"].kill()
    peers.processes["carol"].wait()
    until(lambda: states(peers, "bob")["carol"] == "dead", "carol is found dead")
    assert "carol is gone" in peers.log("bob")
    start(peers, "carol", seed)  # at another port
    until(lambda: all_see(peers, *NAMES), "carol is back")
    until(lambda: states(peers, "bob")["carol"] == "alive", "and taken for alive")

    assert peers.stop("carol") == 0
    until(lambda: states(peers, "bob") == {"alice": "alive"}, "carol has left")
    assert "carol has left" in peers.log("bob")
    for name in ("alice", "bob"):
        assert peers.stop(name) == 0
        assert "Traceback" not in peers.log(name)


def test_a_peer_whose_only_seed_is_down_starts_says_so_once_and_joins_later(peers: Peers):
    make(peers)
    start(peers, "alice", {})
    where = endpoint(peers, "alice")
    assert peers.stop("alice") == 0
    start(peers, "bob", {"alice": where})
    until(lambda: len(peers.rounds("bob")) > 20, "bob learns alone")
    until(lambda: "none of 1 seeds answers yet" in peers.log("bob"), "bob says so")
    peers.start("alice", "--set", "network.neighbors_file=''", "--set", f"network.listen='{where}'")
    until(lambda: all_see(peers, "alice", "bob"), "they find each other")
    assert peers.log("bob").count("none of 1 seeds answers yet") == 1


@needs_mosquitto
def test_peers_that_know_nobody_find_each_other_through_the_broker(peers: Peers, tmp_path: Path):
    make(peers)
    pairs = {name: read_key_pair(peers.folder / "keys" / f"{name}.key") for name in NAMES}
    passwords = {pair.peer_id: PASSWORD for pair in pairs.values()}
    folder = tmp_path / "broker"
    folder.mkdir()
    broker = Mosquitto(folder, passwords, ("coterie",))
    password = peers.folder / "password"
    password.write_text(PASSWORD)
    password.chmod(0o600)
    try:
        broker.start()
        mqtt = {
            "host": "'localhost'",
            "port": broker.port,
            "ca_file": f"'{broker.ca_file}'",
            "password_file": "'password'",
            "reconnect_min_s": 0.1,
        }
        sets = [f"network.mqtt.{key}={value}" for key, value in mqtt.items()]
        for name in NAMES:
            start(peers, name, {}, *sets)
        until(lambda: all_see(peers, *NAMES), "all see all")
        broker.kill()
        at = {name: len(peers.rounds(name)) for name in NAMES}
        until(lambda: all(len(peers.rounds(n)) > at[n] + 50 for n in NAMES), "they learn on")
        assert all_see(peers, *NAMES)
        broker.start()
        until(lambda: peers.rounds("bob")[-1]["counters"].get("mqtt_connected", 0) >= 2, "presence")
        for name in NAMES:
            assert peers.stop(name) == 0
            assert "Traceback" not in peers.log(name)
    finally:
        broker.close()
