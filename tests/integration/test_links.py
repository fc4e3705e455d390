"""Links that are slow, long and lossy: nobody behind one is given up, and nobody else waits."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from helpers_link import Link
from helpers_machines import NAMES, Machines, two_machines, why_not
from helpers_processes import Peers, until
from helpers_transport import (
    DEADLINE_S,
    Peer,
    ZeroMQSwarm,
    gradient,
    snapshot,
)

from protocol.tensors import Layout, TensorSpec
from protocol.transport.interface import Address

MODEL = Layout([TensorSpec("weight", "f32", (600, 1000))])  # 1.2 seconds at 2 MB/s
SLOW_FETCH_S = 30.0


@pytest.fixture
async def swarm() -> AsyncIterator[ZeroMQSwarm]:
    made = ZeroMQSwarm()
    yield made
    async with asyncio.timeout(DEADLINE_S):
        await made.close()


def known_at(peer: Peer, endpoint: str) -> Address:
    return Address(name=peer.name, endpoint=endpoint, public_key=peer.key_pair.public_key)


async def quick_fetches(one: Peer, other: Peer, until_done: asyncio.Event) -> list[float]:
    """Fetch a neighbor's new models one after another; return how long each took."""
    took: list[float] = []
    while not until_done.is_set():
        other.transport.publish(snapshot(MODEL, len(took)))
        began = time.monotonic()
        assert await one.transport.fetch(other.peer_id, None, DEADLINE_S) is not None
        took.append(time.monotonic() - began)
        await asyncio.sleep(0.02)
    return took


async def test_the_link_is_slow_and_long_and_keeps_the_order() -> None:
    sent = bytes(range(256)) * 1000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Link(f"tcp://127.0.0.1:{port}", rate=1e6, delay_s=0.1, loss=0.02) as link:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(link.endpoint.rpartition(":")[2])
        )
        received = await reader.read(1)
        first_s = time.monotonic() - began
        received += await reader.read()
        took_s = time.monotonic() - began
        writer.close()
    server.close()
    assert received == sent
    assert link.lost > 0
    assert first_s >= 0.1
    assert took_s >= 0.1 + len(sent) / 1e6


async def test_a_peer_behind_a_bad_link_is_never_given_up_and_nobody_else_waits_for_it(
    swarm: ZeroMQSwarm,
) -> None:
    one, quick, slow = [await swarm.add(MODEL) for _ in range(3)]
    async with Link(slow.address.endpoint) as link:
        addresses = {quick.peer_id: quick.address, slow.peer_id: known_at(slow, link.endpoint)}
        one.transport.set_neighbors(addresses)
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(2.0, done.set)
        before = await quick_fetches(one, quick, done)

        done.clear()
        meanwhile = asyncio.create_task(quick_fetches(one, quick, done))
        for round_number in range(3):
            slow.transport.publish(snapshot(MODEL, round_number))
            fetched, _ = await asyncio.gather(
                one.transport.fetch(slow.peer_id, None, SLOW_FETCH_S),
                one.transport.push(
                    slow.peer_id, gradient(MODEL, one.peer_id, round_number), SLOW_FETCH_S
                ),
            )
            assert fetched.version.round_number == round_number
        done.set()
        during = await meanwhile

    assert link.lost > 50  # 2 % of some 10,000
    assert [update.sender_round for update in slow.listener.gradients] == [0, 1, 2]
    assert one.listener.neighbors == [frozenset(), addresses.keys()]
    assert one.transport.counters.connections_lost == 0
    assert one.transport.counters.requests_failed == 0
    # Some 20 ms; whoever waited for a single answer of the slow one would wait 200 more.
    assert statistics.median(during) < 2 * statistics.median(before) + 0.05


@pytest.fixture
def machines() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_who_is_known_to_be_quick_is_found_silent_before_the_longest_deadline(
    peers: Peers, machines: Machines
):
    longest_s = 9.0
    machines.slow("bob", "16mbit", "100ms")
    peers.make(*NAMES, min_round_s=0.02)
    for index, name in enumerate(NAMES):
        peers.prefix[name] = machines.command(name)
        other = NAMES[1 - index]
        settings = {
            "listen": "'tcp://*:7001'",
            "advertise": f"'tcp://{name}.test:7001'",
            "neighbors_file": "''",
            "neighbors": f"{{{other} = 'tcp://{other}.test:7001'}}",
            "fetch_timeout_s": f"{longest_s}",
        }
        arguments = [f"network.{key}={value}" for key, value in settings.items()]
        peers.start(name, *(part for each in arguments for part in ("--set", each)))

    def fetched(name: str) -> int:
        return sum(bool(each["work"]["measured"] > 1) for each in peers.rounds(name))

    until(lambda: all(fetched(name) > 20 for name in NAMES), "both know each other")
    for name in NAMES:
        assert "connections_lost" not in peers.rounds(name)[-1]["counters"]
    at = len(peers.rounds("alice"))
    machines.plug("bob", into=False)
    until(lambda: len(peers.rounds("alice")) > at + 20, "alice goes on alone")
    longest = max(each["seconds"]["total"] for each in peers.rounds("alice")[at:])
    assert 1.0 < longest < longest_s / 2
    for name in NAMES:
        assert peers.stop(name) == 0, peers.log(name)
