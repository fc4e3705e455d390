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
from protocol.codec import MAX_CHUNK_BYTES, Buffer
from protocol.errors import PeerRefused, RemoteProtocolError
from protocol.handshake import Credentials
from protocol.messages import (
    Chunk,
    ChunkRequest,
    GradientChunk,
    GradientOffer,
    GradientUpdate,
    Hello,
    LayoutExchange,
    Leave,
    Message,
    ModelOffer,
    ModelRequest,
    ModelSnapshot,
    ModelUnchanged,
    PeerId,
    Ping,
    Pong,
    Refusal,
    RefusalCode,
)
from protocol.transport.inbox import Inbox, Offload, Reply
from protocol.transport.interface import Counters
from protocol.transport.settings import TransportSettings
from protocol.transport.transfers import digest_of

logger = logging.getLogger(__name__)

_MAX_PULLS_PER_PEER = 8
_REFUSAL_INTERVAL_S = 1.0
_RETRY_SOON_S = 1.0


class Visitors(Protocol):
    """Takes note of what others tell of themselves."""

    def arrived(self, peer_id: PeerId) -> None:
        """A peer has introduced itself, and fits."""

    def misfits(self, peer_id: PeerId, error: PeerRefused) -> None:
        """A peer has introduced itself, and doesn't fit."""

    def left(self, peer_id: PeerId) -> None:
        """A peer has said goodbye."""

    def gradient_arrived(self, update: GradientUpdate) -> None:
        """A whole, verified gradient has arrived."""


@dataclass(slots=True)
class Published:
    """A model that is served; its digest comes a little later when it is large."""

    snapshot: ModelSnapshot
    view: memoryview
    digest: str | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True)
class ServedPull:
    """A model that a peer is pulling."""

    published: Published
    used_at: float


@dataclass(slots=True)
class Session:
    """What we remember of a peer that talks to us."""

    heard_at: float
    name: str = ""
    welcomed: bool = False
    pulls: dict[int, ServedPull] = field(default_factory=dict)
    strikes: deque[float] = field(default_factory=deque)
    banned_until: float = 0.0
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
        self._offload = offload
        self._now = now
        self._sessions: dict[PeerId, Session] = {}
        self._published: Published | None = None
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
        published = Published(snapshot, snapshot.tensors.buffer.data)
        self._published = published

        def take_digest(digest: str | None) -> None:
            published.digest = digest
            waiting, published.waiting = published.waiting, []
            for resume in waiting:
                resume()

        self._offload(published.view.nbytes, lambda: digest_of(published.view), take_digest)
        self._unpin()

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
            case _ if not session.welcomed:
                self._refuse_seldom(session, message, reply, RefusalCode.NO_HELLO, "say hello", 0.0)
            case ModelRequest():
                self._on_model_request(session, message, reply)
            case ChunkRequest():
                self._on_chunk_request(sender, session, message, reply)
            case GradientOffer():
                self._inbox.on_offer(sender, message, body or b"", reply)
            case GradientChunk():
                self._inbox.on_chunk(sender, message, body or b"", reply)
            case _:
                self._refuse_fault(sender, message, f"{type(message).__name__} asks nothing", reply)

    def strike(self, sender: PeerId, fault: str) -> None:
        """Count a message that the protocol doesn't allow; too many, and the peer is refused."""
        self._counters.malformed += 1
        session, settings = self._session(sender), self._settings
        session.strikes.append(session.heard_at)
        while session.strikes[0] < session.heard_at - settings.strike_window_s:
            session.strikes.popleft()
        if len(session.strikes) >= settings.max_strikes:
            session.strikes.clear()
            session.banned_until = session.heard_at + settings.ban_s
            self._release(sender, session)
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
            self._release(sender, session)

    def sweep(self) -> None:
        """Forget transfers that nobody has asked for in a while; to be called now and then."""
        horizon = self._now() - self._settings.transfer_idle_s
        for session in self._sessions.values():
            for transfer_id, pull in list(session.pulls.items()):
                if pull.used_at < horizon:
                    del session.pulls[transfer_id]
        self._inbox.sweep(horizon)

    # Handshake

    def _on_hello(self, sender: PeerId, session: Session, hello: Hello, reply: Reply) -> None:
        answer = handshake.answer(hello, self._hello)
        session.name = hello.name
        if isinstance(answer, Refusal):
            session.welcomed = False
            self._release(sender, session)
            error = PeerRefused(answer.code, f"{hello.name}: {answer.text}", answer.retry_after_s)
            if answer.code != RefusalCode.LAYOUT:  # else the layout exchange says it better
                self._visitors.misfits(sender, error)
            self._refuse_seldom(
                session, hello, reply, answer.code, answer.text, answer.retry_after_s
            )
            return
        session.welcomed = True
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

    # Models out

    def _on_model_request(self, session: Session, message: ModelRequest, reply: Reply) -> None:
        published = self._published
        if published is None:
            self.refuse(
                message.request_id, reply, RefusalCode.NO_MODEL, "no model yet", _RETRY_SOON_S
            )
            return
        version = published.snapshot.version
        if message.have == version:
            reply(ModelUnchanged(request_id=message.request_id, version=version), None)
            return
        body = published.view[: min(message.accept_bytes, MAX_CHUNK_BYTES)]
        if len(body) < published.view.nbytes:
            # At once, even if the offer must wait: the chunks may be asked for already.
            session.pulls[message.request_id] = ServedPull(published, session.heard_at)
            if len(session.pulls) > _MAX_PULLS_PER_PEER:
                del session.pulls[next(iter(session.pulls))]

        def offer() -> None:
            answer = ModelOffer(
                request_id=message.request_id,
                version=version,
                size_bytes=published.view.nbytes,
                digest=published.digest or "",
            )
            reply(answer, body)

        if published.digest is None:
            published.waiting.append(offer)
        else:
            offer()

    def _on_chunk_request(
        self, sender: PeerId, session: Session, message: ChunkRequest, reply: Reply
    ) -> None:
        pull = session.pulls.get(message.transfer_id)
        if pull is None:
            self.refuse(
                message.request_id, reply, RefusalCode.NO_TRANSFER, "ask for the model again", 0.0
            )
            return
        view, end = pull.published.view, message.offset + message.length
        if not 0 < message.length <= MAX_CHUNK_BYTES or end > view.nbytes:
            self._refuse_fault(
                sender, message, f"bytes {message.offset} to {end} of {view.nbytes}", reply
            )
            return
        pull.used_at = session.heard_at
        chunk = Chunk(
            request_id=message.request_id, transfer_id=message.transfer_id, offset=message.offset
        )
        reply(chunk, view[message.offset : end])

    def _unpin(self) -> None:
        """Let go of the oldest models that are only kept for pulls, when they are too much."""
        kept: dict[int, Published] = {}
        for session in self._sessions.values():
            for pull in session.pulls.values():
                if pull.published is not self._published:
                    kept[id(pull.published)] = pull.published
        excess = sum(old.view.nbytes for old in kept.values()) - self._settings.max_pinned_bytes
        for old in sorted(kept.values(), key=lambda published: published.snapshot.version):
            if excess <= 0:
                return
            excess -= old.view.nbytes
            for session in self._sessions.values():
                for transfer_id, pull in list(session.pulls.items()):
                    if pull.published is old:
                        del session.pulls[transfer_id]

    # Sessions and refusals

    def _session(self, sender: PeerId) -> Session:
        now = self._now()
        session = self._sessions.get(sender)
        if session is None:
            if len(self._sessions) >= self._settings.max_sessions:
                oldest = min(self._sessions, key=lambda peer: self._sessions[peer].heard_at)
                del self._sessions[oldest]
                self._inbox.forget(oldest)
            session = self._sessions[sender] = Session(now)
        session.heard_at = now
        return session

    def _release(self, sender: PeerId, session: Session) -> None:
        session.pulls.clear()
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
