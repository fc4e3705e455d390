"""A vector published again and again as coded differences, and how a reader follows it.

The owner keeps the *public copy*: what readers make of all that it has published, its numbers kept
in f32 but always such as f16 can hold. A publication moves it toward the owner's vector by one
coded difference, so what rounding lost is part of the next. A reader takes the differences that it
missed, deflated, or, where that is no more bytes, the whole copy in f16; either way it holds the
owner's public copy, bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.codec import Buffer
from protocol.deflate import Bytes, deflate, inflate
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.lowbit import (
    F16,
    F16_INFINITY,
    F16_MAX,
    Bits,
    Code,
    Vector,
    check_vector,
    coded_size_bytes,
    pieces,
)
from protocol.tensors import allocate

Halves = npt.NDArray[np.float16]

MAX_DIFFERENCES = 8
"""How many differences an owner keeps, and a reader takes at once."""

_EXPONENT = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)
_SMALLEST_NORMAL = np.float32(2.0**-14)
_ONLY_F16_DIGITS = np.float32(1.5 * 2.0**13)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Publication:
    """What an owner has published up to now; immutable, and so are its arrays.

    It holds as many differences as together are smaller than a whole copy, `MAX_DIFFERENCES` at
    most: of 4 bits four to eight, of a vector of a few numbers fewer or none.

    Attributes:
        bits: The width of the integers in differences.
        vector: The public copy. Shape (num_values,).
        copy: The same numbers in f16, little-endian. Shape (num_values,).
        differences: The newest differences, each coded and deflated, the last one leading to
            `vector`.
    """

    bits: Bits
    vector: Vector
    copy: Halves
    differences: tuple[Bytes, ...] = ()

    @classmethod
    def first(cls, vector: Vector, bits: Bits) -> Publication:
        """Begin to publish: who holds nothing takes this one as a whole copy.

        Args:
            vector: Finite numbers of magnitude up to 65504. Shape (num_values,).
            bits: The width of the integers in differences.

        Raises:
            LocalProtocolError: It is no vector of f32, or a number isn't finite or is beyond f16.
        """
        check_vector(vector)
        public, copy = _blank(vector.size)
        for numbers in pieces(vector.size):
            public[numbers] = copy[numbers] = _target(vector[numbers], numbers.start)
        return cls(bits=bits, vector=public, copy=copy)

    @classmethod
    def held(cls, vector: Vector, bits: Bits) -> Publication:
        """Begin with a public copy that readers hold already: nobody is sent this one.

        Args:
            vector: Such as f16 can hold. Shape (num_values,).
            bits: The width of the integers in differences.
        """
        return cls(bits=bits, vector=vector, copy=np.empty(0, F16))

    def then(self, vector: Vector) -> Publication:
        """Return what is published after this: the public copy has moved toward a vector.

        The difference is taken to the vector *as rounded to f16*. What a copy in f16 can never hold
        would otherwise stay in the difference for ever and, where the numbers of a block are of
        different sizes, keep the scale too coarse for the small ones. As it is, publishing the same
        vector again and again ends exactly at that vector in f16.

        Args:
            vector: As for the first publication, and of the same shape.

        Raises:
            LocalProtocolError: As there, or the shape differs.
        """
        check_vector(vector)
        if vector.shape != self.vector.shape:
            raise LocalProtocolError(
                f"a vector of shape {list(vector.shape)} can't follow one of "
                f"{list(self.vector.shape)}: start another publication for another layout"
            )
        size, code = vector.size, Code.blank(vector.size, self.bits)
        public, copy = _blank(size)
        for numbers in pieces(size):
            before = self.vector[numbers]
            difference = _target(vector[numbers], numbers.start) - before
            public[numbers] = copy[numbers] = _moved(before, code.write(numbers, difference))
        differences = (*self.differences, deflate(code.blob))
        return Publication(
            bits=self.bits, vector=public, copy=copy, differences=_worth_sending(differences, size)
        )


def copy_size_bytes(num_values: int) -> int:
    """Return the size of a whole copy, which is also more than any differences take."""
    return num_values * F16.itemsize


def read_copy(blob: Buffer, out: Vector) -> None:
    """Write the public copy that a peer sent whole.

    Args:
        blob: What came from the owner; nothing about it is trusted.
        out: Where to. Shape (num_values,).

    Raises:
        RemoteProtocolError: It has another size or holds a number that isn't finite.
    """
    raw = np.frombuffer(blob, np.uint8)
    if raw.size != copy_size_bytes(out.size):
        raise RemoteProtocolError(
            f"a whole copy of {raw.size} bytes: {out.size} numbers in f16 take "
            f"{copy_size_bytes(out.size)}"
        )
    halves, patterns = raw.view(F16), raw.view("<u2")
    for numbers in pieces(out.size):
        wrong = (patterns[numbers] & 0x7FFF) >= F16_INFINITY
        if wrong.any():
            fault = numbers.start + int(wrong.argmax())
            raise RemoteProtocolError(f"number {fault} of a whole copy is not finite")
        out[numbers] = halves[numbers]


def follow(public: Vector, blob: Buffer, bits: Bits, out: Vector) -> None:
    """Write the public copy that one or more differences lead to, the same bits as the owner's.

    Args:
        public: The public copy before them. Shape (num_values,).
        blob: The differences, one after the other; nothing about it is trusted.
        bits: The width that was agreed on.
        out: Where to; not where `public` is. Shape (num_values,).

    Raises:
        RemoteProtocolError: `Publication` never makes such differences; it says what is wrong.
    """
    held, count = public, 0
    while blob or not count:  # one code in memory at a time
        if count == MAX_DIFFERENCES:
            raise RemoteProtocolError(f"more than {MAX_DIFFERENCES} differences at once")
        raw, blob = inflate(blob, coded_size_bytes(public.size, bits))
        code = Code.received(raw, public.size, bits)
        for numbers in pieces(public.size):
            out[numbers] = _moved(held[numbers], code.read(numbers))
        held, count = out, count + 1


def _worth_sending(differences: Sequence[Bytes], num_values: int) -> tuple[Bytes, ...]:
    """Return the newest of the differences, as many as are kept."""
    newest = reversed(differences[-MAX_DIFFERENCES:])
    totals = itertools.accumulate(newest, lambda total, each: total + each.size, initial=0)
    count = sum(total < copy_size_bytes(num_values) for total in totals) - 1
    return tuple(differences[len(differences) - count :])


def _blank(num_values: int) -> tuple[Vector, Halves]:
    """Return room for a public copy, in f32 and in f16."""
    return allocate(4 * num_values).view(np.float32), np.empty(num_values, F16)


def _moved(public: Vector, difference: Vector) -> Vector:
    """Add, and round to f16: the one place where a public copy changes.

    Beyond the range of f16 the sum stays at its end. A scale too coarse by a little takes an honest
    owner there now and then, and a reader holds finite numbers whatever comes.
    """
    moved = public + difference
    return _rounded(np.clip(moved, -F16_MAX, F16_MAX, out=moved))


def _target(vector: Vector, start: int) -> Vector:
    """Return a piece of a vector of ours as a whole copy would hold it.

    Raises:
        LocalProtocolError: A number isn't finite or is beyond f16; its place counts from `start`.
    """
    fits = np.abs(vector) <= F16_MAX
    if not fits.all():
        fault = int(fits.argmin())
        raise LocalProtocolError(
            f"number {start + fault} of a vector to publish is {vector[fault]:g}; f16 holds finite "
            f"numbers up to {F16_MAX:.0f}: lower the learning rate if training diverges, or "
            "publish f32"
        )
    return _rounded(vector)


def _rounded(vector: Vector) -> Vector:
    """Round numbers within the range of f16 to the nearest that it holds, ties to even.

    Once 1.5 * 2**13 times its own power of two is added to a number, f32 has just the digits left
    that f16 has. The same bits as by conversion to f16 and back, several times as fast, and as
    indifferent to a processor that flushes subnormal numbers to zero.
    """
    powers = (vector.view(np.uint32) & _EXPONENT).view(np.float32)
    powers = np.maximum(powers, _SMALLEST_NORMAL, out=powers)
    powers *= _ONLY_F16_DIGITS
    rounded = vector + powers
    rounded -= powers
    rounded.view(np.uint32)[...] |= vector.view(np.uint32) & _SIGN  # what became 0 keeps its sign
    return rounded
