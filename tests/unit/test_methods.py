"""The registry of methods, and what holds for every method in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_cohort import assert_same_bits, digits, make_members, probabilities, run

import sim.baselines
from protocol.errors import ConfigError
from sim.cohort import Budget, Member
from sim.methods import METHODS, find_method

each_method = pytest.mark.parametrize("name", METHODS)


class Poison:
    """Whatever is done with it is an error."""

    def __getattribute__(self, name):
        raise AssertionError(f"somebody looked at {name!r}")


class Blindfolded(Member):
    @property
    def group(self):
        raise AssertionError("somebody looked at the true group")


def test_every_baseline_is_known_by_a_name():
    folder = Path(sim.baselines.__path__[0])
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "arithmetic"}
    assert files <= {getattr(method, "__name__", "") for method in METHODS.values()}


def test_an_unknown_method_is_an_error_with_advice():
    assert find_method("fedfomo") is METHODS["fedfomo"]
    with pytest.raises(ConfigError, match=r"unknown method fedfom; did you mean fedfomo\?"):
        find_method("fedfom")
    with pytest.raises(ConfigError, match="known are local, fedavg, "):
        find_method("zzz")


@each_method
def test_every_method_ends_with_probabilities_and_the_same_seed_gives_the_same_bits(name):
    slices = digits(4, groups=2)
    first, second = (run(METHODS[name], make_members(slices, model="mlp")) for _ in range(2))
    for predicted, part in zip(probabilities(first, slices), slices, strict=True):
        assert predicted.shape == (len(part.dataset.train), 10)
        assert np.isfinite(predicted).all()
        np.testing.assert_allclose(predicted.sum(axis=1), 1.0, rtol=1e-5)
    assert_same_bits(probabilities(first, slices), probabilities(second, slices))
    assert first.spending == second.spending
    if first.weights is not None:
        assert first.weights.shape == (4, 4)
        np.testing.assert_allclose(first.weights.sum(axis=1), 1.0)


@each_method
def test_no_method_looks_at_a_test_example(name):
    members = make_members(digits(4, groups=2), hide=lambda parts: replace(parts, test=Poison()))
    run(METHODS[name], members)


@each_method
def test_only_the_oracle_looks_at_the_true_groups(name):
    members = make_members(digits(4, groups=2), member=Blindfolded)
    if name == "oracle":
        with pytest.raises(AssertionError, match="true group"):
            run(METHODS[name], members)
    else:
        run(METHODS[name], members)


@each_method
def test_the_gradients_that_a_method_says_it_spent_are_those_it_computed(name):
    made = []
    members = make_members(digits(3), made=made)
    outcome = run(METHODS[name], members, steps=20)
    assert sum(spent.gradients for spent in outcome.spending) == sum(
        learner.gradients for learner in made
    )


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        ("local", 7),
        ("fedavg", 7),
        ("fedavg+", 7 + 2),  # 32 to 48 examples in batches of 32
        ("clustered", 7),
        ("ifca", 3 * 7),
        ("fedfomo", 7),
        ("ditto", 2 * 7),
        ("fedrep", 7),
        ("apfl", 2 * 7),
        ("dpsgd", 7),
        ("oracle", 7),
    ],
)
def test_every_peer_computes_a_gradient_a_step_for_each_model_that_it_trains(name, gradients):
    outcome = run(METHODS[name], make_members(digits(3)), steps=7)
    assert [spent.gradients for spent in outcome.spending] == [gradients] * 3


def test_fedem_computes_at_most_a_gradient_a_step_for_each_component():
    outcome = run(METHODS["fedem"], make_members(digits(3)), steps=7)
    assert all(7 <= spent.gradients <= 4 * 7 for spent in outcome.spending)


MODEL = 64 * 10 * 4 + 64  # 640 weights and 10 biases in f32, each tensor padded to 64 bytes


@pytest.mark.parametrize(
    ("name", "sent", "received"),
    [
        ("local", 0, 0),
        ("fedavg", 3, 3),
        ("fedavg+", 3, 3),
        ("clustered", 3, 3),
        ("ifca", 3 * 3, 3 * 3 * 4),
        ("fedem", 3 * 4, 3 * 4),
        ("fedfomo", 3, 3 * 4),
        ("ditto", 3, 3),
        ("fedrep", 0, 0),  # a logistic model is all head
        ("apfl", 3, 3),
        ("dpsgd", 3 * 2, 3 * 2),
        ("oracle", 3, 3),
    ],
)
def test_bytes_are_those_of_the_models_moved_in_three_rounds(name, sent, received):
    outcome = run(METHODS[name], make_members(digits(6)), steps=3, local_steps=1)
    for spent in outcome.spending:
        assert (spent.bytes_sent, spent.bytes_received) == (sent * MODEL, received * MODEL)


@each_method
def test_every_method_goes_on_with_data_that_drift(name):
    slices = digits(4, groups=2)
    members = make_members(slices, later={0: slices[3]})
    before = members[0].split
    outcome = run(METHODS[name], members)
    assert members[0].split is not before
    assert members[0].group == slices[3].group
    assert all(np.isfinite(predicted).all() for predicted in probabilities(outcome, slices))


def test_a_budget_yields_all_steps_once_and_lets_data_drift_half_way():
    slices = digits(4, groups=2)
    members = make_members(slices, later={0: slices[3]})
    learner = members[0].new_learner()
    before, labels = members[0].split, learner.measured_labels
    done = []
    budget = Budget(steps=10, local_steps=3, on_round=lambda *progress: done.append(progress))
    seen = [(list(steps), members[0].split is before) for steps in budget.rounds(members)]
    assert seen == [([0, 1, 2], True), ([3, 4, 5], True), ([6, 7, 8], False), ([9], False)]
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [member.group for member in members] == [1, 0, 1, 1]
    np.testing.assert_array_equal(learner.measured_labels, members[0].split.holdout.labels)
    assert not np.array_equal(learner.measured_labels, labels)


@each_method
def test_every_method_stops_when_it_is_told_to(name):
    class Stopped(Exception):
        pass

    def stop(done, total):
        if done == 2:
            raise Stopped

    budget = Budget(steps=40, local_steps=4, on_round=stop)
    with pytest.raises(Stopped):
        METHODS[name](make_members(digits(3)), budget, np.random.default_rng(0))
