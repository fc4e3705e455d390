"""One experiment's settings, from `configs/*.toml`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from peer.algorithm import AlgorithmSettings, Positive
from peer.config import DataSettings, Name
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
    """Everything about one swarm, of real processes or simulated."""

    name: Name
    """Names the run folder."""
    peers: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    """K, the number of peers; in `coterie swarm` each is a process of its own."""
    rounds: Annotated[int, msgspec.Meta(ge=1)]
    """Rounds of each peer; in each, its model takes `algorithm.exchange_every` steps."""
    partition: PartitionSettings = PartitionSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    training: TrainingSettings = TrainingSettings()
    swarm: SwarmProcessSettings = SwarmProcessSettings()
    simulate: SimulateSettings = SimulateSettings()
