"""A peer's memory under `compress_kib`: prototypes in place of embeddings, saved and reported."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import numpy as np
import pytest
from helpers import Participant, make_participants, peer_id
from helpers_daemons import digits
from run_folders import record_line, write_records, write_result, write_run

from peer.algorithm import AlgorithmSettings
from peer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from peer.collection import Collection
from peer.config import PersonalizationSettings
from peer.data import Examples
from peer.memory import Memory, SavedMemory
from peer.mixture import Mixture
from protocol.errors import CheckpointError, ConfigError
from sim.records import Run
from sim.report import summarize
from sim.report_table import compression_remark

ALICE = peer_id(0)
SETTINGS = PersonalizationSettings(kind="knn", compress_kib=4.0)


def participant() -> Participant:
    made = make_participants(digits(1), model="mlp", rounds=4, settings=AlgorithmSettings())
    return made[ALICE]


def memory_of(alice: Participant, settings: PersonalizationSettings = SETTINGS) -> Memory:
    collection = Collection(alice.split, 0.2, seed=1)
    return Memory(settings, alice.learner, collection, 10, np.random.default_rng(7))


def alone(alice: Participant) -> Mixture:
    model = alice.learner.parameters()
    return Mixture(own=ALICE, model=model, models={ALICE: model}, weights={ALICE: 1.0})


def renewed(alice: Participant, settings: PersonalizationSettings = SETTINGS) -> Memory:
    memory = memory_of(alice, settings)
    memory.renew(alone(alice), 0, may_tune=True)
    return memory


def new_examples(alice: Participant, count: int = 20) -> Examples:
    return alice.split.test.take(np.arange(count) % len(alice.split.test))


def save_and_load(tmp_path, alice: Participant, memory: Memory) -> SavedMemory:
    path = tmp_path / "checkpoint.safetensors"
    checkpoint = Checkpoint(alice.core.snapshot(), {}, {}, memory.save())
    save_checkpoint(path, checkpoint, alice.learner.task)
    saved = load_checkpoint(path, alice.learner.layout, alice.learner.task).memory
    assert saved is not None
    return saved


@pytest.mark.parametrize(
    ("compress_kib", "message"),
    [(-1.0, "compress_kib"), (float("inf"), "compress_kib = inf"), (float("nan"), "compress_kib")],
)
def test_an_impossible_budget_is_refused(compress_kib, message):
    tree = {"kind": "knn", "compress_kib": compress_kib}
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(tree, PersonalizationSettings)


def test_a_budget_without_room_for_a_prototype_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"compress_kib = 0\.0996 has no room for a prototype"):
        memory_of(participant(), msgspec.structs.replace(SETTINGS, compress_kib=0.1))


def test_a_store_within_the_budget_stays_as_it_is():
    alice = participant()
    roomy = renewed(alice, msgspec.structs.replace(SETTINGS, compress_kib=4096.0))
    plain = renewed(alice, PersonalizationSettings(kind="knn"))
    assert roomy.report() == plain.report()
    assert roomy.exact_tuning is None
    mixture, test = alone(alice), alice.split.test
    assert roomy.evaluate(mixture, test) == plain.evaluate(mixture, test)


def test_prototypes_keep_to_the_budget_and_say_what_they_save_and_lose():
    alice = participant()
    memory, plain = renewed(alice), renewed(alice, PersonalizationSettings(kind="knn"))
    exact, report = plain.report(), memory.report()
    count = len(alice.split.train)
    assert report["num_entries"] == count
    assert report["size_bytes"] <= 4 * 1024 + 24 * count < report["exact_size_bytes"]
    assert report["exact_size_bytes"] == exact["size_bytes"]
    assert report["exact_memory_accuracy"] == exact["memory_accuracy"]
    assert report["exact_accuracy"] == exact["accuracy"]
    assert report["model_accuracy"] == exact["model_accuracy"]
    assert report["memory_accuracy"] is not None
    found = memory.evaluate(alone(alice), alice.split.test)
    assert found["memory_bytes"] == report["size_bytes"]
    assert found["exact_memory_bytes"] == report["exact_size_bytes"]
    assert found["holdout_memory_accuracy"] == report["memory_accuracy"]
    assert found["exact_holdout_memory_accuracy"] == report["exact_memory_accuracy"]
    assert found["memory_accuracy"] > 0.4  # ten classes, an untrained embedding
    predicted = memory.predict(alone(alice), alice.split.test.inputs)
    np.testing.assert_allclose(predicted.sum(axis=1), 1, atol=1e-5)


def test_what_is_kept_of_the_examples_are_no_embeddings():
    memory = renewed(participant())
    arrays = memory.save().arrays
    assert arrays["embeddings"].size == 0
    assert sum(array.nbytes for array in arrays.values()) - 8 == memory.report()["size_bytes"]


def test_new_examples_are_heard_at_once():
    alice = participant()
    memory = renewed(alice)
    new = Examples(new_examples(alice, 60).inputs + 3, np.full(60, 9))  # far from all others
    before = len(memory.collection)
    memory.take(new, memory.embed_new(new))
    assert memory.report()["num_entries"] == before + 60
    assert memory.report()["size_bytes"] <= 4 * 1024 + 24 * (before + 60)
    assert memory.evaluate(alone(alice), new)["memory_accuracy"] > 0.9


def test_a_memory_that_may_not_tune_is_compressed_all_the_same():
    alice = participant()
    memory = memory_of(alice)
    memory.renew(alone(alice), 4, may_tune=False)
    report = memory.report()
    assert report["size_bytes"] < report["exact_size_bytes"]
    assert report["exact_memory_accuracy"] is None
    assert memory.evaluate(alone(alice), alice.split.test)["lam"] == 0.0


@pytest.mark.parametrize("strategy", ["random", "fifo"])
def test_a_restored_memory_has_the_same_bits_and_goes_on_the_same_way(tmp_path, strategy):
    alice = participant()
    settings = msgspec.structs.replace(SETTINGS, strategy=strategy, capacity=60)
    memory = renewed(alice, settings)
    assert memory.save().arrays["embeddings"].size == 0
    restored = memory_of(alice, settings)
    restored.restore(save_and_load(tmp_path, alice, memory))
    assert restored.report() == memory.report()
    new = new_examples(alice)
    for each in (memory, restored):
        each.take(new, each.embed_new(new))
        each.renew(alone(alice), 3, may_tune=True)
    first, second = memory.save(), restored.save()
    assert first.state == second.state
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name])


def test_what_came_after_the_checkpoint_is_remembered_once(tmp_path):
    alice = participant()
    saved = save_and_load(tmp_path, alice, renewed(alice))
    restored = memory_of(alice)
    restored.collection.add(new_examples(alice))  # as taken before a kill
    restored.restore(saved)
    restored.catch_up()
    restored.catch_up()
    assert restored.report()["num_entries"] == len(restored.collection)


@pytest.mark.parametrize(
    "changes", [{"compress_kib": 0.0}, {"compress_kib": 5.0}, {"strategy": "fifo", "capacity": 9}]
)
def test_a_memory_saved_under_another_budget_is_refused_and_built_anew(tmp_path, changes):
    alice = participant()
    memory = renewed(alice)
    saved = save_and_load(tmp_path, alice, memory)
    restored = memory_of(alice, msgspec.structs.replace(SETTINGS, **changes))
    with pytest.raises(CheckpointError, match="other settings"):
        restored.restore(saved)
    assert restored.tuning == memory.tuning
    restored.renew(alone(alice), 2, may_tune=False)
    assert restored.report()["num_entries"] == changes.get("capacity", len(alice.split.train))


def test_lost_prototypes_are_noticed(tmp_path):
    alice = participant()
    saved = save_and_load(tmp_path, alice, renewed(alice))
    arrays = {name: array for name, array in saved.arrays.items() if "prototypes" not in name}
    with pytest.raises(CheckpointError, match="damaged"):
        memory_of(alice).restore(dataclasses.replace(saved, arrays=arrays))


def test_a_report_says_what_memories_save_and_lose(tmp_path):
    names = write_run(tmp_path, [0, 0, 0])
    assert summarize(Run.open(tmp_path)).memory_bytes is None
    for name, after in zip(names, (0.9, 0.86, None), strict=True):
        memory = {"round": 9, "lam": 0.3}
        home = tmp_path / "peers" / name
        write_records(home, [record_line(9, {name: 1.0}, memory=memory)])
        sizes = {"memory_bytes": 24 * 1024, "exact_memory_bytes": 96 * 1024}
        accuracies = {"holdout_memory_accuracy": after, "exact_holdout_memory_accuracy": 0.885}
        if after is None:
            sizes, accuracies = {}, {}
        write_result(home, name, memory_accuracy=0.8, blend_accuracy=0.8, **sizes, **accuracies)
    summary = summarize(Run.open(tmp_path))
    assert summary.memory_bytes == {names[0]: 24576, names[1]: 24576, names[2]: None}
    remark = compression_remark(summary)
    assert remark is not None
    assert "24.0 of 96.0 KiB" in remark
    assert "memory 88.5 -> 88.0 on the holdouts; means of 2 peers" in remark
    assert json.loads(msgspec.json.encode(summary))["exact_memory_bytes"][names[2]] is None
