"""Drive many cores in one process, in the lockstep rounds of the paper."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

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
    Finished,
    GradientArrived,
    GroupsTold,
    Measure,
    ModelAsked,
    ModelFetched,
    ModelUnchanged,
    Publish,
    PublishGroups,
    ReadyToClose,
    RoundClosed,
    RoundFinished,
    SendGradient,
    Started,
    Step,
    Stopped,
    Train,
)
from peer.learner import Learner, Measurement
from peer.work import Done, Job, do_job, num_gradients
from protocol.editions import Edition, Origin, publish, readable
from protocol.errors import ModelError
from protocol.gradients import Feedbacks, Parcel, pack
from protocol.groups import Groups, encode_groups
from protocol.lowbit import CODECS, Bits
from protocol.messages import GradientUpdate, PeerId
from protocol.tensors import Tensors

MAX_FEEDBACK_BYTES = 1 << 28
"""For the rounding errors that one peer owes to others: as much as a real peer takes."""


class Crowd(Protocol):
    """The learners of many peers; may do the jobs of different peers together."""

    def work(self, jobs: Sequence[tuple[PeerId, Job]]) -> Sequence[Done]:
        """Do jobs, those of one peer in order, and return their answers in the order of jobs."""


class LearnerCrowd:
    """One learner for each peer, one job after another: the simplest `Crowd`.

    Args:
        learners: Each peer's.
        on_measured: Told which peer measured which peer's model, and what came of it.
        names: Of peers, for errors.
    """

    def __init__(
        self,
        learners: Mapping[PeerId, Learner],
        *,
        on_measured: Callable[[PeerId, PeerId, Measurement], None] | None = None,
        names: Mapping[PeerId, str] | None = None,
    ) -> None:
        self._learners = learners
        self._on_measured = on_measured
        self._names = names or {}

    def work(self, jobs: Sequence[tuple[PeerId, Job]]) -> Sequence[Done]:
        """Do one job after another.

        Raises:
            ModelError: A model failed.
        """
        return [self._do(peer_id, job) for peer_id, job in jobs]

    def _do(self, peer_id: PeerId, job: Job) -> Done:
        try:
            event, measurement = do_job(self._learners[peer_id], peer_id, job)
        except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            where = f"at {self._names.get(peer_id, peer_id)} in round {job.round_number}"
            raise ModelError(f"the model failed {where}: {error}") from error
        if self._on_measured is not None and measurement is not None and isinstance(job, Measure):
            self._on_measured(peer_id, job.peer_id, measurement)
        return event


@dataclass(slots=True)
class Work:
    """What one peer did and moved.

    Attributes:
        measured: Forward passes over its measuring examples.
        gradients: Gradients computed, those of local steps included.
        bytes_sent: Of models and gradients to others, without the framing of a network.
        bytes_received: The same from others.
    """

    measured: int = 0
    gradients: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Engine(ABC):
    """Interprets the effects of many cores; when things happen is for the kinds of engine to say.

    Args:
        cores: The peers, none started yet.
        crowd: Their learners.
        bits: Width of the codec, None to move numbers as they are.
        initial: What all start from: first models travel as differences to it; None sends them
            whole.
        on_round: Told of every finished round of every peer.
        on_event: Told of every event after it was handled, with its effects.

    Attributes:
        work: What each peer did and moved.
    """

    def __init__(
        self,
        cores: Mapping[PeerId, PeerCore],
        crowd: Crowd,
        *,
        bits: Bits | None = None,
        initial: Tensors | None = None,
        on_round: Callable[[PeerId, RoundFinished], None] = lambda peer_id, finished: None,
        on_event: Callable[[PeerId, Event, Sequence[Effect]], None] | None = None,
    ) -> None:
        self._cores = dict(sorted(cores.items()))
        self._crowd = crowd
        self._on_round = on_round
        self._on_event = on_event
        self.work = {peer_id: Work() for peer_id in self._cores}
        self._bits: Bits | None = bits
        self._origin = None if initial is None else Origin.of(initial, initial.layout)
        self._features = readable(self._origin)
        self._editions: dict[PeerId, Edition] = {}
        self._groups: dict[PeerId, Groups] = {}
        self._feedbacks = {
            peer_id: Feedbacks(core.model.tensors.layout.gradient, bits, MAX_FEEDBACK_BYTES)
            for peer_id, core in self._cores.items()
        }

    def run(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Do all rounds of all peers, or as many as are `wanted`.

        A core must know its number of rounds, or `wanted` must come to an end; it is asked several
        times a round.
        """
        with _rare_collections():
            self._run(wanted)

    @abstractmethod
    def _run(self, wanted: Callable[[], bool]) -> None: ...

    @abstractmethod
    def tell(self, peer_id: PeerId, event: Event) -> None:
        """Let a peer hear of something that no effect of its asked for."""

    @abstractmethod
    def num_neighbors(self, peer_id: PeerId) -> int:
        """Return how many others a peer can reach, as far as it knows."""

    def _handle(self, peer_id: PeerId, event: Event) -> None:
        effects = self._cores[peer_id].handle(event)
        if self._on_event is not None:
            self._on_event(peer_id, event, effects)
        for effect in effects:
            self._interpret(peer_id, effect)

    def _interpret(self, peer_id: PeerId, effect: Effect) -> None:
        match effect:
            case Publish(snapshot):
                before = self._editions.get(peer_id)
                self._editions[peer_id] = publish(snapshot, self._bits, before, self._origin)
            case PublishGroups(groups):
                self._groups[peer_id] = groups
            case AskGroups():
                self._inquire(peer_id, effect)
            case Fetch():
                self._fetch(peer_id, effect)
            case Measure() | Differentiate() | Cluster() | Step() | Train() | Adopt():
                self._do(peer_id, effect)
            case SendGradient(receiver, update):
                self._send(peer_id, receiver, update)
            case ReadyToClose(round_number):
                self._close(peer_id, round_number)
            case RoundFinished():
                self._on_round(peer_id, effect)
            case Finished() | Stopped():
                pass  # it goes on serving its last model

    @abstractmethod
    def _inquire(self, asker: PeerId, ask: AskGroups) -> None: ...

    @abstractmethod
    def _fetch(self, asker: PeerId, fetch: Fetch) -> None: ...

    @abstractmethod
    def _do(self, peer_id: PeerId, job: Job) -> None: ...

    @abstractmethod
    def _send(self, sender: PeerId, receiver: PeerId, update: GradientUpdate) -> None: ...

    @abstractmethod
    def _close(self, peer_id: PeerId, round_number: int) -> None: ...

    def _work(self, jobs: Sequence[tuple[PeerId, Job]]) -> Sequence[Done]:
        """Do jobs, and count them."""
        for peer_id, job in jobs:
            self.work[peer_id].measured += isinstance(job, Measure)
            self.work[peer_id].gradients += num_gradients(job)
        return self._crowd.work(jobs)

    def _answer(self, fetch: Fetch) -> tuple[ModelFetched | ModelUnchanged, int]:
        """Answer from what is published; return how many bytes travel, too."""
        edition = self._editions[fetch.peer_id]
        have = None if fetch.have is None else fetch.have.version
        if have == edition.snapshot.version:
            return ModelUnchanged(fetch.peer_id, fetch.round_number), 0
        answer = ModelFetched(fetch.peer_id, fetch.round_number, edition.snapshot)
        return answer, edition.answer(have, self._features).blob.nbytes

    def _answer_groups(self, ask: AskGroups) -> tuple[GroupsTold, int] | None:
        """Answer with what is published; return how many bytes travel, too. None: not yet."""
        groups = self._groups.get(ask.peer_id)
        if groups is None:
            return None
        return GroupsTold(ask.peer_id, ask.round_number, groups), len(encode_groups(groups))

    def _pack(self, sender: PeerId, receiver: PeerId, update: GradientUpdate) -> Parcel:
        """Return a gradient as the receiver will hold it, and the bytes that travel."""
        return pack(update, self._feedbacks[sender].of(receiver, CODECS))

    def _moved(self, sender: PeerId, receiver: PeerId, size_bytes: int) -> None:
        self.work[sender].bytes_sent += size_bytes
        self.work[receiver].bytes_received += size_bytes


class Lockstep(Engine):
    """The paper's synchronous rounds: all sample on Φ^(t-1), all gradients arrive, all step.

    What every peer asks for is gathered and done together: first all events, then all jobs, then,
    once every model of the round is published, all fetches, and all questions who belongs together;
    when nothing is left, all rounds close.
    The order of peers is that of their ids, so the same seed gives the same bits.
    """

    def __init__(
        self,
        cores: Mapping[PeerId, PeerCore],
        crowd: Crowd,
        *,
        bits: Bits | None = None,
        initial: Tensors | None = None,
        on_round: Callable[[PeerId, RoundFinished], None] = lambda peer_id, finished: None,
        on_event: Callable[[PeerId, Event, Sequence[Effect]], None] | None = None,
    ) -> None:
        super().__init__(
            cores, crowd, bits=bits, initial=initial, on_round=on_round, on_event=on_event
        )
        self._events: list[tuple[PeerId, Event]] = []
        self._jobs: list[tuple[PeerId, Job]] = []
        self._fetches: list[tuple[PeerId, Fetch]] = []
        self._asks: list[tuple[PeerId, AskGroups]] = []
        self._ready: list[tuple[PeerId, int]] = []

    def _run(self, wanted: Callable[[], bool]) -> None:
        everyone = frozenset(self._cores)
        self._events.extend((peer_id, Started(everyone)) for peer_id in self._cores)
        while wanted():
            if self._events:
                # A peer is told at once what there is for it: its state is looked up once.
                events, self._events = sorted(self._events, key=_whose), []
                for peer_id, event in events:
                    self._handle(peer_id, event)
            elif self._jobs:
                self._work_all()
            elif self._fetches:
                self._fetch_all()
            elif self._asks:
                self._ask_all()
            elif self._ready:
                closing, self._ready = self._ready, []
                self._events.extend((peer_id, RoundClosed(number)) for peer_id, number in closing)
            else:
                return

    def tell(self, peer_id: PeerId, event: Event) -> None:
        """Hand an event to a peer before anything else is done."""
        self._events.append((peer_id, event))

    def num_neighbors(self, peer_id: PeerId) -> int:
        """Return the number of all others."""
        return len(self._cores) - 1

    def _inquire(self, asker: PeerId, ask: AskGroups) -> None:
        self._asks.append((asker, ask))

    def _fetch(self, asker: PeerId, fetch: Fetch) -> None:
        self._fetches.append((asker, fetch))

    def _do(self, peer_id: PeerId, job: Job) -> None:
        self._jobs.append((peer_id, job))

    def _send(self, sender: PeerId, receiver: PeerId, update: GradientUpdate) -> None:
        parcel = self._pack(sender, receiver, update)
        self._moved(sender, receiver, parcel.blob.nbytes)
        self._events.append((receiver, GradientArrived(parcel.update)))

    def _close(self, peer_id: PeerId, round_number: int) -> None:
        self._ready.append((peer_id, round_number))

    def _work_all(self) -> None:
        jobs, self._jobs = sorted(self._jobs, key=_whose), []
        answers = zip(jobs, self._work(jobs), strict=True)
        self._events.extend((peer_id, event) for (peer_id, _), event in answers)

    def _fetch_all(self) -> None:
        # By owner: what one has published is looked up once for all who want it.
        fetches, self._fetches = sorted(self._fetches, key=lambda each: each[1].peer_id), []
        for asker, fetch in fetches:
            answer, size_bytes = self._answer(fetch)
            self._moved(fetch.peer_id, asker, size_bytes)
            self._events.append((fetch.peer_id, ModelAsked(asker)))
            self._events.append((asker, answer))

    def _ask_all(self) -> None:
        asks, self._asks = sorted(self._asks, key=_whose), []
        for asker, ask in asks:
            told = self._answer_groups(ask)
            event, size_bytes = told or (AskFailed(ask.peer_id, ask.round_number), 0)
            self._moved(ask.peer_id, asker, size_bytes)
            self._events.append((asker, event))


def _whose(told: tuple[PeerId, object]) -> PeerId:
    return told[0]


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the collector seldom look around: peers live long, and hardly make a cycle.

    With 2,048 of them, looking over all their state again and again took a fifth of the time, and
    looking over what is new after every 700 objects a tenth of the rest, after every 21,000 still a
    twentieth: a step of all of them makes more, and lets go of them by itself.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*(by * each for by, each in zip((300, 5, 100), thresholds, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
