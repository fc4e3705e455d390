"""Partitions in which each peer has its own share of each label: Dirichlet and pathological."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peer.data import Dataset
from sim.deal import Counts, Indices, count_shares, deal_counts, draw_shares, scale_counts
from sim.groups import MAX_DRAWS, describe_labels
from sim.partition_settings import PartitionSettings, impossible
from sim.slices import Slice, check_enough, take


def partition_dirichlet(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> list[Slice]:
    """Give each peer shares of the labels that are drawn from a Dirichlet distribution.

    Raises:
        ConfigError: Some peer always gets too few examples.
    """
    share_rng, train_rng, test_rng = rng.spawn(3)
    shares = _draw_enough(dataset, num_peers, settings, share_rng)
    labels = dataset.train.labels
    train = deal_counts(labels, count_shares(labels, shares), train_rng)
    least = max(settings.min_examples, 1)
    train = _shorten(train, least, settings.max_examples, train_rng)
    test = None
    if dataset.test is not None:
        counts = count_shares(dataset.test.labels, shares)
        test = deal_counts(dataset.test.labels, counts, test_rng)
    slices = []
    for part in _take_all(dataset, train, test, settings.test_examples):
        frequency = np.bincount(part.train.labels)
        label, percent = int(frequency.argmax()), 100 * frequency.max() / frequency.sum()
        description = f"mostly label {label} ({percent:.0f} %)"
        slices.append(Slice(dataset=part, group=label, description=description))
    return slices


def partition_pathological(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> list[Slice]:
    """Sort the examples by label, cut them into equal shards and give each peer a few.

    Source: McMahan et al., "Communication-efficient learning of deep networks from decentralized
    data", 2017.

    Raises:
        ConfigError: There are fewer examples than shards, or than the peers shall have.
    """
    _check_shards(dataset, num_peers, settings)
    shard_rng, train_rng, test_rng = rng.spawn(3)
    counts = _count_shards(dataset, num_peers, settings.shards_per_peer, shard_rng)
    train = deal_counts(dataset.train.labels, counts, train_rng)
    least = settings.min_examples or settings.max_examples
    train = _shorten(train, least, settings.max_examples, train_rng)
    test = None
    if dataset.test is not None:
        test_counts = scale_counts(counts, dataset.test.labels)
        test = deal_counts(dataset.test.labels, test_counts, test_rng)
    slices = []
    for part in _take_all(dataset, train, test, settings.test_examples):
        frequency = np.bincount(part.train.labels)
        description = describe_labels(np.flatnonzero(frequency).tolist())
        group = int(frequency.argmax())
        slices.append(Slice(dataset=part, group=group, description=description))
    return slices


def _draw_enough(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Draw shares, shape (num_classes, num_peers), that leave no peer with too few examples."""
    labels = dataset.train.labels
    check_enough(settings, len(labels) // num_peers, _fact(dataset, num_peers))
    least = max(settings.min_examples, 1)
    for _ in range(MAX_DRAWS):
        shares = draw_shares(dataset.num_classes, num_peers, settings.alpha, rng)
        if count_shares(labels, shares).sum(axis=0).min() >= least:
            return shares
    advice = (
        f"in {MAX_DRAWS} draws, some of {num_peers} peers always got fewer than {least} training "
        "examples: raise it, lower min_examples, or have fewer peers"
    )
    raise impossible("alpha", settings.alpha, advice)


def _check_shards(dataset: Dataset, num_peers: int, settings: PartitionSettings) -> None:
    fact, num_examples = _fact(dataset, num_peers), len(dataset.train)
    most, per_peer = settings.max_examples, settings.shards_per_peer
    if num_peers <= num_examples < num_peers * per_peer:
        advice = f"{fact}: lower it to at most {num_examples // num_peers}, or have fewer peers"
        raise impossible("shards_per_peer", per_peer, advice)
    share = per_peer * (num_examples // (num_peers * per_peer))  # when all its shards are small
    check_enough(settings, share, fact)
    if most > share:
        advice = f"{fact}: lower it to at most {share}, or have fewer peers"
        raise impossible("max_examples", most, advice)


def _count_shards(
    dataset: Dataset, num_peers: int, per_peer: int, rng: np.random.Generator
) -> Counts:
    """Draw each peer's shards; return its examples of each label, shape (classes, peers)."""
    labels = np.sort(dataset.train.labels)
    num_shards = num_peers * per_peer
    shards = np.arange(len(labels)) * num_shards // len(labels)  # the shard of each example
    owners = rng.permutation(num_shards) % num_peers  # the peer of each shard
    counts = np.zeros((dataset.num_classes, num_peers), dtype=np.int64)
    np.add.at(counts, (labels, owners[shards]), 1)
    return counts


def _shorten(
    parts: Sequence[Indices], least: int, most: int, rng: np.random.Generator
) -> list[Indices]:
    """Keep at most a number of each part that is drawn between the bounds; without one, all."""
    if not most:
        return list(parts)
    sizes = rng.integers(least, most, size=len(parts), endpoint=True)
    return [own[:size] for own, size in zip(parts, sizes, strict=True)]


def _take_all(
    dataset: Dataset, train: Sequence[Indices], test: Sequence[Indices] | None, most_test: int
) -> list[Dataset]:
    """Return the part of each peer, with at most `most_test` test examples; 0: all it has."""
    return [
        take(dataset, f"peer {peer}", own, test[peer][: most_test or None] if test else None)
        for peer, own in enumerate(train)
    ]


def _fact(dataset: Dataset, num_peers: int) -> str:
    return f"{dataset.name} has {len(dataset.train)} training examples for {num_peers} peers"
