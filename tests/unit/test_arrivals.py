"""Gradients of others until a round closes: which count, and what the older ones are worth."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import peer_id
from hypothesis import given
from hypothesis import strategies as st

from peer.algorithm import AlgorithmSettings, Verdict, combine_gradients
from peer.arrivals import Arrivals, renew
from peer.core import PeerCore
from peer.events import (
    Differentiated,
    GradientArrived,
    Measured,
    RoundClosed,
    Started,
    Stepped,
)
from protocol.messages import GradientUpdate, Version
from protocol.tensors import Layout, Tensors, TensorSpec

ME, FRIEND = peer_id(0), peer_id(1)
CLIP = 3.0
SIZE = 16  # without gaps
LAYOUT = Layout([TensorSpec("weight", "f32", (SIZE,))])

vectors = st.lists(st.floats(-100, 100, width=32), min_size=SIZE, max_size=SIZE).map(
    lambda values: np.array(values, np.float32)
)


def vector(*values: float) -> np.ndarray:
    return np.array([*values, *[0.0] * (SIZE - len(values))], np.float32)


def tensors(values: np.ndarray) -> Tensors:
    return Tensors.of(LAYOUT, {"weight": values})


def update(on_round: int, gradient: np.ndarray, incarnation: int = 0) -> GradientUpdate:
    return GradientUpdate(
        sender=FRIEND,
        sender_round=0,
        on_version=Version(incarnation, on_round),
        weight=0.5,
        num_examples=4,
        gradient=tensors(gradient),
    )


@given(vectors, vectors, vectors)
def test_a_gradient_is_renewed_unless_it_opposed_the_own_one_when_it_was_made(gradient, then, now):
    renewed = renew(gradient, then, now, CLIP)
    assert (renewed is None) == (float(np.dot(then, gradient)) < 0.0)
    if renewed is not None:
        share = min(CLIP, np.linalg.norm(gradient) / max(np.linalg.norm(then), 1e-30))
        assert np.linalg.norm(renewed) <= share * np.linalg.norm(now) * 1.0001 + 1e-3


@given(vectors, vectors)
def test_what_a_sender_like_the_owner_sends_becomes_the_present_own_gradient(then, now):
    if then.any():
        np.testing.assert_allclose(renew(then, then, now, CLIP), now, atol=1e-4)  # f32 of up to 200


@given(st.lists(vectors, min_size=5, max_size=5))
def test_renewing_is_exact_where_losses_are_curved_alike(drawn):
    own_best, other_best, old, new, curvature = (each.astype(np.float64) for each in drawn)
    then, now = (abs(curvature) * (model - own_best) for model in (old, new))
    made, right = (abs(curvature) * (model - other_best) for model in (old, new))
    if np.linalg.norm(made) > 0.99 * CLIP * np.linalg.norm(then) or np.dot(made, then) < 1e-3:
        return  # clipped or refused
    share = np.linalg.norm(made) / np.linalg.norm(then)
    if np.linalg.norm(right) > 0.99 * share * np.linalg.norm(now):
        return  # clipped afterwards
    result = renew(*(each.astype(np.float32) for each in (made, then, now)), clip=CLIP)
    np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-2)  # f32 of up to 60,000


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("place", range(3))
def test_what_is_not_finite_is_left_for_others_to_judge(odd, place):
    parts = [np.ones(SIZE, np.float32) for _ in range(3)]
    parts[place][1] = odd
    assert renew(*parts, clip=CLIP) is parts[0]


@given(vectors, vectors, vectors)
def test_whatever_age_a_sender_claims_the_step_stays_with_the_owner(gradient, then, now):
    arrivals = Arrivals(5, CLIP)
    arrivals.take(Version(0, 0), then)
    arrivals.keep(update(0, gradient))
    fresh, refused = arrivals.take(Version(0, 1), now)
    total, verdicts = combine_gradients(now, 1.0, fresh, clip=CLIP)
    assert len(refused) + len(verdicts) == 1
    norm = float(np.linalg.norm(now))
    assert total is not None
    assert float(np.linalg.norm(total - now)) <= 0.5 * CLIP * norm * 1.0001 + 1e-4
    assert float(np.dot(total, now)) >= norm * norm * 0.999 - 1e-3


def test_a_gradient_on_the_present_version_is_handed_over_as_it_came():
    arrivals = Arrivals(5, CLIP)
    arrivals.take(Version(0, 0), vector(1))
    arrivals.keep(update(1, vector(-1, 2, 3, 4)))
    fresh, refused = arrivals.take(Version(0, 1), vector(1, 1, 1, 1))
    np.testing.assert_array_equal(fresh[FRIEND].gradient, vector(-1, 2, 3, 4))
    assert refused == []


def test_an_older_gradient_is_judged_by_the_own_one_of_its_version_and_renewed():
    arrivals = Arrivals(5, CLIP)
    arrivals.take(Version(0, 0), vector(2))
    arrivals.keep(update(0, vector(1, 1)))
    fresh, _ = arrivals.take(Version(0, 1), vector(2, -1))
    np.testing.assert_array_equal(fresh[FRIEND].gradient, vector(1, 0))
    arrivals.keep(update(0, vector(-1, 1)))
    assert arrivals.take(Version(0, 2), vector(-1)) == ({}, [Verdict.OPPOSED])


def test_own_gradients_are_kept_for_as_long_as_the_others_may_be_old():
    arrivals = Arrivals(2, CLIP)
    for number in range(3):
        arrivals.take(Version(0, number), vector(number + 1))
    arrivals.keep(update(1, vector(2)))
    fresh, refused = arrivals.take(Version(0, 3), vector(4))
    np.testing.assert_array_equal(fresh[FRIEND].gradient, vector(4))  # 2 + 4 - 2
    arrivals.keep(update(1, vector(1)))
    assert arrivals.take(Version(0, 4), vector(5)) == ({}, [Verdict.STALE])
    assert refused == []
    assert len(arrivals._own) <= 2


def test_without_own_gradients_the_others_are_handed_over_as_they_came():
    arrivals = Arrivals(5, CLIP)
    arrivals.take(Version(0, 0), None)
    arrivals.keep(update(0, vector(-1, 2, 3, 4)))
    fresh, _ = arrivals.take(Version(0, 1), None)
    np.testing.assert_array_equal(fresh[FRIEND].gradient, vector(-1, 2, 3, 4))


def test_a_core_renews_what_comes_a_round_late():
    core = PeerCore(
        peer_id=ME,
        settings=AlgorithmSettings(start="cold", exchange_every=1, num_neighbors=0),
        model=Tensors.zeros(LAYOUT),
        incarnation=0,
        rounds=None,
        rng=np.random.default_rng(0),
    )
    core.handle(Started(frozenset()))
    for number, own in enumerate([vector(2), vector(2, -1)]):
        core.handle(Measured(ME, number, 1.0))
        core.handle(Differentiated(ME, number, tensors(own), 4))
        step, *_ = core.handle(RoundClosed(number))
        finished = core.handle(Stepped(number, Tensors.zeros(LAYOUT)))[1]
        core.handle(GradientArrived(update(0, vector(1, 1))))
    # (2, -1) + 0.5 ((1, 1) + (2, -1) - (2, 0))
    np.testing.assert_array_equal(step.gradient["weight"][:2], [2.5, -1])
    assert finished.verdicts == {Verdict.APPLIED: 1}


def test_a_long_gradient_is_clipped_by_the_setting_whatever_its_age():
    for clip, expected in ((1.0, [1.5, 1.5]), (4.0, [3.0, 3.0])):
        core = PeerCore(
            peer_id=ME,
            settings=AlgorithmSettings(start="cold", exchange_every=1, num_neighbors=0, clip=clip),
            model=Tensors.zeros(LAYOUT),
            incarnation=0,
            rounds=None,
            rng=np.random.default_rng(0),
        )
        core.handle(Started(frozenset()))
        core.handle(GradientArrived(update(0, vector(100))))
        steps = []
        for number in range(2):
            core.handle(Measured(ME, number, 1.0))
            core.handle(Differentiated(ME, number, tensors(vector(1)), 4))
            step, *_ = core.handle(RoundClosed(number))
            steps.append(step.gradient["weight"][0])
            core.handle(Stepped(number, Tensors.zeros(LAYOUT)))
            core.handle(GradientArrived(update(0, vector(100))))
        assert steps == expected  # 1 + 0.5 clip, of weight 0.5


def test_whoever_sends_nothing_on_an_older_version_moves_nothing_however_many_they_are():
    rng = np.random.default_rng(0)
    then, now = rng.normal(size=(2, 1000)).astype(np.float32)
    assert np.linalg.norm(renew(np.zeros_like(now), then, now, CLIP)) == 0.0
    tiny = renew(1e-3 * then, then, now, CLIP)
    assert tiny is not None and np.linalg.norm(tiny) <= 1.001e-3 * np.linalg.norm(now)
