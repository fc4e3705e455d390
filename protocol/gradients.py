"""Gradients as they travel to one receiver: coded, what rounding loses made up for, or whole."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from protocol.deflate import Bytes, deflate, inflate, most_deflated
from protocol.editions import codec_of
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.lowbit import CODECS, Bits, Code, Feedback, coded_size_bytes, pieces
from protocol.messages import Encoding, GradientUpdate, PeerId
from protocol.tensors import Layout, Tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parcel:
    """A gradient, ready to be sent.

    Attributes:
        update: As the receiver will hold it, the same bits.
        encoding: How the bytes are to be read.
        blob: The bytes.
    """

    update: GradientUpdate
    encoding: Encoding
    blob: Bytes


class Feedbacks:
    """The feedback of each link of a sender, as many as fit the memory given to them.

    Each takes as much as a gradient. The one whose link was used longest ago goes first: what it
    owed is lost, half a rounding step at most.

    Args:
        layout: Of the gradients.
        bits: The codec's width, None for no codec and no feedback.
        max_bytes: For all of them together; one is kept in any case.
    """

    def __init__(self, layout: Layout, bits: Bits | None, max_bytes: int) -> None:
        self._bits = bits
        self._most = max(1, max_bytes // max(layout.size_bytes, 1))
        self._feedbacks: dict[PeerId, Feedback] = {}  # the longest unused first

    def __len__(self) -> int:
        return len(self._feedbacks)

    def of(self, receiver: PeerId, features: Collection[str]) -> Feedback | None:
        """Return the feedback of a link, None where what goes there isn't coded.

        Args:
            receiver: Who is at the other end.
            features: What it has announced.
        """
        if self._bits is None or codec_of(self._bits) not in features:
            return None
        feedback = self._feedbacks.pop(receiver, None)
        if feedback is None:
            feedback = Feedback(self._bits)
            if len(self._feedbacks) == self._most:
                del self._feedbacks[next(iter(self._feedbacks))]
        self._feedbacks[receiver] = feedback
        return feedback

    def keep_only(self, receivers: Collection[PeerId]) -> None:
        """Forget the links to all others: whoever comes back starts anew."""
        for receiver in self._feedbacks.keys() - set(receivers):
            del self._feedbacks[receiver]


def pack(update: GradientUpdate, feedback: Feedback | None) -> Parcel:
    """Return a gradient as it travels on one link.

    A gradient that can't be coded, since a number isn't finite or is huge, travels as it is:
    whoever gets it is to judge it.

    Args:
        update: The gradient, f32.
        feedback: Of the link, which remembers it; None to send it as it is.
    """
    gradient = update.gradient
    if feedback is not None and gradient.buffer.size:
        try:
            coded = feedback.code(gradient.flat_f32())
        except LocalProtocolError:
            pass
        else:
            decoded = Tensors(gradient.layout, coded.decoded.view(np.uint8))
            return Parcel(
                update=replace(update, gradient=decoded),
                encoding=codec_of(feedback.bits),
                blob=deflate(np.frombuffer(coded.blob, np.uint8)),
            )
    return Parcel(update=update, encoding=Encoding.F32, blob=gradient.buffer)


def room_for(layout: Layout, encoding: Encoding) -> int:
    """Return how many bytes a gradient takes at most on its way."""
    if encoding not in CODECS:
        return layout.size_bytes
    return most_deflated(coded_size_bytes(layout.size_bytes // 4, CODECS[encoding]))


def check_parcel(layout: Layout, encoding: Encoding, size_bytes: int) -> None:
    """Check what a peer announces to send, before memory is taken for it.

    Args:
        layout: Of our gradients.
        encoding: As announced.
        size_bytes: As announced.

    Raises:
        RemoteProtocolError: No gradient travels like that.
    """
    if encoding == Encoding.F16:
        raise RemoteProtocolError(f"a gradient as {encoding}: that is for models only")
    most = room_for(layout, encoding)
    least, right = (1, f"at most {most}") if encoding in CODECS else (most, str(most))
    if not least <= size_bytes <= most:
        raise RemoteProtocolError(
            f"a gradient of {size_bytes} bytes as {encoding}, ours have {right}"
        )


def unpack(layout: Layout, encoding: Encoding, blob: Bytes, out: Bytes) -> Tensors:
    """Return a gradient that a peer sent, verified: finite, nothing in the gaps.

    Args:
        layout: Of our gradients.
        encoding: As `check_parcel` has let it pass.
        blob: What came; not trusted.
        out: Memory for the gradient, which a whole one doesn't need. Shape (layout.size_bytes,).

    Raises:
        RemoteProtocolError: The bytes don't hold; it says which.
    """
    gradient = Tensors(layout, blob if encoding == Encoding.F32 else out)
    if encoding != Encoding.F32:
        vector, bits = gradient.flat_f32(), CODECS[encoding]
        raw, rest = inflate(blob.data, coded_size_bytes(vector.size, bits))
        if rest:
            raise RemoteProtocolError(f"{len(rest)} bytes after a gradient")
        code = Code.received(raw, vector.size, bits)
        for numbers in pieces(vector.size):
            vector[numbers] = code.read(numbers)
    gradient.check_received()
    return gradient
