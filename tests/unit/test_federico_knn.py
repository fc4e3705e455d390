"""FedeRiCo blended with each peer's memory, as a method of a comparison."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_cohort import (
    accuracies,
    assert_same_bits,
    digits,
    make_members,
    probabilities,
    run,
)

from peer.data import Split
from protocol.errors import ConfigError
from sim.federico import federico
from sim.federico_knn import federico_knn


def memories(outcome):
    return [predict.func.__self__ for predict in outcome.predict]


def mixtures(outcome):
    return [predict.args[0] for predict in outcome.predict]


def test_without_a_say_of_the_memory_it_is_federico_to_the_bit():
    slices = digits(4, groups=2)
    plain = run(federico, make_members(slices, model="mlp"), steps=40)
    silent = run(federico_knn, make_members(slices, model="mlp"), steps=40, lambdas=(0.0,))
    assert_same_bits(probabilities(silent, slices), probabilities(plain, slices))
    assert silent.spending == plain.spending
    np.testing.assert_array_equal(silent.weights, plain.weights)


def test_all_training_examples_are_remembered_in_the_last_models_embedding():
    slices = digits(4, groups=2)
    members = make_members(slices, model="mlp")
    outcome = run(federico_knn, members, steps=40)
    for member, memory, mixture in zip(members, memories(outcome), mixtures(outcome), strict=True):
        report = memory.report()
        assert report["num_entries"] == member.num_train
        assert report["num_validation"] == len(member.split.holdout)
        train = member.split.train
        embedded = member.new_learner().embed(mixture.model, train.inputs)
        np.testing.assert_array_equal(memory._store.entries.embeddings, embedded)


def test_lambda_is_chosen_before_the_holdout_is_trained_on():
    members = make_members(digits(4, groups=2), model="mlp")
    outcome = run(federico_knn, members, steps=70, final_full=0.4)
    for memory in memories(outcome):
        assert 0 < memory.tuned_at < memory.renewed_at
        assert memory.tuned_at == memory.renewed_at - int(0.4 * memory.renewed_at)
    outcome = run(federico_knn, make_members(digits(4, groups=2)), steps=40, final_full=0.0)
    assert all(memory.tuned_at == memory.renewed_at for memory in memories(outcome))


def test_the_strongest_members_model_may_embed():
    members = make_members(digits(4, groups=2), model="mlp")
    outcome = run(federico_knn, members, steps=40, embedding="strongest")
    for member, memory, mixture in zip(members, memories(outcome), mixtures(outcome), strict=True):
        embedded = member.new_learner().embed(mixture.strongest, member.split.train.inputs)
        np.testing.assert_array_equal(memory._store.entries.embeddings, embedded)


def test_a_memory_of_the_data_after_a_drift_helps():
    before, after = digits(4, groups=2), digits(4, groups=2, seed=5)
    later = dict(enumerate(after))
    members = make_members(before, model="mlp", later=later)
    settings = {"steps": 70, "final_full": 0.4}  # λ is chosen while models are far from done
    outcome = run(federico_knn, members, **settings)
    for memory, member in zip(memories(outcome), members, strict=True):
        assert len(memory.collection) == member.num_train
    plain = make_members(before, model="mlp", later=later)
    gain = accuracies(outcome, members) - accuracies(run(federico, plain, **settings), plain)
    assert gain.mean() > 0


def test_nothing_but_the_holdout_chooses_lambda():
    def without_test(parts: Split) -> Split:
        return Split(fit=parts.fit, holdout=parts.holdout, test=parts.holdout)

    slices = digits(3)
    seen = run(federico_knn, make_members(slices), steps=40)
    unseen = run(federico_knn, make_members(slices, hide=without_test), steps=40)
    assert_same_bits(probabilities(seen, slices), probabilities(unseen, slices))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding": "mine"}, "personalization: .*embedding"),
        ({"k_nearest": 0}, "personalization: .*k_nearest"),
        ({"lambdas": ()}, "lambdas is empty"),
        ({"strategy": "fifo"}, "needs a bound"),
        ({"final_full": 1.0}, "final_full below 1"),
        ({"profile": "paper"}, "chooses its interpolation weight on a holdout"),
        ({"epsilom": 0.1}, "epsilom"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        run(federico_knn, make_members(digits(2)), **changes)


def test_a_budget_without_a_whole_round_is_an_error():
    with pytest.raises(ConfigError, match="leaves no round"):
        run(federico_knn, make_members(digits(2)), steps=1)
