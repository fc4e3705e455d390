"""When a peer's memory is renewed, and until when its holdout judges fairly."""

from __future__ import annotations

from dataclasses import dataclass

from peer.horizon import Horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a memory is renewed, and when its interpolation weight may be chosen.

    Attributes:
        every: Rounds from one renewal to the next.
        horizon: Of the peer: its last rounds train on the holdout.
    """

    every: int
    horizon: Horizon

    def is_due(self, rounds_done: int) -> bool:
        """Say whether the memory is to be renewed after so many rounds."""
        last = (self.horizon.rounds, self.horizon.settles_at)
        return rounds_done % self.every == 0 or rounds_done in last

    def may_tune(self, rounds_done: int) -> bool:
        """Say whether the holdout still judges fairly after so many rounds."""
        settles_at = self.horizon.settles_at
        return settles_at is None or rounds_done <= settles_at
