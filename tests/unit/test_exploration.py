"""Whom a round looks at: properties of the explorer, without models."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest
from helpers import peer_id
from hypothesis import given
from hypothesis import strategies as st

from peer.algorithm import AlgorithmSettings
from peer.exploration import Candidates, Explorer, ExplorerState

EVERYONE = [peer_id(number) for number in range(40)]


ME = peer_id(99)


def candidates(count: int = 40) -> Candidates:
    return Candidates(frozenset([*EVERYONE[:count], ME]), ME)


def make_explorer(seed: int = 0, state=None, **options) -> Explorer:
    return Explorer(AlgorithmSettings(**options), np.random.default_rng(seed), state)


def choose(explorer, among=None, weights=None, friends=None, fresh=(), known=None):
    weights = weights or {}
    known = weights.keys() if known is None else known
    return explorer.choose(
        candidates() if among is None else among, weights, friends or {}, fresh, known
    )


def friends_of(*numbers: int) -> dict:
    """Weights as they are when these peers are as good as oneself and nobody else was measured."""
    return {peer_id(number): 1 / (len(numbers) + 1) for number in numbers}


settings = st.builds(
    AlgorithmSettings,
    num_neighbors=st.integers(1, 6),
    epsilon=st.sampled_from([0.0, 0.3, 1.0]),
    exploration=st.sampled_from(["friends", "uniform"]),
    probes=st.sampled_from([0.0, 0.5, 2.0, 7.0]),
    min_probes=st.sampled_from([0.0, 0.1, 3.0]),
    survey=st.integers(0, 10),
    temperature=st.sampled_from([0.01, 0.3, 1.0]),
)
peers = st.sampled_from([*EVERYONE, ME])
asks = st.lists(peers, max_size=8)
told = st.dictionaries(peers, st.lists(peers, max_size=8), max_size=5)


@given(settings, st.integers(0, 40), st.data())
def test_choices_are_bounded_distinct_reachable_and_never_self(options, count, data):
    explorer = Explorer(options, np.random.default_rng(0))
    among = candidates(count)
    explorer.begin_survey(among)
    known: set = set()
    for _ in range(6):
        for asker in data.draw(asks):
            explorer.asked_by(asker)
        liked = st.sampled_from(sorted(known)) if known else st.nothing()
        likings = data.draw(st.dictionaries(liked, st.floats(0, 1)))
        total = sum(likings.values()) + 0.1
        weights = {p: w / total for p, w in sorted(likings.items()) if p in among.members}
        fresh = data.draw(st.sets(peers))
        choice = choose(explorer, among, weights, data.draw(told), fresh, known | weights.keys())
        assert len(set(choice.sampled)) == len(choice.sampled)
        assert len(choice.sampled) == min(options.num_neighbors, count)
        assert list(choice.sampled) == sorted(choice.sampled)
        assert set(among.ordered).issuperset(choice.sampled)
        assert set(among.ordered).issuperset(choice.probed)
        assert choice.probed.isdisjoint(choice.sampled)
        most = max(options.probes, options.min_probes)
        assert len(choice.probed) <= options.survey + int(np.ceil(most))
        looked = {*choice.sampled, *choice.probed}
        for each in looked:
            explorer.measured({each}, news=False)
        known |= looked


@given(st.data())
def test_a_restored_explorer_goes_on_with_the_same_choices(data):
    explorer = make_explorer(survey=5)
    explorer.begin_survey(candidates())
    for _ in range(3):
        for asker in data.draw(asks):
            explorer.asked_by(asker)
        choose(explorer)
    before = explorer.snapshot()
    saved = msgspec.convert(msgspec.to_builtins(before, order="sorted"), ExplorerState)
    assert saved == before
    twin = Explorer(AlgorithmSettings(survey=5), copy.deepcopy(explorer._rng), saved)
    for _ in range(3):
        for asker in data.draw(asks):
            explorer.asked_by(asker)
            twin.asked_by(asker)
        assert choose(explorer) == choose(twin)
    assert explorer.snapshot() == twin.snapshot()
    assert saved.asked is not twin.snapshot().asked


def test_a_snapshot_does_not_change_with_the_explorer():
    explorer = make_explorer(survey=5)
    explorer.begin_survey(candidates())
    saved = explorer.snapshot()
    before = copy.deepcopy(saved)
    explorer.asked_by(EVERYONE[3])
    choose(explorer)
    assert saved == before


def test_neighbors_that_earn_their_places_keep_them_when_the_round_does_not_explore():
    explorer = make_explorer(epsilon=0.0)
    for _ in range(20):
        assert choose(explorer, weights=friends_of(3, 4, 5)).sampled == tuple(EVERYONE[3:6])


def test_a_place_that_nobody_earns_goes_to_a_peer_never_measured():
    # 1 nat above the best: a weight of exp(-1 / 0.3) of its one
    weights = {EVERYONE[1]: 0.5, EVERYONE[2]: 0.5 * np.exp(-1 / 0.3), EVERYONE[3]: 0.02}
    for seed in range(20):
        sampled = choose(make_explorer(seed, epsilon=0.0), weights=weights).sampled
        assert EVERYONE[1] in sampled
        assert EVERYONE[2] not in sampled and EVERYONE[3] not in sampled
        assert len(sampled) == 3


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_who_earns_a_place_depends_on_losses_whatever_the_temperature(temperature):
    weights = {EVERYONE[n]: float(np.exp(-gap / temperature)) for n, gap in ((1, 0.2), (2, 0.4))}
    total = 1.0 + sum(weights.values())  # self has the lowest loss
    weights = {peer: weight / total for peer, weight in weights.items()}
    explorer = make_explorer(epsilon=0.0, temperature=temperature, num_neighbors=2)
    sampled = choose(explorer, weights=weights).sampled
    assert EVERYONE[1] in sampled
    assert EVERYONE[2] not in sampled


def test_where_all_are_known_the_best_have_all_places_as_in_the_paper():
    weights = {peer: 0.9 * 0.1**number for number, peer in enumerate(EVERYONE[:6])}
    explorer = make_explorer(epsilon=0.0)
    choice = choose(explorer, candidates(6), weights)
    assert choice.sampled == tuple(EVERYONE[:3])
    assert choice.probed == frozenset()


def test_unknown_friends_of_friends_are_probed_first():
    tellers = {EVERYONE[3]: (EVERYONE[20], EVERYONE[4]), EVERYONE[5]: (EVERYONE[21],)}
    weights = friends_of(3, 4, 5)
    for seed in range(10):
        explorer = make_explorer(seed, epsilon=0.0, probes=2.0)
        choice = choose(explorer, weights=weights, friends=tellers)
        assert choice.probed == {EVERYONE[20], EVERYONE[21]}


def test_most_places_but_not_all_go_to_proposals_when_there_are_plenty():
    tellers = {EVERYONE[0]: EVERYONE[1:9]}
    proposed = total = 0
    for seed in range(200):
        explorer = make_explorer(seed, epsilon=1.0, probes=0.0)
        sampled = choose(explorer, friends=tellers, known=[EVERYONE[0]]).sampled
        proposed += len({*EVERYONE[1:9]}.intersection(sampled))
        total += len(sampled)
    # 0.75 + 0.25 * 8/39 of them: 0.80, with a standard deviation of 0.016
    assert 0.73 < proposed / total < 0.87


def test_asking_once_says_nothing_and_coming_again_is_answered_with_a_look():
    weights, asker = friends_of(3, 4, 5), EVERYONE[30]
    explorer = make_explorer(epsilon=0.0, probes=1.0)
    explorer.asked_by(asker)
    explorer.asked_by(asker)  # twice in one round is once
    assert asker not in choose(explorer, weights=weights).probed
    explorer.asked_by(asker)
    assert choose(make_explorer(3, explorer.snapshot(), epsilon=0.0), weights=weights).probed == {
        asker
    }
    measured_lately = choose(explorer, weights=weights, fresh={asker})
    assert asker not in measured_lately.probed


def test_an_ask_is_forgotten_once_a_peer_that_mixes_the_model_would_have_asked_again():
    explorer = make_explorer(epsilon=0.0, probes=0.0, refresh_after=2, num_neighbors=1)
    explorer.asked_by(EVERYONE[30])
    for _ in range(2):
        choose(explorer, weights=friends_of(3))
    assert explorer.snapshot().asked == {EVERYONE[30]: 2}
    choose(explorer, weights=friends_of(3))
    assert explorer.snapshot().asked == {}


def test_uniform_exploration_ignores_proposals_and_asks():
    options = {"exploration": "uniform", "probes": 0.0}
    told_of, alone = make_explorer(**options), make_explorer(**options)
    for number in range(50):
        for _ in range(2):
            told_of.asked_by(EVERYONE[number % 40])
        weights = friends_of(1) if number else {}
        tellers = {EVERYONE[1]: EVERYONE[10:18]}
        assert choose(told_of, weights=weights, friends=tellers) == choose(alone, weights=weights)
    assert told_of.snapshot().asked == {}


def test_uniform_exploration_lets_the_best_have_all_places_however_bad():
    explorer = make_explorer(epsilon=0.0, exploration="uniform", probes=0.0)
    weights = {EVERYONE[1]: 1e-3, EVERYONE[2]: 1e-4, EVERYONE[3]: 1e-5}
    assert choose(explorer, weights=weights).sampled == tuple(EVERYONE[1:4])


@given(st.integers(0, 45), st.integers(0, 40))
def test_a_survey_takes_as_many_as_wanted_and_tries_each_three_times(wanted, count):
    explorer = make_explorer(survey=wanted, probes=0.0, num_neighbors=1, epsilon=0.0)
    among = candidates(count)
    explorer.begin_survey(among)
    surveyed = set(explorer.snapshot().survey)
    assert len(surveyed) == min(wanted, count)
    for _ in range(3):
        choice = choose(explorer, among)
        assert surveyed <= {*choice.sampled, *choice.probed}
    assert explorer.snapshot().survey == {}


def test_who_was_measured_or_cannot_be_reached_is_not_surveyed_again():
    explorer = make_explorer(survey=40, probes=0.0, num_neighbors=1, epsilon=0.0)
    explorer.begin_survey(candidates())
    choose(explorer)
    for peer in EVERYONE[:30]:
        explorer.measured({peer}, news=False)
    choice = choose(explorer, candidates(35), known=EVERYONE[:30])
    assert choice.probed | set(choice.sampled) == set(EVERYONE[30:35])


def test_the_number_of_probes_falls_while_all_places_are_earned_and_returns_when_one_is_lost():
    explorer = make_explorer(epsilon=0.0, probes=4.0, min_probes=0.5)
    budgets = []
    for _ in range(12):
        choose(explorer, weights=friends_of(3, 4, 5))
        budgets.append(explorer.snapshot().budget)
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == pytest.approx(3.2) and budgets[-1] == 0.5
    choice = choose(explorer, weights=friends_of(3, 4))
    assert explorer.snapshot().budget == 4.0
    assert 1 <= len(choice.probed) <= 4


def test_probes_look_for_peers_never_measured_and_end_when_there_are_none():
    explorer = make_explorer(probes=3.0, min_probes=0.0, num_neighbors=1, epsilon=0.0)
    known: set = set()
    for _ in range(200):
        choice = choose(explorer, candidates(12), known=known)
        assert choice.probed.isdisjoint(known)
        known.update(choice.sampled, choice.probed)
    assert known == set(EVERYONE[:12])
    assert choose(explorer, candidates(12), known=known).probed == frozenset()


@pytest.mark.parametrize("probes", [0.0, 0.1, 2.0])
def test_a_peer_searches_while_places_are_not_earned_and_it_meets_others(probes):
    explorer = make_explorer(probes=probes, min_probes=0.1)
    assert not explorer.is_searching  # nobody was met yet
    choose(explorer, weights=friends_of(0))
    explorer.measured({EVERYONE[0], EVERYONE[1]}, news=True)
    assert explorer.is_searching
    assert Explorer(AlgorithmSettings(), np.random.default_rng(0), explorer.snapshot()).is_searching
    choose(explorer, weights=friends_of(0, 1, 2))
    explorer.measured({EVERYONE[2]}, news=True)
    assert not explorer.is_searching
    choose(explorer, weights=friends_of(0))
    explorer.measured({EVERYONE[2]}, news=False)
    assert not explorer.is_searching


def settle(explorer, weights, fresh=(), known=()):
    return explorer.settle(candidates(), weights, {}, fresh, {*weights, *known})


def test_a_last_round_samples_the_best_that_gradients_may_go_to_and_nobody_else():
    explorer = make_explorer(epsilon=1.0, probes=0.0, min_probes=0.0, min_gradient_weight=0.05)
    weights = {EVERYONE[3]: 0.5, EVERYONE[4]: 0.06, EVERYONE[5]: 0.04}
    choice = settle(explorer, weights)
    assert choice.sampled == (EVERYONE[3], EVERYONE[4])
    assert choice.probed == frozenset()


def test_a_last_round_looks_at_who_insists_a_few_at_a_time():
    explorer = make_explorer(probes=2.0, min_probes=0.0)
    weights = friends_of(3, 4, 5)
    askers = set(EVERYONE[20:25])
    for _ in range(2):
        for asker in askers:
            explorer.asked_by(asker)
        choice = settle(explorer, weights, fresh={EVERYONE[20]}, known=EVERYONE)
    assert len(choice.probed) == 2
    assert choice.probed < askers - {EVERYONE[20]}


def test_a_last_round_goes_on_probing_strangers_as_long_as_places_are_not_earned():
    explorer = make_explorer(probes=2.0, min_probes=0.0)
    assert len(settle(explorer, friends_of(3)).probed) == 2
    settled = [settle(explorer, friends_of(3, 4, 5)).probed for _ in range(100)]
    assert not any(settled[50:])


def test_lasting_probes_look_at_anybody_once_all_are_known():
    explorer = make_explorer(probes=2.0, min_probes=0.1, num_neighbors=1, epsilon=0.0)
    chosen = [
        choose(explorer, candidates(12), weights=friends_of(0), known=EVERYONE[:12]).probed
        for _ in range(2000)
    ]
    # 0.1 a round: 200, with a standard deviation of 13; one in twelve is the sampled neighbor
    assert 130 < sum(len(each) for each in chosen) < 240
    assert len(frozenset().union(*chosen)) == 11
