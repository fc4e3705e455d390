"""Who belongs together, as one peer found it and tells others: JSON that is bounded and typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from protocol.codec import Buffer
from protocol.digest import check_digest, digest_of
from protocol.errors import RemoteProtocolError
from protocol.messages import Digest, Id, PeerId

MAX_GROUPED = 1_025
"""Most peers that are grouped: so many models are in memory at once where they are clustered."""

Label = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPED)]


class Groups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who belongs together.

    Attributes:
        labels: The cluster of each peer, in peer-id order.
        digest: Of these labels: the same wherever the same was found.
    """

    labels: Annotated[dict[Id, Label], msgspec.Meta(min_length=1, max_length=MAX_GROUPED)]
    digest: Digest

    @classmethod
    def of(cls, labels: Mapping[PeerId, int]) -> Groups:
        """Give labels their digest."""
        ordered = dict(sorted(labels.items()))
        text = " ".join(f"{peer_id}:{label}" for peer_id, label in ordered.items())
        return cls(ordered, digest_of(text.encode()))

    def others_of(self, peer_id: PeerId) -> tuple[PeerId, ...]:
        """Return who else is in a peer's cluster, sorted."""
        own = self.labels[peer_id]
        together = (other for other, label in self.labels.items() if label == own)
        return tuple(sorted(other for other in together if other != peer_id))


_DECODER = msgspec.json.Decoder(Groups)


def encode_groups(groups: Groups) -> bytes:
    """Return the body of an answer."""
    return msgspec.json.encode(groups)


def decode_groups(body: Buffer) -> Groups:
    """Return the groups that a peer tells of.

    Raises:
        RemoteProtocolError: The body is none, names too many, or has another digest than it says.
    """
    try:
        told = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"groups that can't be read: {error}") from error
    groups = Groups.of(told.labels)
    check_digest("a clustering", groups.digest, told.digest)
    return groups
