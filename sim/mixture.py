"""The partition in which each peer mixes the examples of two groups in its own proportion."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from peer.data import Dataset, Examples
from sim.deal import Counts, Indices, fill_pools, hand_out
from sim.groups import Group, make_groups, make_pools, place_peers
from sim.partition_settings import PartitionSettings, impossible
from sim.slices import Slice, check_enough

LEAST_PERCENT = 55
MOST_PERCENT = 90
"""Bounds of the dominant group's part: enough to dominate, and to leave the other its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mix:
    """What one peer mixes: `percent` % of its examples are of `group`, the others of `other`."""

    group: int
    other: int
    percent: int


def partition_mixture(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> list[Slice]:
    """Give each peer examples of two groups, in one proportion for train and test.

    The peers of a group take the other groups in turn, and their proportions are evenly spaced
    between the bounds: the mixtures are the same for every seed, and can be compared.

    Raises:
        ConfigError: The groups or sizes don't fit the data.
        DataError: Images are to be rotated, and the inputs are none or not square.
    """
    group_of = place_peers(settings, num_peers)
    group_rng, train_rng, test_rng = rng.spawn(3)
    groups = make_groups(dataset, settings, len(set(group_of)), group_rng)
    mixes = _plan_mixes(group_of)
    train_totals = functools.partial(_train_totals, settings, dataset)
    train = _deal_mixed(dataset.train, mixes, groups, train_totals, train_rng)
    test: Sequence[Examples | None] = [None] * num_peers
    if dataset.test is not None:
        test_totals = functools.partial(_test_totals, settings)
        test = _deal_mixed(dataset.test, mixes, groups, test_totals, test_rng)
    return [
        Slice(
            dataset=Dataset(
                name=f"{dataset.name}, peer {peer}",
                train=train[peer],
                test=test[peer],
                num_classes=dataset.num_classes,
            ),
            group=mix.group,
            description=f"{mix.percent} % {groups[mix.group].description}, "
            f"{100 - mix.percent} % {groups[mix.other].description}",
        )
        for peer, mix in enumerate(mixes)
    ]


def _plan_mixes(group_of: Sequence[int]) -> list[_Mix]:
    """Return what each peer mixes; a pure function of the groups, for few peers no two alike."""
    sizes, placed = Counter(group_of), Counter[int]()
    num_groups = len(sizes)
    mixes = []
    for group in group_of:
        place = placed[group]
        placed[group] += 1
        other = (group + 1 + place % (num_groups - 1)) % num_groups
        # Evenly from bound to bound within the group, and groups a little apart.
        spread = (place + (group + 0.5) / num_groups) / sizes[group]
        percent = LEAST_PERCENT + int(spread * (MOST_PERCENT - LEAST_PERCENT))
        mixes.append(_Mix(group=group, other=other, percent=percent))
    return mixes


def _deal_mixed(
    examples: Examples,
    mixes: Sequence[_Mix],
    groups: Sequence[Group],
    choose_totals: Callable[[Counts, np.random.Generator], Counts],
    rng: np.random.Generator,
) -> list[Examples]:
    """Return each peer's mixture.

    Args:
        examples: The whole.
        mixes: Of each peer.
        groups: What they mix.
        choose_totals: Returns each peer's number of examples, given the greatest, shape (peers,).
        rng: Decides who gets which.
    """
    num_peers = len(mixes)
    # Peer i draws from its group as number i, and from the other as number num_peers + i.
    pools = make_pools(groups, [*(mix.group for mix in mixes), *(mix.other for mix in mixes)])
    ordered = fill_pools(examples.labels, pools, rng)
    room = np.zeros(2 * num_peers, dtype=np.int64)
    for pool, own in zip(pools, ordered, strict=True):
        room[list(pool.peers)] = _greatest_total(mixes, pool.peers, len(own))
    totals = choose_totals(np.minimum(room[:num_peers], room[num_peers:]), rng)
    counts = _divide(totals, mixes)
    dealt: dict[int, Indices] = {}
    for pool, own in zip(pools, ordered, strict=True):
        dealt.update(hand_out(pool, own, counts[list(pool.peers)], rng))
    mixed = []
    for peer, mix in enumerate(mixes):
        parts = (
            groups[mix.group].change(examples.take(dealt[peer])),
            groups[mix.other].change(examples.take(dealt[num_peers + peer])),
        )
        mixed.append(_shuffle_together(parts, rng))
    return mixed


def _divide(totals: Counts, mixes: Sequence[_Mix]) -> Counts:
    """Return how many of each peer's total are of its group, then how many of the other group."""
    percents = np.array([mix.percent for mix in mixes])
    own = (totals * percents + 50) // 100
    return np.concatenate([own, totals - own])


def _greatest_total(mixes: Sequence[_Mix], drawers: Sequence[int], available: int) -> int:
    """Return how many examples every peer may have, in all, for these drawers' parts to last."""
    percents = [mix.percent for mix in mixes]
    shares = np.array([*percents, *(100 - percent for percent in percents)])[list(drawers)]
    # Rounding takes or gives each drawer half an example: begin above, and end soon.
    total = (100 * available + 50 * len(drawers)) // int(shares.sum())
    while _divide(np.full(len(mixes), total), mixes)[list(drawers)].sum() > available:
        total -= 1
    return total


def _train_totals(
    settings: PartitionSettings, dataset: Dataset, room: Counts, rng: np.random.Generator
) -> Counts:
    share, most = int(room.min()), settings.max_examples
    num_examples, num_peers = len(dataset.train), len(room)
    fact = f"{dataset.name} has {num_examples} training examples for {num_peers} peers that mix"
    check_enough(settings, share, fact)
    if not most:
        return room
    if most > share:
        advice = f"{fact}: lower it to at most {share}, or have fewer peers"
        raise impossible("max_examples", most, advice)
    return rng.integers(settings.min_examples or most, most, size=num_peers, endpoint=True)


def _test_totals(settings: PartitionSettings, room: Counts, _: np.random.Generator) -> Counts:
    return np.minimum(room, settings.test_examples) if settings.test_examples else room


def _shuffle_together(parts: Sequence[Examples], rng: np.random.Generator) -> Examples:
    order = rng.permutation(sum(map(len, parts)))
    return Examples(
        np.concatenate([part.inputs for part in parts])[order],
        np.concatenate([part.labels for part in parts])[order],
    )
