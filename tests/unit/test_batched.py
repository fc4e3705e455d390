"""The batched crowd does what a torch learner each would do, whatever is done together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import peer_id
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.algorithm import AlgorithmSettings
from peer.core import PeerCore
from peer.data import Examples, Split
from peer.events import Adopt, Differentiate, Differentiated, Measure, Measured, Step, Train
from peer.learner import Batch, TrainingSettings
from peer.models import build_model
from peer.torch_learner import TorchLearner
from protocol.errors import LocalProtocolError
from protocol.tensors import Tensors
from sim import batched
from sim.batched import BatchedCrowd, linear_layout
from sim.engine import LearnerCrowd, Lockstep
from sim.teachers import linear_problems

FEATURES, CLASSES = 6, 3
LAYOUT = linear_layout(FEATURES, CLASSES)
SIZES = [(9, 3), (20, 5), (1, 0), (13, 1)]  # fit and holdout; a batch has 8
IDS = [peer_id(number) for number in range(len(SIZES))]


def examples(number: int, rng: np.random.Generator) -> Examples:
    inputs = rng.standard_normal((number, 2, FEATURES // 2), np.float32)
    return Examples(inputs, rng.integers(CLASSES, size=number))


def splits() -> dict:
    rng = np.random.default_rng(5)
    return {
        each: Split(fit=examples(fit, rng), holdout=examples(holdout, rng), test=examples(0, rng))
        for each, (fit, holdout) in zip(IDS, SIZES, strict=True)
    }


def model(seed: int, scale: float = 0.5) -> Tensors:
    rng = np.random.default_rng(seed)
    arrays = {
        spec.name: rng.normal(scale=scale, size=spec.shape).astype(np.float32)
        for spec in LAYOUT.specs
    }
    return Tensors.of(LAYOUT, arrays)


def make_crowd(**options) -> BatchedCrowd:
    training = options.pop("training", TrainingSettings(batch_size=8))
    seeds = {each: 10 + number for number, each in enumerate(IDS)}
    return BatchedCrowd(splits(), CLASSES, model(0), training, seeds=seeds, **options)


def make_learners(**options) -> LearnerCrowd:
    training = options.pop("training", TrainingSettings(batch_size=8))
    learners = {}
    for number, (each, split) in enumerate(splits().items()):
        module = build_model("logistic", (2, FEATURES // 2), CLASSES, 0)
        learner = TorchLearner(module, split, CLASSES, training, seed=10 + number, **options)
        assert learner.layout == LAYOUT
        learner.adopt(model(0))
        learners[each] = learner
    return LearnerCrowd(learners)


batches = st.builds(Batch, st.integers(0, 9), st.booleans())
several = st.lists(batches, max_size=3).map(tuple)
models = st.integers(1, 5).map(model)
works = st.one_of(
    st.builds(Measure, st.sampled_from(IDS), st.just(3), models),
    st.builds(Differentiate, st.sampled_from(IDS), st.just(3), models, batches),
    st.builds(Step, st.just(3), models, several, st.none() | models),
    st.builds(Train, st.just(3), models, several),
    st.builds(Adopt, st.just(3), st.sampled_from(IDS), models),
)
job_lists = st.lists(st.tuples(st.sampled_from(IDS), works), min_size=1, max_size=12)


def same_bits(first, second) -> bool:
    return all(a == b for a, b in zip(first, second, strict=True))


def assert_close(first, second) -> None:
    """Sums of at most 20 products in another order, a dozen steps long: some f32 roundings.

    Adam divides by the gradient's own size, so that an error relative to it stays one relative to
    the learning rate; only a gradient that all but vanishes, by chance, could cost more.
    """
    assert type(first) is type(second)
    assert first.round_number == second.round_number
    if isinstance(first, Measured):
        assert first.peer_id == second.peer_id
        assert first.loss == pytest.approx(second.loss, rel=2e-5, abs=1e-6)
        return
    if isinstance(first, Differentiated):
        assert (first.peer_id, first.num_examples) == (second.peer_id, second.num_examples)
        ours, theirs = first.gradient, second.gradient
    else:
        ours, theirs = first.model, second.model
    assert ours.layout == theirs.layout
    np.testing.assert_allclose(ours.flat_f32(), theirs.flat_f32(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("measure_on", ["holdout", "train"])
@given(jobs=job_lists)
@settings(max_examples=15, deadline=None)
def test_every_job_comes_out_as_at_a_torch_learner(optimizer, loss, measure_on, jobs):
    training = TrainingSettings(batch_size=8, optimizer=optimizer, learning_rate=0.02)
    options = {"training": training, "loss": loss, "measure_on": measure_on}
    for ours, theirs in zip(
        make_crowd(**options).work(jobs), make_learners(**options).work(jobs), strict=True
    ):
        assert_close(ours, theirs)


@given(jobs=job_lists, cuts=st.sets(st.integers(0, 12)), chunk=st.sampled_from([1, 200, 1 << 18]))
@settings(max_examples=60, deadline=None)
def test_what_is_done_together_changes_no_bit(jobs, cuts, chunk):
    together = make_crowd().work(jobs)
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(jobs)), len(jobs)]
    crowd, parted = make_crowd(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_CHUNK_FLOATS", chunk)
        for start, end in itertools.pairwise(bounds):
            parted += crowd.work(jobs[start:end])
    assert same_bits(together, parted)


@given(jobs=job_lists, order=st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_order_of_different_peers_changes_no_bit(jobs, order):
    queues = {each: [job for job in jobs if job[0] == each] for each in IDS}
    turns = [each for each, _ in jobs]
    order.shuffle(turns)
    shuffled = [queues[each].pop(0) for each in turns]
    first, second = make_crowd().work(jobs), make_crowd().work(shuffled)
    for each in IDS:
        assert same_bits(
            [done for (owner, _), done in zip(jobs, first, strict=True) if owner == each],
            [done for (owner, _), done in zip(shuffled, second, strict=True) if owner == each],
        )


def test_what_was_handed_out_is_never_changed_and_keeps_nothing_else_alive():
    crowd = make_crowd()
    train = [(each, Train(0, model(1), (Batch(0), Batch(1)))) for each in IDS]
    handed = [done.model for done in crowd.work(train)]
    copies = [Tensors(LAYOUT, each.buffer.copy()) for each in handed]
    crowd.work([(each, Step(1, model(2), (Batch(2),), None)) for each in IDS])
    crowd.work([(each, Differentiate(each, 1, model(3), Batch(0))) for each in IDS])
    assert handed == copies
    for each in handed:
        owner = each.buffer
        while owner.base is not None:
            owner = owner.base
        assert owner.nbytes == LAYOUT.size_bytes


def test_a_model_that_others_trained_on_is_not_written_to():
    crowd, given_model = make_crowd(), model(1)
    before = Tensors(LAYOUT, given_model.buffer.copy())
    crowd.work([(each, Train(0, given_model, (Batch(0),))) for each in IDS])
    crowd.work([(each, Adopt(0, IDS[0], given_model)) for each in IDS])
    crowd.work([(each, Step(0, given_model, (Batch(0),), given_model)) for each in IDS])
    assert given_model == before


def test_predictions_are_softmax_of_the_linear_scores():
    inputs = np.random.default_rng(0).standard_normal((7, 2, FEATURES // 2), np.float32)
    ours = make_crowd().predict(model(2, scale=30.0), inputs)
    (learner, *_) = make_learners()._learners.values()
    np.testing.assert_allclose(ours.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(ours, learner.predict(model(2, scale=30.0), inputs), atol=1e-5)


def test_a_model_of_another_layout_is_named():
    other = Tensors.zeros(linear_layout(FEATURES + 1, CLASSES))
    seeds = dict.fromkeys(IDS, 0)
    with pytest.raises(LocalProtocolError, match="'logistic' over these examples: tensor"):
        BatchedCrowd(splits(), CLASSES, other, TrainingSettings(), seeds=seeds)


def make_cores(settings: AlgorithmSettings, initial: Tensors, number: int, rounds: int) -> dict:
    return {
        peer_id(index): PeerCore(
            peer_id=peer_id(index),
            settings=settings,
            model=initial,
            incarnation=0,
            rounds=rounds,
            rng=np.random.default_rng(index),
        )
        for index in range(number)
    }


@pytest.mark.parametrize("exchange", ["gradients", "average"])
def test_a_lockstep_run_comes_out_as_with_torch_learners(exchange):
    """Six peers, eight rounds: the same peers are sampled, and losses differ by f32 roundings."""
    number, options = 6, AlgorithmSettings(exchange=exchange, num_neighbors=2, survey=2)
    parts, _ = linear_problems(number, 3, np.random.default_rng(0))
    initial = Tensors.zeros(linear_layout(10, 10))
    training = TrainingSettings()
    by_id = {peer_id(index): part for index, part in enumerate(parts)}
    seeds = {peer_id(index): index for index in range(number)}
    learners = {}
    for each, part in by_id.items():
        module = build_model("logistic", (10,), 10, 0)
        learners[each] = TorchLearner(module, part, 10, training, seed=seeds[each])
        learners[each].adopt(initial)
    rounds: list[list] = []
    for crowd in (
        LearnerCrowd(learners),
        BatchedCrowd(by_id, 10, initial, training, seeds=seeds),
    ):
        finished: list = []
        cores = make_cores(options, initial, number, 8)
        Lockstep(cores, crowd, on_round=lambda _, each, to=finished: to.append(each)).run()
        rounds.append(finished)
    assert len(rounds[0]) == 8 * number
    for theirs, ours in zip(*rounds, strict=True):
        assert (ours.round_number, ours.sampled) == (theirs.round_number, theirs.sampled)
        assert ours.loss_averages == pytest.approx(theirs.loss_averages, rel=1e-4)


def test_a_crowd_finds_its_groups_and_learns_more_than_each_alone():
    """Seeded; 24 peers in groups of 4: every best collaborator right, accuracy up by a tenth."""
    number = 24
    parts, groups = linear_problems(number, 4, np.random.default_rng(1), num_test=100)
    initial = Tensors.zeros(linear_layout(10, 10))
    by_id = {peer_id(index): part for index, part in enumerate(parts)}
    group = {peer_id(index): int(each) for index, each in enumerate(groups)}
    seeds = {each: index for index, each in enumerate(by_id)}
    accuracy = {}
    for neighbors in (0, 3):
        crowd = BatchedCrowd(by_id, 10, initial, TrainingSettings(), seeds=seeds)
        cores = make_cores(AlgorithmSettings(num_neighbors=neighbors), initial, number, 40)
        Lockstep(cores, crowd).run()
        right = []
        for each, core in cores.items():
            weights, mixture = core.prediction_weights(), core.mixture()
            inputs, labels = by_id[each].test.inputs, by_id[each].test.labels
            mixed = sum(weights[other] * crowd.predict(mixture[other], inputs) for other in mixture)
            right.append(np.mean(mixed.argmax(axis=1) == labels))
            if neighbors:
                others = {o: w for o, w in core.training_weights().items() if o != each}
                assert group[max(others, key=others.__getitem__)] == group[each]
        accuracy[neighbors] = np.mean(right)
    assert accuracy[3] > accuracy[0] + 0.1


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_linear_problems_come_in_groups_and_from_the_generator_alone(number, size, seed):
    first, groups = linear_problems(number, size, np.random.default_rng(seed), num_test=3)
    second, _ = linear_problems(number, size, np.random.default_rng(seed), num_test=3)
    assert groups.tolist() == [index // size for index in range(number)]
    for one, two in zip(first, second, strict=True):
        assert (len(one.fit), len(one.holdout), len(one.test)) == (64, 32, 3)
        np.testing.assert_array_equal(one.fit.inputs, two.fit.inputs)
        np.testing.assert_array_equal(one.holdout.labels, two.holdout.labels)


def test_a_group_shares_its_teacher_and_without_noise_the_same_input_has_one_label():
    parts, groups = linear_problems(6, 3, np.random.default_rng(2), noise=0.0, num_fit=400)
    crowd = BatchedCrowd(
        {peer_id(index): part for index, part in enumerate(parts)},
        10,
        Tensors.zeros(linear_layout(10, 10)),
        TrainingSettings(batch_size=400, learning_rate=0.1),
        seeds={peer_id(index): 0 for index in range(6)},
    )
    ids = [peer_id(index) for index in range(6)]
    steps = tuple(Batch(number) for number in range(200))
    trained = crowd.work([(each, Train(0, crowd.parameters(each), steps)) for each in ids])
    accuracy = np.array(
        [
            [
                np.mean(crowd.predict(done.model, part.fit.inputs).argmax(1) == part.fit.labels)
                for done in trained
            ]
            for part in parts
        ]
    )
    same = groups[:, None] == groups
    assert accuracy[same].min() > 0.8
    assert accuracy[~same].max() < 0.5
