"""Keep what a study of synthetic problems has done in a folder, so that it can be gone on with.

::

    FOLDER/study.json                      what the problems are like
    FOLDER/problems/KIND-nN-seedSEED.json  a `Kept` each
    FOLDER/results.json, .csv, .png        the report
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from peer.files import locked, replacing
from protocol.errors import ConfigError, RunError
from sim.provenance import code_digest
from sim.regression import Design, Kind
from sim.study_rows import Cell

logger = logging.getLogger(__name__)

STUDY_FILE = "study.json"

Key = tuple[Kind, int, int]
"""Kind, number of examples of each peer, and seed of a problem."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What all problems of a folder have in common.

    Attributes:
        design: What they are like.
        starts: How often those variants are repeated that draw where they start.
    """

    design: Design
    starts: int


class Plan(Conditions, frozen=True, kw_only=True):
    """Which problems a study consists of.

    Attributes:
        kinds: Of regression, each once.
        sizes: Numbers of examples of each peer, ascending.
        seeds: How many problems of each kind and size there are; their seeds begin at 1.
    """

    kinds: tuple[Kind, ...]
    sizes: tuple[int, ...]
    seeds: int

    def __post_init__(self) -> None:
        """Check that there is a problem.

        Raises:
            ConfigError: There is none, or no start.
        """
        if not self.kinds or not self.sizes:
            raise ConfigError("a study takes at least one problem and one number of examples")
        for name, number in (("seeds", self.seeds), ("starts", self.starts)):
            if number < 1:
                raise ConfigError(f"{name} = {number}: there must be at least one")

    def problems(self) -> Iterator[Key]:
        """Yield the key of each problem, in the order of the report."""
        for kind in self.kinds:
            for size in self.sizes:
                for seed in range(1, self.seeds + 1):
                    yield kind, size, seed


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that is done.

    Attributes:
        cell: What came of it.
        seconds: What it took.
        code: Digest of the code that did it; other code does it again.
    """

    cell: Cell
    seconds: float
    code: str


class Ledger:
    """The problems done so far, held for this process alone; see `open_ledger`.

    Args:
        folder: Where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._code = code_digest()
        self._kept: dict[Key, Kept] = {}

    def read(self, keys: Iterable[Key]) -> list[Key]:
        """Read these problems, and return those that are still to be done."""
        return [key for key in keys if not self._read(key)]

    def add(self, cell: Cell, seconds: float) -> None:
        """Keep a problem that is done."""
        key = (cell.kind, cell.examples, cell.seed)
        kept = Kept(cell=cell, seconds=round(seconds, 2), code=self._code)
        _write(self._path(key), kept)
        self._kept[key] = kept

    def kept(self) -> Mapping[Key, Kept]:
        """Return all problems read or added."""
        return self._kept

    def _read(self, key: Key) -> bool:
        path = self._path(key)
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=Kept)
        except FileNotFoundError:
            return False
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("%s is damaged (%s): this problem is done again", path, error)
            return False
        if kept.code != self._code:
            return False
        self._kept[key] = kept
        return True

    def _path(self, key: Key) -> Path:
        kind, size, seed = key
        return self.folder / "problems" / f"{kind}-n{size}-seed{seed}.json"


@contextmanager
def open_ledger(folder: Path, plan: Plan) -> Iterator[Ledger]:
    """Open the ledger of a study, a new one or one to go on with.

    Args:
        folder: Made if it isn't there.
        plan: The study's. Other kinds, sizes and seeds than before are welcome.

    Raises:
        ConfigError: The folder is another study's, or none's.
        RunError: What it says of its study is damaged.
        CoterieError: Another process is at it.
    """
    path = folder / STUDY_FILE
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is no folder: choose another")
    if not path.exists() and folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"--out {folder} is not the folder of a study, and not empty: choose another"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "another coterie study"):
        now = Conditions(design=plan.design, starts=plan.starts)
        if path.exists() and (before := _conditions(path)) != now:
            raise ConfigError(
                f"{folder} holds a study of other problems ({_say(before)}; here {_say(now)}): "
                "give another --out, or remove that folder"
            )
        _write(path, now)
        yield Ledger(folder)


def _conditions(path: Path) -> Conditions:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Conditions)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is damaged ({error}): move the folder away") from error


def _say(conditions: Conditions) -> str:
    design = conditions.design
    return (
        f"peers = {design.peers}, clusters = {design.clusters}, dim = {design.dim}, "
        f"starts = {conditions.starts}"
    )


def _write(path: Path, value: msgspec.Struct) -> None:
    with replacing(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
