"""FedeRiCo as a method of a comparison: the very core that daemons run, in lockstep rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from peer.algorithm import PROFILES, AlgorithmSettings, mix_predictions
from peer.core import PeerCore
from peer.events import ExamplesChanged, RoundFinished
from peer.learner import Learner, Probabilities
from protocol.errors import ConfigError
from protocol.messages import PeerId
from protocol.tensors import Tensors
from sim.cohort import Budget, Member, Outcome, Spending
from sim.engine import LearnerCrowd, Lockstep


def federico(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    profile: str = "default",
    **changes: Any,
) -> Outcome:
    """Run FedeRiCo with the settings of a profile.

    How often peers exchange is the profile's, not the budget's: it belongs to the method.

    Args:
        members: The peers.
        budget: What they may spend; what isn't a whole round is left.
        rng: Decides who is sampled.
        profile: One of `PROFILES`.
        changes: Settings that differ from the profile.

    Raises:
        ConfigError: A setting is unknown or impossible, or not even one round fits the budget.
    """
    return run_rounds(members, budget, rng, settings_of(profile, changes))


def run_rounds(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    settings: AlgorithmSettings,
    after_round: Callable[[Member, Learner, PeerCore], None] = lambda member, learner, core: None,
) -> Outcome:
    """Do the rounds of all peers.

    Args:
        members: The peers.
        budget: What they may spend; what isn't a whole round is left.
        rng: Decides who is sampled.
        settings: FedeRiCo's.
        after_round: Told of every finished round of every peer, once its data have drifted.

    Raises:
        ConfigError: Not even one round fits the budget.
    """
    rounds = rounds_within(budget, settings)
    by_id = {member.peer_id: member for member in members}
    learners = {
        member.peer_id: member.new_learner(loss=settings.loss, measure_on=settings.measure_on)
        for member in members
    }
    cores = _new_cores(members, learners, settings, rounds, rng)
    last = max(by_id)

    def on_round(peer_id: PeerId, finished: RoundFinished) -> None:
        done = finished.round_number + 1
        if done == (rounds + 1) // 2:
            by_id[peer_id].drift()
            engine.tell(peer_id, ExamplesChanged(replaced=True))
        after_round(by_id[peer_id], learners[peer_id], cores[peer_id])
        if peer_id == last:
            budget.on_round(done, rounds)

    initial = cores[last].model.tensors if settings.codes_first_models else None
    engine = Lockstep(
        cores, LearnerCrowd(learners), bits=settings.bits, initial=initial, on_round=on_round
    )
    engine.run()
    return Outcome(
        predict=[
            partial(predict, learners[peer_id], core.prediction_weights(), core.mixture())
            for peer_id, core in cores.items()
        ],
        spending=[
            Spending(work.gradients, work.bytes_sent, work.bytes_received)
            for work in engine.work.values()
        ],
        weights=_weight_matrix(cores),
    )


def rounds_within(budget: Budget, settings: AlgorithmSettings) -> int:
    """Return how many whole rounds fit the budget.

    Raises:
        ConfigError: None does.
    """
    rounds = settings.rounds_for(budget.steps)
    if rounds < 1:
        raise ConfigError(
            f"steps = {budget.steps} leaves no round of {settings.exchange_every} steps after "
            f"{settings.first_steps} first ones: raise it"
        )
    return rounds


def predict(
    learner: Learner,
    weights: Mapping[PeerId, float],
    models: Mapping[PeerId, Tensors],
    inputs: npt.NDArray[np.float32],
) -> Probabilities:
    """Predict with a mixture of models."""
    return mix_predictions(
        weights, {peer_id: learner.predict(model, inputs) for peer_id, model in models.items()}
    )


def check_federico(budget: Budget, *, profile: str = "default", **changes: Any) -> None:
    """Refuse what `federico` would refuse, before any peer is made.

    Raises:
        ConfigError: As there.
    """
    rounds_within(budget, settings_of(profile, changes))


def settings_of(profile: str, changes: Mapping[str, Any]) -> AlgorithmSettings:
    """Return a profile's settings with some changed.

    Raises:
        ConfigError: There is no such profile, or a setting is unknown or impossible.
    """
    if profile not in PROFILES:
        raise ConfigError(f"unknown profile {profile!r}; known are {', '.join(PROFILES)}")
    try:
        tree = {**PROFILES[profile], "profile": profile, **changes}
        return msgspec.convert(tree, AlgorithmSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"FedeRiCo's settings: {error}") from error


def _new_cores(
    members: Sequence[Member],
    learners: Mapping[PeerId, Learner],
    settings: AlgorithmSettings,
    rounds: int,
    rng: np.random.Generator,
) -> dict[PeerId, PeerCore]:
    return {
        member.peer_id: PeerCore(
            peer_id=member.peer_id,
            settings=settings,
            model=learners[member.peer_id].parameters(),
            incarnation=0,
            rounds=rounds,
            rng=stream,
            num_examples=member.num_train,
        )
        for member, stream in zip(members, rng.spawn(len(members)), strict=True)
    }


def _weight_matrix(cores: Mapping[PeerId, PeerCore]) -> npt.NDArray[np.float64]:
    rows = [core.collaboration_weights() for core in cores.values()]
    return np.array([[row.get(peer_id, 0.0) for peer_id in cores] for row in rows])
