"""What peers say of themselves through a broker, and how much of it counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

from protocol.discovery.static import check_endpoint
from protocol.errors import ConfigError, IdentityError, RemoteProtocolError
from protocol.identity import peer_id_of
from protocol.messages import Count, PeerId, Text
from protocol.transport.interface import Address

MAX_PRESENCE_BYTES = 1024
MAX_STRANGERS = 10_000


class State(StrEnum):
    """What a presence says of its peer."""

    UP = "up"
    LEFT = "left"
    LOST = "lost"


class Presence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer says of itself; its last will says the same, but for the state.

    Attributes:
        state: `lost` says only that the broker heard no more of it; the peer may well live on.
        incarnation: Grows with every start of the peer.
        endpoint: Where others reach it.
        public_key: z85-encoded; the peer id follows from it.
        layout_fingerprint: Of its models, in hex, for whoever looks on; the handshake decides.
        name: What it calls itself, for whoever looks on; we call a peer as our allow-list does.
    """

    state: State
    incarnation: Count
    endpoint: Text
    public_key: Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
    layout_fingerprint: Annotated[str, msgspec.Meta(max_length=64)]
    name: Annotated[str, msgspec.Meta(max_length=64)]

    def supersedes(self, known: Presence) -> bool:
        """Return whether this is news to who knows another presence of the same peer.

        What an older incarnation says is old, above all its will, which the broker may pass on
        after the next birth. Only where nobody is up any more, an older one may come back: a peer
        that lost its state folder counts from the start again.
        """
        if self.incarnation != known.incarnation:
            returns = self.state is State.UP and known.state is not State.UP
            return returns or self.incarnation > known.incarnation
        return not (self.state is State.LOST and known.state is State.LEFT)


class PresenceRefused(RemoteProtocolError):
    """What a broker passed on is no presence of the peer whose topic it came on.

    Attributes:
        kind: The counter that it adds to.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


_DECODER = msgspec.msgpack.Decoder(Presence)


def encode(presence: Presence) -> bytes:
    """Return the payload of a presence."""
    return msgspec.msgpack.encode(presence)


def decode(peer_id: str, payload: bytes) -> Presence:
    """Return the presence that came on a peer's topic, proved to be of a key with that id.

    Raises:
        PresenceRefused: It is oversized, malformed, or of another peer than its topic.
    """
    if len(payload) > MAX_PRESENCE_BYTES:
        raise PresenceRefused(
            "presence_oversized", f"{len(payload)} bytes, {MAX_PRESENCE_BYTES} are allowed"
        )
    try:
        presence = _DECODER.decode(payload)
        owner = peer_id_of(presence.public_key)
        check_endpoint("its endpoint", presence.endpoint)
    except (msgspec.DecodeError, UnicodeDecodeError, IdentityError, ConfigError) as error:
        raise PresenceRefused("presence_malformed", str(error)) from error
    if owner != peer_id:
        raise PresenceRefused("presence_forged", f"its key belongs to peer {owner}")
    return presence


class Register:
    """The newest presence of each peer, strangers among them: one may be allowed later.

    Args:
        own: Our own peer id, which is left out.
    """

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._known: dict[PeerId, Presence] = {}

    def note(self, peer_id: str, payload: bytes, allowed: Mapping[str, str]) -> Presence | None:
        """Take note of what came on a peer's topic; nothing at all clears it.

        Args:
            peer_id: From the topic.
            payload: As the broker passed it on.
            allowed: The name of each allowed peer by its public key.

        Returns:
            The presence, if it is news.

        Raises:
            PresenceRefused: It can't count, for the reason that its `kind` names.
        """
        known = self._known.get(PeerId(peer_id))
        if not payload:  # how an operator removes the retained presence of who won't come back
            self._known.pop(PeerId(peer_id), None)
            return None
        presence = decode(peer_id, payload)
        if presence == known:
            return None
        if known is not None and not presence.supersedes(known):
            raise PresenceRefused(
                "presence_stale",
                f"{presence.state} in incarnation {presence.incarnation}, "
                f"after {known.state} in {known.incarnation}",
            )
        stranger = presence.public_key not in allowed
        if stranger and known is None and len(self._known) >= MAX_STRANGERS:
            raise PresenceRefused("presence_crowded", f"{MAX_STRANGERS} peers are known already")
        self._known[PeerId(peer_id)] = presence
        if stranger:
            raise PresenceRefused("presence_not_allowed", "its key is not in our allow-list")
        return presence

    def addresses(self, allowed: Mapping[str, str]) -> dict[PeerId, Address]:
        """Return where the allowed peers are, those that the broker lost among them.

        Args:
            allowed: The name of each allowed peer by its public key.
        """
        return {
            peer_id: Address(
                name=allowed[presence.public_key],
                endpoint=presence.endpoint,
                public_key=presence.public_key,
            )
            for peer_id, presence in sorted(self._known.items())
            if peer_id != self._own
            and presence.public_key in allowed
            and presence.state is not State.LEFT
        }

    def sharing(self, peer_id: PeerId, endpoint: str) -> Iterator[PeerId]:
        """Yield who else is up at an endpoint."""
        for other, presence in sorted(self._known.items()):
            if (
                other != peer_id and presence.endpoint == endpoint and presence.state is State.UP
            ):
                yield other
