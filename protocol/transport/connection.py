"""What we hold of one known peer: its connections, the requests under way, and its state."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto

from protocol import handshake
from protocol.codec import Buffer, encode
from protocol.errors import PeerRefused, PeerUnreachable, ProtocolError, RemoteProtocolError
from protocol.messages import Leave, Message, PeerId, Refusal, RefusalCode
from protocol.status import MemberStatus
from protocol.transport.dial import Attempt, Reached, Surroundings, refused, unpack
from protocol.transport.endpoint import parse_endpoint
from protocol.transport.interface import Address
from protocol.transport.port import DialedPort, Frames
from protocol.transport.sockets import connect, make_dialer
from protocol.transport.window import Window

logger = logging.getLogger(__name__)

Reply = Callable[[Message | ProtocolError, Buffer | None], None]
"""Takes the answer to a request and its body, or why there will be none."""

_MISFITS = frozenset({RefusalCode.VERSION, RefusalCode.FEDERATION, RefusalCode.LAYOUT})
# Refusals that concern the whole connection, whatever was asked.
_FAREWELLS = frozenset({RefusalCode.NO_HELLO, RefusalCode.NOT_ALLOWED, RefusalCode.LEAVING})


class State(Enum):
    """How we stand with a peer."""

    IDLE = auto()
    """Never asked for anything; counts as reachable."""
    DIALING = auto()
    """The first dial is under way; counts as reachable."""
    READY = auto()
    """Connected and welcomed."""
    UNREACHABLE = auto()
    """Dialed again now and then."""
    MISFIT = auto()
    """Of another version, federation or layout; asked again now and then."""
    CLOSED = auto()
    """No longer known."""


class Connection:
    """One known peer: a control connection, a bulk connection for transfers, pending requests.

    Dialed at the first request; once lost, dialed again in the background until it answers.

    Attributes:
        peer_id: Who it is.
        address: Where it is dialed.
        state: How we stand with it.
        window: Of the bulk connection; kept between transfers.
        features: What both of us can do, since it last welcomed us.
        offered_bytes: The size of the model that it offered last; None before the first.
        num_transfers: Transfers under way.
        bulk_used_at: When the last transfer ended, on the loop's clock.
    """

    def __init__(self, peer_id: PeerId, address: Address, surroundings: Surroundings) -> None:
        self.peer_id = peer_id
        self.address = address
        self.state = State.IDLE
        self.window = Window()
        self.features: frozenset[str] = frozenset()
        self.offered_bytes: int | None = None
        self.num_transfers = 0
        self.bulk_used_at = 0.0
        self._around = surroundings
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, Reply] = {}
        self._control: DialedPort | None = None
        self._bulk: DialedPort | None = None
        self._endpoint = parse_endpoint(address.endpoint, f"the address of {address.name}")
        self._resolved = self._endpoint
        self._error: ProtocolError = PeerUnreachable(f"{address.name}: not dialed yet")
        self._heard_at = 0.0
        self._settled = asyncio.Event()
        self._welcomed = asyncio.Event()
        self._nudged = asyncio.Event()
        self._attempt: Attempt | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._ready_at = math.inf
        self._told_down = False
        self._next_log = 0.0
        self._log_interval_s = surroundings.settings.log_again_s

    # Requests

    async def ready(self) -> None:
        """Wait until the peer has welcomed us, dialing it if that was never tried.

        Raises:
            ProtocolError: It is unreachable or refuses us; background attempts go on.
        """
        if self.state is State.IDLE:
            self.state = State.DIALING
            self._dial_soon(pause_s=0.0)
        if self.state is State.DIALING:
            await self._settled.wait()
        if self.state is not State.READY:
            raise self._error.with_traceback(None)

    async def back(self) -> bool:
        """Wait a little for a lost connection; return whether it is back."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._around.settings.resume_timeout_s):
                await self._welcomed.wait()
        return self.state is State.READY

    def next_id(self) -> int:
        """Return a fresh request id."""
        return next(self._around.ids)

    def request(
        self, message: Message, on_reply: Reply, body: Buffer | None = None, *, bulk: bool = True
    ) -> None:
        """Send a request; its one answer, or the loss of the connection, goes to `on_reply`.

        Raises:
            PeerUnreachable: There is no connection now.
        """
        port = self._bulk_port() if bulk else self._control
        frames = encode(message, body)
        if port is None or not port.send(frames):
            raise PeerUnreachable(f"{self.address.name}: the connection is lost")
        self._pending[message.request_id] = on_reply
        self._around.counters.bytes_sent += sum(map(len, frames))

    async def ask(self, message: Message, body: Buffer | None) -> tuple[Message, Buffer | None]:
        """Send a short request on the control connection, and return its answer.

        Raises:
            ProtocolError: The connection was lost before it came.
        """
        answered: asyncio.Future[tuple[Message, Buffer | None]] = self._loop.create_future()

        def on_reply(reply: Message | ProtocolError, told: Buffer | None) -> None:
            if answered.done():
                return
            if isinstance(reply, ProtocolError):
                answered.set_exception(reply)
            else:
                answered.set_result((reply, None if told is None else bytes(told)))

        self.request(message, on_reply, body, bulk=False)
        try:
            return await answered
        finally:
            self.cancel((message.request_id,))

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Forget requests; their answers will be dropped."""
        for request_id in request_ids:
            self._pending.pop(request_id, None)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Keep the bulk connection open meanwhile."""
        self.num_transfers += 1
        try:
            yield
        finally:
            self.num_transfers -= 1
            self.bulk_used_at = self._loop.time()

    def resumed(self) -> None:
        """Take note that a transfer goes on after a loss."""
        self._around.counters.transfers_resumed += 1

    # What the transport tells

    def describe(self, standing_of: Callable[[PeerId], str]) -> MemberStatus:
        """Return what operators are told of the peer: its standing as a member, else our own."""
        down = self.state in (State.UNREACHABLE, State.MISFIT)
        return MemberStatus(
            peer_id=self.peer_id,
            name=self.address.name,
            endpoint=self.address.endpoint,
            public_key=self.address.public_key,
            state=standing_of(self.peer_id) or self.state.name.lower(),
            reason=str(self._error)[:512] if down else "",
        )

    @property
    def has_idle_bulk(self) -> bool:
        """Whether a bulk connection is open that no transfer uses."""
        return self._bulk is not None and not self.num_transfers

    def close_bulk(self) -> None:
        """Close the bulk connection; the next transfer opens another."""
        if self._bulk is not None:
            self._bulk.close()
            self._bulk = None

    def move(self, address: Address) -> None:
        """Take note of a newer address; dial there if it differs."""
        if address == self.address:
            return
        moved = address.endpoint != self.address.endpoint
        self.address = address
        if moved:
            self._endpoint = parse_endpoint(address.endpoint, f"the address of {address.name}")
            if self._attempt is not None:
                self._attempt.fail("it has moved")
            self.lost(PeerUnreachable(f"{address.name}: moved to {address.endpoint}"))
            self.nudge()

    def nudge(self) -> None:
        """Dial an unreachable peer at once: it has shown a sign of life."""
        self._nudged.set()

    def suspect(self, since: float) -> None:
        """Count the peer as unreachable unless it was heard since then, on the loop's clock."""
        if self._heard_at < since:
            self.lost(PeerUnreachable(f"{self.address.name}: no answer within the deadline"))

    def misfit(self, error: PeerRefused) -> None:
        """Take note that the peer, dialing us, turned out not to fit."""
        if self.state in (State.IDLE, State.READY):
            self._drop(error, State.MISFIT)
            self._dial_soon(handshake.RETRY_MISFIT_S)

    def lost(self, error: ProtocolError) -> None:
        """Fail all that is pending, count the peer as unreachable and start dialing it again."""
        if self.state is State.READY:
            self._around.counters.connections_lost += 1
            self._drop(error, State.UNREACHABLE)
            wait_s = error.retry_after_s if isinstance(error, PeerRefused) else 0.0
            self._dial_soon(wait_s)

    def close(self, *, goodbye: bool) -> None:
        """Close for good, with a `Leave` to a peer that is connected."""
        if goodbye and self.state is State.READY and self._control is not None:
            self._control.send(encode(Leave(request_id=self.next_id())))
            self._control.close(round(self._around.settings.goodbye_s * 1000))
        if self._dialing is not None:
            self._dialing.cancel()
        self._drop(PeerUnreachable(f"{self.address.name}: the connection was closed"), State.CLOSED)

    # Answers

    def _on_message(self, frames: Frames) -> None:
        try:
            message, body = unpack(frames, self._around.counters)
        except RemoteProtocolError as error:
            self.lost(RemoteProtocolError(f"{self.address.name}: {error}"))
            return
        self._heard_at = self._loop.time()
        if isinstance(message, Refusal) and message.code in _FAREWELLS:
            self.lost(refused(self.address.name, message))
            return
        on_reply = self._pending.pop(message.request_id, None)
        if on_reply is not None:
            on_reply(message, body)

    def _on_lost(self) -> None:
        self.lost(PeerUnreachable(f"{self.address.name}: the connection was lost"))

    def _drop(self, error: ProtocolError, state: State) -> None:
        """Leave the present state: close the ports, fail what is pending, tell of the change."""
        before, self.state, self._error = self.state, state, error
        self._welcomed.clear()
        self._settled.set()
        self.close_bulk()
        if self._control is not None:
            self._control.close()
            self._control = None
        pending, self._pending = self._pending, {}
        for on_reply in pending.values():
            on_reply(error, None)
        if state is State.CLOSED:
            self._welcomed.set()  # nobody need wait any longer
            return
        if before is not state:
            self._around.on_change()
        self._log_down()

    # Dialing

    def _bulk_port(self) -> DialedPort | None:
        if self._bulk is None and self.state is State.READY:
            dealer = make_dialer(
                self._around.context, self._around.key_pair, self.address.public_key
            )
            connect(dealer, self._resolved)
            self._bulk = DialedPort(dealer, self._on_message, self._on_lost)
        return self._bulk

    def _dial_soon(self, pause_s: float) -> None:
        if self._dialing is None or self._dialing.done():
            self._dialing = self._around.spawn(
                self._dial(pause_s), f"dial {self.address.name} ({self.peer_id[:8]})"
            )

    async def _dial(self, pause_s: float) -> None:
        """Dial until welcomed, with growing pauses."""
        settings = self._around.settings
        longest_s = settings.redial_min_s
        for number in itertools.count():
            if pause_s:
                await self._pause(pause_s)
            self._attempt = Attempt(self._around, self.address, self._endpoint)
            try:
                self._became_ready(await self._attempt.run(number))
                return
            except ProtocolError as error:
                self._around.counters.dials_failed += 1
                misfit = isinstance(error, PeerRefused) and error.code in _MISFITS
                self._drop(error, State.MISFIT if misfit else State.UNREACHABLE)
                pause_s = longest_s * self._around.jitter.uniform(0.5, 1.0)
                longest_s = min(2 * longest_s, settings.redial_max_s)
                if isinstance(error, PeerRefused):
                    pause_s = max(pause_s, min(error.retry_after_s, settings.ban_s))
            finally:
                self._attempt = None

    async def _pause(self, pause_s: float) -> None:
        """Wait, or less when nudged."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._nudged.wait()
        self._nudged.clear()

    def _became_ready(self, reached: Reached) -> None:
        before, self.state = self.state, State.READY
        self._control, self._resolved = reached.port, reached.endpoint
        self.features = reached.features
        self._control.hand_over(self._on_message, self._on_lost)
        self.window.base_s = min(self.window.base_s, reached.round_trip_s)
        self._heard_at = self._loop.time()
        self._nudged.clear()
        self._welcomed.set()
        self._settled.set()
        self._ready_at = self._loop.time()
        if self._told_down:
            self._told_down = False
            logger.info("%s is back", self.address.name)
        if before is not State.DIALING:
            self._around.on_change()

    def _log_down(self) -> None:
        """Log once, then at a growing interval, also of a peer that comes and goes."""
        now, log_again_s = self._loop.time(), self._around.settings.log_again_s
        if now - self._ready_at >= log_again_s:
            self._ready_at = math.inf  # it was steady: its loss is news
            self._next_log, self._log_interval_s = now, log_again_s
        if now >= self._next_log:
            self._told_down = True
            self._next_log = now + self._log_interval_s
            self._log_interval_s *= 2
            logger.warning("%s; dialing it again now and then", self._error)
