"""The serving side, without sockets: every request gets its one answer, every limit holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import xxhash
from helpers_transport import LARGE, OTHER, SMALL, TASK, filled, snapshot
from hypothesis import given
from hypothesis import strategies as st

from protocol.deflate import deflate
from protocol.editions import Answer, codec_of, read
from protocol.errors import PeerRefused
from protocol.gradients import room_for
from protocol.handshake import Credentials
from protocol.lowbit import Bits, encode
from protocol.messages import (
    Chunk,
    ChunkRequest,
    Encoding,
    GradientChunk,
    GradientOffer,
    GradientProgress,
    GradientUpdate,
    LayoutExchange,
    Leave,
    Message,
    ModelOffer,
    ModelRequest,
    ModelUnchanged,
    PeerId,
    Ping,
    Pong,
    Refusal,
    RefusalCode,
    Version,
    Welcome,
)
from protocol.tensors import Layout
from protocol.transport.interface import Counters
from protocol.transport.served import Served
from protocol.transport.settings import TransportSettings

ADA, BOB = PeerId("a" * 32), PeerId("b" * 32)
MIB = 1 << 20
Result = TypeVar("Result")
Answers = list[tuple[Message, bytes | None]]


class Visitors:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, PeerId]] = []
        self.misfit: list[PeerRefused] = []
        self.gradients: list[GradientUpdate] = []

    def arrived(self, peer_id: PeerId) -> None:
        self.told.append(("arrived", peer_id))

    def misfits(self, peer_id: PeerId, error: PeerRefused) -> None:
        self.told.append(("misfits", peer_id))
        self.misfit.append(error)

    def left(self, peer_id: PeerId) -> None:
        self.told.append(("left", peer_id))

    def gradient_arrived(self, update: GradientUpdate) -> None:
        self.gradients.append(update)

    def model_asked(self, peer_id: PeerId) -> None:
        self.told.append(("asked", peer_id))


class Desk:
    """A served side with a clock that only moves when told, and work that may be held back."""

    def __init__(self, layout: Layout = LARGE, bits: Bits | None = None, **settings: Any) -> None:
        self.layout = layout
        self.time = 100.0
        self.held: list[Callable[[], None]] | None = None
        self.visitors, self.counters = Visitors(), Counters()
        self.served = Served(
            credentials=credentials(layout),
            bits=bits,
            origin=None,
            settings=TransportSettings(**settings),
            counters=self.counters,
            visitors=self.visitors,
            offload=self.offload,
            allocate=lambda size: np.empty(size, np.uint8),
            now=lambda: self.time,
        )

    def offload(
        self, size_bytes: int, work: Callable[[], Result], then: Callable[[Result], None]
    ) -> None:
        if self.held is None:
            then(work())
        else:
            self.held.append(lambda: then(work()))

    def ask(
        self, message: Message, body: bytes | None = None, sender: PeerId = ADA
    ) -> tuple[Message, bytes | None] | None:
        """Ask, and return the answer, if there is one at once."""
        answers = self.ask_later(message, body, sender)
        assert len(answers) <= 1
        return answers[0] if answers else None

    def ask_later(
        self,
        message: Message,
        body: bytes | None = None,
        sender: PeerId = ADA,
        into: Answers | None = None,
    ) -> Answers:
        answers = [] if into is None else into
        self.served.handle(
            sender,
            message,
            body,
            lambda reply, data: answers.append((reply, None if data is None else bytes(data))),
        )
        return answers

    def greet(self, sender: PeerId = ADA) -> None:
        answer = self.ask(credentials(self.layout).hello(1), sender=sender)
        assert answer is not None
        assert isinstance(answer[0], Welcome)

    def offer(self, transfer_id: int, body: bytes, **changes: Any) -> GradientOffer:
        data = changes.pop("data", filled(self.layout.gradient).buffer.data)
        fields: dict[str, Any] = {
            "request_id": 5,
            "transfer_id": transfer_id,
            "size_bytes": len(data),
            "digest": xxhash.xxh3_64_hexdigest(data),
            "sender_round": 9,
            "on_version": Version(1, 2),
            "weight": 0.5,
            "num_examples": 8,
        }
        return GradientOffer(**{**fields, **changes})


def credentials(layout: Layout) -> Credentials:
    return Credentials(
        federation_id="home",
        name="ada",
        incarnation=1,
        advertise="tcp://127.0.0.1:1",
        layout=layout,
        task=TASK,
    )


def deflated(code: bytes) -> bytes:
    return deflate(np.frombuffer(code, np.uint8)).tobytes()


def code_of(answer: tuple[Message, bytes | None] | None) -> RefusalCode:
    assert answer is not None
    assert isinstance(answer[0], Refusal)
    return answer[0].code


def test_a_stranger_is_told_to_say_hello_at_most_once_a_second() -> None:
    desk = Desk()
    request = ModelRequest(request_id=1, have=None, accept_bytes=0)
    assert code_of(desk.ask(request)) == RefusalCode.NO_HELLO
    assert desk.ask(request) is None
    desk.time += 1.0
    assert code_of(desk.ask(request)) == RefusalCode.NO_HELLO


def test_a_ping_is_answered_before_and_after_hello() -> None:
    desk = Desk()
    assert desk.ask(Ping(request_id=7)) == (Pong(request_id=7), None)
    desk.greet()
    assert desk.ask(Ping(request_id=8)) == (Pong(request_id=8), None)
    assert desk.visitors.told == [("arrived", ADA)]


def test_without_a_model_the_request_is_refused_for_now() -> None:
    desk = Desk()
    desk.greet()
    answer = desk.ask(ModelRequest(request_id=1, have=None, accept_bytes=0))
    assert code_of(answer) == RefusalCode.NO_MODEL


def test_a_small_model_comes_whole_with_its_offer_and_needs_no_transfer() -> None:
    desk = Desk(SMALL)
    desk.greet()
    desk.served.publish(published := snapshot(SMALL, 4))
    answer = desk.ask(ModelRequest(request_id=2, have=Version(1, 3), accept_bytes=MIB))
    assert answer is not None
    offer, body = answer
    assert isinstance(offer, ModelOffer)
    assert offer.version == Version(1, 4)
    assert body == published.tensors.buffer.tobytes()
    assert offer.digest == xxhash.xxh3_64_hexdigest(body)
    chunk = ChunkRequest(request_id=3, transfer_id=2, offset=0, length=1)
    assert code_of(desk.ask(chunk)) == RefusalCode.NO_TRANSFER


def test_the_version_that_the_asker_has_is_not_sent_again() -> None:
    desk = Desk()
    desk.greet()
    desk.served.publish(snapshot(LARGE, 4))
    answer = desk.ask(ModelRequest(request_id=2, have=Version(1, 4), accept_bytes=MIB))
    assert answer == (ModelUnchanged(request_id=2, version=Version(1, 4)), None)


def test_chunks_come_from_the_model_that_was_offered_though_a_newer_is_published() -> None:
    desk = Desk()
    desk.greet()
    desk.served.publish(old := snapshot(LARGE, 1))
    desk.ask(ModelRequest(request_id=2, have=None, accept_bytes=10))
    desk.served.publish(snapshot(LARGE, 2, seed=9))
    answer = desk.ask(ChunkRequest(request_id=3, transfer_id=2, offset=10, length=MIB))
    assert answer == (
        Chunk(request_id=3, transfer_id=2, offset=10),
        old.tensors.buffer[10 : 10 + MIB].tobytes(),
    )


def test_chunks_are_served_while_the_digest_of_a_large_model_is_still_made() -> None:
    desk = Desk()
    desk.greet()
    desk.held = []
    desk.served.publish(snapshot(LARGE))
    offers = desk.ask_later(ModelRequest(request_id=2, have=None, accept_bytes=10))
    assert not offers
    chunk = desk.ask(ChunkRequest(request_id=3, transfer_id=2, offset=10, length=5))
    assert chunk is not None
    assert isinstance(chunk[0], Chunk)
    desk.held.pop()()
    assert isinstance(offers[0][0], ModelOffer)


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_any_range_is_served_exactly_or_is_a_strike(offset: int, length: int) -> None:
    desk = Desk(SMALL)
    desk.greet()
    desk.served.publish(published := snapshot(SMALL))
    size = published.tensors.buffer.nbytes
    desk.ask(ModelRequest(request_id=2, have=None, accept_bytes=0))
    offset, length = offset % (size + 2), length if offset % 2 else length % (size + 2)
    answer = desk.ask(ChunkRequest(request_id=3, transfer_id=2, offset=offset, length=length))
    assert answer is not None
    if 0 < length <= MIB and offset + length <= size:
        assert answer[1] == published.tensors.buffer[offset : offset + length].tobytes()
    else:
        assert code_of(answer) == RefusalCode.MALFORMED
        assert desk.counters.malformed == 1


def test_idle_pulls_are_forgotten_and_used_ones_are_not() -> None:
    desk = Desk(transfer_idle_s=30)
    desk.greet()
    desk.served.publish(snapshot(LARGE))
    for request_id in (2, 3):
        desk.ask(ModelRequest(request_id=request_id, have=None, accept_bytes=0))
    desk.time += 20
    desk.ask(ChunkRequest(request_id=4, transfer_id=3, offset=0, length=1))
    desk.time += 20
    desk.served.sweep()
    gone = desk.ask(ChunkRequest(request_id=5, transfer_id=2, offset=0, length=1))
    assert code_of(gone) == RefusalCode.NO_TRANSFER
    kept = desk.ask(ChunkRequest(request_id=6, transfer_id=3, offset=0, length=1))
    assert kept is not None
    assert isinstance(kept[0], Chunk)


def test_old_models_kept_for_pulls_are_bounded_the_oldest_goes_first() -> None:
    desk = Desk(max_pinned_bytes=2 * LARGE.size_bytes)
    desk.greet()
    for number in range(5):
        desk.served.publish(snapshot(LARGE, number))
        desk.ask(ModelRequest(request_id=10 + number, have=None, accept_bytes=0))
    answers = [
        desk.ask(ChunkRequest(request_id=1, transfer_id=10 + number, offset=0, length=1))
        for number in range(5)
    ]
    kinds = [type(answer[0]) for answer in answers if answer is not None]
    assert kinds == [Refusal, Refusal, Chunk, Chunk, Chunk]


def ask_for_model(request_id: int, accept_bytes: int = 0, have: Version | None = None) -> Message:
    return ModelRequest(request_id=request_id, have=have, accept_bytes=accept_bytes)


def ask_for_bytes(transfer_id: int, offset: int, length: int = MIB) -> Message:
    return ChunkRequest(request_id=99, transfer_id=transfer_id, offset=offset, length=length)


def test_a_coded_model_is_offered_and_sent_once_it_is_coded_in_the_order_of_the_requests() -> None:
    desk = Desk(bits=4)
    desk.greet()
    desk.held = []
    desk.served.publish(snapshot(LARGE))
    answers: Answers = []
    for message in (ask_for_model(2, 10), ask_for_bytes(2, 10, 5), ask_for_model(3, 7)):
        assert desk.ask_later(message, into=answers) is answers
    assert not answers
    desk.held.pop()()
    first, chunk, second = answers
    assert isinstance(first[0], ModelOffer)
    assert (first[0].encoding, first[0].request_id) == (Encoding.F16, 2)
    assert isinstance(chunk[0], Chunk)
    assert first[1] is not None and len(first[1]) == 10
    assert chunk[1] is not None and len(chunk[1]) == 5
    assert isinstance(second[0], ModelOffer)
    assert second[1] == first[1][:7]


@pytest.mark.parametrize("bits", [None, 4])
def test_a_small_model_whose_digest_is_late_comes_whole_with_its_offer(bits: Bits | None) -> None:
    desk = Desk(SMALL, bits=bits)
    desk.greet()
    desk.held = []
    desk.served.publish(snapshot(SMALL))
    answers = desk.ask_later(ask_for_model(2, accept_bytes=MIB))
    assert not answers
    desk.held.pop()()
    ((offer, body),) = answers
    assert isinstance(offer, ModelOffer)
    assert body is not None and len(body) == offer.size_bytes
    assert code_of(desk.ask(ask_for_bytes(2, 0, 1))) == RefusalCode.NO_TRANSFER


def test_requests_that_wait_for_a_model_are_bounded_and_the_newest_are_answered() -> None:
    desk = Desk(bits=4)
    desk.greet()
    desk.held = []
    desk.served.publish(snapshot(LARGE))
    answers: Answers = []
    for number in range(1000):
        desk.ask_later(ask_for_model(number), into=answers)
    desk.held.pop()()
    assert [message.request_id for message, _ in answers] == list(range(992, 1000))


def test_of_a_range_beyond_a_coded_model_comes_what_there_is_but_none_beyond_any_model() -> None:
    desk = Desk(bits=4)
    desk.greet()
    desk.served.publish(snapshot(LARGE))
    answer = desk.ask(ask_for_model(2, 10))
    assert answer is not None
    assert isinstance(answer[0], ModelOffer)
    size = answer[0].size_bytes
    assert size < 0.51 * LARGE.size_bytes
    for offset, left in ((size - 3, 3), (size, 0), (LARGE.size_bytes - MIB, 0)):
        chunk = desk.ask(ask_for_bytes(2, offset))
        assert chunk is not None
        assert isinstance(chunk[0], Chunk)
        assert chunk[1] is not None and len(chunk[1]) == left
    beyond = desk.ask(ask_for_bytes(2, LARGE.size_bytes - MIB + 1))
    assert code_of(beyond) == RefusalCode.MALFORMED
    assert desk.counters.malformed == 1


def test_whoever_waits_for_a_version_that_is_never_coded_gets_its_successor() -> None:
    desk = Desk(bits=4)
    desk.greet()
    desk.held = []
    answers: Answers = []
    for number in range(4):
        desk.served.publish(snapshot(LARGE, number, seed=number))
        desk.ask_later(ask_for_model(10 + number), into=answers)
    while desk.held:
        desk.held.pop(0)()
    offers = [message for message, _ in answers]
    assert [(offer.request_id, offer.version.round_number) for offer in offers] == [
        (10, 0),
        (11, 3),
        (12, 3),
        (13, 3),
    ]


def test_a_peer_that_left_while_a_model_was_coded_is_sent_nothing() -> None:
    desk = Desk(bits=4)
    desk.greet()
    desk.held = []
    desk.served.publish(snapshot(LARGE))
    answers: Answers = []
    desk.ask_later(ask_for_model(2), into=answers)
    desk.ask(Leave(request_id=3))
    desk.held.pop()()
    assert not answers


def test_no_more_chunks_wait_for_an_offer_than_a_window_holds() -> None:
    desk = Desk(bits=4)
    desk.greet()
    desk.held = []
    desk.served.publish(snapshot(LARGE))
    desk.ask_later(ask_for_model(2))
    waiting: Answers = []
    for _ in range(64):
        desk.ask_later(ask_for_bytes(2, 0, 1), into=waiting)
    assert not waiting
    assert code_of(desk.ask(ask_for_bytes(2, 0, 1))) == RefusalCode.BUSY
    desk.held.pop()()
    assert [type(message) for message, _ in waiting] == [Chunk] * 64


@pytest.mark.parametrize(("features", "encoding"), [((), Encoding.F32), (None, Encoding.DEFLATE_8)])
def test_only_who_announces_a_codec_is_sent_what_it_makes(
    features: tuple[str, ...] | None, encoding: Encoding
) -> None:
    desk = Desk(bits=8)
    hello = credentials(LARGE).hello(1)
    if features is not None:
        hello = msgspec.structs.replace(hello, features=list(features))
    desk.ask(hello)
    for number in range(2):
        desk.served.publish(snapshot(LARGE, number, seed=number))
    answer = desk.ask(ask_for_model(2, 10, have=Version(1, 0)))
    assert answer is not None
    assert isinstance(answer[0], ModelOffer)
    assert answer[0].encoding == encoding
    assert answer[0].base == (None if encoding == Encoding.F32 else Version(1, 0))


@pytest.mark.parametrize(("features", "told"), [((), 0), (None, 80)])
def test_only_who_can_read_it_is_told_on_how_many_examples_a_model_was_trained(
    features: tuple[str, ...] | None, told: int
) -> None:
    desk = Desk()
    hello = credentials(LARGE).hello(1)
    if features is not None:
        hello = msgspec.structs.replace(hello, features=list(features))
    desk.ask(hello)
    desk.served.publish(replace(snapshot(LARGE), num_examples=80))
    answer = desk.ask(ask_for_model(2, 10))
    assert answer is not None
    assert isinstance(answer[0], ModelOffer)
    assert answer[0].num_examples == told


def test_a_pull_of_differences_goes_on_with_them_though_newer_ones_are_published() -> None:
    desk = Desk(bits=4)
    desk.greet()
    desk.served.publish(snapshot(LARGE, 0))
    held = desk.served.public
    desk.served.publish(snapshot(LARGE, 1, seed=1))
    wanted = desk.served.public
    answer = desk.ask(ask_for_model(2, 10, have=Version(1, 0)))
    assert answer is not None
    offer, body = answer
    assert isinstance(offer, ModelOffer)
    assert body is not None
    for number in range(2, 9):
        desk.served.publish(snapshot(LARGE, number, seed=number))
    while len(body) < offer.size_bytes:
        chunk = desk.ask(ask_for_bytes(2, len(body)))
        assert chunk is not None
        assert chunk[1]
        body += chunk[1]
    assert offer.digest == xxhash.xxh3_64_hexdigest(body)
    blob, out = np.frombuffer(body, np.uint8), np.empty(LARGE.size_bytes, np.uint8)
    received = Answer(encoding=offer.encoding, base=offer.base, leads_to=offer.leads_to, blob=blob)
    assert wanted is not None
    assert read(LARGE, received, held, out) == wanted.tensors


def test_one_peer_cannot_pull_from_the_transfer_of_another() -> None:
    desk = Desk()
    desk.greet(ADA)
    desk.greet(BOB)
    desk.served.publish(snapshot(LARGE))
    desk.ask(ModelRequest(request_id=2, have=None, accept_bytes=0), sender=ADA)
    chunk = ChunkRequest(request_id=3, transfer_id=2, offset=0, length=1)
    assert code_of(desk.ask(chunk, sender=BOB)) == RefusalCode.NO_TRANSFER


@given(st.lists(st.integers(1, LARGE.gradient.size_bytes), max_size=8), st.data())
def test_a_gradient_in_any_chunks_repeated_or_overlapping_arrives_once(
    cuts: list[int], data: st.DataObject
) -> None:
    desk = Desk(SMALL)
    desk.greet()
    blob = filled(SMALL.gradient).buffer.tobytes()
    desk.ask(desk.offer(7, b""), b"")
    points = sorted({0, len(blob), *(cut % len(blob) for cut in cuts)})
    for begin, end in itertools.pairwise(points):
        begin -= data.draw(st.integers(0, begin))  # some of it again
        progress = desk.ask(
            GradientChunk(request_id=9, transfer_id=7, offset=begin), blob[begin:end]
        )
        assert progress == (GradientProgress(request_id=9, transfer_id=7, received_bytes=end), None)
    desk.ask(GradientChunk(request_id=9, transfer_id=7, offset=0), blob)
    again = desk.ask(desk.offer(7, b""), b"")
    assert again is not None
    assert isinstance(again[0], GradientProgress)
    assert again[0].received_bytes == len(blob)
    (update,) = desk.visitors.gradients
    assert (update.sender, update.sender_round, update.on_version) == (ADA, 9, Version(1, 2))
    assert update.gradient.buffer.tobytes() == blob


@given(st.integers(0, 40), st.sampled_from([4, 8]))
def test_a_coded_gradient_arrives_decoded_and_its_progress_counts_coded_bytes(
    cut: int, bits: Bits
) -> None:
    desk = Desk(SMALL)
    desk.greet()
    coded = encode(filled(SMALL.gradient).flat_f32(), bits)
    blob = deflated(coded.blob)
    coding = {"data": blob, "encoding": codec_of(bits)}
    desk.ask(desk.offer(7, b"", **coding), blob[:cut])
    room = room_for(SMALL.gradient, codec_of(bits))
    assert desk.served._inbox.held_bytes == room + SMALL.gradient.size_bytes
    chunk = GradientChunk(request_id=9, transfer_id=7, offset=cut)
    done = (GradientProgress(request_id=9, transfer_id=7, received_bytes=len(blob)), None)
    for _ in range(2):
        assert desk.ask(chunk, blob[cut:]) == done
    (update,) = desk.visitors.gradients
    assert np.array_equal(update.gradient.flat_f32(), coded.decoded)
    assert desk.served._inbox.held_bytes == 0


def test_coded_gradients_of_different_sizes_take_memory_of_one_size() -> None:
    desk, sizes = Desk(LARGE), set()
    desk.served._inbox._allocate = lambda size: sizes.add(size) or np.empty(size, np.uint8)
    desk.greet()
    for number, scale in enumerate((0.0, 1.0)):
        vector = filled(LARGE.gradient).flat_f32() * np.float32(scale)
        blob = deflated(encode(vector, 4).blob)
        offer = desk.offer(number, b"", data=blob, encoding=Encoding.DEFLATE_4)
        desk.ask(offer, blob[: 1 << 16])
    assert sizes == {room_for(LARGE.gradient, Encoding.DEFLATE_4), LARGE.gradient.size_bytes}


@pytest.mark.parametrize(
    ("encoding", "blob", "fault"),
    [
        (Encoding.DEFLATE_4, bytes(125), "a gradient of 125 bytes as deflate-4, ours have at most"),
        (Encoding.DEFLATE_8, bytes(237), "a gradient of 237 bytes as deflate-8, ours have at most"),
        (Encoding.DEFLATE_4, bytes(114), "what should be deflated is not"),
        (Encoding.DEFLATE_4, deflated(bytes(115)), "it takes 114"),
        (Encoding.DEFLATE_4, deflated(bytes(114)) + b"x", "1 bytes after a gradient"),
        (Encoding.F16, bytes(448), "a gradient as f16: that is for models only"),
        (Encoding.DEFLATE_4, deflated(b"\xff" * 114), "scale of block 0 is negative or not finite"),
        (Encoding.DEFLATE_4, deflated(bytes(2) + b"\x88" * 112), "is coded as -8, out of range"),
        (
            Encoding.DEFLATE_4,
            deflated(b"\x00\x3c" + b"\x11" * 112),
            "'head.bias' is followed by stray bytes",
        ),
    ],
)
def test_a_coded_gradient_that_does_not_hold_is_a_strike_and_takes_no_memory(
    encoding: Encoding, blob: bytes, fault: str
) -> None:
    desk = Desk(SMALL)
    desk.greet()
    answer = desk.ask(desk.offer(7, b"", data=blob, encoding=encoding), blob)
    assert code_of(answer) == RefusalCode.MALFORMED
    assert answer is not None
    assert isinstance(answer[0], Refusal)
    assert fault in answer[0].text
    assert desk.counters.malformed == 1
    assert desk.served._inbox.held_bytes == 0
    assert not desk.visitors.gradients


def test_a_gap_is_answered_with_what_is_there() -> None:
    desk = Desk(SMALL)
    desk.greet()
    desk.ask(desk.offer(7, b"12345"), filled(SMALL.gradient).buffer[:5].tobytes())
    answer = desk.ask(GradientChunk(request_id=9, transfer_id=7, offset=50), b"x")
    assert answer == (GradientProgress(request_id=9, transfer_id=7, received_bytes=5), None)


def test_whoever_asks_during_verification_is_answered_after_it() -> None:
    desk = Desk(SMALL)
    desk.greet()
    desk.held = []
    blob = filled(SMALL.gradient).buffer.tobytes()
    first = desk.ask_later(desk.offer(7, blob), blob)
    second = desk.ask_later(GradientChunk(request_id=9, transfer_id=7, offset=0), blob)
    assert not first
    assert not second
    desk.held.pop()()
    assert len(first) == len(second) == len(desk.visitors.gradients) == 1


def test_a_sender_that_leaves_during_verification_delivers_nothing() -> None:
    desk = Desk(SMALL)
    desk.greet()
    desk.held = []
    blob = filled(SMALL.gradient).buffer.tobytes()
    desk.ask_later(desk.offer(7, blob), blob)
    assert desk.ask(Leave(request_id=8)) is None
    desk.held.pop()()
    assert not desk.visitors.gradients
    assert desk.visitors.told[-1] == ("left", ADA)


def test_a_gradient_with_a_wrong_digest_is_refused_and_can_be_offered_again() -> None:
    desk = Desk(SMALL)
    desk.greet()
    blob = filled(SMALL.gradient).buffer.tobytes()
    wrong = desk.ask(desk.offer(7, blob, digest="0" * 16), blob)
    assert code_of(wrong) == RefusalCode.MALFORMED
    assert not desk.visitors.gradients
    right = desk.ask(desk.offer(7, blob), blob)
    assert right is not None
    assert isinstance(right[0], GradientProgress)
    assert len(desk.visitors.gradients) == 1


@pytest.mark.parametrize("size", [0, 1, SMALL.size_bytes + 1, 2**62])
def test_an_offer_of_the_wrong_size_allocates_nothing(size: int) -> None:
    desk = Desk(SMALL)
    desk.greet()
    answer = desk.ask(desk.offer(7, b"", size_bytes=size), b"")
    assert code_of(answer) == RefusalCode.MALFORMED
    assert desk.served._inbox.held_bytes == 0


def test_bytes_beyond_the_end_are_refused() -> None:
    desk = Desk(SMALL)
    desk.greet()
    desk.ask(desk.offer(7, b""), b"")
    chunk = GradientChunk(request_id=9, transfer_id=7, offset=SMALL.gradient.size_bytes)
    assert code_of(desk.ask(chunk, b"x")) == RefusalCode.MALFORMED


def test_one_peer_holds_a_bounded_number_of_gradients_and_its_oldest_goes() -> None:
    desk = Desk(SMALL, max_incoming_per_peer=3)
    desk.greet()
    for transfer_id in range(6):
        desk.ask(desk.offer(transfer_id, b""), b"")
    assert desk.served._inbox.held_bytes == 3 * SMALL.gradient.size_bytes
    chunk = GradientChunk(request_id=9, transfer_id=0, offset=0)
    assert code_of(desk.ask(chunk, b"x")) == RefusalCode.NO_TRANSFER


def test_memory_for_gradients_is_bounded_and_given_back() -> None:
    size = SMALL.gradient.size_bytes
    desk = Desk(SMALL, max_receive_bytes=2 * size, transfer_idle_s=30)
    for sender in (ADA, BOB, PeerId("c" * 32)):
        desk.greet(sender)
    for sender in (ADA, BOB):
        desk.ask(desk.offer(1, b""), b"", sender)
    assert code_of(desk.ask(desk.offer(1, b""), b"", PeerId("c" * 32))) == RefusalCode.BUSY
    desk.time += 31
    desk.served.sweep()
    assert desk.served._inbox.held_bytes == 0


def test_another_layout_is_refused_and_both_sides_can_name_the_difference() -> None:
    desk = Desk(SMALL)
    answer = desk.ask(credentials(OTHER).hello(1))
    assert code_of(answer) == RefusalCode.LAYOUT
    exchange = desk.ask(LayoutExchange(request_id=2), OTHER.canonical(TASK))
    assert exchange == (LayoutExchange(request_id=2), SMALL.canonical(TASK))
    assert "head.weight f32[20, 10]" in str(desk.visitors.misfit[0])
    request = ModelRequest(request_id=3, have=None, accept_bytes=0)
    desk.time += 2
    assert code_of(desk.ask(request)) == RefusalCode.NO_HELLO


@pytest.mark.parametrize("layout", [b"", b"{}", b"[1,2]", b'["t",[["w","f32",[-1],true]]]'])
def test_a_malformed_layout_never_raises(layout: bytes) -> None:
    desk = Desk(SMALL)
    assert desk.ask(LayoutExchange(request_id=2), layout) is not None


def test_too_many_faults_shut_a_peer_out_for_a_while_and_nobody_else() -> None:
    desk = Desk(max_strikes=20, ban_s=600)
    desk.greet(ADA)
    desk.greet(BOB)
    for _ in range(20):
        desk.served.strike(ADA, "nonsense")
    answer = desk.ask(Ping(request_id=1))
    assert code_of(answer) == RefusalCode.NOT_ALLOWED
    assert desk.ask(Ping(request_id=1)) is None
    assert desk.ask(Ping(request_id=1), sender=BOB) == (Pong(request_id=1), None)
    desk.time += 601
    assert desk.ask(Ping(request_id=1)) == (Pong(request_id=1), None)


def test_a_fault_now_and_then_is_forgiven() -> None:
    desk = Desk(max_strikes=20, strike_window_s=60)
    desk.greet()
    for _ in range(100):
        desk.served.strike(ADA, "nonsense")
        desk.time += 4
    assert desk.ask(Ping(request_id=1)) == (Pong(request_id=1), None)


def test_an_answer_sent_as_a_request_is_a_fault() -> None:
    desk = Desk()
    desk.greet()
    assert code_of(desk.ask(Pong(request_id=1))) == RefusalCode.MALFORMED


def test_the_number_of_remembered_peers_is_bounded() -> None:
    desk = Desk(SMALL, max_sessions=10)
    for number in range(50):
        desk.time += 1
        desk.greet(PeerId(f"{number:032x}"))
    assert len(desk.served._sessions) == 10


def test_a_banned_peer_is_read_once_a_second_and_nobody_else_is_shunned() -> None:
    desk = Desk(max_strikes=3, ban_s=600)
    assert not desk.served.shuns(ADA)  # never heard of
    for _ in range(3):
        desk.served.strike(ADA, "nonsense")
    read = []
    for _ in range(40):
        read.append(not desk.served.shuns(ADA))
        desk.time += 0.1
    assert 3 <= sum(read) <= 5  # in four seconds
    assert desk.counters.shunned == len(read) - sum(read)
    assert not desk.served.shuns(BOB)
    assert desk.served.bans(ADA)
    assert not desk.served.bans(BOB)
    desk.time += 600
    assert not desk.served.bans(ADA)
    assert not desk.served.shuns(ADA)
