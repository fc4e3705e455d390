"""The gradients that others made for the own model, until a round closes."""

from __future__ import annotations

from collections.abc import Collection

from peer.algorithm import WeightedGradient
from protocol.messages import GradientUpdate, PeerId, Version


class Arrivals:
    """One gradient a sender, the newest.

    Args:
        staleness: Rounds that the model a gradient was made on may be old.
    """

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._kept: dict[PeerId, GradientUpdate] = {}

    def keep(self, update: GradientUpdate) -> None:
        """Keep a gradient unless there is a newer one of its sender."""
        kept = self._kept.get(update.sender)
        if kept is None or (kept.on_version, kept.sender_round) <= (
            update.on_version,
            update.sender_round,
        ):
            self._kept[update.sender] = update

    def depart(self, peer_ids: Collection[PeerId]) -> int:
        """Drop the gradients of these senders, and return how many there were."""
        return sum(self._kept.pop(peer_id, None) is not None for peer_id in peer_ids)

    def take(self, version: Version) -> tuple[dict[PeerId, WeightedGradient], int]:
        """Hand over all that suit the own model, and keep none.

        Args:
            version: Of the own model.

        Returns:
            The gradients in the order of senders; and how many were made on a model of another
            incarnation, of the future or too old.
        """
        fresh = {
            sender: WeightedGradient(update.weight, update.gradient.flat_f32())
            for sender, update in sorted(self._kept.items())
            if update.on_version.incarnation == version.incarnation
            and 0 <= version.round_number - update.on_version.round_number <= self._staleness
        }
        stale = len(self._kept) - len(fresh)
        self._kept = {}
        return fresh, stale
