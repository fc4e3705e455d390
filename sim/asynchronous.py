"""Drive many cores on a virtual clock: delays, losses, slow peers, and peers that come and go."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from peer.core import PeerCore
from peer.events import (
    Adopt,
    AskFailed,
    AskGroups,
    Cluster,
    Differentiate,
    Effect,
    Event,
    Fetch,
    FetchFailed,
    GradientArrived,
    Measure,
    ModelAsked,
    NeighborsChanged,
    RoundClosed,
    RoundFinished,
    Started,
    Step,
    Train,
)
from peer.gathering import ASK_DEADLINES
from peer.work import Job, num_gradients
from protocol.gradients import Parcel
from protocol.lowbit import Bits
from protocol.messages import GradientUpdate, PeerId
from protocol.tensors import Tensors
from sim.engine import Crowd, Engine
from sim.links import Links
from sim.simulate_settings import ChurnSettings, SimulateSettings

ALWAYS_THERE = ChurnSettings()

LEAST_AGAIN_S = 0.001
"""How soon, at least, who isn't ready yet is asked again, in virtual seconds."""


class _Entry(NamedTuple):
    """What is to happen when; entries of one time happen in the order in which they were made."""

    time_s: float
    sequence: int
    action: Callable[[], None]
    lives: Sequence[tuple[PeerId, int]]


class Asynchronous(Engine):
    """Every peer at its own pace, as daemons are: it closes a round when its own work is done.

    A peer's learner does one job after another; its published model is served meanwhile. Whatever
    waits for another peer ends by that one's answer, by the news that it is gone, or by the
    deadline. The same settings, seeds and peers give the same events in the same order.

    Args:
        cores: The peers, none started yet.
        crowd: Their learners.
        settings: How long everything takes.
        links: What messages travel on.
        slowness: How many times longer its learner takes, by peer; absent means 1.
        churn: When peers are there that aren't always.
        restart: Makes the core of a peer that is back, given whether it has forgotten everything.
        on_round: Told of every finished round of every peer.
        on_event: Told of every event after it was handled, with its effects.

    Attributes:
        work: What each peer did and moved.
        now_s: The virtual time.
    """

    def __init__(
        self,
        cores: Mapping[PeerId, PeerCore],
        crowd: Crowd,
        settings: SimulateSettings,
        links: Links,
        *,
        bits: Bits | None = None,
        initial: Tensors | None = None,
        restart: Callable[[PeerId, bool], PeerCore],
        slowness: Mapping[PeerId, float] | None = None,
        churn: Mapping[PeerId, ChurnSettings] | None = None,
        on_round: Callable[[PeerId, RoundFinished], None] = lambda peer_id, finished: None,
        on_event: Callable[[PeerId, Event, Sequence[Effect]], None] | None = None,
    ) -> None:
        super().__init__(
            cores, crowd, bits=bits, initial=initial, on_round=on_round, on_event=on_event
        )
        self._settings = settings
        self._links = links
        self._restart = restart
        self._slowness = slowness or {}
        self._churn = churn or {}
        self.now_s = 0.0
        self._agenda: list[_Entry] = []
        self._sequence = itertools.count()
        self._present: frozenset[PeerId] = frozenset()
        self._known: dict[PeerId, frozenset[PeerId]] = {}  # whom each peer thinks present
        self._lives = dict.fromkeys(self._cores, 0)  # how often each peer came or went
        self._busy_until_s = dict.fromkeys(self._cores, 0.0)
        self._waiting: dict[PeerId, dict[PeerId, Fetch | AskGroups]] = {
            peer: {} for peer in self._cores
        }
        self._outgoing: dict[tuple[PeerId, PeerId], GradientUpdate | None] = {}

    def _run(self, wanted: Callable[[], bool]) -> None:
        self._present = frozenset(
            peer_id for peer_id in self._cores if not self._churn.get(peer_id, ALWAYS_THERE).joins_s
        )
        for peer_id in self._cores:
            stay = self._churn.get(peer_id, ALWAYS_THERE)
            self._at(stay.joins_s, partial(self._arrive, peer_id))
            if stay.leaves_s is not None:
                self._at(stay.leaves_s, partial(self._leave, peer_id))
            if stay.returns_s is not None:
                self._at(stay.returns_s, partial(self._return, peer_id, stay.forgets))
        while self._agenda and wanted():
            entry = heapq.heappop(self._agenda)
            if all(self._lives[peer_id] == life for peer_id, life in entry.lives):
                self.now_s = entry.time_s
                entry.action()

    def is_present(self, peer_id: PeerId) -> bool:
        """Say whether a peer is there now."""
        return peer_id in self._present

    def tell(self, peer_id: PeerId, event: Event) -> None:
        """Hand an event to a peer now."""
        self._at(self.now_s, partial(self._handle, peer_id, event), peer_id)

    def num_neighbors(self, peer_id: PeerId) -> int:
        """Return how many others a peer thinks present."""
        return len(self._known[peer_id] - {peer_id})

    def _at(self, time_s: float, action: Callable[[], None], *needed: PeerId) -> None:
        """Plan an action; it is dropped when one of the peers that it needs goes, or has gone."""
        lives = tuple((peer_id, self._lives[peer_id]) for peer_id in needed)
        if self._present.issuperset(needed):
            heapq.heappush(self._agenda, _Entry(time_s, next(self._sequence), action, lives))

    # Coming and going.

    def _arrive(self, peer_id: PeerId) -> None:
        """Let a peer start among those that are there."""
        if peer_id not in self._present:
            self._present |= {peer_id}
            self._lives[peer_id] += 1
            self._tell_others(peer_id)
        self._known[peer_id] = self._present
        self._handle(peer_id, Started(self._present))

    def _leave(self, peer_id: PeerId) -> None:
        self._present -= {peer_id}
        self._lives[peer_id] += 1
        self._editions.pop(peer_id, None)
        self._groups.pop(peer_id, None)
        self._feedbacks[peer_id].keep_only(())
        self._busy_until_s[peer_id] = 0.0
        self._waiting[peer_id].clear()
        self._outgoing = {
            link: update for link, update in self._outgoing.items() if link[0] != peer_id
        }
        self._links.hang_up(peer_id)
        self._tell_others(peer_id)

    def _return(self, peer_id: PeerId, forgets: bool) -> None:
        self._cores[peer_id] = self._restart(peer_id, forgets)
        self._arrive(peer_id)

    def _tell_others(self, peer_id: PeerId) -> None:
        """Let the others hear that a peer came or went, each as soon as the news travels."""
        for other in sorted(self._present - {peer_id}):
            self._at(self.now_s + self._links.latency_s(), partial(self._hear, other), other)

    def _hear(self, peer_id: PeerId) -> None:
        """Take the news who is there; nobody else will answer any more."""
        if self._known[peer_id] != self._present:
            self._known[peer_id] = self._present
            self._handle(peer_id, NeighborsChanged(self._present))
        for wait in list(self._waiting[peer_id].values()):
            if wait.peer_id not in self._present:
                self._give_up(peer_id, wait)

    # Models, and who belongs together.

    def _inquire(self, asker: PeerId, ask: AskGroups) -> None:
        self._waiting[asker][ask.peer_id] = ask
        deadline_s = self.now_s + ASK_DEADLINES * self._settings.fetch_timeout_s
        self._at(deadline_s, partial(self._give_up, asker, ask), asker)
        if not self._links.loses():
            answer = partial(self._tell, asker, ask, deadline_s)
            self._at(self.now_s + self._links.latency_s(), answer, asker, ask.peer_id)

    def _tell(self, asker: PeerId, ask: AskGroups, deadline_s: float) -> None:
        told = self._answer_groups(ask)
        if told is None:
            self._again(asker, ask, partial(self._tell, asker, ask, deadline_s))
            return
        event, size_bytes = told
        self._return_answer(asker, ask, event, size_bytes, deadline_s)

    def _again(self, asker: PeerId, wait: Fetch | AskGroups, action: Callable[[], None]) -> None:
        """Let who still waits ask again."""
        if self._waiting[asker].get(wait.peer_id) is wait:
            again_s = self.now_s + max(self._settings.gradient_s, LEAST_AGAIN_S)
            self._at(again_s, action, asker, wait.peer_id)

    def _fetch(self, asker: PeerId, fetch: Fetch) -> None:
        self._waiting[asker][fetch.peer_id] = fetch
        deadline_s = self.now_s + self._settings.fetch_timeout_s
        self._at(deadline_s, partial(self._give_up, asker, fetch), asker)
        if not self._links.loses():
            ask = partial(self._ask, asker, fetch, deadline_s)
            self._at(self.now_s + self._links.latency_s(), ask, asker, fetch.peer_id)

    def _ask(self, asker: PeerId, fetch: Fetch, deadline_s: float) -> None:
        owner = fetch.peer_id
        if fetch.patient and owner not in self._editions:
            self._again(asker, fetch, partial(self._ask, asker, fetch, deadline_s))
            return
        self._handle(owner, ModelAsked(asker))
        answer: Event = FetchFailed(owner, fetch.round_number)
        size_bytes = 0
        if owner in self._editions:  # not before its first steps
            answer, size_bytes = self._answer(fetch)
        self._return_answer(asker, fetch, answer, size_bytes, deadline_s)

    def _return_answer(
        self,
        asker: PeerId,
        wait: Fetch | AskGroups,
        answer: Event,
        size_bytes: int,
        deadline_s: float,
    ) -> None:
        owner = wait.peer_id
        arrival_s, sent_bytes = self._links.send(owner, size_bytes, self.now_s, deadline_s)
        self.work[owner].bytes_sent += sent_bytes
        if arrival_s < math.inf:
            take = partial(self._take_answer, asker, wait, answer, size_bytes)
            self._at(arrival_s, take, asker, owner)

    def _take_answer(
        self, asker: PeerId, wait: Fetch | AskGroups, answer: Event, size_bytes: int
    ) -> None:
        self.work[asker].bytes_received += size_bytes
        self._settle(asker, wait, answer)

    def _give_up(self, asker: PeerId, wait: Fetch | AskGroups) -> None:
        failed = FetchFailed if isinstance(wait, Fetch) else AskFailed
        self._settle(asker, wait, failed(wait.peer_id, wait.round_number))

    def _settle(self, asker: PeerId, wait: Fetch | AskGroups, event: Event) -> None:
        """End a wait, unless something else has ended it before."""
        if self._waiting[asker].get(wait.peer_id) is wait:
            del self._waiting[asker][wait.peer_id]
            self._handle(asker, event)

    # The own work.

    def _do(self, peer_id: PeerId, job: Job) -> None:
        end_s = max(self.now_s, self._busy_until_s[peer_id]) + self._duration_s(peer_id, job)
        self._busy_until_s[peer_id] = end_s
        self._at(end_s, partial(self._complete, peer_id, job), peer_id)

    def _complete(self, peer_id: PeerId, job: Job) -> None:
        (event,) = self._work([(peer_id, job)])
        self._handle(peer_id, event)

    def _duration_s(self, peer_id: PeerId, job: Job) -> float:
        settings, gradients = self._settings, num_gradients(job)
        match job:
            case Measure() | Cluster():
                seconds = settings.measure_s
            case Differentiate():
                seconds = settings.gradient_s
            case Step():
                seconds = settings.step_s + gradients * (settings.gradient_s + settings.step_s)
            case Train():
                seconds = gradients * (settings.gradient_s + settings.step_s)
            case Adopt():
                seconds = settings.step_s
        return seconds * self._slowness.get(peer_id, 1.0)

    def _close(self, peer_id: PeerId, round_number: int) -> None:
        self._at(self.now_s, partial(self._handle, peer_id, RoundClosed(round_number)), peer_id)

    # Gradients.

    def _send(self, sender: PeerId, receiver: PeerId, update: GradientUpdate) -> None:
        """Let one gradient a destination be on its way, and one, the newest, wait."""
        idle = (sender, receiver) not in self._outgoing
        self._outgoing[sender, receiver] = update
        if idle:
            self._push(sender, receiver)

    def _push(self, sender: PeerId, receiver: PeerId) -> None:
        update = self._outgoing[sender, receiver]
        if update is None:
            del self._outgoing[sender, receiver]
            return
        self._outgoing[sender, receiver] = None
        parcel = self._pack(sender, receiver, update)
        arrival_s, sent_bytes = self._links.send(sender, parcel.blob.nbytes, self.now_s)
        self.work[sender].bytes_sent += sent_bytes
        if not self._links.loses():
            take = partial(self._take_gradient, receiver, parcel)
            self._at(arrival_s, take, sender, receiver)
        # A lost gradient is not sent again: there is a newer one, or soon will be.
        self._at(arrival_s, partial(self._push, sender, receiver), sender)

    def _take_gradient(self, receiver: PeerId, parcel: Parcel) -> None:
        self.work[receiver].bytes_received += parcel.blob.nbytes
        self._handle(receiver, GradientArrived(parcel.update))
