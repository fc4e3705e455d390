"""Peers on two machines, as network namespaces: names, IPv4, IPv6, a pulled cable, a slow one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_machines import NAMES, V6, Machines, two_machines, why_not
from helpers_processes import Peers, until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
OTHER = {"alice": "bob", "bob": "alice"}


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


def start(peers: Peers, machines: Machines, hosts: dict[str, str], *arguments: str) -> None:
    """Start a peer on each machine; all that each is told is where the other is."""
    peers.make(*NAMES, min_round_s=0.02)
    ports = {"alice": 7001, "bob": 7002}
    for name in NAMES:
        peers.prefix[name] = machines.command(name)
        other = OTHER[name]
        settings = {
            "listen": f"'tcp://*:{ports[name]}'",
            "advertise": f"'tcp://{hosts[name]}:{ports[name]}'",
            "neighbors_file": "''",
            "neighbors": f"{{{other} = 'tcp://{hosts[other]}:{ports[other]}'}}",
        }
        for key, value in settings.items():
            arguments += ("--set", f"network.{key}={value}")
        peers.start(name, *arguments)


def neighbors(peers: Peers, name: str) -> object:
    rounds = peers.rounds(name)
    return rounds[-1]["neighbors"] if rounds else None


def collaborates(peers: Peers, name: str) -> bool:
    return any(OTHER[name] in each["weights"] for each in peers.rounds(name)[-5:])


@pytest.mark.parametrize(
    "hosts",
    [{name: f"{name}.test" for name in NAMES}, {name: f"[{V6[name]}]" for name in NAMES}],
    ids=["by name", "by IPv6 address"],
)
def test_two_machines_learn_together_and_go_on_alone_without_the_cable(
    peers: Peers, machines: Machines, hosts: dict[str, str]
):
    start(peers, machines, hosts, "--set", "network.fetch_timeout_s=1")
    until(lambda: all(collaborates(peers, name) for name in NAMES), "both collaborate")

    machines.plug("bob", into=False)
    until(lambda: all(neighbors(peers, name) == 0 for name in NAMES), "both notice")
    alone_at = {name: len(peers.rounds(name)) for name in NAMES}
    until(
        lambda: all(len(peers.rounds(name)) > alone_at[name] + 20 for name in NAMES),
        "both learn on alone",
    )
    machines.plug("bob", into=True)
    until(lambda: all(neighbors(peers, name) == 1 for name in NAMES), "both are back")
    for name in NAMES:
        assert peers.stop(name) == 0, peers.log(name)
        assert "Traceback" not in peers.log(name)


def test_a_slow_cable_makes_nobody_unreachable(peers: Peers, machines: Machines):
    machines.slow("bob", "2mbit", "100ms")  # a model of 5,000 numbers in f32 takes 0.1 s
    hosts = {name: f"{name}.test" for name in NAMES}
    start(peers, machines, hosts, "--set", "algorithm.codec=f32")
    until(lambda: all(collaborates(peers, name) for name in NAMES), "both collaborate")
    until(lambda: all(len(peers.rounds(name)) > 50 for name in NAMES), "50 rounds")
    last = {name: peers.rounds(name)[-1] for name in NAMES}
    for name in NAMES:
        assert last[name]["neighbors"] == 1
        assert "connections_lost" not in last[name]["counters"]
        assert peers.stop(name) == 0
