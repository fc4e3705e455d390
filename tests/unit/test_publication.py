"""Whatever a reader missed, differences or a whole copy give it the public copy, bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.deflate import deflate, inflate
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.lowbit import F16, F16_MAX, Bits, Vector, coded_size_bytes, encode
from protocol.publication import (
    MAX_DIFFERENCES,
    Publication,
    copy_size_bytes,
    follow,
    read_copy,
)

widths = st.sampled_from(get_args(Bits))
sizes = st.integers(0, 10) | st.sampled_from((255, 256, 257, 600))
LONG = 1024 * 256 + 300  # more than one of the pieces that are worked on


@st.composite
def vectors(draw: st.DrawFn, size: int) -> Vector:
    """Any numbers that f16 can hold, or numbers whose magnitudes differ widely."""
    if size <= 10 and draw(st.booleans()):
        numbers = st.floats(-65504, 65504, width=32) | st.sampled_from((-65504.0, -0.0, 65504.0))
        return draw(hnp.arrays(np.float32, size, elements=numbers))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    numbers_ = rng.normal(size=size) * 10 ** rng.uniform(-8, 4, size)
    return np.clip(numbers_, -65504, 65504).astype(np.float32)


@st.composite
def histories(draw: st.DrawFn) -> list[Vector]:
    """What an owner publishes, one after the other."""
    size = draw(sizes)
    return draw(st.lists(vectors(size), min_size=1, max_size=12))


def published(history: Sequence[Vector], bits: Bits) -> list[Publication]:
    """Return what is published at each step."""
    publications = [Publication.first(history[0], bits)]
    for vector in history[1:]:
        publications.append(publications[-1].then(vector))
    return publications


def newest(history: Sequence[Vector], bits: Bits) -> Publication:
    return published(history, bits)[-1]


def whole(blob: bytes, size: int) -> Vector:
    out = np.full(size, np.nan, np.float32)
    read_copy(blob, out)
    return out


def followed(public: Vector, blob: bytes, bits: Bits) -> Vector:
    out = np.full(public.size, np.nan, np.float32)
    follow(public, blob, bits, out)
    return out


def deflated(code: bytes) -> bytes:
    return deflate(np.frombuffer(code, np.uint8)).tobytes()


def in_f16(vector: Vector) -> Vector:
    return vector.astype(F16).astype(np.float32)


def moving(size: int, count: int) -> Sequence[Vector]:
    """What an owner publishes that trains: small changes of numbers of order 0.1."""
    rng = np.random.default_rng(size)
    start = rng.normal(scale=0.1, size=size)
    steps = rng.normal(scale=0.003, size=(count, size)).cumsum(axis=0)
    return [(start + step).astype(np.float32) for step in steps]


@given(histories(), widths)
def test_every_reader_makes_the_public_copy_bit_by_bit(history: list[Vector], bits: Bits) -> None:
    publications = published(history, bits)
    for step, publication in enumerate(publications):
        wanted, size = publication.vector.tobytes(), len(history[0])
        assert whole(publication.copy.tobytes(), size).tobytes() == wanted
        for missed in range(1, len(publication.differences) + 1):
            held = publications[step - missed].vector
            blob = b"".join(code.tobytes() for code in publication.differences[-missed:])
            assert followed(held, blob, bits).tobytes() == wanted


@pytest.mark.parametrize("bits", [4, 8])
def test_a_long_vector_is_followed_bit_by_bit(bits: Bits) -> None:
    first, second = published(moving(LONG, 2), bits)
    assert whole(second.copy.tobytes(), LONG).tobytes() == second.vector.tobytes()
    blob = second.differences[-1].tobytes()
    assert followed(first.vector, blob, bits).tobytes() == second.vector.tobytes()


@pytest.mark.parametrize(("bits", "most"), [(4, 4), (8, 2)])
def test_only_differences_that_together_are_smaller_than_a_copy_are_kept(
    bits: Bits, most: int
) -> None:
    kept = [len(publication.differences) for publication in published(moving(5000, 7), bits)]
    assert kept == [min(step, most) for step in range(7)]


def test_no_more_differences_are_kept_than_a_reader_takes_at_once() -> None:
    still = newest([np.ones(5000, np.float32)] * 20, 4)
    assert len(still.differences) == MAX_DIFFERENCES


@given(histories(), widths)
def test_so_many_differences_are_smaller_than_a_copy_and_one_more_is_not(
    history: list[Vector], bits: Bits
) -> None:
    before: tuple[npt.NDArray[np.uint8], ...] = ()
    for publication in published(history, bits):
        kept, copy_bytes = publication.differences, copy_size_bytes(len(history[0]))
        assert sum(each.size for each in kept) < copy_bytes or not kept
        if len(before) >= len(kept) and kept:  # one has gone
            more = sum(each.size for each in (before[-len(kept)], *kept))
            assert more >= copy_bytes or len(kept) == MAX_DIFFERENCES
        before = kept


@given(histories(), widths)
def test_a_public_copy_is_what_f16_can_hold_and_stays_what_it_was(
    history: list[Vector], bits: Bits
) -> None:
    publication = Publication.first(history[0], bits)
    assert publication.vector.tobytes() == in_f16(history[0]).tobytes()
    for vector in history[1:]:
        before = publication.vector.tobytes(), publication.copy.tobytes()
        following = publication.then(vector)
        assert in_f16(following.vector).tobytes() == following.vector.tobytes()
        assert following.copy.astype(np.float32).tobytes() == following.vector.tobytes()
        assert (publication.vector.tobytes(), publication.copy.tobytes()) == before
        publication = following


def test_numbers_are_rounded_as_by_conversion_to_f16_ties_to_even_and_signs_kept() -> None:
    held = np.arange(0x7C00, dtype="<u2").view(F16).astype(np.float32)  # all that f16 holds
    ties = ((held[1:].astype(np.float64) + held[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(toward)) for toward in (0, np.inf)]
    tiny = np.array([0, 1e-45, 1e-38, 2**-25, 2**-24], np.float32)
    numbers = np.concatenate((held, ties, *beside, tiny))
    for vector in (numbers, -numbers):
        assert Publication.first(vector, 4).vector.tobytes() == in_f16(vector).tobytes()


@given(histories(), widths)
@example([np.full(3, -F16_MAX, np.float32), np.full(3, F16_MAX, np.float32)], 4)
def test_publishing_a_vector_again_and_again_ends_at_that_vector_in_f16(
    history: list[Vector], bits: Bits
) -> None:
    publication = newest(history, bits)
    for _ in range(25):  # an error shrinks 7-fold at least, and is under 2**17 and over 2**-25
        publication = publication.then(history[0])
    assert np.array_equal(publication.vector, in_f16(history[0]))


def test_what_f16_cannot_hold_of_a_large_number_does_not_coarsen_its_small_neighbors() -> None:
    wanted = np.array([1000.24, 0.001], np.float32)  # f16 holds 1000 or 1000.5
    publication = newest([np.zeros(2, np.float32), *[wanted] * 12], 4)
    assert np.array_equal(publication.vector, in_f16(wanted))


@pytest.mark.parametrize(("bits", "largest"), [(4, 7), (8, 127)])
def test_the_public_copy_of_a_model_that_trains_is_off_by_half_a_scale_and_f16_only(
    bits: Bits, largest: int
) -> None:
    start, *later = moving(5000, 200)
    publication = Publication.first(start, bits)
    for vector in later:
        half_a_scale = np.abs(vector - publication.vector).max() / (2 * largest)
        publication = publication.then(vector)
        error = np.abs(publication.vector - vector).max()
        # f16 rounds three times by up to 2**-11: the target, the scale and the sum.
        assert error <= half_a_scale * (1 + 2**-9) + 2**-10 * np.abs(vector).max()


def test_a_step_beyond_the_range_of_f16_stays_at_its_end_for_owner_and_reader() -> None:
    first = Publication.first(np.full(300, -F16_MAX, np.float32), 4)
    coded = encode(np.full(300, 2 * F16_MAX, np.float32), 4).decoded
    assert (coded - F16_MAX > F16_MAX).all()  # the scale is rounded up
    second = first.then(np.full(300, F16_MAX, np.float32))
    reader = followed(first.vector, second.differences[-1].tobytes(), 4)
    assert (reader == F16_MAX).all()
    assert reader.tobytes() == second.vector.tobytes()


@pytest.mark.parametrize(
    ("bits", "largest", "differences", "copy"),
    [
        (4, 7, ["003c17000000", "003871000000"], "80478044"),
        (8, 127, ["003c7f01000000000000", "0038017f000000000000"], "f8570854"),
    ],
)
def test_the_bytes_of_differences_and_copies_are_for_ever(
    bits: Bits, largest: int, differences: list[str], copy: str
) -> None:
    start, first, second = (np.zeros(8, np.float32) for _ in range(3))
    first[:2], second[:2] = (largest, 1), (largest + 0.5, 1 + largest / 2)
    publications = published([start, first, second], bits)
    size = coded_size_bytes(8, bits)
    made = [inflate(each.differences[-1].data, size)[0].hex() for each in publications[1:]]
    assert made == differences
    assert publications[-1].copy.tobytes().hex() == copy + "0000" * 6


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 65505, -1e30])
@pytest.mark.parametrize("place", [7, LONG - 1])
def test_what_f16_cannot_hold_is_refused_and_named(number: float, place: int) -> None:
    wrong = np.ones(LONG, np.float32)
    wrong[place] = number
    with pytest.raises(LocalProtocolError, match=rf"number {place} of a vector .* up to 65504"):
        Publication.first(wrong, 4)
    publication = Publication.first(np.ones(LONG, np.float32), 4)
    with pytest.raises(LocalProtocolError, match=rf"number {place} of a vector .* up to 65504"):
        publication.then(wrong)


def test_a_vector_of_another_type_or_shape_is_a_fault_of_ours() -> None:
    publication = Publication.first(np.ones(3, np.float32), 4)
    with pytest.raises(LocalProtocolError, match="another layout"):
        publication.then(np.ones(4, np.float32))
    for wrong in (np.ones(3), np.ones((3, 1), np.float32)):
        with pytest.raises(LocalProtocolError, match="pass one vector of f32"):
            Publication.first(wrong, 4)
    with pytest.raises(LocalProtocolError, match="pass one vector of f32"):
        publication.then(np.ones(3))


@given(sizes, widths, st.data())
def test_any_bytes_give_a_finite_vector_that_f16_holds_or_a_remote_protocol_error(
    size: int, bits: Bits, data: st.DataObject
) -> None:
    right = [copy_size_bytes(size), *(n * coded_size_bytes(size, bits) for n in range(4))]
    length = data.draw(st.sampled_from(right) | st.integers(0, 40))
    zeros_or_any = st.just(bytes(length)) | st.binary(min_size=length, max_size=length)
    blob = data.draw(zeros_or_any)
    for read in (
        lambda: whole(blob, size),
        lambda: followed(np.ones(size, np.float32), blob, bits),
        lambda: followed(np.ones(size, np.float32), deflated(blob), bits),
    ):
        with contextlib.suppress(RemoteProtocolError):
            vector = read()
            assert np.isfinite(vector).all()
            assert in_f16(vector).tobytes() == vector.tobytes()


@pytest.mark.parametrize(
    ("blob", "clause"),
    [
        (b"", "cut short: it takes 154"),
        (bytes(154), "what should be deflated is not"),
        (deflated(bytes(155)), "it takes 154"),
        (deflated(bytes(154)) * 9, "more than 8 differences at once"),
        (deflated(bytes(154)) + b"x", "it takes 154"),
        (deflated(bytes(154)) + deflated(b"\xff" * 154), "scale of block 0 is negative or not"),
        (deflated(bytes(153) + b"\x80"), "number 299 is coded as -8"),
    ],
)
def test_differences_that_do_not_hold_are_refused_with_the_reason(blob: bytes, clause: str) -> None:
    with pytest.raises(RemoteProtocolError, match=clause):
        followed(np.ones(300, np.float32), blob, 4)


@pytest.mark.parametrize(
    ("blob", "clause"),
    [
        (bytes(599), "a whole copy of 599 bytes: 300 numbers in f16 take 600"),
        (bytes(598) + b"\x00\x7c", "number 299 of a whole copy is not finite"),
        (bytes(400) + b"\x01\xfe" * 100, "number 200 of a whole copy is not finite"),
    ],
)
def test_a_whole_copy_that_does_not_hold_is_refused_with_the_reason(
    blob: bytes, clause: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=clause):
        whole(blob, 300)


def test_a_hostile_difference_gives_numbers_that_f16_can_hold() -> None:
    blob = encode(np.full(300, 458_528, np.float32), 4).blob
    assert (followed(np.ones(300, np.float32), deflated(blob), 4) == F16_MAX).all()
