"""The rounds of one peer: events in, effects out, nothing else.

`PeerCore.handle` is the only method that changes a peer's algorithmic state. A driver (the asyncio
daemon, the simulator) carries out the effects and answers with events; the same events always give
the same effects. Answers that carry another round number than the current one are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np

from peer import algorithm
from peer.algorithm import AlgorithmSettings, Verdict, WeightedGradient
from peer.events import (
    Adopt,
    Differentiate,
    Differentiated,
    Effect,
    Event,
    Fetch,
    FetchFailed,
    Finished,
    GradientArrived,
    Measure,
    Measured,
    ModelFetched,
    ModelUnchanged,
    NeighborsChanged,
    Publish,
    ReadyToClose,
    RoundClosed,
    RoundFinished,
    SendGradient,
    Started,
    Step,
    Stepped,
    Stopped,
    StopRequested,
)
from protocol.errors import LocalProtocolError
from protocol.messages import GradientUpdate, ModelSnapshot, PeerId, Version
from protocol.tensors import Tensors


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSnapshot:
    """All algorithmic state between two rounds: what a checkpoint saves.

    Attributes:
        round_number: The next round.
        model: The own model; a restored peer publishes it under a larger incarnation.
        loss_averages: L̂_ij.
        kept: Models of others.
        rng_state: The sampling generator's state.
    """

    round_number: int
    model: ModelSnapshot
    loss_averages: Mapping[PeerId, float]
    kept: Mapping[PeerId, KeptModel]
    rng_state: Mapping[str, Any]


class _Phase(Enum):
    IDLE = auto()  # before the first round, and after the last
    E_STEP = auto()  # waiting for models and measurements
    M_STEP = auto()  # waiting for the own gradients to be made
    CLOSING = auto()  # waiting for RoundClosed
    STEPPING = auto()  # waiting for Stepped
    STOPPED = auto()


class PeerCore:
    """One peer's rounds.

    Args:
        peer_id: Our own.
        settings: The algorithm's.
        model: The own model to begin with, unless restored.
        incarnation: Larger at every start of this peer.
        rounds: How many rounds to do in all, or None for ever.
        rng: Decides who is sampled; nothing else is random.
        restored: A saved state to go on from.
    """

    def __init__(
        self,
        *,
        peer_id: PeerId,
        settings: AlgorithmSettings,
        model: Tensors,
        incarnation: int,
        rounds: int | None,
        rng: np.random.Generator,
        restored: PeerSnapshot | None = None,
    ) -> None:
        self._peer_id = peer_id
        self._settings = settings
        self._rounds = rounds
        self._rng = rng
        self._phase = _Phase.IDLE
        self._round_number = 0
        self._loss_averages: dict[PeerId, float] = {}
        self._kept: dict[PeerId, KeptModel] = {}
        model_round = 0
        if restored is not None:
            rng.bit_generator.state = dict(restored.rng_state)
            self._round_number = restored.round_number
            self._loss_averages = dict(restored.loss_averages)
            self._kept = dict(restored.kept)
            model_round = restored.model.version.round_number
        self._newcomer = restored is None
        self._model = ModelSnapshot(
            version=Version(incarnation, model_round),
            tensors=restored.model.tensors if restored is not None else model,
        )
        self._neighbors: frozenset[PeerId] = frozenset()
        self._sampled: tuple[PeerId, ...] = ()
        self._weights: dict[PeerId, float] = {}
        # What this round still waits for. Completion is tested after every event that shrinks one.
        self._measuring: set[PeerId] = set()
        self._differentiating: set[PeerId] = set()
        self._losses: dict[PeerId, float] = {}
        self._own_gradient: Tensors | None = None
        self._arrived: dict[PeerId, GradientUpdate] = {}
        self._verdicts: dict[Verdict, int] = {}
        self._boundary = self._snapshot()

    @property
    def round_number(self) -> int:
        """The current round, or the number of rounds done when finished."""
        return self._round_number

    @property
    def model(self) -> ModelSnapshot:
        """The own model as it is published."""
        return self._model

    def handle(self, event: Event) -> Sequence[Effect]:
        """Take one event and return what is to be done about it, in order."""
        if self._phase is _Phase.STOPPED:
            return ()
        match event:
            case Started(neighbors):
                if self._phase is not _Phase.IDLE:
                    raise LocalProtocolError("Started must be the first event")
                self._neighbors = neighbors - {self._peer_id}
                return (Publish(self._model), *self._begin_round())
            case NeighborsChanged(neighbors):
                return self._change_neighbors(neighbors)
            case GradientArrived(update):
                return self._keep_gradient(update)
            case StopRequested():
                self._phase = _Phase.STOPPED
                return (Stopped(),)
            case _:
                if event.round_number != self._round_number:
                    return ()
        match event:
            case ModelFetched(peer_id, _, snapshot):
                return self._take_model(peer_id, snapshot)
            case ModelUnchanged(peer_id):
                return self._take_unchanged(peer_id)
            case FetchFailed(peer_id):
                self._measuring.discard(peer_id)
                return self._after_measuring()
            case Measured(peer_id, _, loss):
                return self._take_loss(peer_id, loss)
            case Differentiated():
                return self._take_gradient(event)
            case RoundClosed():
                return self._close_round()
            case Stepped(_, model):
                return self._take_step(model)

    def training_weights(self) -> dict[PeerId, float]:
        """Return w_i over self and the reachable peers ever measured: whom to sample and train."""
        return self._weights_over(self._neighbors | {self._peer_id})

    def prediction_weights(self) -> dict[PeerId, float]:
        """Return w_i over self and every peer whose model is kept, the departed included.

        Small weights are dropped; when nothing was ever measured, all weight is on self.
        """
        weights = self._weights_over(self._kept.keys() | {self._peer_id})
        pruned = algorithm.prune_weights(weights, self._settings.min_prediction_weight)
        return pruned or {self._peer_id: 1.0}

    def mixture(self) -> dict[PeerId, Tensors]:
        """Return the models that `prediction_weights` is about."""
        return {peer_id: self._tensors_of(peer_id) for peer_id in self.prediction_weights()}

    def snapshot(self) -> PeerSnapshot:
        """Return the state to be saved: as it was when the last round ended."""
        return self._boundary

    # The E-step: sample, fetch, measure.

    def _begin_round(self) -> list[Effect]:
        self._boundary = self._snapshot()
        if self._rounds is not None and self._round_number >= self._rounds:
            self._phase = _Phase.IDLE
            return [Finished()]
        settings = self._settings
        self._phase = _Phase.E_STEP
        self._verdicts = {}
        self._own_gradient = None
        self._losses = {}
        self._sampled = algorithm.sample_neighbors(
            self._neighbors,
            self.training_weights(),
            settings.num_neighbors,
            settings.epsilon,
            self._rng,
        )
        fetching = sorted({*self._sampled, *self._only_measured()})
        self._measuring = {*fetching, self._peer_id}
        effects: list[Effect] = []
        for peer_id in fetching:
            kept = self._kept.get(peer_id)
            have = kept.snapshot.version if kept and kept.loss is not None else None
            effects.append(Fetch(peer_id, self._round_number, have))
        effects.append(Measure(self._peer_id, self._round_number, self._model.tensors))
        self._differentiating = set()
        if settings.anchor:
            effects.append(self._differentiate(self._peer_id))
        return effects

    def _only_measured(self) -> set[PeerId]:
        """Peers whose models are wanted this round without giving them a gradient."""
        if self._settings.num_neighbors == 0:
            return set()  # M = 0 is learning alone
        if self._newcomer and self._round_number == 0:
            rest = sorted(self._neighbors - set(self._sampled))
            order = self._rng.permutation(len(rest))
            return {rest[position] for position in order[: self._settings.survey]}
        return {
            peer_id
            for peer_id, kept in self._kept.items()
            if peer_id in self._neighbors
            and self._round_number - kept.fetched_round >= self._settings.refresh_after
        }

    def _take_model(self, peer_id: PeerId, snapshot: ModelSnapshot) -> list[Effect]:
        if self._phase is not _Phase.E_STEP or peer_id not in self._measuring:
            return []
        self._kept[peer_id] = KeptModel(snapshot, None, self._round_number)
        return [Measure(peer_id, self._round_number, snapshot.tensors)]

    def _take_unchanged(self, peer_id: PeerId) -> list[Effect]:
        """The same model on the same examples has the same loss: no need to measure again."""
        kept = self._kept.get(peer_id)
        if kept is None or kept.loss is None or peer_id not in self._measuring:
            return []
        self._kept[peer_id] = replace(kept, fetched_round=self._round_number)
        return self._take_loss(peer_id, kept.loss)

    def _take_loss(self, peer_id: PeerId, loss: float) -> list[Effect]:
        if self._phase is not _Phase.E_STEP or peer_id not in self._measuring:
            return []
        self._measuring.discard(peer_id)
        self._losses[peer_id] = loss
        if peer_id in self._kept:
            self._kept[peer_id] = replace(self._kept[peer_id], loss=loss)
        return self._after_measuring()

    def _after_measuring(self) -> list[Effect]:
        """Do the E-step once every model of the round is measured or given up."""
        if self._phase is not _Phase.E_STEP or self._measuring:
            return []
        for peer_id in sorted(self._losses):
            average = algorithm.update_loss_average(
                self._loss_averages.get(peer_id), self._losses[peer_id], self._settings.beta
            )
            if average is None:
                self._loss_averages.pop(peer_id, None)
                self._kept.pop(peer_id, None)
            else:
                self._loss_averages[peer_id] = average
        self._weights = self.training_weights()
        adopted = self._best_to_adopt()
        if adopted is not None:
            self._phase = _Phase.STEPPING
            self._loss_averages[self._peer_id] = self._loss_averages[adopted]
            return [Adopt(self._round_number, adopted, self._tensors_of(adopted))]
        return self._begin_m_step()

    def _best_to_adopt(self) -> PeerId | None:
        """The peer from whose model a newcomer should start, if any is old and good enough."""
        if not self._newcomer or self._round_number > 0 or self._settings.adopt_after == 0:
            return None
        own = self._losses.get(self._peer_id, float("inf"))
        candidates = [
            (self._losses[peer_id], peer_id)
            for peer_id in self._losses
            if peer_id in self._kept
            and self._kept[peer_id].snapshot.version.round_number >= self._settings.adopt_after
            and not self._losses[peer_id] >= own
        ]
        return min(candidates)[1] if candidates else None

    # The M-step: differentiate, send, combine, step.

    def _begin_m_step(self) -> list[Effect]:
        self._phase = _Phase.M_STEP
        wanted = [peer_id for peer_id in self._sampled if peer_id in self._losses]
        if not self._settings.anchor:
            wanted.append(self._peer_id)
        effects: list[Effect] = [
            self._differentiate(peer_id)
            for peer_id in wanted
            if self._weights.get(peer_id, 0.0) > 0.0
            and self._weights[peer_id] >= self._settings.min_gradient_weight
        ]
        return [*effects, *self._after_differentiating()]

    def _differentiate(self, peer_id: PeerId) -> Differentiate:
        self._differentiating.add(peer_id)
        return Differentiate(peer_id, self._round_number, self._tensors_of(peer_id))

    def _take_gradient(self, event: Differentiated) -> list[Effect]:
        peer_id = event.peer_id
        if peer_id not in self._differentiating:
            return []
        self._differentiating.discard(peer_id)
        effects: list[Effect] = []
        if peer_id == self._peer_id:
            self._own_gradient = event.gradient
        else:
            update = GradientUpdate(
                sender=self._peer_id,
                sender_round=self._round_number,
                on_version=self._kept[peer_id].snapshot.version,
                weight=self._weights[peer_id],
                num_examples=event.num_examples,
                gradient=event.gradient,
            )
            effects.append(SendGradient(peer_id, update))
        return [*effects, *self._after_differentiating()]

    def _after_differentiating(self) -> list[Effect]:
        if self._phase is not _Phase.M_STEP or self._differentiating:
            return []
        self._phase = _Phase.CLOSING
        return [ReadyToClose(self._round_number)]

    def _keep_gradient(self, update: GradientUpdate) -> list[Effect]:
        """Keep one gradient a sender, the newest; it is judged when the round closes."""
        kept = self._arrived.get(update.sender)
        if kept is None or (kept.on_version, kept.sender_round) <= (
            update.on_version,
            update.sender_round,
        ):
            self._arrived[update.sender] = update
        return []

    def _change_neighbors(self, neighbors: frozenset[PeerId]) -> list[Effect]:
        """A departed peer's gradient no longer counts; its losses and model stay as they are."""
        for peer_id in self._neighbors - neighbors:
            if self._arrived.pop(peer_id, None) is not None:
                self._count(Verdict.DEPARTED)
        self._neighbors = neighbors - {self._peer_id}
        return []

    def _close_round(self) -> list[Effect]:
        if self._phase is not _Phase.CLOSING:
            return []
        fresh = {}
        for sender in sorted(self._arrived):
            update = self._arrived[sender]
            if self._is_stale(update.on_version):
                self._count(Verdict.STALE)
            else:
                flat = update.gradient.flat_f32()
                fresh[sender] = WeightedGradient(update.weight, flat)
        self._arrived = {}
        own = self._own_gradient.flat_f32() if self._own_gradient is not None else None
        own_weight = 1.0 if self._settings.anchor else self._weights.get(self._peer_id, 0.0)
        total, verdicts = algorithm.combine_gradients(
            own, own_weight, fresh, defended=self._settings.defended
        )
        for verdict in verdicts.values():
            self._count(verdict)
        if total is None:
            return self._finish_round()
        self._phase = _Phase.STEPPING
        layout = self._model.tensors.layout.gradient
        return [Step(self._round_number, Tensors(layout, total.view(np.uint8)))]

    def _is_stale(self, on_version: Version) -> bool:
        """Whether a gradient is of another incarnation, of the future or too old."""
        version = self._model.version
        age = version.round_number - on_version.round_number
        same = on_version.incarnation == version.incarnation
        return not (same and 0 <= age <= self._settings.staleness)

    def _take_step(self, model: Tensors) -> list[Effect]:
        if self._phase is not _Phase.STEPPING:
            return []
        version = Version(self._model.version.incarnation, self._round_number + 1)
        self._model = ModelSnapshot(version=version, tensors=model)
        return [Publish(self._model), *self._finish_round()]

    def _finish_round(self) -> list[Effect]:
        predicting = self.prediction_weights()
        self._kept = {
            peer_id: kept for peer_id, kept in sorted(self._kept.items()) if peer_id in predicting
        }
        finished = RoundFinished(
            self._round_number,
            dict(sorted(self._loss_averages.items())),
            self._weights,
            predicting,
            self._sampled,
            dict(self._verdicts),
        )
        self._round_number += 1
        return [finished, *self._begin_round()]

    def _snapshot(self) -> PeerSnapshot:
        return PeerSnapshot(
            round_number=self._round_number,
            model=self._model,
            loss_averages=dict(self._loss_averages),
            kept=dict(self._kept),
            rng_state=self._rng.bit_generator.state,
        )

    def _weights_over(self, peer_ids: frozenset[PeerId] | set[PeerId]) -> dict[PeerId, float]:
        averages = {
            peer_id: average
            for peer_id, average in self._loss_averages.items()
            if peer_id in peer_ids
        }
        return algorithm.collaboration_weights(averages, self._settings.temperature)

    def _tensors_of(self, peer_id: PeerId) -> Tensors:
        if peer_id == self._peer_id:
            return self._model.tensors
        return self._kept[peer_id].snapshot.tensors

    def _count(self, verdict: Verdict) -> None:
        self._verdicts[verdict] = self._verdicts.get(verdict, 0) + 1
