"""One experiment's settings, from `configs/*.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from peer.algorithm import AlgorithmSettings, Positive
from peer.config import DataSettings, Name, PersonalizationSettings, check_personalization
from peer.learner import TrainingSettings
from sim.partition import PartitionSettings
from sim.simulate_settings import SimulateSettings


class SwarmProcessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a swarm's processes are run."""

    start: Literal["auto", "fork", "spawn"] = "auto"
    """`fork` from one process that has torch loaded (fast and small, Linux without CUDA), `spawn`
    as fresh interpreters, or what fits here."""
    local_baseline: bool = True
    """Whether each peer trains local-only too at the end, for comparison."""
    ready_timeout_s: Positive = 60.0
    """Longest wait for all peers to listen."""
    stall_timeout_s: Positive = 300.0
    """When all others have finished, a peer that records nothing for so long is given up."""
    fetch_timeout_s: Positive = 5.0
    """Longest wait for a model; a peer that hangs costs the others this once."""
    checkpoint_every_s: Positive = 1.0
    """Shortest time between a peer's checkpoints."""


class SwarmSettings(DataSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one swarm, of real processes or simulated.

    Raises:
        ValueError: Personalization has nothing to choose its interpolation weight by, or all peers
            would watch one folder.
    """

    name: Name
    """Names the run folder."""
    peers: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    """K, the number of peers; in `coterie swarm` each is a process of its own."""
    rounds: Annotated[int, msgspec.Meta(ge=1)]
    """Rounds of each peer; in each, its model takes `algorithm.exchange_every` steps."""
    partition: PartitionSettings = PartitionSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    training: TrainingSettings = TrainingSettings()
    personalization: PersonalizationSettings = PersonalizationSettings()
    swarm: SwarmProcessSettings = SwarmProcessSettings()
    simulate: SimulateSettings = SimulateSettings()

    def __post_init__(self) -> None:
        check_personalization(self.personalization, self.algorithm, self.rounds)
        watched = Path(self.personalization.watch).expanduser()
        if watched.is_absolute() or ".." in watched.parts:
            raise ValueError(
                f"personalization.watch = {self.personalization.watch!r} would be one folder for "
                "all peers: name one inside each peer's own folder, such as 'inbox'"
            )
