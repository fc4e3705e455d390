"""Make a peer of each of some owners that a data set has by nature, such as speaking roles."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peer.data import Dataset
from protocol.errors import ConfigError
from sim.deal import Indices
from sim.partition_settings import PartitionSettings, impossible
from sim.slices import Slice, take


def partition_natural(
    dataset: Dataset, num_peers: int, settings: PartitionSettings, rng: np.random.Generator
) -> list[Slice]:
    """Draw owners and give each peer the examples of one.

    Owners that are too small for the settings, or have no test example where the data set has a
    test part, aren't drawn. Of the others all are equally likely, whatever their size. Peers are in
    the order of their owners' groups, then of the owners.

    Args:
        dataset: The whole; it must know the owners of its examples.
        num_peers: How many owners to draw.
        settings: An owner must have `min_examples` training examples, 0 standing for 1, and keeps
            at most `max_examples` of them and `test_examples` for testing, drawn at random, 0
            standing for all.
        rng: Decides which owners and which of their examples.

    Returns:
        One slice for each peer; its group is its owner's, or 0 where owners have none.

    Raises:
        ConfigError: The data set knows no owners, or too few are large enough.
    """
    if dataset.train_owners is None:
        raise impossible(
            "kind",
            settings.kind,
            f"nobody owns the examples of {dataset.name}: use it with shakespeare, or set another",
        )
    num_owners = len(dataset.owner_names)
    train = _by_owner(dataset.train_owners, num_owners)
    test = None if dataset.test_owners is None else _by_owner(dataset.test_owners, num_owners)
    owner_rng, train_rng, test_rng = rng.spawn(3)
    slices = []
    for peer, owner in enumerate(
        _draw_owners(dataset, train, test, num_peers, settings, owner_rng)
    ):
        part = take(
            dataset,
            f"peer {peer}",
            _draw(train[owner], settings.max_examples, train_rng),
            None if test is None else _draw(test[owner], settings.test_examples, test_rng),
        )
        group, name = _group(dataset, owner), dataset.owner_names[owner]
        slices.append(Slice(dataset=part, group=group, description=name))
    return slices


def _by_owner(owners: npt.NDArray[np.int64], num_owners: int) -> list[Indices]:
    """Return the positions of each owner's examples."""
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=num_owners))
    return np.split(order, ends[:-1])


def _draw_owners(
    dataset: Dataset,
    train: list[Indices],
    test: list[Indices] | None,
    num_peers: int,
    settings: PartitionSettings,
    rng: np.random.Generator,
) -> list[int]:
    least = max(settings.min_examples, 1)
    able = [
        owner
        for owner, own in enumerate(train)
        if len(own) >= least and (test is None or len(test[owner]))
    ]
    if len(able) < num_peers:
        fact = (
            f"only {len(able)} of {len(train)} owners in {dataset.name} have {least} training "
            f"examples or more, {'' if test is None else 'and one for testing, '}and there are "
            f"{num_peers} peers"
        )
        if least == 1:
            raise ConfigError(f"{fact}: have fewer peers, or more data")
        raise impossible("min_examples", least, f"{fact}: lower it, or have fewer peers")
    drawn = rng.choice(able, size=num_peers, replace=False).tolist()
    return sorted(drawn, key=lambda owner: (_group(dataset, owner), owner))


def _group(dataset: Dataset, owner: int) -> int:
    return dataset.owner_groups[owner] if dataset.owner_groups else 0


def _draw(own: Indices, most: int, rng: np.random.Generator) -> Indices:
    return rng.permutation(own)[: most or None]
