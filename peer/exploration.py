"""Whom to look at beside the best collaborators: a survey, friends of friends, probes."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import overload

import msgspec
import numpy as np

from peer.algorithm import AlgorithmSettings, best_neighbors, uniform_neighbors
from peer.row import Row
from protocol.messages import PeerId

_EARNED = 0.3
"""How far above the lowest loss average a neighbor's may be for it to earn its place, in units of
the loss. A stranger's is further away; a larger bound lets strangers stay whom training together
would soon make look like friends."""

_PROPOSED = 0.75
"""Share of the places that nobody earned which go to proposals, when there are any: a peer that is
told of the wrong ones goes on finding others by itself."""

_DECAY = 0.8
"""What the number of probes is multiplied by after a round in which all places were earned."""

_SURVEY_TRIES = 3
"""Rounds in which a surveyed peer that gives no model is asked again."""

_DRAWS = 8
"""Most draws for one unknown peer among all: more would make a round's cost grow with their
number when nearly all are known."""


class Candidates:
    """The reachable peers.

    Attributes:
        members: As a set, which all peers of a simulation share; self may be in it.
        own: Self, who is never chosen.
        ordered: The others, in peer-id order.
    """

    __slots__ = ("members", "ordered", "own")

    def __init__(self, members: frozenset[PeerId], own: PeerId) -> None:
        self.members = members
        self.own = own
        self.ordered: Sequence[PeerId] = _Others(members, own)


class _Others(Sequence[PeerId]):
    """All members but one, in peer-id order, without a copy: thousands of peers have each other."""

    __slots__ = ("_everyone", "_without")

    def __init__(self, members: frozenset[PeerId], own: PeerId) -> None:
        self._everyone = _in_order(members)
        self._without = len(members)
        if own in members:
            self._without = bisect.bisect_left(self._everyone, own)

    def __len__(self) -> int:
        return len(self._everyone) - (self._without < len(self._everyone))

    @overload
    def __getitem__(self, index: int) -> PeerId: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PeerId]: ...
    def __getitem__(self, index: int | slice) -> PeerId | Sequence[PeerId]:
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return [self[position] for position in positions]
        return self._everyone[positions + (positions >= self._without)]


@functools.lru_cache(maxsize=4)
def _in_order(members: frozenset[PeerId]) -> tuple[PeerId, ...]:
    return tuple(sorted(members))


class Choice(msgspec.Struct, frozen=True):
    """Whom a round fetches: sampled neighbors, and others only to measure them."""

    sampled: tuple[PeerId, ...]
    probed: frozenset[PeerId]


class ExplorerState(msgspec.Struct, kw_only=True):
    """What is remembered from round to round.

    Attributes:
        survey: Peers still to be surveyed, and how often to try.
        asked: Peers that asked for the own model lately, and how many rounds ago.
        insisting: Those of the last round that had asked in an earlier one, too.
        budget: Present number of probes a round.
        complete: Whether all places were earned in the last round.
        news: Whether it measured somebody for the first time.
    """

    survey: dict[PeerId, int] = {}
    asked: dict[PeerId, int] = {}
    insisting: set[PeerId] = set()
    budget: float = 0.0
    complete: bool = False
    news: bool = False


class Explorer:
    """Chooses a round's neighbors ε-greedily (section 3.3) and whom to measure beside them.

    Where the paper takes the M best, here a place among them that nobody earns goes to a peer never
    measured: its model costs the same, and may be a friend's.

    Args:
        settings: The algorithm's.
        rng: Decides whatever is drawn.
        state: To go on from.
    """

    def __init__(
        self,
        settings: AlgorithmSettings,
        rng: np.random.Generator,
        state: ExplorerState | None = None,
    ) -> None:
        self._settings = settings
        self._rng = rng
        self._state = state or ExplorerState(budget=settings.probes)

    @property
    def insisting(self) -> Collection[PeerId]:
        """Who asked again for the own model since the last round."""
        return self._state.insisting

    def begin_survey(self, candidates: Candidates) -> None:
        """Measure some peers, all of them where they are few, in the next round."""
        drawn = uniform_neighbors(candidates.ordered, self._settings.survey, self._rng)
        self._state.survey = dict.fromkeys(drawn, _SURVEY_TRIES)

    def measured(self, peer_ids: Collection[PeerId], *, news: bool) -> None:
        """Take note of who was measured in a round: it needs no survey any more.

        Args:
            peer_ids: Who was.
            news: Whether any of them had never been before.
        """
        self._state.news = news
        for peer_id in peer_ids:
            self._state.survey.pop(peer_id, None)

    def asked_by(self, peer_id: PeerId) -> None:
        """A peer asked for the own model.

        Once says nothing, since all look around. One that has seen the model and comes again likes
        it, and perhaps the other way round.
        """
        if self._settings.exploration == "friends":
            if self._state.asked.get(peer_id, 0) > 0:
                self._state.insisting.add(peer_id)
            self._state.asked[peer_id] = 0

    def choose(
        self,
        candidates: Candidates,
        weights: Mapping[PeerId, float],
        friends: Mapping[PeerId, Collection[PeerId]],
        fresh: Collection[PeerId],
        known: Collection[PeerId],
    ) -> Choice:
        """Choose the neighbors of a round, and the peers to measure beside them.

        Args:
            candidates: The reachable peers.
            weights: Collaboration weights of candidates; the own one may be among them, else it is
                what is missing to 1.
            friends: The best collaborators that others told of, by who told.
            fresh: Peers measured lately, whom nobody need propose.
            known: Peers ever measured.
        """
        best, earned = self._best(candidates, weights)
        proposals = self._proposals(candidates, friends, fresh, known)
        sampled = self._sample(candidates.ordered, best, earned, proposals, known)
        probed = self._surveyed(candidates.members)
        probed.update(self._probe(candidates.ordered, proposals, known, {*sampled, *probed}))
        self._turn()
        return Choice(sampled, frozenset(probed.difference(sampled)))

    @property
    def is_searching(self) -> bool:
        """Whether some place was not earned in the last round, and somebody new was met."""
        return self._state.news and not self._state.complete

    def settle(
        self,
        candidates: Candidates,
        weights: Mapping[PeerId, float],
        friends: Mapping[PeerId, Collection[PeerId]],
        fresh: Collection[PeerId],
        known: Collection[PeerId],
    ) -> Choice:
        """Choose as in a last round: only the best that gradients may go to have places.

        Beside them come whoever insists, as it may have become a friend, and unknown friends of
        friends, some at a time, and the usual probes.

        Args:
            candidates: See `choose`, as for the others.
            weights: The weights.
            friends: Best collaborators of others.
            fresh: Peers measured lately.
            known: Peers ever measured.
        """
        best, _ = self._best(candidates, weights)
        least = self._settings.min_gradient_weight
        sampled = tuple(each for each in best if weights.get(each, 0.0) >= least)
        proposals = self._proposals(candidates, friends, fresh, known)
        probed = set(proposals[: math.ceil(self._settings.probes)])
        probed.update(self._probe(candidates.ordered, [], known, {*sampled, *probed}))
        self._turn()
        return Choice(sampled, frozenset(probed.difference(sampled)))

    def snapshot(self) -> ExplorerState:
        """Return a copy of what is remembered."""
        state = self._state
        return ExplorerState(
            survey=dict(state.survey),
            asked=dict(state.asked),
            insisting=set(state.insisting),
            budget=state.budget,
            complete=state.complete,
            news=state.news,
        )

    def _best(
        self, candidates: Candidates, weights: Mapping[PeerId, float]
    ) -> tuple[tuple[PeerId, ...], list[PeerId]]:
        """Return the M best, and who of them earns its place; while some do not, look around."""
        count, settings, row = self._settings.num_neighbors, self._settings, Row.of(weights)
        leading = row.largest(count + 1)
        leading.pop(candidates.own, None)
        best = best_neighbors(candidates.ordered, leading, count, self._rng)
        earned = self._earned(best, row)
        self._state.complete = len(earned) == count
        if not self._state.complete:
            self._state.budget = max(settings.min_probes, settings.probes)
        return best, earned

    def _turn(self) -> None:
        """Go on to the next round; who mixes the own model asks again before it is forgotten."""
        state, settings = self._state, self._settings
        state.asked = {
            peer_id: rounds + 1
            for peer_id, rounds in state.asked.items()
            if rounds < settings.refresh_after
        }
        state.insisting = set()
        if state.complete:
            state.budget = max(settings.min_probes, state.budget * _DECAY)

    def _proposals(
        self,
        candidates: Candidates,
        friends: Mapping[PeerId, Collection[PeerId]],
        fresh: Collection[PeerId],
        known: Collection[PeerId],
    ) -> list[PeerId]:
        """Who insists and wasn't measured lately, and unknown friends of friends; shuffled."""
        if self._settings.exploration == "uniform":
            return []
        proposed = self._state.insisting.difference(fresh)
        for told in friends.values():
            proposed.update(peer_id for peer_id in told if peer_id not in known)
        ordered = sorted(candidates.members.intersection(proposed) - {candidates.own})
        return [ordered[position] for position in self._rng.permutation(len(ordered))]

    def _sample(
        self,
        candidates: Sequence[PeerId],
        best: tuple[PeerId, ...],
        earned: list[PeerId],
        proposals: list[PeerId],
        known: Collection[PeerId],
    ) -> tuple[PeerId, ...]:
        """Toss the round's coin: the best, or others, M of them."""
        count = self._settings.num_neighbors
        exploring = self._rng.random() < self._settings.epsilon
        if self._settings.exploration == "uniform":
            return uniform_neighbors(candidates, count, self._rng) if exploring else best
        picked = [] if exploring else [*earned]
        missing = count - len(picked)
        picked += self._look_around(candidates, proposals, known, picked, missing, _PROPOSED)
        if len(picked) < count:
            drawn = uniform_neighbors(candidates, 2 * count, self._rng, ordered=False)
            rest = [peer_id for peer_id in (drawn if exploring else best) if peer_id not in picked]
            picked += rest[: count - len(picked)]
        return tuple(sorted(picked))

    def _earned(self, best: tuple[PeerId, ...], weights: Row) -> list[PeerId]:
        """Return those of the best whose loss average is near the lowest, the own one included."""
        numbers = weights.numbers.tolist()
        largest = max(1.0 - math.fsum(numbers), *numbers, 0.0)
        least = largest * math.exp(-_EARNED / self._settings.temperature)
        return [peer_id for peer_id in best if weights.get(peer_id, 0.0) > least]

    def _surveyed(self, reachable: frozenset[PeerId]) -> set[PeerId]:
        """Return the peers to survey in this round; each is tried a few times."""
        survey = self._state.survey
        self._state.survey = {
            peer_id: tries - 1 for peer_id, tries in sorted(survey.items()) if tries > 1
        }
        return set(reachable.intersection(survey))

    def _probe(
        self,
        candidates: Sequence[PeerId],
        proposals: list[PeerId],
        known: Collection[PeerId],
        taken: Collection[PeerId],
    ) -> list[PeerId]:
        """Choose whom to measure only; when all are known, anybody, as often as lasts."""
        budget = self._state.budget
        count = int(budget) + int(self._rng.random() < budget % 1.0)
        picked = self._look_around(candidates, proposals, known, taken, count, 1.0)
        if count and not picked and self._rng.random() * budget < self._settings.min_probes:
            return list(uniform_neighbors(candidates, count, self._rng))
        return picked

    def _look_around(
        self,
        candidates: Sequence[PeerId],
        proposals: list[PeerId],
        known: Collection[PeerId],
        taken: Collection[PeerId],
        count: int,
        share: float,
    ) -> list[PeerId]:
        """Draw peers: a share of them proposed, the others never measured; perhaps fewer.

        What is drawn is no proposal any more.
        """
        picked: list[PeerId] = []
        for _ in range(count):
            if proposals and self._rng.random() < share:
                drawn: PeerId | None = proposals.pop()
            else:
                drawn = self._unknown(candidates, known)
            if drawn is not None and drawn not in taken and drawn not in picked:
                picked.append(drawn)
        return picked

    def _unknown(self, candidates: Sequence[PeerId], known: Collection[PeerId]) -> PeerId | None:
        """Draw a peer never measured."""
        for _ in range(_DRAWS if candidates else 0):
            drawn = candidates[int(self._rng.integers(len(candidates)))]
            if drawn not in known:
                return drawn
        return None
