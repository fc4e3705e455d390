"""Regimes: each has a partition, with the sizes of one's own."""

from __future__ import annotations

import tomllib

import msgspec
import numpy as np
import pytest
import tomli_w

from peer.sources import load_source
from protocol.errors import ConfigError
from sim.partition import PartitionSettings, partition
from sim.regimes import REGIMES, SIZES, regime_settings

OWN = PartitionSettings(
    kind="iid", groups=2, alpha=7.0, min_examples=5, max_examples=50, test_examples=11
)


def test_the_regimes_are_those_of_the_comparison() -> None:
    assert list(REGIMES) == [
        "disjoint",
        "overlap",
        "permuted",
        "rotated",
        "dirichlet",
        "pathological",
        "mixture",
        "unbalanced",
        "drift",
        "continuum",
    ]


@pytest.mark.parametrize("name", REGIMES)
def test_a_regime_takes_its_sizes_from_the_config_and_the_rest_from_itself(name: str) -> None:
    settings = msgspec.to_builtins(regime_settings(name, OWN))

    expected = msgspec.to_builtins(msgspec.convert(REGIMES[name], PartitionSettings))
    own = msgspec.to_builtins(OWN)
    assert settings == {**expected, **{size: own[size] for size in SIZES}}


@pytest.mark.parametrize("name", REGIMES)
def test_a_regime_can_be_said_in_a_config(name: str) -> None:
    table = tomllib.loads(tomli_w.dumps(REGIMES[name]))

    assert msgspec.convert(table, PartitionSettings) == regime_settings(name, PartitionSettings())


def test_no_two_regimes_are_alike() -> None:
    assert len({regime_settings(name, OWN) for name in REGIMES}) == len(REGIMES)


@pytest.mark.parametrize("name", REGIMES)
def test_sixteen_peers_get_the_examples_that_were_asked_for_in_every_regime(name: str) -> None:
    slices = partition(
        load_source("digits"), 16, regime_settings(name, OWN), np.random.default_rng(0)
    )

    train, test = [], []
    for one in slices:
        for own in (one.dataset, one.later):
            if own is not None and own.test is not None:
                train.append(len(own.train))
                test.append(len(own.test))
    assert len(train) == (20 if name == "drift" else 16)
    assert 5 <= min(train) < max(train) <= 50
    assert max(test) == 11
    if name != "dirichlet":  # whose shares of a small test part may be smaller
        assert min(test) == 11


def test_a_slip_of_the_pen_is_answered_with_the_regime_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="unknown regime unbalanced2; did you mean unbalanced"):
        regime_settings("unbalanced2", OWN)


def test_an_unknown_regime_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown regime xyz; known are disjoint, overlap, "):
        regime_settings("xyz", OWN)
