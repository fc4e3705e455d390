"""Peers that die, hang, move, come back or don't fit; ports in use; links that break."""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_transport import (
    DEADLINE_S,
    LARGE,
    OTHER,
    SMALL,
    Peer,
    Recorder,
    ZeroMQSwarm,
    as_delivered,
    gradient,
    introduce,
    snapshot,
)

from protocol.errors import BindError, ConfigError, PeerRefused, PeerUnreachable
from protocol.handshake import FEATURES
from protocol.identity import KeyPair, generate_key_pair
from protocol.lowbit import Bits
from protocol.messages import GROUPS
from protocol.tensors import Layout
from protocol.transport.dial import Attempt, Reached
from protocol.transport.interface import Address
from protocol.transport.settings import TransportSettings

MakeSwarm = Callable[..., ZeroMQSwarm]


@pytest.fixture
async def make_swarm() -> AsyncIterator[MakeSwarm]:
    made: list[ZeroMQSwarm] = []

    def make(*args: Any, **options: Any) -> ZeroMQSwarm:
        made.append(ZeroMQSwarm(*args, **options))
        return made[-1]

    yield make
    async with asyncio.timeout(DEADLINE_S):
        for swarm in made:
            await swarm.close()


@pytest.fixture
def swarm(make_swarm: MakeSwarm) -> ZeroMQSwarm:
    return make_swarm()


async def test_who_answers_nobody_who_belongs_together_is_not_asked(swarm: ZeroMQSwarm) -> None:
    new, old = await swarm.add(SMALL), await swarm.add(SMALL)
    await swarm.kill(old)  # and start it as it was before anybody could be asked
    old.transport = swarm.build(old.name, old.key_pair, SMALL, old.listener, old.address.endpoint)
    known = tuple(feature for feature in FEATURES if feature != GROUPS)
    old.transport._describe = functools.partial(old.transport._describe, features=known)
    await old.transport.start()
    introduce(new, old)
    for one, other in ((new, old), (old, new)):
        with pytest.raises(PeerUnreachable, match="answers nobody who belongs together"):
            await one.transport.ask_groups(other.peer_id, DEADLINE_S)
    old.transport.publish(snapshot(SMALL))
    assert await new.transport.fetch(old.peer_id, None, DEADLINE_S) is not None


class Proxy:
    """A link that can be cut or go silent, between whoever dials it and an endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._target_port = int(endpoint.rpartition(":")[2])
        self.cut_after: int | None = None
        self.silent_after: int | None = None
        self.passed = {"up": 0, "down": 0}
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        for name, source, sink in (("up", reader, far_writer), ("down", far_reader, writer)):
            task = asyncio.ensure_future(self._pass(name, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        try:
            while data := await source.read(65536):
                self.passed[way] += len(data)
                total = sum(self.passed.values())
                if self.cut_after is not None and total > self.cut_after:
                    self.cut_after = None
                    await asyncio.sleep(0.05)  # an abort throws away what isn't read yet
                    self.cut()
                    return
                if self.silent_after is None or total < self.silent_after:
                    sink.write(data)
                    await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()


def known_at(peer: Peer, endpoint: str) -> dict[Any, Address]:
    address = Address(name=peer.name, endpoint=endpoint, public_key=peer.key_pair.public_key)
    return {peer.peer_id: address}


def run_peer(pipe: Pipe, allowed: Path, pair: KeyPair, listen: str) -> None:
    """Serve a model in a process of its own until it is killed."""

    async def serve() -> None:
        swarm = ZeroMQSwarm(allowed=allowed)
        transport = swarm.build("child", pair, LARGE, Recorder(), listen)
        endpoint = await transport.start()
        transport.publish(snapshot(LARGE))
        pipe.send(endpoint)
        await asyncio.Event().wait()

    asyncio.run(serve())


async def test_a_process_killed_with_9_is_noticed_at_once_and_used_again_when_it_is_back(
    swarm: ZeroMQSwarm,
) -> None:
    one = await swarm.add(LARGE)
    pair, spawn = generate_key_pair(), multiprocessing.get_context("spawn")
    swarm.allow("child", pair)

    async def launch(listen: str) -> tuple[Any, str]:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(
            target=run_peer, args=(theirs, swarm.allowed, pair, listen), daemon=True
        )
        process.start()
        endpoint = await asyncio.get_running_loop().run_in_executor(None, ours.recv)
        return process, endpoint

    process, endpoint = await launch("tcp://127.0.0.1:0")
    one.transport.set_neighbors(
        {pair.peer_id: Address(name="child", endpoint=endpoint, public_key=pair.public_key)}
    )
    assert await one.transport.fetch(pair.peer_id, None, DEADLINE_S) is not None
    fetching = asyncio.ensure_future(one.transport.fetch(pair.peer_id, None, DEADLINE_S))
    process.kill()
    began = time.monotonic()
    with pytest.raises(PeerUnreachable):
        await fetching
        await one.transport.fetch(pair.peer_id, None, DEADLINE_S)
    await one.listener.until_neighbors()
    assert time.monotonic() - began < 5.0
    process.join(DEADLINE_S)
    process, _ = await launch(endpoint)
    await one.listener.until(lambda: one.listener.neighbors[-1] == frozenset({pair.peer_id}))
    assert await one.transport.fetch(pair.peer_id, None, DEADLINE_S) is not None
    process.kill()
    process.join(DEADLINE_S)


async def test_a_peer_that_moved_is_used_at_its_new_endpoint(swarm: ZeroMQSwarm) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    await swarm.kill(two)
    await one.listener.until_neighbors()
    moved = swarm.build(two.name, two.key_pair, SMALL, two.listener, "tcp://127.0.0.1:0")
    endpoint = await moved.start()
    moved.publish(snapshot(SMALL, round_number=5))
    one.transport.set_neighbors(known_at(two, endpoint))
    await one.listener.until_neighbors(two)
    fetched = await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    assert fetched.version.round_number == 5
    await moved.close()


@pytest.mark.parametrize("layout", [SMALL, LARGE])
async def test_a_silent_host_costs_no_more_than_the_deadline(
    make_swarm: MakeSwarm, layout: Layout
) -> None:
    swarm = make_swarm(TransportSettings(dial_timeout_s=0.3))
    one, two = await swarm.add(layout), await swarm.add(layout)
    async with Proxy(two.address.endpoint) as proxy:
        proxy.silent_after = 0
        one.transport.set_neighbors(known_at(two, proxy.endpoint))
        began = time.monotonic()
        with pytest.raises(PeerUnreachable, match=r"nobody answers|the handshake failed"):
            await one.transport.fetch(two.peer_id, None, DEADLINE_S)
        assert time.monotonic() - began < 2.0
        await one.listener.until_neighbors()


async def test_a_transfer_that_stalls_fails_and_the_peer_counts_as_unreachable(
    make_swarm: MakeSwarm,
) -> None:
    swarm = make_swarm(TransportSettings(offer_timeout_s=0.2, stall_timeout_s=0.4))
    one, two = await swarm.add(LARGE), await swarm.add(LARGE)
    two.transport.publish(snapshot(LARGE))
    async with Proxy(two.address.endpoint) as proxy:
        proxy.silent_after = LARGE.size_bytes // 2
        one.transport.set_neighbors(known_at(two, proxy.endpoint))
        with pytest.raises(PeerUnreachable):
            await one.transport.fetch(two.peer_id, None, DEADLINE_S)
        await one.listener.until_neighbors()


@pytest.mark.parametrize("bits", [None, 4])
async def test_a_pull_goes_on_where_its_connection_broke(
    swarm: ZeroMQSwarm, bits: Bits | None
) -> None:
    swarm.bits = bits
    one, two = await swarm.add(LARGE), await swarm.add(LARGE)
    two.transport.publish(snapshot(LARGE))
    async with Proxy(two.address.endpoint) as proxy:
        one.transport.set_neighbors(known_at(two, proxy.endpoint))
        proxy.cut_after = LARGE.size_bytes // (2 if bits is None else 4)
        fetched = await one.transport.fetch(two.peer_id, None, DEADLINE_S)
        assert fetched.tensors == swarm.public(two).tensors
        assert proxy.cut_after is None
        # What was there already did not come again; a window's worth may have been lost.
        assert proxy.passed["down"] < LARGE.size_bytes + (9 << 20)


@pytest.mark.parametrize(("bits", "missed"), [(4, 3), (8, 1)])
async def test_a_pull_of_differences_goes_on_where_its_connection_broke(
    swarm: ZeroMQSwarm, bits: Bits, missed: int
) -> None:
    swarm.bits = bits
    one, two = await swarm.add(LARGE), await swarm.add(LARGE)
    two.transport.publish(snapshot(LARGE))
    async with Proxy(two.address.endpoint) as proxy:
        one.transport.set_neighbors(known_at(two, proxy.endpoint))
        held = await one.transport.fetch(two.peer_id, None, DEADLINE_S)
        for number in range(1, missed + 1):
            two.transport.publish(snapshot(LARGE, round_number=number, seed=number))
            # Each is coded: one that is succeeded before its turn would not be.
            await one.transport.fetch(two.peer_id, None, DEADLINE_S)
        size = missed * bits * LARGE.size_bytes // 32
        proxy.cut_after = sum(proxy.passed.values()) + size * 3 // 4
        fetched = await one.transport.fetch(two.peer_id, held, DEADLINE_S)
        assert fetched.tensors == swarm.public(two).tensors
        assert proxy.cut_after is None


@pytest.mark.parametrize("bits", [None, 4])
async def test_a_push_goes_on_where_its_connection_broke_and_arrives_once(
    swarm: ZeroMQSwarm, bits: Bits | None
) -> None:
    swarm.bits = bits
    one, two = await swarm.add(LARGE), await swarm.add(LARGE)
    async with Proxy(two.address.endpoint) as proxy:
        one.transport.set_neighbors(known_at(two, proxy.endpoint))
        proxy.cut_after = LARGE.gradient.size_bytes // (2 if bits is None else 16)
        update = gradient(LARGE, one.peer_id)
        await one.transport.push(two.peer_id, update, DEADLINE_S)
        assert proxy.cut_after is None
        assert proxy.passed["up"] < LARGE.gradient.size_bytes + (9 << 20)
    (arrived,) = two.listener.gradients
    assert arrived.gradient == as_delivered(update, bits)


async def test_a_peer_restarted_during_a_pull_is_asked_again_from_the_start(
    swarm: ZeroMQSwarm,
) -> None:
    one, two = await swarm.add(LARGE), await swarm.add(LARGE)
    introduce(one, two)
    two.transport.publish(snapshot(LARGE))
    async with Proxy(two.address.endpoint) as proxy:
        one.transport.set_neighbors(known_at(two, proxy.endpoint))
        proxy.silent_after = LARGE.size_bytes // 2
        fetching = asyncio.ensure_future(one.transport.fetch(two.peer_id, None, DEADLINE_S))
        async with asyncio.timeout(DEADLINE_S):
            while sum(proxy.passed.values()) < LARGE.size_bytes // 2:
                await asyncio.wait((fetching,), timeout=0.001)
        await swarm.kill(two)
        await swarm.revive(two)
        two.transport.publish(newer := snapshot(LARGE, round_number=9, seed=4))
        proxy.silent_after = None
        proxy.cut()
        fetched = await fetching
    assert fetched.version == newer.version
    assert np.array_equal(fetched.tensors.buffer, newer.tensors.buffer)


async def test_whoever_comes_back_and_dials_us_is_dialed_at_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(TransportSettings(redial_min_s=3600.0, redial_max_s=3600.0))
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    for peer in (one, two):
        peer.transport.publish(snapshot(SMALL))
    await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    await swarm.kill(two)
    await one.listener.until_neighbors()
    with pytest.raises(PeerUnreachable):
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    await swarm.revive(two)
    assert await two.transport.fetch(one.peer_id, None, DEADLINE_S) is not None
    await one.listener.until_neighbors(two)


async def test_a_dead_peer_is_logged_once(
    make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(TransportSettings(redial_min_s=0.01, redial_max_s=0.02))
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    attempts, run = asyncio.Semaphore(0), Attempt.run

    async def counted(attempt: Attempt, number: int) -> Reached:
        attempts.release()
        return await run(attempt, number)

    monkeypatch.setattr(Attempt, "run", counted)
    await swarm.kill(two)
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(10):
            await attempts.acquire()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert two.name in warnings[0].getMessage()


async def test_a_layout_mismatch_is_named_in_both_logs_and_ends_when_it_is_mended(
    swarm: ZeroMQSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(OTHER)
    introduce(one, two)
    with pytest.raises(PeerRefused):
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    for peer in (one, two):
        await peer.listener.until_neighbors()
    assert "peer-1 has another model" in caplog.text
    assert "ours is head.weight f32[20, 10], theirs head.weight f32[20, 11]" in caplog.text
    assert "peer-0 has another model" in caplog.text
    assert "ours is head.weight f32[20, 11], theirs head.weight f32[20, 10]" in caplog.text
    await swarm.kill(two)
    two.layout = SMALL
    await swarm.revive(two)
    two.transport.publish(snapshot(SMALL))
    one.transport.publish(snapshot(SMALL))
    assert await two.transport.fetch(one.peer_id, None, DEADLINE_S) is not None
    await one.listener.until_neighbors(two)
    assert await one.transport.fetch(two.peer_id, None, DEADLINE_S) is not None


async def test_a_refused_peer_does_not_ask_again_and_again(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(TransportSettings(redial_min_s=0.01, redial_max_s=0.02))
    one, two, three = await swarm.add(SMALL), await swarm.add(OTHER), await swarm.add(SMALL)
    introduce(one, two, three)
    three.transport.publish(snapshot(SMALL))
    for _ in range(20):
        with pytest.raises(PeerRefused):
            await one.transport.fetch(two.peer_id, None, DEADLINE_S)
        await one.transport.fetch(three.peer_id, None, DEADLINE_S)
    assert two.transport.counters.requests_refused == 1


async def test_a_port_in_use_is_an_error_that_names_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(TransportSettings(bind_retry_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        transport = swarm.build(
            "late", generate_key_pair(), SMALL, Recorder(), f"tcp://127.0.0.1:{port}"
        )
        with pytest.raises(BindError, match=f"port {port} is in use"):
            await transport.start()
    assert await transport.start() == f"tcp://127.0.0.1:{port}"
    await transport.close()


async def test_a_port_that_is_let_go_of_within_the_retry_is_taken(swarm: ZeroMQSwarm) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    transport = swarm.build(
        "late", generate_key_pair(), SMALL, Recorder(), f"tcp://127.0.0.1:{port}"
    )
    asyncio.get_running_loop().call_later(0.3, taken.close)
    assert await transport.start() == f"tcp://127.0.0.1:{port}"
    await transport.close()


async def test_an_address_of_another_machine_cannot_be_listened_on(swarm: ZeroMQSwarm) -> None:
    transport = swarm.build("lost", generate_key_pair(), SMALL, Recorder(), "tcp://192.0.2.1:7001")
    with pytest.raises(BindError, match=r"192\.0\.2\.1.*set listen"):
        await transport.start()


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
async def test_ipv6_and_names_work_as_well_as_ipv4(make_swarm: MakeSwarm, host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    swarm = make_swarm(host=host)
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    assert two.address.endpoint.startswith(f"tcp://{host}:")
    assert await one.transport.fetch(two.peer_id, None, DEADLINE_S) is not None


@pytest.mark.parametrize("dialed", ["127.0.0.1", "[::1]"])
async def test_a_wildcard_serves_both_families(make_swarm: MakeSwarm, dialed: str) -> None:
    if dialed == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    swarm = make_swarm(host="*", extra={"advertise": f"tcp://{dialed}:0"})
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    assert await one.transport.fetch(two.peer_id, None, DEADLINE_S) is not None


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def test_a_wildcard_without_an_address_to_advertise_is_refused(swarm: ZeroMQSwarm) -> None:
    with pytest.raises(ConfigError, match="set advertise"):
        swarm.build("any", generate_key_pair(), SMALL, Recorder(), "tcp://*:0")


async def test_a_name_that_cannot_be_resolved_makes_a_peer_unreachable(
    swarm: ZeroMQSwarm,
) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    one.transport.set_neighbors(known_at(two, "tcp://no-such-host.invalid:7001"))
    with pytest.raises(PeerUnreachable, match=r"no-such-host\.invalid.*can't be resolved"):
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)


async def test_another_program_at_the_address_is_told_apart(swarm: ZeroMQSwarm) -> None:
    one, two, three = [await swarm.add(SMALL) for _ in range(3)]
    one.transport.set_neighbors(known_at(two, three.address.endpoint))  # the wrong peer's address
    with pytest.raises(PeerUnreachable, match="the handshake failed"):
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)


async def test_a_key_that_is_not_the_peers_is_refused(swarm: ZeroMQSwarm) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    address = Address(
        name="x", endpoint=two.address.endpoint, public_key=generate_key_pair().public_key
    )
    with pytest.raises(ConfigError, match="belongs to another peer"):
        one.transport.set_neighbors({two.peer_id: address})


async def test_bulk_connections_are_closed_when_idle_or_too_many(swarm: ZeroMQSwarm) -> None:
    swarm.settings = TransportSettings(max_idle_bulk=1)
    peers = [await swarm.add(SMALL) for _ in range(4)]
    introduce(*peers)
    for peer in peers:
        peer.transport.publish(snapshot(SMALL))
    first = peers[0].transport

    def num_bulk() -> int:
        return sum(connection.has_idle_bulk for connection in first._connections.values())

    for _ in range(3):
        for peer in peers[1:]:
            assert await first.fetch(peer.peer_id, None, DEADLINE_S) is not None
        assert num_bulk() == 3
        first._sweep()
        assert num_bulk() == 1


async def test_large_blobs_are_verified_in_the_worker_thread(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(TransportSettings(verify_inline_bytes=0))
    one, two = await swarm.add(LARGE), await swarm.add(LARGE)
    introduce(one, two)
    two.transport.publish(published := snapshot(LARGE))
    fetched = await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    assert np.array_equal(fetched.tensors.buffer, published.tensors.buffer)
    await one.transport.push(two.peer_id, gradient(LARGE, one.peer_id), DEADLINE_S)
    assert len(two.listener.gradients) == 1


async def test_what_was_published_before_the_start_is_served(swarm: ZeroMQSwarm) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    await swarm.kill(two)
    two.transport = swarm.build(two.name, two.key_pair, SMALL, two.listener, two.address.endpoint)
    two.transport.publish(snapshot(SMALL))
    await two.transport.start()
    assert await one.transport.fetch(two.peer_id, None, DEADLINE_S) is not None


async def test_a_peer_that_comes_and_goes_is_logged_as_one_that_stays_away(
    swarm: ZeroMQSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    two.transport.publish(snapshot(SMALL))
    async with Proxy(two.address.endpoint) as proxy:
        one.transport.set_neighbors(known_at(two, proxy.endpoint))
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)
        for _ in range(4):
            proxy.cut()
            await one.listener.until_neighbors()
            await one.listener.until_neighbors(two)
    assert one.transport.counters.connections_lost >= 4
    about = [line for line in caplog.messages if line.startswith(f"{two.name}")]
    assert [line for line in about if "dialing it again" in line] == about[:1]
    assert about[1:] == [f"{two.name} is back"]
