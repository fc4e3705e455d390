"""A running peer's memory: renewed as models change, tuned fairly, saved and restored exactly."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from helpers import Participant, make_participants, peer_id
from helpers_daemons import digits
from torch import nn

from peer.algorithm import AlgorithmSettings
from peer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from peer.collection import Collection
from peer.config import PersonalizationSettings, build_settings
from peer.data import Examples
from peer.events import Differentiate, Step, Train
from peer.horizon import Horizon
from peer.learner import TrainingSettings
from peer.memory import Memory, SavedMemory
from peer.mixture import Mixture
from peer.schedule import Schedule
from peer.torch_learner import TorchLearner
from protocol.errors import CheckpointError, ConfigError, DataError
from sim.engine import LearnerCrowd, Lockstep
from sim.experiment import SwarmSettings

SETTINGS = PersonalizationSettings(kind="knn", lambdas=(0.0, 0.3, 1.0))
ALICE = peer_id(0)


def participant(**changes) -> Participant:
    settings = AlgorithmSettings(**changes)
    made = make_participants(digits(1), model="mlp", rounds=4, settings=settings)
    return made[ALICE]


def memory_of(alice: Participant, settings: PersonalizationSettings = SETTINGS) -> Memory:
    collection = Collection(alice.split, 0.2, seed=1)
    return Memory(settings, alice.learner, collection, 10, np.random.default_rng(7))


def alone(alice: Participant, model=None) -> Mixture:
    model = model if model is not None else alice.learner.parameters()
    return Mixture(own=ALICE, model=model, models={ALICE: model}, weights={ALICE: 1.0})


def renewed(alice: Participant, settings: PersonalizationSettings = SETTINGS) -> Memory:
    memory = memory_of(alice, settings)
    memory.renew(alone(alice), 0, may_tune=True)
    return memory


def new_examples(alice: Participant, count: int = 20) -> Examples:
    return alice.split.test.take(np.arange(count) % len(alice.split.test))


# Settings.


@pytest.mark.parametrize(
    ("personalization", "algorithm", "message"),
    [
        ({"kind": "nnn"}, {}, "personalization.kind"),
        ({"kindd": "knn"}, {}, "personalization.kindd; did you mean personalization.kind?"),
        ({"lambdas": []}, {}, "lambdas is empty"),
        ({"lambdas": [0.5, 1.5]}, {}, "lambdas holds 1.5"),
        ({"lambdas": [float("nan")]}, {}, "lambdas = nan: write a finite number"),
        ({"capacity": 0}, {}, "personalization.capacity"),
        ({"capacity_mib": 0.0}, {}, "personalization.capacity_mib"),
        ({"capacity_mib": float("inf")}, {}, "capacity_mib = inf"),
        ({"capacity": 5, "capacity_mib": 1.0}, {}, "exclude each other"),
        ({"strategy": "fifo"}, {}, "needs a bound"),
        ({"sigma": 0.0}, {}, "personalization.sigma"),
        ({"sigma": float("inf")}, {}, "sigma = inf"),
        ({"k_nearest": 0}, {}, "personalization.k_nearest"),
        ({"every": 0}, {}, "personalization.every"),
        ({"watch": "inbox"}, {}, "watch takes examples into a memory"),
        ({"kind": "knn", "watch": "/tmp"}, {}, "one folder for all peers"),
        ({"kind": "knn", "watch": "../inbox"}, {}, "one folder for all peers"),
        ({"kind": "knn"}, {"profile": "paper"}, "on a holdout"),
        ({"kind": "knn"}, {"holdout_fraction": 0.0}, "on a holdout"),
        ({"kind": "knn"}, {"final_full": 1.0}, "before the holdout is trained on"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(personalization, algorithm, message):
    tree = {"name": "x", "data": "digits", "model": "mlp", "peers": 2, "rounds": 1}
    tree |= {"personalization": personalization, "algorithm": algorithm}
    with pytest.raises(ConfigError, match=message) as caught:
        build_settings(tree, SwarmSettings, "test.toml")
    assert "\n" not in str(caught.value)


def test_a_memory_without_room_for_an_example_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="no room for one example"):
        memory_of(participant(), PersonalizationSettings(kind="knn", capacity_mib=1e-5))


# Schedule.


@pytest.mark.parametrize("final_full", [0.0, 0.2, 0.4, 0.99])
@pytest.mark.parametrize("rounds", [1, 7, 10])
def test_lambda_is_chosen_last_right_before_a_core_first_trains_on_the_holdout(final_full, rounds):
    settings = AlgorithmSettings(final_full=final_full)
    made = make_participants(digits(2), model="logistic", rounds=rounds, settings=settings)
    trained_on_it: list[int] = []

    def on_event(own, event, effects):
        for effect in effects:
            match effect:
                case Differentiate(_, number, _, batch) if batch.full:
                    trained_on_it.append(number)
                case Step(number, _, batches, _) | Train(number, _, batches):
                    trained_on_it.extend(number for batch in batches if batch.full)

    learners = {each: member.learner for each, member in made.items()}
    cores = {each: member.core for each, member in made.items()}
    Lockstep(cores, LearnerCrowd(learners), bits=settings.bits, on_event=on_event).run()
    schedule = Schedule(every=SETTINGS.every, horizon=next(iter(cores.values())).horizon)
    last = max(done for done in range(rounds + 1) if schedule.may_tune(done))
    assert last == min(trained_on_it, default=rounds)
    assert schedule.is_due(last)
    assert schedule.is_due(0)
    assert schedule.is_due(rounds)


def test_a_peer_without_end_tunes_for_ever():
    schedule = Schedule(every=SETTINGS.every, horizon=Horizon(None, 0.8))
    assert [done for done in range(50) if schedule.is_due(done)] == [0, 20, 40]
    assert schedule.may_tune(10**9)


# Memory.


def test_the_store_holds_all_training_examples_by_the_model_of_now():
    alice = participant()
    memory = renewed(alice)
    model = alice.learner.adopt(alice.learner.parameters())
    model.buffer[:] = np.roll(model.buffer, 4)
    memory.renew(alone(alice, model), 3, may_tune=False)
    train = alice.split.train
    arrays = memory.save().arrays
    np.testing.assert_array_equal(arrays["labels"], train.labels)
    np.testing.assert_array_equal(arrays["embeddings"], alice.learner.embed(model, train.inputs))
    assert memory.report()["round"] == 3
    assert memory.report()["tuned_round"] == 0


def test_without_the_leave_to_tune_lambda_and_what_it_promised_stay():
    alice = participant()
    memory = renewed(alice)
    before = memory.tuning
    trained = alice.learner.parameters()
    memory.renew(alone(alice, trained), 4, may_tune=False)
    assert memory.tuning == before


def test_a_memory_that_could_never_tune_leaves_the_mixture_alone():
    alice = participant()
    memory = memory_of(alice)
    mixture = alone(alice)
    memory.renew(mixture, 4, may_tune=False)
    found = memory.predict(mixture, alice.split.test.inputs)
    np.testing.assert_array_equal(found, mixture.predict(alice.learner, alice.split.test.inputs))
    assert memory.evaluate(mixture, alice.split.test)["lam"] == 0.0


def test_test_examples_are_asked_about_and_none_of_them_is_remembered():
    alice = participant()
    memory = renewed(alice)
    found = memory.evaluate(alone(alice), alice.split.test)
    assert found["memory_accuracy"] > 0.4  # ten classes, an untrained embedding, 30 examples
    assert memory.report()["num_entries"] == len(alice.split.train)
    nothing = memory.evaluate(alone(alice), alice.split.test.take(np.arange(0)))
    assert nothing["blend_accuracy"] is None


def test_the_strongest_member_embeds_where_it_is_asked_to():
    alice = participant()
    own = alice.learner.parameters()
    other = alice.learner.adopt(own)
    other.buffer[:] = np.roll(other.buffer, 4)
    bob = peer_id(1)
    mixture = Mixture(
        own=ALICE, model=own, models={ALICE: own, bob: other}, weights={ALICE: 0.4, bob: 0.6}
    )
    memory = memory_of(alice, msgspec.structs.replace(SETTINGS, embedding="strongest"))
    memory.renew(mixture, 0, may_tune=True)
    assert memory.save().model is other
    even = dataclasses.replace(mixture, weights={ALICE: 0.5, bob: 0.5})
    memory.renew(even, 1, may_tune=True)
    assert memory.save().model is own


def test_new_examples_are_remembered_at_once_and_some_are_held_out():
    alice = participant()
    memory = renewed(alice)
    new = new_examples(alice, 60)
    before = len(memory.collection)
    memory.take(new, memory.embed_new(new))
    assert memory.report()["num_entries"] == before + 60
    split = memory.collection.split()
    assert len(split.fit) + len(split.holdout) == before + 60
    assert len(split.holdout) > len(alice.split.holdout)
    again = Collection(alice.split, 0.2, seed=1)
    again.add(new)
    np.testing.assert_array_equal(again.held, memory.collection.held)


def test_a_window_is_judged_by_what_is_as_recent():
    alice = participant()
    new = new_examples(alice, 40)
    settings = PersonalizationSettings(kind="knn", strategy="fifo", capacity=40)
    memory = renewed(alice, settings)
    memory.take(new, memory.embed_new(new))
    memory.renew(alone(alice), 1, may_tune=True)
    recent = memory.collection.held >= len(alice.split.train)
    assert memory.report()["num_validation"] == recent.sum() > 0


def test_a_model_that_diverged_changes_nothing():
    alice = participant()
    memory = renewed(alice)
    before = memory.report()
    broken = alice.learner.adopt(alice.learner.parameters())
    for array in broken.values():
        array[...] = np.nan
    with pytest.raises(DataError, match="not finite"):
        memory.renew(alone(alice, broken), 9, may_tune=True)
    assert memory.report() == before
    found = memory.evaluate(alone(alice, broken), alice.split.test)
    assert found["blend_accuracy"] is None


# Saved and restored.


def save_and_load(tmp_path, alice: Participant, memory: Memory) -> SavedMemory:
    path = tmp_path / "checkpoint.safetensors"
    checkpoint = Checkpoint(alice.core.snapshot(), {}, {}, memory.save())
    save_checkpoint(path, checkpoint, alice.learner.task)
    saved = load_checkpoint(path, alice.learner.layout, alice.learner.task).memory
    assert saved is not None
    return saved


def test_a_restored_memory_has_the_same_bits_and_goes_on_the_same_way(tmp_path):
    alice = participant()
    settings = PersonalizationSettings(kind="knn", strategy="random", capacity=15)
    memory = renewed(alice, settings)
    saved = save_and_load(tmp_path, alice, memory)
    restored = memory_of(alice, settings)
    restored.restore(saved)
    assert restored.report() == memory.report()
    assert restored.tuning == memory.tuning
    new = new_examples(alice)
    for each in (memory, restored):
        each.take(new, each.embed_new(new))
    first, second = memory.save(), restored.save()
    assert first.state == second.state
    assert first.model == second.model
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name])


def test_what_came_after_the_checkpoint_is_remembered_once(tmp_path):
    alice = participant()
    memory = renewed(alice)
    saved = save_and_load(tmp_path, alice, memory)
    restored = memory_of(alice)
    restored.collection.add(new_examples(alice))  # as taken before a kill
    restored.restore(saved)
    restored.catch_up()
    restored.catch_up()
    assert restored.report()["num_entries"] == len(restored.collection)


def damage(saved: SavedMemory, name: str, change) -> SavedMemory:
    arrays = {**saved.arrays, name: change(saved.arrays[name])}
    return dataclasses.replace(saved, arrays=arrays)


def flip(array: np.ndarray) -> np.ndarray:
    flipped = array.copy()
    flipped.view(np.uint8).reshape(-1)[3] ^= 1
    return flipped


def test_a_store_that_cannot_be_used_is_refused_by_name_and_lambda_is_kept(tmp_path):
    alice = participant()
    memory = renewed(alice)
    saved = save_and_load(tmp_path, alice, memory)
    lost = {name: array for name, array in saved.arrays.items() if name != "keys"}
    broken = {
        "damaged": damage(saved, "embeddings", flip),
        "is damaged": dataclasses.replace(saved, arrays=lost),
        "datastore is damaged": dataclasses.replace(saved, model=None),
    }
    for message, each in broken.items():
        restored = memory_of(alice)
        with pytest.raises(CheckpointError, match=message):
            restored.restore(each)
        assert restored.tuning == memory.tuning
        restored.renew(alone(alice), 2, may_tune=False)
        assert restored.report()["num_entries"] == len(alice.split.train)


def test_a_store_of_other_examples_or_another_shape_is_refused_by_name(tmp_path):
    alice = participant()
    saved = save_and_load(tmp_path, alice, renewed(alice))
    fewer = Collection(dataclasses.replace(alice.split, holdout=new_examples(alice, 1)), 0.2, 1)
    other = Memory(SETTINGS, alice.learner, fewer, 10, np.random.default_rng(7))
    with pytest.raises(CheckpointError, match="other examples"):
        other.restore(saved)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.Linear(7, 10))
    narrow = TorchLearner(module, alice.split, 10, TrainingSettings())
    collection = Collection(alice.split, 0.2, 1)
    with pytest.raises(CheckpointError, match="dimension 64, and this model's have 7"):
        Memory(SETTINGS, narrow, collection, 10, np.random.default_rng(7)).restore(saved)
    with pytest.raises(CheckpointError, match="saved memory can't be used"):
        memory_of(alice).restore(dataclasses.replace(saved, state={"tuning": 3}))


def test_a_checkpoint_without_a_memory_has_none(tmp_path):
    alice = participant()
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, Checkpoint(alice.core.snapshot(), {}, {}), alice.learner.task)
    assert load_checkpoint(path, alice.learner.layout, alice.learner.task).memory is None
