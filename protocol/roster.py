"""Everybody but this peer: who is known, and which of the things said of them is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from protocol.errors import LocalProtocolError
from protocol.gossip import MAX_INCARNATION, MemberUpdate, Standing
from protocol.messages import PeerId
from protocol.transport.interface import Address

REFUTATIONS = 2**20
"""Incarnations of one start of a process, so that the next start is above them all."""

HEARSAY = 2**40
"""Up to which incarnation hearsay is believed of a member that said nothing of itself."""

LEAP = 2**26
"""How far hearsay may exceed what a member said of itself. A member refutes as far, so that there
is nothing anybody may believe that it can't refute; to wear out all incarnations takes 2**34 lies.
"""


def born(peer_id: PeerId, address: Address, starts: int) -> MemberUpdate:
    """Return what a peer says of itself when it starts.

    Args:
        peer_id: Its id.
        address: What it advertises.
        starts: How often it was started before; no start may go uncounted.

    Raises:
        LocalProtocolError: The name or endpoint is too long, or the number of starts is impossible.
    """
    update = MemberUpdate(
        peer_id=peer_id,
        name=address.name,
        endpoint=address.endpoint,
        public_key=address.public_key,
        incarnation=starts * REFUTATIONS,
        standing=Standing.ALIVE,
    )
    try:
        return msgspec.convert(msgspec.to_builtins(update), MemberUpdate)
    except msgspec.ValidationError as error:
        raise LocalProtocolError(
            f"can't advertise {address} after {starts} starts: {error}"
        ) from error


def refutable(incarnation: int) -> int:
    """Return the highest incarnation that hearsay may claim of who said to be in this one."""
    return min(max(HEARSAY, incarnation + LEAP), MAX_INCARNATION - 1)


class Verdict(Enum):
    """What is to be made of an update."""

    NEWS = auto()
    """Believed: it outranks what was known."""
    SHARED = auto()
    """A suspicion that is known already; it may confirm it."""
    STALE = auto()
    """Known already, or outranked by what is known, or of somebody unknown who is gone."""
    NOT_ALLOWED = auto()
    """Of somebody who isn't allowed; to the speaker, they may well be."""
    FORGED = auto()
    """Of another key than proves the id: whoever passes that on is to blame."""
    IMPLAUSIBLE = auto()
    """Of an incarnation that nobody may claim but the member itself."""
    FULL = auto()
    """There are too many members to take in another."""


@dataclass(slots=True)
class Member:
    """A member as this peer sees it.

    Attributes:
        update: What is believed.
        vouched: The highest incarnation that the member itself told us.
        changed_at: Since when it stands so.
    """

    update: MemberUpdate
    vouched: int
    changed_at: float


class Roster:
    """The members.

    Attributes:
        allowed: The public key of each allowed peer by the id that it proves.
        present: The members that are alive or suspect.

    Args:
        max_members: How many are remembered.
    """

    def __init__(self, max_members: int) -> None:
        self.allowed: Mapping[PeerId, str] = {}
        self.present: dict[PeerId, None] = {}
        self._members: dict[PeerId, Member] = {}
        self._max_members = max_members

    def __contains__(self, peer_id: PeerId) -> bool:
        return peer_id in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[MemberUpdate]:
        return (self._members[peer_id].update for peer_id in sorted(self._members))

    def __getitem__(self, peer_id: PeerId) -> MemberUpdate:
        return self._members[peer_id].update

    def get(self, peer_id: PeerId) -> MemberUpdate | None:
        """Return what is believed of a member."""
        member = self._members.get(peer_id)
        return member.update if member else None

    def hear(self, update: MemberUpdate, speaker: PeerId, now: float) -> Verdict:
        """Judge what `speaker` says of another, and believe it where that is right."""
        peer_id = update.peer_id
        member = self._members.get(peer_id)
        if self.allowed.get(peer_id) != update.public_key:
            return Verdict.FORGED if peer_id in self.allowed else Verdict.NOT_ALLOWED
        if member is not None and speaker == peer_id:
            member.vouched = max(member.vouched, update.incarnation)
        if member is not None and not update.outranks(member.update):
            both = update.standing is member.update.standing is Standing.SUSPECT
            same = update.incarnation == member.update.incarnation
            return Verdict.SHARED if same and both else Verdict.STALE
        vouched = member.vouched if member is not None else 0
        if speaker != peer_id and update.incarnation > refutable(vouched):
            return Verdict.IMPLAUSIBLE
        if member is None:
            return self._take_in(update, speaker, now)
        known = member.update
        if update.incarnation == known.incarnation:  # an address changes with an incarnation only
            update = msgspec.structs.replace(
                known, standing=update.standing, accuser=update.accuser
            )
        member.update, member.changed_at = update, now
        self._count(update)
        return Verdict.NEWS

    def forget(self, peer_id: PeerId) -> None:
        """Know nothing of a member any more."""
        del self._members[peer_id]
        self.present.pop(peer_id, None)

    def not_allowed(self) -> list[PeerId]:
        """Return the members that aren't allowed any more."""
        return [each.peer_id for each in self if self.allowed.get(each.peer_id) != each.public_key]

    def gone_since(self, before: float) -> list[PeerId]:
        """Return the dead and left members that have been so since before some time."""
        return [
            peer_id
            for peer_id, member in self._members.items()
            if not member.update.is_present and member.changed_at < before
        ]

    def dead(self) -> set[PeerId]:
        """Return the dead members."""
        return {
            peer_id
            for peer_id, member in self._members.items()
            if member.update.standing is Standing.DEAD
        }

    def _take_in(self, update: MemberUpdate, speaker: PeerId, now: float) -> Verdict:
        if not update.is_present:
            return Verdict.STALE
        if len(self._members) >= self._max_members:
            return Verdict.FULL
        vouched = update.incarnation if speaker == update.peer_id else 0
        self._members[update.peer_id] = Member(update, vouched, now)
        self._count(update)
        return Verdict.NEWS

    def _count(self, update: MemberUpdate) -> None:
        if update.is_present:
            self.present[update.peer_id] = None
        else:
            self.present.pop(update.peer_id, None)
