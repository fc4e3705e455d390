"""How long a suspect may take to say that it lives: Lifeguard's suspicion timeout."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.messages import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionLimits:
    """Between what bounds a suspicion of a federation of some size lasts.

    Attributes:
        shortest_s: With all confirmations.
        longest_s: With none.
        confirmations: How many others must share it to shorten it as far as it goes.
    """

    shortest_s: float
    longest_s: float
    confirmations: int

    @classmethod
    def of(
        cls, num_members: int, interval_s: float, multiplier: float, longest: float
    ) -> SuspicionLimits:
        """Return the limits for `num_members` members, this peer among them.

        The shortest is `multiplier * max(1, log10(num_members)) * interval_s`, the longest is
        `longest` times that. Where there aren't enough others to confirm, it is the shortest.
        """
        shortest_s = multiplier * max(1.0, math.log10(max(num_members, 1))) * interval_s
        confirmations = int(multiplier) - 2
        if confirmations < 1 or num_members - 2 < confirmations:
            return cls(shortest_s=shortest_s, longest_s=shortest_s, confirmations=0)
        return cls(
            shortest_s=shortest_s, longest_s=longest * shortest_s, confirmations=confirmations
        )

    def timeout_s(self, confirmed: int) -> float:
        """Return how long it lasts once so many others share it (Lifeguard, section IV-B)."""
        if self.confirmations == 0:
            return self.shortest_s
        share = math.log(confirmed + 1) / math.log(self.confirmations + 1)
        return max(self.shortest_s, self.longest_s - share * (self.longest_s - self.shortest_s))


class Suspicion:
    """One member's suspicion, shortened by each other peer that shares it.

    Attributes:
        deadline: When the suspect is to be taken for dead.

    Args:
        limits: How long it may last.
        accuser: Who suspects first.
        now: When.
    """

    def __init__(self, limits: SuspicionLimits, accuser: PeerId, now: float) -> None:
        self._limits = limits
        self._accusers = {accuser}
        self._started = now
        self.deadline = now + limits.timeout_s(0)

    def confirm(self, accuser: PeerId) -> bool:
        """Take note of who else suspects; say whether that counts."""
        if accuser in self._accusers or len(self._accusers) > self._limits.confirmations:
            return False
        self._accusers.add(accuser)
        self.deadline = self._started + self._limits.timeout_s(len(self._accusers) - 1)
        return True

    def put_off(self, by_s: float) -> None:
        """Let time not count in which this peer could not have heard the suspect."""
        self._started += by_s
        self.deadline += by_s
