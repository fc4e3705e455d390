"""What several tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from peer.algorithm import AlgorithmSettings
from peer.core import PeerCore
from peer.data import Dataset, Split, split
from peer.learner import Learner, TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner
from protocol.messages import PeerId
from protocol.tensors import Tensors
from sim.engine import LearnerCrowd, Lockstep


def peer_id(number: int) -> PeerId:
    return PeerId(f"{number:032x}")


@dataclass
class Participant:
    """A core with a real learner, and what it did."""

    core: PeerCore
    learner: Learner
    split: Split


def initial_of(participants: Mapping[PeerId, Participant]) -> Tensors:
    """Return the model that all begin with."""
    return next(iter(participants.values())).learner.parameters()


def run_lockstep(
    participants: Mapping[PeerId, Participant], settings: AlgorithmSettings | None = None
) -> Lockstep:
    """Run participants to their last round as the simulator does.

    Args:
        participants: Not started yet.
        settings: Say how what travels is coded; None is not at all.
    """
    learners = {peer: each.learner for peer, each in participants.items()}
    cores = {peer: each.core for peer, each in participants.items()}
    bits = initial = None
    if settings is not None:
        bits = settings.bits
        initial = initial_of(participants) if settings.codes_first_models else None
    engine = Lockstep(cores, LearnerCrowd(learners), bits=bits, initial=initial)
    engine.run()
    return engine


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
            num_examples=len(parts.fit) + len(parts.holdout),
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
