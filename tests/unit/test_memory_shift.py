"""λ follows data that change: by each renewal's holdout, and in the last rounds by what arrives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import Participant, make_participants, peer_id
from helpers_daemons import digits

from peer.algorithm import AlgorithmSettings
from peer.collection import Collection
from peer.config import PersonalizationSettings
from peer.data import Examples
from peer.learner import Batch
from peer.memory import FEWEST_JUDGES, Memory
from peer.mixture import Mixture
from peer.sources import load_source
from protocol.errors import DataError

ALICE = peer_id(0)


@pytest.fixture(scope="module")
def alice() -> Participant:
    made = make_participants(digits(1), model="mlp", rounds=4, settings=AlgorithmSettings())
    for step in range(80):
        made[ALICE].learner.train(None, (Batch(step),))
    return made[ALICE]


def mixture_of(alice: Participant) -> Mixture:
    model = alice.learner.parameters()
    return Mixture(own=ALICE, model=model, models={ALICE: model}, weights={ALICE: 1.0})


def renewed(alice: Participant, *, may_tune: bool = True, **settings) -> Memory:
    """A memory whose λ was chosen while the labels meant what the model learned."""
    capacity = len(alice.split.train)
    window = PersonalizationSettings(kind="knn", strategy="fifo", capacity=capacity, **settings)
    collection = Collection(alice.split, 0.2, seed=1)
    memory = Memory(window, alice.learner, collection, 10, np.random.default_rng(7))
    memory.renew(mixture_of(alice), 0, may_tune=may_tune)
    return memory


def arriving(first: int, count: int, *, shifted: bool = True) -> Examples:
    """Other digits, each by the name of the next one if they are shifted."""
    train = load_source("digits").train.take(np.arange(first, first + count))
    return Examples(train.inputs, (train.labels + 1) % 10) if shifted else train


def judge_and_take(memory: Memory, alice: Participant, examples: Examples, rounds: int) -> None:
    embeddings = memory.embed_new(examples)
    memory.judge(mixture_of(alice), examples, embeddings, rounds)
    memory.take(examples, embeddings)


def enough(memory: Memory) -> int:
    return max(memory.tuning.num_examples, FEWEST_JUDGES)


def test_a_renewal_chooses_lambda_anew_by_the_fresh_part_of_the_holdout(alice):
    memory = renewed(alice)
    assert memory.lam < 0.5
    for first in (0, 150, 300):
        new = arriving(first, 150)
        memory.take(new, memory.embed_new(new))
    memory.renew(mixture_of(alice), 20, may_tune=True)
    assert memory.lam > 0.5
    assert memory.tuned_at == 20
    assert memory.tuning.model_accuracy < 0.1 < 0.6 < memory.tuning.accuracy


def test_in_the_last_rounds_as_many_new_examples_as_chose_lambda_choose_it_anew(alice):
    memory = renewed(alice)
    before, count = memory.tuning, enough(memory)
    assert memory.lam < 0.5
    judge_and_take(memory, alice, arriving(0, count - 1), 45)
    assert memory.tuning is before
    judge_and_take(memory, alice, arriving(200, 1), 46)
    assert memory.tuned_at == 46  # by what came while the memory knew the former names alone
    for number in (2, 3, 4):
        judge_and_take(memory, alice, arriving(200 * number, 150), 45 + number)
    assert memory.tuned_at == 49
    assert memory.tuning.num_examples == 150
    seen = arriving(1100, 100)
    assert memory.evaluate(mixture_of(alice), seen)["blend_accuracy"] > 0.6
    chosen = memory.lam
    memory.renew(mixture_of(alice), 55, may_tune=False)
    assert memory.lam == chosen > 0.5


def test_new_examples_like_the_former_leave_the_blend_about_as_good(alice):
    memory = renewed(alice)
    mixture, test = mixture_of(alice), arriving(1000, 300, shifted=False)
    before = memory.evaluate(mixture, test)["blend_accuracy"]
    for number in range(5):
        judge_and_take(memory, alice, arriving(100 * number, 100, shifted=False), 45)
    assert memory.tuned_at == 45
    # Two standard errors of any accuracy over 300 examples.
    assert memory.evaluate(mixture, test)["blend_accuracy"] > before - 0.058


def test_examples_judge_before_they_are_remembered(alice):
    memory = renewed(alice, k_nearest=1)
    strange = arriving(0, 100)
    noise = Examples(strange.inputs, np.random.default_rng(0).integers(0, 10, 100))
    judge_and_take(memory, alice, noise, 45)
    assert memory.tuning.num_examples == 100
    # Chance is 0.1, its standard deviation 0.03: who knew them already would be right always.
    assert memory.tuning.memory_accuracy < 0.25


def test_a_memory_that_could_never_tune_is_used_once_new_examples_have_judged(alice):
    memory = renewed(alice, may_tune=False)
    assert memory.tuning is None
    judge_and_take(memory, alice, arriving(0, FEWEST_JUDGES - 1, shifted=False), 45)
    assert (memory.lam, memory.tuned_at) == (0.0, None)
    judge_and_take(memory, alice, arriving(100, 1, shifted=False), 45)
    assert memory.tuned_at == 45
    assert memory.tuning.num_examples == FEWEST_JUDGES


def test_prototypes_are_judged_too_and_what_exact_entries_would_choose_is_not_known(alice):
    memory = renewed(alice, compress_kib=8.0)
    assert memory.exact_tuning is not None
    for number in range(3):
        judge_and_take(memory, alice, arriving(150 * number, 150), 45)
    assert memory.lam > 0.5
    assert memory.report()["exact_accuracy"] is None


def test_the_choice_is_kept_by_a_checkpoint(alice):
    memory = renewed(alice)
    judge_and_take(memory, alice, arriving(0, enough(memory)), 45)
    restored = renewed(alice)
    restored.collection.add(arriving(0, enough(restored)))
    restored.restore(memory.save())
    assert (restored.tuning, restored.tuned_at) == (memory.tuning, 45)


def test_a_model_that_diverged_chooses_nothing(alice):
    memory = renewed(alice)
    broken = alice.learner.adopt(alice.learner.parameters())
    for array in broken.values():
        array[...] = np.nan
    mixture = dataclasses.replace(mixture_of(alice), models={ALICE: broken})
    before, new = memory.tuning, arriving(0, 200)
    with pytest.raises(DataError, match="not finite"):
        memory.judge(mixture, new, memory.embed_new(new), 45)
    assert memory.tuning is before
