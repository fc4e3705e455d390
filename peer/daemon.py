"""Interpret the core's effects with asyncio, a transport and a learner in a worker thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from peer.core import PeerCore
from peer.data import Split
from peer.events import (
    Adopt,
    AskFailed,
    AskGroups,
    Cluster,
    Clustered,
    Differentiate,
    Effect,
    Event,
    ExamplesChanged,
    Fetch,
    FetchFailed,
    Finished,
    GradientArrived,
    GroupsTold,
    Measure,
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
    Stopped,
    StopRequested,
    Train,
)
from peer.gathering import ASK_DEADLINES
from peer.learner import Learner
from peer.pace import Pace
from peer.record import PHASES, WORK
from peer.validation import Validation
from peer.work import Job, do_job, num_gradients
from protocol.deadlines import Deadlines
from protocol.errors import ModelError, PeerRefused, PeerUnreachable, RemoteProtocolError
from protocol.messages import GradientUpdate, ModelSnapshot, PeerId, RefusalCode
from protocol.transport.interface import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN_S = 0.1
"""How soon who isn't ready yet is asked again, in seconds."""

MOST_AGAIN_S = 2.0
"""How long the pause may grow before a peer is asked again who belongs together, in seconds: very
many may be asking it."""

_PHASE_OF: Mapping[type[Job], str] = {
    Measure: "measure",
    Differentiate: "differentiate",
    Step: "step",
    Train: "step",
    Adopt: "step",
    Cluster: "measure",
}


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A finished round as the driver saw it.

    Attributes:
        finished: What the core says of it.
        validation_accuracy: Of the mixture on the measuring examples, by what its members predicted
            before these were trained on; None when unknown, as after a restart since then.
        seconds: By phase, `PHASES` and `total`.
        work: How many models were `measured` and `differentiated`.
    """

    finished: RoundFinished
    validation_accuracy: float | None
    seconds: Mapping[str, float]
    work: Mapping[str, int]


class Daemon:
    """Drives one core: it is also the transport's listener.

    Args:
        peer_id: Our own.
        core: What to do.
        learner: How to learn; called in one worker thread, so that the event loop stays free.
        labels: Of the measuring examples, shape (num_examples,).
        fetch_timeout_s: Longest wait for a model; less for who is known to be quicker.
        push_timeout_s: Longest wait for a gradient to be taken.
        pace: When to fetch and when to close a round.
        on_round: Told of every finished round.

    Attributes:
        finished: Set after the last round; the daemon keeps serving.
        stopped: Set when nothing more will happen.
        neighbors: The reachable peers.
        in_step: Whether the optimizer has taken the steps that the core knows of, and no others;
            false only after a step that failed.
    """

    def __init__(
        self,
        *,
        peer_id: PeerId,
        core: PeerCore,
        learner: Learner,
        labels: npt.NDArray[np.int64],
        fetch_timeout_s: float,
        push_timeout_s: float,
        pace: Pace,
        on_round: Callable[[RoundReport], None],
    ) -> None:
        self._peer_id = peer_id
        self._core = core
        self._learner = learner
        self._validation = Validation(labels)
        self._next_examples: Split | None = None
        self._deadlines = Deadlines(fetch_timeout_s)
        self._push_timeout_s = push_timeout_s
        self._pace = pace
        self._on_round = on_round
        self.finished = asyncio.Event()
        self.stopped = asyncio.Event()
        self.neighbors: frozenset[PeerId] = frozenset()
        self.in_step = True
        self._transport: Transport
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._worker = ThreadPoolExecutor(1, "learner")
        self._jobs: asyncio.Queue[Callable[[], Callable[[], None]]] = asyncio.Queue()
        self._calls: set[asyncio.Future[Any]] = set()
        self._working = False
        self._stopping = False
        self._events: deque[Event] = deque()
        self._feeding = False
        self._outgoing: dict[PeerId, GradientUpdate | None] = {}
        self._pushing: set[asyncio.Task[None]] = set()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._work_done = dict.fromkeys(WORK, 0)
        self._round_began = time.monotonic()

    async def run(self, transport: Transport) -> None:
        """Do rounds until stopped; the transport is started and closed by the caller."""
        self._transport = transport
        self._round_began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._spawn(self._learn(), "learner")
                self._feed(Started(self.neighbors))
                await self.stopped.wait()
                for task in self._running:
                    task.cancel()
        finally:
            self.stopped.set()
            self._pace.leave()
            self._tasks = None
            for call in self._calls:
                call.cancel()
            self._worker.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """Stop after what the learner is doing now, so that core and optimizer stay in step."""
        self._stopping = True
        if not self._working:
            self._feed(StopRequested())

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function in the learner's thread, after what it has to do already."""

        def job() -> Callable[[], None]:
            function()
            return lambda: None

        self._jobs.put_nowait(job)

    def change_examples(self, examples: Split) -> None:
        """Measure and train on these examples from the next round on."""
        self._next_examples = examples

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the learner's thread, after what it has to do already.

        Raises:
            asyncio.CancelledError: The daemon stopped before it was run.
        """
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)
        self._jobs.put_nowait(lambda: _deliver(function(), result))
        return await result

    # The transport's listener.

    def gradient_arrived(self, update: GradientUpdate) -> None:
        """Hand a gradient to the core."""
        self._feed(GradientArrived(update))

    def model_asked(self, peer_id: PeerId) -> None:
        """Hand to the core that a peer asked for the own model."""
        self._feed(ModelAsked(peer_id))

    def neighbors_changed(self, neighbors: frozenset[PeerId]) -> None:
        """Hand the reachable peers to the core."""
        self.neighbors = neighbors
        if self._tasks is not None:
            self._feed(NeighborsChanged(neighbors))

    # Effects.

    def _feed(self, event: Event) -> None:
        """Let the core handle an event, and those that its effects cause, one after another."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                for effect in self._core.handle(self._events.popleft()):
                    self._interpret(effect)
        finally:
            self._feeding = False

    def _interpret(self, effect: Effect) -> None:
        match effect:
            case Publish(snapshot):
                self._transport.publish(snapshot)
                self._pace.begin(self._core.round_number)
            case PublishGroups(groups):
                self._transport.publish_groups(groups)
            case AskGroups():
                self._spawn(self._ask(effect), f"ask {effect.peer_id}")
            case Fetch():
                self._spawn(self._fetch(effect), f"fetch {effect.peer_id}")
            case Measure() | Differentiate() | Cluster() | Step() | Train() | Adopt():
                self._jobs.put_nowait(lambda: self._do(effect))
            case SendGradient(peer_id, update):
                self._send(peer_id, update)
            case ReadyToClose(round_number):
                self._spawn(self._close(round_number), f"close {round_number}")
            case RoundFinished():
                self._finish_round(effect)
                self._pace.begin(effect.round_number + 1)  # without a step, nothing was published
            case Finished():
                self._pace.leave()
                self.finished.set()
            case Stopped():
                self.stopped.set()

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        assert self._tasks is not None
        task = self._tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _close(self, round_number: int) -> None:
        await self._pace.closing(round_number, tuple(self._pushing))
        self._feed(RoundClosed(round_number))

    async def _fetch(self, effect: Fetch) -> None:
        peer_id, round_number = effect.peer_id, effect.round_number
        await self._pace.fetching(round_number)
        began = time.monotonic()
        event: Event
        try:
            snapshot = await self._pull(effect)
        except (PeerUnreachable, RemoteProtocolError):
            event = FetchFailed(peer_id, round_number)  # the transport counted and logged it
        else:
            event = (
                ModelUnchanged(peer_id, round_number)
                if snapshot is None
                else ModelFetched(peer_id, round_number, snapshot)
            )
        self._seconds["fetch"] += time.monotonic() - began
        self._feed(event)

    async def _ask(self, effect: AskGroups) -> None:
        """Ask who belongs together until the answer is there, or it takes too long."""
        peer_id, round_number = effect.peer_id, effect.round_number
        await self._pace.fetching(round_number)
        logger.info("asking %s who belongs together", peer_id)
        began, longest_s = time.monotonic(), self._deadlines.longest_s
        event: Event = AskFailed(peer_id, round_number)
        pause_s = AGAIN_S
        try:
            while (left_s := began + ASK_DEADLINES * longest_s - time.monotonic()) > 0:
                groups = await self._transport.ask_groups(peer_id, min(left_s, longest_s))
                if groups is not None:
                    event = GroupsTold(peer_id, round_number, groups)
                    break
                await asyncio.sleep(min(pause_s, left_s))
                pause_s = min(1.5 * pause_s, MOST_AGAIN_S)
            else:
                logger.info("%s doesn't know after %g s", peer_id, ASK_DEADLINES * longest_s)
        except (PeerUnreachable, RemoteProtocolError) as error:
            logger.info("asked in vain who belongs together: %s", error)
        self._seconds["fetch"] += time.monotonic() - began
        self._feed(event)

    async def _pull(self, effect: Fetch) -> ModelSnapshot | None:
        """Fetch within the deadline; a patient fetch asks again while there is no model yet."""
        if not effect.patient:
            return await self._pull_promptly(effect)
        end = time.monotonic() + self._deadlines.longest_s
        while True:
            left_s = end - time.monotonic()
            try:
                return await self._transport.fetch(effect.peer_id, effect.have, left_s)
            except PeerRefused as error:
                if error.code != RefusalCode.NO_MODEL or left_s < AGAIN_S:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _pull_promptly(self, effect: Fetch) -> ModelSnapshot | None:
        """Fetch once, within the deadline that follows from the neighbor's last models."""
        began, deadline_s = time.monotonic(), self._deadlines.of(effect.peer_id)
        try:
            snapshot = await self._transport.fetch(effect.peer_id, effect.have, deadline_s)
        except PeerUnreachable:
            if time.monotonic() - began >= deadline_s:
                self._deadlines.failed(effect.peer_id)
            raise
        if snapshot is not None:  # that nothing changed says little of how long a model takes
            self._deadlines.answered(effect.peer_id, time.monotonic() - began)
        return snapshot

    def _send(self, peer_id: PeerId, update: GradientUpdate) -> None:
        """Let one gradient a destination be on its way, and one, the newest, wait."""
        idle = peer_id not in self._outgoing
        self._outgoing[peer_id] = update
        if idle:
            task = self._spawn(self._push(peer_id), f"push {peer_id}")
            self._pushing.add(task)
            task.add_done_callback(self._pushing.discard)

    async def _push(self, peer_id: PeerId) -> None:
        try:
            while (update := self._outgoing[peer_id]) is not None:
                self._outgoing[peer_id] = None
                began = time.monotonic()
                # A lost gradient is not sent again: there is a newer one, or soon will be.
                with suppress(PeerUnreachable, RemoteProtocolError):
                    await self._transport.push(peer_id, update, self._push_timeout_s)
                self._seconds["push"] += time.monotonic() - began
        finally:
            del self._outgoing[peer_id]

    async def _learn(self) -> None:
        """Do the learner's jobs one after another, each off the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            job = await self._jobs.get()
            self._working = True
            try:
                deliver = await loop.run_in_executor(self._worker, job)
            except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
                where = f"in round {self._core.round_number}"
                raise ModelError(f"the model failed {where}: {error}") from error
            deliver()
            self._working = False
            if self._stopping:
                self._feed(StopRequested())

    def _do(self, job: Job) -> Callable[[], None]:
        """Do a job, in the worker, and return what is to be done on the event loop."""
        phase = _PHASE_OF[type(job)]
        steps = phase == "step"
        if steps:
            self.in_step = False
        with _Stopwatch(self._seconds, phase):
            event, measurement = do_job(self._learner, self._peer_id, job)

        def deliver() -> None:
            if measurement is not None and isinstance(job, Measure):
                if self._core.horizon.is_fair(job.round_number):
                    self._validation.measured(job.peer_id, measurement.probabilities)
                self._work_done["measured"] += 1
            else:
                self._work_done["differentiated"] += num_gradients(job)
            if isinstance(event, Clustered):
                logger.info("clustered %s", event.note)
            self._feed(event)
            if steps:
                self.in_step = True

        return deliver

    def _use(self, examples: Split) -> Callable[[], None]:
        """Let the learner use other examples; no measurement of the last round is pending."""
        self._learner.use_examples(examples)
        labels = self._learner.measured_labels

        def deliver() -> None:
            self._validation = Validation(labels)

        return deliver

    def _finish_round(self, finished: RoundFinished) -> None:
        now = time.monotonic()
        self._seconds["total"] = now - self._round_began
        accuracy = self._validation.accuracy(finished.prediction_weights)
        self._on_round(RoundReport(finished, accuracy, self._seconds, self._work_done))
        if self._next_examples is not None:
            examples, self._next_examples = self._next_examples, None
            self._jobs.put_nowait(lambda: self._use(examples))  # before the next round's
            self._feed(ExamplesChanged())
        self._round_began = now
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._work_done = dict.fromkeys(WORK, 0)


class _Stopwatch:
    """Adds the seconds of a block to a phase."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds = seconds
        self._phase = phase

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] += time.monotonic() - self._began


def _deliver(value: T, result: asyncio.Future[T]) -> Callable[[], None]:
    def deliver() -> None:
        if not result.done():
            result.set_result(value)

    return deliver
