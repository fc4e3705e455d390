"""The last rounds: when they begin, what they leave as it is, and what undoes that."""

from __future__ import annotations

import math

import pytest
from helpers import peer_id
from hypothesis import given
from hypothesis import strategies as st

from peer.acquaintances import Acquaintances
from peer.horizon import Horizon

ME, FRIEND, CHANGED, STRANGER = (peer_id(number) for number in range(4))


def acquaintances(**averages: float) -> Acquaintances:
    ids = {"me": ME, "friend": FRIEND, "changed": CHANGED, "stranger": STRANGER}
    return Acquaintances({ids[name]: average for name, average in averages.items()}, {}, {})


@given(st.integers(1, 200), st.floats(0.0, 1.0))
def test_the_last_rounds_are_the_given_part_of_all(rounds, final_full):
    horizon = Horizon(rounds, final_full)
    final = [number for number in range(rounds) if horizon.is_final(number)]
    assert final == list(range(rounds - int(final_full * rounds), rounds))
    assert horizon.is_over(rounds)
    assert not horizon.is_over(rounds - 1)


def test_who_runs_for_ever_has_no_last_rounds():
    horizon = Horizon(None, 0.8)
    horizon.begin_anew(5)
    assert horizon.settles_at is None
    assert not horizon.is_final(10**9)
    assert not horizon.is_over(10**9)


def restored(rounds: int, saved: Horizon) -> Horizon:
    horizon = Horizon(rounds, 0.8)
    horizon.restore(saved.measuring_until, saved.trained_from)
    return horizon


@pytest.mark.parametrize(("alarm", "again"), [(3, 20), (19, 30), (50, 71), (85, 93)])
def test_beginning_anew_takes_as_many_rounds_as_at_first_or_half_of_those_left(alarm, again):
    horizon = Horizon(100, 0.8)
    horizon.begin_anew(alarm)
    final = [number for number in range(alarm, 100) if horizon.is_final(number)]
    assert final == list(range(again, 100))
    assert restored(100, horizon).settles_at == again
    assert restored(1000, horizon).settles_at == 200  # there are more rounds now


def test_the_last_rounds_are_postponed_until_half_of_them_are_left():
    horizon = Horizon(100, 0.8)
    assert not any(horizon.enter(number, searching=True) for number in range(60))
    assert all(horizon.enter(number, searching=True) for number in range(60, 100))
    assert horizon.settles_at == horizon.trained_from == 60


def test_what_was_trained_on_is_not_searched_with_again():
    horizon = Horizon(100, 0.8)
    for number in range(21):
        horizon.enter(number, searching=False)
    assert horizon.enter(21, searching=True)
    assert restored(100, horizon).enter(22, searching=True)


def test_the_holdout_judges_fairly_until_it_is_trained_on_or_replaced():
    horizon = Horizon(100, 0.8)
    for number in range(31):
        horizon.enter(number, searching=False)
    horizon.begin_anew(30)  # the same examples, which the models know
    assert not horizon.enter(31, searching=False)
    fair = [number for number in range(100) if horizon.is_fair(number)]
    assert fair == list(range(21))
    horizon.replace_data()
    assert horizon.is_fair(32)
    assert not horizon.enter(50, searching=False)
    assert horizon.enter(51, searching=False)
    assert horizon.is_fair(51)
    assert not horizon.is_fair(52)
    assert not restored(100, horizon).is_fair(52)


def test_a_loss_jumps_when_it_is_above_its_average_by_more_than_the_alarm():
    known = acquaintances(me=1.0, friend=1.0)
    assert known.jumped({ME: 2.1, FRIEND: 1.9, STRANGER: 50.0}, 1.0) == {ME}
    assert known.jumped({ME: math.nan, FRIEND: math.inf}, 1.0) == {FRIEND}
    assert known.jumped({ME: 50.0}, 0.0) == set()


def test_averages_of_who_trains_on_the_holdout_stay_unless_a_loss_jumps():
    known = acquaintances(me=0.9, friend=1.0, changed=1.1)
    losses = {ME: 0.1, FRIEND: 0.4, CHANGED: 5.1}
    known.hold(losses, (ME, FRIEND, CHANGED), {CHANGED}, 7, 0.5)
    assert known.loss_averages == pytest.approx({ME: 0.9, FRIEND: 1.0, CHANGED: 3.1})
    assert known.measured_at == {ME: 7, FRIEND: 7, CHANGED: 7}


def test_a_stranger_is_measured_by_what_friends_had_before():
    known = acquaintances(me=0.9, friend=1.0, changed=1.1)
    losses = {ME: 0.3, FRIEND: 0.3, CHANGED: 5.1, STRANGER: 0.5}
    known.hold(losses, (ME, FRIEND, CHANGED), {CHANGED}, 7, 0.5)
    assert known.loss_averages[STRANGER] == pytest.approx(0.5 + 0.65)
    known.hold({STRANGER: 0.2}, (), (), 8, 0.5)  # and it isn't folded, but measured anew
    assert known.loss_averages[STRANGER] == pytest.approx(0.2)


def test_the_only_friend_changing_makes_no_stranger_a_friend():
    known = acquaintances(me=0.4, changed=0.4)
    known.hold({ME: 0.3, CHANGED: 9.0, STRANGER: 2.3}, (ME, CHANGED), {CHANGED}, 7, 0.6)
    assert known.loss_averages[STRANGER] == pytest.approx(2.3 + 0.1)
    known.hold({CHANGED: 9.0, STRANGER: 2.3}, (CHANGED,), {CHANGED}, 8, 0.6)
    assert known.loss_averages[STRANGER] == pytest.approx(2.3)


def test_who_was_never_measured_gets_an_average_in_the_last_rounds_too():
    known = acquaintances()
    known.hold({ME: 0.7, FRIEND: 0.8}, (ME,), (), 0, 0.6)
    assert known.loss_averages == {ME: 0.7, FRIEND: 0.8}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_forgets_the_peer_in_the_last_rounds_too(loss):
    known = acquaintances(me=0.9, friend=1.0)
    losses = {ME: 0.5, FRIEND: loss, STRANGER: loss}
    known.hold(losses, (ME, FRIEND), known.jumped(losses, 1.0), 3, 0.6)
    assert known.loss_averages == {ME: 0.9}
