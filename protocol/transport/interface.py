"""The `Transport` interface and its promises; `tests/conformance` holds every transport to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from protocol.codec import Buffer
from protocol.groups import Groups
from protocol.messages import GradientUpdate, ModelSnapshot, PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a peer can be reached.

    Attributes:
        name: What people call it.
        endpoint: Such as `tcp://127.0.0.1:7001` or `tcp://[::1]:7001`.
        public_key: Its CURVE public key, z85-encoded, 40 characters.
    """

    name: str
    endpoint: str
    public_key: str


@dataclass(slots=True, kw_only=True)
class Counters:
    """What a transport moved and refused since it started.

    Attributes:
        bytes_sent: Bytes of all frames handed to the network.
        bytes_received: Bytes of all frames that came from it.
        models_fetched: Whole models received and verified.
        models_unchanged: Requests answered with "you have the newest".
        gradients_sent: Whole gradients delivered.
        gradients_received: Whole gradients received and verified.
        requests_failed: Own requests without an answer in time, or refused.
        requests_refused: Requests of others that were refused.
        malformed: Messages from others that the protocol doesn't allow.
        replies_dropped: Replies that a slow or vanished asker could not take.
        connections_refused: Connections of keys that are not in the allow-list, or are banned.
        connections_lost: Times that a peer that had welcomed us became unreachable.
        dials_failed: Attempts to reach a peer in vain.
        transfers_resumed: Transfers that went on after a lost connection or a lost transfer.
        peers_banned: Times that a peer was refused for its many malformed messages.
        shunned: Messages of such peers that were dropped unread, with their connection.
        status_reports: Reports given to operators.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    models_fetched: int = 0
    models_unchanged: int = 0
    gradients_sent: int = 0
    gradients_received: int = 0
    requests_failed: int = 0
    requests_refused: int = 0
    malformed: int = 0
    replies_dropped: int = 0
    connections_refused: int = 0
    connections_lost: int = 0
    dials_failed: int = 0
    transfers_resumed: int = 0
    peers_banned: int = 0
    shunned: int = 0
    status_reports: int = 0

    def by_name(self) -> dict[str, int]:
        """Return them by their names."""
        return {name: getattr(self, name) for name in self.__slots__}


class Listener(Protocol):
    """What a transport tells its owner; called on the event loop, must not block or raise."""

    def gradient_arrived(self, update: GradientUpdate) -> None:
        """Take a whole, verified gradient of a peer."""

    def model_asked(self, peer_id: PeerId) -> None:
        """Take note that a peer asked for the own model."""

    def neighbors_changed(self, neighbors: frozenset[PeerId]) -> None:
        """Take the known peers that are not known to be unreachable."""


class Gossip(Protocol):
    """Keeps the members of the federation up to date, beside the transport."""

    def asked(self, sender: PeerId, body: Buffer, answer: Callable[[bytes], None]) -> None:
        """Take what a member tells and asks, and answer it now or later.

        Raises:
            RemoteProtocolError: The body is no gossip.
        """

    def left(self, sender: PeerId) -> None:
        """Take note that a peer said goodbye."""

    def standing_of(self, peer_id: PeerId) -> str:
        """Return how a member stands, such as `alive`; empty for one that isn't known."""


class Transport(Protocol):
    """Carries whole models and gradients between peers.

    Promises:
        1. `fetch` returns a verified, finite model of our layout, or None when the owner's newest
           version is that of `have`; the tensors are ours alone and writable. They are the model as
           published, or what the owner's codec makes of it: the same bits for everyone who fetches
           that version, whatever versions they have fetched before.
        2. `push` returns once the receiver has verified the gradient; it was delivered once, as it
           is or as our codec makes it. What the codec rounds off is added to the next gradient for
           that receiver, unless it became unreachable meanwhile.
        3. `fetch`, `push` and `ask_groups` end within `deadline_s`, whatever the other side does,
           with a result or with `PeerUnreachable`, `PeerRefused` or another `RemoteProtocolError`.
           Cancelling is safe.
        4. A peer never heard of since `set_neighbors` counts as reachable until a request to it
           fails; an unreachable one is tried again, with growing pauses, until it answers.
        5. `publish` takes effect for the next request; transfers that began go on with the model
           they began with. Nothing is copied: the tensors must never change.
        6. Nothing that arrives from outside raises in the owner or reaches it unverified.
        7. `close` says goodbye to connected peers and ends within two seconds.
    """

    counters: Counters

    async def start(self) -> str:
        """Listen, and return the endpoint to be advertised, with its real port.

        Raises:
            BindError: The address can't be listened on.
        """

    def set_neighbors(self, addresses: Mapping[PeerId, Address]) -> None:
        """Replace the known peers; connections to those no longer known are closed."""

    def publish(self, snapshot: ModelSnapshot) -> None:
        """Serve this model from now on to whoever is allowed to ask."""

    async def fetch(
        self, peer_id: PeerId, have: ModelSnapshot | None, deadline_s: float
    ) -> ModelSnapshot | None:
        """Fetch a peer's newest model, or None when it is the version we have.

        `have` is what `fetch` returned for this peer before, and nobody has changed since: the
        answer may build on it.
        """

    async def push(self, peer_id: PeerId, update: GradientUpdate, deadline_s: float) -> None:
        """Deliver a gradient to the peer on whose model it was made; it must never change."""

    def publish_groups(self, groups: Groups) -> None:
        """Tell these groups from now on to whoever is allowed to ask."""

    async def ask_groups(self, peer_id: PeerId, deadline_s: float) -> Groups | None:
        """Ask a peer who belongs together, or None when it doesn't know yet.

        Only the form is checked, not that it is true.
        """

    async def close(self) -> None:
        """Say goodbye, end every transfer and close every socket."""
