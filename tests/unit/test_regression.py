"""Synthetic regressions: what is drawn, what is minimized, and how."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from protocol.errors import ConfigError
from sim.regression import Design, Examples, kinds_of, step_lengths

KINDS = ("linear", "logistic")
SMALL = Design(peers=7, clusters=3, dim=4)

seeds = st.integers(0, 1000)
kinds = st.sampled_from(KINDS)


def problem(kind="linear", num_examples=12, seed=0, design=SMALL):
    return design.draw(kind, num_examples, np.random.default_rng(seed))


def objectives(examples: Examples, models: np.ndarray) -> np.ndarray:
    """What is minimized, of each problem at its own model."""
    ridge = examples.ridge / 2 * np.square(models).sum(axis=1)
    return np.diagonal(examples.losses(models)) + ridge


@given(kinds, seeds, st.integers(1, 30))
@effort(max_examples=40, deadline=None)
def test_a_gradient_is_the_slope_of_what_is_minimized(kind, seed, num_examples):
    rng = np.random.default_rng(seed)
    examples = problem(kind, num_examples, seed).examples
    models, direction = rng.standard_normal((2, 7, 4))
    step = 1e-5 * direction
    slope = (objectives(examples, models + step) - objectives(examples, models - step)) / 2e-5
    expected = (examples.gradients(models) * direction).sum(axis=1)
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-6)


@given(kinds, seeds, st.integers(1, 30))
@effort(max_examples=40, deadline=None)
def test_exact_solves_have_no_gradient_left(kind, seed, num_examples):
    examples = problem(kind, num_examples, seed).examples
    assert np.abs(examples.gradients(examples.solve())).max() < 1e-9


def test_a_logistic_solve_is_that_of_scikit_learn():
    examples = problem("logistic", 60).examples
    for number, found in enumerate(examples.solve()):
        inputs, outputs = examples.inputs[number], examples.outputs[number]
        strength = 1 / (examples.ridge * len(inputs))
        other = LogisticRegression(
            C=strength, fit_intercept=False, solver="newton-cholesky", tol=1e-12
        )
        np.testing.assert_allclose(found, other.fit(inputs, outputs).coef_[0], atol=1e-7)


def test_with_fewer_examples_than_parameters_least_squares_have_least_norm():
    examples = problem(num_examples=2).examples
    found = examples.solve()
    assert np.diagonal(examples.losses(found)).max() < 1e-20
    for inputs, model in zip(examples.inputs, found, strict=True):
        inside = np.linalg.pinv(inputs) @ inputs @ model  # nothing outside the inputs' span
        np.testing.assert_allclose(inside, model, atol=1e-12)


@given(kinds, seeds, st.sampled_from([1, 3, 12]))
@effort(max_examples=30, deadline=None)
def test_gradient_steps_lessen_what_is_minimized_down_to_the_exact_solve(kind, seed, num_examples):
    examples = problem(kind, num_examples, seed).examples
    models = np.zeros((7, 4))
    before = objectives(examples, models)
    for _ in range(5):
        models = examples.descend(models, 1)
        after = objectives(examples, models)
        assert (after <= before + 1e-12).all()
        before = after
    least = objectives(examples, examples.solve())
    assert (before >= least - 1e-12).all()
    if num_examples == 12:
        far = objectives(examples, examples.descend(models, 3000))
        np.testing.assert_allclose(far, least, atol=1e-6)


def test_with_one_example_one_step_from_zero_is_the_exact_solve():
    examples = problem(num_examples=1).examples
    np.testing.assert_allclose(examples.descend(np.zeros((7, 4)), 1), examples.solve(), atol=1e-12)


def test_a_step_is_two_over_the_extreme_curvatures():
    lengths = step_lengths(np.array([np.diag([1.0, 2.0, 4.0]), np.diag([0.0, 3.0, 3.0])]))
    np.testing.assert_allclose(lengths, [2 / 5, 2 / 6])


def test_pooled_examples_are_those_of_the_members_and_have_less_ridge():
    examples = problem("logistic").examples
    members, model = np.array([0, 3, 6]), np.ones((1, 4))
    pooled = examples.pooled(members)
    np.testing.assert_allclose(pooled.losses(model)[0], examples.losses(model)[members].mean())
    assert pooled.ridge == pytest.approx(examples.ridge / 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_is_drawn_as_said_and_its_truths_by_the_seed_alone(kind):
    few, many = problem(kind, 5), problem(kind, 3000)
    np.testing.assert_array_equal(few.parameters, many.parameters)
    assert np.abs(few.parameters).max() <= 3
    assert few.truth.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert few.examples.inputs.shape == (7, 5, 4)
    assert not np.array_equal(few.parameters, problem(kind, 5, seed=1).parameters)
    assert many.error(many.examples.solve()) < 0.02
    if kind == "linear":
        noise = 2 * np.diagonal(many.examples.losses(many.parameters[many.truth]))
        np.testing.assert_allclose(noise, 1, atol=0.15)


def test_the_error_of_the_truth_is_0_and_that_of_no_model_1():
    drawn = problem()
    truth = drawn.parameters[drawn.truth]
    assert drawn.error(truth) == 0
    assert drawn.error(0 * truth) == 1
    assert drawn.error(3 * truth) == pytest.approx(4)


@pytest.mark.parametrize("clusters", [0, 1, 8])
def test_clusters_that_cannot_be_are_refused(clusters):
    with pytest.raises(ConfigError, match=f"clusters = {clusters}: with 7 peers .* from 2 to 7"):
        Design(peers=7, clusters=clusters)


def test_other_wrong_numbers_and_names_are_refused():
    with pytest.raises(ConfigError, match="dim = 0"):
        Design(dim=0)
    with pytest.raises(ConfigError, match="examples = 0"):
        problem(num_examples=0)
    with pytest.raises(ConfigError, match="unknown problem 'cubic'; known are linear, logistic"):
        kinds_of(["linear", "cubic"])
    assert kinds_of(["logistic", "linear", "logistic"]) == ("logistic", "linear")
