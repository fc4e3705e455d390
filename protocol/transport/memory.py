"""The transport inside one process, with chosen delay and loss; same promises as over ZeroMQ."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from protocol.editions import Answer, Edition, Origin, check_answer, publish, read, readable
from protocol.errors import (
    LocalProtocolError,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RemoteProtocolError,
)
from protocol.gradients import Feedbacks, Parcel, pack, unpack
from protocol.groups import Groups, decode_groups, encode_groups
from protocol.lowbit import CODECS, Bits
from protocol.messages import Encoding, GradientUpdate, ModelSnapshot, PeerId, RefusalCode
from protocol.tensors import Layout, Tensors, allocate
from protocol.transport.interface import Address, Counters, Listener

Result = TypeVar("Result")

_RETRY_MIN_S = 0.01
_RETRY_MAX_S = 1.0
_MAX_FEEDBACK_BYTES = 1 << 28


class MemoryNetwork:
    """What memory transports of one process reach each other through.

    Attributes:
        delay_s: How long a request and its answer take together, besides the work.
        loss: Probability that a request is never answered.
    """

    def __init__(self, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        self.delay_s = delay_s
        self.loss = loss
        self._random = random.Random(seed)
        self._transports: dict[PeerId, MemoryTransport] = {}
        self._killed: set[PeerId] = set()

    def kill(self, peer_id: PeerId) -> None:
        """Cut a peer off as if its process had died: no goodbye, requests under way are lost."""
        self._killed.add(peer_id)
        for transport in self._transports.values():
            transport.cut_off(peer_id)

    def revive(self, peer_id: PeerId) -> None:
        """Let a killed peer answer again; the others find out when they next try it."""
        self._killed.discard(peer_id)

    def join(self, transport: MemoryTransport) -> None:
        """Let a transport be reached, in place of an earlier one of the same peer."""
        self._transports[transport.peer_id] = transport

    def leave(self, transport: MemoryTransport) -> None:
        """Let a transport go; the others are told."""
        if self._transports.get(transport.peer_id) is transport:
            del self._transports[transport.peer_id]
            for other in self._transports.values():
                other.cut_off(transport.peer_id)

    def find(self, asker: PeerId, peer_id: PeerId) -> MemoryTransport | None:
        """Return the transport of a peer, or None when it can't be reached."""
        if self._killed & {asker, peer_id}:
            return None
        return self._transports.get(peer_id)

    def loses(self) -> bool:
        """Draw whether the next request is lost."""
        return self._random.random() < self.loss


class MemoryTransport:
    """Carries whole models and gradients within one process.

    Fulfills `protocol.transport.interface.Transport`.
    """

    def __init__(
        self,
        *,
        network: MemoryNetwork,
        peer_id: PeerId,
        layout: Layout,
        task: str,
        listener: Listener,
        bits: Bits | None = None,
        initial: Tensors | None = None,
    ) -> None:
        self.counters = Counters()
        self.peer_id = peer_id
        self.layout = layout
        self.task = task
        self.edition: Edition | None = None
        self.groups = b""
        self._bits: Bits | None = bits
        self._origin = Origin.of(initial, layout)
        self._features = readable(self._origin)
        self._published: ModelSnapshot | None = None
        self._feedbacks = Feedbacks(layout.gradient, bits, _MAX_FEEDBACK_BYTES)
        self._network = network
        self._listener = listener
        self._addresses: Mapping[PeerId, Address] = {}
        self._away: dict[PeerId, ProtocolError] = {}
        self._retries: dict[PeerId, asyncio.TimerHandle] = {}
        self._under_way: dict[asyncio.Task[Any], PeerId] = {}
        self._reported: frozenset[PeerId] | None = None
        self._running = False

    async def start(self) -> str:
        """Join the network, and return an endpoint."""
        self._running = True
        self._network.join(self)
        self._report_soon()
        return f"memory://{self.peer_id}"

    async def close(self) -> None:
        """Leave the network, and end every transfer."""
        self._running = False
        for retry in self._retries.values():
            retry.cancel()
        self._retries.clear()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._network.leave(self)

    def set_neighbors(self, addresses: Mapping[PeerId, Address]) -> None:
        """Replace the known peers."""
        self._addresses = {peer: at for peer, at in addresses.items() if peer != self.peer_id}
        for peer_id in self._away.keys() - self._addresses.keys():
            self._welcome_back(peer_id)
        if self._running:
            self._report_soon()

    def publish(self, snapshot: ModelSnapshot) -> None:
        """Serve this model from now on to whoever asks.

        Raises:
            LocalProtocolError: It hasn't the layout that we exchange.
        """
        if snapshot.tensors.layout != self.layout:
            raise LocalProtocolError("a published model has another layout than the transport")
        if snapshot is not self._published:
            self.edition = publish(snapshot, self._bits, self.edition, self._origin)
            self._published = snapshot

    async def fetch(
        self, peer_id: PeerId, have: ModelSnapshot | None, deadline_s: float
    ) -> ModelSnapshot | None:
        """Fetch a peer's newest model, or None when it is the version we have.

        Raises:
            LocalProtocolError: What we have has another layout.
            PeerUnreachable: Nobody answered in time.
            RemoteProtocolError: The peer refused, or its model isn't finite.
        """
        if have is not None and have.tensors.layout != self.layout:
            raise LocalProtocolError("a model to build on has another layout than the transport")

        async def pull() -> ModelSnapshot | None:
            peer = self._reach(peer_id)
            edition, version = peer.edition, None if have is None else have.version
            peer.asked_by(self.peer_id)
            await self._travel()
            if edition is None:
                raise PeerRefused(RefusalCode.NO_MODEL, f"{peer_id}: no model yet", 1.0)
            if edition.snapshot.version == version:
                return None
            answer = edition.answer(version, self._features)
            peer.counters.bytes_sent += answer.blob.nbytes
            self.counters.bytes_received += answer.blob.nbytes
            return replace(edition.snapshot, tensors=self._read(answer, have))

        snapshot = await self._in_time(peer_id, pull(), deadline_s)
        if snapshot is None:
            self.counters.models_unchanged += 1
        else:
            self.counters.models_fetched += 1
        return snapshot

    async def push(self, peer_id: PeerId, update: GradientUpdate, deadline_s: float) -> None:
        """Deliver a gradient to the peer on whose model it was made.

        Raises:
            LocalProtocolError: It hasn't the layout of our gradients.
            PeerUnreachable: Nobody answered in time.
            RemoteProtocolError: The peer refused.
        """
        if update.gradient.layout != self.layout.gradient:
            raise LocalProtocolError("a pushed gradient has another layout than the transport")

        async def deliver() -> None:
            peer = self._reach(peer_id)
            parcel = pack(update, self._feedbacks.of(peer_id, CODECS))
            await self._travel()
            peer.receive(self.peer_id, parcel)
            self.counters.bytes_sent += parcel.blob.nbytes

        await self._in_time(peer_id, deliver(), deadline_s)
        self.counters.gradients_sent += 1

    def publish_groups(self, groups: Groups) -> None:
        """Tell these groups from now on to whoever asks."""
        self.groups = encode_groups(groups)

    async def ask_groups(self, peer_id: PeerId, deadline_s: float) -> Groups | None:
        """Ask a peer who belongs together, or None when it doesn't know yet.

        Raises:
            PeerUnreachable: Nobody answered in time.
            RemoteProtocolError: The peer refused, or sent what can't be such an answer.
        """

        async def ask() -> Groups | None:
            peer = self._reach(peer_id)
            await self._travel()
            body = peer.groups
            peer.counters.bytes_sent += len(body)
            self.counters.bytes_received += len(body)
            try:
                return decode_groups(body) if body else None
            except RemoteProtocolError:
                self.counters.malformed += 1
                raise

        return await self._in_time(peer_id, ask(), deadline_s)

    def _read(self, answer: Answer, have: ModelSnapshot | None) -> Tensors:
        version = None if have is None else have.version
        coded = answer.encoding != Encoding.F32
        blob = answer.blob if coded else _copy(answer.blob)
        out = allocate(self.layout.size_bytes) if coded else blob
        try:
            check_answer(
                self.layout,
                answer.encoding,
                answer.base,
                blob.nbytes,
                version,
                from_origin=self._origin is not None,
            )
            return read(self.layout, replace(answer, blob=blob), have, out, self._origin)
        except RemoteProtocolError:
            self.counters.malformed += 1
            raise

    # What the network and other transports tell

    def receive(self, sender: PeerId, parcel: Parcel) -> None:
        """Take a gradient from another transport.

        Raises:
            PeerRefused: It isn't finite.
        """
        blob, out = _copy(parcel.blob), allocate(self.layout.gradient.size_bytes)
        try:
            gradient = unpack(self.layout.gradient, parcel.encoding, blob, out)
        except RemoteProtocolError as error:
            self.counters.malformed += 1
            raise PeerRefused(RefusalCode.MALFORMED, str(error)) from error
        self.counters.bytes_received += blob.nbytes
        self.counters.gradients_received += 1
        self._listener.gradient_arrived(replace(parcel.update, sender=sender, gradient=gradient))

    def asked_by(self, asker: PeerId) -> None:
        """Take note that another transport asks for our model."""
        self._listener.model_asked(asker)

    def cut_off(self, peer_id: PeerId) -> None:
        """Lose the connection to a peer, or all of them when it is our own."""
        for task, peer in list(self._under_way.items()):
            if peer_id in (peer, self.peer_id):
                task.cancel()
        if peer_id in self._addresses:
            self._mark_away(peer_id, PeerUnreachable(f"{peer_id}: the connection was lost"))

    # The journey

    def _reach(self, peer_id: PeerId) -> MemoryTransport:
        """Return the transport of a peer that can be reached and fits."""
        peer = self._network.find(self.peer_id, peer_id)
        if peer is None:
            raise PeerUnreachable(f"{peer_id}: nobody answers")
        if (peer.layout, peer.task) != (self.layout, self.task):
            difference = self.layout.first_difference(self.task, peer.layout.canonical(peer.task))
            raise PeerRefused(RefusalCode.LAYOUT, f"{peer_id} has another model: {difference}")
        return peer

    async def _travel(self) -> None:
        if self._network.loses():
            await asyncio.get_running_loop().create_future()  # no answer will ever come
        await asyncio.sleep(self._network.delay_s)

    async def _in_time(
        self, peer_id: PeerId, work: Coroutine[Any, Any, Result], deadline_s: float
    ) -> Result:
        """Do the work in a task of its own, so that losing the peer can end it."""
        if not self._running or peer_id not in self._addresses or peer_id in self._away:
            work.close()
            self.counters.requests_failed += 1
            unknown = PeerUnreachable(f"{peer_id}: no address is known, or the transport is closed")
            raise self._away.get(peer_id, unknown).with_traceback(None)
        task = asyncio.ensure_future(work)
        self._under_way[task] = peer_id
        try:
            done, _ = await asyncio.wait((task,), timeout=deadline_s)
            if task.cancelled() or not done:
                raise PeerUnreachable(f"{peer_id}: not done within {deadline_s:g} s, or lost")
            return task.result()
        except ProtocolError as error:
            self.counters.requests_failed += 1
            misfit = isinstance(error, PeerRefused) and error.code == RefusalCode.LAYOUT
            if misfit or isinstance(error, PeerUnreachable):
                self._mark_away(peer_id, error)
            raise
        finally:
            del self._under_way[task]
            task.cancel()

    def _mark_away(self, peer_id: PeerId, error: ProtocolError) -> None:
        if self._running and peer_id not in self._away:
            self._away[peer_id] = error
            self._report_soon()
            self._retry_later(peer_id, _RETRY_MIN_S)

    def _retry_later(self, peer_id: PeerId, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._retries[peer_id] = loop.call_later(pause_s, self._retry, peer_id, pause_s)

    def _retry(self, peer_id: PeerId, pause_s: float) -> None:
        try:
            self._reach(peer_id)
        except ProtocolError as error:
            self._away[peer_id] = error
            self._retry_later(peer_id, min(2 * pause_s, _RETRY_MAX_S))
        else:
            self._welcome_back(peer_id)

    def _welcome_back(self, peer_id: PeerId) -> None:
        del self._away[peer_id]
        self._retries.pop(peer_id).cancel()
        self._report_soon()

    def _report_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        neighbors = frozenset(self._addresses.keys() - self._away.keys())
        self._feedbacks.keep_only(neighbors)
        if self._running and neighbors != self._reported:
            self._reported = neighbors
            self._listener.neighbors_changed(neighbors)


def _copy(blob: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Copy bytes, as a network would."""
    buffer = allocate(blob.nbytes)
    np.copyto(buffer, blob)
    return buffer
