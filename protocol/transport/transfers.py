"""One whole model pulled, or one whole gradient pushed: our side of a transfer, in chunks."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from protocol.codec import Buffer
from protocol.errors import PeerRefused, PeerUnreachable, ProtocolError, RemoteProtocolError
from protocol.messages import (
    Chunk,
    ChunkRequest,
    GradientChunk,
    GradientOffer,
    GradientProgress,
    GradientUpdate,
    Message,
    ModelOffer,
    ModelRequest,
    ModelSnapshot,
    ModelUnchanged,
    Refusal,
    RefusalCode,
    Version,
)
from protocol.tensors import Layout, Tensors
from protocol.transport.connection import Connection
from protocol.transport.settings import TransportSettings

Work = Callable[[int, Callable[[], str | None]], Awaitable[str | None]]
"""Does work on so many bytes, in a worker thread when they are many."""


# A peer that loses every transfer must not keep us busy for ever.
_MAX_RESUMED = 5


class Request(NamedTuple):
    """A range of bytes under way."""

    offset: int
    length: int
    sent_at: float


class _Transfer:
    """What pulling and pushing share: the ranges under way, patience, and how it ended."""

    def __init__(self, connection: Connection, settings: TransportSettings) -> None:
        self._connection = connection
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._name = connection.address.name
        self._under_way: dict[int, Request] = {}
        self._bytes_under_way = 0
        self._ended: asyncio.Future[ProtocolError | None] = self._loop.create_future()
        self._deadline = 0.0

    async def _until_ended(self, first_request: Callable[[], None]) -> None:
        """Go on from `first_request` to the end, over one lost connection if there was progress.

        Raises:
            ProtocolError: It failed.
        """
        with self._connection.transfer():
            for attempt in itertools.count():
                error = await self._until_broken(first_request)
                if error is None:
                    return
                first_request = self._resume
                resumable = attempt < _MAX_RESUMED and self._may_resume(error)
                if resumable and isinstance(error, PeerUnreachable):
                    resumable = await self._connection.back()
                if not resumable:
                    raise error.with_traceback(None)

    async def _until_broken(self, first_request: Callable[[], None]) -> ProtocolError | None:
        self._ended = self._loop.create_future()
        self._allow(self._settings.offer_timeout_s)
        self._patience = self._loop.call_at(self._deadline, self._lose_patience)
        try:
            first_request()
            return await self._ended
        except PeerUnreachable as error:
            return error
        finally:
            self._patience.cancel()
            self._connection.cancel(self._under_way)

    def _lose_patience(self) -> None:
        """Give up when the deadline has passed; it moves on with every new byte."""
        if self._ended.done():
            return
        if self._loop.time() < self._deadline:
            self._patience = self._loop.call_at(self._deadline, self._lose_patience)
            return
        self._connection.suspect(self._deadline - self._settings.offer_timeout_s)
        self._end(PeerUnreachable(f"{self._name}: no answer within the deadline"))

    def _allow(self, seconds: float) -> None:
        self._deadline = self._loop.time() + seconds

    def _end(self, error: ProtocolError | None = None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    def _send(self, message: Message, offset: int, length: int, body: Buffer | None = None) -> None:
        self._connection.request(message, self._answered, body)
        self._under_way[message.request_id] = Request(offset, length, self._loop.time())
        self._bytes_under_way += length

    def _answered(self, message: Message | ProtocolError, body: Buffer | None) -> None:
        """Take an answer; nothing that a peer can send makes this raise."""
        try:
            match message:
                case ProtocolError():
                    self._end(message)
                case Refusal():
                    raise PeerRefused(
                        message.code, f"{self._name}: {message.text}", message.retry_after_s
                    )
                case _:
                    self._take(message, body, self._forget(message.request_id))
        except ProtocolError as error:
            self._end(error)

    def _forget(self, request_id: int) -> Request:
        request = self._under_way.pop(request_id)
        self._bytes_under_way -= request.length
        return request

    def _restart(self) -> None:
        self._under_way.clear()
        self._bytes_under_way = 0

    def _unexpected(self, message: Message) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self._name}: an unexpected {type(message).__name__}")

    def _take(self, message: Message, body: Buffer | None, request: Request) -> None:
        raise NotImplementedError

    def _may_resume(self, error: ProtocolError) -> bool:
        raise NotImplementedError

    def _resume(self) -> None:
        raise NotImplementedError


class Pull(_Transfer):
    """Pulls a peer's newest model."""

    def __init__(
        self,
        connection: Connection,
        settings: TransportSettings,
        layout: Layout,
        have: Version | None,
        buffer: npt.NDArray[np.uint8],
    ) -> None:
        super().__init__(connection, settings)
        self._layout = layout
        self._have = have
        self._unchanged = False
        self._offer: ModelOffer | None = None
        self._transfer_id = 0
        self._buffer = buffer
        self._next = 0
        self._again: deque[tuple[int, int]] = deque()
        self._hashed = 0
        self._hasher = xxhash.xxh3_64()

    async def run(self, work: Work) -> ModelSnapshot | None:
        """Pull and verify; None when the newest is the one that we have.

        Raises:
            ProtocolError: The peer is unreachable, refused, or sent what doesn't hold.
        """
        await self._until_ended(self._ask)
        offer, buffer = self._offer, self._buffer
        if self._unchanged:
            return None
        if offer is None:
            raise RemoteProtocolError(f"{self._name}: chunks without an offer")
        tensors = Tensors(self._layout, buffer)
        fault = await work(buffer.nbytes, lambda: self._fault_of(tensors, offer))
        if fault is not None:
            raise RemoteProtocolError(f"{self._name}: {fault}")
        return ModelSnapshot(version=offer.version, tensors=tensors)

    def _fault_of(self, tensors: Tensors, offer: ModelOffer) -> str | None:
        self._hasher.update(self._buffer[self._hashed :].data)
        return fault_of(tensors, self._hasher.hexdigest(), offer.digest)

    def _ask(self) -> None:
        """Ask for the model from the start, and at once for as much as the window allows."""
        self._offer, self._hashed = None, 0
        self._hasher.reset()
        self._again.clear()
        self._restart()
        self._transfer_id = self._connection.next_id()
        self._next = self._first_bytes()
        message = ModelRequest(
            request_id=self._transfer_id, have=self._have, accept_bytes=self._next
        )
        self._send(message, 0, self._next)
        self._ask_more()

    def _first_bytes(self) -> int:
        """Return how much to ask for together with the offer: all, if it fits one chunk.

        Else a small piece: the sooner it is through, the sooner we decrypt while they encrypt.
        """
        chunk, size = self._connection.window.chunk_bytes, self._layout.size_bytes
        return size if size <= chunk else chunk // 4

    def _resume(self) -> None:
        """Ask again for what is missing, under the same transfer id, or start over."""
        if self._offer is None:
            self._ask()
            return
        self._again.extend((request.offset, request.length) for request in self._under_way.values())
        self._restart()
        self._ask_more()

    def _may_resume(self, error: ProtocolError) -> bool:
        if self._offer is None:
            return False
        if isinstance(error, PeerRefused) and error.code == RefusalCode.NO_TRANSFER:
            self._offer = None  # it has restarted, or has newer models
            return True
        return isinstance(error, PeerUnreachable)

    def _take(self, message: Message, body: Buffer | None, request: Request) -> None:
        match message:
            case ModelUnchanged() if self._offer is None and message.version == self._have:
                self._unchanged = True
                self._end()
                return
            case ModelOffer() if self._offer is None and body is not None:
                self._check(message)
                self._offer = message
                if len(body) < request.length:
                    self._again.append((len(body), request.length - len(body)))
            case Chunk() if message.offset == request.offset and body is not None:
                if len(body) != request.length:
                    raise self._unexpected(message)
                self._miss_earlier_than(message.request_id)
            case _:
                raise self._unexpected(message)
        self._store(body, request)
        self._ask_more()

    def _check(self, offer: ModelOffer) -> None:
        if offer.size_bytes != self._layout.size_bytes:
            raise RemoteProtocolError(
                f"{self._name} offers a model of {offer.size_bytes} bytes, our layout has "
                f"{self._layout.size_bytes}"
            )

    def _store(self, body: Buffer, request: Request) -> None:
        """Keep the bytes where they belong."""
        if len(body) > request.length:
            raise RemoteProtocolError(f"{self._name} sends {len(body)} bytes, more than asked for")
        end = request.offset + len(body)
        if len(body):
            np.copyto(self._buffer[request.offset : end], np.frombuffer(body, np.uint8))
        if request.offset == self._hashed:  # hashed while it is in the processor's cache
            self._hasher.update(body)
            self._hashed = end
        self._connection.window.answered(self._loop.time() - request.sent_at, len(body))
        self._allow(self._settings.stall_timeout_s)

    def _miss_earlier_than(self, request_id: int) -> None:
        """Ask again for chunks asked for before this one: they come in order, so they are lost."""
        for earlier in [key for key in self._under_way if self._transfer_id < key < request_id]:
            request = self._forget(earlier)
            self._connection.cancel((earlier,))
            self._again.append((request.offset, request.length))

    def _ask_more(self) -> None:
        size, window = self._layout.size_bytes, self._connection.window
        while self._again or self._next < size:
            if self._bytes_under_way >= window.size_bytes:
                return
            if self._again:
                offset, length = self._again.popleft()
            else:
                offset, length = self._next, min(window.chunk_bytes, size - self._next)
                self._next += length
            message = ChunkRequest(
                request_id=self._connection.next_id(),
                transfer_id=self._transfer_id,
                offset=offset,
                length=length,
            )
            self._send(message, offset, length)
        if not self._under_way:
            self._end()


class Push(_Transfer):
    """Pushes a gradient to the peer on whose model it was made."""

    def __init__(
        self,
        connection: Connection,
        settings: TransportSettings,
        update: GradientUpdate,
        transfer_id: int,
    ) -> None:
        super().__init__(connection, settings)
        self._update = update
        self._transfer_id = transfer_id
        self._digest = ""
        self._bytes = update.gradient.buffer.data
        self._next = 0
        self._received = 0

    async def run(self, work: Work) -> None:
        """Push, and return once the receiver has verified it.

        Raises:
            ProtocolError: The peer is unreachable, or refused.
        """
        self._digest = await work(self._bytes.nbytes, lambda: digest_of(self._bytes)) or ""
        await self._until_ended(lambda: self._offer(self._connection.window.chunk_bytes))

    def _offer(self, num_bytes: int) -> None:
        body = self._bytes[:num_bytes]
        self._next = len(body)
        message = GradientOffer(
            request_id=self._connection.next_id(),
            transfer_id=self._transfer_id,
            size_bytes=self._bytes.nbytes,
            digest=self._digest,
            sender_round=self._update.sender_round,
            on_version=self._update.on_version,
            weight=self._update.weight,
            num_examples=self._update.num_examples,
        )
        self._send(message, 0, len(body), body)

    def _resume(self) -> None:
        self._restart()
        self._offer(0)

    def _may_resume(self, error: ProtocolError) -> bool:
        # The receiver knows the transfer id: whatever has arrived isn't taken twice.
        lost = isinstance(error, PeerRefused) and error.code == RefusalCode.NO_TRANSFER
        return self._received > 0 and (lost or isinstance(error, PeerUnreachable))

    def _take(self, message: Message, body: Buffer | None, request: Request) -> None:
        if not isinstance(message, GradientProgress) or message.transfer_id != self._transfer_id:
            raise self._unexpected(message)
        if request.length:
            self._connection.window.answered(self._loop.time() - request.sent_at, request.length)
        else:  # we offered without a body, to learn what has already arrived
            self._next = self._received = min(message.received_bytes, self._bytes.nbytes)
        if message.received_bytes > self._next:
            raise self._unexpected(message)
        self._received = max(self._received, message.received_bytes)
        self._allow(self._settings.stall_timeout_s)
        if self._received == self._bytes.nbytes:
            self._end()
        else:
            self._push_more()

    def _push_more(self) -> None:
        window = self._connection.window
        while self._next < self._bytes.nbytes and self._bytes_under_way < window.size_bytes:
            offset = self._next
            body = self._bytes[offset : offset + window.chunk_bytes]
            self._next += len(body)
            message = GradientChunk(
                request_id=self._connection.next_id(), transfer_id=self._transfer_id, offset=offset
            )
            self._send(message, offset, len(body), body)


def digest_of(data: Buffer) -> str:
    """Return XXH3-64 in hex: it finds faults of assembly; CURVE is what authenticates."""
    return xxhash.xxh3_64_hexdigest(data)


def fault_of(tensors: Tensors, digest: str, promised: str) -> str | None:
    """Say what is wrong with a received blob, or nothing."""
    if digest != promised:
        return f"the bytes have the digest {digest}, not {promised} as announced"
    try:
        tensors.check_received()
    except RemoteProtocolError as error:
        return str(error)
    return None
