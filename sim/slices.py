"""The slice of a data set that one peer gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peer.data import Dataset, Examples
from protocol.errors import ConfigError
from sim.deal import Indices
from sim.partition_settings import PartitionSettings, impossible


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """What one peer gets.

    Attributes:
        dataset: Its train part, and its test part if the whole data set has one; of a drifting
            peer, what it has before the change.
        group: The group whose distribution it has, from 0; in `iid` everyone is of group 0, in
            `continuum` everyone of its own, in `mixture` it is the group that dominates. In
            `dirichlet` and `pathological`, where no two distributions need be alike, the label that
            most of its training examples have, which is an order to look at peers in and no more.
        description: The group in words, such as "labels 0-4" or "rotated 90°"; where peers of one
            group differ, the peer's own distribution.
        later: Of a drifting peer, what it has after the change: other examples, as many as before,
            of the group `later_group`. None: nothing changes.
        later_group: The group after the change; None: nothing changes.
    """

    dataset: Dataset
    group: int
    description: str
    later: Dataset | None = None
    later_group: int | None = None


def unchanged(examples: Examples) -> Examples:
    """Return the examples as they are."""
    return examples


def take(
    dataset: Dataset,
    whose: str,
    train: Indices,
    test: Indices | None,
    change: Callable[[Examples], Examples] = unchanged,
) -> Dataset:
    """Return the examples at these positions, changed as those of a group are.

    Args:
        dataset: The whole.
        whose: Names the part, such as "peer 3".
        train: Positions in its train part.
        test: Positions in its test part; None when it has none.
        change: What happens to the examples.
    """
    own_test = None
    if dataset.test is not None and test is not None:
        own_test = change(dataset.test.take(test))
    return Dataset(
        name=f"{dataset.name}, {whose}",
        train=change(dataset.train.take(train)),
        test=own_test,
        num_classes=dataset.num_classes,
    )


def check_enough(settings: PartitionSettings, share: int, fact: str) -> None:
    """Refuse a share that is empty or below the least that a peer shall have.

    Args:
        settings: Whose `min_examples` counts.
        share: Training examples of the peer that gets fewest.
        fact: Why there aren't more, such as "the data set has 3 training examples for 4 peers".

    Raises:
        ConfigError: There are too few.
    """
    least = settings.min_examples
    if share >= max(least, 1):
        return
    if not least or not share:
        raise ConfigError(f"{fact}: have fewer peers, or more data")
    raise impossible(
        "min_examples", least, f"{fact}: lower it to at most {share}, or have fewer peers"
    )
