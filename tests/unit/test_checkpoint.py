"""Checkpoints: exact, whole or not at all, and refused with a reason."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import peer_id
from safetensors.numpy import load_file

from peer.acquaintances import KeptModel
from peer.checkpoint import Checkpoint, load_checkpoint, load_newest, save_checkpoint
from peer.exploration import ExplorerState
from peer.snapshot import PeerSnapshot
from protocol.errors import CheckpointError
from protocol.groups import Groups
from protocol.messages import ModelSnapshot, Version
from protocol.tensors import Layout, Tensors, TensorSpec

LAYOUT = Layout(
    [
        TensorSpec("a", "f32", (3, 2)),
        TensorSpec("b", "bf16", (5,)),
        TensorSpec("c", "i64", (), trainable=False),
        TensorSpec("d", "bool", (2,), trainable=False),
        TensorSpec("e", "f32", (0, 4), trainable=False),
    ]
)
TASK = "classification:3"


def model(value: int) -> Tensors:
    tensors = Tensors.zeros(LAYOUT)
    for array in tensors.values():
        array[...] = value
    return tensors


def checkpoint() -> Checkpoint:
    rng = np.random.default_rng(5)
    return Checkpoint(
        PeerSnapshot(
            round_number=7,
            model=ModelSnapshot(version=Version(2, 7), tensors=model(1)),
            loss_averages={peer_id(1): 0.25, peer_id(2): 1 / 3},
            measured_at={peer_id(1): 6, peer_id(2): 0},
            kept={
                peer_id(1): KeptModel(
                    ModelSnapshot(
                        version=Version(0, 6), tensors=model(2), friends=(peer_id(4), peer_id(3))
                    ),
                    0.125,
                    6,
                )
            },
            explorer=ExplorerState(
                survey={peer_id(3): 2},
                asked={peer_id(4): 1},
                insisting={peer_id(4)},
                budget=1.25,
            ),
            rng_state=rng.bit_generator.state,
        ),
        {"a/exp_avg": np.arange(6, dtype=np.float32).reshape(3, 2), "a/step": np.float32(3)[()]},
        {"bytes_sent": 5, "seconds": 1.5},
    )


def test_everything_comes_back_exactly(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    saved = checkpoint()
    save_checkpoint(path, saved, TASK)
    loaded = load_checkpoint(path, LAYOUT, TASK)
    assert loaded.core == saved.core
    assert loaded.totals == saved.totals
    assert loaded.optimizer.keys() == saved.optimizer.keys()
    np.testing.assert_array_equal(loaded.optimizer["a/exp_avg"], saved.optimizer["a/exp_avg"])
    assert loaded.optimizer["a/step"].shape == ()


def test_what_others_are_shown_comes_back_where_it_is_another_model(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    saved = checkpoint()
    core = dataclasses.replace(saved.core, shown=model(3))
    save_checkpoint(path, dataclasses.replace(saved, core=core), TASK)
    assert load_checkpoint(path, LAYOUT, TASK).core == core


def test_how_long_changed_data_are_measured_comes_back(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    saved = checkpoint()
    core = dataclasses.replace(saved.core, measuring_until=17, trained_from=9)
    save_checkpoint(path, dataclasses.replace(saved, core=core), TASK)
    assert load_checkpoint(path, LAYOUT, TASK).core == core


def test_who_belongs_together_comes_back_and_was_not_known_before_it_was_saved(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    saved = checkpoint()
    core = dataclasses.replace(saved.core, groups=Groups.of({peer_id(2): 1, peer_id(1): 0}))
    save_checkpoint(path, dataclasses.replace(saved, core=core), TASK)
    assert load_checkpoint(path, LAYOUT, TASK).core == core
    before = path.read_bytes().replace(b'\\"groups\\"', b'\\"nobody\\"')
    assert before != path.read_bytes()
    path.write_bytes(before)
    assert load_checkpoint(path, LAYOUT, TASK).core == saved.core


def test_others_can_read_the_own_model_with_safetensors_alone(tmp_path):
    layout = Layout([TensorSpec("weight", "f32", (2,))])
    tensors = Tensors.of(layout, {"weight": np.array([1, 2], np.float32)})
    core = checkpoint().core
    snapshot = PeerSnapshot(
        round_number=1,
        model=ModelSnapshot(version=Version(0, 1), tensors=tensors),
        loss_averages={},
        measured_at={},
        kept={},
        explorer=ExplorerState(),
        rng_state=core.rng_state,
    )
    save_checkpoint(tmp_path / "c.safetensors", Checkpoint(snapshot, {}, {}), TASK)
    np.testing.assert_array_equal(load_file(tmp_path / "c.safetensors")["own/weight"], [1, 2])


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_damaged_file_is_named(tmp_path, keep):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, checkpoint(), TASK)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="can't be used"):
        load_checkpoint(path, LAYOUT, TASK)


def test_a_checkpoint_of_another_model_or_task_is_named(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, checkpoint(), TASK)
    for layout, task in ((LAYOUT.gradient, TASK), (LAYOUT, "classification:4")):
        with pytest.raises(CheckpointError, match="another model"):
            load_checkpoint(path, layout, task)


def test_an_old_checkpoint_survives_a_failed_write(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, checkpoint(), TASK)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="can't be written"):
        save_checkpoint(tmp_path / "nowhere" / "c.safetensors", checkpoint(), TASK)
    assert path.read_bytes() == before


def test_of_two_checkpoints_the_newest_that_can_be_used_is_read(tmp_path, caplog):
    path = tmp_path / "checkpoint.safetensors"
    assert load_newest(path, LAYOUT, TASK) is None
    first = checkpoint()
    second = dataclasses.replace(first, core=dataclasses.replace(first.core, round_number=8))
    save_checkpoint(path, first, TASK)
    save_checkpoint(path, second, TASK)
    newest = load_newest(path, LAYOUT, TASK)
    assert newest is not None
    assert newest.core.round_number == 8
    path.write_bytes(path.read_bytes()[:-1])
    fallen_back = load_newest(path, LAYOUT, TASK)
    assert fallen_back is not None
    assert fallen_back.core == first.core
    assert "the checkpoint before it is used" in caplog.text
    save_checkpoint(path, second, TASK)  # the damaged one must not take the place of the good one
    path.unlink()
    assert load_newest(path, LAYOUT, TASK).core == first.core


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, checkpoint(), TASK)
    path.rename(f"{path}.before")
    assert load_newest(path, LAYOUT, TASK).core == checkpoint().core
