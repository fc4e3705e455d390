"""One-shot clustering (ODCL): whose models went the same way from the common initial parameters.

Source: Armacki et al., "One-Shot Federated Learning for Model Clustering and Learning in
Heterogeneous Environments", 2022, for models solved to the end. Here networks are compared after
some local steps, and only by direction, (θ_i - θ_0) / ‖θ_i - θ_0‖: how far a peer gets depends on
how much data it has, and nobody draws others near by being far away.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from peer.algorithm import ClusteringName, Vector, trainable
from peer.clustering.choice import choose
from peer.clustering.interface import in_order_of_appearance
from peer.clustering.span import gather
from protocol.digest import digest_of
from protocol.messages import PeerId
from protocol.tensors import Tensors

MOST_TIMES = 4
"""How many times the median of its cluster a peer counts at most, whatever it claims. More lets
honest large peers count in full, and a liar among m members of one size take MOST_TIMES /
(MOST_TIMES + m - 1) of their average."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Who belongs together.

    Attributes:
        labels: The cluster of each peer, numbered as they appear in peer-id order. A peer whose
            model isn't finite is alone in its own.
        digest: The same wherever the same models are clustered.
        note: What was found, in plain words, the digest included.
    """

    labels: Mapping[PeerId, int]
    digest: str
    note: str

    def others_of(self, peer_id: PeerId) -> tuple[PeerId, ...]:
        """Return who else is in a peer's cluster, sorted."""
        own = self.labels[peer_id]
        together = (other for other, label in self.labels.items() if label == own)
        return tuple(sorted(other for other in together if other != peer_id))


def group(
    models: Mapping[PeerId, Tensors],
    initial: Tensors,
    *,
    clustering: ClusteringName,
    num_clusters: int = 0,
    sizes: Mapping[PeerId, float] | None = None,
) -> Groups:
    """Cluster models that started alike.

    Args:
        models: θ_i by owner.
        initial: θ_0.
        clustering: How to.
        num_clusters: See `choose`.
        sizes: n_i by owner; all alike if None.

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
    result = dict(zip(ordered, numbers.tolist(), strict=True))
    note = f"{len(result)} models: {found.note}"
    if gathered.left_out:
        note += f"; not finite, so left alone: {', '.join(gathered.left_out)}"
    text = " ".join(f"{peer_id}:{label}" for peer_id, label in result.items())
    digest = digest_of(text.encode())
    return Groups(result, digest, f"{note}; digest {digest}")


def bounded_sizes(claimed: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Return how many examples each model of a cluster counts for in its average.

    Nobody can check how many examples another has. So nobody counts for more than `MOST_TIMES` the
    median, which half of the cluster would have to inflate; everybody bounds alike, so that members
    who were told the same come to the same average. Who doesn't say counts for the median.

    Args:
        claimed: n_i by owner; 0 where it isn't known.
    """
    told = [size for size in claimed.values() if size > 0]
    median = statistics.median_low(told) if told else 1
    most = MOST_TIMES * median
    return {peer_id: min(claimed[peer_id] or median, most) for peer_id in sorted(claimed)}


def _direction(update: Vector) -> Vector:
    """Scale to length 1; no update has no direction."""
    length = float(np.linalg.norm(update.astype(np.float64)))
    return update if length == 0.0 else np.float32(1 / length) * update
