"""A gradient arrives as its sender knows it does, and a sender's memory of its links is bounded."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from typing import get_args

import numpy as np
import pytest
from helpers_transport import ALL_TYPES, EMPTY, LARGE, SMALL, gradient
from hypothesis import given
from hypothesis import strategies as st

from protocol.deflate import Bytes, deflate, inflate, most_deflated
from protocol.errors import RemoteProtocolError
from protocol.gradients import Feedbacks, check_parcel, pack, unpack
from protocol.lowbit import CODECS, Bits, Feedback, coded_size_bytes
from protocol.messages import Encoding, PeerId
from protocol.tensors import Layout, allocate

widths = st.sampled_from(get_args(Bits))
layouts = st.sampled_from([SMALL, ALL_TYPES, EMPTY])
FEATURES = tuple(CODECS)
SIZE = SMALL.gradient.size_bytes


def peer(number: int) -> PeerId:
    return PeerId(f"{number:032x}")


@given(layouts, st.none() | widths, st.integers(1, 6))
def test_a_gradient_arrives_as_the_sender_knows_it_does(
    layout: Layout, bits: Bits | None, count: int
) -> None:
    feedback = None if bits is None else Feedback(bits)
    for number in range(count):
        update = gradient(layout, peer(1), sender_round=number)
        before = update.gradient.buffer.tobytes()
        parcel = pack(update, feedback)
        check_parcel(layout.gradient, parcel.encoding, parcel.blob.nbytes)
        out = allocate(layout.gradient.size_bytes)
        out.fill(0xFF)
        arrived = unpack(layout.gradient, parcel.encoding, parcel.blob.copy(), out)
        assert arrived == parcel.update.gradient
        assert arrived.buffer.flags.writeable
        assert update.gradient.buffer.tobytes() == before
        assert (parcel.update.sender_round, parcel.update.weight) == (number, update.weight)


@pytest.mark.parametrize(("bits", "share"), [(4, 7), (8, 3.5)])
def test_a_coded_gradient_is_small_and_all_of_them_together_are_exact(
    bits: Bits, share: float
) -> None:
    update, feedback = gradient(LARGE, peer(1)), Feedback(bits)
    true = update.gradient.flat_f32()
    total = np.zeros(true.size, np.float64)
    for _ in range(4):
        parcel = pack(update, feedback)
        assert parcel.blob.nbytes < LARGE.gradient.size_bytes / share
        total += parcel.update.gradient.flat_f32()
    step = np.abs(true).max() * 1.2 / {4: 7, 8: 127}[bits]
    assert np.abs(total - 4 * true).max() <= step / 2


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
def test_what_cannot_be_coded_travels_as_it_is_and_changes_nothing(number: float) -> None:
    update, feedback = gradient(SMALL, peer(1)), Feedback(4)
    pack(update, feedback)
    assert feedback.residual is not None
    owed = feedback.residual.copy()
    wrong = gradient(SMALL, peer(1), sender_round=4)
    wrong.gradient["head.bias"][2] = number
    parcel = pack(wrong, feedback)
    assert (parcel.encoding, parcel.update) == (Encoding.F32, wrong)
    assert parcel.blob is wrong.gradient.buffer
    assert np.array_equal(feedback.residual, owed)


def test_a_link_keeps_its_feedback_and_no_other_has_it() -> None:
    feedbacks = Feedbacks(SMALL.gradient, 4, 100 * SIZE)
    one, two = feedbacks.of(peer(1), FEATURES), feedbacks.of(peer(2), FEATURES)
    assert one is not None
    assert one is not two
    assert feedbacks.of(peer(1), FEATURES) is one


def test_nothing_is_coded_without_a_codec_or_for_who_cannot_read_it() -> None:
    assert Feedbacks(SMALL.gradient, None, 100 * SIZE).of(peer(1), FEATURES) is None
    feedbacks = Feedbacks(SMALL.gradient, 4, 100 * SIZE)
    assert feedbacks.of(peer(1), ("deflate-8", "else")) is None
    assert len(feedbacks) == 0


def test_links_beyond_the_memory_are_forgotten_the_longest_unused_first() -> None:
    feedbacks = Feedbacks(SMALL.gradient, 8, 3 * SIZE + 1)
    made = [feedbacks.of(peer(number), FEATURES) for number in range(3)]
    assert feedbacks.of(peer(0), FEATURES) is made[0]
    feedbacks.of(peer(3), FEATURES)
    assert len(feedbacks) == 3
    assert feedbacks.of(peer(0), FEATURES) is made[0]
    assert feedbacks.of(peer(2), FEATURES) is made[2]
    assert feedbacks.of(peer(1), FEATURES) is not made[1]
    tight = Feedbacks(LARGE.gradient, 8, 1)
    assert tight.of(peer(0), FEATURES) is tight.of(peer(0), FEATURES)


def test_links_to_peers_that_have_gone_are_forgotten() -> None:
    feedbacks = Feedbacks(SMALL.gradient, 4, 100 * SIZE)
    made = [feedbacks.of(peer(number), FEATURES) for number in range(3)]
    feedbacks.keep_only({peer(1), peer(9)})
    assert len(feedbacks) == 1
    assert feedbacks.of(peer(1), FEATURES) is made[1]
    assert feedbacks.of(peer(0), FEATURES) is not made[0]


@pytest.mark.parametrize("layout", [SMALL, ALL_TYPES, EMPTY, LARGE])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_size_is_let_pass_exactly_when_a_gradient_can_have_it(
    layout: Layout, encoding: Encoding
) -> None:
    update = gradient(layout, peer(1))
    parcels = [pack(update, Feedback(bits)) for bits in get_args(Bits)] + [pack(update, None)]
    made = {each.blob.nbytes for each in parcels if each.encoding == encoding}
    right: Container[int] = made
    if encoding in CODECS:
        most = most_deflated(coded_size_bytes(layout.gradient.size_bytes // 4, CODECS[encoding]))
        right = range(1, most + 1)
        assert all(size in right for size in made)
        made.add(most)
    for size in {0, 1, 2**62} | {size + by for size in made for by in (-1, 0, 1)}:
        with contextlib.nullcontext() if size in right else pytest.raises(RemoteProtocolError):
            check_parcel(layout.gradient, encoding, size)


def changed(blob: Bytes, changes: Sequence[tuple[int, int]]) -> Bytes:
    copy = blob.copy()
    for place, byte in changes:
        copy[place % copy.size] = byte
    return copy


@given(st.sampled_from(Encoding), st.lists(st.tuples(st.integers(0, 113), st.integers(0, 255))))
def test_any_bytes_give_a_finite_gradient_or_a_remote_protocol_error(
    encoding: Encoding, changes: list[tuple[int, int]]
) -> None:
    if encoding == Encoding.F16:
        return
    bits = CODECS.get(encoding)
    blob = pack(gradient(SMALL, peer(1)), None if bits is None else Feedback(bits)).blob
    blobs = [changed(blob, changes)]
    if bits is not None:  # what is deflated may be anything, too
        code, _ = inflate(blob.data, coded_size_bytes(SIZE // 4, bits))
        blobs.append(deflate(changed(np.frombuffer(code, np.uint8), changes)))
    for each in blobs:
        with contextlib.suppress(RemoteProtocolError):
            arrived = unpack(SMALL.gradient, encoding, each, allocate(SIZE))
            arrived.check_received()
