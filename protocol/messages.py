"""The frozen messages of the wire, and the whole models and gradients that they carry.

Every request has a `request_id` that its answer repeats. `MESSAGES` gives each type its kind byte;
a message of a type in `WITH_BODY` is followed by one raw body.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple, NewType

import msgspec

from protocol.tensors import Tensors

PROTOCOL_VERSION = 1
PROTOCOL_MIN = 1

PeerId = NewType("PeerId", str)
"""The first 16 bytes of BLAKE2b of a peer's public key, in hex."""


MAX_FRIENDS = 8

SIZES = "sizes-1"
"""The feature of a handshake by which a peer says that it reads `ModelOffer.num_examples`."""

GROUPS = "groups-1"
"""The feature of a handshake by which a peer says that it answers `GroupsRequest`."""

INITIAL = "initial-1-"
"""With the digest of its public copy, in hex, after it: the feature by which a peer says which
initial model it began with."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Id = Annotated[PeerId, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Friends = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_FRIENDS)]
Features = Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=32)]


class Version(NamedTuple):
    """When a model was made: the owner's incarnation and its round.

    The incarnation grows with every start of the owner, since an old checkpoint reuses rounds.
    """

    incarnation: Count
    round_number: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """A whole model of one version, immutable.

    Attributes:
        version: When it was made.
        tensors: The parameters and buffers.
        friends: The owner's best collaborators when it was published, at most `MAX_FRIENDS`.
        num_examples: On how many it was trained, as the owner claims; 0 where it doesn't say.
    """

    version: Version
    tensors: Tensors
    friends: tuple[PeerId, ...] = ()
    num_examples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientUpdate:
    """A whole gradient that `sender` made for the receiver's model.

    Attributes:
        sender: Who made it; taken from the authenticated connection, never from a field.
        sender_round: The sender's round, which orders gradients of one sender.
        on_version: The version of the receiver's model on which it was made.
        weight: The sender's collaboration weight for that model, in [0, 1]; not yet multiplied.
        num_examples: Examples in the batch.
        gradient: Mean gradient over the batch, f32.
    """

    sender: PeerId
    sender_round: int
    on_version: Version
    weight: float
    num_examples: int
    gradient: Tensors


class Encoding(StrEnum):
    """How the bytes of a model or a gradient are to be read."""

    F32 = "f32"
    """The blob as it is: the only encoding that a peer without features knows."""
    F16 = "f16"
    """A model whole, its trainable f32 tensors in f16."""
    DEFLATE_4 = "deflate-4"
    """A gradient, or differences to a base of a model, in integers of 4 bits, deflated."""
    DEFLATE_8 = "deflate-8"
    """The same in integers of 8 bits."""


class RefusalCode(StrEnum):
    """Why a request was refused."""

    VERSION = "VERSION"
    FEDERATION = "FEDERATION"
    LAYOUT = "LAYOUT"
    NOT_ALLOWED = "NOT_ALLOWED"
    BUSY = "BUSY"
    LEAVING = "LEAVING"
    NO_MODEL = "NO_MODEL"
    NO_TRANSFER = "NO_TRANSFER"
    NO_HELLO = "NO_HELLO"
    MALFORMED = "MALFORMED"


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every message has: the id of the request it is, or answers."""

    request_id: Count


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first request on a connection; frozen for ever, it alone tolerates unknown fields."""

    request_id: Count
    protocol_min: Count
    protocol_max: Count
    features: Features
    name: Text
    incarnation: Count
    advertise: Text
    federation_id: Text
    layout_fingerprint: Text
    task: Text


class Welcome(_Message, frozen=True, kw_only=True):
    """Answers `Hello`: the version to speak, and the limits of who answers."""

    version: Count
    features: Features
    name: Text
    incarnation: Count
    max_chunk_bytes: Count


class Refusal(_Message, frozen=True, kw_only=True):
    """Answers any request with no."""

    code: RefusalCode
    text: Text
    retry_after_s: Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]


class Ping(_Message, frozen=True, kw_only=True):
    """Asks for a sign of life."""


class Pong(_Message, frozen=True, kw_only=True):
    """Answers `Ping`."""


class ModelRequest(_Message, frozen=True, kw_only=True):
    """Asks for the newest model, or what leads to it from the version that the asker has.

    Its `request_id` is also the id of the transfer: chunks may be asked for before it is answered.
    `accept_bytes` is how much of the model may come with the offer, to spare small models a second
    round trip.
    """

    have: Version | None
    accept_bytes: Count


class ModelOffer(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Answers `ModelRequest`: what can be pulled by chunks, for a while.

    The body is the beginning of the bytes, as many as were accepted; all where there are few. Size
    and digest are theirs, too. What isn't coded says nothing of encodings, so that a peer from
    before there were any understands it. Differences build on the version `base`, which the
    asker said to have; without a base on the initial model, which both named in the handshake.
    `leads_to` is the digest of the model that comes of coded bytes. How many examples the model was
    trained on is left out, as 0, for who doesn't know `SIZES`, and where nobody needs it.
    """

    version: Version
    size_bytes: Count
    digest: Digest
    friends: Friends
    encoding: Encoding = Encoding.F32
    base: Version | None = None
    leads_to: Digest | None = None
    num_examples: Count = 0


class ModelUnchanged(_Message, frozen=True, kw_only=True):
    """Answers `ModelRequest`: the asker has the newest version."""

    version: Version


class ChunkRequest(_Message, frozen=True, kw_only=True):
    """Asks for bytes `[offset, offset + length)` of what is pulled as `transfer_id`.

    Whoever asks before the offer can't know its size, but that it is never over the model's.
    """

    transfer_id: Count
    offset: Count
    length: Count


class Chunk(_Message, frozen=True, kw_only=True):
    """Answers `ChunkRequest`; the body is the bytes, as far as there are any."""

    transfer_id: Count
    offset: Count


class GradientOffer(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Announces a gradient that follows by chunks, under the sender's own `transfer_id`.

    The body is its beginning, the whole of a small one; empty when the sender resumes. Encodings
    are as in `ModelOffer`.
    """

    transfer_id: Count
    size_bytes: Count
    digest: Digest
    sender_round: Count
    on_version: Version
    weight: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    num_examples: Annotated[int, msgspec.Meta(ge=1, le=2**62)]
    encoding: Encoding = Encoding.F32


class GradientChunk(_Message, frozen=True, kw_only=True):
    """Carries bytes of an announced gradient from `offset` on, in the body; idempotent."""

    transfer_id: Count
    offset: Count


class GradientProgress(_Message, frozen=True, kw_only=True):
    """Answers `GradientOffer` and `GradientChunk`: every byte before `received_bytes` is there.

    When that is all of them, the gradient has also been verified and delivered.
    """

    transfer_id: Count
    received_bytes: Count


class LayoutExchange(_Message, frozen=True, kw_only=True):
    """Asks for, and answers with, the canonical layout in the body, to name a difference.

    The body is empty when the description is too long for one message.
    """


class Leave(_Message, frozen=True, kw_only=True):
    """Says goodbye; the one message that is not answered."""


class StatusRequest(_Message, frozen=True, kw_only=True):
    """Asks how a peer is doing; operators alone are answered, and need not say hello."""


class StatusReport(_Message, frozen=True, kw_only=True):
    """Answers `StatusRequest`; the body is a `PeerStatus` in JSON."""


class GossipRequest(_Message, frozen=True, kw_only=True):
    """Tells and asks for members: the body is a `protocol.gossip.Request` in JSON."""


class GossipAnswer(_Message, frozen=True, kw_only=True):
    """Answers `GossipRequest`: the body is a `protocol.gossip.Answer` in JSON."""


class GroupsRequest(_Message, frozen=True, kw_only=True):
    """Asks who belongs together; whoever announces `GROUPS` answers."""


class GroupsAnswer(_Message, frozen=True, kw_only=True):
    """Answers `GroupsRequest`: the body is a `protocol.groups.Groups` in JSON.

    It is empty while the peer doesn't know yet.
    """


Message = (
    Hello
    | Welcome
    | Refusal
    | Ping
    | Pong
    | ModelRequest
    | ModelOffer
    | ModelUnchanged
    | ChunkRequest
    | Chunk
    | GradientOffer
    | GradientChunk
    | GradientProgress
    | LayoutExchange
    | Leave
    | StatusRequest
    | StatusReport
    | GossipRequest
    | GossipAnswer
    | GroupsRequest
    | GroupsAnswer
)

MESSAGES: tuple[type[Message], ...] = (
    Hello,
    Welcome,
    Refusal,
    Ping,
    Pong,
    ModelRequest,
    ModelOffer,
    ModelUnchanged,
    ChunkRequest,
    Chunk,
    GradientOffer,
    GradientChunk,
    GradientProgress,
    LayoutExchange,
    Leave,
    StatusRequest,
    StatusReport,
    GossipRequest,
    GossipAnswer,
    GroupsRequest,
    GroupsAnswer,
)
"""The kind byte of a message is the position of its type here, from 1; append only."""

WITH_BODY: frozenset[type[Message]] = frozenset(
    (
        ModelOffer,
        Chunk,
        GradientOffer,
        GradientChunk,
        LayoutExchange,
        StatusReport,
        GossipRequest,
        GossipAnswer,
        GroupsAnswer,
    )
)
