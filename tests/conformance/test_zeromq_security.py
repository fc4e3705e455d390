"""Nobody gets anything without an allowed key, and odd messages of whoever has one do no harm."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from helpers_transport import (
    DEADLINE_S,
    LARGE,
    SMALL,
    Peer,
    ZeroMQSwarm,
    filled,
    gradient,
    introduce,
    snapshot,
)
from zmq.utils.monitor import parse_monitor_message

from protocol import handshake
from protocol.codec import MAX_CHUNK_BYTES, MAX_FRAME_BYTES, MAX_HEADER_BYTES, decode, encode
from protocol.deflate import deflate
from protocol.digest import digest_of
from protocol.errors import PeerRefused, PeerUnreachable, ProtocolError, RemoteProtocolError
from protocol.handshake import Credentials
from protocol.identity import AllowList, KeyPair, generate_key_pair
from protocol.lowbit import CODECS
from protocol.messages import (
    INITIAL,
    MESSAGES,
    Chunk,
    ChunkRequest,
    Encoding,
    GradientChunk,
    GradientOffer,
    Hello,
    Message,
    ModelOffer,
    ModelRequest,
    ModelUnchanged,
    Ping,
    Pong,
    Refusal,
    RefusalCode,
    Version,
    Welcome,
)
from protocol.transport.admission import Admission
from protocol.transport.interface import Address
from protocol.transport.settings import TransportSettings
from protocol.transport.sockets import ZAP_DOMAIN, hang_up, make_context, make_listener

SILENCE_S = 0.5


@pytest.fixture
async def swarm() -> AsyncIterator[ZeroMQSwarm]:
    made = ZeroMQSwarm(TransportSettings(allow_list_interval_s=0.05, max_strikes=1_000_000))
    yield made
    async with asyncio.timeout(DEADLINE_S):
        await made.close()


class RawDealer:
    """Someone who speaks ZeroMQ, but not necessarily our protocol."""

    def __init__(self, peer: Peer, pair: KeyPair | None) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if pair is not None:
            self.socket.curve_publickey = pair.public_key.encode()
            self.socket.curve_secretkey = pair.secret_key.encode()
            self.socket.curve_serverkey = peer.key_pair.public_key.encode()
        self.socket.connect(peer.address.endpoint)

    async def __aenter__(self) -> RawDealer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    async def tell(self, message: Message, body: bytes | None = None) -> None:
        await self.socket.send_multipart(encode(message, body))

    async def ask(self, message: Message, body: bytes | None = None) -> Message:
        await self.tell(message, body)
        while True:
            async with asyncio.timeout(DEADLINE_S):
                answer, _ = decode(await self.socket.recv_multipart())
            if answer.request_id == message.request_id:
                return answer

    async def greet(self, peer: Peer) -> None:
        credentials = Credentials(
            federation_id="tests",
            name="raw",
            incarnation=1,
            advertise="tcp://127.0.0.1:1",
            layout=peer.layout,
            task="digits:0,1,2",
        )
        assert isinstance(await self.ask(credentials.hello(1)), Welcome)

    async def hears_nothing(self) -> bool:
        return not await self.socket.poll(SILENCE_S * 1000)


async def allowed(swarm: ZeroMQSwarm, peer: Peer) -> RawDealer:
    """Return a raw dealer with an allowed key that has said hello."""
    pair = generate_key_pair()
    swarm.allow("raw", pair)
    dealer = RawDealer(peer, pair)
    await dealer.greet(peer)
    return dealer


async def serves(peer: Peer, other: Peer) -> bool:
    """Whether a peer still answers another."""
    return await other.transport.fetch(peer.peer_id, None, DEADLINE_S) is not None


async def test_the_three_conditions_of_refusal_hold(swarm: ZeroMQSwarm) -> None:
    peer = await swarm.add(SMALL)
    router = peer.transport._router._socket
    assert router.get(zmq.ZAP_DOMAIN) == ZAP_DOMAIN
    assert router.get(zmq.ZAP_ENFORCE_DOMAIN) == 1
    assert router.get(zmq.CURVE_SERVER) == 1
    # The handler is there: its address is taken.
    with (
        peer.transport._context.socket(zmq.ROUTER) as second,
        pytest.raises(zmq.ZMQError, match="in use"),
    ):
        second.bind("inproc://zeromq.zap.01")


async def test_a_banned_peer_is_cut_off_and_kept_out_for_a_while_and_nobody_else_notices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swarm = ZeroMQSwarm(TransportSettings(max_strikes=3, ban_s=1.0, allow_list_interval_s=0.05))
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    one.transport.publish(snapshot(SMALL))
    pair = generate_key_pair()
    swarm.allow("raw", pair)
    async with RawDealer(one, pair) as dealer, asyncio.timeout(DEADLINE_S):
        await dealer.greet(one)
        monitor = dealer.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        for _ in range(8):  # three to be banned, one that is looked at, and more
            await dealer.socket.send_multipart([b"nonsense"])
        events = [parse_monitor_message(await monitor.recv_multipart()) for _ in range(2)]
        assert [event["event"] for event in events] == [
            zmq.EVENT_DISCONNECTED,
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,  # as soon as it comes back
        ]
        assert f"its key {pair.public_key} has sent too many malformed messages" in caplog.text
        assert await serves(one, two)
        dealer.socket.disable_monitor()
    assert two.transport.counters.connections_lost == 0
    await asyncio.sleep(1.0)
    async with RawDealer(one, pair) as dealer:
        await dealer.greet(one)
    await swarm.close()


async def test_whoever_goes_on_with_a_removed_key_is_cut_off(swarm: ZeroMQSwarm) -> None:
    peer = await swarm.add(SMALL)
    async with await allowed(swarm, peer) as dealer, asyncio.timeout(DEADLINE_S):
        monitor = dealer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        (swarm.allowed / "raw.pub").unlink()
        while not await monitor.poll(10):
            await dealer.tell(Ping(request_id=1))
        dealer.socket.disable_monitor()
    assert peer.transport.counters.requests_refused > 0


def test_only_a_connection_to_our_port_is_cut() -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for our_port, arrives in ((port + 1, True), (port, False)):
            dealer.send(b"hello")
            assert router.poll(1000 * DEADLINE_S)
            frames = router.recv_multipart(copy=False)
            hang_up(frames[0], our_port)
            route = frames[0].bytes
            router.send_multipart([route, b"still there?"])
            assert bool(dealer.poll(1000 * (DEADLINE_S if arrives else SILENCE_S))) == arrives
            while dealer.poll(0):
                dealer.recv()


async def test_without_a_zap_handler_nobody_gets_in() -> None:
    """With the domain enforced, a missing handler shuts everyone out instead of letting all in."""
    context, pair, stranger = make_context(), generate_key_pair(), generate_key_pair()
    router = make_listener(context, pair)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    dealer.curve_publickey = stranger.public_key.encode()
    dealer.curve_secretkey = stranger.secret_key.encode()
    dealer.curve_serverkey = pair.public_key.encode()
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"hello")
    assert not router.poll(SILENCE_S * 1000)
    context.destroy(linger=0)


@pytest.mark.parametrize("pair", [None, generate_key_pair()], ids=["no CURVE", "unknown key"])
async def test_whoever_has_no_allowed_key_gets_nothing(
    swarm: ZeroMQSwarm, pair: KeyPair | None
) -> None:
    peer = await swarm.add(SMALL)
    peer.transport.publish(snapshot(SMALL))
    async with RawDealer(peer, pair) as dealer:
        await dealer.tell(Ping(request_id=1))
        await dealer.tell(ModelRequest(request_id=2, have=None, accept_bytes=MAX_CHUNK_BYTES))
        assert await dealer.hears_nothing()
    assert peer.transport.counters.bytes_received == 0


async def test_a_key_that_is_not_allowed_is_named_as_the_cause_on_both_sides(
    swarm: ZeroMQSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    (swarm.allowed / "peer-0.pub").unlink()
    two.transport._admission._look_again()
    introduce(one, two)
    with pytest.raises(PeerUnreachable, match=r"refuses our key.*allow-list"):
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    assert f"{one.key_pair.public_key} is not in the allow-list" in caplog.text


async def test_a_newly_allowed_key_works_without_a_restart(swarm: ZeroMQSwarm) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    two.transport.publish(snapshot(SMALL))
    (swarm.allowed / "peer-0.pub").unlink()
    two.transport._admission._look_again()
    introduce(one, two)
    with pytest.raises(PeerUnreachable):
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    await one.listener.until_neighbors()
    swarm.allow("peer-0", one.key_pair)
    await one.listener.until_neighbors(two)
    assert await serves(two, one)


async def test_a_key_taken_from_the_allow_list_is_shut_out_in_the_middle_of_a_pull(
    swarm: ZeroMQSwarm,
) -> None:
    peer = await swarm.add(LARGE)
    peer.transport.publish(snapshot(LARGE))
    async with await allowed(swarm, peer) as dealer:
        offer = await dealer.ask(ModelRequest(request_id=2, have=None, accept_bytes=0))
        assert isinstance(offer, ModelOffer)
        chunk = ChunkRequest(request_id=3, transfer_id=2, offset=0, length=1)
        assert isinstance(await dealer.ask(chunk), Chunk)
        (swarm.allowed / "raw.pub").unlink()
        async with asyncio.timeout(DEADLINE_S):
            request_id = 4
            while isinstance(
                answer := await dealer.ask(
                    ChunkRequest(request_id=request_id, transfer_id=2, offset=0, length=1)
                ),
                Chunk,
            ):
                request_id += 1
        assert isinstance(answer, Refusal)
        assert answer.code == RefusalCode.NOT_ALLOWED
        await dealer.tell(chunk)  # and at most one refusal a second
        assert await dealer.hears_nothing()


async def test_a_removed_key_makes_our_own_transfers_fail_and_the_peer_unreachable(
    swarm: ZeroMQSwarm,
) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    assert await serves(two, one)
    (swarm.allowed / "peer-0.pub").unlink()
    with pytest.raises(ProtocolError):
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    await one.listener.until_neighbors()


def odd_messages(rng: random.Random) -> Iterator[list[bytes]]:
    """Yield messages of many kinds, none of them right."""
    ping = [bytes(frame) for frame in encode(Ping(request_id=1))]
    yield from ([b""], [b"CO"], [b"CO\x01\x04"], [*ping, b"body"], [*ping, *ping, *ping])
    yield [ping[0], b"\x81\xaarequest_id\xd3" + b"\xff" * 8]
    yield [ping[0], bytes(MAX_HEADER_BYTES + 1)]
    yield [b"CO\x01\x0a", ping[1], bytes(MAX_CHUNK_BYTES + 1)]
    yield [b"x" * MAX_CHUNK_BYTES] * 3
    yield [b"x"] * 500
    for kind in range(18):
        prefix = b"CO\x01" + bytes((kind,))
        yield [prefix, b"\x91" * 2000]
        yield [prefix, msgpack.packb({"request_id": "one"})]
        yield [prefix, msgpack.packb({"request_id": 2**63}), b"body"]
        for _ in range(60):
            yield [prefix, rng.randbytes(rng.randrange(60))]
            yield [prefix, rng.randbytes(rng.randrange(60)), rng.randbytes(9)]
    for message_type in MESSAGES:
        fields = {
            name: rng.choice([-1, 2**63, None, "", [], {}, 0.5, b"", True])
            for name in message_type.__struct_fields__
        }
        yield [b"CO\x01" + bytes((MESSAGES.index(message_type) + 1,)), msgpack.packb(fields)]


async def test_thousands_of_malformed_messages_leave_the_transport_serving(
    swarm: ZeroMQSwarm,
) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with await allowed(swarm, two) as dealer:
        sent = 0
        for message in odd_messages(random.Random(0)):
            await dealer.socket.send_multipart(message)
            sent += 1
            if sent % 300 == 0:
                assert await serves(two, one)
        assert sent > 2000
        async with asyncio.timeout(DEADLINE_S):
            while not isinstance(await dealer.ask(Ping(request_id=10**6)), Pong):
                pass
    assert await serves(two, one)
    await one.transport.push(two.peer_id, gradient(SMALL, one.peer_id), DEADLINE_S)
    assert not faults
    assert two.transport.counters.malformed > 2000


async def test_a_frame_over_the_limit_costs_the_sender_its_connection_and_nobody_else(
    swarm: ZeroMQSwarm,
) -> None:
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    async with await allowed(swarm, two) as dealer:
        await dealer.socket.send(bytes(MAX_FRAME_BYTES + 1))
        assert await dealer.hears_nothing()
        assert await serves(two, one)


@pytest.mark.parametrize("size", [0, 1, SMALL.gradient.size_bytes + 64, 2**40, 2**62])
async def test_a_gradient_of_the_wrong_size_is_refused_before_memory_is_taken(
    swarm: ZeroMQSwarm, size: int
) -> None:
    peer = await swarm.add(SMALL)
    async with await allowed(swarm, peer) as dealer:
        offer = GradientOffer(
            request_id=2,
            transfer_id=1,
            size_bytes=size,
            digest="0" * 16,
            sender_round=1,
            on_version=Version(1, 1),
            weight=1.0,
            num_examples=1,
        )
        answer = await dealer.ask(offer, b"")
        assert isinstance(answer, Refusal)
        assert answer.code == RefusalCode.MALFORMED
        chunk = await dealer.ask(GradientChunk(request_id=3, transfer_id=1, offset=0), b"x")
        assert isinstance(chunk, Refusal)
        assert chunk.code == RefusalCode.NO_TRANSFER


async def test_someone_with_an_allowed_key_cannot_speak_for_another(swarm: ZeroMQSwarm) -> None:
    peer = await swarm.add(SMALL)
    async with await allowed(swarm, peer) as dealer:
        update = gradient(SMALL, peer.peer_id)
        data = update.gradient.buffer.tobytes()
        offer = GradientOffer(
            request_id=2,
            transfer_id=1,
            size_bytes=len(data),
            digest=digest_of(data),
            sender_round=1,
            on_version=Version(1, 1),
            weight=1.0,
            num_examples=1,
        )
        await dealer.ask(offer, data)
        (arrived,) = peer.listener.gradients
        assert arrived.sender == peer.transport._admission.sender(
            (swarm.allowed / "raw.pub").read_text()
        )


async def test_too_many_faults_ban_one_peer_only(swarm: ZeroMQSwarm) -> None:
    swarm.settings = TransportSettings()
    one, two = await swarm.add(SMALL), await swarm.add(SMALL)
    introduce(one, two)
    two.transport.publish(snapshot(SMALL))
    async with await allowed(swarm, two) as dealer:
        for _ in range(20):
            await dealer.socket.send_multipart([b"odd", b"odd"])
        answer = await dealer.ask(Ping(request_id=9))
        assert isinstance(answer, Refusal)
        assert answer.code == RefusalCode.NOT_ALLOWED
        assert answer.retry_after_s > 500
    assert await serves(two, one)


async def test_a_flooder_that_reads_nothing_starves_nobody(swarm: ZeroMQSwarm) -> None:
    one, two = await swarm.add(LARGE), await swarm.add(LARGE)
    introduce(one, two)
    two.transport.publish(snapshot(LARGE))
    async with await allowed(swarm, two) as dealer:
        await dealer.ask(ModelRequest(request_id=2, have=None, accept_bytes=0))
        for number in range(2000):
            await dealer.tell(
                ChunkRequest(
                    request_id=10 + number, transfer_id=2, offset=0, length=MAX_CHUNK_BYTES
                )
            )
        began = time.monotonic()
        assert await serves(two, one)
        assert time.monotonic() - began < 5.0
    assert two.transport.counters.replies_dropped > 0


HAVE = snapshot(SMALL, round_number=1)


def offer_of(request: ModelRequest, data: bytes, **changes: Any) -> ModelOffer:
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "version": Version(1, 2),
        "size_bytes": SMALL.size_bytes,
        "digest": digest_of(data),
        "friends": (),
    }
    return ModelOffer(**{**fields, **changes})


def coded_lie(
    data: bytes,
    encoding: Encoding = Encoding.DEFLATE_4,
    base: Version | None = HAVE.version,
    size_bytes: int | None = None,
    piece: int = 114,
) -> Callable[[ModelRequest], Sequence[Any]]:
    """Answer with coded bytes that are announced truly, unless told otherwise.

    The code of a difference is deflated; more of them follow one another.
    """
    if encoding in CODECS:
        data = b"".join(
            deflate(np.frombuffer(data[start : start + piece], np.uint8)).tobytes()
            for start in range(0, max(len(data), 1), piece)
        )
    changes = {
        "encoding": encoding,
        "base": base,
        "size_bytes": len(data) if size_bytes is None else size_bytes,
        "leads_to": digest_of(HAVE.tensors.buffer.data),
    }
    return lambda request: encode(offer_of(request, data, **changes), data)


DATA = snapshot(SMALL).tensors.buffer.tobytes()
LIES: dict[str, Callable[[ModelRequest], Sequence[Any]]] = {
    "garbage": lambda _: [b"garbage", b"more"],
    "a pong": lambda request: encode(Pong(request_id=request.request_id)),
    "a chunk": lambda request: encode(
        Chunk(request_id=request.request_id, transfer_id=request.request_id, offset=0), DATA
    ),
    "an unchanged that we haven't": lambda request: encode(
        ModelUnchanged(request_id=request.request_id, version=Version(9, 9))
    ),
    "another size": lambda request: encode(offer_of(request, DATA, size_bytes=2**50), DATA),
    "another digest": lambda request: encode(offer_of(request, b"other"), DATA),
    "more than was asked for": lambda request: encode(offer_of(request, DATA), DATA + bytes(64)),
    "numbers that are not finite": lambda request: encode(
        offer_of(request, b"\xff" * len(DATA)), b"\xff" * len(DATA)
    ),
    "differences to what we haven't": coded_lie(bytes(114), base=Version(1, 0)),
    "differences that lead elsewhere": coded_lie(b"\x00\x3c" + bytes(8) + b"\x11" * 100 + bytes(4)),
    "differences to nothing": coded_lie(bytes(114), base=None),
    "differences to the initial model that lead elsewhere": coded_lie(bytes(114), base=None),
    "differences to another start": coded_lie(bytes(114), base=Version(2, 1)),
    "a piece of a difference": coded_lie(bytes(113)),
    "no difference": coded_lie(b""),
    "codes that are not deflated": lambda request: encode(
        offer_of(
            request,
            bytes(114),
            encoding=Encoding.DEFLATE_4,
            base=HAVE.version,
            size_bytes=114,
            leads_to=digest_of(HAVE.tensors.buffer.data),
        ),
        bytes(114),
    ),
    "more differences than are ever kept": coded_lie(bytes(9 * 114)),
    "differences that inflate to more": coded_lie(bytes(2 * 114), piece=2 * 114),
    "more differences than announced": coded_lie(bytes(2 * 114), size_bytes=4),
    "differences of a vast size": coded_lie(bytes(114), size_bytes=2**62),
    "a scale that is not finite": coded_lie(b"\x00\x7c" + bytes(112)),
    "a scale that is negative": coded_lie(bytes(114) + b"\x00\x80" + bytes(112)),
    "an integer out of range": coded_lie(bytes(2) + b"\x88" * 112),
    "numbers in the gaps": coded_lie(b"\x00\x3c" + b"\x11" * 112),
    "the other width": coded_lie(bytes(114), encoding=Encoding.DEFLATE_8),
    "a whole copy with a base": coded_lie(bytes(448), encoding=Encoding.F16),
    "a whole copy of another size": coded_lie(bytes(446), encoding=Encoding.F16, base=None),
    "a whole copy that is not finite": coded_lie(
        b"\x00\x7c" * 224, encoding=Encoding.F16, base=None
    ),
    "a model as it is with a base": coded_lie(DATA, encoding=Encoding.F32),
}

REASONS = {
    "differences that lead elsewhere": "what it leads to has the digest",
    "differences to nothing": "an initial model that we don't share",
    "differences to the initial model that lead elsewhere": "what it leads to has the digest",
    "a piece of a difference": "it takes 114",
    "no difference": "it takes 114",
    "codes that are not deflated": "what should be deflated is not",
    "more differences than are ever kept": "more than 8 differences at once",
    "differences that inflate to more": "it takes 114",
    "a scale that is not finite": "scale of block 0 is negative or not finite",
    "a scale that is negative": "scale of block 0 is negative or not finite",
    "an integer out of range": "coded as -8, out of range",
    "numbers in the gaps": "stray bytes",
    "the other width": "it takes 226",
}
"""What those are blamed for that could well be blamed for something else."""


@pytest.mark.parametrize("name", LIES)
async def test_a_peer_that_answers_nonsense_is_blamed_and_nothing_is_taken(
    swarm: ZeroMQSwarm, name: str
) -> None:
    lie, reason = LIES[name], REASONS.get(name, "")
    swarm.initial, knows_it = filled(SMALL, seed=5), "initial" in name
    one, liar = await swarm.add(SMALL), generate_key_pair()
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = liar.secret_key.encode()
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def answer() -> None:
        while True:
            route, *frames = await router.recv_multipart()
            message, _ = decode(frames)
            if isinstance(message, ModelRequest):
                await router.send_multipart([route, *lie(message)])
            elif isinstance(message, Hello):
                known = [each for each in message.features if knows_it or INITIAL not in each]
                ours = msgspec.structs.replace(message, features=known)
                welcome = handshake.answer(message, ours)
                await router.send_multipart([route, *encode(welcome)])

    answering = asyncio.ensure_future(answer())
    address = Address(name="liar", endpoint=f"tcp://127.0.0.1:{port}", public_key=liar.public_key)
    one.transport.set_neighbors({liar.peer_id: address})
    before = HAVE.tensors.buffer.tobytes()
    with pytest.raises(RemoteProtocolError, match=f"liar.*{reason}"):
        await one.transport.fetch(liar.peer_id, HAVE, DEADLINE_S)
    assert not faults
    assert one.transport.counters.malformed > 0
    assert HAVE.tensors.buffer.tobytes() == before
    answering.cancel()
    await asyncio.wait((answering,))
    context.destroy(linger=0)


async def test_peers_of_another_federation_are_refused_by_name(swarm: ZeroMQSwarm) -> None:
    swarm.settings = TransportSettings()
    one = await swarm.add(SMALL)
    swarm.extra = {"federation_id": "another"}
    two = await swarm.add(SMALL)
    introduce(one, two)
    with pytest.raises(PeerRefused, match="'another', not 'tests'") as refused:
        await one.transport.fetch(two.peer_id, None, DEADLINE_S)
    assert refused.value.code == RefusalCode.FEDERATION
    await one.listener.until_neighbors()


def test_the_allow_list_is_not_read_at_every_request(tmp_path: Any) -> None:
    pair = generate_key_pair()
    (tmp_path / "one.pub").write_text(pair.public_key)
    allow_list, reads = AllowList(tmp_path), 0
    refresh = allow_list.refresh

    def counted() -> bool:
        nonlocal reads
        reads += 1
        return refresh()

    allow_list.refresh = counted  # type: ignore[method-assign]
    admission = Admission(allow_list, interval_s=3600.0)
    for _ in range(1000):
        assert admission.sender(pair.public_key) == pair.peer_id
    assert reads == 0
    for _ in range(1000):
        assert admission.sender("unknown") is None
    assert reads < 100


def test_an_allow_list_that_names_nobody_is_worth_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Admission(AllowList(tmp_path), interval_s=3600.0)
    (line,) = caplog.messages
    assert f"{tmp_path} names nobody" in line


def test_what_is_wrong_with_the_allow_list_at_the_start_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one.pub").write_text(generate_key_pair().public_key)
    (tmp_path / "bad.pub").write_text("not a key")
    Admission(AllowList(tmp_path), interval_s=3600.0)
    (line,) = caplog.messages
    assert line.startswith("left out of the allow-list: ")
    assert "bad.pub" in line
