"""A gradient, pushed in chunks to the peer on whose model it was made."""

from __future__ import annotations

from protocol.codec import Buffer
from protocol.digest import digest_of
from protocol.errors import PeerRefused, PeerUnreachable, ProtocolError
from protocol.gradients import Parcel
from protocol.messages import (
    GradientChunk,
    GradientOffer,
    GradientProgress,
    Message,
    RefusalCode,
)
from protocol.transport.connection import Connection
from protocol.transport.settings import TransportSettings
from protocol.transport.transfers import Request, Transfer, Work


class Push(Transfer):
    """Pushes a gradient to the peer on whose model it was made."""

    def __init__(
        self,
        connection: Connection,
        settings: TransportSettings,
        parcel: Parcel,
        transfer_id: int,
    ) -> None:
        super().__init__(connection, settings)
        self._update = parcel.update
        self._encoding = parcel.encoding
        self._transfer_id = transfer_id
        self._digest = ""
        self._bytes = parcel.blob.data
        self._next = 0
        self._received = 0

    async def run(self, work: Work) -> None:
        """Push, and return once the receiver has verified it.

        Raises:
            ProtocolError: The peer is unreachable, or refused.
        """
        self._digest = await work(self._bytes.nbytes, lambda: digest_of(self._bytes))
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
            encoding=self._encoding,
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
