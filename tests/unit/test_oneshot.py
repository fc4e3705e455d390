"""Who belongs together, by where models went from where all started."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from peer.gathering import MOST_TIMES, bounded_sizes
from peer.oneshot import group
from protocol.errors import ConfigError
from protocol.messages import PeerId
from protocol.tensors import Layout, Tensors, TensorSpec

LAYOUT = Layout([TensorSpec("w", "f32", (40,)), TensorSpec("seen", "i64", (), trainable=False)])
INITIAL = Tensors.of(LAYOUT, {"w": np.ones(40, np.float32), "seen": np.int64(0)})


def model(update: np.ndarray, seen: int = 0) -> Tensors:
    return Tensors.of(
        LAYOUT, {"w": np.float32(1) + update.astype(np.float32), "seen": np.int64(seen)}
    )


def models(count: int = 8, seed: int = 0) -> dict[PeerId, Tensors]:
    """Two groups, interleaved, whose members went far and near in noisy common directions."""
    rng = np.random.default_rng(seed)
    ways = rng.normal(size=(2, 40))
    return {
        PeerId(f"{number:032x}"): model(
            rng.uniform(0.01, 10) * (ways[number % 2] + 0.3 * rng.normal(size=40)), seen=number
        )
        for number in range(count)
    }


@pytest.mark.parametrize(
    ("clustering", "number"), [("linkage", 0), ("kmeans", 2), ("kmeans", 0), ("gradient", 2)]
)
def test_groups_are_found_by_direction_however_far_their_members_went(clustering, number):
    groups, _ = group(models(), INITIAL, clustering=clustering, num_clusters=number)
    assert list(groups.labels.values()) == [0, 1] * 4
    first = PeerId(f"{0:032x}")
    assert groups.others_of(first) == tuple(PeerId(f"{n:032x}") for n in (2, 4, 6))


def test_everybody_finds_the_same_in_whatever_order_models_came():
    ours = models()
    theirs = dict(reversed(ours.items()))
    one, other = (group(each, INITIAL, clustering="kmeans") for each in (ours, theirs))
    assert one == other
    groups, note = one
    assert note.endswith(groups.digest)
    moved = {**ours, min(ours): ours[sorted(ours)[1]]}
    assert group(moved, INITIAL, clustering="kmeans")[0].digest != groups.digest


def test_a_model_that_is_not_finite_is_left_alone_by_name():
    broken = models()
    name = sorted(broken)[3]
    broken[name] = model(np.full(40, np.nan))
    groups, note = group(broken, INITIAL, clustering="linkage")
    assert groups.others_of(name) == ()
    assert len(groups.others_of(sorted(broken)[1])) == 2
    assert name in note


def test_an_absurd_model_draws_nobody_near():
    absurd = models()
    name = sorted(absurd)[3]
    absurd[name] = model(1e30 * np.random.default_rng(5).normal(size=40))
    groups, _ = group(absurd, INITIAL, clustering="linkage")
    assert groups.others_of(name) == ()
    assert len(groups.others_of(sorted(absurd)[0])) == 3


def test_one_peer_and_equal_models_are_one_cluster():
    alone = {min(models()): models()[min(models())]}
    assert group(alone, INITIAL, clustering="linkage")[0].labels == {min(alone): 0}
    equal = dict.fromkeys(models(), INITIAL)
    assert set(group(equal, INITIAL, clustering="linkage")[0].labels.values()) == {0}


def test_more_clusters_than_models_are_refused():
    with pytest.raises(ConfigError, match="num_clusters = 9"):
        group(models(), INITIAL, clustering="kmeans", num_clusters=9)


def sizes_of(*claims: int) -> list[int]:
    owners = [PeerId(f"{number:032x}") for number in range(len(claims))]
    return list(bounded_sizes(dict(zip(owners, claims, strict=True))).values())


def test_peers_count_for_their_examples_but_no_claim_for_much_more_than_others():
    assert sizes_of(40, 60, 100, 150) == [40, 60, 100, 150]
    assert sizes_of(40, 60, 100, 2**62) == [40, 60, 100, MOST_TIMES * 60]
    assert sizes_of(5, 2**62) == [5, MOST_TIMES * 5]


def test_who_does_not_say_counts_for_the_median_and_if_nobody_does_all_count_alike():
    assert sizes_of(40, 0, 100, 150) == [40, 100, 100, 150]
    assert sizes_of(0, 0, 0) == [1, 1, 1]


@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=9),
    st.lists(st.integers(0, 2**62), max_size=4),
)
@hypothesis_settings(max_examples=60)
def test_liars_fewer_than_the_honest_never_raise_the_bound_above_the_honest(honest, lies):
    lies = lies[: len(honest) - 1]
    counted = sizes_of(*honest, *lies)
    assert all(1 <= size <= MOST_TIMES * max(honest) for size in counted)
