"""What others ask of us: from (sender, message, body) to (reply, body), with no socket in sight."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from protocol import handshake
from protocol.codec import Buffer
from protocol.editions import Origin
from protocol.errors import PeerRefused, RemoteProtocolError
from protocol.groups import Groups, encode_groups
from protocol.handshake import Credentials
from protocol.lowbit import Bits
from protocol.messages import (
    ChunkRequest,
    GossipRequest,
    GradientChunk,
    GradientOffer,
    GradientUpdate,
    GroupsAnswer,
    GroupsRequest,
    Hello,
    LayoutExchange,
    Leave,
    Message,
    ModelRequest,
    ModelSnapshot,
    PeerId,
    Ping,
    Pong,
    Refusal,
    RefusalCode,
    StatusRequest,
)
from protocol.transport.inbox import Inbox, Offload, Reply
from protocol.transport.interface import Counters
from protocol.transport.outbox import Outbox
from protocol.transport.settings import TransportSettings

logger = logging.getLogger(__name__)

_REFUSAL_INTERVAL_S = 1.0


class Visitors(Protocol):
    """Takes note of what others tell of themselves."""

    def arrived(self, peer_id: PeerId) -> None:
        """A peer has introduced itself, and fits."""

    def misfits(self, peer_id: PeerId, error: PeerRefused) -> None:
        """A peer has introduced itself, and doesn't fit."""

    def left(self, peer_id: PeerId) -> None:
        """A peer has said goodbye."""

    def gossiped(self, peer_id: PeerId, message: GossipRequest, body: Buffer, reply: Reply) -> None:
        """A peer tells and asks for members; raises `RemoteProtocolError` when it is no gossip."""

    def gradient_arrived(self, update: GradientUpdate) -> None:
        """A whole, verified gradient has arrived."""

    def model_asked(self, peer_id: PeerId) -> None:
        """A peer has asked for the model."""


@dataclass(slots=True)
class Session:
    """What we remember of a peer that talks to us."""

    heard_at: float
    name: str = ""
    welcomed: bool = False
    features: frozenset[str] = frozenset()
    strikes: deque[float] = field(default_factory=deque)
    banned_until: float = 0.0
    looked_at: float = float("-inf")
    refused_at: float = float("-inf")
    compared_at: float = float("-inf")


class Served:
    """Answers the requests of others; nothing that they send makes it raise.

    Transfers are keyed by peer and transfer id, never by connection, so that they outlive one.
    """

    def __init__(
        self,
        *,
        credentials: Credentials,
        bits: Bits | None,
        origin: Origin | None,
        settings: TransportSettings,
        counters: Counters,
        visitors: Visitors,
        offload: Offload,
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        now: Callable[[], float],
    ) -> None:
        self._credentials = credentials
        self._hello = credentials.hello(0)
        self._settings = settings
        self._counters = counters
        self._visitors = visitors
        self._now = now
        self._sessions: dict[PeerId, Session] = {}
        self._groups = b""
        self._outbox = Outbox(
            bits=bits,
            origin=origin,
            size_bytes=credentials.layout.size_bytes,
            settings=settings,
            desk=self,
            offload=offload,
            now=now,
        )
        self._inbox = Inbox(
            layout=credentials.layout.gradient,
            settings=settings,
            desk=self,
            offload=offload,
            allocate=allocate,
            now=now,
        )

    def publish(self, snapshot: ModelSnapshot) -> None:
        """Serve this model from now on; pulls that have begun go on with theirs."""
        self._outbox.publish(snapshot)

    def publish_groups(self, groups: Groups) -> None:
        """Tell of these groups from now on."""
        self._groups = encode_groups(groups)

    @property
    def public(self) -> ModelSnapshot | None:
        """The newest model that others can have, as they will have it."""
        return None if self._outbox.edition is None else self._outbox.edition.snapshot

    def handle(self, sender: PeerId, message: Message, body: Buffer | None, reply: Reply) -> None:
        """Answer one request, at once or later."""
        session = self._session(sender)
        if session.banned_until > session.heard_at:
            wait_s = session.banned_until - session.heard_at
            self._refuse_seldom(
                session, message, reply, RefusalCode.NOT_ALLOWED, "too many faults", wait_s
            )
            return
        match message:
            case Hello():
                self._on_hello(sender, session, message, reply)
            case LayoutExchange():
                self._on_layout(sender, session, message, body or b"", reply)
            case Leave():
                self.forget(sender)
                self._visitors.left(sender)
            case Ping():
                reply(Pong(request_id=message.request_id), None)
            case StatusRequest():
                text = "your key is not among our operators' (network.operators)"
                self._refuse_seldom(session, message, reply, RefusalCode.NOT_ALLOWED, text, 0.0)
            case _ if not session.welcomed:
                self._refuse_seldom(session, message, reply, RefusalCode.NO_HELLO, "say hello", 0.0)
            case ModelRequest():
                self._outbox.on_request(sender, message, session.features, reply)
                self._visitors.model_asked(sender)
            case ChunkRequest():
                self._outbox.on_chunk(sender, message, reply)
            case GradientOffer():
                self._inbox.on_offer(sender, message, body or b"", reply)
            case GradientChunk():
                self._inbox.on_chunk(sender, message, body or b"", reply)
            case GroupsRequest():
                reply(GroupsAnswer(request_id=message.request_id), self._groups)
            case GossipRequest():
                try:
                    self._visitors.gossiped(sender, message, body or b"", reply)
                except RemoteProtocolError as error:
                    self._refuse_fault(sender, message, str(error), reply)
            case _:
                self._refuse_fault(sender, message, f"{type(message).__name__} asks nothing", reply)

    def bans(self, sender: PeerId) -> bool:
        """Say whether a peer is refused for a while, for its many faults."""
        session = self._sessions.get(sender)
        return session is not None and session.banned_until > self._now()

    def shuns(self, sender: PeerId) -> bool:
        """Say whether to drop a message unread: of a banned peer all but one a second."""
        if not self.bans(sender):
            return False
        session, now = self._sessions[sender], self._now()
        if now - session.looked_at < _REFUSAL_INTERVAL_S:
            self._counters.shunned += 1
            return True
        session.looked_at = now
        return False

    def strike(self, sender: PeerId, fault: str) -> None:
        """Count a message that the protocol doesn't allow; too many, and the peer is refused."""
        self._counters.malformed += 1
        session, settings = self._session(sender), self._settings
        session.strikes.append(session.heard_at)
        while session.strikes[0] < session.heard_at - settings.strike_window_s:
            session.strikes.popleft()
        if len(session.strikes) >= settings.max_strikes:
            session.strikes.clear()
            self._counters.peers_banned += 1
            session.banned_until = session.heard_at + settings.ban_s
            self._release(sender)
            logger.warning(
                "refusing %s for %g s after %d malformed messages; the last: %s",
                session.name or sender,
                settings.ban_s,
                settings.max_strikes,
                fault,
            )

    def deliver(self, update: GradientUpdate) -> None:
        """Pass on a gradient that was verified."""
        self._counters.gradients_received += 1
        self._visitors.gradient_arrived(update)

    def forget(self, sender: PeerId) -> None:
        """Drop the transfers of a peer, and that it was welcomed."""
        session = self._sessions.get(sender)
        if session is not None:
            session.welcomed = False
            self._release(sender)

    def sweep(self) -> None:
        """Forget transfers that nobody has asked for in a while; to be called now and then."""
        horizon = self._now() - self._settings.transfer_idle_s
        self._outbox.sweep(horizon)
        self._inbox.sweep(horizon)

    # Handshake

    def _on_hello(self, sender: PeerId, session: Session, hello: Hello, reply: Reply) -> None:
        answer = handshake.answer(hello, self._hello)
        session.name = hello.name
        if isinstance(answer, Refusal):
            session.welcomed = False
            self._release(sender)
            error = PeerRefused(answer.code, f"{hello.name}: {answer.text}", answer.retry_after_s)
            if answer.code != RefusalCode.LAYOUT:  # else the layout exchange says it better
                self._visitors.misfits(sender, error)
            self._refuse_seldom(
                session, hello, reply, answer.code, answer.text, answer.retry_after_s
            )
            return
        session.welcomed, session.features = True, frozenset(answer.features)
        reply(answer, None)
        self._visitors.arrived(sender)

    def _on_layout(
        self,
        sender: PeerId,
        session: Session,
        message: LayoutExchange,
        theirs: Buffer,
        reply: Reply,
    ) -> None:
        if session.heard_at - session.compared_at < _REFUSAL_INTERVAL_S:
            return  # a long one takes a while to read
        session.compared_at = session.heard_at
        try:
            error = handshake.layout_misfit(session.name, self._credentials, bytes(theirs))
        except RemoteProtocolError as fault:
            self._refuse_fault(sender, message, str(fault), reply)
            return
        reply(LayoutExchange(request_id=message.request_id), self._credentials.description())
        self._visitors.misfits(sender, error)

    # Sessions and refusals

    def _session(self, sender: PeerId) -> Session:
        now = self._now()
        session = self._sessions.get(sender)
        if session is None:
            if len(self._sessions) >= self._settings.max_sessions:
                oldest = min(self._sessions, key=lambda peer: self._sessions[peer].heard_at)
                del self._sessions[oldest]
                self._outbox.drop(oldest)
                self._inbox.forget(oldest)
            session = self._sessions[sender] = Session(now)
        session.heard_at = now
        return session

    def _release(self, sender: PeerId) -> None:
        self._outbox.drop(sender)
        self._inbox.drop(sender)

    def refuse(
        self, request_id: int, reply: Reply, code: RefusalCode, text: str, retry_after_s: float
    ) -> None:
        """Refuse a request."""
        self._counters.requests_refused += 1
        refusal = Refusal(
            request_id=request_id, code=code, text=text[:512], retry_after_s=retry_after_s
        )
        reply(refusal, None)

    def _refuse_seldom(
        self,
        session: Session,
        message: Message,
        reply: Reply,
        code: RefusalCode,
        text: str,
        retry_after_s: float,
    ) -> None:
        """Refuse whoever isn't welcome, at most once a second."""
        if session.heard_at - session.refused_at >= _REFUSAL_INTERVAL_S:
            session.refused_at = session.heard_at
            self.refuse(message.request_id, reply, code, text, retry_after_s)

    def _refuse_fault(self, sender: PeerId, message: Message, fault: str, reply: Reply) -> None:
        self.strike(sender, fault)
        self.refuse(message.request_id, reply, RefusalCode.MALFORMED, fault, 0.0)
