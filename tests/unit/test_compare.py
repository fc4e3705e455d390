"""Comparisons: what is tried, chosen, kept, and said about the results."""

from __future__ import annotations

import io
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from peer.config import read_settings
from peer.data import Dataset, Examples
from protocol.errors import ConfigError, CoterieError, DataError, RunError
from sim.comparison import (
    ORACLES,
    WITHOUT_LOCAL_STEPS,
    CompareSettings,
    GridPoint,
    SizeSettings,
    StepSettings,
    Trial,
    TuneSettings,
    choose,
    count_trials,
    grid,
    reported_trials,
    tuning_trials,
)
from sim.comparison_report import Results, print_results, write_results
from sim.ledger import open_ledger
from sim.methods import METHODS, find_method
from sim.partition_settings import PartitionSettings
from sim.provenance import code_digest
from sim.standings import Standing, paired_difference, standings, stands_out
from sim.supply import Supply, divide
from sim.trial import TrialResult, make_members, measure_accuracy, run_trial
from sim.trial_progress import TrialProgress
from sim.workers import Failure, Workers

TUNE = TuneSettings(learning_rate=(0.1, 0.2), local_steps=(1, 5), seeds=(7, 8))


def settings(**changes: object) -> CompareSettings:
    plain = {
        "name": "test",
        "data": "digits",
        "model": "logistic",
        "peers": 4,
        "steps": 10,
        "methods": ("local", "fedavg"),
        "regimes": ("rotated",),
        "seeds": (1, 2),
        "tune": TUNE,
    }
    return CompareSettings(**{**plain, **changes})


def trial(method: str = "local", seed: int = 1, **changes: object) -> Trial:
    plain = {"regime": "rotated", "learning_rate": 0.1, "local_steps": None, "tuning": False}
    return Trial(method=method, seed=seed, **{**plain, **changes})


def result(of: Trial, accuracy: list[float | None], **changes: object) -> TrialResult:
    counts = {key: [1] * len(accuracy) for key in ("num_train", "num_test", "gradients", "groups")}
    traffic = {key: [0] * len(accuracy) for key in ("bytes_sent", "bytes_received")}
    plain = {**counts, **traffic, "code": "abc", "weights": None, "seconds": 1.0}
    return TrialResult(trial=of, accuracy=accuracy, **{**plain, **changes})


def results_of(
    accuracies: Mapping[str, list[list[float | None]]], **changes: object
) -> dict[Trial, TrialResult]:
    """The reported results of methods, a row of accuracies for each seed from 1."""
    found = (
        result(trial(method, seed), row, **changes)
        for method, rows in accuracies.items()
        for seed, row in enumerate(rows, start=1)
    )
    return {each.trial: each for each in found}


def stand(accuracies: Mapping[str, list[list[float | None]]], **changes: object) -> list[Standing]:
    seeds = tuple(range(1, 1 + len(next(iter(accuracies.values())))))
    ours = settings(methods=tuple(accuracies), seeds=seeds)
    choices = {("rotated", method): GridPoint(0.1, None) for method in accuracies}
    return standings(ours, choices, results_of(accuracies, **changes))


# Settings and trials


def test_every_method_is_tuned_over_the_whole_grid_and_local_over_its_learning_rates_alone():
    assert grid(settings(), "fedavg") == [(0.1, 1), (0.1, 5), (0.2, 1), (0.2, 5)]
    assert grid(settings(), "local") == [(0.1, None), (0.2, None)]


def test_trials_are_all_there_and_none_twice():
    ours = settings(regimes=("rotated", "permuted"))
    tuning = tuning_trials(ours)
    assert len(tuning) == len(set(tuning)) == 2 * 2 * (4 + 2)
    assert {each.seed for each in tuning} == {7, 8}
    choices = choose(ours, {each: 0.5 for each in tuning})
    reported = reported_trials(ours, choices)
    assert len(reported) == len(set(reported)) == 2 * 2 * 2
    assert {each.seed for each in reported} == {1, 2}
    assert count_trials(ours) == len(tuning) + len(reported)


def test_a_grid_of_one_point_needs_no_tuning():
    ours = settings(tune=TuneSettings(learning_rate=(0.1,), local_steps=(5,)))
    assert tuning_trials(ours) == []
    assert choose(ours, {}) == {
        ("rotated", "local"): (0.1, None),
        ("rotated", "fedavg"): (0.1, 5),
    }


@given(st.data())
def test_the_grid_point_of_the_best_mean_validation_accuracy_is_chosen(data: st.DataObject):
    ours = settings()
    shares = st.integers(0, 4).map(lambda fourths: fourths / 4)
    scores = {each: data.draw(shares) for each in tuning_trials(ours)}
    for (_, method), point in choose(ours, scores).items():
        means = [
            sum(s for t, s in scores.items() if t.method == method and _point(t) == each) / 2
            for each in grid(ours, method)
        ]
        assert grid(ours, method).index(point) == means.index(max(means))


def _point(of: Trial) -> GridPoint:
    return GridPoint(of.learning_rate, of.local_steps)


def test_a_grid_point_without_all_its_trials_is_not_chosen_and_a_method_without_any_not_reported():
    ours = settings()
    scores = {
        each: 0.9 if each.learning_rate == 0.1 else 0.1
        for each in tuning_trials(ours)
        if each.method == "local" and (each.learning_rate, each.seed) != (0.1, 8)
    }
    choices = choose(ours, scores)
    assert choices == {("rotated", "local"): (0.2, None)}
    assert {each.method for each in reported_trials(ours, choices)} == {"local"}


def test_methods_that_are_set_apart_exist():
    assert set(METHODS) >= ORACLES | WITHOUT_LOCAL_STEPS


def test_the_config_that_comes_along_can_be_used():
    path = Path(__file__).parents[2] / "configs" / "compare-digits.toml"
    ours = read_settings(path, CompareSettings)
    slices = [
        task.slices
        for regime, tuning in itertools.product(ours.regimes, (True, False))
        for task in Supply(ours, path.parent).tasks([trial(regime=regime, tuning=tuning)])
    ]
    assert [len(each) for each in slices] == [ours.peers] * 4


def test_a_regime_of_ones_own_takes_the_sizes_that_it_leaves_open():
    own = PartitionSettings(kind="rotated", groups=2, max_examples=9)
    sizes = SizeSettings(min_examples=5, max_examples=20)
    ours = settings(regime={"halves": own}, regimes=("halves",), partition=sizes)
    found = ours.partition_of("halves")
    assert (found.kind, found.groups) == ("rotated", 2)
    assert (found.min_examples, found.max_examples) == (5, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("lokal",)}, "unknown method lokal; did you mean local"),
        ({"methods": ()}, "methods is empty"),
        ({"methods": ("local", "local")}, "methods names local more than once"),
        ({"regimes": ("rotatet",)}, "unknown regime rotatet; did you mean rotated"),
        ({"seeds": (1, 7)}, "tune.seeds: 7 is one of seeds"),
        ({"seed": 3}, "set seeds"),
        ({"steps": 4}, "tune.local_steps: 5 is more than steps = 4"),
        ({"tune": TuneSettings(learning_rate=())}, "tune.learning_rate is empty"),
        ({"options": {"dito": {}}}, "unknown method dito; did you mean ditto"),
        ({"options": {"mine": {"method": "dito"}}}, "unknown method dito; did you mean ditto"),
        ({"options": {"mine": {"method": "ditto", "x": 1}}}, "options.mine: unknown option x"),
        ({"options": {"fedavg": {"method": "ditto"}}}, "needs a name of its own"),
        ({"options": {"ditto": {"lamb": 1.0}}}, "unknown option lamb; did you mean lam"),
        ({"options": {"ditto": {"lam": "big"}}}, "options.ditto.lam = big: expected `float`"),
        ({"options": {"ditto": {"lam": -1.0}}}, "lam = -1.0: expected `float` >= 0.0; its default"),
        ({"options": {"fedem": {"components": 0}}}, "components = 0: expected `int` >= 1"),
        ({"options": {"federico": {"betta": 1.0}}}, "federico: FedeRiCo's settings: .*`betta`"),
        ({"options": {"federico": {"exchange_every": 50}}}, "federico: steps = .* leaves no round"),
        ({"options": {"federico+knn": {"k_nearest": 0}}}, "personalization: .*k_nearest"),
        ({"options": {"ifca": {"start": "x"}}}, "unknown option start; did you mean starts"),
        ({"regime": {"rotated": PartitionSettings()}}, "regime.rotated: there is a regime"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_an_option_reaches_its_method_and_may_be_whole_where_a_float_is_wanted():
    ours = settings(options={"ditto": {"lam": 0}}, methods=("ditto", "local"), steps=5)
    found = {name: run_small(ours, name) for name in ours.methods}
    assert found["ditto"].accuracy == found["local"].accuracy  # without a pull it is Local


def test_variants_of_a_method_are_compared_beside_it_with_the_same_draws():
    variants = {"ring": {"method": "dpsgd"}, "rings": {"method": "dpsgd", "rings": 2}}
    ours = settings(methods=("dpsgd", "ring", "rings"), options=variants)
    plain, ring, rings = (run_small(ours, name) for name in ours.methods)
    assert plain.accuracy == ring.accuracy
    assert plain.weights == ring.weights != rings.weights
    assert [each.method for each in (ring.trial, rings.trial)] == ["ring", "rings"]


def test_a_variant_of_an_oracle_or_of_local_is_treated_as_one():
    ours = settings(
        methods=("truth", "alone", "fedavg"),
        options={"truth": {"method": "oracle"}, "alone": {"method": "local"}},
    )
    assert grid(ours, "alone") == grid(settings(), "local")
    choices = {("rotated", name): GridPoint(0.1, None) for name in ours.methods}
    results = results_of({name: [[0.9], [0.9]] for name in ours.methods})
    assert [(each.method, each.honest) for each in standings(ours, choices, results)] == [
        ("alone", True),
        ("fedavg", True),
        ("truth", False),
    ]


# The data


def numbered(num_train: int, num_test: int, owners: list[int] | None = None) -> Dataset:
    """Examples whose input is their number: train from 0, test after it."""
    inputs = np.arange(num_train + num_test, dtype=np.float32)[:, None]
    labels = np.arange(num_train + num_test) % 2
    train = Examples(inputs[:num_train], labels[:num_train])
    return Dataset(
        name="numbers",
        train=train,
        test=Examples(inputs[num_train:], labels[num_train:]) if num_test else None,
        num_classes=2,
        train_owners=None if owners is None else np.array(owners),
        test_owners=None if owners is None else np.zeros(num_test, dtype=np.int64),
        owner_names=() if owners is None else tuple("abcdef"),
    )


def numbers(examples: Examples | None) -> set[int]:
    assert examples is not None
    return set(examples.inputs[:, 0].astype(int).tolist())


@given(st.integers(2, 60), st.integers(0, 99))
def test_a_fifth_of_the_training_part_becomes_the_test_part(count: int, seed: int):
    whole = numbered(count, 5)
    divided = divide(whole, np.random.default_rng(seed))
    train, test = numbers(divided.train), numbers(divided.test)
    assert not train & test
    assert train | test == numbers(whole.train)
    assert len(test) == round(count / 5)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_of_owned_examples_the_last_of_each_owner_become_the_test_part(owners: list[int]):
    divided = divide(numbered(len(owners), 4, owners), np.random.default_rng(0))
    for owner in set(owners):
        own = [number for number, each in enumerate(owners) if each == owner]
        cut = len(own) - round(len(own) / 5)
        assert numbers(divided.train) & set(own) == set(own[:cut])
        assert numbers(divided.test) & set(own) == set(own[cut:])
    assert divided.train_owners is not None and divided.test_owners is not None
    assert [owners[n] for n in divided.train.inputs[:, 0].astype(int)] == list(divided.train_owners)
    assert [owners[n] for n in divided.test.inputs[:, 0].astype(int)] == list(divided.test_owners)


def npz(folder: Path, num_train: int, num_test: int) -> Path:
    whole = numbered(num_train, num_test)
    path = folder / "numbers.npz"
    arrays = {"train_inputs": whole.train.inputs, "train_labels": whole.train.labels}
    if whole.test is not None:
        arrays |= {"test_inputs": whole.test.inputs, "test_labels": whole.test.labels}
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("num_test", [50, 0])
def test_tuning_never_sees_a_test_example_nor_reports_one_that_was_trained_on(tmp_path, num_test):
    own = {"halves": PartitionSettings(kind="permuted", groups=2)}
    data = str(npz(tmp_path, 200, num_test))
    supply = Supply(settings(data=data, regime=own, regimes=("halves",)), tmp_path)
    seen: dict[bool, set[int]] = {True: set(), False: set()}
    tested: dict[bool, set[int]] = {True: set(), False: set()}
    for tuning, seed in itertools.product((True, False), range(5)):
        for task in supply.tasks([trial(regime="halves", seed=seed, tuning=tuning)]):
            train = set().union(*(numbers(part.dataset.train) for part in task.slices))
            test = set().union(*(numbers(part.dataset.test) for part in task.slices))
            assert not train & test
            seen[tuning] |= train | test
            tested[tuning] |= test
    assert not seen[True] & tested[False]
    assert len(tested[False]) == (num_test or 40)


def test_fewer_peers_may_be_tuned_on_than_are_reported(tmp_path):
    tune = msgspec.structs.replace(TUNE, peers=4)
    supply = Supply(settings(peers=6, tune=tune), tmp_path)
    both = [trial(tuning=True), trial()]
    assert [len(task.slices) for task in supply.tasks(both)] == [4, 6]


def test_what_regime_and_seed_a_partition_is_impossible_for_is_said(tmp_path):
    ours = settings(regimes=("pathological",), peers=999)
    with pytest.raises(ConfigError, match=r"^pathological, seed 1, tuning \(on four fifths"):
        list(Supply(ours, tmp_path).tasks([trial(regime="pathological", tuning=True)]))


def test_a_regime_that_leaves_nobody_a_test_example_is_refused(tmp_path):
    own = {"alone": PartitionSettings(kind="iid")}
    ours = settings(data=str(npz(tmp_path, 2, 0)), peers=1, regime=own, regimes=("alone",))
    supply = Supply(ours, tmp_path)
    with pytest.raises(DataError, match="no peer gets a test example"):
        list(supply.tasks([trial(regime="alone")]))


# Trials


def run_small(ours: CompareSettings, method: str, **changes: object) -> TrialResult:
    supply = Supply(ours, Path.cwd())
    (task,) = supply.tasks([trial(method, local_steps=5, **changes)])
    return run_trial(task)


def test_the_same_trial_gives_the_same_result():
    first, again = (run_small(settings(), "fedavg") for _ in range(2))
    assert msgspec.structs.replace(first, seconds=again.seconds) == again
    assert sum(first.num_train) == 1442 and sum(first.num_test) == 355
    assert first.gradients == [10] * 4 and first.groups == [0, 1, 2, 3]
    assert run_small(settings(), "fedavg", seed=2).accuracy != first.accuracy


def test_all_methods_get_the_same_peers():
    supply = Supply(settings(), Path.cwd())
    ours, theirs = (make_members(task) for task in supply.tasks([trial("local"), trial("fedavg")]))
    for one, other in zip(ours, theirs, strict=True):
        for part in ("fit", "holdout", "test"):
            left, right = getattr(one.split, part), getattr(other.split, part)
            assert np.array_equal(left.inputs, right.inputs)
        assert one.new_learner().parameters().buffer.tobytes() == (
            other.new_learner().parameters().buffer.tobytes()
        )


def test_a_peer_whose_data_drift_is_tested_on_what_it_has_in_the_end(monkeypatch):
    tests = []

    def testing(predict, test):
        tests.append(test)
        return measure_accuracy(predict, test)

    monkeypatch.setattr("sim.trial.measure_accuracy", testing)
    own = {"turn": PartitionSettings(kind="rotated", groups=2, drifting=4)}
    ours = settings(regime=own, regimes=("turn",))
    found = run_small(ours, "local", regime="turn")
    (task,) = Supply(ours, Path.cwd()).tasks([trial(regime="turn")])
    laters = [part.later for part in task.slices]
    assert all(laters)
    assert found.groups == [1, 1, 0, 0]
    assert found.num_test == [len(later.test) for later in laters]
    for test, part in zip(tests, task.slices, strict=True):
        assert np.array_equal(test.inputs, part.later.test.inputs)
        assert not np.array_equal(test.inputs, part.dataset.test.inputs)


def test_a_prediction_that_is_not_finite_is_wrong_and_no_examples_no_accuracy():
    test = Examples(np.zeros((4, 1), np.float32), np.zeros(4, np.int64))
    rows = np.array([[1, 0], [0, 1], [math.nan, 0], [math.inf, 0]], np.float32)
    assert measure_accuracy(lambda _: rows, test) == 0.25
    assert measure_accuracy(lambda _: rows[:0], Examples(test.inputs[:0], test.labels[:0])) is None
    assert measure_accuracy(lambda _: rows, None) is None


# Standings


def test_a_difference_above_two_standard_errors_of_one_sign_under_every_seed_is_clear():
    ours, theirs = np.array([[0.5, 0.7], [0.6, 0.6]]), np.array([[0.4, 0.5], [0.5, 0.6]])
    difference = paired_difference(ours, theirs)  # .1 .2 / .1 .0
    assert difference.mean == pytest.approx(0.1)
    # deviations 0 .1 0 -.1: the variance is .02 / 3
    assert difference.standard_error == pytest.approx(math.sqrt(0.02 / 3 / 4))
    assert difference.clear
    assert paired_difference(theirs, ours).clear


def test_a_difference_that_one_seed_contradicts_is_a_tie_however_many_peers_there_are():
    theirs = np.zeros((3, 100))
    ours = theirs + np.array([[0.3], [0.3], [-0.01]])
    difference = paired_difference(ours, theirs)
    assert abs(difference.mean) > 2 * (difference.standard_error or 0)
    assert not difference.clear


def test_one_exception_among_many_seeds_makes_no_tie():
    theirs = np.zeros((9, 16))
    ours = (
        theirs + np.array([-0.04, -0.03, -0.03, -0.02, -0.02, -0.01, -0.01, -0.01, 0.005])[:, None]
    )
    assert paired_difference(ours, theirs).clear
    # Nine values of mean -0.018: t = -3.9, and 2.306 is the 97.5th percentile with 8 degrees.
    assert stands_out(ours[:, 0].tolist())
    assert not stands_out([-0.04, 0.03, -0.03, 0.02, -0.02, 0.01, -0.01, -0.01, 0.005])


def test_the_t_test_over_the_seeds_has_its_table_s_bounds():
    # Of 1 and 1 + d, t = 1 + 2 / d: 12.706 is the bound with 1 degree of freedom.
    assert not stands_out([1.0, 1.0 + 2 / 11.6]) and stands_out([1.0, 1.0 + 2 / 11.8])
    assert not stands_out([1.0]) and not stands_out([0.0, 0.0])


def test_bottom_deciles_are_compared_over_the_seeds_with_the_highest():
    found = stand(
        {
            "local": [[0.5, 0.9], [0.5, 0.9], [0.52, 0.9]],  # the best mean, not the best decile
            "fedavg": [[0.6, 0.61], [0.61, 0.61], [0.62, 0.62]],
            "ditto": [[0.6, 0.6], [0.5, 0.5], [0.7, 0.7]],
        }
    )
    verdicts = {each.method: (each.verdict, each.decile_verdict) for each in found}
    assert verdicts["local"] == ("best", "below")
    assert verdicts["fedavg"][1] == "best" and verdicts["ditto"][1] == "tie"
    assert {each.decile_verdict for each in stand({"local": [[0.5]] * 2})} == {None}


def test_a_difference_within_two_standard_errors_is_a_tie():
    ours = np.array([[0.3, -0.1], [0.3, -0.1]])
    assert not paired_difference(ours, np.zeros((2, 2))).clear


def test_equals_tie_and_so_does_a_single_peer():
    equal = paired_difference(np.ones((2, 2)), np.ones((2, 2)))
    assert (equal.mean, equal.standard_error, equal.clear) == (0.0, 0.0, False)
    single = paired_difference(np.ones((1, 1)), np.zeros((1, 1)))
    assert (single.mean, single.standard_error, single.clear) == (1.0, None, False)


def test_a_peer_without_test_examples_is_left_out_of_every_number():
    nan = math.nan
    ours, theirs = np.array([[0.6, nan], [0.8, nan]]), np.array([[0.5, nan], [0.5, nan]])
    assert paired_difference(ours, theirs).mean == pytest.approx(0.2)
    local, fedavg = stand({"local": [[0.9, None, 0.1]], "fedavg": [[0.3, None, 0.5]]})
    assert (local.mean, fedavg.mean) == (pytest.approx(0.5), pytest.approx(0.4))
    assert (local.tested, fedavg.below_local) == (2, 1)


def test_the_numbers_of_a_standing_are_those_computed_by_hand():
    changes = {
        "num_train": [1, 3],
        "gradients": [10, 30],
        "bytes_received": [1_000_000, 3_000_000],
        "bytes_sent": [500_000, 500_000],
        "seconds": 4.0,
    }
    fedavg, local = stand(
        {"local": [[0.5, 0.7], [0.6, 0.4]], "fedavg": [[0.8, 0.69], [0.9, 0.35]]}, **changes
    )
    assert (fedavg.method, local.method) == ("fedavg", "local")
    assert fedavg.means == pytest.approx([0.745, 0.625])
    assert fedavg.mean == pytest.approx(0.685)
    assert fedavg.sd == pytest.approx(0.12 / math.sqrt(2))
    assert fedavg.bottom_deciles == [0.69, 0.35]
    assert fedavg.bottom_decile == pytest.approx(0.52)
    assert fedavg.weighted_mean == pytest.approx((0.7175 + 0.4875) / 2)
    assert (fedavg.below_local, fedavg.tested) == (1, 4)  # .69 is within the margin
    assert (fedavg.gradients, fedavg.mb_received, fedavg.mb_sent) == (20, 2.0, 0.5)
    assert (fedavg.verdict, fedavg.difference) == ("best", None)
    assert local.difference == pytest.approx(0.55 - 0.685)
    assert local.verdict == "tie"


def test_exactly_the_margin_below_local_is_not_below():
    _, fedavg = stand({"local": [[0.5, 0.82]], "fedavg": [[0.48, 0.8]]})
    assert fedavg.below_local == 0


def test_an_oracle_is_never_the_best_and_stands_last():
    row = [0.9] * 3
    found = stand(
        {"oracle": [[0.95] * 3] * 2, "local": [[0.5] * 3] * 2, "fedavg": [row, row]},
    )
    assert [each.method for each in found] == ["fedavg", "local", "oracle"]
    assert [each.verdict for each in found] == ["best", "below", "above"]
    assert [each.honest for each in found] == [True, True, False]


def test_without_local_nobody_is_counted_below_it():
    (alone,) = stand({"fedavg": [[0.5]]})
    assert alone.below_local is None and alone.sd is None


def test_a_method_that_lacks_a_seed_has_no_standing():
    ours = settings()
    choices = {("rotated", method): GridPoint(0.1, None) for method in ours.methods}
    results = results_of({"local": [[0.5], [0.5]], "fedavg": [[0.9]]})
    assert [each.method for each in standings(ours, choices, results)] == ["local"]


def test_the_validation_accuracy_of_the_choice_is_told():
    ours = settings(methods=("local",))
    tuned = {
        each: result(each, [each.learning_rate + each.seed / 100]) for each in tuning_trials(ours)
    }
    choices = choose(ours, {each: found.mean for each, found in tuned.items()})
    assert choices == {("rotated", "local"): (0.2, None)}
    reported = {each: result(each, [0.5]) for each in reported_trials(ours, choices)}
    (local,) = standings(ours, choices, tuned | reported)
    assert local.validation == pytest.approx(0.2 + 0.075)


# The result folder


def test_results_are_kept_and_read_again(tmp_path):
    ours = settings()
    kept = result(trial("fedavg", local_steps=5), [0.5, None])
    with open_ledger(tmp_path / "out", ours, "digest") as ledger:
        assert ledger.read([kept.trial]) == [kept.trial]
        ledger.add(kept)
    with open_ledger(tmp_path / "out", ours, "digest") as ledger:
        other = trial("fedavg", local_steps=1)
        assert ledger.read([kept.trial, other]) == [other]
        assert ledger.results() == {kept.trial: kept}


def test_no_two_trials_share_a_file(tmp_path):
    ours = settings()
    trials = [
        *tuning_trials(ours),
        *reported_trials(ours, choose(ours, dict.fromkeys(tuning_trials(ours), 0.5))),
    ]
    with open_ledger(tmp_path, ours, "digest") as ledger:
        for each in trials:
            ledger.add(result(each, [0.5]))
    assert len(list(tmp_path.glob("trials/*/*/*.json"))) == len(trials)


def test_a_damaged_file_is_done_again(tmp_path, caplog):
    kept = result(trial(), [0.5])
    with open_ledger(tmp_path, settings(), "digest") as ledger:
        ledger.add(kept)
        (path,) = tmp_path.glob("trials/*/*/*.json")
        path.write_text(path.read_text()[:-20])
    with open_ledger(tmp_path, settings(), "digest") as ledger:
        assert ledger.read([kept.trial]) == [kept.trial]
    assert "is damaged" in caplog.text


def test_the_file_of_another_trial_or_of_nonsense_is_done_again(tmp_path, caplog):
    ours, theirs = result(trial(), [0.5, None]), result(trial("fedavg"), [0.9, 0.9])
    nonsense = {
        "of another trial": msgspec.json.encode(theirs),
        "more peers or fewer": msgspec.json.encode(msgspec.structs.replace(ours, accuracy=[0.5])),
        "are none": msgspec.json.encode(msgspec.structs.replace(ours, accuracy=[None, None])),
    }
    for message, content in nonsense.items():
        with open_ledger(tmp_path, settings(), "digest") as ledger:
            ledger.add(ours)
        (path,) = tmp_path.glob("trials/*/*/*.json")
        path.write_bytes(content)
        with open_ledger(tmp_path, settings(), "digest") as ledger:
            assert ledger.read([ours.trial]) == [ours.trial]
        assert message in caplog.text


@pytest.mark.parametrize("content", ["{}", "[]", '{"settings": 3, "data": "x"}', "{"])
def test_a_damaged_comparison_is_said_to_be_one(tmp_path, content):
    (tmp_path / "comparison.json").write_text(content)
    with (
        pytest.raises(RunError, match="is damaged"),
        open_ledger(tmp_path, settings(), "digest"),
    ):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"ditto": {"lam": 2.0}}},  # no trial of it is done
        {"options": {"mine": {"method": "ditto", "lam": 2.0}}, "methods": ("local", "mine")},
        {"regime": {"own": PartitionSettings(groups=2)}, "regimes": ("rotated", "own")},
        {"methods": ("local", "ditto")},
        {"seeds": (2, 3, 4)},
        {"regimes": ("permuted",)},
        {"tune": TuneSettings(learning_rate=(0.5,))},
        {"data_folder": "elsewhere"},
    ],
)
def test_a_comparison_may_be_extended(tmp_path, changes):
    with open_ledger(tmp_path, settings(), "digest") as ledger:
        ledger.add(result(trial(), [0.5]))
    with open_ledger(tmp_path, settings(**changes), "digest") as ledger:
        assert not ledger.read([trial()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 20}, "steps is 10 there and 20 here"),
        ({"training": StepSettings(batch_size=8)}, "training.batch_size is 32 there and 8 here"),
        (
            {"tune": msgspec.structs.replace(TUNE, peers=3)},
            "tune.peers is 0 there and 3 here",
        ),
        ({"options": {"ditto": {"lam": 2.0}}}, "options.ditto.lam is not set there and 2.0 here"),
        (
            {"regime": {"own": PartitionSettings(groups=2)}},
            "regime.own.alpha is not set there and 0.5 here, .* and 10 more",
        ),
    ],
)
def test_the_folder_of_another_config_is_refused_with_what_differs(tmp_path, changes, message):
    with open_ledger(tmp_path, settings(), "digest") as ledger:
        ledger.add(result(trial("ditto", regime="own"), [0.5]))
    before = (tmp_path / "comparison.json").read_bytes()
    with (
        pytest.raises(ConfigError, match=message),
        open_ledger(tmp_path, settings(**changes), "digest"),
    ):
        pass
    assert (tmp_path / "comparison.json").read_bytes() == before


def test_a_folder_from_before_a_setting_existed_has_its_default(tmp_path):
    with open_ledger(tmp_path, settings(), "digest"):
        pass
    path = tmp_path / "comparison.json"
    before = json.loads(path.read_text())
    del before["settings"]["tune"]["peers"]
    path.write_text(json.dumps(before))
    with open_ledger(tmp_path, settings(), "digest"):
        pass
    path.write_text(json.dumps(before | {"settings": before["settings"] | {"gone": 1}}))
    with (
        pytest.raises(ConfigError, match="gone is 1 there and not set here"),
        open_ledger(tmp_path, settings(), "digest"),
    ):
        pass


def test_the_folder_of_other_data_is_refused(tmp_path):
    with open_ledger(tmp_path, settings(), "digest"):
        pass
    with (
        pytest.raises(ConfigError, match="the data are not the same"),
        open_ledger(tmp_path, settings(), "another"),
    ):
        pass


def test_a_folder_of_something_else_or_in_use_is_refused(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with (
        pytest.raises(ConfigError, match="not the folder of a comparison"),
        open_ledger(tmp_path, settings(), "digest"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    ours = tmp_path / "ours"
    with (
        open_ledger(ours, settings(), "digest"),
        pytest.raises(CoterieError, match="in use"),
        open_ledger(ours, settings(), "digest"),
    ):
        pass


# Reports


def report(found: list[Standing], **changes: object) -> Results:
    return Results.of(settings(**changes), found, ["fedem, rotated: raised ValueError"])


def test_the_report_says_what_is_best_what_ties_and_what_failed(tmp_path):
    accuracies = {
        "local": [[0.5, 0.5], [0.5, 0.52]],
        "fedavg": [[0.9, 0.9], [0.9, 0.8]],
        "ditto": [[0.9, 0.8], [0.8, 0.9]],
        "oracle": [[1.0, 0.9], [1.0, 1.0]],
    }
    results = report(stand(accuracies), methods=tuple(accuracies))
    output = io.StringIO()
    print_results(results, Console(file=output, width=80))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split(" ")[0]: line for line in lines}
    assert "best" in rows["fedavg"] and "87.5+-3.5" in rows["fedavg"]
    assert "-2.5 =" in rows["ditto"]
    assert "-37.0 " in rows["local"] and "-37.0 =" not in rows["local"]
    assert "+10.0" in rows["oracle"]
    assert "oracle: no honest method" in output.getvalue()

    write_results(tmp_path, results)
    whole = json.loads((tmp_path / "results.json").read_text())
    assert [each["method"] for each in whole["standings"]] == [
        "fedavg",
        "ditto",
        "local",
        "oracle",
    ]
    assert whole["partitions"]["rotated"]["kind"] == "rotated"
    csv = (tmp_path / "results.csv").read_text().splitlines()
    assert len(csv) == 5 and csv[0].startswith("regime,method,honest,mean,sd")
    markdown = (tmp_path / "results.md").read_text()
    assert "| **fedavg** | **87.5 ± 3.5** | 85.0 ± 7.1 |" in markdown
    assert "- failed: fedem, rotated: raised ValueError" in markdown
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_trials_of_an_earlier_state_of_the_code_are_told(tmp_path):
    outdated = Results.of(settings(), [], [], 3)
    output = io.StringIO()
    print_results(outdated, Console(file=output, width=200))
    assert "done by an earlier state of the code: 3;" in output.getvalue()
    for package in ("peer", "sim"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("x = 1")
    digest = code_digest(tmp_path)
    assert digest == code_digest(tmp_path)
    (tmp_path / "sim" / "a.py").write_text("x = 2")
    assert code_digest(tmp_path) != digest


def test_a_comparison_of_which_everything_failed_has_a_report_too(tmp_path):
    results = report([])
    print_results(results, Console(file=io.StringIO()))
    write_results(tmp_path, results)
    assert json.loads((tmp_path / "results.json").read_text())["standings"] == []


def test_progress_is_said_at_each_tenth_with_the_time_that_is_left():
    now, output = [0.0], io.StringIO()
    console = Console(file=output, width=80)
    planned = {"local": 10, "fedem": 10}
    with TrialProgress(console, planned, jobs=2, clock=lambda: now[0]) as progress:
        progress.found(result(trial(), [0.5], seconds=2.0))
        now[0] = 5.0
        progress.finished(result(trial("fedem"), [0.5], seconds=8.0))
        assert progress.left_s() == (9 * 2.0 + 9 * 8.0) / 2
        now[0] = 6.0
        progress.finished(result(trial(), [0.5], seconds=2.0))
        progress.failed(trial("fedem"), "it burst")
    assert progress.done == 4
    first, failed, second = output.getvalue().splitlines()
    assert first.startswith("[   5.0 s] 2 of 20 trials, about 0:45 left: fedem, rotated, seed 1")
    assert failed.startswith("failed: fedem, rotated, seed 1") and failed.endswith(": it burst")
    assert second.startswith("[   6.0 s] 4 of 20 trials")


# Processes


def test_workers_do_every_task_and_a_failed_one_harms_no_other(tmp_path):
    names = ["local", "fedavg", "nothing", "oracle", "fedem"]
    with Workers(find_method, 2, tmp_path / "log.txt") as workers:
        found = dict(workers.run(names))
        again = dict(workers.run(["ditto"]))  # by the same processes
    assert list(again.values()) == [METHODS["ditto"]]
    failure = found.pop("nothing")
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("unknown method nothing")
    assert found == {name: METHODS[name] for name in names if name != "nothing"}
    assert "ConfigError: unknown method nothing" in (tmp_path / "log.txt").read_text()


def test_a_worker_that_dies_is_replaced_and_its_task_said_to_have_failed(tmp_path):
    with Workers(os._exit, 1, tmp_path / "log.txt") as workers:
        found = dict(workers.run([3, 4]))
    assert [found[code].reason.split(":")[0] for code in (3, 4)] == [
        "its process ended with exit code 3",
        "its process ended with exit code 4",
    ]


def test_a_worker_that_died_while_idle_costs_one_task_and_no_more(tmp_path):
    with Workers(find_method, 1, tmp_path / "log.txt") as workers:
        assert dict(workers.run(["local"])) == {"local": METHODS["local"]}
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        found = dict(workers.run(["fedavg", "oracle"]))
    assert isinstance(found["fedavg"], Failure) and "SIGKILL" in found["fedavg"].reason
    assert found["oracle"] is METHODS["oracle"]
