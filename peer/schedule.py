"""When a peer's memory is renewed, and until when its holdout judges fairly."""

from __future__ import annotations

from dataclasses import dataclass

from peer.algorithm import AlgorithmSettings
from peer.config import PersonalizationSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a memory is renewed, and when its interpolation weight may be chosen.

    Attributes:
        every: Rounds from one renewal to the next.
        rounds: Of the peer in all; None for ever.
        tunable: Rounds after which the models of the mixture have not trained on the holdout yet.
    """

    every: int
    rounds: int | None
    tunable: int | None

    @classmethod
    def of(
        cls, settings: PersonalizationSettings, algorithm: AlgorithmSettings, rounds: int | None
    ) -> Schedule:
        """Return the schedule of a peer with these settings."""
        # As `PeerCore` counts its final rounds, whose batches hold the holdout.
        tunable = None if rounds is None else rounds - int(algorithm.final_full * rounds)
        return cls(every=settings.every, rounds=rounds, tunable=tunable)

    def is_due(self, rounds_done: int) -> bool:
        """Say whether the memory is to be renewed after so many rounds."""
        return rounds_done % self.every == 0 or rounds_done in (self.rounds, self.tunable)

    def may_tune(self, rounds_done: int) -> bool:
        """Say whether the holdout still judges fairly after so many rounds."""
        return self.tunable is None or rounds_done <= self.tunable
