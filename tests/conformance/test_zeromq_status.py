"""Operators are told how a peer is doing, and get nothing else; nobody else is told."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from helpers_transport import DEADLINE_S, SMALL, Peer, ZeroMQSwarm, introduce, snapshot

from protocol.codec import encode
from protocol.errors import PeerRefused, PeerUnreachable
from protocol.identity import AllowList, KeyPair, generate_key_pair
from protocol.messages import PeerId, Ping, Refusal, RefusalCode
from protocol.status import Counted, Learning, PeerStatus
from protocol.transport.dial import unpack
from protocol.transport.endpoint import parse_endpoint
from protocol.transport.inquiry import ask_status
from protocol.transport.interface import Counters
from protocol.transport.port import DialedPort, Frames
from protocol.transport.settings import TransportSettings
from protocol.transport.sockets import connect, make_context, make_dialer

FRIEND = PeerId("a" * 32)
OPERATOR = generate_key_pair()


def learning() -> Learning:
    return Learning(
        round_number=12,
        rounds=50,
        loss=0.25,
        weights={FRIEND: 0.75},
        counters=(Counted("gradients_opposed", 4),),
    )


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[ZeroMQSwarm]:
    (tmp_path / "operator.pub").write_text(OPERATOR.public_key)
    made = ZeroMQSwarm(
        TransportSettings(allow_list_interval_s=0.05),
        extra={"operators": AllowList(tmp_path), "learning": learning},
    )
    yield made
    async with asyncio.timeout(DEADLINE_S):
        await made.close()


async def ask(peer: Peer, pair: KeyPair = OPERATOR) -> PeerStatus:
    context = make_context()
    try:
        return await ask_status(context, pair, peer.address, DEADLINE_S)
    finally:
        context.destroy(linger=0)


async def test_an_operator_learns_round_weights_members_and_counters(swarm: ZeroMQSwarm) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    status = await ask(one)
    assert (status.round_number, status.rounds, status.loss) == (12, 50, 0.25)
    assert status.weights == ((FRIEND, 0.75),)
    (member,) = status.members
    assert (member.peer_id, member.state, member.reason) == (two.peer_id, "ready", "")
    assert member.endpoint == two.address.endpoint
    counters = dict(status.counters)
    assert counters["models_fetched"] == 1
    assert counters["gradients_opposed"] == 4
    assert counters.keys() > {field.name for field in dataclasses.fields(Counters)}


async def test_an_operator_learns_why_a_peer_is_unreachable_and_who_was_refused(
    swarm: ZeroMQSwarm,
) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    stranger = generate_key_pair()
    await swarm.kill(two)
    with pytest.raises(PeerUnreachable):
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    with pytest.raises(PeerUnreachable, match="refuses our key"):
        await ask(one, stranger)
    status = await ask(one)
    assert (status.members[0].state, status.refused_keys) == (
        "unreachable",
        ((stranger.public_key, 1),),
    )
    assert "nobody listens there" in status.members[0].reason


async def test_a_peer_is_no_operator(swarm: ZeroMQSwarm) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    with pytest.raises(PeerRefused, match=r"NOT_ALLOWED.*operators"):
        await ask(one, two.key_pair)
    assert one.transport.counters.malformed == 0


async def test_an_operator_is_no_peer(swarm: ZeroMQSwarm) -> None:
    one = await swarm.add(SMALL)
    context = make_context()
    dealer = make_dialer(context, OPERATOR, one.key_pair.public_key)
    answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def on_message(frames: Frames) -> None:
        answered.set_result(unpack(frames, Counters())[0])

    port = DialedPort(dealer, on_message, lambda: None)
    connect(dealer, parse_endpoint(one.address.endpoint, "here"))
    port.send(encode(Ping(request_id=1)))
    async with asyncio.timeout(DEADLINE_S):
        answer = await answered
    port.close()
    context.destroy(linger=0)
    assert isinstance(answer, Refusal)
    assert answer.code == RefusalCode.NOT_ALLOWED


async def test_a_removed_operator_is_shut_out(swarm: ZeroMQSwarm, tmp_path: Path) -> None:
    one = await swarm.add(SMALL)
    await ask(one)
    (tmp_path / "operator.pub").unlink()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await ask(one)
            except PeerRefused as error:  # let in just before, asked just after
                assert "NOT_ALLOWED" in str(error)
            except PeerUnreachable as error:
                assert "refuses our key" in str(error)
                break


async def test_without_operators_nobody_is_told(swarm: ZeroMQSwarm) -> None:
    swarm.extra = {}
    one = await swarm.add(SMALL)
    with pytest.raises(PeerUnreachable, match="refuses our key"):
        await ask(one)
