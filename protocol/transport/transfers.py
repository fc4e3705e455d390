"""Our side of a transfer in chunks: what pulling a model and pushing a gradient share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from protocol.codec import Buffer
from protocol.errors import PeerRefused, PeerUnreachable, ProtocolError, RemoteProtocolError
from protocol.messages import Message, Refusal
from protocol.transport.connection import Connection
from protocol.transport.settings import TransportSettings

Result = TypeVar("Result")

CODING = 16
"""Coding a byte takes about as long as verifying so many."""

# A peer that loses every transfer must not keep us busy for ever.
_MAX_RESUMED = 5


class Work(Protocol):
    """Does work on so many bytes, in a worker thread when they are many."""

    def __call__(self, size_bytes: int, work: Callable[[], Result]) -> Awaitable[Result]:
        """Return what the work returns, or raise what it raises."""


class Request(NamedTuple):
    """A range of bytes under way."""

    offset: int
    length: int
    sent_at: float


class Transfer:
    """The ranges under way, patience, and how it ended."""

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
                self._connection.resumed()

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
