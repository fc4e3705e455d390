"""The gradients that others made for the own model, until a round closes."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from peer.algorithm import Vector, Verdict, WeightedGradient
from protocol.messages import GradientUpdate, PeerId, Version


class Arrivals:
    """One gradient a sender, the newest.

    Where nobody waits for anybody, most gradients are made on the version before the present one.
    The own model has gone along them for a round's steps since, and what is left of them misleads.
    So the own gradients on the last versions are kept, to tell what has changed.

    Args:
        staleness: Rounds that the model a gradient was made on may be old.
        clip: See `renew`.
    """

    def __init__(self, staleness: int, clip: float) -> None:
        self._staleness = staleness
        self._clip = clip
        self._kept: dict[PeerId, GradientUpdate] = {}
        self._own: dict[int, Vector] = {}  # by the round_number of the version

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

    def take(
        self, version: Version, own: Vector | None
    ) -> tuple[dict[PeerId, WeightedGradient], list[Verdict]]:
        """Hand over all that suit the own model, as if made on it, and keep none.

        Args:
            version: Of the own model.
            own: The own gradient on it, by which those made on older versions are renewed; None to
                hand them over as they came. Shape (num_parameters,).

        Returns:
            The gradients in the order of senders; and a verdict on each that is refused: stale, if
            made on a model of another incarnation, of the future or too old; opposed, if it was
            when it was made.
        """
        arrived, self._kept = self._kept, {}
        fresh: dict[PeerId, WeightedGradient] = {}
        refused: list[Verdict] = []
        for sender, update in sorted(arrived.items()):
            age = version.round_number - update.on_version.round_number
            if update.on_version.incarnation != version.incarnation or not (
                0 <= age <= self._staleness
            ):
                refused.append(Verdict.STALE)
                continue
            made = update.gradient.flat_f32()
            then = self._own.get(update.on_version.round_number) if age else None
            gradient = made if own is None or then is None else renew(made, then, own, self._clip)
            if gradient is None:
                refused.append(Verdict.OPPOSED)
            else:
                fresh[sender] = WeightedGradient(update.weight, gradient)
        self._remember(version.round_number, own)
        return fresh, refused

    def _remember(self, round_number: int, own: Vector | None) -> None:
        """Keep an own gradient for as long as gradients made on its version may come."""
        if own is not None:
            self._own[round_number] = own
        oldest = round_number + 1 - self._staleness
        self._own = {number: each for number, each in self._own.items() if number >= oldest}


def renew(gradient: Vector, then: Vector, now: Vector, clip: float) -> Vector | None:
    """Return what a gradient made on an older version of the own model is on the present one.

    g + (now - then): what tells the sender from the owner stays, and what the steps since have
    changed is taken from the owner. That is the control variate of SVRG ("Accelerating Stochastic
    Gradient Descent using Predictive Variance Reduction", 2013). Before, the gradient is judged and
    clipped as on the older version, so that nobody can send what the owner would have refused; and
    it is as short beside the own one as it was then, at least, so that who sends next to nothing
    moves next to nothing.

    Args:
        gradient: Made on the older version by another. Shape (num_parameters,), as of the others.
        then: The own gradient on the older version.
        now: The own gradient on the present version.
        clip: Greatest norm of another's gradient, in units of the own one's.

    Returns:
        The renewed gradient; the same one where a number isn't finite, which is for others to
        judge; None when it opposed the own one on the older version.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squared, former, present = (float(np.dot(each, each)) for each in (gradient, then, now))
    if not math.isfinite(squared + former + present):
        return gradient
    if float(np.dot(then, gradient)) < 0.0:
        return None
    clipped = min(squared, clip**2 * former)
    scale = math.sqrt(clipped / squared) if squared else 0.0
    renewed = np.float32(scale) * gradient
    renewed += now
    renewed -= then
    longest = math.sqrt(present * clipped / former) if former else 0.0
    if (length := float(np.linalg.norm(renewed))) > longest:
        renewed *= np.float32(longest / length)
    return renewed
