"""Whom to probe next, and what has come of the probe under way."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from protocol.messages import PeerId


class Rotation:
    """Goes round all members in a random order, drawn again for each time round.

    So each is probed within two times round (SWIM, section 4.3).

    Args:
        rng: Decides the order.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._waiting: list[PeerId] = []

    def add(self, peer_id: PeerId) -> None:
        """Let a new member have a random place among those that still wait."""
        if peer_id not in self._waiting:
            self._waiting.insert(int(self._rng.integers(len(self._waiting) + 1)), peer_id)

    def next(self, present: Collection[PeerId]) -> PeerId | None:
        """Return whom to probe, None when nobody is present."""
        while present:
            if not self._waiting:
                self._waiting = list(present)
                self._rng.shuffle(self._waiting)
            peer_id = self._waiting.pop()
            if peer_id in present:
                return peer_id
        return None


@dataclass(slots=True, kw_only=True)
class Probe:
    """A probe under way.

    Attributes:
        target: Who is probed.
        incarnation: What it was believed to be in; a later one shows that it lives.
        number: Of the ping.
        timeout_at: When others are asked to ping it; infinity once they are.
        ends_at: When it has failed.
        relays: Numbers of the requests to them without an answer.
        num_relays: How many they were.
    """

    target: PeerId
    incarnation: int
    number: int
    timeout_at: float
    ends_at: float
    relays: set[int] = field(default_factory=set)
    num_relays: int = 0

    @property
    def deadline(self) -> float:
        """When it needs attention."""
        return min(self.timeout_at, self.ends_at)

    @property
    def signs_of_slowness(self) -> int:
        """Return how many signs a failure gives that this peer is slow (Lifeguard, IV-A).

        Each relay that didn't answer at all is one; where there were none to ask, the failure is.
        """
        return len(self.relays) if self.num_relays else 1

    def ask_others(self, numbers: Collection[int]) -> None:
        """Take note that others were asked."""
        self.timeout_at = math.inf
        self.relays = set(numbers)
        self.num_relays = len(self.relays)
