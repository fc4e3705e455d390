"""What sets groups of peers apart: the labels they see, or how their examples are changed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peer.data import Dataset, Examples
from protocol.errors import DataError
from sim.deal import Pool
from sim.partition_settings import PartitionSettings, impossible
from sim.slices import unchanged

MAX_DRAWS = 100
"""How often a random draw that breaks a condition is repeated before that is an error."""

_Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One distribution.

    Attributes:
        description: In words, such as "labels 0-4" or "rotated 90°".
        labels: The labels it has; None for all.
        change: What happens to its examples.
    """

    description: str
    labels: Sequence[int] | None = None
    change: Callable[[Examples], Examples] = unchanged


def place_peers(settings: PartitionSettings, num_peers: int) -> list[int]:
    """Return the group of each peer; groups are contiguous blocks of peers.

    Raises:
        ConfigError: There are more groups than peers, or their sizes don't add up to all.
    """
    match settings.kind:
        case "iid":
            num_groups = 1
        case "continuum":
            num_groups = num_peers
        case _:
            num_groups = settings.groups
    if num_groups > num_peers:
        advice = f"lower it to at most {num_peers}, the number of peers, or add peers"
        raise impossible("groups", num_groups, advice)
    if not settings.group_sizes:
        return [peer * num_groups // num_peers for peer in range(num_peers)]
    if (total := sum(settings.group_sizes)) != num_peers:
        advice = f"they add up to {total}, and there are {num_peers} peers: make the two equal"
        raise impossible("group_sizes", list(settings.group_sizes), advice)
    return np.repeat(np.arange(num_groups), settings.group_sizes).tolist()


def make_groups(
    dataset: Dataset, settings: PartitionSettings, num_groups: int, rng: np.random.Generator
) -> list[Group]:
    """Return what the groups are; iid has one of everything. `rng` draws permutations.

    Raises:
        ConfigError: The data have too few labels, or not those that were spelled out.
        DataError: Images are to be rotated, and the inputs are none or not square.
    """
    present = np.unique(dataset.train.labels).tolist()
    match settings.base if settings.kind == "mixture" else settings.kind:
        case "label_groups":
            return [
                Group(description=describe_labels(labels), labels=labels)
                for labels in _choose_labels(present, settings)
            ]
        case "permuted":
            tables = draw_label_tables(present, dataset.num_classes, num_groups, rng)
            return [
                Group(
                    description=f"permutation {group}",
                    change=functools.partial(relabel, table=table),
                )
                for group, table in enumerate(tables)
            ]
        case "rotated" | "continuum":
            check_images(dataset, num_groups)
            return [
                Group(
                    description=f"rotated {360 * group / num_groups:g}°",
                    change=functools.partial(rotate, group=group, groups=num_groups),
                )
                for group in range(num_groups)
            ]
        case _:
            return [Group(description="iid")]


def make_pools(groups: Sequence[Group], group_of: Sequence[int]) -> list[Pool]:
    """Return from which examples those who sit in these groups draw.

    Args:
        groups: The distributions.
        group_of: The group of each who draws: of every peer, and once more of a peer that draws
            from two groups.
    """
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


def _choose_labels(present: Sequence[int], settings: PartitionSettings) -> list[list[int]]:
    if settings.label_groups:
        return check_label_groups(settings.label_groups, present)
    return divide_labels(present, settings.groups, settings.labels_per_group, settings.overlap)


def describe_labels(labels: Sequence[int]) -> str:
    """Return labels with runs drawn together, such as "labels 0-2, 5"."""
    runs: list[list[int]] = []
    for label in sorted(labels):
        if runs and label == runs[-1][-1] + 1:
            runs[-1].append(label)
        else:
            runs.append([label])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ("label " if len(labels) == 1 else "labels ") + ", ".join(texts)


def divide_labels(
    present: Sequence[int], groups: int, labels_per_group: int, overlap: int
) -> list[list[int]]:
    """Give each group its labels: evenly and disjointly, or as overlapping runs around a ring.

    Args:
        present: The labels there are, ascending.
        groups: Number of groups.
        labels_per_group: Length of each run; 0 divides `present` evenly.
        overlap: How many labels a group has in common with the next.

    Raises:
        ConfigError: There are too few labels.
    """
    if not labels_per_group:
        if groups > len(present):
            raise impossible(
                "groups",
                groups,
                f"lower it to at most {len(present)}, the number of labels that the data have, or "
                "set labels_per_group and overlap",
            )
        return [part.tolist() for part in np.array_split(np.asarray(present), groups)]
    stride = labels_per_group - overlap
    needed = max(labels_per_group, groups * stride)
    if needed > len(present):
        raise impossible(
            "labels_per_group",
            labels_per_group,
            f"{groups} groups with overlap = {overlap} need {needed} labels, and the data have "
            f"{len(present)}: lower it or groups, or raise overlap",
        )
    return [
        [present[(group * stride + place) % len(present)] for place in range(labels_per_group)]
        for group in range(groups)
    ]


def check_label_groups(
    label_groups: Sequence[Sequence[int]], present: Sequence[int]
) -> list[list[int]]:
    """Return label groups that the user spelled out, if they make sense.

    Raises:
        ConfigError: A group is empty, repeats a label, equals another, or has a label that no
            training example has.
    """
    seen: dict[frozenset[int], int] = {}
    for group, labels in enumerate(label_groups):
        value = f"[… {list(labels)} …]"
        if not labels or len(set(labels)) < len(labels):
            raise impossible(
                "label_groups", value, f"group {group} must name at least one label, each once"
            )
        if absent := sorted(set(labels) - set(present)):
            raise impossible(
                "label_groups", value, f"no training example has label {absent[0]}: leave it out"
            )
        twin = seen.setdefault(frozenset(labels), group)
        if twin != group:
            raise impossible(
                "label_groups", value, f"groups {twin} and {group} are alike: make them one"
            )
    return [list(labels) for labels in label_groups]


def draw_label_tables(
    present: Sequence[int], num_classes: int, groups: int, rng: np.random.Generator
) -> list[_Labels]:
    """Draw a permutation of the labels for each group, no two alike; the first changes nothing.

    Args:
        present: The labels to permute, ascending; others stay as they are.
        num_classes: Number of classes.
        groups: Number of permutations.
        rng: Draws them.

    Returns:
        For each group the new label by old label, shape (num_classes,).

    Raises:
        ConfigError: So few labels have fewer permutations than there are groups.
    """
    num_orders = math.factorial(len(present))
    if groups > num_orders:
        raise impossible(
            "groups",
            groups,
            f"{len(present)} labels have only {num_orders} permutations: lower it to at most that",
        )
    identity = tuple(range(len(present)))
    orders = {identity: None}  # a dict, for its order
    if len(present) <= 7:  # few enough to choose among, and to repeat often when drawn blindly
        every = list(itertools.permutations(identity))
        for rank in rng.choice(num_orders - 1, groups - 1, replace=False):
            orders[every[rank + 1]] = None
    for _ in range(MAX_DRAWS * groups):
        if len(orders) == groups:
            break
        orders[tuple(rng.permutation(len(present)).tolist())] = None
    else:
        raise impossible("groups", groups, "too many to draw distinct permutations for: lower it")
    tables = []
    for order in orders:
        table = np.arange(num_classes)
        table[list(present)] = np.asarray(present)[list(order)]
        tables.append(table)
    return tables


def relabel(examples: Examples, table: _Labels) -> Examples:
    """Return the examples under other labels: `table[old]` is the new one."""
    return Examples(examples.inputs, table[examples.labels])


def check_images(dataset: Dataset, groups: int) -> None:
    """Refuse data that can't be rotated for so many groups.

    Raises:
        DataError: Inputs are no images, or not square ones while more than two angles are asked
            for.
    """
    shape = dataset.input_shape
    if len(shape) < 2 or (groups > 2 and shape[-2] != shape[-1]):
        square = "square " if groups > 2 else ""
        raise DataError(
            f"{dataset.name}: inputs of shape {shape} can't be rotated for {groups} groups, which "
            f"takes {square}images, (channels, height, width): set partition.kind to another, or "
            "partition.base of a mixture"
        )


def rotate(examples: Examples, group: int, groups: int) -> Examples:
    """Return the images turned counterclockwise by `group / groups` of a full turn.

    Quarter turns move pixels and are exact; other angles interpolate linearly, with zeros around
    the image.
    """
    images = examples.inputs  # (num_examples, ..., height, width)
    if 4 * group % groups == 0:
        turned = np.rot90(images, 4 * group // groups, axes=(-2, -1))
    else:
        turned = _turn(images, 2 * math.pi * group / groups)
    return Examples(np.ascontiguousarray(turned), examples.labels)


def _turn(images: npt.NDArray[np.float32], angle: float) -> npt.NDArray[np.float32]:
    size = images.shape[-1]
    middle = (size - 1) / 2
    y, x = np.mgrid[:size, :size] - middle  # from the middle; y points down
    # Where each pixel of the result comes from, in an image with a border of one zero pixel.
    row = np.clip(math.cos(angle) * y + math.sin(angle) * x + middle + 1, 0, size + 1)
    column = np.clip(math.cos(angle) * x - math.sin(angle) * y + middle + 1, 0, size + 1)
    bordered = np.pad(images, [(0, 0)] * (images.ndim - 2) + [(1, 1), (1, 1)])
    top = np.minimum(row.astype(np.intp), size)
    left = np.minimum(column.astype(np.intp), size)
    turned = np.zeros_like(images)
    for down, row_share in ((0, 1 - (row - top)), (1, row - top)):
        for right, column_share in ((0, 1 - (column - left)), (1, column - left)):
            share = (row_share * column_share).astype(np.float32)
            turned += share * bordered[..., top + down, left + right]
    return turned
