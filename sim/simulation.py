"""Many peers in one process: from a swarm's settings to cores and learners, run and evaluated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from peer.assembly import new_learner, split_examples, without_holdout
from peer.collection import Collection
from peer.core import PeerCore
from peer.daemon import RoundReport
from peer.data import Split
from peer.evaluate import train_alone
from peer.events import ExamplesChanged, RoundFinished
from peer.learner import Measurement
from peer.memory import Memory
from peer.result import mixture_of, peer_result
from peer.schedule import Schedule
from peer.snapshot import PeerSnapshot
from peer.streams import Streams
from peer.torch_learner import TorchLearner
from peer.validation import Validation
from protocol.errors import ConfigError, DataError
from protocol.messages import PeerId
from protocol.tensors import Tensors
from sim.asynchronous import Asynchronous
from sim.engine import Engine, LearnerCrowd, Lockstep
from sim.experiment import SwarmSettings
from sim.links import Links
from sim.plan import peer_names
from sim.slices import Slice

OnRound = Callable[["SimulatedPeer", RoundReport, Mapping[str, float]], None]
"""Told of a finished round of a peer, and of what it has spent by then."""


@dataclass(slots=True, kw_only=True)
class SimulatedPeer:
    """A peer of a simulation, with the split, the batches and the draws of the real one.

    Attributes:
        name: As in `coterie swarm`.
        peer_id: Made of its number, so that ids sort as peers are numbered.
        examples: What it has at first.
        later: What it has from half-way on; None: nothing changes.
        num_classes: In the whole federation.
        learner: Its model and optimizer.
        core: Its rounds.
        validation: The accuracy of its mixture on the measuring examples.
        memory: Of its examples; None without personalization.
        starts: How often it came back.
        reported: What it had measured and differentiated, and when, at the end of its last round.
    """

    name: str
    peer_id: PeerId
    examples: Split
    later: Split | None
    num_classes: int
    learner: TorchLearner
    core: PeerCore
    validation: Validation
    memory: Memory | None
    starts: int = 0
    reported: tuple[int, int, float] = (0, 0, 0.0)


class Simulation:
    """The peers of one swarm and the engine that drives them.

    Args:
        settings: The swarm's.
        slices: What each peer has.
        import_paths: Where to look for a model of the user's own.

    Attributes:
        peers: By id, in the order of their numbers.
        engine: Drives them.

    Raises:
        ConfigError: `[simulate]` names a peer that there isn't.
        DataError: A peer has no examples.
        ModelError: The model doesn't fit the data.
    """

    def __init__(
        self,
        settings: SwarmSettings,
        slices: Sequence[Slice],
        import_paths: Sequence[Path] = (),
    ) -> None:
        self._settings = settings
        self._import_paths = import_paths
        self._on_round: OnRound | None = None
        self._ids = {name: _peer_id(i) for i, name in enumerate(peer_names(len(slices)))}
        for key, named in (("slow", settings.simulate.slow), ("churn", settings.simulate.churn)):
            _check_names(f"simulate.{key}", named, list(self._ids))
        self.peers = {
            self._ids[name]: self._new_peer(name, part)
            for name, part in zip(self._ids, slices, strict=True)
        }
        self._half = (settings.rounds + 1) // 2
        self._began_s = time.monotonic()
        self.engine = self._new_engine()

    @property
    def seconds(self) -> float:
        """Time since the start: virtual when asynchronous, else of the wall clock."""
        if isinstance(self.engine, Asynchronous):
            return self.engine.now_s
        return time.monotonic() - self._began_s

    def run(
        self, on_round: OnRound | None = None, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Do all rounds of all peers, or as many as are `wanted`.

        Raises:
            ModelError: A model failed.
        """
        self._on_round = on_round
        self._began_s = time.monotonic()
        for peer in self.peers.values():
            self._renew(peer)
        self.engine.run(wanted)

    def is_present(self, peer: SimulatedPeer) -> bool:
        """Say whether a peer is there now."""
        return not isinstance(self.engine, Asynchronous) or self.engine.is_present(peer.peer_id)

    def has_finished(self, peer: SimulatedPeer) -> bool:
        """Say whether a peer has done all its rounds."""
        return peer.core.round_number >= self._settings.rounds

    def evaluate(
        self, peer: SimulatedPeer, wanted: Callable[[], bool] = lambda: True
    ) -> dict[str, Any] | None:
        """Evaluate a peer on its test examples, later ones if its data have changed.

        Returns:
            What `result.json` says, and the `digest` of its own model, which shows whether two
            runs came to the same bits; or None as soon as it isn't `wanted` any more.
        """
        local = None
        if self._settings.swarm.local_baseline:
            local = self._train_alone(peer, wanted)
            if local is None:
                return None
        weights = peer.core.prediction_weights()
        result = peer_result(
            peer.name,
            peer.core,
            peer.learner,
            peer.later or peer.examples,
            local=local,
            weights={self.peers[each].name: round(weight, 6) for each, weight in weights.items()},
            totals=self._totals(peer, peer.reported[2]),
            personal=self._evaluate_memory(peer),
        )
        return {
            **result,
            "digest": xxhash.xxh3_128_hexdigest(peer.core.model.tensors.buffer.tobytes()),
        }

    def _new_peer(self, name: str, part: Slice) -> SimulatedPeer:
        settings = self._settings
        streams = Streams.of(settings.seed, name)
        examples = split_examples(part.dataset, settings.algorithm, streams.split)
        later = None
        if part.later is not None:
            later = split_examples(part.later, settings.algorithm, streams.split)
        num_classes = part.dataset.num_classes
        learner = self._new_learner(name, num_classes, examples)
        return SimulatedPeer(
            name=name,
            peer_id=self._ids[name],
            examples=examples,
            later=later,
            num_classes=num_classes,
            learner=learner,
            core=self._new_core(name, examples, learner.parameters()),
            validation=Validation(learner.measured_labels),
            memory=self._new_memory(name, num_classes, examples, learner),
        )

    def _new_memory(
        self, name: str, num_classes: int, examples: Split, learner: TorchLearner
    ) -> Memory | None:
        settings = self._settings
        if settings.personalization.kind == "none":
            return None
        streams = Streams.of(settings.seed, name)
        collection = Collection(examples, settings.algorithm.holdout_fraction, streams.batches)
        return Memory(settings.personalization, learner, collection, num_classes, streams.memory)

    def _new_learner(self, name: str, num_classes: int, examples: Split) -> TorchLearner:
        settings = self._settings
        return new_learner(
            settings,
            settings.algorithm,
            settings.training,
            examples,
            num_classes=num_classes,
            seed=Streams.of(settings.seed, name).batches,
            import_paths=self._import_paths,
        )

    def _new_core(
        self,
        name: str,
        examples: Split,
        model: Tensors,
        starts: int = 0,
        restored: PeerSnapshot | None = None,
    ) -> PeerCore:
        return PeerCore(
            peer_id=self._ids[name],
            settings=self._settings.algorithm,
            model=model,
            incarnation=starts,
            rounds=self._settings.rounds,
            rng=Streams.of(self._settings.seed, name).sampling,
            restored=restored,
            num_examples=len(examples.fit) + len(examples.holdout),
        )

    def _new_engine(self) -> Engine:
        simulate, bits = self._settings.simulate, self._settings.algorithm.bits
        cores = {peer_id: peer.core for peer_id, peer in self.peers.items()}
        crowd = LearnerCrowd(
            {peer_id: peer.learner for peer_id, peer in self.peers.items()},
            on_measured=self._measured,
            names={peer_id: name for name, peer_id in self._ids.items()},
        )
        initial = None
        if self._settings.algorithm.codes_first_models:
            initial = next(iter(cores.values())).model.tensors
        if simulate.mode == "lockstep":
            return Lockstep(cores, crowd, bits=bits, initial=initial, on_round=self._round_finished)
        return Asynchronous(
            cores,
            crowd,
            simulate,
            Links(simulate, Streams.of(self._settings.seed, "links").sampling),
            bits=bits,
            initial=initial,
            restart=self._restart,
            slowness={self._ids[name]: slow for name, slow in self._slowness().items()},
            churn={self._ids[name]: stay for name, stay in simulate.churn.items()},
            on_round=self._round_finished,
        )

    def _slowness(self) -> dict[str, float]:
        """Return how many times longer peers take, those that the seed draws included."""
        simulate = self._settings.simulate
        others = [name for name in self._ids if name not in simulate.slow]
        rng = Streams.of(self._settings.seed, "slow").sampling
        count = min(round(simulate.slow_share * len(self._ids)), len(others))
        drawn = rng.choice(len(others), count, replace=False).tolist()
        return {**simulate.slow, **{others[at]: simulate.slow_factor for at in drawn}}

    def _restart(self, peer_id: PeerId, forgets: bool) -> PeerCore:
        """Start a peer again, from nothing or from where its last round ended."""
        peer = self.peers[peer_id]
        peer.starts += 1
        if forgets:
            fresh = self._new_learner(peer.name, peer.num_classes, peer.examples).parameters()
            peer.learner.adopt(fresh)
            peer.core = self._new_core(peer.name, peer.examples, fresh, peer.starts)
            peer.memory = self._new_memory(peer.name, peer.num_classes, peer.examples, peer.learner)
        else:
            saved = peer.core.snapshot()
            model = saved.model.tensors
            peer.learner.restore(model, peer.learner.optimizer_state())
            peer.core = self._new_core(peer.name, peer.examples, model, peer.starts, saved)
        peer.validation = Validation(peer.learner.measured_labels)
        return peer.core

    def _measured(self, own: PeerId, measured: PeerId, measurement: Measurement) -> None:
        peer = self.peers[own]
        if peer.core.horizon.is_fair(peer.core.round_number):
            peer.validation.measured(measured, measurement.probabilities)

    def _round_finished(self, peer_id: PeerId, finished: RoundFinished) -> None:
        peer, work, now_s = self.peers[peer_id], self.engine.work[peer_id], self.seconds
        measured, gradients, began_s = peer.reported
        if self._on_round is not None:
            report = RoundReport(
                finished,
                peer.validation.accuracy(finished.prediction_weights),
                {"total": now_s - began_s},
                {
                    "measured": work.measured - measured,
                    "differentiated": work.gradients - gradients,
                },
            )
            self._on_round(peer, report, self._totals(peer, now_s))
        peer.reported = work.measured, work.gradients, now_s
        self._renew(peer)
        if peer.later is not None and finished.round_number + 1 == self._half:
            peer.learner.use_examples(peer.later)
            peer.validation = Validation(peer.learner.measured_labels)
            _take(peer, peer.later)
            self.engine.tell(peer.peer_id, ExamplesChanged(replaced=True))

    def _renew(self, peer: SimulatedPeer) -> None:
        """Renew a peer's memory where it is due; where a model diverged, it stays as it was."""
        rounds_done = peer.core.round_number
        every = self._settings.personalization.every
        schedule = Schedule(every=every, horizon=peer.core.horizon)
        if peer.memory is not None and schedule.is_due(rounds_done):
            may_tune = schedule.may_tune(rounds_done)
            with suppress(DataError):
                mixture = mixture_of(peer.peer_id, peer.core)
                peer.memory.renew(mixture, rounds_done, may_tune=may_tune)

    def _evaluate_memory(self, peer: SimulatedPeer) -> dict[str, float | None] | None:
        if peer.memory is None:
            return None
        test = (peer.later or peer.examples).test
        return peer.memory.evaluate(mixture_of(peer.peer_id, peer.core), test)

    def _totals(self, peer: SimulatedPeer, now_s: float) -> dict[str, float]:
        """Return what a peer has spent, all its starts together."""
        work = self.engine.work[peer.peer_id]
        return {
            "bytes_sent": work.bytes_sent,
            "bytes_received": work.bytes_received,
            "seconds": round(now_s, 3),
        }

    def _train_alone(self, peer: SimulatedPeer, wanted: Callable[[], bool]) -> Tensors | None:
        """Train local-only with as many steps, on the data that the peer has at the time."""
        algorithm = self._settings.algorithm
        steps = algorithm.steps_after(self._settings.rounds, closed=True)
        before = steps if peer.later is None else algorithm.steps_after(self._half)
        learner = self._new_learner(peer.name, peer.num_classes, without_holdout(peer.examples))
        local = train_alone(learner, before, wanted)
        if peer.later is not None and local is not None:
            learner.use_examples(without_holdout(peer.later))
            local = train_alone(learner, steps - before, wanted)
        return local


def _take(peer: SimulatedPeer, later: Split) -> None:
    """Let a peer remember what it has now, beside what it had, as its strategy will."""
    if peer.memory is not None:
        train = later.train
        is_held = np.repeat([False, True], [len(later.fit), len(later.holdout)])
        with suppress(DataError):
            peer.memory.take(train, peer.memory.embed_new(train), is_held)


def _peer_id(number: int) -> PeerId:
    return PeerId(f"{number:032x}")


def _check_names(setting: str, named: Mapping[str, object], names: Sequence[str]) -> None:
    for name in named:
        if name not in names:
            raise ConfigError(
                f"{setting} names {name!r}, but the peers are {names[0]} to {names[-1]}: "
                "correct the name or raise peers"
            )
