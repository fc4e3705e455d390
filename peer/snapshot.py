"""The algorithmic state of a peer between two rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peer.acquaintances import KeptModel
from peer.exploration import ExplorerState
from protocol.groups import Groups
from protocol.messages import ModelSnapshot, PeerId
from protocol.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSnapshot:
    """All algorithmic state between two rounds: what a checkpoint saves.

    Attributes:
        round_number: The next round.
        model: The own model; a restored peer publishes it under a larger incarnation.
        loss_averages: L̂_ij.
        measured_at: The round in which each peer was last measured.
        kept: Models of others.
        explorer: Whom to look at next.
        rng_state: The sampling generator's state.
        shown: What others are shown instead of the own model; None where that is what they see.
        groups: Who belongs together, as others are told; None of a checkpoint that doesn't say.
        measuring_until: See `Horizon`.
        trained_from: See `Horizon`.
    """

    round_number: int
    model: ModelSnapshot
    loss_averages: Mapping[PeerId, float]
    measured_at: Mapping[PeerId, int]
    kept: Mapping[PeerId, KeptModel]
    explorer: ExplorerState
    rng_state: Mapping[str, Any]
    shown: Tensors | None = None
    groups: Groups | None = None
    measuring_until: int = 0
    trained_from: int | None = None
