"""The settings of a partition, and the errors of those that can't be met."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from protocol.errors import ConfigError

Kind = Literal[
    "label_groups",
    "permuted",
    "rotated",
    "continuum",
    "mixture",
    "dirichlet",
    "pathological",
    "natural",
    "iid",
]

_DRIFTABLE = ("label_groups", "permuted", "rotated")
_SIZEABLE = (*_DRIFTABLE, "mixture")


def impossible(setting: str, value: object, advice: str) -> ConfigError:
    """Return the error for a partition setting that can't be met."""
    return ConfigError(f"partition.{setting} = {value}: {advice}")


class PartitionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How examples are assigned to peers.

    Raises:
        ConfigError: A value is impossible, whatever the data set.
    """

    kind: Kind = "label_groups"
    """What sets peers apart. `label_groups`: groups of peers see different labels. `permuted`:
    groups give the same images other labels. `rotated`: groups see images turned by multiples of
    360° / groups. `continuum`: every peer is a group of its own, so that peer i's images are turned
    by i · 360° / peers. `mixture`: each peer mixes the examples of two groups in its own
    proportion. `dirichlet`: each peer has its own random share of each label. `pathological`: each
    peer has a few shards of the examples sorted by label. `natural`: each peer is one of the owners
    that a data set has by nature, such as a speaking role. `iid` sets nobody apart."""

    groups: int = 4
    """Number of groups of peers with one distribution each; continuum, dirichlet, pathological,
    natural and iid don't use it."""

    group_sizes: tuple[int, ...] = ()
    """label_groups, permuted, rotated, mixture: number of peers in each of the `groups`, which must
    add up to all; empty makes groups of equal size. A lone peer has nobody to learn from, and
    must not be harmed by the many."""

    drifting: int = 0
    """label_groups, permuted, rotated: how many peers change their group half-way, as evenly from
    all groups as it goes. What they have afterwards is dealt out as if to so many more peers."""

    base: Literal["rotated", "permuted", "label_groups"] = "rotated"
    """mixture: what sets the groups apart whose examples are mixed. A mixture of permutations
    gives one image two labels, which no model can tell apart."""

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

    shards_per_peer: int = 2
    """pathological: how many shards each peer gets; the fewer, the fewer labels it sees. The
    original has 2."""

    min_examples: int = 0
    """Least number of training examples of a peer, before its test and holdout parts are split
    off. 0: as `max_examples`; for dirichlet and natural, 1."""

    max_examples: int = 0
    """Greatest number of training examples of a peer; each peer's number is drawn evenly from
    `min_examples` to this. 0: all there are, in equal shares. dirichlet and pathological draw their
    shares first and then keep at most so many of each, natural of what each owner has."""

    test_examples: int = 0
    """Greatest number of examples a peer gets of the data set's own test part. 0: all there are,
    in equal shares."""

    def __post_init__(self) -> None:
        counts = ("drifting", "labels_per_group", "overlap", "min_examples", "max_examples")
        for name in ("groups", "shards_per_peer", *counts, "test_examples"):
            least = 1 if name in ("groups", "shards_per_peer") else 0
            if getattr(self, name) < least:
                raise impossible(name, getattr(self, name), f"it must be {least} or more")
        if not 0 < self.alpha < math.inf:
            raise impossible("alpha", self.alpha, "it must be above 0 and finite")
        if 0 < self.max_examples < self.min_examples:
            advice = f"lower it to at most max_examples = {self.max_examples}, or raise that"
            raise impossible("min_examples", self.min_examples, advice)
        self._check_labels()
        self._check_groups()

    def _check_labels(self) -> None:
        if self.overlap and self.overlap >= self.labels_per_group:
            advice = f"it must be below labels_per_group = {self.labels_per_group}"
            raise impossible("overlap", self.overlap, advice)
        if self.label_groups and self.labels_per_group:
            advice = "leave it out, since label_groups spells the groups out"
            raise impossible("labels_per_group", self.labels_per_group, advice)
        if self.label_groups and len(self.label_groups) != self.groups:
            advice = f"set it to {len(self.label_groups)}, as many as label_groups has"
            raise impossible("groups", self.groups, advice)

    def _check_groups(self) -> None:
        if self.group_sizes:
            self._check_use("group_sizes", list(self.group_sizes), _SIZEABLE)
            if len(self.group_sizes) != self.groups:
                advice = f"set it to {len(self.group_sizes)}, as many as group_sizes has"
                raise impossible("groups", self.groups, advice)
            if min(self.group_sizes) < 1:
                advice = "a group has at least one peer: leave empty ones out and lower groups"
                raise impossible("group_sizes", list(self.group_sizes), advice)
        if self.drifting:
            self._check_use("drifting", self.drifting, _DRIFTABLE)
        if self.groups < 2 and (self.drifting or self.kind == "mixture"):
            whose = "peers can't change their group" if self.drifting else "nothing can be mixed"
            raise impossible("groups", self.groups, f"with one alone {whose}: set it to 2 or more")

    def _check_use(self, setting: str, value: object, kinds: tuple[str, ...]) -> None:
        if self.kind not in kinds:
            advice = f"{self.kind} has no use for it: leave it out, or set kind to {kinds[0]}, "
            raise impossible(setting, value, f"{advice}{', '.join(kinds[1:-1])} or {kinds[-1]}")
