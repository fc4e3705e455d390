"""The core as a pure machine: replay, order, churn and bad input, without sockets or torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import peer_id
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peer.algorithm import PROFILES, AlgorithmSettings, Verdict
from peer.core import PeerCore
from peer.events import (
    Adopt,
    AskFailed,
    AskGroups,
    Cluster,
    Clustered,
    Differentiate,
    Differentiated,
    ExamplesChanged,
    Fetch,
    FetchFailed,
    Finished,
    GradientArrived,
    GroupsTold,
    Measure,
    Measured,
    ModelAsked,
    ModelFetched,
    ModelUnchanged,
    NeighborsChanged,
    Publish,
    PublishGroups,
    ReadyToClose,
    RoundClosed,
    RoundFinished,
    SendGradient,
    Started,
    Step,
    Stepped,
    Stopped,
    StopRequested,
    Train,
)
from peer.exploration import Candidates
from peer.gathering import MOST_ASKED, Gathering
from peer.learner import Batch
from protocol.groups import Groups
from protocol.messages import GradientUpdate, ModelSnapshot, Version
from protocol.tensors import Layout, Tensors, TensorSpec

LAYOUT = Layout([TensorSpec("weight", "f32", (3,))])
PLAIN = {
    "start": "cold",
    "exchange_every": 1,
    "final_full": 0.0,
    "exploration": "uniform",
    "probes": 0.0,
}
ME, FRIEND, STRANGER = peer_id(0), peer_id(1), peer_id(2)


def tensors(value: float) -> Tensors:
    return Tensors.of(LAYOUT, {"weight": np.full(3, value, np.float32)})


def snapshot(round_number: int = 0, value: float = 1.0, incarnation: int = 0) -> ModelSnapshot:
    return ModelSnapshot(version=Version(incarnation, round_number), tensors=tensors(value))


def update(sender, on=Version(0, 0), sender_round=0, value=1.0, weight=0.5) -> GradientUpdate:  # noqa: B008
    return GradientUpdate(
        sender=sender,
        sender_round=sender_round,
        on_version=on,
        weight=weight,
        num_examples=4,
        gradient=tensors(value),
    )


def make_core(
    rounds=None, restored=None, incarnation=0, seed=0, num_examples=0, **settings
) -> PeerCore:
    return PeerCore(
        peer_id=ME,
        settings=AlgorithmSettings(**{**PLAIN, **settings}),
        model=tensors(0.0),
        incarnation=incarnation,
        rounds=rounds,
        rng=np.random.default_rng(seed),
        restored=restored,
        num_examples=num_examples,
    )


def kinds(effects) -> list[type]:
    return [type(effect) for effect in effects]


def do_own_work(core, own_loss=1.0, round_number=None):
    """Answer everything that a round without neighbors asks for; return what came of it."""
    number = core.round_number if round_number is None else round_number
    effects = list(core.handle(Measured(ME, number, own_loss)))
    effects += core.handle(Differentiated(ME, number, tensors(1.0), 4))
    assert kinds(effects) == [ReadyToClose]
    effects = list(core.handle(RoundClosed(number)))
    if kinds(effects) == [Step]:
        effects += core.handle(Stepped(number, tensors(number + 1.0)))
    return effects


def test_a_lone_peer_trains_by_itself_and_finishes():
    core = make_core(rounds=2)
    assert kinds(core.handle(Started(frozenset()))) == [Publish, Measure, Differentiate]
    first = do_own_work(core)
    assert kinds(first) == [Step, Publish, RoundFinished, Measure, Differentiate]
    assert first[2].prediction_weights == {ME: 1.0}
    assert kinds(do_own_work(core)) == [Step, Publish, RoundFinished, Finished]
    assert core.model.version == Version(0, 2)


def test_with_no_neighbors_to_sample_a_peer_learns_alone_whomever_it_knows():
    core = make_core(num_neighbors=0)
    effects = list(core.handle(Started(frozenset({FRIEND, STRANGER}))))
    for _ in range(12):
        effects += do_own_work(core)
    assert not any(isinstance(effect, Fetch) for effect in effects)
    assert core.prediction_weights() == {ME: 1.0}


def test_a_round_follows_the_paper_from_fetch_to_gradient():
    core = make_core(num_neighbors=1)
    effects = core.handle(Started(frozenset({ME, FRIEND})))
    assert kinds(effects) == [Publish, Fetch, Measure, Differentiate]
    assert effects[1] == Fetch(FRIEND, 0, None)
    core.handle(Measured(ME, 0, 1.0))
    core.handle(Differentiated(ME, 0, tensors(1.0), 4))
    (measure,) = core.handle(ModelFetched(FRIEND, 0, snapshot(3)))
    assert (measure.peer_id, measure.round_number) == (FRIEND, 0)
    (differentiate,) = core.handle(Measured(FRIEND, 0, 0.9))
    assert differentiate.peer_id == FRIEND
    sent, ready = core.handle(Differentiated(FRIEND, 0, tensors(2.0), 4))
    assert isinstance(sent, SendGradient)
    assert sent.update.on_version == Version(0, 3)
    assert sent.update.weight == pytest.approx(1 / (1 + np.exp(-0.1 / 0.3)))
    assert ready == ReadyToClose(0)


def test_a_failed_fetch_a_lost_neighbor_or_none_at_all_never_stalls_a_round():
    core = make_core(num_neighbors=2, survey=0)
    core.handle(Started(frozenset({FRIEND, STRANGER})))
    core.handle(Measured(ME, 0, 1.0))
    core.handle(Differentiated(ME, 0, tensors(1.0), 4))
    assert core.handle(FetchFailed(FRIEND, 0)) == []
    assert core.handle(NeighborsChanged(frozenset())) == []
    assert kinds(core.handle(FetchFailed(STRANGER, 0))) == [ReadyToClose]


def test_answers_of_another_round_or_that_nobody_asked_for_are_dropped():
    core = make_core(num_neighbors=1)
    core.handle(Started(frozenset({FRIEND})))
    for stray in (
        Measured(ME, 7, 1.0),
        ModelFetched(STRANGER, 0, snapshot()),
        ModelUnchanged(FRIEND, 0),  # nothing was at hand
        Measured(STRANGER, 0, 0.0),
        Differentiated(STRANGER, 0, tensors(1.0), 4),
        RoundClosed(0),
        Stepped(0, tensors(9.0)),
    ):
        assert list(core.handle(stray)) == []


def test_an_unchanged_model_is_not_measured_again():
    core = make_core(num_neighbors=1, epsilon=0.0)
    core.handle(Started(frozenset({FRIEND})))
    core.handle(ModelFetched(FRIEND, 0, snapshot(3)))
    core.handle(Measured(FRIEND, 0, 2.0))
    effects = do_own_work_with_friend(core)
    (fetch,) = [effect for effect in effects if isinstance(effect, Fetch)]
    assert fetch.have == snapshot(3)
    core.handle(Measured(ME, 1, 2.0))
    core.handle(Differentiated(ME, 1, tensors(1.0), 4))
    assert kinds(core.handle(ModelUnchanged(FRIEND, 1))) == [Differentiate]


def test_when_the_examples_change_an_unchanged_model_is_measured_again():
    core = make_core(num_neighbors=1, epsilon=0.0)
    core.handle(Started(frozenset({FRIEND})))
    core.handle(ModelFetched(FRIEND, 0, snapshot(3)))
    core.handle(Measured(FRIEND, 0, 2.0))
    do_own_work_with_friend(core)
    core.handle(ExamplesChanged())
    assert list(core.handle(ModelUnchanged(FRIEND, 1))) == [Measure(FRIEND, 1, tensors(1.0))]
    core.handle(Measured(FRIEND, 1, 0.5))
    core.handle(Measured(ME, 1, 2.0))
    assert core.training_weights()[FRIEND] > core.training_weights()[ME]


def test_a_model_let_go_of_is_what_its_next_may_build_on_until_a_fetch_fails():
    core = make_core(num_neighbors=1, epsilon=0.0)
    core.handle(Started(frozenset({STRANGER})))
    core.handle(ModelFetched(STRANGER, 0, snapshot(3)))
    core.handle(Measured(STRANGER, 0, 9.0))
    (fetch,) = [each for each in do_own_work(core, own_loss=0.1) if isinstance(each, Fetch)]
    assert not core.snapshot().kept
    assert fetch == Fetch(STRANGER, 1, snapshot(3))
    assert list(core.handle(ModelUnchanged(STRANGER, 1))) == [Measure(STRANGER, 1, tensors(1.0))]
    core.handle(Measured(STRANGER, 1, 9.0))
    (fetch,) = [each for each in do_own_work(core, own_loss=0.1) if isinstance(each, Fetch)]
    assert fetch.have == snapshot(3)
    core.handle(FetchFailed(STRANGER, 2))
    (fetch,) = [each for each in do_own_work(core, own_loss=0.1) if isinstance(each, Fetch)]
    assert fetch.have is None


def do_own_work_with_friend(core):
    number = core.round_number
    core.handle(Measured(ME, number, 2.0))
    core.handle(Differentiated(ME, number, tensors(1.0), 4))
    core.handle(Differentiated(FRIEND, number, tensors(1.0), 4))
    effects = list(core.handle(RoundClosed(number)))
    return effects + list(core.handle(Stepped(number, tensors(number + 1.0))))


@pytest.mark.parametrize(
    ("on", "verdict"),
    [
        (Version(0, 9), Verdict.STALE),  # of the future
        (Version(1, 0), Verdict.STALE),  # of another incarnation
        (Version(0, 0), Verdict.APPLIED),
    ],
)
def test_a_gradient_is_judged_by_the_version_it_was_made_on(on, verdict):
    core = make_core(rounds=1)
    core.handle(Started(frozenset()))
    core.handle(GradientArrived(update(STRANGER, on=on)))
    finished = do_own_work(core)[2]
    assert finished.verdicts == {verdict: 1}


def test_a_gradient_older_than_the_staleness_bound_is_refused():
    core = make_core(staleness=2)
    core.handle(Started(frozenset()))
    for _ in range(3):
        do_own_work(core)
    core.handle(GradientArrived(update(FRIEND, on=Version(0, 1))))
    core.handle(GradientArrived(update(STRANGER, on=Version(0, 0))))
    finished = do_own_work(core)[2]
    assert finished.verdicts == {Verdict.APPLIED: 1, Verdict.STALE: 1}


def test_only_the_newest_gradient_of_a_sender_counts_and_a_departed_ones_does_not():
    core = make_core(survey=0, num_neighbors=0)
    core.handle(Started(frozenset({FRIEND, STRANGER})))
    core.handle(GradientArrived(update(FRIEND, sender_round=5, value=1.0)))
    core.handle(GradientArrived(update(FRIEND, sender_round=4, value=9.0)))
    core.handle(GradientArrived(update(STRANGER)))
    core.handle(NeighborsChanged(frozenset({FRIEND})))
    step, _, finished, *_ = do_own_work(core)
    assert finished.verdicts == {Verdict.APPLIED: 1, Verdict.DEPARTED: 1}
    np.testing.assert_allclose(step.gradient["weight"], 1.5)  # own 1 + weight 0.5 of 1


def test_gradients_that_arrive_while_stepping_belong_to_the_next_version():
    core = make_core()
    core.handle(Started(frozenset()))
    core.handle(Measured(ME, 0, 1.0))
    core.handle(Differentiated(ME, 0, tensors(1.0), 4))
    core.handle(RoundClosed(0))
    core.handle(GradientArrived(update(FRIEND)))
    effects = core.handle(Stepped(0, tensors(1.0)))
    assert effects[1].verdicts == {}
    assert do_own_work(core)[2].verdicts == {Verdict.APPLIED: 1}


def test_without_the_anchor_a_model_that_nobody_uses_is_left_alone():
    core = make_core(anchor=False, defended=False, num_neighbors=1, temperature=0.01)
    effects = core.handle(Started(frozenset({FRIEND})))
    assert Differentiate not in kinds(effects)
    core.handle(Measured(ME, 0, 5.0))
    core.handle(ModelFetched(FRIEND, 0, snapshot(0)))
    (differentiate,) = core.handle(Measured(FRIEND, 0, 1.0))
    assert differentiate.peer_id == FRIEND
    core.handle(Differentiated(FRIEND, 0, tensors(1.0), 4))
    effects = core.handle(RoundClosed(0))
    assert kinds(effects)[0] is RoundFinished  # no step, and no new version
    assert core.model.version == Version(0, 0)


def test_a_newcomer_starts_from_the_best_model_that_is_old_enough():
    core = make_core(num_neighbors=1, survey=8)
    effects = core.handle(Started(frozenset({FRIEND, STRANGER})))
    assert sum(isinstance(effect, Fetch) for effect in effects) == 2
    core.handle(Measured(ME, 0, 2.3))
    core.handle(ModelFetched(FRIEND, 0, snapshot(50, value=7.0)))
    core.handle(ModelFetched(STRANGER, 0, snapshot(2, value=8.0)))
    core.handle(Measured(STRANGER, 0, 0.1))
    (adopt,) = core.handle(Measured(FRIEND, 0, 0.4))
    assert isinstance(adopt, Adopt)
    assert adopt.peer_id == FRIEND
    effects = core.handle(Stepped(0, adopt.model))
    assert kinds(effects)[:2] == [Publish, RoundFinished]
    assert core.model.version == Version(0, 1)
    assert effects[1].loss_averages[ME] == 0.4


def test_a_newcomer_of_the_literal_algorithm_starts_from_the_initial_parameters():
    core = make_core(num_neighbors=1, **PROFILES["paper"])
    core.handle(Started(frozenset({FRIEND})))
    core.handle(Measured(ME, 0, 2.3))
    core.handle(ModelFetched(FRIEND, 0, snapshot(50)))
    assert Adopt not in kinds(core.handle(Measured(FRIEND, 0, 0.1)))


def test_a_restored_peer_is_no_newcomer_and_continues_with_the_same_draws():
    core = make_core(num_neighbors=1, survey=8)
    core.handle(Started(frozenset()))
    do_own_work(core)
    saved = core.snapshot()
    again = [make_core(num_neighbors=1, restored=saved, incarnation=1) for _ in range(2)]
    everyone = frozenset(peer_id(number) for number in range(1, 9))
    first, second = (each.handle(Started(everyone)) for each in again)
    assert first[0].snapshot.version == Version(1, 1)
    assert [e for e in first if isinstance(e, Fetch)] == [e for e in second if isinstance(e, Fetch)]
    assert sum(isinstance(effect, Fetch) for effect in first) == 1


def test_stop_ends_everything_and_keeps_the_last_finished_round():
    core = make_core()
    core.handle(Started(frozenset()))
    do_own_work(core)
    core.handle(Measured(ME, 1, 0.1))
    assert kinds(core.handle(StopRequested())) == [Stopped]
    assert core.handle(Differentiated(ME, 1, tensors(1.0), 4)) == ()
    saved = core.snapshot()
    assert saved.round_number == 1
    assert saved.loss_averages == {ME: 1.0}


def test_a_loss_that_is_not_finite_takes_a_peer_out_of_the_mixture():
    core = make_core(num_neighbors=1)
    core.handle(Started(frozenset({FRIEND})))
    core.handle(Measured(ME, 0, 1.0))
    core.handle(Differentiated(ME, 0, tensors(1.0), 4))
    core.handle(ModelFetched(FRIEND, 0, snapshot(1)))
    assert kinds(core.handle(Measured(FRIEND, 0, float("nan")))) == [ReadyToClose]
    assert core.prediction_weights() == {ME: 1.0}


def test_a_newcomer_takes_its_first_steps_before_it_shows_itself():
    core = make_core(num_neighbors=1, start="oneshot", start_steps=3)
    (train,) = core.handle(Started(frozenset({FRIEND})))
    assert train == Train(0, tensors(0.0), (Batch(0), Batch(1), Batch(2)))
    effects = core.handle(Stepped(0, tensors(5.0)))
    assert kinds(effects) == [Publish, Fetch, Measure, Differentiate]
    assert effects[0].snapshot.version == Version(0, 0)
    assert effects[2].model == tensors(5.0)
    assert effects[3].batch == Batch(3)


def test_a_round_of_several_steps_exchanges_once_and_trains_on_its_own_batches():
    core = make_core(exchange_every=3, start="oneshot", start_steps=2, rounds=2)
    core.handle(Started(frozenset()))
    core.handle(Stepped(0, tensors(0.0)))
    core.handle(Measured(ME, 0, 1.0))
    core.handle(Differentiated(ME, 0, tensors(1.0), 4))
    (step,) = core.handle(RoundClosed(0))
    assert step.batches == (Batch(3), Batch(4))
    effects = core.handle(Stepped(0, tensors(1.0)))
    assert effects[-1].batch == Batch(5)
    assert AlgorithmSettings(exchange_every=3, start_steps=2).steps_after(2) == 8


def core_in_its_last_rounds(rounds: int, final_full: float):
    """Two rounds were measured; the others are the last ones."""
    options = {"num_neighbors": 1, "epsilon": 0.0, "alarm": 1.0}
    core = make_core(rounds=rounds, final_full=final_full, **options)
    core.handle(Started(frozenset({FRIEND})))
    for _ in range(2):
        effects = do_round(core, own=2.0, friend=2.0)
    assert own_batch(effects) == Batch(2, full=True)
    return core


def test_in_the_last_rounds_weights_stay_and_the_holdout_is_trained_on():
    core = core_in_its_last_rounds(rounds=3, final_full=0.34)
    before = core.training_weights()
    core.handle(Measured(ME, 2, 0.1))
    core.handle(ModelFetched(FRIEND, 2, snapshot(2)))
    (theirs,) = core.handle(Measured(FRIEND, 2, 0.5))
    assert (theirs.peer_id, theirs.batch) == (FRIEND, Batch(2, full=True))
    core.handle(Differentiated(FRIEND, 2, tensors(1.0), 4))
    core.handle(Differentiated(ME, 2, tensors(1.0), 4))
    core.handle(RoundClosed(2))
    effects = core.handle(Stepped(2, tensors(2.0)))
    assert kinds(effects) == [Publish, RoundFinished, Finished]
    assert effects[1].training_weights == before
    assert core.mixture()[FRIEND] == tensors(1.0)


def do_round(core, *, own: float, friend: float):
    number = core.round_number
    core.handle(Measured(ME, number, own))
    core.handle(ModelFetched(FRIEND, number, snapshot(number)))
    core.handle(Measured(FRIEND, number, friend))
    for whose in (ME, FRIEND):
        core.handle(Differentiated(whose, number, tensors(1.0), 4))
    core.handle(RoundClosed(number))
    return core.handle(Stepped(number, tensors(number + 1.0)))


def own_batch(effects) -> Batch:
    (own,) = [each for each in effects if isinstance(each, Differentiate) and each.peer_id == ME]
    return own.batch


def test_data_that_change_in_the_last_rounds_are_measured_for_as_long_as_at_first():
    core = core_in_its_last_rounds(rounds=8, final_full=0.75)
    effects = do_round(core, own=4.0, friend=9.0)
    assert own_batch(effects) == Batch(3)  # not on the holdout
    assert core.snapshot().measuring_until == 5
    before = core.training_weights()
    effects = do_round(core, own=4.0, friend=1.0)
    assert own_batch(effects) == Batch(4)
    assert core.training_weights()[FRIEND] > before[FRIEND]
    effects = do_round(core, own=4.0, friend=1.0)
    assert own_batch(effects) == Batch(5, full=True)  # settled again


def full_batches(answered: bool, rounds: int = 10) -> list[bool]:
    """Whether each round trains on the holdout, of a peer among strangers that nobody likes."""
    options = {"exploration": "friends", "num_neighbors": 1, "probes": 1.0, "survey": 0}
    core = make_core(rounds=rounds, final_full=0.8, **options)
    effects = core.handle(Started(frozenset(peer_id(number) for number in range(1, 40))))
    full = []
    for number in range(rounds):
        full.append(own_batch(effects).full)
        core.handle(Measured(ME, number, 0.1))
        for fetch in [each for each in effects if isinstance(each, Fetch)]:
            if answered:
                core.handle(ModelFetched(fetch.peer_id, number, snapshot(number)))
                core.handle(Measured(fetch.peer_id, number, 9.0))
            else:
                core.handle(FetchFailed(fetch.peer_id, number))
        core.handle(Differentiated(ME, number, tensors(1.0), 4))
        core.handle(RoundClosed(number))
        effects = core.handle(Stepped(number, tensors(1.0)))
    return full


def test_who_still_searches_trains_on_the_holdout_later():
    assert full_batches(answered=True) == [False] * 6 + [True] * 4
    assert full_batches(answered=False) == [False] * 2 + [True] * 8


def test_a_friend_that_changes_loses_its_weight_in_the_last_rounds_too():
    core = core_in_its_last_rounds(rounds=8, final_full=0.75)
    before = core.training_weights()
    do_round(core, own=0.1, friend=2.9)
    assert core.training_weights() == before
    do_round(core, own=0.1, friend=7.0)
    assert core.training_weights()[FRIEND] < 0.01 < before[FRIEND]
    assert core.snapshot().measuring_until == 0


def test_a_last_round_without_anybody_to_fetch_closes_by_the_own_gradient_alone():
    core = make_core(rounds=1, final_full=1.0)
    effects = core.handle(Started(frozenset()))
    assert kinds(effects) == [Publish, Measure, Differentiate]
    core.handle(Differentiated(ME, 0, tensors(1.0), 4))
    assert kinds(core.handle(Measured(ME, 0, 1.0))) == [ReadyToClose]


def averaging_core(**settings):
    return make_core(**{**PROFILES["thrifty"], "start": "cold", "num_neighbors": 1, **settings})


def test_averaging_mixes_the_fetched_models_into_the_own_one_and_trains_on():
    core = averaging_core(exchange_every=2, survey=0)
    effects = core.handle(Started(frozenset({FRIEND})))
    assert kinds(effects) == [Publish, Fetch, Measure]
    core.handle(Measured(ME, 0, 1.0))
    core.handle(ModelFetched(FRIEND, 0, snapshot(0, value=4.0)))
    assert kinds(core.handle(Measured(FRIEND, 0, 1.0))) == [ReadyToClose]
    (train,) = core.handle(RoundClosed(0))
    assert train == Train(0, tensors(2.0), (Batch(0), Batch(1)))
    effects = core.handle(Stepped(0, tensors(3.0)))
    assert effects[1].collaboration_weights == {ME: 0.5, FRIEND: 0.5}
    assert core.prediction_weights() == {ME: 1.0}
    assert core.mixture() == {ME: tensors(3.0)}


def test_averaging_closes_with_an_average_of_what_all_have_learned():
    core = averaging_core(exchange_every=2, survey=0, rounds=1)
    core.handle(Started(frozenset({FRIEND})))
    core.handle(Measured(ME, 0, 1.0))
    core.handle(ModelFetched(FRIEND, 0, snapshot(0, value=4.0)))
    core.handle(Measured(FRIEND, 0, 1.0))
    (train,) = core.handle(RoundClosed(0))
    assert train == Train(0, tensors(2.0), ())
    assert kinds(core.handle(Stepped(0, tensors(2.0)))) == [Publish, RoundFinished, Finished]
    assert core.mixture() == {ME: tensors(2.0)}


def test_a_budget_of_steps_says_how_many_rounds_and_back():
    averaging = AlgorithmSettings(exchange="average", exchange_every=10, start_steps=10)
    assert (averaging.rounds_for(300), averaging.steps_after(30, closed=True)) == (30, 300)
    assert averaging.steps_after(30) == 310
    gradients = AlgorithmSettings(exchange_every=3, start_steps=10)
    assert (gradients.rounds_for(300), gradients.steps_after(96, closed=True)) == (96, 298)
    assert [averaging.rounds_for(steps) for steps in (0, 10, 19, 20)] == [0, 0, 0, 2]


def test_averaging_leaves_out_models_of_small_weight_and_those_that_did_not_come():
    core = averaging_core(num_neighbors=2, survey=0)
    core.handle(Started(frozenset({FRIEND, STRANGER})))
    core.handle(Measured(ME, 0, 1.0))
    core.handle(FetchFailed(FRIEND, 0))
    core.handle(ModelFetched(STRANGER, 0, snapshot(0, value=9.0)))
    core.handle(Measured(STRANGER, 0, 9.0))
    (train,) = core.handle(RoundClosed(0))
    assert train.model == tensors(0.0)


def test_a_published_model_tells_of_its_owners_best_collaborators_and_others_look_at_them():
    core = make_core(num_neighbors=1, survey=0)
    core.handle(Started(frozenset({FRIEND})))
    core.handle(ModelFetched(FRIEND, 0, snapshot(0)))
    core.handle(Measured(FRIEND, 0, 1.0))
    published = do_own_work_with_friend(core)[0]
    assert not published.batches
    assert core.model.friends == (FRIEND,)

    curious = make_core(num_neighbors=1, epsilon=0.0, exploration="friends", probes=1.0, survey=0)
    curious.handle(Started(frozenset({FRIEND})))
    told = ModelSnapshot(version=Version(0, 0), tensors=tensors(1.0), friends=(STRANGER, ME))
    curious.handle(ModelFetched(FRIEND, 0, told))
    curious.handle(Measured(FRIEND, 0, 1.0))
    curious.handle(NeighborsChanged(frozenset({peer_id(n) for n in range(1, 50)})))
    effects = do_own_work_with_friend(curious)
    assert {e.peer_id for e in effects if isinstance(e, Fetch)} == {FRIEND, STRANGER}


def test_who_asks_for_the_own_model_again_is_looked_at_in_return():
    core = make_core(num_neighbors=0, survey=0)
    assert core.handle(ModelAsked(FRIEND)) == ()  # before the start: nobody is known yet
    core = make_core(num_neighbors=1, epsilon=0.0, exploration="friends", probes=1.0, survey=0)
    core.handle(Started(frozenset({FRIEND})))
    core.handle(ModelFetched(FRIEND, 0, snapshot(0)))
    core.handle(Measured(FRIEND, 0, 1.0))
    core.handle(NeighborsChanged(frozenset({peer_id(n) for n in range(1, 50)})))
    asking = {STRANGER, peer_id(99)}  # the latter isn't known: nobody to ask back
    for each in asking:
        core.handle(ModelAsked(each))
    do_own_work_with_friend(core)
    core.handle(Measured(ME, 1, 2.0))
    core.handle(ModelFetched(FRIEND, 1, snapshot(1)))
    core.handle(Measured(FRIEND, 1, 1.0))
    for each in range(3, 50):
        core.handle(FetchFailed(peer_id(each), 1))
    for each in asking:
        core.handle(ModelAsked(each))
    core.handle(Differentiated(ME, 1, tensors(1.0), 4))
    core.handle(Differentiated(FRIEND, 1, tensors(1.0), 4))
    core.handle(RoundClosed(1))
    effects = core.handle(Stepped(1, tensors(2.0)))
    assert STRANGER in {e.peer_id for e in effects if isinstance(e, Fetch)}


def test_a_sudden_loss_of_the_own_model_makes_a_peer_look_at_everybody_anew():
    core = make_core(num_neighbors=1, epsilon=0.0, alarm=1.0, survey=8, adopt_after=0)
    everyone = frozenset(peer_id(n) for n in range(1, 6))
    core.handle(Started(frozenset()))
    do_own_work(core, own_loss=0.5)
    core.handle(NeighborsChanged(everyone))
    effects = do_own_work_calmly(core, own_loss=0.6)
    assert sum(isinstance(effect, Fetch) for effect in effects) == 1
    effects = do_own_work_calmly(core, own_loss=2.5)
    assert sum(isinstance(effect, Fetch) for effect in effects) == 5


def do_own_work_calmly(core, own_loss):
    """A round whose fetches all fail."""
    number = core.round_number
    core.handle(Measured(ME, number, own_loss))
    core.handle(Differentiated(ME, number, tensors(1.0), 4))
    for n in range(1, 6):
        core.handle(FetchFailed(peer_id(n), number))
    core.handle(RoundClosed(number))
    return core.handle(Stepped(number, tensors(1.0)))


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="anchor = false"):
        AlgorithmSettings(anchor=False, exchange_every=5)


class Swarm(RuleBasedStateMachine):
    """Three cores over a fake wire that delays, loses, reorders and cuts; nothing may stall."""

    @initialize(
        seed=st.integers(0, 2**16),
        profile=st.sampled_from(sorted(PROFILES)),
        final_full=st.sampled_from([0.0, 1.0 - 2e-6]),  # of a million rounds: all but the first two
        clustered_by=st.sampled_from(["all", "one"]),
    )
    def start(self, seed, profile, final_full, clustered_by):
        self.settings = AlgorithmSettings(
            **{
                **PROFILES[profile],
                "num_neighbors": 2,
                "final_full": final_full,
                "clustered_by": clustered_by,
            }
        )
        self.ids = [peer_id(number) for number in range(3)]
        self.cores = {
            each: PeerCore(
                peer_id=each,
                settings=self.settings,
                model=tensors(float(number)),
                incarnation=0,
                rounds=1_000_000,
                rng=np.random.default_rng((seed, number)),
                num_examples=10 * number,
            )
            for number, each in enumerate(self.ids)
        }
        self.replicas = {
            each: PeerCore(
                peer_id=each,
                settings=self.settings,
                model=tensors(float(number)),
                incarnation=0,
                rounds=1_000_000,
                rng=np.random.default_rng((seed, number)),
                num_examples=10 * number,
            )
            for number, each in enumerate(self.ids)
        }
        self.published, self.told = {}, {}
        self.pending = []
        self.done = dict.fromkeys(self.ids, 0)
        for each in self.ids:
            self.feed(each, Started(frozenset(self.ids)))

    def feed(self, owner, event):
        effects = self.cores[owner].handle(event)
        assert effects == self.replicas[owner].handle(event)  # replay
        for effect in effects:
            match effect:
                case Publish(published):
                    old = self.published.get(owner)
                    assert old is None or old.version < published.version
                    self.published[owner] = published
                case PublishGroups(groups):
                    assert owner in groups.labels
                    self.told[owner] = groups
                case RoundFinished():
                    assert sum(effect.prediction_weights.values()) == pytest.approx(1.0)
                    self.done[owner] += 1
                case _:
                    self.pending.append((owner, effect))

    def answer(self, owner, effect, *, lost):
        match effect:
            case Fetch(other, number, have):
                if lost or other not in self.published:
                    self.feed(owner, FetchFailed(other, number))
                elif have is not None and self.published[other].version == have.version:
                    self.feed(owner, ModelUnchanged(other, number))
                else:
                    self.feed(owner, ModelFetched(other, number, self.published[other]))
            case Measure(other, number, model):
                loss = float(np.abs(model["weight"]).mean())
                self.feed(owner, Measured(other, number, loss))
            case Differentiate(other, number, model):
                self.feed(owner, Differentiated(other, number, model, 4))
            case Cluster(number, models):
                others = sorted(models.keys() - {owner})
                labels = {owner: 0, **{each: at % 2 for at, each in enumerate(others)}}
                self.feed(owner, Clustered(number, Groups.of(labels), "every other one"))
            case AskGroups(other, number):
                if lost or other not in self.told:
                    self.feed(owner, AskFailed(other, number))
                else:
                    self.feed(owner, GroupsTold(other, number, self.told[other]))
            case SendGradient(other, sent):
                if not lost:
                    self.feed(other, GradientArrived(sent))
            case ReadyToClose(number):
                self.feed(owner, RoundClosed(number))
            case Step(number, gradient):
                model = self.cores[owner].model.tensors
                stepped = tensors(float(model["weight"][0] - 0.01 * gradient["weight"][0]))
                self.feed(owner, Stepped(number, stepped))
            case Train(number, model, _) | Adopt(number, _, model):
                self.feed(owner, Stepped(number, model))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), lost=st.booleans())
    def deliver(self, data, lost):
        index = data.draw(st.integers(0, len(self.pending) - 1))
        self.answer(*self.pending.pop(index), lost=lost)

    @rule(data=st.data())
    def cut(self, data):
        owner = data.draw(st.sampled_from(self.ids))
        seen = frozenset(data.draw(st.sets(st.sampled_from(self.ids))))
        self.feed(owner, NeighborsChanged(seen))

    @rule()
    def settle(self):
        """Whatever happened before, answering all that is pending closes another round."""
        before = dict(self.done)
        for _ in range(200):
            if all(self.done[each] > before[each] for each in self.ids):
                return
            self.answer(*self.pending.pop(0), lost=False)
        raise AssertionError("a round did not end though everything was answered")

    @invariant()
    def every_core_waits_for_something(self):
        if hasattr(self, "pending"):
            assert {owner for owner, effect in self.pending} == set(self.ids)


TestSwarm = Swarm.TestCase
TestSwarm.settings = hypothesis_settings(max_examples=40, stateful_step_count=60, deadline=None)


TWO_GROUPS = Groups.of({ME: 0, FRIEND: 0, STRANGER: 1})
TWO_CLUSTERS = Clustered(0, TWO_GROUPS, "two clusters")


def warm_core(**settings):
    return make_core(
        **{"warm_start": "odcl", "start": "oneshot", "start_steps": 2, "survey": 0, **settings}
    )


def gather_all(core):
    """Take the first steps, and hand over the models of a friend and a stranger."""
    (train,) = core.handle(Started(frozenset({FRIEND, STRANGER})))
    effects = core.handle(Stepped(0, tensors(2.0)))
    fetches = [effect for effect in effects if isinstance(effect, Fetch)]
    assert [(fetch.peer_id, fetch.patient) for fetch in fetches] == [
        (FRIEND, True),
        (STRANGER, True),
    ]
    assert core.handle(Measured(ME, 0, 1.5)) == []
    friend = replace(snapshot(0, value=4.0), num_examples=30)
    assert core.handle(ModelFetched(FRIEND, 0, friend)) == []
    (cluster,) = core.handle(ModelFetched(STRANGER, 0, snapshot(0, value=-4.0)))
    return train, cluster


def test_a_warm_start_fetches_everybody_once_and_takes_its_cluster_for_as_good_as_itself():
    core = warm_core(exchange="average", exchange_every=2)
    train, cluster = gather_all(core)
    assert [batch.full for batch in train.batches] == [False, False]
    assert cluster.models == {ME: tensors(2.0), FRIEND: tensors(4.0), STRANGER: tensors(-4.0)}
    assert cluster.initial == tensors(0.0)
    published, ready = core.handle(TWO_CLUSTERS)
    assert (published, ready) == (PublishGroups(TWO_GROUPS), ReadyToClose(0))
    (train,) = core.handle(RoundClosed(0))
    assert train == Train(0, tensors(3.0), (Batch(2), Batch(3)))
    effects = core.handle(Stepped(0, tensors(3.5)))
    assert kinds(effects)[:2] == [Publish, RoundFinished]
    assert effects[1].loss_averages == {ME: 1.5, FRIEND: 1.5}
    assert effects[1].collaboration_weights == {ME: 0.5, FRIEND: 0.5}
    assert (effects[1].clustering, effects[1].clustered_by) == (TWO_GROUPS.digest, ME)
    assert not any(isinstance(e, Fetch) and e.patient for e in effects)


def test_one_shot_averages_the_cluster_and_goes_on_serving_what_it_learned_alone():
    core = warm_core(exchange="average", exchange_every=2, rounds=1)
    train, _ = gather_all(core)
    assert [batch.full for batch in train.batches] == [True, True]
    core.handle(TWO_CLUSTERS)
    assert core.handle(RoundClosed(0)) == [Train(0, tensors(3.0), ())]
    assert kinds(core.handle(Stepped(0, tensors(3.0)))) == [RoundFinished, Finished]
    assert core.mixture() == {ME: tensors(3.0)}
    again = warm_core(
        exchange="average", rounds=1, num_examples=10, incarnation=1, restored=core.snapshot()
    )
    shown, told, finished = again.handle(Started(frozenset({FRIEND})))
    assert (told, finished) == (PublishGroups(TWO_GROUPS), Finished())
    assert shown.snapshot == ModelSnapshot(
        version=Version(1, 1), tensors=tensors(2.0), num_examples=10
    )
    assert again.model.tensors == tensors(3.0)


def test_a_one_shot_peer_that_is_given_more_rounds_shows_its_own_model_again():
    core = warm_core(exchange="average", exchange_every=2, rounds=1)
    gather_all(core)
    core.handle(TWO_CLUSTERS)
    core.handle(RoundClosed(0))
    core.handle(Stepped(0, tensors(3.0)))
    again = warm_core(exchange="average", rounds=2, incarnation=1, restored=core.snapshot())
    again.handle(Started(frozenset()))
    again.handle(Measured(ME, 1, 1.0))
    again.handle(RoundClosed(1))
    effects = again.handle(Stepped(1, tensors(5.0)))
    assert effects[0].snapshot.tensors == tensors(5.0)
    assert again.snapshot().shown is None


def test_a_clusters_average_is_weighted_by_examples_and_later_ones_are_not():
    core = warm_core(exchange="average", exchange_every=1, num_examples=10)
    gather_all(core)
    core.handle(TWO_CLUSTERS)
    (train,) = core.handle(RoundClosed(0))
    assert train.model == tensors(3.5)
    publish, finished, *_ = core.handle(Stepped(0, tensors(3.5)))
    assert publish.snapshot.num_examples == 10
    assert finished.collaboration_weights == {ME: 0.25, FRIEND: 0.75}
    assert core.collaboration_weights() == {ME: 0.5, FRIEND: 0.5}


def test_a_member_of_a_large_cluster_counts_however_little_its_part_is():
    core = warm_core(exchange="average", exchange_every=1, min_gradient_weight=0.3, num_examples=10)
    gather_all(core)
    core.handle(TWO_CLUSTERS)
    (train,) = core.handle(RoundClosed(0))
    assert train.model == tensors(3.5)


def test_only_who_averages_clusters_tells_how_many_examples_it_has():
    for settings in ({}, {"exchange": "average", "warm_start": "none"}):
        core = warm_core(num_examples=10, **settings)
        core.handle(Started(frozenset()))
        effects = core.handle(Stepped(0, tensors(2.0)))
        assert effects[0].snapshot.num_examples == 0


def test_a_warm_start_without_anybody_there_is_learning_alone():
    core = warm_core(exchange="average", exchange_every=2)
    core.handle(Started(frozenset({FRIEND})))
    core.handle(Stepped(0, tensors(2.0)))
    core.handle(FetchFailed(FRIEND, 0))
    alone, ready = core.handle(Measured(ME, 0, 1.5))
    assert (alone, ready) == (PublishGroups(Groups.of({ME: 0})), ReadyToClose(0))
    (train,) = core.handle(RoundClosed(0))
    assert train.model == tensors(2.0)
    assert core.handle(Stepped(0, tensors(2.0)))[1].clustering == ""


def test_a_warm_started_peer_sends_gradients_to_its_cluster():
    core = warm_core(num_neighbors=1)
    gather_all(core)
    _, differentiate = core.handle(TWO_CLUSTERS)
    assert (type(differentiate), differentiate.peer_id) == (Differentiate, FRIEND)


def test_a_warm_start_needs_first_steps():
    with pytest.raises(ValueError, match=r'warm_start.*set start = "oneshot"'):
        AlgorithmSettings(warm_start="odcl", start="cold")


FIRST, SECOND, OTHER, LATER = (peer_id(number) for number in (1, 2, 4, 5))
AT_THREE = peer_id(3)


def asking_core(**settings):
    """A core whose id is the third, ready to gather: of five, two come before it."""
    core = PeerCore(
        peer_id=AT_THREE,
        settings=AlgorithmSettings(
            **{**PLAIN, "warm_start": "odcl", "start": "oneshot", "start_steps": 2, "survey": 0}
            | {"exchange": "average", "exchange_every": 1, "clustered_by": "one", **settings}
        ),
        model=tensors(0.0),
        incarnation=0,
        rounds=None,
        rng=np.random.default_rng(0),
        num_examples=10,
    )
    core.handle(Started(frozenset({FIRST, SECOND, OTHER, LATER})))
    effects = core.handle(Stepped(0, tensors(2.0)))
    assert core.handle(Measured(AT_THREE, 0, 1.0)) == []
    return core, [effect for effect in effects if isinstance(effect, Fetch | AskGroups)]


def in_two(*own: str) -> Groups:
    return Groups.of({each: int(each not in own) for each in (FIRST, SECOND, AT_THREE, OTHER)})


def fetched(effects) -> set[str]:
    assert all(isinstance(effect, Fetch) and effect.patient for effect in effects)
    return {effect.peer_id for effect in effects}


def test_who_is_not_the_first_asks_the_first_and_fetches_its_own_cluster_alone():
    core, effects = asking_core()
    assert effects == [AskGroups(FIRST, 0)]
    groups = in_two(AT_THREE, OTHER)
    assert fetched(core.handle(GroupsTold(FIRST, 0, groups))) == {OTHER}
    told, ready = core.handle(
        ModelFetched(OTHER, 0, replace(snapshot(0, value=4.0), num_examples=30))
    )
    assert (told, ready) == (PublishGroups(groups), ReadyToClose(0))
    assert core.handle(RoundClosed(0)) == [Train(0, tensors(3.5), (Batch(2),))]
    finished = core.handle(Stepped(0, tensors(3.5)))[1]
    assert (finished.clustering, finished.clustered_by) == (groups.digest, FIRST)
    assert finished.collaboration_weights == {AT_THREE: 0.25, OTHER: 0.75}
    assert core.snapshot().groups == groups


def test_the_first_of_all_asks_nobody_and_fetches_everybody():
    core = warm_core(clustered_by="one")
    _, cluster = gather_all(core)
    assert set(cluster.models) == {ME, FRIEND, STRANGER}


def test_whoever_fails_to_answer_is_followed_by_the_next_and_at_last_by_oneself():
    core, _ = asking_core()
    assert core.handle(AskFailed(SECOND, 0)) == []  # whom nobody has asked
    assert core.handle(AskFailed(FIRST, 0)) == [AskGroups(SECOND, 0)]
    assert core.handle(GroupsTold(FIRST, 0, in_two(AT_THREE))) == []  # too late
    assert fetched(core.handle(AskFailed(SECOND, 0))) == {FIRST, SECOND, OTHER, LATER}
    for gone in (FIRST, SECOND, LATER):
        core.handle(FetchFailed(gone, 0))
    (cluster,) = core.handle(ModelFetched(OTHER, 0, snapshot(0, value=4.0)))
    assert set(cluster.models) == {AT_THREE, OTHER}
    published, _ = core.handle(Clustered(0, Groups.of({AT_THREE: 0, OTHER: 0}), "one cluster"))
    assert isinstance(published, PublishGroups)
    core.handle(RoundClosed(0))
    assert core.handle(Stepped(0, tensors(3.0)))[1].clustered_by == AT_THREE


def test_no_more_than_some_are_asked_in_vain():
    ids = [peer_id(number) for number in range(2 * MOST_ASKED)]
    gathering = Gathering(peer_id(99), AlgorithmSettings(clustered_by="one"))
    rng, asked = np.random.default_rng(0), []
    while not (wanted := gathering.begin(Candidates(frozenset(ids), ""), rng)):
        asked.append(gathering.asked)
    assert asked == ids[:MOST_ASKED]
    assert wanted == set(ids)


@pytest.mark.parametrize(
    "groups",
    [
        Groups.of({FIRST: 0, SECOND: 0, OTHER: 1}),  # without the asker
        Groups.of({FIRST: 0, AT_THREE: 1, peer_id(77): 1}),  # with strangers only
    ],
)
def test_an_answer_that_knows_no_cluster_of_the_asker_makes_it_gather_itself(groups):
    core, _ = asking_core()
    effects = core.handle(GroupsTold(FIRST, 0, groups))
    assert fetched(effects) == {FIRST, SECOND, OTHER, LATER}
    assert core.snapshot().groups == Groups.of({AT_THREE: 0})


def test_members_who_do_not_come_are_left_out_and_if_none_comes_everybody_is_fetched():
    core, _ = asking_core()
    groups = in_two(AT_THREE, SECOND, OTHER)
    assert fetched(core.handle(GroupsTold(FIRST, 0, groups))) == {SECOND, OTHER}
    assert core.handle(FetchFailed(SECOND, 0)) == []
    told, ready = core.handle(ModelFetched(OTHER, 0, snapshot(0, value=4.0)))
    assert (told, ready) == (PublishGroups(groups), ReadyToClose(0))
    core, _ = asking_core()
    core.handle(GroupsTold(FIRST, 0, groups))
    core.handle(FetchFailed(SECOND, 0))
    effects = core.handle(FetchFailed(OTHER, 0))
    assert fetched(effects) == {FIRST, SECOND, OTHER, LATER}
    for each in (FIRST, SECOND, OTHER):
        assert core.handle(FetchFailed(each, 0)) == []
    alone, ready = core.handle(FetchFailed(LATER, 0))
    assert (alone, ready) == (PublishGroups(Groups.of({AT_THREE: 0})), ReadyToClose(0))


def test_a_peer_that_is_said_to_be_alone_learns_alone_in_that_round():
    core, _ = asking_core()
    groups = in_two(AT_THREE)
    assert core.handle(GroupsTold(FIRST, 0, groups)) == [PublishGroups(groups), ReadyToClose(0)]


def test_a_restored_peer_tells_what_it_knew_and_asks_nobody_again():
    core, _ = asking_core()
    groups = in_two(AT_THREE)
    core.handle(GroupsTold(FIRST, 0, groups))
    core.handle(RoundClosed(0))
    core.handle(Stepped(0, tensors(2.0)))
    again = make_core(
        warm_start="odcl", start="oneshot", clustered_by="one", restored=core.snapshot()
    )
    effects = again.handle(Started(frozenset({FIRST})))
    assert effects[1] == PublishGroups(groups)
    assert AskGroups not in kinds(effects)
