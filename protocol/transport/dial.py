"""One attempt to reach a peer: connect, say hello, and find out why not."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from protocol import handshake
from protocol.codec import Buffer, decode, encode
from protocol.errors import PeerRefused, PeerUnreachable, RemoteProtocolError
from protocol.handshake import Credentials
from protocol.identity import KeyPair
from protocol.messages import Hello, LayoutExchange, Message, Refusal, RefusalCode, Welcome
from protocol.transport.endpoint import Endpoint
from protocol.transport.interface import Address, Counters
from protocol.transport.port import DialedPort, Frames
from protocol.transport.settings import TransportSettings
from protocol.transport.sockets import Context, DialMonitor, connect, make_dialer, resolve


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What all connections of a transport share.

    Attributes:
        context: The ZeroMQ context.
        key_pair: Our own keys.
        credentials: What we say of ourselves.
        settings: Deadlines and limits.
        counters: Where to count.
        spawn: Starts a named background task that ends with the transport.
        on_change: Called when a peer became reachable or unreachable.
        ids: Fresh request ids.
        jitter: Keeps peers from dialing in step.
    """

    context: Context
    key_pair: KeyPair
    credentials: Credentials
    settings: TransportSettings
    counters: Counters
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    on_change: Callable[[], None]
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    jitter: random.Random = field(default_factory=random.Random)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A peer that has welcomed us.

    Attributes:
        port: The control connection.
        endpoint: With the address that its name was resolved to.
        round_trip_s: How long it took to answer our hello.
        features: What we both can do.
    """

    port: DialedPort
    endpoint: Endpoint
    round_trip_s: float
    features: frozenset[str]


class Attempt:
    """One attempt to reach a peer; give it up early with `fail`."""

    def __init__(self, around: Surroundings, address: Address, endpoint: Endpoint) -> None:
        self._around = around
        self._address = address
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._port: DialedPort | None = None
        self._failed: asyncio.Future[str] = self._loop.create_future()
        self._asked = 0
        self._answered: asyncio.Future[tuple[Message, Buffer | None]]

    def fail(self, why: str) -> None:
        """End the attempt, unless it has ended already."""
        if not self._failed.done():
            self._failed.set_result(why)

    async def run(self, number: int) -> Reached:
        """Dial once; the number of the attempt selects among the addresses of a name.

        Raises:
            ProtocolError: The peer can't be reached, or doesn't welcome us.
        """
        around, reached, monitor = self._around, None, None
        try:
            async with asyncio.timeout(around.settings.dial_timeout_s):
                resolved = await resolve(self._endpoint, number)
                dealer = make_dialer(around.context, around.key_pair, self._address.public_key)
                monitor = DialMonitor(around.context, dealer, self.fail)
                self._port = DialedPort(dealer, self._on_message, self._on_lost)
                connect(dealer, resolved)
                features, round_trip_s = await self._introduce()
                if self._failed.done():  # lost just after it welcomed us
                    raise self._unreachable()
                reached = Reached(
                    port=self._port,
                    endpoint=resolved,
                    round_trip_s=round_trip_s,
                    features=features,
                )
                return reached
        except TimeoutError:
            raise PeerUnreachable(
                f"{self._address.name}: nobody answers at {self._endpoint} within "
                f"{around.settings.dial_timeout_s:g} s"
            ) from None
        finally:
            if self._port is not None and reached is None:
                self._port.close()
            if monitor is not None:
                monitor.close()

    async def _introduce(self) -> tuple[frozenset[str], float]:
        """Say hello and weigh the answer; return what both can do and the round trip in seconds."""
        name, credentials = self._address.name, self._around.credentials
        hello = credentials.hello(next(self._around.ids))
        asked_at = self._loop.time()
        answer, _ = await self._ask(hello, None)
        match answer:
            case Welcome():
                handshake.check_welcome(answer, hello)
                features = frozenset(answer.features).intersection(hello.features)
                return features, self._loop.time() - asked_at
            case Refusal(code=RefusalCode.LAYOUT):
                exchange = LayoutExchange(request_id=next(self._around.ids))
                reply, theirs = await self._ask(exchange, credentials.description())
                if isinstance(reply, LayoutExchange) and theirs is not None:
                    raise handshake.layout_misfit(name, credentials, bytes(theirs))
                raise refused(name, answer)
            case Refusal():
                raise refused(name, answer)
            case _:
                raise RemoteProtocolError(f"{name}: {type(answer).__name__} answers a hello")

    async def _ask(
        self, message: Hello | LayoutExchange, body: bytes | None
    ) -> tuple[Message, Buffer | None]:
        """Ask and wait for the answer, or for the end of the attempt."""
        assert self._port is not None
        self._asked = message.request_id
        self._answered = self._loop.create_future()
        frames = encode(message, body)
        self._port.send(frames)
        self._around.counters.bytes_sent += sum(map(len, frames))
        await asyncio.wait((self._answered, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if not self._answered.done():
            raise self._unreachable()
        return self._answered.result()

    def _unreachable(self) -> PeerUnreachable:
        return PeerUnreachable(f"{self._address.name} at {self._endpoint}: {self._failed.result()}")

    def _on_message(self, frames: Frames) -> None:
        try:
            message, body = unpack(frames, self._around.counters)
        except RemoteProtocolError as error:
            self.fail(str(error))
            return
        if message.request_id == self._asked and not self._answered.done():
            self._answered.set_result((message, body))

    def _on_lost(self) -> None:
        self.fail("the connection was lost")


def unpack(frames: Frames, counters: Counters) -> tuple[Message, Buffer | None]:
    """Return the message that a peer answered, and count it.

    Raises:
        RemoteProtocolError: It is none.
    """
    counters.bytes_received += sum(map(len, frames))
    try:
        # Only a body is worth not copying.
        head, rest = frames[:2], frames[2:]
        return decode([*(frame.bytes for frame in head), *(frame.buffer for frame in rest)])
    except RemoteProtocolError:
        counters.malformed += 1
        raise


def refused(name: str, refusal: Refusal) -> PeerRefused:
    """Return the error for a refusal."""
    return PeerRefused(refusal.code, f"{name}: {refusal.text}", refusal.retry_after_s)
