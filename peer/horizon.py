"""How many rounds a peer does, and from which on it trains on its holdout, too."""

from __future__ import annotations


class Horizon:
    """The last rounds, in which weights settle.

    Args:
        rounds: Of the peer in all; None for ever, and then there are no last ones.
        final_full: Part of them that is last.
        measuring_until: A round before which nothing settles, since the data have changed.

    Attributes:
        rounds: As given.
        measuring_until: The round before which nothing settles.
    """

    def __init__(self, rounds: int | None, final_full: float, measuring_until: int = 0) -> None:
        self.rounds = rounds
        self.measuring_until = measuring_until
        self._first = None if rounds is None else rounds - int(final_full * rounds)
        self._latest = 0 if rounds is None else rounds - int(final_full / 2 * rounds)

    @property
    def settles_at(self) -> int | None:
        """The first of the last rounds, as it looks now; None where there are none."""
        return None if self._first is None else max(self._first, self.measuring_until)

    def is_over(self, rounds_done: int) -> bool:
        """Say whether so many rounds are all."""
        return self.rounds is not None and rounds_done >= self.rounds

    def is_final(self, round_number: int) -> bool:
        """Say whether a round is one of the last ones."""
        return self.settles_at is not None and round_number >= self.settles_at

    def postpone(self, round_number: int) -> None:
        """Let a round that would be one of the last ones be none, if half of those are left."""
        if self.is_final(round_number) and round_number < self._latest:
            self.measuring_until = round_number + 1

    def begin_anew(self, round_number: int) -> None:
        """Measure for as many rounds as at first, from the one after this."""
        if self._first is not None and self.is_final(round_number):
            self.measuring_until = round_number + 1 + self._first
