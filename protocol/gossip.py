"""What members tell each other of who is there, and what membership hears of and asks its driver.

`Ping`, `Pong`, `PingRequest`, `PingReport` and `Exchange` travel, each with a request id that the
transport adds. The events and effects around them do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec

from protocol.codec import Buffer
from protocol.errors import RemoteProtocolError
from protocol.messages import Id, PeerId
from protocol.transport.interface import Address

Payload = TypeVar("Payload")

MAX_UPDATES = 16
"""Most updates in a message; of the longest, they still fit a header."""

MAX_EXCHANGED = 1_000
"""Most members in one `Exchange`; of the longest, they still fit a body."""

MAX_INCARNATION = 2**60

Place = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{0,32}$")]
Accuser = Annotated[PeerId, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]


class Standing(IntEnum):
    """How a member stands; of two at one incarnation, the larger is believed."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class MemberUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is said of a member.

    Attributes:
        peer_id: Its id.
        name: What people call it.
        endpoint: What it advertises.
        public_key: Its key, z85-encoded.
        incarnation: Which of its lives this is about; the member alone raises it.
        standing: How it stands.
        accuser: Who suspects it or found it dead; empty otherwise.
    """

    peer_id: Id
    name: Annotated[str, msgspec.Meta(max_length=64)]
    endpoint: Annotated[str, msgspec.Meta(max_length=264)]
    public_key: Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=MAX_INCARNATION)]
    standing: Standing
    accuser: Accuser = PeerId("")

    @property
    def address(self) -> Address:
        """Where the member is said to be."""
        return Address(name=self.name, endpoint=self.endpoint, public_key=self.public_key)

    @property
    def is_present(self) -> bool:
        """Whether the member takes part: alive, or suspect and to be believed until proven."""
        return self.standing <= Standing.SUSPECT

    def outranks(self, other: MemberUpdate) -> bool:
        """Say whether this is to be believed rather than what was known before."""
        return (self.incarnation, self.standing) > (other.incarnation, other.standing)


Updates = Annotated[tuple[MemberUpdate, ...], msgspec.Meta(max_length=MAX_UPDATES)]


class _Payload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What every payload is: frozen, and without unknown fields."""


class Ping(_Payload, frozen=True, kw_only=True):
    """Asks for a sign of life, and tells news."""

    updates: Updates = ()


class Pong(_Payload, frozen=True, kw_only=True):
    """Answers `Ping` with news."""

    updates: Updates = ()


class PingRequest(_Payload, frozen=True, kw_only=True):
    """Asks to ping another member, since it didn't answer us."""

    target: Id
    updates: Updates = ()


class PingReport(_Payload, frozen=True, kw_only=True):
    """Answers `PingRequest`: whether the target answered in time."""

    reached: bool
    updates: Updates = ()


class Exchange(_Payload, frozen=True, kw_only=True):
    """Tells, and asks for, all members with ids in `[start, until)`; answered by another one.

    Who sends it comes first, whatever its id. An empty `until` means to the end.
    """

    start: Place
    until: Place
    members: Annotated[tuple[MemberUpdate, ...], msgspec.Meta(max_length=MAX_EXCHANGED)]


Request = Ping | PingRequest | Exchange
Answer = Pong | PingReport | Exchange

GOSSIP = "gossip-1"
"""The feature of who keeps members up to date this way."""

_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode_payload(payload: Request | Answer) -> bytes:
    """Return the body of a message."""
    return msgspec.json.encode(payload)


def decode_request(body: Buffer) -> Request:
    """Return what a member asks.

    Raises:
        RemoteProtocolError: The body is nothing of the kind.
    """
    return _decoded(_REQUESTS, body)


def decode_answer(body: Buffer) -> Answer:
    """Return what a member answers.

    Raises:
        RemoteProtocolError: The body is nothing of the kind.
    """
    return _decoded(_ANSWERS, body)


def _decoded(decoder: msgspec.json.Decoder[Payload], body: Buffer) -> Payload:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"gossip that can't be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Nothing but time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedChanged:
    """The allow-list: the public key of each allowed peer by the id that it proves."""

    keys: Mapping[PeerId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedsChanged:
    """Addresses that discovery knows, each under the id that its key proves: hints, not members."""

    seeds: Mapping[PeerId, Address]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request came; `ticket` is what the driver knows it by."""

    sender: PeerId
    ticket: int
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer came to the request of this number."""

    sender: PeerId
    number: int
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request of this number was refused, or lost, or not answered in time."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidGoodbye:
    """A member said on its own connection that it leaves."""

    sender: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequested:
    """This peer is to leave."""


Event = (
    Tick | AllowedChanged | SeedsChanged | Asked | Answered | Failed | SaidGoodbye | LeaveRequested
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Send a request; one `Answered` or `Failed` with its number is due within `timeout_s`."""

    to: PeerId
    number: int
    request: Request
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer the request that came with this ticket."""

    ticket: int
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberChanged:
    """A member is new, or stands otherwise, or has another address or incarnation."""

    member: MemberUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberForgotten:
    """A member is known no longer: long gone, or not allowed any more."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class NobodyFound:
    """No seed has answered so far; they will be tried on. Told once until one does."""

    seeds: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Misbehaved:
    """A peer told what no honest peer believes; worth a strike."""

    peer_id: PeerId
    text: str


Effect = Ask | Reply | MemberChanged | MemberForgotten | NobodyFound | Misbehaved
