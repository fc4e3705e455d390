"""Gradients that others push to us: assembled, verified, and delivered once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.codec import Buffer
from protocol.digest import Hasher, check_digest
from protocol.errors import RemoteProtocolError
from protocol.gradients import check_parcel, room_for, unpack
from protocol.messages import (
    Encoding,
    GradientChunk,
    GradientOffer,
    GradientProgress,
    GradientUpdate,
    Message,
    PeerId,
    RefusalCode,
)
from protocol.tensors import Layout, Tensors
from protocol.transport.settings import TransportSettings
from protocol.transport.transfers import CODING

Result = TypeVar("Result")

Reply = Callable[[Message, Buffer | None], None]
"""Sends the reply to a request, now or later."""

_REMEMBERED_TRANSFERS = 64
_RETRY_SOON_S = 1.0


class Offload(Protocol):
    """Does work on so many bytes, here and now or in a thread."""

    def __call__(
        self, size_bytes: int, work: Callable[[], Result], then: Callable[[Result], None]
    ) -> None:
        """Pass on the result of the work, on the event loop."""


class Desk(Protocol):
    """What the inbox asks of who runs it."""

    def refuse(
        self, request_id: int, reply: Reply, code: RefusalCode, text: str, retry_after_s: float
    ) -> None:
        """Refuse a request."""

    def strike(self, sender: PeerId, fault: str) -> None:
        """Count a fault of a peer."""

    def deliver(self, update: GradientUpdate) -> None:
        """Take a whole, verified gradient."""


@dataclass(slots=True)
class Incoming:
    """A gradient that a peer is pushing. Every byte before `received` is there.

    A coded one has a second buffer, for what it is decoded to.
    """

    offer: GradientOffer
    buffer: npt.NDArray[np.uint8]
    decoded: npt.NDArray[np.uint8]
    used_at: float
    received: int = 0
    hasher: Hasher = field(default_factory=Hasher)
    # Who waits for its verification; None before that has begun.
    waiting: list[tuple[int, Reply]] | None = None


@dataclass(slots=True)
class _Sender:
    incoming: dict[int, Incoming] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)  # the size of each, the oldest first

    def remember(self, transfer_id: int, size_bytes: int) -> None:
        """Take note of what was delivered, and forget the oldest."""
        self.delivered[transfer_id] = size_bytes
        if len(self.delivered) > _REMEMBERED_TRANSFERS:
            del self.delivered[next(iter(self.delivered))]


class Inbox:
    """Gradients under way to us, keyed by sender and transfer id, so that they outlive connections.

    Attributes:
        held_bytes: Memory that unfinished gradients take.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        settings: TransportSettings,
        desk: Desk,
        offload: Offload,
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        now: Callable[[], float],
    ) -> None:
        self.held_bytes = 0
        self._layout = layout
        self._settings = settings
        self._desk = desk
        self._offload = offload
        self._allocate = allocate
        self._now = now
        self._senders: dict[PeerId, _Sender] = {}

    def on_offer(self, sender: PeerId, offer: GradientOffer, body: Buffer, reply: Reply) -> None:
        """Begin to receive a gradient, or go on with it."""
        try:
            check_parcel(self._layout, offer.encoding, offer.size_bytes)
        except RemoteProtocolError as error:
            self._fault(sender, offer, str(error), reply)
            return
        box = self._senders.setdefault(sender, _Sender())
        if offer.transfer_id in box.delivered:
            size = box.delivered[offer.transfer_id]
            self._progress(offer.request_id, offer.transfer_id, size, reply)
            return
        if offer.transfer_id not in box.incoming and not self._begin(box, offer):
            text = "too many gradients at once"
            self._desk.refuse(offer.request_id, reply, RefusalCode.BUSY, text, _RETRY_SOON_S)
            return
        self._append(sender, box, offer, 0, body, reply)

    def on_chunk(self, sender: PeerId, chunk: GradientChunk, body: Buffer, reply: Reply) -> None:
        """Take the next bytes of a gradient."""
        box = self._senders.get(sender, _Sender())
        if chunk.transfer_id in box.delivered:
            size = box.delivered[chunk.transfer_id]
            self._progress(chunk.request_id, chunk.transfer_id, size, reply)
        elif chunk.transfer_id not in box.incoming:
            code, text = RefusalCode.NO_TRANSFER, "offer it again"
            self._desk.refuse(chunk.request_id, reply, code, text, 0.0)
        else:
            self._append(sender, box, chunk, chunk.offset, body, reply)

    def drop(self, sender: PeerId) -> None:
        """Drop what a peer is pushing."""
        box = self._senders.get(sender, _Sender())
        for transfer_id in list(box.incoming):
            self._remove(box, transfer_id)

    def forget(self, sender: PeerId) -> None:
        """Drop what a peer is pushing, and what it has pushed."""
        self.drop(sender)
        self._senders.pop(sender, None)

    def sweep(self, horizon: float) -> None:
        """Drop what has got no byte since the horizon."""
        for box in self._senders.values():
            for transfer_id, incoming in list(box.incoming.items()):
                if incoming.used_at < horizon and incoming.waiting is None:
                    self._remove(box, transfer_id)

    def _begin(self, box: _Sender, offer: GradientOffer) -> bool:
        """Take memory for a gradient; return whether there is enough."""
        self._make_room(box)
        wanted = self._memory_for(offer)
        if self.held_bytes + wanted > self._settings.max_receive_bytes:
            return False
        self.held_bytes += wanted
        # Of one size, whatever is announced: the same memory serves one after the other.
        buffer = self._allocate(room_for(self._layout, offer.encoding))[: offer.size_bytes]
        coded = offer.encoding != Encoding.F32
        decoded = self._allocate(self._layout.size_bytes) if coded else buffer
        box.incoming[offer.transfer_id] = Incoming(offer, buffer, decoded, self._now())
        return True

    def _make_room(self, box: _Sender) -> None:
        """Drop the oldest gradients of a peer that has begun too many: its newer ones count."""
        unfinished = [key for key, incoming in box.incoming.items() if incoming.waiting is None]
        excess = len(box.incoming) + 1 - self._settings.max_incoming_per_peer
        for transfer_id in unfinished[: max(excess, 0)]:
            self._remove(box, transfer_id)

    def _remove(self, box: _Sender, transfer_id: int) -> None:
        self.held_bytes -= self._memory_for(box.incoming.pop(transfer_id).offer)

    def _memory_for(self, offer: GradientOffer) -> int:
        decoded = 0 if offer.encoding == Encoding.F32 else self._layout.size_bytes
        return room_for(self._layout, offer.encoding) + decoded

    def _append(
        self,
        sender: PeerId,
        box: _Sender,
        message: GradientOffer | GradientChunk,
        offset: int,
        body: Buffer,
        reply: Reply,
    ) -> None:
        """Take the bytes that come next; others were there already, or come again."""
        transfer_id = message.transfer_id
        incoming = box.incoming[transfer_id]
        end, size = offset + len(body), len(incoming.buffer)
        if end > size:
            self._fault(sender, message, f"bytes {offset} to {end} of {size}", reply)
            return
        incoming.used_at = self._now()
        if offset <= incoming.received < end:
            news = np.frombuffer(body, np.uint8)[incoming.received - offset :]
            np.copyto(incoming.buffer[incoming.received : end], news)
            incoming.hasher.update(news.data)
            incoming.received = end
        if incoming.received < size:
            self._progress(message.request_id, transfer_id, incoming.received, reply)
        elif incoming.waiting is not None:
            incoming.waiting.append((message.request_id, reply))
        else:
            incoming.waiting = [(message.request_id, reply)]
            self._verify(sender, box, transfer_id, incoming)

    def _verify(self, sender: PeerId, box: _Sender, transfer_id: int, incoming: Incoming) -> None:
        offer = incoming.offer
        digest = incoming.hasher.hexdigest()

        def verified() -> Tensors | str:
            try:
                check_digest("a gradient", digest, offer.digest)
                return unpack(self._layout, offer.encoding, incoming.buffer, incoming.decoded)
            except RemoteProtocolError as error:
                return str(error)

        def conclude(result: Tensors | str) -> None:
            if box.incoming.get(transfer_id) is not incoming:
                return  # dropped meanwhile: the sender left or is refused
            self._remove(box, transfer_id)
            if isinstance(result, str):
                self._desk.strike(sender, result)
            else:
                box.remember(transfer_id, offer.size_bytes)
                self._desk.deliver(_update_of(sender, offer, result))
            for request_id, reply in incoming.waiting or ():
                if isinstance(result, str):
                    self._desk.refuse(request_id, reply, RefusalCode.MALFORMED, result, 0.0)
                else:
                    self._progress(request_id, transfer_id, offer.size_bytes, reply)

        effort = self._layout.size_bytes * (1 if offer.encoding == Encoding.F32 else CODING)
        self._offload(effort, verified, conclude)

    def _progress(self, request_id: int, transfer_id: int, received: int, reply: Reply) -> None:
        progress = GradientProgress(
            request_id=request_id, transfer_id=transfer_id, received_bytes=received
        )
        reply(progress, None)

    def _fault(
        self, sender: PeerId, message: GradientOffer | GradientChunk, fault: str, reply: Reply
    ) -> None:
        self._desk.strike(sender, fault)
        self._desk.refuse(message.request_id, reply, RefusalCode.MALFORMED, fault, 0.0)


def _update_of(sender: PeerId, offer: GradientOffer, gradient: Tensors) -> GradientUpdate:
    return GradientUpdate(
        sender=sender,
        sender_round=offer.sender_round,
        on_version=offer.on_version,
        weight=offer.weight,
        num_examples=offer.num_examples,
        gradient=gradient,
    )
