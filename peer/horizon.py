"""How many rounds a peer does, and from which on it trains on its holdout, too."""

from __future__ import annotations


class Horizon:
    """The last rounds, in which weights settle.

    Args:
        rounds: Of the peer in all; None for ever, and then there are no last ones.
        final_full: Part of them that is last.

    Attributes:
        rounds: As given.
        measuring_until: The round before which nothing settles: it was postponed, or begun anew.
        trained_from: The first round that trained on the holdout as it is now; None before that.
    """

    def __init__(self, rounds: int | None, final_full: float) -> None:
        self.rounds = rounds
        self.measuring_until = 0
        self.trained_from: int | None = None
        self._first = None if rounds is None else rounds - int(final_full * rounds)
        self._latest = 0 if rounds is None else rounds - int(final_full / 2 * rounds)

    def restore(self, measuring_until: int, trained_from: int | None) -> None:
        """Go on from what was saved; there may be another number of rounds now."""
        self.measuring_until, self.trained_from = measuring_until, trained_from

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

    def is_fair(self, round_number: int) -> bool:
        """Say whether no model had trained on the holdout when a round began."""
        return self.trained_from is None or round_number <= self.trained_from

    def enter(self, round_number: int, *, searching: bool) -> bool:
        """Begin a round, and say whether it is one of the last ones.

        Args:
            round_number: The round.
            searching: Whether friends are still missing. Then the last rounds are postponed, until
                half of them are left.
        """
        final = self.is_final(round_number)
        if final and searching and self.trained_from is None and round_number < self._latest:
            self.measuring_until = round_number + 1
            return False
        if final and self.trained_from is None:
            self.trained_from = round_number
        return final

    def begin_anew(self, round_number: int) -> None:
        """Measure on after this round: for as many rounds as at first, or half of those left.

        Before the last rounds half as many are enough: losses jump when training begins, too.
        """
        if self.rounds is not None and self._first is not None:
            following = round_number + 1
            wanted = self._first if self.is_final(round_number) else self._first // 2
            some = min(wanted, (self.rounds - following) // 2)
            self.measuring_until = max(self.measuring_until, following + some)

    def replace_data(self) -> None:
        """Take the holdout for one that nothing has trained on."""
        self.trained_from = None
