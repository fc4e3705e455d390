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
        return rounds_done % self.every == 0 or self.is_last_turn(rounds_done)

    def is_last_turn(self, rounds_done: int) -> bool:
        """Say whether all rounds are done, or the holdout is trained on from now on."""
        return rounds_done in (self.horizon.rounds, self.horizon.settles_at)

    def may_tune(self, rounds_done: int) -> bool:
        """Say whether the holdout still judges fairly after so many rounds."""
        return self.horizon.is_fair(rounds_done)
