"""Baselines with a personal part beside a shared one: Ditto, APFL and FedRep."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_cohort import (
    ADAM,
    SGD,
    accuracies,
    assert_same_bits,
    digits,
    make_members,
    models_of,
    probabilities,
    run,
)
from hypothesis import given
from hypothesis import strategies as st

from peer.algorithm import trainable
from peer.learner import Batch
from peer.models import build_model
from protocol.errors import ModelError
from protocol.tensors import Layout, Tensors, TensorSpec
from sim.baselines.apfl import apfl, mix
from sim.baselines.arithmetic import shuffled
from sim.baselines.ditto import ditto, train_near
from sim.baselines.fedavg import fedavg
from sim.baselines.fedrep import fedrep, head_of, head_steps, train_part
from sim.baselines.local import local


@pytest.mark.parametrize("training", [ADAM, SGD])
def test_ditto_without_a_pull_is_learning_alone_to_the_bit(training):
    slices = digits(3)
    unpulled = run(ditto, make_members(slices, training=training), lam=0.0)
    alone = run(local, make_members(slices, training=training))
    assert_same_bits(probabilities(unpulled, slices), probabilities(alone, slices))


def test_ditto_with_the_hardest_pull_stays_one_step_from_the_global_model():
    (member,) = make_members(digits(1), training=SGD)
    learner = member.new_learner()
    center = shuffled(learner.parameters(), np.random.default_rng(0))
    # with η λ = 1, each step is v = w - η ∇F(v): further pulls would overshoot
    train_near(learner, center, [Batch(step) for step in range(9)], lam=1 / SGD.learning_rate)
    before = learner.parameters()
    train_near(learner, center, [Batch(9)], lam=1 / SGD.learning_rate)
    gradient = learner.differentiate(before, Batch(9), own=False).tensors.flat_f32()
    np.testing.assert_allclose(
        trainable(learner.parameters()),
        trainable(center) - np.float32(SGD.learning_rate) * gradient,
        atol=1e-6,
    )


def test_the_harder_ditto_pulls_the_nearer_are_personal_models_to_the_global_one():
    slices = digits(4, groups=2)
    shared = trainable(models_of(run(fedavg, make_members(slices, training=SGD), steps=30))[0])
    distances = [
        np.mean(
            [
                np.linalg.norm(trainable(model) - shared)
                for model in models_of(
                    run(ditto, make_members(slices, training=SGD), steps=30, lam=lam)
                )
            ]
        )
        for lam in (0.0, 0.3, 3.0, 10.0)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] / 4


@pytest.mark.parametrize("training", [ADAM, SGD])
def test_apfl_that_is_all_personal_is_learning_alone_to_the_bit(training):
    slices = digits(3)
    personal = run(apfl, make_members(slices, training=training), alpha=1.0, alpha_rate=0.0)
    alone = run(local, make_members(slices, training=training))
    assert_same_bits(probabilities(personal, slices), probabilities(alone, slices))


def test_apfl_that_is_all_global_is_fedavg():
    slices = digits(3)
    shared = run(apfl, make_members(slices), alpha=0.0, alpha_rate=0.0)
    together = run(fedavg, make_members(slices))
    assert_same_bits(probabilities(shared, slices), probabilities(together, slices))


def test_apfl_takes_the_steps_of_its_paper():
    slices = digits(1)
    outcome = run(
        apfl,
        make_members(slices, training=SGD),
        steps=4,
        local_steps=2,
        alpha=0.3,
        alpha_rate=0.5,
    )
    learner = make_members(slices, training=SGD)[0].new_learner()
    model, rate = learner.parameters(), np.float32(SGD.learning_rate)

    def gradient(at, step):
        parameters = Tensors(model.layout.gradient, at.astype(np.float32).view(np.uint8))
        batch = Batch(step, full=True)
        return learner.differentiate(parameters, batch, own=False).tensors.flat_f32()

    personal = shared = trainable(model)
    alpha = 0.3
    for step in range(4):
        mixed = alpha * personal + (1 - alpha) * shared
        slope = float((personal - shared) @ gradient(mixed, step))
        personal, shared, alpha = (
            personal - rate * alpha * gradient(mixed, step),
            shared - rate * gradient(shared, step),
            min(max(alpha - 0.5 * slope, 0.0), 1.0),
        )
    assert alpha != 0.3
    np.testing.assert_allclose(
        trainable(models_of(outcome)[0]), alpha * personal + (1 - alpha) * shared, atol=1e-6
    )


def test_apfl_learns_to_trust_the_personal_model_where_the_global_one_misleads():
    slices = digits(4, groups=2)
    members = make_members(slices)
    fixed = run(apfl, members, steps=60, alpha=0.1, alpha_rate=0.0)
    learned = run(apfl, make_members(slices), steps=60, alpha=0.1, alpha_rate=0.1)
    assert accuracies(learned, members).mean() > accuracies(fixed, members).mean()


def test_mixing_two_models_is_linear_in_their_parameters():
    (member,) = make_members(digits(1))
    first = member.new_learner().parameters()
    second = shuffled(first, np.random.default_rng(0))
    expected = 0.3 * trainable(first) + 0.7 * trainable(second)
    np.testing.assert_allclose(trainable(mix(0.3, first, second)), expected, atol=1e-6)
    assert mix(1.0, first, second) == first


def test_fedrep_ends_with_equal_bodies_and_heads_apart():
    slices = digits(4, groups=2)
    outcome = run(fedrep, make_members(slices, model="mlp"))
    first, *others = models_of(outcome)
    for other in others:
        for name in ("1.weight", "1.bias"):
            np.testing.assert_array_equal(first[name], other[name])
        for name in ("3.weight", "3.bias"):
            assert not np.array_equal(first[name], other[name])


def test_fedrep_moves_bodies_only():
    members = make_members(digits(3), model="mlp")
    outcome = run(fedrep, members, steps=9, local_steps=3)
    body = 64 * 64 * 4 + 64 * 4
    for spent in outcome.spending:
        assert spent.bytes_sent == spent.bytes_received == 2 * body  # the last round has no average


@given(st.integers(1, 12), st.integers(1, 40), st.floats(0, 1))
def test_the_heads_share_of_steps_holds_whatever_the_length_of_rounds(length, total, share):
    starts = range(0, total, length)
    rounds = [range(start, min(start + length, total)) for start in starts]
    trained = [head_steps(steps, share) for steps in rounds]
    assert all(0 <= count <= len(steps) for count, steps in zip(trained, rounds, strict=True))
    assert abs(sum(trained) - share * total) <= 1 + 1e-9


def test_fedrep_with_a_step_a_round_trains_head_and_body_in_turn():
    slices = digits(2)
    members = make_members(slices, model="mlp")
    initial = members[0].new_learner().parameters()
    outcome = run(fedrep, members, steps=4, local_steps=1)
    first, second = models_of(outcome)
    assert not np.array_equal(first["1.weight"], initial["1.weight"])
    assert not np.array_equal(first["3.weight"], second["3.weight"])
    body = 64 * 64 * 4 + 64 * 4
    assert [spent.bytes_sent for spent in outcome.spending] == [body] * 2  # head body head head


def test_a_part_at_rest_keeps_every_bit():
    (member,) = make_members(digits(1), model="mlp")
    learner = member.new_learner()
    before = learner.parameters()
    after = train_part(learner, before, [Batch(0), Batch(1)], {"3.weight", "3.bias"})
    for name in before:
        assert np.array_equal(before[name], after[name]) == name.startswith("1.")


@pytest.mark.parametrize(
    ("model", "shape", "last"),
    [
        ("logistic", (1, 8, 8), "1"),
        ("mlp", (1, 8, 8), "3"),
        ("cnn", (1, 8, 8), "10"),
        ("lstm", (20,), "3"),
    ],
)
def test_the_head_is_the_last_layer_of_every_ready_made_model(model, shape, last):
    module = build_model(model, shape, 10, 0)
    layout = Layout(
        TensorSpec(name, "f32", tuple(parameter.shape))
        for name, parameter in module.named_parameters()
    )
    assert head_of(layout, 10) == {f"{last}.weight", f"{last}.bias"}


def test_a_model_without_a_last_layer_is_an_error():
    layout = Layout([TensorSpec("weight", "f32", (7, 3))])
    with pytest.raises(ModelError, match="no layer has 10 outputs"):
        head_of(layout, 10)
    assert head_of(layout, 7) == {"weight"}


def test_an_embedding_of_as_many_words_as_classes_is_not_the_head():
    layout = Layout(
        [
            TensorSpec("decoder.bias", "f32", (9,)),
            TensorSpec("decoder.weight", "f32", (9, 4)),
            TensorSpec("embedding.weight", "f32", (9, 4)),
        ]
    )
    assert head_of(layout, 9) == {"decoder.bias", "decoder.weight"}
