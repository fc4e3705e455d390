"""FedeRiCo, blended with each peer's memory of its own examples, as `[personalization]` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from peer.algorithm import AlgorithmSettings
from peer.collection import Collection
from peer.config import PersonalizationSettings, check_personalization
from peer.core import PeerCore
from peer.data import Split
from peer.learner import Learner
from peer.memory import Memory
from peer.mixture import Mixture
from peer.result import mixture_of
from peer.schedule import Schedule
from protocol.errors import ConfigError
from protocol.messages import PeerId
from sim.cohort import Budget, Member, Outcome
from sim.federico import rounds_within, run_rounds, settings_of

SETTINGS = tuple(PersonalizationSettings.__struct_fields__)


def federico_knn(
    members: Sequence[Member],
    budget: Budget,
    rng: np.random.Generator,
    *,
    profile: str = "default",
    embedding: str = "own",
    **changes: Any,
) -> Outcome:
    """Run FedeRiCo; then each peer remembers.

    λ is chosen on the holdout before the final rounds, which train on it; the memory is renewed
    once more by what the last round left. Where data drift half-way, it remembers what they became;
    a peer that doesn't notice in time to choose λ anew predicts without its memory.

    Args:
        members: The peers.
        budget: What they may spend; what isn't a whole round is left.
        rng: Decides who is sampled, and what the strategy `random` keeps.
        profile: One of `PROFILES`.
        embedding: Whose model embeds: `own`, or that of the `strongest` member of the mixture.
        changes: Settings of `[algorithm]` that differ from the profile, or of `[personalization]`
            from its defaults.

    Raises:
        ConfigError: A setting is unknown or impossible, not even one round fits the budget, or
            there is nothing to choose λ by.
    """
    algorithm, settings = _settings_of(profile, {**changes, "embedding": embedding})
    memories = _Memories(settings, rng)
    outcome = run_rounds(members, budget, rng, algorithm, memories.after_round)
    return replace(
        outcome,
        predict=[
            partial(memories.of[member.peer_id].predict, memories.mixtures[member.peer_id])
            for member in members
        ],
    )


class _Memories:
    """The memories of all peers, built when λ may last be chosen, renewed after the last round.

    Attributes:
        of: The memory of each peer.
        mixtures: What each peer predicted with when its memory was last renewed.
    """

    def __init__(self, settings: PersonalizationSettings, rng: np.random.Generator) -> None:
        self._settings = settings
        self._rng = rng
        self._remembered: dict[PeerId, Split] = {}
        self.of: dict[PeerId, Memory] = {}
        self.mixtures: dict[PeerId, Mixture] = {}

    def after_round(self, member: Member, learner: Learner, core: PeerCore) -> None:
        """Build or renew the memory of one peer where it is time.

        Raises:
            DataError: A model has diverged.
        """
        done = core.round_number
        schedule = Schedule(every=self._settings.every, horizon=core.horizon)
        if not schedule.is_last_turn(done):
            return
        peer_id = member.peer_id
        mixture = mixture_of(peer_id, core)
        if self._remembered.get(peer_id) is not member.split:
            self.of[peer_id] = self._new_memory(member, learner, mixture)
            self._remembered[peer_id] = member.split
        self.of[peer_id].renew(mixture, done, may_tune=schedule.may_tune(done))
        self.mixtures[peer_id] = mixture

    def _new_memory(self, member: Member, learner: Learner, mixture: Mixture) -> Memory:
        split = member.split
        num_classes = mixture.predict(learner, split.fit.inputs[:1]).shape[1]
        collection = Collection(split, 0.0, 0)
        return Memory(self._settings, learner, collection, num_classes, self._rng.spawn(1)[0])


def check_federico_knn(budget: Budget, *, profile: str = "default", **changes: Any) -> None:
    """Refuse what `federico_knn` would refuse, before any peer is made.

    Raises:
        ConfigError: As there.
    """
    algorithm, _ = _settings_of(profile, changes)
    rounds_within(budget, algorithm)


def _settings_of(
    profile: str, changes: Mapping[str, Any]
) -> tuple[AlgorithmSettings, PersonalizationSettings]:
    own = {name: value for name, value in changes.items() if name in SETTINGS}
    others = {name: value for name, value in changes.items() if name not in SETTINGS}
    algorithm = settings_of(profile, others)
    try:
        settings = msgspec.convert({"kind": "knn", **own}, PersonalizationSettings)
        check_personalization(settings, algorithm)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"personalization: {error}") from error
    return algorithm, settings
