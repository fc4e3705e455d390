"""Write a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
