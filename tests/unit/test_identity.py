"""Secret keys belong to their owner alone, and the allow-list follows its directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from protocol.errors import IdentityError
from protocol.identity import (
    AllowList,
    check_secret,
    generate_key_pair,
    peer_id_of,
    read_key_pair,
    read_public_key,
    write_key_pair,
)


def test_written_keys_read_back_and_the_secret_one_is_0600(tmp_path: Path) -> None:
    pair, secret, public = generate_key_pair(), tmp_path / "a.key", tmp_path / "a.pub"
    umask = os.umask(0)
    try:
        write_key_pair(pair, secret, public)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert read_key_pair(secret) == pair
    assert read_public_key(public) == pair.public_key


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    secret, public = tmp_path / "a.key", tmp_path / "a.pub"
    write_key_pair(generate_key_pair(), secret, public)
    before = secret.read_text()
    with pytest.raises(IdentityError, match="never overwritten"):
        write_key_pair(generate_key_pair(), secret, public)
    assert secret.read_text() == before


@pytest.mark.parametrize("there", ["a.key", "a.pub"])
def test_no_half_of_a_pair_is_left_beside_another_ones(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(IdentityError, match="never overwritten"):
        write_key_pair(generate_key_pair(), tmp_path / "a.key", tmp_path / "a.pub")
    assert os.listdir(tmp_path) == [there]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_secret_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    secret = tmp_path / "a.key"
    write_key_pair(generate_key_pair(), secret, tmp_path / "a.pub")
    secret.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        read_key_pair(secret)


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "\\" * 40, "ü" * 40, "#" * 40])
def test_a_malformed_key_is_refused(tmp_path: Path, text: str) -> None:
    secret = tmp_path / "a.key"
    secret.write_text(text)
    secret.chmod(0o600)
    for read in (read_key_pair, read_public_key):
        with pytest.raises(IdentityError, match=r"a\.key"):
            read(secret)


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="coterie keygen"):
        read_key_pair(tmp_path / "none.key")


def test_the_secret_is_not_shown() -> None:
    pair = generate_key_pair()
    assert pair.secret_key not in repr(pair)


def test_a_peer_id_is_32_hexadecimal_digits_that_follow_from_the_key() -> None:
    pair = generate_key_pair()
    assert peer_id_of(pair.public_key) == pair.peer_id
    assert len(bytes.fromhex(pair.peer_id)) == 16
    assert pair.peer_id != generate_key_pair().peer_id


def test_an_allow_list_follows_its_directory(tmp_path: Path) -> None:
    one, two = generate_key_pair(), generate_key_pair()
    (tmp_path / "one.pub").write_text(one.public_key + "\n")
    allowed = AllowList(tmp_path)
    assert one.public_key in allowed
    assert two.public_key not in allowed
    assert not allowed.refresh()
    (tmp_path / "two.pub").write_text(two.public_key)
    assert allowed.refresh()
    assert two.public_key in allowed
    assert allowed.names()[two.public_key] == "two"
    (tmp_path / "one.pub").unlink()
    assert allowed.refresh()
    assert one.public_key not in allowed


def test_a_file_that_is_no_key_is_left_out_and_named(tmp_path: Path) -> None:
    one = generate_key_pair()
    (tmp_path / "one.pub").write_text(one.public_key)
    (tmp_path / "bad.pub").write_text("not a key")
    (tmp_path / "readme.txt").write_text("not a key either")
    allowed = AllowList(tmp_path)
    assert one.public_key in allowed
    assert len(allowed.faults) == 1
    assert "bad.pub" in allowed.faults[0]


def test_a_dangling_link_in_the_directory_hides_nobody(tmp_path: Path) -> None:
    one = generate_key_pair()
    (tmp_path / "gone.pub").symlink_to(tmp_path / "nowhere")
    (tmp_path / "one.pub").write_text(one.public_key)
    allowed = AllowList(tmp_path)
    assert one.public_key in allowed
    assert "gone.pub" in allowed.faults[0]


def test_an_allow_list_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="make the directory"):
        AllowList(tmp_path / "none")


def test_a_secret_key_among_the_allowed_ones_is_left_out_and_whose_it_is_is_named(
    tmp_path: Path,
) -> None:
    one, two = generate_key_pair(), generate_key_pair()
    (tmp_path / "one.pub").write_text(one.public_key)
    (tmp_path / "another.pub").write_text(one.secret_key)
    (tmp_path / "two.pub").write_text(two.public_key)
    allowed = AllowList(tmp_path)
    assert allowed.names() == {one.public_key: "one", two.public_key: "two"}
    (fault,) = allowed.faults
    assert "another.pub holds the secret key of one" in fault
    assert one.secret_key not in fault


def test_a_key_that_two_files_hold_is_named_and_counts_once(tmp_path: Path) -> None:
    one = generate_key_pair()
    (tmp_path / "alice.pub").write_text(one.public_key)
    (tmp_path / "bob.pub").write_text(one.public_key)
    allowed = AllowList(tmp_path)
    assert allowed.names() == {one.public_key: "alice"}
    (fault,) = allowed.faults
    assert "bob.pub holds the key of alice, too" in fault


def test_a_public_key_in_place_of_the_secret_one_is_refused(tmp_path: Path) -> None:
    one, secret = generate_key_pair(), tmp_path / "mine.key"
    (tmp_path / "one.pub").write_text(one.public_key)
    secret.write_text(one.public_key)
    secret.chmod(0o600)
    allowed = AllowList(tmp_path)
    with pytest.raises(IdentityError, match=r"mine\.key holds the public key of one"):
        check_secret(read_key_pair(secret), secret, allowed)
    check_secret(one, secret, allowed)
