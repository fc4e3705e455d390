"""One-shot clustering (ODCL): whose models went the same way from the common initial parameters.

Source: Armacki et al., "One-Shot Federated Learning for Model Clustering and Learning in
Heterogeneous Environments", 2022, for models solved to the end. Here networks are compared after
some local steps, and only by direction, (θ_i - θ_0) / ‖θ_i - θ_0‖: how far a peer gets depends on
how much data it has, and nobody draws others near by being far away.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from peer.algorithm import ClusteringName, Vector, trainable
from peer.clustering.choice import choose
from peer.clustering.interface import in_order_of_appearance
from peer.clustering.span import gather
from protocol.groups import Groups
from protocol.messages import PeerId
from protocol.tensors import Tensors


def group(
    models: Mapping[PeerId, Tensors],
    initial: Tensors,
    *,
    clustering: ClusteringName,
    num_clusters: int = 0,
    sizes: Mapping[PeerId, float] | None = None,
) -> tuple[Groups, str]:
    """Cluster models that started alike.

    A model that isn't finite is alone in its own cluster. Clusters are numbered as they appear in
    peer-id order.

    Args:
        models: θ_i by owner.
        initial: θ_0.
        clustering: How to.
        num_clusters: See `choose`.
        sizes: n_i by owner; all alike if None.

    Returns:
        Who belongs together; and what was found, in plain words, the digest included.

    Raises:
        ConfigError: The clustering can't be told the number, or it is more than the models.
        ModelError: No model is finite.
    """
    start = trainable(initial)
    gathered = gather(
        {peer_id: {"": _direction(trainable(models[peer_id]) - start)} for peer_id in models}
    )
    weights = [1.0 if sizes is None else sizes[peer_id] for peer_id in gathered.peer_ids]
    # Whoever clusters the same models finds the same: so the starts are drawn alike everywhere.
    rng = np.random.default_rng(0)
    found = choose(clustering, num_clusters)(gathered.points, np.array(weights), rng)
    labels = dict(zip(gathered.peer_ids, found.labels.tolist(), strict=True))
    labels |= {peer_id: found.number + at for at, peer_id in enumerate(gathered.left_out)}
    ordered = sorted(labels)
    numbers = in_order_of_appearance(labels[peer_id] for peer_id in ordered)
    groups = Groups.of(dict(zip(ordered, numbers.tolist(), strict=True)))
    note = f"{len(ordered)} models: {found.note}"
    if gathered.left_out:
        note += f"; not finite, so left alone: {', '.join(gathered.left_out)}"
    return groups, f"{note}; digest {groups.digest}"


def _direction(update: Vector) -> Vector:
    """Scale to length 1; no update has no direction."""
    length = float(np.linalg.norm(update.astype(np.float64)))
    return update if length == 0.0 else np.float32(1 / length) * update
