"""A watched folder: every file is taken once, or refused by name once."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from peer.collection import read_new
from peer.inbox import Inbox, put
from protocol.errors import DataError


def npz(path: Path, inputs=None, labels=None, **more) -> Path:
    inputs = np.ones((3, 4), np.float32) if inputs is None else inputs
    labels = np.arange(len(inputs)) if labels is None else labels
    np.savez(path, train_inputs=inputs, train_labels=labels, **more)
    return path


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_files_are_taken_in_the_order_in_which_they_came(tmp_path):
    inbox = Inbox(tmp_path / "inbox")
    for name in ("b", "a", "c"):
        npz(tmp_path / "inbox" / f"{name}.npz")
    for file in inbox.waiting():
        inbox.take(file)
    assert inbox.waiting() == []
    assert names(inbox.taken()) == ["000001-b.npz", "000002-a.npz", "000003-c.npz"]


def test_after_a_restart_numbers_go_on_and_nothing_waits_twice(tmp_path):
    folder = tmp_path / "inbox"
    inbox = Inbox(folder)
    npz(folder / "a.npz")
    inbox.take(inbox.waiting()[0])
    npz(folder / "a.npz")  # the same name again is another file
    again = Inbox(folder)
    again.take(again.waiting()[0])
    assert names(again.taken()) == ["000001-a.npz", "000002-a.npz"]


def test_a_file_that_was_put_is_whole_and_takes_no_others_place(tmp_path):
    inbox = Inbox(tmp_path / "inbox")
    source = npz(tmp_path / "new.npz")
    first, second = put(source, inbox.folder), put(source, inbox.folder)
    assert first != second
    assert first.read_bytes() == source.read_bytes()
    assert {file.path for file in inbox.waiting()} == {first, second}


def test_a_refused_file_stays_is_named_once_and_is_looked_at_again_when_it_changed(
    tmp_path, caplog
):
    caplog.set_level(logging.WARNING)
    inbox = Inbox(tmp_path / "inbox")
    path = inbox.folder / "half.npz"
    path.write_bytes(b"PK")
    for _ in range(5):
        for file in inbox.waiting():
            inbox.refuse(file, DataError("it is half-written"))
    assert len(caplog.records) == 1
    assert "half.npz is refused: it is half-written" in caplog.text
    assert path.exists()
    npz(path)
    (file,) = inbox.waiting()
    inbox.take(file)


def test_a_file_that_grows_is_not_refused_while_it_does(tmp_path, caplog):
    inbox = Inbox(tmp_path / "inbox")
    path = inbox.folder / "slow.npz"
    for size in range(1, 6):
        path.write_bytes(b"x" * size)
        (file,) = inbox.waiting()
        inbox.refuse(file, DataError("it is half-written"))
    assert not caplog.records


def test_a_file_that_became_another_since_it_was_read_is_not_taken(tmp_path):
    inbox = Inbox(tmp_path / "inbox")
    path = npz(inbox.folder / "a.npz")
    (file,) = inbox.waiting()
    npz(path, np.ones((9, 4), np.float32))
    with pytest.raises(DataError, match="still being written"):
        inbox.take(file)
    assert path.exists()
    assert inbox.taken() == []


def test_hidden_and_unfinished_files_are_left_alone(tmp_path):
    inbox = Inbox(tmp_path / "inbox")
    (inbox.folder / ".a.npz.12345678.part").write_bytes(b"x")
    (inbox.folder / "folder").mkdir()
    assert inbox.waiting() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"PK\x03\x04 and no more"), "can't be read as an .npz"),
        (lambda path: path.write_bytes(b""), "can't be read as an .npz"),
        (lambda path: npz(path, np.ones((3, 5), np.float32)), r"shape \(5,\), the model takes"),
        (lambda path: npz(path, labels=np.array([0, 1, 7])), "a label is 7"),
        (lambda path: npz(path, labels=np.array([0, -1, 2])), "labels go from -1"),
        (lambda path: npz(path, labels=np.array([0.0, 1.0, 2.0])), "give whole numbers"),
        (lambda path: npz(path, labels=np.arange(2)), "don't fit"),
        (lambda path: npz(path, np.full((3, 4), np.nan)), "not finite"),
        (lambda path: npz(path, np.full((3, 4), 1e300)), "not finite"),
        (lambda path: npz(path, np.ones((0, 4), np.float32)), "no training example"),
        (lambda path: np.savez(path, inputs=np.ones(3)), "lacks train_inputs"),
        (lambda path: npz(path, np.array([[{}] * 4] * 3, dtype=object)), "can't be read"),
    ],
)
def test_a_wrong_file_is_refused_with_a_reason(tmp_path, make, message):
    path = tmp_path / "wrong.npz"
    make(path)
    with pytest.raises(DataError, match=message):
        read_new(path, (4,), 5, 1)


def test_another_kind_of_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(DataError, match=r"notes.txt is no .npz file"):
        read_new(tmp_path / "notes.txt", (4,), 5, 1)


def test_test_examples_in_a_file_stay_unused(tmp_path):
    path = npz(
        tmp_path / "both.npz", test_inputs=np.ones((2, 4), np.float32), test_labels=np.arange(2)
    )
    assert len(read_new(path, (4,), 5, 1)) == 3


def test_bytes_are_scaled_and_pooled_as_the_peers_own_data(tmp_path):
    path = npz(tmp_path / "pixels.npz", np.full((3, 1, 4, 4), 255, np.uint8))
    examples = read_new(path, (1, 2, 2), 5, 2)
    np.testing.assert_array_equal(examples.inputs, np.ones((3, 1, 2, 2), np.float32))
