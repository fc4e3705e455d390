"""How well this peer itself is doing: Lifeguard's local health multiplier."""

from __future__ import annotations


class Awareness:
    """A score that grows with every sign that this peer, not the others, is slow.

    Dadgar, Phillips, Currey, "Lifeguard: Local Health Awareness for More Accurate Failure
    Detection", section IV-A.

    Args:
        largest: The largest score.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._score = 0

    @property
    def score(self) -> int:
        """The score, from 0, which is healthy."""
        return self._score

    @property
    def multiplier(self) -> int:
        """What the own probe interval and timeout are to be multiplied by, from 1."""
        return self._score + 1

    def worsen(self, by: int = 1) -> None:
        """Take note of signs that this peer is slow."""
        self._score = min(self._score + by, self._largest)

    def improve(self) -> None:
        """Take note that a probe was answered."""
        self._score = max(self._score - 1, 0)
