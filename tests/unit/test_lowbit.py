"""Coded vectors keep their error bound, their size and their bytes; received ones are checked."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.lowbit import (
    BLOCK,
    CODECS,
    F16,
    F16_MAX,
    Bits,
    Feedback,
    Vector,
    coded_size_bytes,
    decode,
    encode,
)

LARGEST = {4: 7, 8: 127}
PIECE = 1024 * BLOCK  # encode and decode work on so many numbers at once

widths = st.sampled_from(get_args(Bits))
sizes = st.sampled_from((0, 1, 2, 3, 255, 256, 257, 511, 700)) | st.integers(0, 40)


@st.composite
def vectors(draw: st.DrawFn, size: int | None = None) -> Vector:
    """Any numbers that 4 bits can code, or blocks of numbers whose magnitudes differ widely."""
    length = draw(sizes) if size is None else size
    if length <= 40 and draw(st.booleans()):
        numbers = st.floats(-458_528, 458_528, width=32)
        return draw(hnp.arrays(np.float32, length, elements=numbers))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    exponents = rng.uniform(-10, 4, -(-length // BLOCK)).repeat(BLOCK)[:length]
    return (rng.normal(size=length) * 10**exponents).astype(np.float32)


def scales_in(blob: bytes, num_values: int) -> npt.NDArray[np.float64]:
    """Return the scale of each number in a blob."""
    scales = np.frombuffer(blob[: -(-num_values // BLOCK) * 2], F16).astype(np.float64)
    return scales.repeat(BLOCK)[:num_values]


def peaks_of(vector: Vector) -> npt.NDArray[np.float64]:
    """Return the largest magnitude of each block."""
    starts = range(0, len(vector), BLOCK)
    return np.array([np.abs(vector[start : start + BLOCK]).max() for start in starts], np.float64)


@given(vectors(), widths)
def test_no_number_is_off_by_more_than_half_a_scale(vector: Vector, bits: Bits) -> None:
    coded = encode(vector, bits)
    error = np.abs(vector.astype(np.float64) - coded.decoded)
    assert (error <= scales_in(coded.blob, len(vector)) / 2 * (1 + 2**-15)).all()


@given(vectors(), widths)
def test_a_scale_is_the_smallest_with_which_its_block_fits(vector: Vector, bits: Bits) -> None:
    scales = np.frombuffer(encode(vector, bits).blob[: -(-len(vector) // BLOCK) * 2], "<u2")
    peaks = peaks_of(vector)
    assert (scales.view(F16).astype(np.float64) * LARGEST[bits] >= peaks).all()
    smaller = (scales[peaks > 0] - 1).view(F16).astype(np.float64)
    assert (smaller * LARGEST[bits] < peaks[peaks > 0]).all()
    assert not scales[peaks == 0].any()


@given(vectors(), widths)
def test_a_reader_decodes_the_very_bits_that_the_writer_saw(vector: Vector, bits: Bits) -> None:
    coded = encode(vector, bits)
    for blob in (coded.blob, bytearray(coded.blob), memoryview(coded.blob)):
        assert decode(blob, len(vector), bits).tobytes() == coded.decoded.tobytes()


@given(vectors(), widths)
def test_the_size_of_a_code_follows_from_the_number_of_numbers(vector: Vector, bits: Bits) -> None:
    size_bytes = -(-len(vector) // 256) * 2 + (len(vector) * bits + 7) // 8
    assert coded_size_bytes(len(vector), bits) == size_bytes == len(encode(vector, bits).blob)


@pytest.mark.parametrize(("bits", "share"), [(4, 0.127), (8, 0.252)])
def test_a_code_is_about_an_eighth_or_a_quarter_of_the_numbers_in_f32(
    bits: Bits, share: float
) -> None:
    assert coded_size_bytes(10**12, bits) / (4 * 10**12) == pytest.approx(share, abs=5e-4)


@given(vectors(), widths)
def test_a_view_of_other_numbers_codes_as_its_copy_does(vector: Vector, bits: Bits) -> None:
    every_third = np.full((len(vector), 3), np.nan, np.float32)
    every_third[:, 1] = vector
    view = every_third[:, 1]
    view.flags.writeable = False
    assert encode(view, bits).blob == encode(vector, bits).blob


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("extra", [0, 1, BLOCK + 3])
def test_a_long_vector_codes_as_its_blocks_do(bits: Bits, extra: int) -> None:
    vector = np.random.default_rng(extra).normal(size=PIECE + extra).astype(np.float32)
    vector[PIECE - BLOCK :] *= 100
    coded = encode(vector, bits)
    parts = [encode(part, bits) for part in (vector[:PIECE], vector[PIECE:])]
    cuts = [-(-len(part) // BLOCK) * 2 for part in (vector[:PIECE], vector[PIECE:])]
    pairs = list(zip(parts, cuts, strict=True))
    halves = [part.blob[:cut] for part, cut in pairs] + [part.blob[cut:] for part, cut in pairs]
    assert coded.blob == b"".join(halves)
    assert decode(coded.blob, len(vector), bits).tobytes() == coded.decoded.tobytes()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_come_back_as_zeros_and_so_does_what_is_under_half_the_smallest_scale(
    bits: Bits, zero: float
) -> None:
    zeros = np.full(600, zero, np.float32)
    coded = encode(zeros, bits)
    assert coded.blob == bytes(coded_size_bytes(600, bits))
    assert decode(coded.blob, 600, bits).tobytes() == np.zeros(600, np.float32).tobytes()
    for tiny in (1e-45, 1e-39, 2.0**-25):
        assert not encode(zeros + np.float32(tiny), bits).decoded.any()
    assert (encode(zeros + np.float32(2.0**-24), bits).decoded == 2.0**-24).all()


@pytest.mark.parametrize(
    ("bits", "numbers", "blob"),
    [
        (4, [0, 1, -1, 7, -7], "003c107f09"),
        (8, [0, 1, -1, 127, -127], "003c0001ff7f81"),
        (4, [0.1, -0.3, 0.2], "7d299205"),
        (8, [0.1, -0.3, 0.2], "d7182a8155"),
    ],
)
def test_the_bytes_of_a_code_are_for_ever(bits: Bits, numbers: Sequence[float], blob: str) -> None:
    vector = np.array(numbers, np.float32)
    assert encode(vector, bits).blob.hex() == blob
    across = np.concatenate((np.zeros(BLOCK, np.float32), vector))  # in the second block
    scale, integers = bytes.fromhex(blob)[:2], bytes.fromhex(blob)[2:]
    assert encode(across, bits).blob == bytes(2) + scale + bytes(BLOCK * bits // 8) + integers


def test_the_codecs_have_names_for_the_handshake() -> None:
    assert CODECS == {"deflate-4": 4, "deflate-8": 8}


@given(sizes, widths, st.data())
def test_any_bytes_are_a_finite_vector_or_a_remote_protocol_error(
    size: int, bits: Bits, data: st.DataObject
) -> None:
    right = coded_size_bytes(size, bits)
    blob = data.draw(st.binary(max_size=300) | st.binary(min_size=right, max_size=right))
    with contextlib.suppress(RemoteProtocolError):
        vector = decode(blob, size, bits)
        assert vector.shape == (size,)
        assert np.isfinite(vector).all()


@given(sizes, widths, st.integers(0, 2**32))
def test_any_scales_and_integers_within_their_ranges_are_decoded_to_their_products(
    size: int, bits: Bits, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 0x7C00, -(-size // BLOCK)).astype("<u2").view(F16)
    integers = rng.integers(-LARGEST[bits], LARGEST[bits] + 1, size).tolist()
    if bits == 4:
        pairs = itertools.zip_longest(integers[::2], integers[1::2], fillvalue=0)
        packed = bytes((low & 15) | (high & 15) << 4 for low, high in pairs)
    else:
        packed = bytes(integer & 255 for integer in integers)
    products = [float(scales[place // BLOCK]) * each for place, each in enumerate(integers)]
    assert decode(scales.tobytes() + packed, size, bits).tolist() == products


@given(sizes.filter(bool), widths, st.data())
def test_a_flipped_bit_is_refused_or_changes_the_vector(
    size: int, bits: Bits, data: st.DataObject
) -> None:
    coded = encode(np.random.default_rng(size).normal(size=size).astype(np.float32), bits)
    blob = bytearray(coded.blob)
    place = data.draw(st.integers(0, 8 * len(blob) - 1))
    blob[place // 8] ^= 1 << place % 8
    with contextlib.suppress(RemoteProtocolError):
        assert not np.array_equal(decode(blob, size, bits), coded.decoded)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("change", [-1, 1, 300])
def test_a_code_of_another_size_is_refused(bits: Bits, change: int) -> None:
    size_bytes = coded_size_bytes(300, bits)
    with pytest.raises(RemoteProtocolError, match=rf"{size_bytes + change} bytes.*{size_bytes}"):
        decode(bytes(size_bytes + change), 300, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [0x7C00, 0x7C01, 0x7FFF, 0x8000, 0x8001, 0xBC00, 0xFC00, 0xFFFF])
def test_a_scale_that_is_negative_or_not_finite_is_refused(bits: Bits, scale: int) -> None:
    blob = bytearray(encode(np.ones(600, np.float32), bits).blob)
    blob[2:4] = scale.to_bytes(2, "little")
    with pytest.raises(RemoteProtocolError, match="scale of block 1 is negative or not finite"):
        decode(blob, 600, bits)


@pytest.mark.parametrize(
    ("bits", "place", "byte", "number"), [(4, 2, 0x18, 4), (4, 2, 0x81, 5), (8, 3, 0x80, 3)]
)
def test_an_integer_without_its_opposite_is_refused(
    bits: Bits, place: int, byte: int, number: int
) -> None:
    blob = bytearray(encode(np.ones(7, np.float32), bits).blob)
    blob[2 + place] = byte
    lowest = -8 if bits == 4 else -128
    with pytest.raises(RemoteProtocolError, match=f"number {number} is coded as {lowest}"):
        decode(blob, 7, bits)


@pytest.mark.parametrize("nibble", [0x10, 0x80, 0xF0])
def test_bits_after_the_last_number_are_refused(nibble: int) -> None:
    blob = bytearray(encode(np.ones(7, np.float32), 4).blob)
    blob[-1] |= nibble
    with pytest.raises(RemoteProtocolError, match="half a byte"):
        decode(blob, 7, 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_scale_gives_finite_numbers_and_is_the_end_of_what_can_be_coded(
    bits: Bits,
) -> None:
    largest = np.float32(LARGEST[bits]) * F16_MAX
    vector = np.array([largest, -largest], np.float32)
    coded = encode(vector, bits)
    assert coded.blob[:2] == b"\xff\x7b"
    assert np.array_equal(decode(coded.blob, 2, bits), vector)
    beyond = np.nextafter(largest, np.float32(np.inf))
    with pytest.raises(LocalProtocolError, match=f"number 0 .* finite numbers up to {largest:.0f}"):
        encode(np.array([beyond], np.float32), bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("place", [0, 299, PIECE + 5])
def test_a_number_that_cannot_be_coded_is_named(bits: Bits, number: float, place: int) -> None:
    vector = np.ones(place + 20, np.float32)
    vector[place] = number
    with pytest.raises(
        LocalProtocolError, match=rf"number {place} of a vector is {re.escape(f'{number:g}')};"
    ):
        encode(vector, bits)


@pytest.mark.parametrize(
    "array", [np.zeros(3), np.zeros(3, np.float16), np.zeros((2, 2), np.float32)]
)
def test_only_a_vector_of_f32_is_coded(array: npt.NDArray[np.float32]) -> None:
    with pytest.raises(LocalProtocolError, match="pass one vector of f32"):
        encode(array, 8)


gradients = sizes.flatmap(lambda size: st.lists(vectors(size), min_size=1, max_size=12))


@given(gradients, widths)
def test_all_that_was_decoded_is_all_that_was_coded_within_half_the_last_scale(
    vectors_: list[Vector], bits: Bits
) -> None:
    feedback = Feedback(bits)
    decoded, true = np.zeros((2, len(vectors_[0])))
    for count, vector in enumerate(vectors_, start=1):
        coded = feedback.code(vector / 2)  # so that what is owed never takes it out of range
        decoded += coded.decoded
        true += vector / 2
        scales = scales_in(coded.blob, len(vector))
        rounding = count * 2**-24 * np.abs(vectors_).max(initial=0)  # of the sums in f32
        assert (np.abs(decoded - true) <= scales / 2 * (1 + 2**-15) + rounding).all()


@given(gradients, widths)
def test_what_is_owed_is_bounded_by_the_largest_number_ever_coded(
    vectors_: list[Vector], bits: Bits
) -> None:
    feedback, largest = Feedback(bits), 0.0
    for vector in vectors_:
        feedback.code(vector / 2)
        largest = max(largest, np.abs(vector / 2).max(initial=0))
        assert feedback.residual is not None
        bound = largest / {4: 12, 8: 252}[bits] + 2**-24
        assert np.abs(feedback.residual).max(initial=0) <= bound


@pytest.mark.parametrize("bits", [4, 8])
def test_a_number_too_small_for_its_block_is_delivered_in_time(bits: Bits) -> None:
    feedback = Feedback(bits)
    vector = np.array([1.0, 0.001], np.float32)
    total = sum(feedback.code(vector).decoded.astype(np.float64) for _ in range(1000))
    assert total == pytest.approx([1000, 1], abs=0.5 / LARGEST[bits] * 1.1)


def test_a_link_that_is_reset_owes_nothing() -> None:
    feedback, vector = Feedback(4), np.array([1.0, 0.3], np.float32)
    first = feedback.code(vector).blob
    feedback.code(np.array([0.2, 0.2], np.float32))
    feedback.reset()
    assert feedback.residual is None
    assert feedback.code(vector).blob == first


def test_a_vector_that_cannot_be_coded_leaves_what_is_owed() -> None:
    feedback = Feedback(8)
    feedback.code(np.array([1.0, 0.3], np.float32))
    assert feedback.residual is not None
    owed = feedback.residual.copy()
    for wrong in (np.array([np.nan, 0], np.float32), np.zeros(3, np.float32)):
        with pytest.raises(LocalProtocolError):
            feedback.code(wrong)
        assert np.array_equal(feedback.residual, owed)
