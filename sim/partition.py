"""Assign the examples of a data set to peers, in ways that call for personalized models.

Groups are contiguous blocks of peers: of equal size, where peer i belongs to group
`i * groups // num_peers`, or of sizes spelled out. Whatever the kind, each example goes to at most
one peer; while sizes are unbounded, each goes to exactly one (left out are labels that no group
holds, and what a mixture or a drift can't use without breaking its proportions). The data set's own
test part is assigned by the same rules as its train part: a peer is tested on the distribution that
it learns from.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from peer.data import Dataset
from protocol.errors import ConfigError
from sim.deal import Counts, Indices, Pool, deal, even_shares
from sim.groups import make_groups, make_pools, place_peers
from sim.mixture import partition_mixture
from sim.natural import partition_natural
from sim.partition_settings import PartitionSettings, impossible
from sim.shares import partition_dirichlet, partition_pathological
from sim.slices import Slice, check_enough, take

__all__ = ["PartitionSettings", "Slice", "partition"]


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
    match settings.kind:
        case "dirichlet":
            return partition_dirichlet(dataset, num_peers, settings, rng)
        case "pathological":
            return partition_pathological(dataset, num_peers, settings, rng)
        case "mixture":
            return partition_mixture(dataset, num_peers, settings, rng)
        case "natural":
            return partition_natural(dataset, num_peers, settings, rng)
        case "label_groups" | "permuted" | "rotated" | "continuum" | "iid":
            return _partition_groups(dataset, num_peers, settings, rng)


def _partition_groups(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> list[Slice]:
    group_of = place_peers(settings, num_peers)
    group_rng, train_rng, test_rng = rng.spawn(3)
    groups = make_groups(dataset, settings, len(set(group_of)), group_rng)
    later_group = _draw_drift(group_of, settings.drifting, group_rng)
    # A drifting peer draws its later examples as if it were one more peer, of the other group.
    pools = make_pools(groups, [*group_of, *later_group.values()])
    drawn_as = {peer: num_peers + place for place, peer in enumerate(later_group)}
    train_sizes = functools.partial(_train_sizes, settings, num_peers)
    train = _level(deal(dataset.train.labels, pools, train_sizes, train_rng), drawn_as)
    test: Mapping[int, Indices] | None = None
    if dataset.test is not None:
        test_sizes = functools.partial(_test_sizes, settings)
        test = _level(deal(dataset.test.labels, pools, test_sizes, test_rng), drawn_as)

    def part(number: int, whose: str, group: int) -> Dataset:
        own_test = test[number] if test else None
        return take(dataset, whose, train[number], own_test, groups[group].change)

    return [
        Slice(
            dataset=part(peer, f"peer {peer}", group),
            group=group,
            description=groups[group].description,
            later=part(drawn_as[peer], f"peer {peer}, later", later_group[peer])
            if peer in later_group
            else None,
            later_group=later_group.get(peer),
        )
        for peer, group in enumerate(group_of)
    ]


def _draw_drift(group_of: Sequence[int], drifting: int, rng: np.random.Generator) -> dict[int, int]:
    """Draw which peers drift; return the later group of each.

    Every pass over the groups takes a peer from each and moves it on by the same number of groups,
    so that whole passes leave groups as large as they were.
    """
    num_peers, num_groups = len(group_of), len(set(group_of))
    if drifting > num_peers:
        advice = f"lower it to at most {num_peers}, the number of peers, or add peers"
        raise impossible("drifting", drifting, advice)
    staying: list[list[int]] = [[] for _ in range(num_groups)]
    for peer in rng.permutation(num_peers).tolist():
        staying[group_of[peer]].append(peer)
    later_group: dict[int, int] = {}
    while len(later_group) < drifting:
        step = int(rng.integers(1, num_groups))
        for group in rng.permutation(num_groups).tolist():
            if staying[group] and len(later_group) < drifting:
                later_group[staying[group].pop()] = (group + step) % num_groups
    return later_group


def _level(dealt: Mapping[int, Indices], drawn_as: Mapping[int, int]) -> dict[int, Indices]:
    """Leave each drifting peer as many examples before the change as after it."""
    leveled = dict(dealt)
    for peer, number in drawn_as.items():
        size = min(len(dealt[peer]), len(dealt[number]))
        leveled[peer], leveled[number] = dealt[peer][:size], dealt[number][:size]
    return leveled


def _train_sizes(
    settings: PartitionSettings,
    num_peers: int,
    pool: Pool,
    available: int,
    rng: np.random.Generator,
) -> Counts:
    drawers, most = np.asarray(pool.peers), settings.max_examples
    num_later = int((drawers >= num_peers).sum())
    fact = f"{pool.name} has {available} training examples for {len(drawers) - num_later} peers"
    if num_later:
        fact += f" and the later data of {num_later}"
    check_enough(settings, available // len(drawers), fact)
    if not most:
        return even_shares(available, len(drawers))
    # Refused even if the draw could turn out well: a run must not depend on a lucky seed.
    if most * len(drawers) > available:
        advice = f"{fact}: lower it to at most {available // len(drawers)}, or have fewer peers"
        raise impossible("max_examples", most, advice)
    drawn = rng.integers(settings.min_examples or most, most, size=len(drawers), endpoint=True)
    return np.where(drawers < num_peers, drawn, most)  # later data are leveled with what was drawn


def _test_sizes(
    settings: PartitionSettings, pool: Pool, available: int, _: np.random.Generator
) -> Counts:
    shares = even_shares(available, len(pool.peers))
    return np.minimum(shares, settings.test_examples) if settings.test_examples else shares
