"""What a peer knows of others' models: how well they do on its data, and the newest of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from peer import algorithm
from peer.row import Row
from protocol.messages import MAX_FRIENDS, ModelSnapshot, PeerId
from protocol.publication import MAX_DIFFERENCES
from protocol.tensors import Tensors

MAX_BASES_BYTES = 1 << 26
"""Memory of a peer for models that are held as bases alone."""


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A fetched model of another peer.

    Attributes:
        snapshot: The model.
        loss: Its latest measured loss, or None before that.
        fetched_round: The round in which its owner last said that it is the newest.
    """

    snapshot: ModelSnapshot
    loss: float | None
    fetched_round: int


def best_collaborators(weights: Row, own: PeerId, least: float) -> tuple[PeerId, ...]:
    """Return the others of the largest weights, as others are told: they may be theirs, too.

    Args:
        weights: w_i.
        own: Who is none of them.
        least: The weight that one must have.
    """
    others = weights.at_least(least)
    others.pop(own, None)
    return tuple(sorted(others, key=lambda each: (-others[each], each))[:MAX_FRIENDS])


class Acquaintances:
    """Loss averages, the own model's among them, and the models kept.

    What was measured, in the order of peer ids, and when is replaced as a whole, never changed:
    whoever holds it needs no copy.

    Args:
        loss_averages: L̂_ij.
        measured_at: The round in which each peer was last measured.
        kept: Models of others.
        holds_bases: Whether models that are let go of are held for a few rounds: what is fetched
            again then comes as differences to them.
    """

    def __init__(
        self,
        loss_averages: Mapping[PeerId, float],
        measured_at: Mapping[PeerId, int],
        kept: Mapping[PeerId, KeptModel],
        holds_bases: bool = True,
    ) -> None:
        self.loss_averages = Row.of(loss_averages)
        self.measured_at: Mapping[PeerId, int] = dict(measured_at)
        self.kept = dict(kept)
        self._bases: dict[PeerId, KeptModel] = {}  # the longest unused first
        self._latest: tuple[object, object, Row] = (None, None, Row.of({}))
        self._all_within: tuple[object, object] = (None, None)
        self._max_bases_bytes = MAX_BASES_BYTES if holds_bases else 0

    def held(self, peer_id: PeerId) -> ModelSnapshot | None:
        """Return the newest model of a peer that is there, kept or a base alone."""
        held = self.kept.get(peer_id) or self._bases.get(peer_id)
        return None if held is None else held.snapshot

    def keep(self, peer_id: PeerId, snapshot: ModelSnapshot, round_number: int) -> None:
        """Keep a model in place of the owner's former one."""
        self._bases.pop(peer_id, None)
        self.kept[peer_id] = KeptModel(snapshot, None, round_number)

    def confirm(self, peer_id: PeerId, round_number: int) -> KeptModel:
        """Take note that a model held is still the newest; keep and return it."""
        held = self._bases.pop(peer_id, None) or self.kept[peer_id]
        self.kept[peer_id] = KeptModel(held.snapshot, held.loss, round_number)
        return held

    def forget_base(self, peer_id: PeerId) -> None:
        """Let go of what is held of a peer as a base: nothing came of it."""
        self._bases.pop(peer_id, None)

    def forget_losses(self) -> None:
        """Take the losses of kept models for unknown; the averages will learn by new ones."""
        self.kept = {peer_id: replace(kept, loss=None) for peer_id, kept in self.kept.items()}

    def measured(self, peer_id: PeerId, loss: float) -> None:
        """Take note of a kept model's loss; the averages change with `fold`."""
        kept = self.kept.get(peer_id)
        if kept is not None:
            self.kept[peer_id] = KeptModel(kept.snapshot, loss, kept.fetched_round)

    def fold(self, losses: Mapping[PeerId, float], round_number: int, beta: float | None) -> None:
        """Fold a round's losses into the averages; a loss that isn't finite forgets the peer."""
        known = self.loss_averages
        self._learn(
            {
                peer_id: algorithm.update_loss_average(known.get(peer_id), loss, beta)
                for peer_id, loss in losses.items()
            },
            round_number,
        )

    def take_over(self, own: PeerId, adopted: PeerId) -> None:
        """Take note that the own model is a kept one now."""
        self.loss_averages = self.loss_averages.changed({own: self.loss_averages[adopted]})

    def jumped(self, losses: Mapping[PeerId, float], alarm: float) -> set[PeerId]:
        """Return whose losses are above their averages by more than `alarm`; 0 is nobody's."""
        return {
            peer_id
            for peer_id, loss in losses.items()
            if 0.0 < alarm < loss - self._average(peer_id)
        }

    def hold(
        self,
        losses: Mapping[PeerId, float],
        trained: Collection[PeerId],
        jumped: Collection[PeerId],
        round_number: int,
        beta: float | None,
    ) -> None:
        """Leave averages as they are, but of who has changed, or was looked at beside friends.

        Once a peer trains on what it measures on, its own model does, and friends do by its
        gradients: their losses fall, and say nothing, unless one jumps. Others, looked at beside
        them, are still measured fairly. They get the average that they would have had before, when
        losses were higher by what the median of the trained ones' has fallen since, jumps left out.

        Args:
            losses: Of this round.
            trained: The own model and the sampled neighbors.
            jumped: Whose losses did.
            round_number: The round.
            beta: See `fold`.
        """
        falls = (
            self._average(peer_id) - losses.get(peer_id, math.nan)
            for peer_id in trained
            if peer_id not in jumped
        )
        fallen = [fall for fall in falls if math.isfinite(fall)]
        shift = statistics.median(fallen) if fallen else 0.0
        known, learned = self.loss_averages, dict[PeerId, float | None]()
        for peer_id, loss in losses.items():
            if peer_id in jumped or not math.isfinite(loss):
                average = known.get(peer_id)
                learned[peer_id] = algorithm.update_loss_average(average, loss, beta)
            elif peer_id not in trained or peer_id not in known:
                learned[peer_id] = loss + shift
            else:
                learned[peer_id] = known[peer_id]
        self._learn(learned, round_number)

    def _learn(self, averages: Mapping[PeerId, float | None], round_number: int) -> None:
        """Take the averages of who was just measured; None forgets a peer."""
        self.loss_averages = self.loss_averages.changed(averages)
        self.measured_at = {**self.measured_at, **dict.fromkeys(sorted(averages), round_number)}
        for peer_id, average in averages.items():
            if average is None:
                self.kept.pop(peer_id, None)

    def _average(self, peer_id: PeerId) -> float:
        return self.loss_averages.get(peer_id, math.inf)

    def weights(
        self,
        own: PeerId,
        others: Collection[PeerId],
        temperature: float,
        prior: Mapping[PeerId, float] | None = None,
    ) -> Row:
        """Return w_i over self and those of the others that were ever measured."""
        known = self.loss_averages
        former_others, former_known, former_weights = self._latest
        if prior is None and others is former_others and known is former_known:
            return former_weights
        averages = self._averages_within(own, others)
        weights = algorithm.collaboration_weights(averages, temperature, prior)
        if prior is None and isinstance(others, frozenset):  # nobody changes that
            self._latest = others, known, weights
        return weights

    def _averages_within(self, own: PeerId, others: Collection[PeerId]) -> Row:
        known = self.loss_averages
        if len(others) < len(known):  # of thousands ever measured, few are kept
            return known.only((*others, own))
        if self._all_within[0] is not others or self._all_within[1] is not known.positions:
            absent = set(known.positions).difference(others, (own,))
            if absent:
                return known.only(each for each in known.positions if each not in absent)
            if isinstance(others, frozenset):
                self._all_within = others, known.positions
        return known

    def tensors_of(self, peer_id: PeerId) -> Tensors:
        """Return a kept model."""
        return self.kept[peer_id].snapshot.tensors

    def best_since(
        self, round_number: int, losses: Mapping[PeerId, float], own: float
    ) -> PeerId | None:
        """Return whose kept model, made in this round or later, is the best below a loss of ours.

        Args:
            round_number: The earliest round.
            losses: Of models just measured.
            own: The loss to be below.
        """
        candidates = [
            (losses[peer_id], peer_id)
            for peer_id, kept in self.kept.items()
            if kept.snapshot.version.round_number >= round_number
            and losses.get(peer_id, float("inf")) < own
        ]
        return min(candidates)[1] if candidates else None

    def recommended(self) -> dict[PeerId, tuple[PeerId, ...]]:
        """Return the best collaborators that the owners of kept models told of."""
        return {peer_id: kept.snapshot.friends for peer_id, kept in self.kept.items()}

    def measured_since(self, round_number: int, peer_ids: Collection[PeerId]) -> set[PeerId]:
        """Return who of these was measured after a round."""
        return {each for each in peer_ids if self.measured_at.get(each, -math.inf) > round_number}

    def outdated(self, round_number: int) -> Iterator[PeerId]:
        """Yield whose kept models were last fetched in this round or before."""
        for peer_id, kept in self.kept.items():
            if kept.fetched_round <= round_number:
                yield peer_id

    def keep_only(self, peer_ids: Collection[PeerId], round_number: int) -> None:
        """Let go of all other models, but for bases, and of their losses; the averages stay."""
        for peer_id in sorted(self.kept.keys() - set(peer_ids)):
            let_go = self.kept.pop(peer_id)
            self._bases[peer_id] = KeptModel(let_go.snapshot, None, let_go.fetched_round)
        last = round_number - MAX_DIFFERENCES
        for peer_id in [each for each, base in self._bases.items() if base.fetched_round <= last]:
            del self._bases[peer_id]
        while self._bases:
            peer_id, base = next(iter(self._bases.items()))
            if len(self._bases) * base.snapshot.tensors.layout.size_bytes <= self._max_bases_bytes:
                break
            del self._bases[peer_id]
