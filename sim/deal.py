"""Deal examples out to peers by their labels: each to at most one peer, as balanced as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.intp]
Labels = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Peers that draw from the same labels.

    Attributes:
        name: For errors, such as "group 2 (labels 4-5)".
        peers: Who draws, at least one; a peer that draws twice has a second number.
        labels: Which labels; None for all.
    """

    name: str
    peers: Sequence[int]
    labels: frozenset[int] | None


Sizes = Callable[[Pool, int, np.random.Generator], Counts]
"""How many examples each peer of a pool gets, given how many there are; may refuse."""


def even_shares(total: int, num_peers: int) -> Counts:
    """Return `num_peers` counts that add up to `total` and differ by at most one."""
    shares = np.full(num_peers, total // num_peers)
    shares[: total % num_peers] += 1
    return shares


def deal(
    labels: Labels, pools: Sequence[Pool], sizes: Sizes, rng: np.random.Generator
) -> dict[int, Indices]:
    """Deal examples out, by label to pools and from pools to peers.

    The examples of a label are divided among the pools that hold it, in proportion to their
    numbers of peers. Where a pool's peers take less than all, they take labels in the proportions
    that the data have, as long as each label lasts. Within a pool all peers draw alike.

    Args:
        labels: The label of each example.
        pools: Pools whose peers are disjoint.
        sizes: Decides how much of a pool each of its peers gets.
        rng: Decides who gets which.

    Returns:
        The positions of each peer's examples, by peer.
    """
    dealt: dict[int, Indices] = {}
    for pool, examples in zip(pools, fill_pools(labels, pools, rng), strict=True):
        counts = sizes(pool, len(examples), rng)
        dealt.update(hand_out(pool, examples, counts, rng))
    return dealt


def hand_out(
    pool: Pool, examples: Indices, counts: Counts, rng: np.random.Generator
) -> dict[int, Indices]:
    """Give each peer of a pool so many of its examples, as from `fill_pools`; all draw alike."""
    taken = rng.permutation(examples[: counts.sum()])
    parts = np.split(taken, np.cumsum(counts)[:-1])
    return dict(zip(pool.peers, parts, strict=True))


def fill_pools(labels: Labels, pools: Sequence[Pool], rng: np.random.Generator) -> list[Indices]:
    """Return the examples of each pool, ordered so that any first part of them is balanced.

    An example's place is its rank within its label divided by how frequent the label is, which is
    systematic sampling: the first part of any length holds each label as the data do, to within
    one example, until the pool's share of a label ends.
    """
    examples: list[list[Indices]] = [[] for _ in pools]
    places: list[list[npt.NDArray[np.float64]]] = [[] for _ in pools]
    for label in np.unique(labels).tolist():
        own = rng.permutation(np.flatnonzero(labels == label))
        holders = [
            index for index, pool in enumerate(pools) if pool.labels is None or label in pool.labels
        ]
        if not holders:
            continue
        num_peers = np.cumsum([len(pools[index].peers) for index in holders])
        ends = num_peers * len(own) // num_peers[-1]
        for index, part in zip(holders, np.split(own, ends[:-1]), strict=True):
            examples[index].append(part)
            places[index].append((np.arange(len(part)) + rng.random()) / len(own))
    return [
        np.concatenate(parts)[np.argsort(np.concatenate(keys), kind="stable")]
        if parts
        else np.empty(0, dtype=np.intp)
        for parts, keys in zip(examples, places, strict=True)
    ]


def draw_shares(
    num_classes: int, num_peers: int, alpha: float, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Draw each label's division among peers from a symmetric Dirichlet distribution.

    Returns:
        Shape (num_classes, num_peers); rows add up to 1.

    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
    visual classification", 2019; per label as in Yurochkin et al., 2019, so that every example
    finds a peer and no label can run out.
    """
    return rng.dirichlet(np.full(num_peers, alpha), size=num_classes)


def count_shares(labels: Labels, shares: npt.NDArray[np.float64]) -> Counts:
    """Return how many examples of each label each peer gets, shape (num_classes, num_peers).

    Rows add up to the number of examples with that label.
    """
    num_examples = np.bincount(labels, minlength=len(shares))[:, np.newaxis]
    ends = np.floor(np.cumsum(shares, axis=1) * num_examples).astype(np.int64)
    ends = np.minimum(ends, num_examples)
    ends[:, -1] = num_examples[:, 0]  # rounding must lose nobody
    return np.diff(ends, axis=1, prepend=0)


def scale_counts(counts: Counts, labels: Labels) -> Counts:
    """Return counts that divide these examples as `counts` divides others, label by label.

    Args:
        counts: Shape (num_classes, num_peers). A label that nobody has is given to nobody, so that
            no peer gets a label that it doesn't have.
        labels: The label of each example to divide.
    """
    # Whole numbers throughout: no rounding error gives a peer a label that it doesn't have.
    ends: Counts = np.cumsum(counts, axis=1)
    totals = np.maximum(ends[:, -1:], 1)
    num_examples = np.bincount(labels, minlength=len(counts))[:, np.newaxis]
    ends = (2 * ends * num_examples + totals) // (2 * totals)
    return np.diff(ends, axis=1, prepend=0)


def deal_counts(labels: Labels, counts: Counts, rng: np.random.Generator) -> list[Indices]:
    """Deal out so many examples of each label to each peer; others are left out.

    Args:
        labels: The label of each example.
        counts: Shape (num_classes, num_peers).
        rng: Decides who gets which.

    Returns:
        The positions of each peer's examples.
    """
    parts: list[list[Indices]] = [[] for _ in range(counts.shape[1])]
    for label in np.unique(labels).tolist():
        own = rng.permutation(np.flatnonzero(labels == label))
        *dealt, _left_over = np.split(own, np.cumsum(counts[label]))
        for peer, part in enumerate(dealt):
            parts[peer].append(part)
    empty = np.empty(0, dtype=np.intp)
    return [rng.permutation(np.concatenate([empty, *own])) for own in parts]
