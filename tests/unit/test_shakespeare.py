"""Shakespeare as examples: characters to ids, windows, and the roles that own them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import peer.shakespeare
from peer.plays import read_roles
from peer.shakespeare import (
    ALPHABET,
    OTHER,
    SHAKESPEARE_FOLDER,
    STRIDE,
    TRAIN_FRACTION,
    WINDOW,
    cut_windows,
    encode,
    read_shakespeare,
)
from peer.sources import load_source
from protocol.errors import DataError

PLAYS = Path(__file__).parents[2] / SHAKESPEARE_FOLDER


def decode(ids: np.ndarray) -> str:
    return "".join(ALPHABET[int(i)] for i in ids)


def play(**words: int) -> str:
    """Return a play in which each role says so many words in two speeches, all different."""
    parts = ["ACT I"]
    for half in (1, 2):
        for role, count in words.items():
            said = " ".join(f"{role}{half}{number}" for number in range(count // 2))
            parts += [f"{role.upper()}.\n{said}"]
    return "\n\n".join(parts)


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, "utf-8")
    return folder


# Characters


def test_the_alphabet_is_fixed_since_peers_must_agree_on_it() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 77
    assert ALPHABET[0] == "\n" and ALPHABET[-1] == OTHER
    assert encode("\n aZ?").tolist() == [0, 1, 24, 75, 13]


@given(st.text(ALPHABET[:-1]))
def test_what_is_in_the_alphabet_is_encoded_as_itself(text: str) -> None:
    assert decode(encode(text)) == text


@given(st.text())
def test_any_text_has_ids_within_the_alphabet(text: str) -> None:
    ids = encode(text)
    assert ids.dtype == np.int8
    assert ids.size == 0 or 0 <= ids.min() <= ids.max() < len(ALPHABET)


def test_typographic_characters_become_plain_and_unknown_ones_other() -> None:
    typographic = "\u201cNa\u00efve\u201d \u2018C\u00e6sar\u2019\u2014no\u2026 $[\u4e00\x00"
    assert decode(encode(typographic)) == f"\"Naive\" 'Caesar'--no... {OTHER * 4}"


# Windows


@given(st.integers(0, 500))
def test_windows_hold_what_precedes_their_label_and_begin_a_stride_apart(length: int) -> None:
    ids = (np.arange(length) % 77).astype(np.int8)

    inputs, labels = cut_windows(ids)

    assert len(labels) == (0 if length <= WINDOW else 1 + (length - WINDOW - 1) // STRIDE)
    assert inputs.shape == (len(labels), WINDOW)
    for index, (window, label) in enumerate(zip(inputs, labels, strict=True)):
        begin = index * STRIDE
        assert window.tolist() == ids[begin : begin + WINDOW].tolist()
        assert label == ids[begin + WINDOW]


# Roles as owners


def test_each_role_of_each_play_owns_its_examples_and_its_group_is_the_play(tmp_path: Path) -> None:
    write(tmp_path, the_bakers=play(ann=200, bob=120), millers=play(ann=160, eve=9))

    dataset = load_source("shakespeare", folder=tmp_path)

    assert dataset.owner_names == ("ANN in millers", "ANN in the bakers", "BOB in the bakers")
    assert dataset.owner_groups == (0, 1, 1)
    assert dataset.num_classes == len(ALPHABET) and dataset.input_shape == (WINDOW,)
    assert dataset.test is not None and dataset.test_owners is not None
    assert dataset.train_owners is not None
    texts = {
        f"{role.name} in {role.play}": "\n".join(role.speeches)
        for path in sorted(tmp_path.glob("*.txt"))
        for role in read_roles(path.read_text("utf-8"), path.stem.replace("_", " "))
    }
    for owner, name in enumerate(dataset.owner_names):
        cut = int(TRAIN_FRACTION * len(texts[name]))
        for part, owners, text in (
            (dataset.train, dataset.train_owners, texts[name][:cut]),
            (dataset.test, dataset.test_owners, texts[name][cut:]),
        ):
            own = part.take(np.flatnonzero(owners == owner))
            inputs, labels = cut_windows(encode(text))
            assert len(own) == len(inputs) > 0
            assert np.array_equal(own.inputs, inputs)
            assert np.array_equal(own.labels, labels)


def test_a_role_too_short_to_test_still_owns_training_examples(tmp_path: Path) -> None:
    raw = read_shakespeare(write(tmp_path, short=play(ann=30, bob=200)))

    assert raw.owner_names == ("ANN in short", "BOB in short")
    assert raw.test_owners is not None and set(raw.test_owners.tolist()) == {1}


def test_selections_keep_owners_with_their_examples(tmp_path: Path) -> None:
    write(tmp_path, bakers=play(ann=300, bob=240))
    whole = load_source("shakespeare", folder=tmp_path)
    wanted = [int(label) for label in np.unique(whole.train.labels)[:9]]

    for options in ({"labels": wanted}, {"part": (1, 3)}, {"labels": wanted, "part": (0, 2)}):
        kept = load_source("shakespeare", folder=tmp_path, **options)  # type: ignore[arg-type]

        assert 0 < len(kept.train) < len(whole.train)
        assert kept.owner_names == whole.owner_names
        assert kept.train_owners is not None and whole.train_owners is not None
        spoken = {
            (window.tobytes(), owner)
            for window, owner in zip(whole.train.inputs, whole.train_owners.tolist(), strict=True)
        }
        assert all(
            (window.tobytes(), owner) in spoken
            for window, owner in zip(kept.train.inputs, kept.train_owners.tolist(), strict=True)
        )


def test_texts_from_before_unicode_are_read(tmp_path: Path) -> None:
    text = play(ann=200).replace("ann1", "na\u00efve")
    (tmp_path / "old.txt").write_bytes(text.encode("latin-1"))

    raw = read_shakespeare(tmp_path)

    assert "naive" in decode(raw.train[0][0])
    assert (raw.train[1] < len(ALPHABET) - 1).all()


# Where they are looked for


def test_plays_are_taken_from_below_the_current_folder_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no plays, NAME\.txt, in data/shakespeare: run `make"):
        read_shakespeare()
    write(SHAKESPEARE_FOLDER, usual=play(ann=200))
    assert read_shakespeare().owner_names == ("ANN in usual",)
    with pytest.raises(DataError, match=r"in own: run `make shakespeare`, or set data_folder"):
        read_shakespeare(Path("own"))
    assert read_shakespeare(write(Path("own"), own=play(bob=200))).owner_names == ("BOB in own",)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Shall I compare thee to a loaf of bread?\n", r"mine\.txt is no play: no speech is found"),
        (play(ann=4), "all roles of the plays in .* are too short"),
    ],
)
def test_what_makes_no_examples_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        read_shakespeare(write(tmp_path, mine=text))


def test_more_text_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, one=play(ann=200), other=play(bob=200))
    monkeypatch.setattr(peer.shakespeare, "MAX_BYTES", 2000)
    with pytest.raises(DataError, match="larger than 2000 bytes altogether"):
        read_shakespeare(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match=r"folder\.txt can't be read: Is a directory"):
        read_shakespeare(tmp_path)


@pytest.mark.skipif(not PLAYS.is_dir(), reason="no plays in data/shakespeare: make shakespeare")
def test_the_real_plays_give_hundreds_of_roles_with_enough_examples() -> None:
    raw = read_shakespeare(PLAYS)
    if "HAM in hamlet" not in raw.owner_names or raw.train_owners is None:
        pytest.skip("data/shakespeare holds plays of the user's own")

    sizes = np.bincount(raw.train_owners)
    assert len(set(raw.owner_groups)) == 37
    assert (sizes >= 100).sum() > 500
    assert raw.owner_names[int(sizes.argmax())] == "HAM in hamlet"
    other = np.mean(raw.train[0] == ALPHABET.index(OTHER))
    assert other < 1e-5
