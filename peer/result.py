"""What a peer scored, as `result.json` says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peer.core import PeerCore
from peer.data import Split
from peer.evaluate import evaluate
from peer.learner import Learner
from peer.mixture import Mixture
from protocol.messages import PeerId
from protocol.tensors import Tensors


def mixture_of(peer_id: PeerId, core: PeerCore) -> Mixture:
    """Return what a peer predicts with now."""
    return Mixture(
        own=peer_id,
        model=core.model.tensors,
        models=core.mixture(),
        weights=core.prediction_weights(),
    )


def peer_result(
    name: str,
    core: PeerCore,
    learner: Learner,
    examples: Split,
    *,
    local: Tensors | None,
    weights: Mapping[str, float],
    totals: Mapping[str, float],
    personal: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Evaluate a peer on its test examples.

    Args:
        name: The peer's.
        core: Which models it predicts with.
        learner: Predicts.
        examples: The peer's at present.
        local: The local-only model to compare with, if there is one.
        weights: The mixture's, by peer name.
        totals: What the peer spent: `bytes_sent`, `bytes_received` and `seconds`.
        personal: What the memory says, see `Memory.evaluate`; None where there is none.
    """
    accuracies = evaluate(
        learner, examples.test, core.mixture(), core.prediction_weights(), core.model.tensors, local
    )
    return {
        "name": name,
        "rounds": core.round_number,
        "num_train": len(examples.fit) + len(examples.holdout),
        "num_test": len(examples.test),
        **accuracies,
        **(personal or {}),
        "weights": weights,
        **totals,
    }
