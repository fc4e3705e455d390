"""What is still to be told to others: the newest update of each member, each told a few times."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from protocol.gossip import MAX_UPDATES, MemberUpdate
from protocol.messages import PeerId


@dataclass(slots=True)
class _Rumor:
    update: MemberUpdate
    order: int
    times: int = 0


class Rumors:
    """A queue of updates, those told the fewest times first, newer ones before older.

    An update is told `multiplier * ceil(log10(num_members + 1))` times (SWIM, section 4.1), or
    until there is a newer one of the same member. Answers don't count: whoever was paused answers
    many that wait no longer.

    Args:
        multiplier: Of the number of times.
    """

    def __init__(self, multiplier: int) -> None:
        self._multiplier = multiplier
        self._rumors: dict[PeerId, _Rumor] = {}
        self._order = 0

    def __bool__(self) -> bool:
        return bool(self._rumors)

    def spread(self, update: MemberUpdate) -> None:
        """Let an update be told, in place of any older one of the member."""
        self._order += 1
        self._rumors[update.peer_id] = _Rumor(update, self._order)

    def drop(self, peer_id: PeerId) -> None:
        """Tell nothing more of a member."""
        self._rumors.pop(peer_id, None)

    def times(self, num_members: int) -> int:
        """Return how often each is told among so many members, this peer among them."""
        return self._multiplier * math.ceil(math.log10(num_members + 1))

    def tell(
        self, num_members: int, first: MemberUpdate | None = None, *, counts: bool = True
    ) -> tuple[MemberUpdate, ...]:
        """Return what to tell now, `first` before all; where it `counts`, count it as told."""
        chosen = [] if first is None else [first]
        waiting = (
            rumor
            for rumor in self._rumors.values()
            if first is None or rumor.update.peer_id != first.peer_id
        )
        limit = self.times(num_members)
        for rumor in heapq.nsmallest(
            MAX_UPDATES - len(chosen), waiting, key=lambda each: (each.times, -each.order)
        ):
            chosen.append(rumor.update)
            rumor.times += counts
            if rumor.times >= limit:
                del self._rumors[rumor.update.peer_id]
        return tuple(chosen)
