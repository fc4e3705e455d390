"""Keys: making, reading and checking them, the peer ids derived from them, and the allow-list."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.utils.z85

from protocol.errors import IdentityError
from protocol.messages import PeerId

_KEY_CHARACTERS = 40  # 32 bytes in z85


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, both halves z85-encoded."""

    public_key: str
    secret_key: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public_key!r}, secret)"

    @property
    def peer_id(self) -> PeerId:
        """The peer id that this pair proves."""
        return peer_id_of(self.public_key)


def generate_key_pair() -> KeyPair:
    """Make a new key pair."""
    public_key, secret_key = zmq.curve_keypair()
    return KeyPair(public_key.decode(), secret_key.decode())


def peer_id_of(public_key: str) -> PeerId:
    """Return the peer id of a z85-encoded public key: 16 bytes of BLAKE2b of it, in hex.

    Raises:
        IdentityError: It is no z85-encoded key of 32 bytes.
    """
    return PeerId(hashlib.blake2b(_decode(public_key, "a public key"), digest_size=16).hexdigest())


def write_key_pair(pair: KeyPair, secret_path: Path, public_path: Path) -> None:
    """Write the secret key for its owner alone (0600), and the public key; never overwrite.

    Raises:
        IdentityError: A file is there already, or can't be written.
    """
    for path in (secret_path, public_path):  # both first, so that no half of a pair is left
        if path.exists():
            raise _exists(path)
    for path, text, mode in (
        (secret_path, pair.secret_key, 0o600),
        (public_path, pair.public_key, 0o644),
    ):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError as error:
            raise _exists(path) from error
        except OSError as error:
            raise IdentityError(f"can't write {path}: {error.strerror}") from error
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")


def read_key_pair(secret_path: Path) -> KeyPair:
    """Read a secret key and derive its public half.

    Raises:
        IdentityError: Missing, unreadable, malformed, or readable by others than its owner.
    """
    text = _read(secret_path, f"make one with: coterie keygen {secret_path.with_suffix('')}")
    mode = stat.S_IMODE(secret_path.stat().st_mode)
    if mode & 0o077:
        raise IdentityError(
            f"{secret_path} is readable by others (mode {mode:04o}): "
            f"if nobody has read it, run chmod 600 {secret_path}; else make a new key"
        )
    _decode(text, str(secret_path))
    return KeyPair(_public_half(text), text)


def check_secret(pair: KeyPair, secret_path: Path, allow_list: AllowList) -> None:
    """Check that what was read as a secret key isn't the public key of somebody.

    Raises:
        IdentityError: It is.
    """
    name = allow_list.names().get(pair.secret_key)
    if name is not None:
        raise IdentityError(
            f"{secret_path} holds the public key of {name}: it must hold the secret one, which "
            "coterie keygen wrote into the .key file"
        )


def read_public_key(path: Path) -> str:
    """Read a z85-encoded public key.

    Raises:
        IdentityError: Missing, unreadable or malformed.
    """
    text = _read(path, "ask its owner for the .pub file that coterie keygen wrote")
    _decode(text, str(path))
    return text


class AllowList:
    """The peers that may talk to us: a directory of `NAME.pub` files, re-read when it changes.

    Files that can't be read are left out and named in `faults`.

    Attributes:
        directory: Where the public keys lie.
        faults: What was wrong with files at the last reading.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.faults: tuple[str, ...] = ()
        self._names: dict[str, str] = {}
        self._public_of: dict[str, str] = {}
        self._stamp: object = None
        self.refresh()

    def refresh(self) -> bool:
        """Read the directory again if it changed; return whether the allowed keys did.

        Raises:
            IdentityError: The directory isn't there.
        """
        try:
            with os.scandir(self.directory) as entries:
                stamp = sorted(
                    (entry.path, _written_at(entry))
                    for entry in entries
                    if entry.name.endswith(".pub")
                )
        except OSError as error:
            raise IdentityError(
                f"the allow-list {self.directory} can't be read ({error.strerror}): "
                f"make the directory and put the .pub file of every allowed peer in it"
            ) from error
        if stamp == self._stamp:
            return False
        names, faults = self._read([Path(file) for file, _ in stamp])
        changed = names != self._names
        self._stamp, self._names, self.faults = stamp, names, tuple(faults)
        return changed

    def _read(self, paths: Sequence[Path]) -> tuple[dict[str, str], list[str]]:
        """Return the name of each good key, and what is wrong with the other files."""
        names: dict[str, str] = {}
        faults = []
        for path in paths:
            try:
                key = read_public_key(path)
            except IdentityError as error:
                faults.append(str(error))
                continue
            if key in names:
                faults.append(
                    f"{path} holds the key of {names[key]}, too: give each peer a key of its own"
                )
            else:
                names[key] = path.stem
        # Only its public half tells that a key is a secret one: both are any 32 bytes.
        self._public_of = {key: self._public_of.get(key) or _public_half(key) for key in names}
        secrets = {key: names[public] for key, public in self._public_of.items() if public in names}
        for key, owner in secrets.items():
            faults.append(
                f"{self.directory / names.pop(key)}.pub holds the secret key of {owner}: "
                "remove the file, and make that peer a new key"
            )
        return names, faults

    def __contains__(self, public_key: object) -> bool:
        return public_key in self._names

    def names(self) -> Mapping[str, str]:
        """Return the name of each allowed peer by its public key."""
        return self._names


def _written_at(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mtime_ns
    except OSError:  # just removed, or a dangling link: reading it will tell
        return 0


def _public_half(secret_key: str) -> str:
    return zmq.curve_public(secret_key.encode()).decode()


def _exists(path: Path) -> IdentityError:
    return IdentityError(
        f"{path} exists; a key is never overwritten: choose another name, or move it away"
    )


def _read(path: Path, advice: str) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        raise IdentityError(f"{path} isn't there: {advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"{path} can't be read: {error}") from error


def _decode(key: str, where: str) -> bytes:
    try:
        if len(key) != _KEY_CHARACTERS:
            raise ValueError(f"it has {len(key)} characters")
        return zmq.utils.z85.decode(key)
    except (ValueError, KeyError, struct.error) as error:
        raise IdentityError(
            f"{where} is not a CURVE key of {_KEY_CHARACTERS} z85 characters ({error})"
        ) from error
