"""A peer's newest model, pulled: asked for at once, in chunks, and verified."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from protocol.codec import Buffer
from protocol.digest import Hasher, check_digest
from protocol.editions import Answer, Origin, check_answer, read
from protocol.errors import PeerRefused, PeerUnreachable, ProtocolError, RemoteProtocolError
from protocol.messages import (
    Chunk,
    ChunkRequest,
    Encoding,
    Message,
    ModelOffer,
    ModelRequest,
    ModelSnapshot,
    ModelUnchanged,
    RefusalCode,
)
from protocol.tensors import Layout, Tensors
from protocol.transport.connection import Connection
from protocol.transport.settings import TransportSettings
from protocol.transport.transfers import CODING, Request, Transfer, Work


class Pull(Transfer):
    """Pulls a peer's newest model, or what leads to it from the one that we have.

    Before the offer comes, nobody knows how much there will be: as a rule, about as much as
    the last time.
    """

    def __init__(
        self,
        connection: Connection,
        settings: TransportSettings,
        layout: Layout,
        have: ModelSnapshot | None,
        origin: Origin | None,
        allocate: Callable[[int], npt.NDArray[np.uint8]],
    ) -> None:
        super().__init__(connection, settings)
        self._layout = layout
        self._origin = origin
        self._have = have
        self._version = None if have is None else have.version
        self._allocate = allocate
        self._unchanged = False
        self._offer: ModelOffer | None = None
        self._transfer_id = 0
        self._buffer = allocate(layout.size_bytes)
        self._size = 0
        self._next = 0
        self._again: deque[tuple[int, int]] = deque()
        self._hashed = 0
        self._hasher = Hasher()

    async def run(self, work: Work) -> ModelSnapshot | None:
        """Pull and verify; None when the newest is the one that we have.

        Raises:
            ProtocolError: The peer is unreachable, refused, or sent what doesn't hold.
        """
        await self._until_ended(self._ask)
        offer = self._offer
        if self._unchanged:
            return None
        if offer is None:
            raise RemoteProtocolError(f"{self._name}: chunks without an offer")
        answer = Answer(
            encoding=offer.encoding,
            base=offer.base,
            leads_to=offer.leads_to,
            blob=self._buffer[: offer.size_bytes],
        )
        size, out = self._layout.size_bytes, self._buffer
        if offer.encoding != Encoding.F32:
            size, out = CODING * size, self._allocate(size)
        try:
            tensors = await work(size, lambda: self._verified(answer, offer.digest, out))
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{self._name}: {error}") from error
        return ModelSnapshot(
            version=offer.version,
            tensors=tensors,
            friends=offer.friends,
            num_examples=offer.num_examples,
        )

    def _verified(self, answer: Answer, digest: str, out: npt.NDArray[np.uint8]) -> Tensors:
        self._hasher.update(answer.blob[self._hashed :].data)
        check_digest("what it sent", self._hasher.hexdigest(), digest)
        return read(self._layout, answer, self._have, out, self._origin)

    def _ask(self) -> None:
        """Ask for the model from the start, and at once for as much as the window allows."""
        self._offer, self._hashed = None, 0
        self._size = self._connection.offered_bytes or self._layout.size_bytes
        self._hasher.reset()
        self._again.clear()
        self._restart()
        self._transfer_id = self._connection.next_id()
        self._next = self._first_bytes()
        message = ModelRequest(
            request_id=self._transfer_id, have=self._version, accept_bytes=self._next
        )
        self._send(message, 0, self._next)
        self._ask_more()

    def _first_bytes(self) -> int:
        """Return how much to take together with the offer: a chunk, if all should fit one.

        Else a small piece: the sooner it is through, the sooner we decrypt while they encrypt.
        """
        chunk = self._connection.window.chunk_bytes
        return min(chunk, self._layout.size_bytes) if self._size <= chunk else chunk // 4

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
            case ModelUnchanged() if self._offer is None and message.version == self._version:
                self._unchanged = True
                self._end()
                return
            case ModelOffer() if self._offer is None and body is not None:
                self._accept(message)
                request = request._replace(length=min(request.length, self._size))
            case Chunk() if message.offset == request.offset and body is not None:
                if len(body) != request.length and self._offer is not None:
                    raise self._unexpected(message)
                self._miss_earlier_than(message.request_id)
            case _:
                raise self._unexpected(message)
        self._store(body, request)
        self._ask_more()

    def _accept(self, offer: ModelOffer) -> None:
        """Take an offer, and want nothing any more that lies beyond its end."""
        origin, features = self._origin, self._connection.features
        try:
            check_answer(
                self._layout,
                offer.encoding,
                offer.base,
                offer.size_bytes,
                self._version,
                from_origin=origin is not None and origin.feature in features,
            )
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{self._name} offers {error}") from error
        self._offer, self._size = offer, offer.size_bytes
        self._connection.offered_bytes = offer.size_bytes
        self._next = min(self._next, self._size)
        for request_id, request in list(self._under_way.items()):
            length = max(min(request.length, self._size - request.offset), 0)
            self._bytes_under_way -= request.length - length
            self._under_way[request_id] = request._replace(length=length)
            if length == 0:
                self._forget(request_id)
                self._connection.cancel((request_id,))
        within = ((offset, min(length, self._size - offset)) for offset, length in self._again)
        self._again = deque((offset, length) for offset, length in within if length > 0)

    def _store(self, body: Buffer, request: Request) -> None:
        """Keep the bytes where they belong; what is missing of them is wanted again."""
        if len(body) > request.length:
            raise RemoteProtocolError(f"{self._name} sends {len(body)} bytes, more than asked for")
        end = request.offset + len(body)
        if len(body):
            np.copyto(self._buffer[request.offset : end], np.frombuffer(body, np.uint8))
        if len(body) < request.length:
            self._again.append((end, request.length - len(body)))
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
        window, offered = self._connection.window, self._offer is not None
        # Where less came than was asked for, there may be no more: only the offer tells.
        while (self._again and offered) or self._next < self._size:
            if self._bytes_under_way >= window.size_bytes:
                return
            if self._again and offered:
                offset, length = self._again.popleft()
            else:
                offset, length = self._next, min(window.chunk_bytes, self._size - self._next)
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
