"""What several tests share."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from peer.algorithm import AlgorithmSettings
from peer.core import PeerCore
from peer.data import Dataset, Split, split
from peer.events import (
    Adopt,
    Differentiate,
    Differentiated,
    Effect,
    Event,
    Fetch,
    Finished,
    GradientArrived,
    Measure,
    Measured,
    ModelFetched,
    ModelUnchanged,
    Publish,
    ReadyToClose,
    RoundClosed,
    RoundFinished,
    SendGradient,
    Started,
    Step,
    Stepped,
    Stopped,
)
from peer.learner import Learner, TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner
from protocol.messages import ModelSnapshot, PeerId


def peer_id(number: int) -> PeerId:
    return PeerId(f"{number:032x}")


@dataclass
class Participant:
    """A core with a real learner, and what it did."""

    core: PeerCore
    learner: Learner
    split: Split
    effects: list[Effect] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    rounds: list[RoundFinished] = field(default_factory=list)
    finished: bool = False


class Lockstep:
    """Drives cores in the paper's lockstep: all fetch from the same round, all close together."""

    def __init__(self, participants: Mapping[PeerId, Participant]) -> None:
        self.participants = participants
        self._published: dict[PeerId, ModelSnapshot] = {}
        self._ready: dict[PeerId, int] = {}
        self._queue: deque[tuple[PeerId, Event]] = deque()

    def run(self) -> None:
        everyone = frozenset(self.participants)
        for peer, participant in self.participants.items():
            self._published[peer] = participant.core.model
            self._queue.append((peer, Started(everyone)))
        while not all(each.finished for each in self.participants.values()):
            while self._queue:
                peer, event = self._queue.popleft()
                participant = self.participants[peer]
                participant.events.append(event)
                for effect in participant.core.handle(event):
                    participant.effects.append(effect)
                    self._interpret(peer, effect)
            closing, self._ready = self._ready, {}
            for peer, round_number in closing.items():
                self._queue.append((peer, RoundClosed(round_number)))

    def _interpret(self, peer: PeerId, effect: Effect) -> None:
        participant = self.participants[peer]
        learner = participant.learner
        match effect:
            case Publish(snapshot):
                self._published[peer] = snapshot
            case Fetch(other, round_number, have):
                snapshot = self._published[other]
                if snapshot.version == have:
                    self._queue.append((peer, ModelUnchanged(other, round_number)))
                else:
                    self._queue.append((peer, ModelFetched(other, round_number, snapshot)))
            case Measure(other, round_number, model):
                loss = learner.measure(model).loss
                self._queue.append((peer, Measured(other, round_number, loss)))
            case Differentiate(other, round_number, model):
                gradient = learner.differentiate(model, round_number, own=other == peer)
                answer = Differentiated(
                    other, round_number, gradient.tensors, gradient.num_examples
                )
                self._queue.append((peer, answer))
            case SendGradient(other, update):
                self._queue.append((other, GradientArrived(update)))
            case ReadyToClose(round_number):
                self._ready[peer] = round_number
            case Step(round_number, gradient):
                self._queue.append((peer, Stepped(round_number, learner.step(gradient))))
            case Adopt(round_number, _, model):
                self._queue.append((peer, Stepped(round_number, learner.adopt(model))))
            case RoundFinished():
                participant.rounds.append(effect)
            case Finished() | Stopped():
                participant.finished = True


def make_participants(
    slices: Sequence[Dataset],
    *,
    model: str,
    rounds: int,
    settings: AlgorithmSettings,
    seed: int = 0,
    training: TrainingSettings | None = None,
    holdout_fraction: float = 0.2,
) -> dict[PeerId, Participant]:
    participants = {}
    for index, dataset in enumerate(slices):
        streams = np.random.SeedSequence((seed, index)).spawn(2)
        fraction = holdout_fraction if settings.measure_on == "holdout" else 0.0
        parts = split(dataset, fraction, np.random.default_rng(streams[0]))
        learner = make_learner(
            parts, dataset, model=model, settings=settings, training=training, seed=index
        )
        core = PeerCore(
            peer_id=peer_id(index),
            settings=settings,
            model=learner.parameters(),
            incarnation=0,
            rounds=rounds,
            rng=np.random.default_rng(streams[1]),
        )
        participants[peer_id(index)] = Participant(core, learner, parts)
    return participants


def make_learner(
    parts: Split,
    dataset: Dataset,
    *,
    model: str,
    settings: AlgorithmSettings | None = None,
    training: TrainingSettings | None = None,
    seed: int = 0,
) -> TorchLearner:
    settings = settings or AlgorithmSettings()
    module = build_model(model, dataset.train.inputs.shape[1:], dataset.num_classes, 0)
    return TorchLearner(
        module,
        parts,
        dataset.num_classes,
        training or TrainingSettings(),
        loss=settings.loss,
        measure_on=settings.measure_on,
        seed=seed,
    )
