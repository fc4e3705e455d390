"""Flat vectors as integers of 4 or 8 bits, what rounding loses carried over to the next vector.

Integers are symmetric, with one f16 scale for each block of 256 numbers; the last block may be
shorter. The code of a vector is its scales, little-endian, followed by its integers in two's
complement, two of 4 bits to a byte, the earlier one in the low half. Its size follows from the
number of numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.codec import Buffer
from protocol.errors import LocalProtocolError, RemoteProtocolError

Bits = Literal[4, 8]
Vector = npt.NDArray[np.float32]

CODECS: Mapping[str, Bits] = {"deflate-4": 4, "deflate-8": 8}
"""What the codecs are called among the features of a handshake; another format takes a new name."""

BLOCK = 256
F16 = np.dtype("<f2")
F16_MAX = np.float32(65504)
F16_INFINITY = 0x7C00  # as an integer: every f16 with a sign, infinite or not a number is no less

_LARGEST: Mapping[Bits, np.float32] = {4: np.float32(7), 8: np.float32(127)}
_SMALLEST_SCALE = np.float32(2.0**-24)
_PIECE = 1024 * BLOCK  # what is worked on at once: stays in the cache, bounds temporary memory

_Item = TypeVar("_Item", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coded:
    """A vector, coded.

    Attributes:
        blob: What travels, `coded_size_bytes` long.
        decoded: What `decode` makes of it, the same bits. Shape (num_values,).
    """

    blob: bytes
    decoded: Vector


def coded_size_bytes(num_values: int, bits: Bits) -> int:
    """Return the size of the code of a vector of so many numbers."""
    return _num_blocks(num_values) * F16.itemsize + -(-num_values * bits // 8)


class Code:
    """The code of one vector, written or read piece by piece: each stays in the processor's cache.

    Attributes:
        blob: The code itself. Shape (coded_size_bytes,), uint8.
    """

    __slots__ = ("_bits", "_packed", "_scales", "blob")

    def __init__(self, blob: npt.NDArray[np.uint8], num_values: int, bits: Bits) -> None:
        self.blob = blob
        self._bits = bits
        end = _num_blocks(num_values) * F16.itemsize
        self._scales, self._packed = blob[:end].view(F16), blob[end:]

    @classmethod
    def blank(cls, num_values: int, bits: Bits) -> Code:
        """Return a code whose every piece is still to be written."""
        return cls(np.empty(coded_size_bytes(num_values, bits), np.uint8), num_values, bits)

    @classmethod
    def received(cls, blob: Buffer, num_values: int, bits: Bits) -> Code:
        """Return a code that came from a peer, its size and scales checked.

        Raises:
            RemoteProtocolError: `encode` never makes such a size or such scales.
        """
        raw = np.frombuffer(blob, np.uint8)
        size_bytes = coded_size_bytes(num_values, bits)
        if raw.size != size_bytes:
            raise RemoteProtocolError(
                f"a code of {raw.size} bytes: {num_values} numbers of {bits} bits take {size_bytes}"
            )
        code = cls(raw, num_values, bits)
        wrong = code._scales.view("<u2") >= F16_INFINITY
        if wrong.any():
            raise RemoteProtocolError(
                f"the scale of block {wrong.argmax()} is negative or not finite"
            )
        return code

    def write(self, numbers: slice, vector: Vector) -> Vector:
        """Code one of the `pieces`, as `encode` does, and return what will be read of it.

        Raises:
            LocalProtocolError: It holds a number that can't be coded.
        """
        rows, places = self._where(numbers)
        blocks = _in_blocks(vector, BLOCK)  # (num_blocks, BLOCK)
        scales = self._scales[rows] = _scales_for(blocks, self._bits, numbers.start)
        steps = scales.astype(np.float32)[:, np.newaxis]
        # A block of zeros has the scale 0, and whatever we divide by, it stays zero.
        integers = np.rint(blocks / np.maximum(steps, _SMALLEST_SCALE)).astype(np.int8)
        self._packed[places] = _flat(_pack(integers, self._bits), places)
        # From the integers, as `read` does: not even the sign of a zero may differ.
        return _flat(integers * steps, numbers)

    def read(self, numbers: slice) -> Vector:
        """Decode one of the `pieces`, as `decode` does.

        Raises:
            RemoteProtocolError: `write` never makes such integers.
        """
        rows, places = self._where(numbers)
        bits, packed = self._bits, self._packed[places]
        integers = _unpack(_in_blocks(packed, BLOCK * bits // 8), bits)
        if integers.reshape(-1)[numbers.stop - numbers.start :].any():
            raise RemoteProtocolError("half a byte after the last number is not zero")
        if integers.min() < -_LARGEST[bits]:
            fault = numbers.start + integers.argmin()
            raise RemoteProtocolError(f"number {fault} is coded as {integers.min()}, out of range")
        return _flat(integers * self._scales[rows].astype(np.float32)[:, np.newaxis], numbers)

    def _where(self, numbers: slice) -> tuple[slice, slice]:
        """Return the blocks of a piece, and the bytes of its integers."""
        rows = slice(numbers.start // BLOCK, _num_blocks(numbers.stop))
        return rows, slice(numbers.start * self._bits // 8, -(-numbers.stop * self._bits // 8))


def pieces(num_values: int) -> Iterator[slice]:
    """Yield the pieces that the numbers of a vector are worked on in, in order."""
    for start in range(0, num_values, _PIECE):
        yield slice(start, min(start + _PIECE, num_values))


def encode(vector: Vector, bits: Bits) -> Coded:
    """Code a vector, each number as the nearest multiple of its block's scale.

    The scale is the block's largest magnitude over 7 (4 bits) or 127 (8 bits), rounded *up* to f16:
    nothing is clipped, and |number - decoded| <= scale / 2, up to a float's last bit. A scale is at
    least 2**-24 unless its block is all zeros, so a number of magnitude up to 2**-25 can become 0.

    Args:
        vector: Finite numbers of magnitude up to 65504 times 7 or 127. Shape (num_values,).
        bits: The width of an integer.

    Raises:
        LocalProtocolError: It is no vector of f32, or holds a number that can't be coded.
    """
    check_vector(vector)
    code, decoded = Code.blank(vector.size, bits), np.empty(vector.size, np.float32)
    for numbers in pieces(vector.size):
        decoded[numbers] = code.write(numbers, vector[numbers])
    return Coded(blob=code.blob.tobytes(), decoded=decoded)


def decode(blob: Buffer, num_values: int, bits: Bits) -> Vector:
    """Return the vector that a peer coded, finite whatever the bytes. Shape (num_values,).

    A product of an integer and an f16 scale is exact in f32, hence the same bits everywhere.

    Args:
        blob: What came from the peer; nothing about it is trusted.
        num_values: How many numbers there are by our own layout.
        bits: The width that was agreed on.

    Raises:
        RemoteProtocolError: `encode` never makes such bytes; it names the first fault.
    """
    code, vector = Code.received(blob, num_values, bits), np.empty(num_values, np.float32)
    for numbers in pieces(num_values):
        vector[numbers] = code.read(numbers)
    return vector


def check_vector(vector: Vector) -> None:
    """Check that an array of ours is what this module is for.

    Raises:
        LocalProtocolError: It is no vector of f32.
    """
    if vector.ndim != 1 or vector.dtype != np.float32:
        raise LocalProtocolError(
            f"an array {vector.dtype}{list(vector.shape)} can't be coded: pass one vector of f32"
        )


class Feedback:
    """The sender's memory of one link: what rounding lost is added to the next vector.

    The sum of all that was decoded is the sum of all that was coded less the residual, which is at
    most half a scale a number. The residual holds rounding errors only, never a vector that was
    lost or refused, so nothing is sent again and nothing piles up, whatever the receiver does: it
    is at most 1/12 (4 bits) or 1/252 (8 bits) of the largest magnitude ever coded, plus 2**-24. It
    outlives its vector, though: `reset` when the receiver starts anew, and after a pause in which
    vectors have become so small that what is owed would drown them.
    """

    __slots__ = ("_bits", "_residual")

    def __init__(self, bits: Bits) -> None:
        self._bits = bits
        self._residual: Vector | None = None

    @property
    def bits(self) -> Bits:
        """The width of an integer."""
        return self._bits

    @property
    def residual(self) -> Vector | None:
        """What is owed to the receiver, None at first. Shape (num_values,)."""
        return self._residual

    def code(self, vector: Vector) -> Coded:
        """Code a vector and what is owed; a vector that can't be coded leaves that as it was.

        Args:
            vector: As `encode` takes it, and always of one size. Shape (num_values,).

        Raises:
            LocalProtocolError: It can't be coded, or has another shape than the one before.
        """
        total = vector
        if self._residual is not None:
            if vector.shape != self._residual.shape:
                raise LocalProtocolError(
                    f"a vector of shape {list(vector.shape)} on a link that carries "
                    f"{list(self._residual.shape)}: keep a feedback for each link and layout"
                )
            total = vector + self._residual
        coded = encode(total, self._bits)
        self._residual = total - coded.decoded
        return coded

    def reset(self) -> None:
        """Owe nothing any more."""
        self._residual = None


def _scales_for(blocks: Vector, bits: Bits, start: int) -> npt.NDArray[np.float16]:
    """Return the smallest scale with which the numbers of each block fit. Shape (num_blocks,).

    Args:
        blocks: Shape (num_blocks, BLOCK).
        bits: The width of an integer.
        start: Where in the vector the blocks begin, to name a fault.

    Raises:
        LocalProtocolError: A number is not finite or too large.
    """
    largest = _LARGEST[bits]
    magnitudes = np.abs(blocks)
    peaks = magnitudes.max(axis=1)
    if not (peaks <= largest * F16_MAX).all():  # not so for what is not a number, either
        fault = int((~(magnitudes <= largest * F16_MAX)).argmax())
        raise LocalProtocolError(
            f"number {start + fault} of a vector is {blocks.reshape(-1)[fault]:g}; {bits} bits "
            f"code finite numbers up to {largest * F16_MAX:.0f}: drop this vector, and lower the "
            "learning rate if training diverges"
        )
    scales: npt.NDArray[np.float16] = (peaks / largest).astype(F16)
    # An integer times an f16 scale is exact in f32, and so is what this compares.
    scales.view("<u2")[...] += scales.astype(np.float32) * largest < peaks
    return scales


def _pack(integers: npt.NDArray[np.int8], bits: Bits) -> npt.NDArray[np.uint8]:
    """Return rows of integers as rows of bytes."""
    if bits == 8:
        return integers.view(np.uint8)
    pairs = integers.view("<u2")  # the earlier of two in the low byte
    return ((pairs & 0x0F) | (pairs >> 4 & 0xF0)).astype(np.uint8)


def _unpack(packed: npt.NDArray[np.uint8], bits: Bits) -> npt.NDArray[np.int8]:
    """Return rows of bytes as rows of integers."""
    if bits == 8:
        return packed.view(np.int8)
    pairs = packed.astype("<u2")
    nibbles = ((pairs | pairs << 4) & 0x0F0F).view(np.int8)
    integers: npt.NDArray[np.int8] = (nibbles ^ 8) - 8  # extends the sign
    return integers


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def _in_blocks(array: npt.NDArray[_Item], width: int) -> npt.NDArray[_Item]:
    """Return rows of `width`, in a copy with zeros at the end where the last one isn't full."""
    missing = -array.size % width
    if missing:
        array = np.concatenate((array, np.zeros(missing, array.dtype)))
    return array.reshape(-1, width)


def _flat(rows: npt.NDArray[_Item], wanted: slice) -> npt.NDArray[_Item]:
    """Return rows as one, without what fills up the last."""
    return rows.reshape(-1)[: wanted.stop - wanted.start]
