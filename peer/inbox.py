"""A watched folder of files, each of which is taken whole and once, or refused by name.

::

    FOLDER/NAME.npz               waits to be taken; a refused one stays, and is looked at again
                                  when it has changed
    FOLDER/taken/000001-NAME.npz  was taken, in this order

Taking is one rename, so that a kill at any moment neither loses a file nor takes it twice.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

from peer.files import replacing
from protocol.errors import DataError

logger = logging.getLogger(__name__)

TAKEN = "taken"
"""Folder of the files that were taken, inside the watched one."""

_Look = tuple[int, int, int]
_NUMBERED = re.compile(r"(\d{6,})-.+")


class Waiting(NamedTuple):
    """A file that waits to be taken.

    Attributes:
        path: Where it is.
        look: What it looked like when it was found: another look means another content.
    """

    path: Path
    look: _Look


class Inbox:
    """A watched folder, which this process alone takes from.

    Args:
        folder: Made where it isn't there.

    Raises:
        OSError: It can't be made or read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken = folder / TAKEN
        self._taken.mkdir(parents=True, exist_ok=True)
        self._number = max(map(_number_of, self._taken.iterdir()), default=0)
        self._doubted: dict[str, _Look] = {}
        self._refused: dict[str, _Look] = {}

    def taken(self) -> list[Path]:
        """Return all files ever taken, in that order."""
        return sorted(filter(_number_of, self._taken.iterdir()), key=_number_of)

    def waiting(self) -> list[Waiting]:
        """Return the files to look at, the oldest first; refused ones only if they have changed.

        Raises:
            OSError: The folder can't be read.
        """
        with os.scandir(self.folder) as entries:
            files = [
                Waiting(Path(entry.path), _look_of(entry.stat()))
                for entry in entries
                if entry.is_file() and not entry.name.startswith(".")
            ]
        new = (file for file in files if self._refused.get(file.path.name) != file.look)
        return sorted(new, key=lambda file: (file.look[-1], file.path.name))

    def take(self, file: Waiting) -> Path:
        """Take a file, and return where it is now.

        Raises:
            DataError: It has become another since it was found.
            OSError: It can't be moved.
        """
        target = self._taken / f"{self._number + 1:06d}-{file.path.name}"
        file.path.rename(target)
        if _look_of(target.stat()) != file.look:
            target.rename(file.path)
            raise DataError(f"{file.path} is still being written")
        self._number += 1
        return target

    def refuse(self, file: Waiting, reason: Exception) -> None:
        """Leave a file where it is and say why, once; one that is still being written may yet do.

        So it is refused only when it failed twice and looked the same.
        """
        name = file.path.name
        if self._doubted.get(name) != file.look:
            self._doubted[name] = file.look
            return
        del self._doubted[name]
        self._refused[name] = file.look
        logger.warning("%s is refused: %s", file.path, reason)


def put(path: Path, folder: Path) -> Path:
    """Copy a file into a watched folder, whole or not at all, and return where it is.

    Its name gets a suffix, so that it takes no other's place.

    Raises:
        OSError: It can't be read or written.
    """
    target = folder / f"{path.stem}.{secrets.token_hex(4)}{path.suffix}"
    with path.open("rb") as source, replacing(target) as file:
        shutil.copyfileobj(source, file)
    return target


def _look_of(status: os.stat_result) -> _Look:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _number_of(path: Path) -> int:
    matched = _NUMBERED.fullmatch(path.name)
    return int(matched[1]) if matched else 0
