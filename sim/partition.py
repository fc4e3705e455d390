"""Assign the examples of a data set to peers, in ways that call for personalized models.

Peer i belongs to group `i * groups // num_peers`, so that groups are contiguous blocks of peers.
Whatever the kind, each example goes to at most one peer; while sizes are unbounded, each goes to
exactly one (only labels that no group holds are left out). The data set's own test part is assigned
by the same rules as its train part: a peer is tested on the distribution that it learns from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from peer.data import Dataset, Examples
from protocol.errors import ConfigError
from sim.deal import (
    Counts,
    Indices,
    Pool,
    count_shares,
    deal,
    deal_counts,
    draw_shares,
    even_shares,
)
from sim.groups import (
    MAX_DRAWS,
    check_images,
    check_label_groups,
    describe_labels,
    divide_labels,
    draw_label_tables,
    impossible,
    relabel,
    rotate,
)


class PartitionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How examples are assigned to peers.

    Raises:
        ConfigError: A value is impossible, whatever the data set.
    """

    kind: Literal["label_groups", "permuted", "rotated", "dirichlet", "iid"] = "label_groups"
    """What sets the groups apart. `label_groups` see different labels; `permuted` ones give the
    same images other labels; `rotated` ones see images turned by multiples of 360° / groups;
    `dirichlet` gives each peer its own random share of each label; `iid` sets nobody apart."""

    groups: int = 4
    """Number of groups of peers with one distribution each; dirichlet and iid don't use it."""

    labels_per_group: int = 0
    """label_groups: how many labels each group sees; 0 divides them evenly and disjointly."""

    overlap: int = 0
    """label_groups: how many of `labels_per_group` a group has in common with the next one. With
    5 and 3, and ten classes, four groups see 0-4, 2-6, 4-8 and 6-9 with 0. The more they share,
    the more there is to learn from others and the harder groups are to tell apart."""

    label_groups: tuple[tuple[int, ...], ...] = ()
    """label_groups: the labels of each group spelled out, `groups` of them, in place of the two
    settings above."""

    alpha: float = 0.5
    """dirichlet: concentration, above 0. Small values give each peer few labels, large ones the
    same mixture to all."""

    min_examples: int = 0
    """Least number of training examples of a peer, before its test and holdout parts are split
    off. 0: as `max_examples`; for dirichlet, 1."""

    max_examples: int = 0
    """Greatest number of training examples of a peer; each peer's number is drawn evenly from
    `min_examples` to this. 0: all there are, in equal shares. dirichlet draws its shares first and
    then keeps at most so many of each."""

    test_examples: int = 0
    """Greatest number of examples a peer gets of the data set's own test part. 0: all there are,
    in equal shares."""

    def __post_init__(self) -> None:
        counts = ("labels_per_group", "overlap", "min_examples", "max_examples", "test_examples")
        for name in ("groups", *counts):
            least = 1 if name == "groups" else 0
            if getattr(self, name) < least:
                raise impossible(name, getattr(self, name), f"it must be {least} or more")
        if not 0 < self.alpha < math.inf:
            raise impossible("alpha", self.alpha, "it must be above 0 and finite")
        if 0 < self.max_examples < self.min_examples:
            advice = f"lower it to at most max_examples = {self.max_examples}, or raise that"
            raise impossible("min_examples", self.min_examples, advice)
        if self.overlap and self.overlap >= self.labels_per_group:
            advice = f"it must be below labels_per_group = {self.labels_per_group}"
            raise impossible("overlap", self.overlap, advice)
        if self.label_groups and self.labels_per_group:
            advice = "leave it out, since label_groups spells the groups out"
            raise impossible("labels_per_group", self.labels_per_group, advice)
        if self.label_groups and len(self.label_groups) != self.groups:
            advice = f"set it to {len(self.label_groups)}, as many as label_groups has"
            raise impossible("groups", self.groups, advice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """What one peer gets.

    Attributes:
        dataset: Its train part, and its test part if the whole data set has one.
        group: The group whose distribution it has, from 0; in `iid` everyone is of group 0. In
            `dirichlet`, where no two distributions are alike, the label that most of its training
            examples have, which is an order to look at peers in and no more.
        description: The group in words, such as "labels 0-4" or "rotated 90°".
    """

    dataset: Dataset
    group: int
    description: str


def partition(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> list[Slice]:
    """Assign the examples of a data set to peers.

    Args:
        dataset: The whole; nothing in it is changed.
        num_peers: How many slices to make.
        settings: How.
        rng: Decides whatever is drawn; the same seed gives the same slices. Groups, train and test
            are drawn apart, so that another number of test examples changes nothing else.

    Returns:
        One slice for each peer, in the order of peers.

    Raises:
        ConfigError: The settings can't be met with this data set and so many peers.
        DataError: Images are to be rotated, and the inputs are none or not square.
    """
    if num_peers < 1:
        raise ConfigError(f"{num_peers} peers: there must be at least one")
    if settings.kind == "dirichlet":
        return _partition_dirichlet(dataset, num_peers, settings, rng)
    num_groups = 1 if settings.kind == "iid" else settings.groups
    if num_groups > num_peers:
        advice = f"lower it to at most {num_peers}, the number of peers, or add peers"
        raise impossible("groups", num_groups, advice)
    group_of = [peer * num_groups // num_peers for peer in range(num_peers)]
    group_rng, train_rng, test_rng = rng.spawn(3)
    groups = _make_groups(dataset, settings, group_rng)
    pools = _make_pools(groups, group_of)
    train = deal(dataset.train.labels, pools, functools.partial(_train_sizes, settings), train_rng)
    test: Mapping[int, Indices] | None = None
    if dataset.test is not None:
        sizes = functools.partial(_test_sizes, settings)
        test = deal(dataset.test.labels, pools, sizes, test_rng)
    return [
        Slice(
            dataset=_take(
                dataset, peer, train[peer], test[peer] if test else None, groups[group].change
            ),
            group=group,
            description=groups[group].description,
        )
        for peer, group in enumerate(group_of)
    ]


def _same(examples: Examples) -> Examples:
    return examples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One distribution: its labels (None for all) and what happens to its examples."""

    description: str
    labels: Sequence[int] | None = None
    change: Callable[[Examples], Examples] = _same


def _make_groups(
    dataset: Dataset, settings: PartitionSettings, rng: np.random.Generator
) -> list[_Group]:
    num_groups = settings.groups
    present = np.unique(dataset.train.labels).tolist()
    match settings.kind:
        case "label_groups":
            if settings.label_groups:
                label_groups = check_label_groups(settings.label_groups, present)
            else:
                label_groups = divide_labels(
                    present, num_groups, settings.labels_per_group, settings.overlap
                )
            return [
                _Group(description=describe_labels(labels), labels=labels)
                for labels in label_groups
            ]
        case "permuted":
            tables = draw_label_tables(present, dataset.num_classes, num_groups, rng)
            return [
                _Group(
                    description=f"permutation {group}",
                    change=functools.partial(relabel, table=table),
                )
                for group, table in enumerate(tables)
            ]
        case "rotated":
            check_images(dataset, num_groups)
            return [
                _Group(
                    description=f"rotated {360 * group / num_groups:g}°",
                    change=functools.partial(rotate, group=group, groups=num_groups),
                )
                for group in range(num_groups)
            ]
        case "iid" | "dirichlet":
            return [_Group(description="iid")]


def _make_pools(groups: Sequence[_Group], group_of: Sequence[int]) -> list[Pool]:
    if groups[0].labels is None:  # all groups draw from everything, and change it afterwards
        return [Pool(name="the data set", peers=range(len(group_of)), labels=None)]
    return [
        Pool(
            name=f"group {index} ({group.description})",
            peers=[peer for peer, own in enumerate(group_of) if own == index],
            labels=frozenset(group.labels or ()),
        )
        for index, group in enumerate(groups)
    ]


def _train_sizes(
    settings: PartitionSettings, pool: Pool, available: int, rng: np.random.Generator
) -> Counts:
    num_peers, most = len(pool.peers), settings.max_examples
    _check_enough(settings, pool.name, available, num_peers)
    if not most:
        return even_shares(available, num_peers)
    # Refused even if the draw could turn out well: a run must not depend on a lucky seed.
    if most * num_peers > available:
        advice = (
            f"{pool.name} has {available} training examples for {num_peers} peers: lower it to at "
            f"most {available // num_peers}, or have fewer peers"
        )
        raise impossible("max_examples", most, advice)
    return rng.integers(settings.min_examples or most, most, size=num_peers, endpoint=True)


def _check_enough(settings: PartitionSettings, whose: str, available: int, num_peers: int) -> None:
    """Refuse an equal share that is empty or below the least that a peer shall have."""
    share, least = available // num_peers, settings.min_examples
    if share >= max(least, 1):
        return
    fact = f"{whose} has {available} training examples for {num_peers} peers"
    if not least or not share:
        raise ConfigError(f"{fact}: have fewer peers, or more data")
    advice = f"{fact}: lower it to at most {share}, or have fewer peers"
    raise impossible("min_examples", least, advice)


def _test_sizes(
    settings: PartitionSettings, pool: Pool, available: int, _: np.random.Generator
) -> Counts:
    shares = even_shares(available, len(pool.peers))
    return np.minimum(shares, settings.test_examples) if settings.test_examples else shares


def _take(
    dataset: Dataset,
    peer: int,
    train: Indices,
    test: Indices | None,
    change: Callable[[Examples], Examples] = _same,
) -> Dataset:
    own_test = None
    if dataset.test is not None and test is not None:
        own_test = change(dataset.test.take(test))
    return Dataset(
        name=f"{dataset.name}, peer {peer}",
        train=change(dataset.train.take(train)),
        test=own_test,
        num_classes=dataset.num_classes,
    )


def _partition_dirichlet(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> list[Slice]:
    share_rng, train_rng, test_rng = rng.spawn(3)
    shares = _draw_enough(dataset, num_peers, settings, share_rng)
    labels = dataset.train.labels
    train = deal_counts(labels, count_shares(labels, shares), train_rng)
    if most := settings.max_examples:
        least = max(settings.min_examples, 1)
        sizes = train_rng.integers(least, most, size=num_peers, endpoint=True)
        train = [own[:size] for own, size in zip(train, sizes, strict=True)]
    test: list[Indices | None] = [None] * num_peers
    if dataset.test is not None:
        counts = count_shares(dataset.test.labels, shares)
        cap = settings.test_examples or None
        test = [own[:cap] for own in deal_counts(dataset.test.labels, counts, test_rng)]
    slices = []
    for peer in range(num_peers):
        part = _take(dataset, peer, train[peer], test[peer])
        frequency = np.bincount(part.train.labels)
        label, percent = int(frequency.argmax()), 100 * frequency.max() / frequency.sum()
        description = f"mostly label {label} ({percent:.0f} %)"
        slices.append(Slice(dataset=part, group=label, description=description))
    return slices


def _draw_enough(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Draw shares, shape (num_classes, num_peers), that leave no peer with too few examples."""
    labels = dataset.train.labels
    _check_enough(settings, dataset.name, len(labels), num_peers)
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
