"""What we ask of others, each within its deadline: models, gradients to be taken, and news."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.codec import Buffer
from protocol.editions import Origin
from protocol.errors import (
    LocalProtocolError,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RemoteProtocolError,
)
from protocol.gossip import GOSSIP
from protocol.gradients import Feedbacks, pack
from protocol.groups import Groups, decode_groups
from protocol.messages import (
    GROUPS,
    GossipAnswer,
    GossipRequest,
    GradientUpdate,
    GroupsAnswer,
    GroupsRequest,
    ModelSnapshot,
    PeerId,
    Refusal,
)
from protocol.tensors import Layout
from protocol.transport.connection import Connection, State
from protocol.transport.dial import refused
from protocol.transport.interface import Counters
from protocol.transport.pull import Pull
from protocol.transport.push import Push
from protocol.transport.settings import TransportSettings
from protocol.transport.transfers import CODING, Work

Result = TypeVar("Result")


class Asking:
    """Asks peers over their connections; the mirror of `Served`.

    Args:
        connections: Of all known peers, as they are now; none while the transport is closed.
        layout: Of the models that we exchange.
        origin: Of models that come as differences to the initial one.
        settings: Deadlines and limits.
        counters: Where to count.
        feedbacks: What the codec still owes to whom.
        allocate: Makes room for what is received.
        work: Does what takes long with many bytes elsewhere, and what doesn't at once.
        strike: Counts what no honest peer answers.
    """

    def __init__(
        self,
        *,
        connections: Mapping[PeerId, Connection],
        layout: Layout,
        origin: Origin | None,
        settings: TransportSettings,
        counters: Counters,
        feedbacks: Feedbacks,
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        work: Work,
        strike: Callable[[PeerId, str], None],
    ) -> None:
        self._connections = connections
        self._layout = layout
        self._origin = origin
        self._settings = settings
        self._counters = counters
        self._feedbacks = feedbacks
        self._allocate = allocate
        self._work = work
        self._strike = strike
        self._transfer_ids = itertools.count(secrets.randbits(56))

    async def fetch(
        self, peer_id: PeerId, have: ModelSnapshot | None, deadline_s: float
    ) -> ModelSnapshot | None:
        """Fetch a peer's newest model, or None when it is the version we have; see `Transport`."""
        connection = self._connection(peer_id)
        if have is not None and have.tensors.layout != self._layout:
            raise LocalProtocolError("a model to build on has another layout than the transport")

        async def fetch_it() -> ModelSnapshot | None:
            await connection.ready()
            layout, origin = self._layout, self._origin
            pull = Pull(connection, self._settings, layout, have, origin, self._allocate)
            with self._striking(peer_id):
                return await pull.run(self._work)

        snapshot = await self._in_time(connection, fetch_it(), deadline_s)
        if snapshot is None:
            self._counters.models_unchanged += 1
        else:
            self._counters.models_fetched += 1
        return snapshot

    async def push(self, peer_id: PeerId, update: GradientUpdate, deadline_s: float) -> None:
        """Deliver a gradient to the peer on whose model it was made; see `Transport`."""
        connection = self._connection(peer_id)
        if update.gradient.layout != self._layout.gradient:
            raise LocalProtocolError("a pushed gradient has another layout than the transport")
        transfer_id = next(self._transfer_ids)

        async def push_it() -> None:
            await connection.ready()
            feedback = self._feedbacks.of(peer_id, connection.features)
            effort = 0 if feedback is None else CODING * self._layout.gradient.size_bytes
            parcel = await self._work(effort, lambda: pack(update, feedback))
            push = Push(connection, self._settings, parcel, transfer_id)
            with self._striking(peer_id):
                await push.run(self._work)

        await self._in_time(connection, push_it(), deadline_s)
        self._counters.gradients_sent += 1

    async def groups(self, peer_id: PeerId, deadline_s: float) -> Groups | None:
        """Ask a peer who belongs together, or None when it doesn't know yet; see `Transport`."""
        connection = self._connection(peer_id)
        name = connection.address.name

        async def ask_it() -> Groups | None:
            await connection.ready()
            if GROUPS not in connection.features:
                raise PeerUnreachable(f"{name} answers nobody who belongs together")
            message = GroupsRequest(request_id=connection.next_id())
            answer, told = await connection.ask(message, None)
            with self._striking(peer_id):
                match answer:
                    case GroupsAnswer() if told is not None:
                        return decode_groups(told) if len(told) else None
                    case Refusal():
                        raise refused(name, answer)
                    case _:
                        raise RemoteProtocolError(f"{name}: an unexpected {type(answer).__name__}")

        return await self._in_time(connection, ask_it(), deadline_s)

    async def member(self, peer_id: PeerId, body: bytes, deadline_s: float) -> Buffer:
        """Tell a member, and return what it answers.

        Raises:
            PeerUnreachable: Nobody answered in time, or it takes no part in gossip.
            RemoteProtocolError: It refused, or the answer is no gossip.
        """
        connection = self._connection(peer_id)
        message = GossipRequest(request_id=connection.next_id())
        try:
            async with asyncio.timeout(deadline_s):
                if connection.state is State.UNREACHABLE:
                    connection.nudge()  # membership knows when it is worth a try
                    await connection.back()
                await connection.ready()
                if GOSSIP not in connection.features:
                    raise PeerUnreachable(f"{connection.address.name} takes no part in gossip")
                answer, told = await connection.ask(message, body)
        except TimeoutError:
            raise PeerUnreachable(
                f"{connection.address.name}: no answer within {deadline_s:g} s"
            ) from None
        if not isinstance(answer, GossipAnswer) or told is None:
            raise RemoteProtocolError(
                f"{connection.address.name}: an unexpected {type(answer).__name__}"
            )
        return told

    def _connection(self, peer_id: PeerId) -> Connection:
        if peer_id not in self._connections:
            raise PeerUnreachable(f"{peer_id}: no address is known, or the transport is closed")
        return self._connections[peer_id]

    @contextmanager
    def _striking(self, peer_id: PeerId) -> Iterator[None]:
        """Count an answer that the protocol doesn't allow; to refuse is allowed."""
        try:
            yield
        except RemoteProtocolError as error:
            if not isinstance(error, PeerRefused):
                self._strike(peer_id, str(error))
            raise

    async def _in_time(
        self, connection: Connection, work: Coroutine[Any, Any, Result], deadline_s: float
    ) -> Result:
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(deadline_s):
                return await work
        except TimeoutError:
            connection.suspect(began)
            self._counters.requests_failed += 1
            raise PeerUnreachable(
                f"{connection.address.name}: not done within {deadline_s:g} s"
            ) from None
        except ProtocolError:
            self._counters.requests_failed += 1
            raise
