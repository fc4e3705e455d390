"""The transport over ZeroMQ: ROUTER and DEALER, request and reply, CURVE always on."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zmq

from protocol.codec import Buffer, decode, encode
from protocol.editions import Origin, readable
from protocol.errors import (
    ConfigError,
    LocalProtocolError,
    PeerRefused,
    PeerUnreachable,
    RemoteProtocolError,
)
from protocol.gossip import GOSSIP
from protocol.gradients import Feedbacks
from protocol.groups import Groups
from protocol.handshake import FEATURES, Credentials
from protocol.identity import AllowList, KeyPair, peer_id_of
from protocol.lowbit import Bits
from protocol.messages import (
    GossipAnswer,
    GossipRequest,
    GradientUpdate,
    Message,
    ModelSnapshot,
    PeerId,
    Refusal,
    RefusalCode,
    StatusReport,
    StatusRequest,
)
from protocol.status import Counted, Learning, PeerStatus, encode_status
from protocol.tensors import Layout, Tensors
from protocol.transport.admission import Admission, Doorkeeper
from protocol.transport.asking import Asking
from protocol.transport.connection import Connection, State
from protocol.transport.dial import Surroundings
from protocol.transport.endpoint import advertised, parse_endpoint
from protocol.transport.inbox import Reply
from protocol.transport.interface import Address, Counters, Gossip, Listener
from protocol.transport.pool import BufferPool
from protocol.transport.port import Frames, Port
from protocol.transport.served import Served
from protocol.transport.settings import TransportSettings
from protocol.transport.sockets import bind, hang_up, make_context, make_listener

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_SWEEP_INTERVAL_S = 1.0
_REFUSAL_INTERVAL_S = 1.0
_NOT_REACHABLE = frozenset({State.UNREACHABLE, State.MISFIT})


class ZeroMQTransport:
    """Carries whole models and gradients between peers over ZeroMQ.

    Fulfills `protocol.transport.interface.Transport`. Everything runs on the event loop that
    `start` is called on, but for what takes long with large blobs (coding, digests and checks),
    which one worker thread does. Published tensors, and gradients being pushed, are sent without a
    copy: they must never change.
    """

    def __init__(
        self,
        *,
        key_pair: KeyPair,
        allow_list: AllowList,
        listen: str,
        advertise: str | None,
        federation_id: str,
        name: str,
        incarnation: int,
        layout: Layout,
        task: str,
        listener: Listener,
        bits: Bits | None = None,
        initial: Tensors | None = None,
        settings: TransportSettings | None = None,
        operators: AllowList | None = None,
        learning: Callable[[], Learning] = Learning,
        gossip: Gossip | None = None,
    ) -> None:
        """Take the settings; nothing is opened before `start`.

        Args:
            key_pair: Our own keys, which make our peer id.
            allow_list: Who may connect.
            listen: Such as `tcp://127.0.0.1:7001`, `tcp://[::1]:7001` or `tcp://*:7001`; with port
                0 the system picks one.
            advertise: What others dial, where it differs from `listen`.
            federation_id: Keeps two federations on one network apart.
            name: What people call us.
            incarnation: Grows with every start.
            layout: Of the models that we exchange; gradients have `layout.gradient`.
            task: What the models are for, with its label map.
            listener: Is told of gradients, and of peers that come and go.
            bits: The width of the codec for what we send to who can read it; None sends all as it
                is. What others send is read in any case.
            initial: The model to begin with, before any step. Coded first models are differences to
                it, for peers that begin with the same one; None sends them whole.
            settings: Deadlines and limits.
            operators: Who may ask for our status, and for nothing else; None lets nobody.
            learning: Tells operators how far the learning is.
            gossip: Keeps members up to date; None keeps to the neighbors that it is given.

        Raises:
            ConfigError: An endpoint is malformed, or what would be advertised is a wildcard.
            LocalProtocolError: The initial model hasn't that layout.
        """
        self.counters = Counters()
        self._key_pair = key_pair
        self._peer_id = key_pair.peer_id
        self._allow_list = allow_list
        self._listen = parse_endpoint(listen, "listen")
        self._advertise = advertise
        advertised(self._listen, advertise, 0)
        self._origin = Origin.of(initial, layout)
        features = {*FEATURES, *readable(self._origin), *([GOSSIP] if gossip else [])}
        self._describe = functools.partial(
            Credentials,
            federation_id=federation_id,
            name=name,
            incarnation=incarnation,
            layout=layout,
            task=task,
            features=tuple(sorted(features)),
        )
        self._layout = layout
        self._bits: Bits | None = bits
        self._listener = listener
        self._settings = settings or TransportSettings()
        self._operators = operators
        self._learning = learning
        self._gossip = gossip
        self._feedbacks = Feedbacks(layout.gradient, bits, self._settings.max_feedback_bytes)
        self._pool = BufferPool(self._settings.buffer_idle_s)
        self._addresses: dict[PeerId, Address] = {}
        self._connections: dict[PeerId, Connection] = {}
        self._asking = Asking(
            connections=self._connections,
            layout=layout,
            origin=self._origin,
            settings=self._settings,
            counters=self.counters,
            feedbacks=self._feedbacks,
            allocate=self._allocate,
            work=self._work,
            strike=self.strike,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._reported: frozenset[PeerId] | None = None
        self._report_scheduled = False
        self._refused_at: dict[str, float] = {}
        self._running = False
        self._snapshot: ModelSnapshot | None = None
        self._groups: Groups | None = None

    # The life of the transport

    async def start(self) -> str:
        """Listen, and return the endpoint to be advertised, with its real port.

        Raises:
            BindError: The address can't be listened on.
        """
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verify")
        router, self._port = await self._bind()
        endpoint = str(advertised(self._listen, self._advertise, self._port))
        self._credentials = credentials = self._describe(advertise=endpoint)
        self._began = self._loop.time()
        self._served = Served(
            credentials=credentials,
            bits=self._bits,
            origin=self._origin,
            settings=settings,
            counters=self.counters,
            visitors=self,
            offload=self._offload,
            allocate=self._allocate,
            now=self._loop.time,
        )
        self._around = Surroundings(
            context=self._context,
            key_pair=self._key_pair,
            credentials=credentials,
            settings=settings,
            counters=self.counters,
            spawn=self._spawn,
            on_change=self._report_soon,
        )
        self._router = Port(router, self._on_request)
        self._running = True
        self._sweeping = self._loop.call_later(_SWEEP_INTERVAL_S, self._sweep)
        if self._snapshot is not None:
            self._served.publish(self._snapshot)
        if self._groups is not None:
            self._served.publish_groups(self._groups)
        self.set_neighbors(self._addresses)
        return endpoint

    async def _bind(self) -> tuple[zmq.Socket[bytes], int]:
        """Open the door; return the socket and the real port."""
        self._context = make_context()
        interval_s = self._settings.allow_list_interval_s
        self._admission = Admission(self._allow_list, interval_s)
        self._oversight = None
        if self._operators is not None:
            self._oversight = Admission(self._operators, interval_s)
        # The order matters: bound without an answering ZAP handler, a CURVE server admits anyone.
        self._doorkeeper = Doorkeeper(self._context, self._objection, self.counters)
        router = make_listener(self._context, self._key_pair)
        try:
            return router, await bind(router, self._listen, self._settings.bind_retry_s)
        except BaseException:
            router.close(0)
            self._doorkeeper.close()
            self._context.term()
            raise

    async def close(self) -> None:
        """Say goodbye, end every transfer and close every socket."""
        if not self._running:
            return
        self._running = False
        self._sweeping.cancel()
        for connection in self._connections.values():
            connection.close(goodbye=True)
        self._connections.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._router.close()
        self._doorkeeper.close()
        self._worker.shutdown(wait=False)
        # Waits for the goodbyes to leave; not on the loop, which others may need.
        await self._loop.run_in_executor(None, self._context.term)

    # What the owner asks

    def set_neighbors(self, addresses: Mapping[PeerId, Address]) -> None:
        """Replace the known peers; connections to those no longer known are closed.

        Raises:
            ConfigError: An endpoint is malformed, or a key doesn't belong to its peer id.
        """
        for peer_id, address in addresses.items():
            parse_endpoint(address.endpoint, f"the address of {address.name}")
            if peer_id_of(address.public_key) != peer_id:
                raise ConfigError(
                    f"the public key of {address.name} belongs to another peer than {peer_id}"
                )
        self._addresses = {
            peer_id: address for peer_id, address in addresses.items() if peer_id != self._peer_id
        }
        if not self._running:
            return
        for peer_id in self._connections.keys() - self._addresses.keys():
            self._connections.pop(peer_id).close(goodbye=True)
        for peer_id, address in self._addresses.items():
            if peer_id in self._connections:
                self._connections[peer_id].move(address)
            else:
                self._connections[peer_id] = Connection(peer_id, address, self._around)
        self._report_soon()

    def publish(self, snapshot: ModelSnapshot) -> None:
        """Serve this model from now on to whoever is allowed to ask.

        Raises:
            LocalProtocolError: It hasn't the layout that we exchange.
        """
        if snapshot.tensors.layout != self._layout:
            raise LocalProtocolError("a published model has another layout than the transport")
        if snapshot is self._snapshot:
            return
        if self._running:
            self._served.publish(snapshot)
        self._snapshot = snapshot

    async def fetch(
        self, peer_id: PeerId, have: ModelSnapshot | None, deadline_s: float
    ) -> ModelSnapshot | None:
        """Fetch a peer's newest model, or None when it is the version we have.

        Raises:
            LocalProtocolError: What we have has another layout.
            PeerUnreachable: Nobody answered in time.
            PeerRefused: The peer said no.
            RemoteProtocolError: The peer sent what doesn't hold.
        """
        return await self._asking.fetch(peer_id, have, deadline_s)

    async def push(self, peer_id: PeerId, update: GradientUpdate, deadline_s: float) -> None:
        """Deliver a gradient to the peer on whose model it was made.

        Raises:
            LocalProtocolError: It hasn't the layout of our gradients.
            PeerUnreachable: Nobody answered in time.
            PeerRefused: The peer said no.
            RemoteProtocolError: The peer sent what the protocol doesn't allow.
        """
        await self._asking.push(peer_id, update, deadline_s)

    def publish_groups(self, groups: Groups) -> None:
        """Tell these groups from now on to whoever is allowed to ask."""
        if self._running:
            self._served.publish_groups(groups)
        self._groups = groups

    async def ask_groups(self, peer_id: PeerId, deadline_s: float) -> Groups | None:
        """Ask a peer who belongs together, or None when it doesn't know yet.

        Raises:
            PeerUnreachable: Nobody answered in time, or the peer answers no such question.
            PeerRefused: The peer said no.
            RemoteProtocolError: The peer sent what can't be such an answer.
        """
        return await self._asking.groups(peer_id, deadline_s)

    async def ask_member(self, peer_id: PeerId, body: bytes, deadline_s: float) -> Buffer:
        """Tell a member, and return what it answers.

        Raises:
            PeerUnreachable: Nobody answered in time, or it takes no part in gossip.
            RemoteProtocolError: It refused, or the answer is no gossip.
        """
        return await self._asking.member(peer_id, body, deadline_s)

    def strike(self, peer_id: PeerId, fault: str) -> None:
        """Count what no honest peer does."""
        self._served.strike(peer_id, fault)

    # What others ask

    def _on_request(self, frames: Frames) -> None:
        self.counters.bytes_received += sum(map(len, frames))
        route, parts = frames[0].bytes, [frame.bytes for frame in frames[1:3]]
        public_key = _user_of(frames[1])
        sender = self._admission.sender(public_key)
        if sender is not None and self._served.shuns(sender):
            hang_up(frames[0], self._port)
            return
        reply = functools.partial(self._reply, route)
        try:
            # Only a body is worth not copying; a message of more frames is refused by `decode`.
            message, body = decode((*parts, *(frame.buffer for frame in frames[3:])))
        except RemoteProtocolError as error:
            if sender is None:  # an operator, or no longer allowed
                hang_up(frames[0], self._port)
            else:
                self._served.strike(sender, str(error))
            return
        if isinstance(message, StatusRequest) and self._is_operator(public_key):
            self.counters.status_reports += 1
            report = StatusReport(request_id=message.request_id)
            reply(report, encode_status(self.status()))
        elif sender is None:
            self._shut_out(public_key, message, reply, frames[0])
        else:
            self._served.handle(sender, message, body, reply)

    def _reply(self, route: bytes, message: Message, body: Buffer | None) -> None:
        if not self._running:
            return
        frames = encode(message, body)
        if self._router.send((route, *frames)):
            self.counters.bytes_sent += sum(map(len, frames))
        else:
            self.counters.replies_dropped += 1

    def _shut_out(self, public_key: str, message: Message, reply: Reply, frame: zmq.Frame) -> None:
        """Refuse a peer that was allowed when it connected, and cut it off if it goes on."""
        self.counters.requests_refused += 1
        now = self._loop.time()
        if now < self._refused_at.get(public_key, float("-inf")) + _REFUSAL_INTERVAL_S:
            hang_up(frame, self._port)
            return
        if public_key not in self._refused_at:
            logger.warning("%s is no longer in the allow-list and is shut out", public_key)
        self._refused_at[public_key] = now
        self._served.forget(peer_id_of(public_key))
        reply(
            Refusal(
                request_id=message.request_id,
                code=RefusalCode.NOT_ALLOWED,
                text="your key is not in the allow-list",
                retry_after_s=self._settings.redial_max_s,
            ),
            None,
        )

    # What operators ask

    def _is_operator(self, public_key: str) -> bool:
        return self._oversight is not None and self._oversight.sender(public_key) is not None

    def _objection(self, public_key: str) -> str:
        """Say why a key may not connect now; nothing when it may."""
        sender = self._admission.sender(public_key)
        if sender is not None and self._served.bans(sender):
            return "has sent too many malformed messages"
        if sender is None and not self._is_operator(public_key):
            return "is not in the allow-list"
        return ""

    def status(self) -> PeerStatus:
        """Return how we are doing."""
        ours, learning = self._credentials, self._learning()
        members = [each.describe(self._standing_of) for each in self._connections.values()]
        return PeerStatus(
            peer_id=self._peer_id,
            name=ours.name,
            federation=ours.federation_id,
            endpoint=ours.advertise,
            incarnation=ours.incarnation,
            running_s=round(self._loop.time() - self._began, 3),
            round_number=learning.round_number,
            rounds=learning.rounds,
            loss=learning.loss,
            weights=learning.largest(),
            clustering=learning.clustering,
            members=tuple(sorted(members, key=lambda member: member.name)),
            num_members=len(members),
            counters=(*map(Counted._make, self.counters.by_name().items()), *learning.counters),
            refused_keys=self._doorkeeper.refused_keys,
        )

    def _standing_of(self, peer_id: PeerId) -> str:
        return "" if self._gossip is None else self._gossip.standing_of(peer_id)

    # What peers tell of themselves

    def arrived(self, peer_id: PeerId) -> None:
        """Dial a peer that has introduced itself, if it was thought unreachable."""
        if peer_id in self._connections:
            self._connections[peer_id].nudge()

    def misfits(self, peer_id: PeerId, error: PeerRefused) -> None:
        """Leave out a peer that has introduced itself and doesn't fit."""
        if peer_id in self._connections:
            self._connections[peer_id].misfit(error)
        else:
            logger.warning("%s", error)

    def left(self, peer_id: PeerId) -> None:
        """Count a peer that said goodbye as unreachable."""
        connection = self._connections.get(peer_id)
        if connection is not None:
            connection.lost(PeerUnreachable(f"{connection.address.name}: it has left"))
        if self._gossip is not None:
            self._gossip.left(peer_id)

    def gossiped(self, peer_id: PeerId, message: GossipRequest, body: Buffer, reply: Reply) -> None:
        """Pass on what a member tells and asks."""
        if self._gossip is None:
            raise RemoteProtocolError("gossip that wasn't agreed on")
        answer = GossipAnswer(request_id=message.request_id)
        self._gossip.asked(peer_id, body, lambda told: reply(answer, told))

    def gradient_arrived(self, update: GradientUpdate) -> None:
        """Hand over a whole, verified gradient."""
        self._listener.gradient_arrived(update)

    def model_asked(self, peer_id: PeerId) -> None:
        """Tell that a peer asked for the model."""
        self._listener.model_asked(peer_id)

    # Housekeeping

    def _allocate(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        return self._pool.take(size_bytes, self._loop.time())

    async def _work(self, size_bytes: int, work: Callable[[], Result]) -> Result:
        if size_bytes <= self._settings.verify_inline_bytes:
            return work()
        return await self._loop.run_in_executor(self._worker, work)

    def _offload(
        self, size_bytes: int, work: Callable[[], Result], then: Callable[[Result], None]
    ) -> None:
        if size_bytes <= self._settings.verify_inline_bytes:
            then(work())
            return

        def finish(future: asyncio.Future[Result]) -> None:
            if self._running and not future.cancelled():
                then(future.result())

        self._loop.run_in_executor(self._worker, work).add_done_callback(finish)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sweep(self) -> None:
        """Forget idle transfers, and close bulk connections that are idle or too many."""
        self._sweeping = self._loop.call_later(_SWEEP_INTERVAL_S, self._sweep)
        self._served.sweep()
        self._pool.sweep(self._loop.time())
        idle = sorted(
            (connection for connection in self._connections.values() if connection.has_idle_bulk),
            key=lambda connection: connection.bulk_used_at,
        )
        horizon = self._loop.time() - self._settings.bulk_idle_s
        for position, connection in enumerate(reversed(idle)):
            if position >= self._settings.max_idle_bulk or connection.bulk_used_at < horizon:
                connection.close_bulk()

    def _report_soon(self) -> None:
        if not self._report_scheduled:
            self._report_scheduled = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._report_scheduled = False
        neighbors = frozenset(
            peer_id
            for peer_id, connection in self._connections.items()
            if connection.state not in _NOT_REACHABLE
        )
        self._feedbacks.keep_only(neighbors)
        if self._running and neighbors != self._reported:
            self._reported = neighbors
            self._listener.neighbors_changed(neighbors)


def _user_of(frame: zmq.Frame) -> str:
    """Return the key that the handshake proved, never a field that the sender wrote."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
