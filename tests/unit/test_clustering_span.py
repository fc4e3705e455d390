"""Models as points: what is left out, what is refused, and distances that a projection keeps."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import peer_id
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from scipy.spatial.distance import pdist

from peer.clustering.span import gather, project
from protocol.errors import ConfigError, ModelError


def models_of(number, seed=0, wide=40, dtype=np.float32):
    """Models with a wide layer, a head and a scalar, of owners in no order."""
    rng = np.random.default_rng(seed)
    shapes = {"wide.weight": (wide, 5), "head.weight": (3, 2), "scale": ()}
    return {
        peer_id(owner): {
            name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()
        }
        for owner in rng.permutation(number).tolist()
    }


def flattened(models, names=None):
    return np.array(
        [
            np.concatenate([models[owner][name].ravel() for name in sorted(names or models[owner])])
            for owner in sorted(models)
        ],
        np.float64,
    )


def test_few_parameters_are_flattened_by_sorted_name_in_the_order_of_peers():
    models = models_of(9)
    points = gather(models, ["scale", "head.weight"])
    np.testing.assert_array_equal(points.points, flattened(models, ["head.weight", "scale"]))
    assert points.points.dtype == np.float64
    assert points.peer_ids == tuple(sorted(models))
    assert points.left_out == ()


@given(
    st.integers(2, 12),
    st.integers(0, 1000),
    st.sampled_from([1, 40, 9000]),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
@effort(max_examples=25, deadline=None)
def test_many_parameters_are_projected_and_keep_their_distances(number, seed, wide, dtype):
    models = models_of(number, seed, wide, dtype)
    gathered = gather(models)
    dim = 5 * wide + 7
    assert gathered.points.shape == (number, dim if dim < number else number - 1)
    expected = pdist(flattened(models))
    np.testing.assert_allclose(pdist(gathered.points), expected, rtol=1e-12)


def test_a_small_difference_between_large_models_is_kept():
    models = models_of(6, wide=400)
    for owner in models:
        models[owner] = {name: 1e3 + 1e-3 * a.astype(float) for name, a in models[owner].items()}
    # What subtracting numbers of 1e3 leaves of 1e-3: Gram matrices would leave nothing.
    np.testing.assert_allclose(pdist(gather(models).points), pdist(flattened(models)), rtol=1e-9)


def test_a_huge_model_does_not_make_the_others_equal():
    models = models_of(6, wide=400)
    first = min(models)
    models[first] = {name: np.full_like(a, 1e38) for name, a in models[first].items()}
    others = gather(models).points[1:]
    np.testing.assert_allclose(pdist(others), pdist(flattened(models)[1:]), rtol=1e-12)


@pytest.mark.parametrize("shared", [0, 3])
def test_equal_models_stay_equal_to_the_bit(shared):
    models = models_of(7, wide=400)
    owners = sorted(models)
    for twin in (1, 5):
        models[owners[twin]] = {name: a.copy() for name, a in models[owners[shared]].items()}
    models[owners[5]]["scale"] = -0.0 * models[owners[5]]["scale"]
    models[owners[shared]]["scale"] = models[owners[1]]["scale"] = np.zeros((), np.float32)
    points = gather(models).points
    for twin in (1, 5):
        np.testing.assert_array_equal(points[twin], points[shared])
    assert len(np.unique(points, axis=0)) == 5


def test_blocks_of_any_width_give_the_same_distances_and_signs():
    rows = np.random.default_rng(0).standard_normal((6, 300))
    whole = project([rows], 2)
    parts = project([rows[:, start : start + 7] for start in range(0, 300, 7)], 2)
    np.testing.assert_allclose(parts, whole, atol=1e-12)
    np.testing.assert_array_equal(whole[2], 0.0)
    assert (np.diagonal(np.delete(whole, 2, axis=0)) >= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_models_that_are_not_finite_are_left_out_by_name(bad):
    models = models_of(5)
    spoiled = sorted(models)[3]
    models[spoiled]["wide.weight"][7, 2] = bad
    gathered = gather(models)
    assert gathered.left_out == (spoiled,)
    assert gathered.peer_ids == tuple(owner for owner in sorted(models) if owner != spoiled)
    healthy = {owner: model for owner, model in models.items() if owner != spoiled}
    np.testing.assert_array_equal(gathered.points, gather(healthy).points)
    assert gather(models, ["head.weight"]).left_out == ()
    for model in models.values():
        model["scale"] = np.float32(bad) * np.ones((), np.float32)
    with pytest.raises(ModelError, match="none of the 5 models is finite"):
        gather(models)


def test_one_model_is_one_point():
    gathered = gather(models_of(1))
    assert gathered.points.shape == (1, 1)
    assert np.isfinite(gathered.points).all()


def test_models_without_parameters_and_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="no parameters"):
        gather({peer_id(0): {}, peer_id(1): {}})
    with pytest.raises(ConfigError, match=r"no parameter 'tail': it has head.weight, scale"):
        gather(models_of(3), ["tail"])
    with pytest.raises(ConfigError, match="has a number in it"):
        gather({peer_id(0): {"empty": np.zeros((0, 4), np.float32)}})
    with pytest.raises(ConfigError, match="has a number in it"):
        gather(models_of(3), [])
    with pytest.raises(ModelError, match="no models"):
        gather({})


def test_a_model_that_does_not_fit_the_first_is_named():
    models = models_of(3)
    last = max(models)
    models[last] = {**models[last], "head.weight": np.zeros((3, 3), np.float32)}
    with pytest.raises(ModelError, match=f"{last} doesn't fit .* head.weight is of shape"):
        gather(models)
    models[last] = {"scale": models[last]["scale"]}
    with pytest.raises(ModelError, match=r"head.weight is missing"):
        gather(models)


def test_counters_and_raw_bf16_are_refused():
    models = models_of(2)
    models[peer_id(1)]["scale"] = np.zeros((), np.uint16)
    with pytest.raises(ModelError, match=r"scale of .* is uint16"):
        gather(models)
