"""What a running peer tells an operator of itself, as JSON that is bounded and typed both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec

from protocol.codec import MAX_CHUNK_BYTES, Buffer
from protocol.errors import RemoteProtocolError
from protocol.messages import Count, Id, PeerId, Text

MAX_LISTED = 2_000
"""Most members, weights and refused keys that are told; a long line each, they fit one message."""

Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]


class Weight(NamedTuple):
    """A collaboration weight, in [0, 1]."""

    peer_id: Id
    weight: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Counted(NamedTuple):
    """A counter."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    value: Count


class RefusedKey(NamedTuple):
    """A key that was refused at the door, and how often."""

    public_key: Key
    times: Count


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another peer, as the one that was asked sees it.

    Attributes:
        peer_id: Its id.
        name: What people call it.
        endpoint: Where it is dialed.
        public_key: Its key, z85-encoded.
        state: How it stands.
        reason: Why it is unreachable or refused; empty when it is neither.
    """

    peer_id: Id
    name: Text
    endpoint: Text
    public_key: Key
    state: Annotated[str, msgspec.Meta(max_length=32)]
    reason: Text = ""


class PeerStatus(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):  # so that who knows no `clustering` can read whoever clusters nothing
    """A running peer.

    Attributes:
        peer_id: Its id.
        name: What people call it.
        federation: Its federation.
        endpoint: What it advertises.
        incarnation: How often it was started before.
        running_s: Since it was started.
        round_number: The round it is in.
        rounds: When it ends; 0 means never.
        loss: The loss average of its own model, if it has one.
        weights: Its collaboration weights, largest first.
        clustering: Digest of the clustering that it began with since it was started; empty where
            there was none.
        members: The peers that it knows, by name.
        num_members: How many those are; more than are listed where they are very many.
        counters: What it moved, applied and refused since it was started.
        refused_keys: Those that knocked last without being in the allow-list.
    """

    peer_id: Id
    name: Text
    federation: Text
    endpoint: Text
    incarnation: Count
    running_s: Annotated[float, msgspec.Meta(ge=0.0)]
    round_number: Count
    rounds: Count
    loss: float | None
    weights: Annotated[tuple[Weight, ...], msgspec.Meta(max_length=MAX_LISTED)]
    clustering: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""
    members: Annotated[tuple[MemberStatus, ...], msgspec.Meta(max_length=MAX_LISTED)]
    num_members: Count
    counters: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=256)]
    refused_keys: Annotated[tuple[RefusedKey, ...], msgspec.Meta(max_length=MAX_LISTED)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How far the learning of a peer is.

    Attributes:
        round_number: The round it is in.
        rounds: When it ends; 0 means never.
        loss: The loss average of its own model.
        weights: Its collaboration weights.
        clustering: Digest of the clustering that it began with, if it was one.
        counters: What became of others' gradients.
    """

    round_number: int = 0
    rounds: int = 0
    loss: float | None = None
    weights: Mapping[PeerId, float] = field(default_factory=dict)
    clustering: str = ""
    counters: tuple[Counted, ...] = ()

    def largest(self) -> tuple[Weight, ...]:
        """Return the weights, largest first, as many as are told."""
        ordered = sorted(self.weights.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Weight(peer_id, min(weight, 1.0)) for peer_id, weight in ordered[:MAX_LISTED])


_DECODER = msgspec.json.Decoder(PeerStatus)


def encode_status(status: PeerStatus) -> bytes:
    """Return the body of a status report; with members left out from the end until it fits."""
    members = status.members[:MAX_LISTED]
    while True:
        body = msgspec.json.encode(msgspec.structs.replace(status, members=members))
        if len(body) <= MAX_CHUNK_BYTES or not members:
            return body
        members = members[: len(members) // 2]


def decode_status(body: Buffer) -> PeerStatus:
    """Return what a peer tells of itself.

    Raises:
        RemoteProtocolError: The body is no status.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"a status that can't be read: {error}") from error
