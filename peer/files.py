"""Write a file whole or not at all, and hold a folder for one process alone."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from protocol.errors import CoterieError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to that takes the place of `path` once the block ends well.

    Until then, and for ever when the block raises, `path` stays as it was: a reader sees the old
    content or the new, never a part. The bytes are on the disk before the name is (fsync), so
    that a power cut leaves no empty file behind. Missing parent folders are made.

    Raises:
        OSError: A folder or file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic only within one file system; with a name of its
    # own, since two processes may write the same file at once.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, holder: str) -> Iterator[None]:
    """Hold a folder until the block ends, or this process does, however it does.

    Args:
        folder: An existing folder; a file `lock` is made in it.
        holder: Who holds it when we can't have it, for the message.

    Raises:
        CoterieError: Another process holds it.
    """
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CoterieError(
                f"{folder} is in use by {holder}: stop that one first, or use another folder"
            ) from error
        yield
