"""The rounds of one peer: events in, effects out, nothing else.

`PeerCore.handle` is the only method that changes a peer's algorithmic state. A driver (the asyncio
daemon, the simulator) carries out the effects and answers with events; the same events always give
the same effects. Answers that carry another round number than the current one are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum, auto

import numpy as np

from peer import algorithm
from peer.acquaintances import Acquaintances, best_collaborators
from peer.algorithm import AlgorithmSettings, Verdict
from peer.arrivals import Arrivals
from peer.events import (
    Adopt,
    AskFailed,
    AskGroups,
    Cluster,
    Clustered,
    Differentiate,
    Differentiated,
    Effect,
    Event,
    ExamplesChanged,
    Fetch,
    FetchFailed,
    Finished,
    GradientArrived,
    GroupsTold,
    Measure,
    Measured,
    ModelAsked,
    ModelFetched,
    ModelUnchanged,
    NeighborsChanged,
    Publish,
    PublishGroups,
    ReadyToClose,
    RoundClosed,
    RoundFinished,
    SendGradient,
    Started,
    Step,
    Stepped,
    Stopped,
    StopRequested,
    Train,
)
from peer.exploration import Candidates, Explorer
from peer.gathering import Gathering, bounded_sizes
from peer.horizon import Horizon
from peer.learner import Batch
from peer.row import Row
from peer.snapshot import PeerSnapshot
from protocol.errors import LocalProtocolError
from protocol.messages import GradientUpdate, ModelSnapshot, PeerId, Version
from protocol.tensors import Tensors


class _Phase(Enum):
    IDLE = auto()  # before the first round, and after the last
    STARTING = auto()  # waiting for the first local steps
    E_STEP = auto()  # waiting for models and measurements
    CLUSTERING = auto()  # waiting for Clustered
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
        num_examples: How many the peer trains on, for who averages by that; 0 is not to say.

    Attributes:
        horizon: Which rounds are the last ones.
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
        num_examples: int = 0,
    ) -> None:
        self._peer_id = peer_id
        self._settings = settings
        self._rng = rng
        self.horizon = Horizon(rounds, settings.final_full)
        self._phase = _Phase.IDLE
        self._round_number = 0
        self._known = Acquaintances(
            restored.loss_averages if restored else {},
            restored.measured_at if restored else {},
            restored.kept if restored else {},
            holds_bases=settings.bits is not None,
        )
        self._explorer = Explorer(settings, rng, restored.explorer if restored else None)
        model_round = 0
        if restored is not None:
            rng.bit_generator.state = dict(restored.rng_state)
            self._round_number = restored.round_number
            model_round = restored.model.version.round_number
            self.horizon.restore(restored.measuring_until, restored.trained_from)
        self._newcomer = restored is None
        self._initial = model
        self._model = ModelSnapshot(
            version=Version(incarnation, model_round),
            tensors=restored.model.tensors if restored is not None else model,
            num_examples=num_examples if settings.tells_sizes else 0,
        )
        self._shown = restored.shown if restored is not None else None
        self._neighbors = Candidates(frozenset(), peer_id)
        self._sampled: tuple[PeerId, ...] = ()
        self._weights = Row.of({})
        # What this round still waits for. Completion is tested after every event that shrinks one.
        self._awaited: set[PeerId] = set()
        self._differentiating: set[PeerId] = set()
        self._losses: dict[PeerId, float] = {}
        self._at_hand: set[PeerId] = set()
        self._own_gradient: Tensors | None = None
        self._arrivals = Arrivals(settings.staleness, settings.clip)
        self._verdicts: Counter[Verdict] = Counter()
        self._gathering = Gathering(peer_id, settings, restored.groups if restored else None)
        self._sizes: dict[PeerId, int] | None = None  # n_i of the cluster that the round goes by
        self._is_final = False
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
                self._neighbors = Candidates(neighbors, self._peer_id)
                return self._start()
            case NeighborsChanged(neighbors):
                return self._change_neighbors(neighbors)
            case GradientArrived(update):
                self._arrivals.keep(update)  # to be judged when the round closes
                return ()
            case ModelAsked(peer_id):
                if peer_id in self._neighbors.members:
                    self._explorer.asked_by(peer_id)
                return ()
            case ExamplesChanged(replaced):
                self._known.forget_losses()
                if replaced:
                    self.horizon.replace_data()
                return ()
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
                self._awaited.discard(peer_id)
                self._known.forget_base(peer_id)
                return self._after_e_step()
            case Measured(peer_id, _, loss):
                return self._take_loss(peer_id, loss)
            case GroupsTold() | AskFailed():
                return self._take_answer(event)
            case Clustered():
                return self._take_clustered(event)
            case Differentiated():
                return self._take_gradient(event)
            case RoundClosed():
                return self._close_round()
            case Stepped(_, model):
                return self._take_step(model)

    def training_weights(self) -> Row:
        """Return w_i over self and the reachable peers ever measured: whom to sample and train."""
        return self._weights_over(self._neighbors.members)

    def collaboration_weights(self) -> dict[PeerId, float]:
        """Return w_i over those who make up this peer's predictions, small weights dropped.

        Mixing predictions, that is self and every peer whose model is kept, the departed included;
        averaging models, self and the reachable peers. When nothing was ever measured, all weight
        is on self.
        """
        averaging = self._settings.exchange == "average"
        others = self._neighbors.members if averaging else self._known.kept.keys()
        weights = self._weights_over(others)
        pruned = algorithm.prune_weights(weights, self._settings.min_prediction_weight)
        if averaging or not pruned:
            return pruned or {self._peer_id: 1.0}
        return algorithm.raise_weight(pruned, self._peer_id, self._settings.min_own_weight)

    def prediction_weights(self) -> dict[PeerId, float]:
        """Return w_i of the mixture; averaging models, the own model predicts alone."""
        if self._settings.exchange == "average":
            return {self._peer_id: 1.0}
        return self.collaboration_weights()

    def mixture(self) -> dict[PeerId, Tensors]:
        """Return the models that `prediction_weights` is about."""
        return {peer_id: self._tensors_of(peer_id) for peer_id in self.prediction_weights()}

    def snapshot(self) -> PeerSnapshot:
        """Return the state to be saved: as it was when the last round ended."""
        return self._boundary

    # The E-step: sample, fetch, measure.

    def _start(self) -> list[Effect]:
        """A newcomer may take its first steps before it shows itself."""
        if not self._newcomer:
            shown = (
                self._model if self._shown is None else replace(self._model, tensors=self._shown)
            )
            # Who clustered nobody says so, too: else others would wait for it in vain.
            return [Publish(shown), PublishGroups(self._gathering.groups), *self._begin_round()]
        if not self._is_gathering:  # which is a survey, too
            self._explorer.begin_survey(self._neighbors)
        steps = self._settings.first_steps
        if not steps:
            return [Publish(self._model), *self._begin_round()]
        self._phase = _Phase.STARTING
        batches = tuple(Batch(number, self._is_one_shot) for number in range(steps))
        return [Train(self._round_number, self._model.tensors, batches)]

    def _begin_round(self) -> list[Effect]:
        self._boundary = self._snapshot()
        if self.horizon.is_over(self._round_number):
            self._phase = _Phase.IDLE
            return [Finished()]
        self._phase = _Phase.E_STEP
        searching = self._explorer.is_searching
        self._is_final = self.horizon.enter(self._round_number, searching=searching)
        self._verdicts = Counter()
        self._own_gradient = None
        self._losses = {}
        self._at_hand = set()
        self._differentiating = set()
        self._awaited = set()
        effects = self._fetch(self._choose_neighbors())
        self._awaited.add(self._peer_id)
        effects.append(Measure(self._peer_id, self._round_number, self._model.tensors))
        if self._settings.anchor and self._settings.exchange == "gradients":
            effects.append(self._differentiate(self._peer_id))
        return [*effects, *self._after_e_step()]

    def _fetch(self, wanted: Collection[PeerId]) -> list[Effect]:
        """Ask for models, and who belongs together, where that is whom to ask."""
        self._awaited.update(wanted)
        effects: list[Effect] = []
        for peer_id in sorted(wanted):
            have = self._known.held(peer_id)
            effects.append(Fetch(peer_id, self._round_number, have, self._is_gathering))
        if self._gathering.asked is not None:
            effects.append(AskGroups(self._gathering.asked, self._round_number))
        return effects

    @property
    def _is_gathering(self) -> bool:
        """Whether this is the round in which a newcomer learns its cluster."""
        return self._newcomer and self._round_number == 0 and self._settings.warm_start == "odcl"

    @property
    def _is_one_shot(self) -> bool:
        """Whether models are exchanged once only: nobody needs a holdout, nor a newer model."""
        return self._is_gathering and self.horizon.rounds == 1

    def _choose_neighbors(self) -> set[PeerId]:
        """Choose whom to sample, and return all whose models are wanted."""
        if self._settings.num_neighbors == 0:
            self._sampled = ()
            return set()  # M = 0 is learning alone
        if self._is_gathering:
            self._sampled = ()
            return self._gathering.begin(self._neighbors, self._rng)
        stale = self._round_number - self._settings.refresh_after
        choose = self._explorer.settle if self._is_final else self._explorer.choose
        choice = choose(
            self._neighbors,
            self.training_weights(),
            self._known.recommended(),
            self._known.measured_since(stale, self._explorer.insisting),
            self._known.loss_averages.positions.keys(),
        )
        self._sampled = choice.sampled
        wanted = {*choice.sampled, *choice.probed}
        if self._settings.exchange == "gradients":
            wanted.update(self._neighbors.members.intersection(self._known.outdated(stale)))
        return wanted

    def _take_model(self, peer_id: PeerId, snapshot: ModelSnapshot) -> list[Effect]:
        if self._phase is not _Phase.E_STEP or peer_id not in self._awaited:
            return []
        self._known.keep(peer_id, snapshot, self._round_number)
        if self._is_gathering:
            return self._have_at_hand(peer_id)
        return [Measure(peer_id, self._round_number, snapshot.tensors)]

    def _take_unchanged(self, peer_id: PeerId) -> list[Effect]:
        """The same model on the same examples has the same loss: no need to measure again."""
        held = self._known.held(peer_id)
        if self._phase is not _Phase.E_STEP or peer_id not in self._awaited or held is None:
            return []
        kept = self._known.confirm(peer_id, self._round_number)
        if kept.loss is None:
            return [Measure(peer_id, self._round_number, kept.snapshot.tensors)]
        return self._take_loss(peer_id, kept.loss)

    def _take_loss(self, peer_id: PeerId, loss: float) -> list[Effect]:
        if self._phase is not _Phase.E_STEP or peer_id not in self._awaited:
            return []
        self._losses[peer_id] = loss
        self._known.measured(peer_id, loss)
        return self._have_at_hand(peer_id)

    def _have_at_hand(self, peer_id: PeerId) -> list[Effect]:
        self._awaited.discard(peer_id)
        self._at_hand.add(peer_id)
        return self._after_e_step()

    def _after_e_step(self) -> list[Effect]:
        """Do the E-step once every model of the round is there, or given up."""
        if self._phase is not _Phase.E_STEP or self._awaited or self._gathering.asked is not None:
            return []
        if self._is_gathering:
            return self._cluster()
        return self._close_e_step()

    def _take_answer(self, event: GroupsTold | AskFailed) -> list[Effect]:
        """Fetch the models of the own cluster, or go on looking for it."""
        if self._phase is not _Phase.E_STEP or event.peer_id != self._gathering.asked:
            return []
        if isinstance(event, GroupsTold):
            wanted = self._gathering.told(event.groups, self._neighbors, self._rng)
        else:
            wanted = self._gathering.begin(self._neighbors, self._rng)
        return [*self._fetch(wanted), *self._after_e_step()]

    def _cluster(self) -> list[Effect]:
        """Go by what was told, or find out who belongs together, if anybody is there."""
        how, number = self._settings, self._round_number
        others = sorted(self._at_hand - {self._peer_id})
        if not others and (wanted := self._gathering.none_came(self._neighbors, self._rng)):
            return self._fetch(wanted)
        if not others or self._gathering.clustered_by is not None:
            return self._join_cluster()
        self._phase = _Phase.CLUSTERING
        models = {peer_id: self._tensors_of(peer_id) for peer_id in (*others, self._peer_id)}
        return [Cluster(number, models, self._initial, how.clustering, how.num_clusters)]

    def _take_clustered(self, found: Clustered) -> list[Effect]:
        if self._phase is not _Phase.CLUSTERING:
            return []
        self._gathering.know(found.groups, self._peer_id)
        return self._join_cluster()

    def _join_cluster(self) -> list[Effect]:
        """Take those of the own cluster for as good as the own model, as long as nobody measured.

        Strangers stay unmeasured, so that those whom the clustering missed can still be found.
        """
        groups = self._gathering.groups
        members = tuple(each for each in groups.others_of(self._peer_id) if each in self._at_hand)
        claimed = {each: self._known.kept[each].snapshot.num_examples for each in members}
        self._sizes = bounded_sizes({**claimed, self._peer_id: self._model.num_examples})
        own = self._losses.setdefault(self._peer_id, 0.0)
        self._losses |= dict.fromkeys(members, own)
        if self._settings.exchange == "average":
            self._sampled = members
        else:
            number = self._settings.num_neighbors
            self._sampled = algorithm.uniform_neighbors(members, number, self._rng)
        return [PublishGroups(groups), *self._close_e_step()]

    def _close_e_step(self) -> list[Effect]:
        """Turn the round's losses into weights, and go on."""
        self._update_averages()
        self._weights = self.training_weights()
        adopted = self._best_to_adopt()
        if adopted is not None:
            self._phase = _Phase.STEPPING
            self._known.take_over(self._peer_id, adopted)
            return [Adopt(self._round_number, adopted, self._tensors_of(adopted))]
        return self._begin_m_step()

    def _update_averages(self) -> None:
        """Fold the round's losses into averages, or hold those; an own one that jumps alarms."""
        number, beta = self._round_number, self._settings.forgetting
        news = not self._losses.keys() <= self._known.measured_at.keys()
        jumped = self._known.jumped(self._losses, self._settings.alarm)
        if self._peer_id in jumped:
            self._explorer.begin_survey(self._neighbors)
            self.horizon.begin_anew(number)
        if self._is_final and self._peer_id not in jumped:
            self._known.hold(self._losses, (*self._sampled, self._peer_id), jumped, number, beta)
        else:
            self._known.fold(self._losses, number, beta)
        self._explorer.measured(self._losses, news=news)

    def _best_to_adopt(self) -> PeerId | None:
        """The peer from whose model a newcomer should start, if any is old and good enough."""
        if not self._newcomer or self._round_number > 0 or self._settings.adopt_after == 0:
            return None
        own = self._losses.get(self._peer_id, float("inf"))
        return self._known.best_since(self._settings.adopt_after, self._losses, own)

    # The M-step: differentiate, send, combine, step.

    def _begin_m_step(self) -> list[Effect]:
        self._phase = _Phase.M_STEP
        if self._settings.exchange == "average":
            return self._after_differentiating()
        wanted = [peer_id for peer_id in self._sampled if peer_id in self._at_hand]
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
        batch = self._batches()[0]
        return Differentiate(peer_id, self._round_number, self._tensors_of(peer_id), batch)

    def _batches(self) -> tuple[Batch, ...]:
        """The round's batches, one for each of its steps; none where the last average closes."""
        if self._settings.exchange == "average" and self.horizon.is_over(self._round_number + 1):
            return ()
        first = self._settings.steps_after(self._round_number)
        numbers = range(first, first + self._settings.exchange_every)
        return tuple(Batch(number, self._is_final) for number in numbers)

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
                on_version=self._known.kept[peer_id].snapshot.version,
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

    def _change_neighbors(self, neighbors: frozenset[PeerId]) -> list[Effect]:
        """A departed peer's gradient no longer counts; its losses and model stay as they are."""
        departed = self._arrivals.depart(self._neighbors.members - neighbors)
        self._verdicts[Verdict.DEPARTED] += departed
        self._neighbors = Candidates(neighbors, self._peer_id)
        return []

    def _close_round(self) -> list[Effect]:
        if self._phase is not _Phase.CLOSING:
            return []
        if self._settings.exchange == "average":
            self._phase = _Phase.STEPPING
            return [Train(self._round_number, self._average(), self._batches())]
        clip = self._settings.clip if self._settings.defended else None
        own = self._own_gradient.flat_f32() if self._own_gradient is not None else None
        own_weight = 1.0 if self._settings.anchor else self._weights.get(self._peer_id, 0.0)
        fresh, refused = self._arrivals.take(self._model.version, own if clip else None)
        total, verdicts = algorithm.combine_gradients(own, own_weight, fresh, clip=clip)
        self._verdicts.update((*refused, *verdicts.values()))
        if total is None:
            return self._finish_round()
        self._phase = _Phase.STEPPING
        layout = self._model.tensors.layout.gradient
        batches = self._batches()[1:]
        held = None
        if self._settings.hold and batches and own is not None and fresh:
            held = Tensors(layout, (total - own).view(np.uint8))
        gradient = Tensors(layout, total.view(np.uint8))
        return [Step(self._round_number, gradient, batches, held)]

    def _average(self) -> Tensors:
        """Mix the models at hand into the own one, small weights left out unless just clustered."""
        weights = {
            peer_id: self._weights[peer_id]
            for peer_id in (*self._sampled, self._peer_id)
            if peer_id in self._weights and (peer_id in self._at_hand or peer_id == self._peer_id)
        }
        least = 0.0 if self._sizes else self._settings.min_gradient_weight
        used = algorithm.prune_weights(weights, least)
        models = {peer_id: self._tensors_of(peer_id) for peer_id in used}
        return algorithm.average_models(used, models) if used else self._model.tensors

    def _take_step(self, model: Tensors) -> list[Effect]:
        starting = self._phase is _Phase.STARTING
        if self._phase is not _Phase.STEPPING and not starting:
            return []
        made_in = self._round_number if starting else self._round_number + 1
        version = Version(self._model.version.incarnation, made_in)
        before, least = self._model, self._settings.min_gradient_weight
        friends = best_collaborators(self._weights, self._peer_id, least)
        self._model = replace(before, version=version, tensors=model, friends=friends)
        if starting:
            return [Publish(self._model), *self._begin_round()]
        # After one shot, whoever comes late must still see what all others have clustered.
        self._shown = before.tensors if self._is_one_shot else None
        published = [] if self._is_one_shot else [Publish(self._model)]
        return [*published, *self._finish_round()]

    def _finish_round(self) -> list[Effect]:
        collaborating = self.collaboration_weights()
        averaging = self._settings.exchange == "average"
        self._known.keep_only(collaborating, self._round_number)
        clustered_by = self._gathering.clustered_by if self._sizes else None
        finished = RoundFinished(
            self._round_number,
            self._known.loss_averages,
            self._weights,
            collaborating,
            {self._peer_id: 1.0} if averaging else collaborating,
            self._sampled,
            dict(+self._verdicts),
            self._gathering.groups.digest if clustered_by else "",
            clustered_by,
        )
        self._sizes = None
        self._round_number += 1
        return [finished, *self._begin_round()]

    def _snapshot(self) -> PeerSnapshot:
        return PeerSnapshot(
            round_number=self._round_number,
            model=self._model,
            loss_averages=self._known.loss_averages,
            measured_at=self._known.measured_at,
            kept=dict(sorted(self._known.kept.items())),
            explorer=self._explorer.snapshot(),
            rng_state=self._rng.bit_generator.state,
            shown=self._shown,
            groups=self._gathering.groups,
            measuring_until=self.horizon.measuring_until,
            trained_from=self.horizon.trained_from,
        )

    def _weights_over(self, others: Collection[PeerId]) -> Row:
        sizes = self._sizes if self._settings.tells_sizes else None
        return self._known.weights(self._peer_id, others, self._settings.temperature, sizes)

    def _tensors_of(self, peer_id: PeerId) -> Tensors:
        return self._model.tensors if peer_id == self._peer_id else self._known.tensors_of(peer_id)
