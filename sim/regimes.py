"""The regimes to compare methods in, by name: what their partitions are."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from protocol.errors import ConfigError
from sim.partition_settings import PartitionSettings

SIZES = ("min_examples", "max_examples", "test_examples")
"""What a regime leaves to the config: how much data peers have, not what sets them apart."""

REGIMES: Mapping[str, Mapping[str, Any]] = {
    "disjoint": {"kind": "label_groups", "groups": 4},
    "overlap": {"kind": "label_groups", "groups": 4, "labels_per_group": 5, "overlap": 3},
    "permuted": {"kind": "permuted", "groups": 4},
    "rotated": {"kind": "rotated", "groups": 4},
    "dirichlet": {"kind": "dirichlet", "alpha": 0.3},
    "pathological": {"kind": "pathological", "shards_per_peer": 2},
    "mixture": {"kind": "mixture", "groups": 4, "base": "rotated"},
    "unbalanced": {"kind": "rotated", "groups": 4, "group_sizes": (1, 2, 5, 8)},
    "drift": {"kind": "rotated", "groups": 4, "drifting": 4},
    "continuum": {"kind": "continuum"},
}
"""Each regime's partition, as a config's `[partition]` would say it."""


def regime_settings(name: str, base: PartitionSettings) -> PartitionSettings:
    """Return the partition of a regime, with the sizes of a config's own partition.

    Args:
        name: A key of `REGIMES`.
        base: The config's; only its `SIZES` count.

    Raises:
        ConfigError: There is no such regime.
    """
    if name not in REGIMES:
        close = difflib.get_close_matches(name, REGIMES, n=1)
        known = f"known are {', '.join(REGIMES)}; others are sections of a config, [regime.NAME]"
        advice = f"did you mean {close[0]}?" if close else known
        raise ConfigError(f"unknown regime {name}; {advice}")
    sizes = {size: getattr(base, size) for size in SIZES}
    return msgspec.convert({**REGIMES[name], **sizes}, PartitionSettings)
