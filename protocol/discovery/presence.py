"""What peers say of their whereabouts through a broker, and what of it is worth keeping."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import msgspec

from protocol.errors import ConfigError, IdentityError, RemoteProtocolError
from protocol.identity import peer_id_of
from protocol.messages import Count, PeerId, Text
from protocol.transport.endpoint import parse_endpoint
from protocol.transport.interface import Address

MAX_PRESENCE_BYTES = 2048
MAX_STRANGERS = 1024
"""Peers without a name of ours that are remembered, should their keys be allowed later on."""
MAX_INCARNATION = 2**62

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class State(StrEnum):
    """What a peer, or its will, says of it."""

    UP = "up"
    LEFT = "left"
    """It stopped and said so."""
    LOST = "lost"
    """The broker has lost it, which doesn't mean that others have."""


class Fault(StrEnum):
    """Why a presence was ignored."""

    TOPIC = "topic"
    """Of another federation, or of no peer id."""
    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    FORGED = "forged"
    """The key isn't that of the peer id in the topic."""
    UNDIALABLE = "undialable"
    """The advertised endpoint is none, or one that nobody can dial."""
    NOT_ALLOWED = "not_allowed"
    STALE = "stale"
    """Of an earlier incarnation than one already known."""


class PresenceIgnored(RemoteProtocolError):
    """A presence gains nothing.

    Attributes:
        fault: Why, by name.
    """

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class Presence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer publishes of itself, retained; a hint, since anybody might have written it.

    Attributes:
        state: Up, left or lost.
        incarnation: Grows with every start; tells what was said earlier from what came later.
        advertise: The endpoint where others reach it.
        public_key: Its CURVE key, z85-encoded.
        layout_fingerprint: Of the models that it exchanges.
        name: What it calls itself.
    """

    state: State
    incarnation: Count
    advertise: Text
    public_key: _Key
    layout_fingerprint: Text
    name: _Name

    def encode(self, state: State) -> bytes:
        """Return the payload that says this with another state; the same bytes every time."""
        return _ENCODER.encode(msgspec.structs.replace(self, state=state))

    def is_of_same_life(self, other: Presence) -> bool:
        """Whether both tell of the same process, whatever the state and incarnation."""
        return self == msgspec.structs.replace(
            other, state=self.state, incarnation=self.incarnation
        )


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Presence)


class Topics:
    """The topics of one federation, `coterie/v1/FEDERATION/presence/PEER_ID`.

    Raises:
        ConfigError: The federation id can't be a level of a topic.
    """

    def __init__(self, federation: str) -> None:
        if not federation or len(federation) > 256 or any(sign in federation for sign in "/+#\0"):
            raise ConfigError(
                f"network.federation = {federation!r} can't be part of an MQTT topic: "
                "use 1 to 256 characters without / + # and NUL"
            )
        self._prefix = f"coterie/v1/{federation}/presence/"
        self.all = f"{self._prefix}+"

    def of(self, peer_id: PeerId) -> str:
        """Return the topic of a peer."""
        return self._prefix + peer_id

    def peer_id(self, topic: str) -> PeerId:
        """Return whose topic this is.

        Raises:
            PresenceIgnored: Nobody's in this federation.
        """
        peer_id = topic.removeprefix(self._prefix)
        if topic != self._prefix + peer_id or len(peer_id) != 32 or set(peer_id) - _HEX:
            raise PresenceIgnored(Fault.TOPIC, f"the topic {topic[:256]!r} is no peer's here")
        return PeerId(peer_id)


_HEX = frozenset("0123456789abcdef")


def read_presence(peer_id: PeerId, payload: bytes) -> Presence:
    """Read and verify the payload of a peer's topic.

    Raises:
        PresenceIgnored: It is no presence, not of that peer, or names no endpoint to dial.
    """
    who = f"the presence of {peer_id}"
    if len(payload) > MAX_PRESENCE_BYTES:
        raise PresenceIgnored(
            Fault.OVERSIZED, f"{who} has {len(payload)} bytes, over {MAX_PRESENCE_BYTES}"
        )
    try:
        presence = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PresenceIgnored(Fault.MALFORMED, f"{who} can't be read: {error}") from error
    try:
        genuine = peer_id_of(presence.public_key) == peer_id
    except IdentityError as error:
        raise PresenceIgnored(Fault.MALFORMED, f"{who} holds no key: {error}") from error
    if not genuine:
        raise PresenceIgnored(
            Fault.FORGED, f"{who} holds the key of another peer: {presence.name!r} is an impostor"
        )
    try:
        endpoint = parse_endpoint(presence.advertise, "advertise")
    except ConfigError as error:
        raise PresenceIgnored(Fault.UNDIALABLE, f"{who}: {error}") from error
    if endpoint.is_wildcard or not endpoint.port:
        raise PresenceIgnored(
            Fault.UNDIALABLE, f"{who} advertises {endpoint}, where nobody can be dialed"
        )
    return presence


class Sightings:
    """The newest presence of each peer.

    Names come from those who keep the allow-list, never from a presence: a peer that calls itself
    like another gains nothing.

    Args:
        name_of: Our name of a public key, None for one that isn't allowed; asked again each time,
            so that a key that was added or removed counts at once.
    """

    def __init__(self, name_of: Callable[[str], str | None]) -> None:
        self._name_of = name_of
        self._members: dict[PeerId, Presence] = {}
        self._strangers: dict[PeerId, Presence] = {}

    def take(self, peer_id: PeerId, presence: Presence) -> None:
        """Keep a presence, unless an earlier incarnation wrote it.

        At equal incarnations the latest word counts: a birth after a will that was late, a new
        endpoint. A stranger is remembered in case its key is allowed later on.

        Raises:
            PresenceIgnored: It is stale, or its key isn't allowed.
        """
        known = self._members.get(peer_id) or self._strangers.get(peer_id)
        if known is not None and presence.incarnation < known.incarnation:
            raise PresenceIgnored(
                Fault.STALE,
                f"{presence.name!r} ({peer_id}) is said to be {presence.state} at incarnation "
                f"{presence.incarnation}, but {known.incarnation} is known already",
            )
        if self._name_of(presence.public_key) is None:
            self._members.pop(peer_id, None)
            self._strangers.pop(peer_id, None)  # to the end, as the latest heard
            self._strangers[peer_id] = presence
            if len(self._strangers) > MAX_STRANGERS:
                del self._strangers[next(iter(self._strangers))]
            raise PresenceIgnored(
                Fault.NOT_ALLOWED,
                f"{presence.name!r} ({peer_id}) is {presence.state}, but its key isn't allowed: "
                f"to let it in, add its .pub file to the allow-list",
            )
        self._strangers.pop(peer_id, None)
        self._members[peer_id] = presence

    def addresses(self) -> dict[PeerId, Address]:
        """Return where allowed peers are, or were when the broker lost them; by peer id.

        A lost peer may only have lost the broker, so its address stays; one that left is gone.
        """
        addresses = {}
        for peer_id, presence in sorted((self._members | self._strangers).items()):
            name = self._name_of(presence.public_key)
            if name is not None and presence.state is not State.LEFT:
                addresses[peer_id] = Address(
                    name=name, endpoint=presence.advertise, public_key=presence.public_key
                )
        return addresses

    def twin(self, peer_id: PeerId, own: Presence) -> Presence | None:
        """Return who else, we included, is up at the same endpoint as a peer; nobody should be."""
        presence = self._members[peer_id]
        if presence.state is not State.UP:
            return None
        others = [each for other, each in sorted(self._members.items()) if other != peer_id]
        for each in (*others, own):
            if each.state is State.UP and each.advertise == presence.advertise:
                return each
        return None
