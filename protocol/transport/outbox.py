"""Models that others pull from us: coded once for all, sent in chunks, kept while pulled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from protocol.codec import MAX_CHUNK_BYTES
from protocol.digest import digest_of
from protocol.editions import Answer, Edition, Origin, publish
from protocol.lowbit import Bits
from protocol.messages import (
    SIZES,
    Chunk,
    ChunkRequest,
    ModelOffer,
    ModelRequest,
    ModelSnapshot,
    ModelUnchanged,
    PeerId,
    RefusalCode,
    Version,
)
from protocol.transport.inbox import Desk, Offload, Reply
from protocol.transport.settings import TransportSettings
from protocol.transport.transfers import CODING

_MAX_PULLS_PER_PEER = 8
# The largest window in the smallest chunks: nobody asks for more before the offer comes.
_MAX_WAITING_CHUNKS = 64
_RETRY_SOON_S = 1.0

Digests = dict[Answer, str]


@dataclass(slots=True, eq=False)
class _Published:
    """A version that is served, or will be once it is coded.

    Attributes:
        version: Which one.
        edition: None until it is coded.
        digests: Of what it may be answered with; that of a large model comes a little later.
    """

    version: Version
    edition: Edition | None = None
    digests: Digests = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Pull:
    """What a peer is pulling.

    Attributes:
        published: The version until it is offered; None then, as an answer takes less memory.
        version: Which one.
        used_at: When it was last asked for.
        answer: What is sent, once that is known.
        waiting: What goes on when edition and digests are there: the offer, then chunks.
    """

    published: _Published | None
    version: Version
    used_at: float
    answer: Answer | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Outbox:
    """The newest model of ours, and older ones as long as somebody pulls them.

    Versions are coded one after the other. One that is succeeded before its turn has come is never
    coded, and whoever has asked for it gets its successor.

    Args:
        bits: The codec's width, None for no codec.
        origin: What first models go on from.
        size_bytes: Of a model.
        settings: Limits.
        desk: Who runs this.
        offload: Does work that may take long.
        now: The clock.
    """

    def __init__(
        self,
        *,
        bits: Bits | None,
        origin: Origin | None,
        size_bytes: int,
        settings: TransportSettings,
        desk: Desk,
        offload: Offload,
        now: Callable[[], float],
    ) -> None:
        self._bits = bits
        self._origin = origin
        self._size_bytes = size_bytes
        self._settings = settings
        self._desk = desk
        self._offload = offload
        self._now = now
        self._newest: _Published | None = None
        self._next: ModelSnapshot | None = None  # what becomes of `_newest`, until its turn comes
        self._coding = False
        self._pulls: dict[PeerId, dict[int, _Pull]] = {}
        self.edition: Edition | None = None

    def publish(self, snapshot: ModelSnapshot) -> None:
        """Serve this model from now on; pulls that have begun go on with theirs."""
        if self._bits is None:
            edition = self.edition = publish(snapshot, None)
            published = self._newest = _Published(snapshot.version, edition)
            self._offload(
                self._size_bytes,
                lambda: _digests_of(edition),
                lambda digests: self._complete(published, digests),
            )
            return
        if self._newest is not None and self._next is not None:
            self._newest.version = snapshot.version
        else:
            self._newest = _Published(snapshot.version)
        self._next = snapshot
        if not self._coding:
            self._code(self._newest, snapshot)

    def on_request(
        self, sender: PeerId, request: ModelRequest, features: Collection[str], reply: Reply
    ) -> None:
        """Offer the newest model, now or when it is coded."""
        request_id, published = request.request_id, self._newest
        if published is None:
            text = "no model yet"
            self._desk.refuse(request_id, reply, RefusalCode.NO_MODEL, text, _RETRY_SOON_S)
            return
        if request.have == published.version:
            reply(ModelUnchanged(request_id=request_id, version=published.version), None)
            return
        # At once, even if the offer must wait: the chunks may be asked for already.
        pulls = self._pulls.setdefault(sender, {})
        pulls[request_id] = _Pull(published, published.version, self._now())
        if len(pulls) > _MAX_PULLS_PER_PEER:
            del pulls[next(iter(pulls))]
        self._offer(sender, request, features, reply)

    def on_chunk(self, sender: PeerId, message: ChunkRequest, reply: Reply) -> None:
        """Send a part of what is pulled; of a range that ends beyond it, what there is."""
        request_id, pull = message.request_id, self._pulls.get(sender, {}).get(message.transfer_id)
        if pull is None:
            text = "ask for the model again"
            self._desk.refuse(request_id, reply, RefusalCode.NO_TRANSFER, text, 0.0)
            return
        end = message.offset + message.length
        if not 0 < message.length <= MAX_CHUNK_BYTES or end > self._size_bytes:
            fault = f"bytes {message.offset} to {end} of {self._size_bytes}"
            self._desk.strike(sender, fault)
            self._desk.refuse(request_id, reply, RefusalCode.MALFORMED, fault, 0.0)
            return
        pull.used_at = self._now()
        if pull.answer is not None:
            chunk = Chunk(
                request_id=request_id, transfer_id=message.transfer_id, offset=message.offset
            )
            reply(chunk, pull.answer.blob.data[message.offset : end])
        elif len(pull.waiting) <= _MAX_WAITING_CHUNKS:
            pull.waiting.append(lambda: self.on_chunk(sender, message, reply))
        else:
            text = "too many chunks before the offer"
            self._desk.refuse(request_id, reply, RefusalCode.BUSY, text, _RETRY_SOON_S)

    def drop(self, sender: PeerId) -> None:
        """Drop what a peer is pulling."""
        self._pulls.pop(sender, None)

    def sweep(self, horizon: float) -> None:
        """Drop what nobody has asked for since the horizon."""
        for sender, pulls in list(self._pulls.items()):
            for transfer_id, pull in list(pulls.items()):
                if pull.used_at < horizon and not pull.waiting:
                    del pulls[transfer_id]
            if not pulls:
                del self._pulls[sender]

    def _code(self, published: _Published, snapshot: ModelSnapshot) -> None:
        """Make the edition of the newest version, and then of what has become the newest."""
        before, self._next, self._coding = self.edition, None, True

        def work() -> tuple[Edition, Digests]:
            edition = publish(snapshot, self._bits, before, self._origin)
            return edition, _digests_of(edition)

        def done(result: tuple[Edition, Digests]) -> None:
            self._coding = False
            published.edition, digests = result
            self.edition = published.edition
            self._complete(published, digests)
            if self._next is not None and self._newest is not None:
                self._code(self._newest, self._next)

        self._offload(CODING * self._size_bytes, work, done)

    def _offer(
        self, sender: PeerId, request: ModelRequest, features: Collection[str], reply: Reply
    ) -> None:
        """Offer what suits the asker; wait where edition or digest aren't there yet."""
        pulls = self._pulls.get(sender, {})
        pull = pulls.get(request.request_id)
        if pull is None or pull.published is None:
            return  # dropped meanwhile
        published, edition = pull.published, pull.published.edition
        if edition is not None:
            pull.version, pull.answer = published.version, edition.answer(request.have, features)
        if edition is None or pull.answer not in published.digests:
            pull.waiting.append(lambda: self._offer(sender, request, features, reply))
            return
        answer, pull.published = pull.answer, None
        accepted = min(request.accept_bytes, MAX_CHUNK_BYTES)
        if accepted >= self._size_bytes:
            del pulls[request.request_id]  # there will be no chunk to ask for
        offer = ModelOffer(
            request_id=request.request_id,
            version=published.version,
            size_bytes=answer.blob.nbytes,
            digest=published.digests[answer],
            friends=edition.snapshot.friends,
            encoding=answer.encoding,
            base=answer.base,
            leads_to=answer.leads_to,
            num_examples=edition.snapshot.num_examples if SIZES in features else 0,
        )
        reply(offer, answer.blob.data[:accepted])

    def _complete(self, published: _Published, digests: Digests) -> None:
        """Go on with what has waited for a version, the pulls of each peer in order."""
        published.digests = digests
        waiting: list[Callable[[], None]] = []
        for pulls in self._pulls.values():
            for pull in pulls.values():
                if pull.published is published:
                    waiting += pull.waiting
                    pull.waiting = []
        for resume in waiting:
            resume()
        self._unpin()

    def _unpin(self) -> None:
        """Let go of the oldest models that are only kept for pulls, when they are too much."""
        newest = None if self.edition is None else self.edition.snapshot.version
        kept = {
            pull.answer: pull.version
            for pulls in self._pulls.values()
            for pull in pulls.values()
            if pull.answer is not None and pull.version != newest
        }
        excess = sum(answer.memory_bytes for answer in kept) - self._settings.max_pinned_bytes
        for answer in sorted(kept, key=lambda answer: kept[answer]):
            if excess <= 0:
                return
            excess -= answer.memory_bytes
            for pulls in self._pulls.values():
                for transfer_id, pull in list(pulls.items()):
                    if pull.answer is answer:
                        del pulls[transfer_id]


def _digests_of(edition: Edition) -> Digests:
    return {answer: digest_of(answer.blob.data) for answer in edition.answers()}
