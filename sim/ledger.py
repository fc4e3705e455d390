"""Keep the results of a comparison's trials in a folder, so that it can be gone on with.

::

    FOLDER/comparison.json                     the settings, and a digest of the data
    FOLDER/trials/REGIME/METHOD/TRIAL.json     a `TrialResult` each
    FOLDER/log.txt                             what went wrong, in full
    FOLDER/results.json, .csv, .md, .png       the report
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from peer.files import locked, replacing
from peer.record import write_json
from protocol.errors import ConfigError, RunError
from sim.comparison import CompareSettings, Trial
from sim.trial import TrialResult

logger = logging.getLogger(__name__)

COMPARISON_FILE = "comparison.json"

_EXTENDABLE = frozenset(
    {"methods", "regimes", "seeds", "tune.learning_rate", "tune.local_steps", "tune.seeds"}
)
"""Which trials there are; others may be added to them, and leave those done as they are."""

_ELSEWHERE = frozenset({"data_folder", "download"})
"""Where the data lie; whether they are the same, their digest says."""

_SHOWN_DIFFERENCES = 3


TRIALS = "trials"


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What `comparison.json` says."""

    settings: dict[str, Any]
    data: str


class Ledger:
    """The results so far, held for this process alone; see `open_ledger`.

    Args:
        folder: Where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._results: dict[Trial, TrialResult] = {}

    def read(self, trials: Iterable[Trial]) -> list[Trial]:
        """Read the results of these trials, and return those that have none.

        A file that can't be used counts as none.
        """
        return [trial for trial in trials if trial not in self._results and not self._read(trial)]

    def add(self, result: TrialResult) -> None:
        """Keep a result."""
        text = msgspec.json.format(msgspec.json.encode(result), indent=0)
        with replacing(self._path(result.trial)) as file:
            file.write(text + b"\n")
        self._results[result.trial] = result

    def results(self) -> Mapping[Trial, TrialResult]:
        """Return all results read or added."""
        return self._results

    def _read(self, trial: Trial) -> bool:
        path = self._path(trial)
        try:
            result = msgspec.json.decode(path.read_bytes(), type=TrialResult)
            result.check(trial)
        except FileNotFoundError:
            return False
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            logger.warning("%s is damaged (%s): this trial is done again", path, error)
            return False
        self._results[trial] = result
        return True

    def _path(self, trial: Trial) -> Path:
        steps = "" if trial.local_steps is None else f"-steps{trial.local_steps}"
        purpose = "tune" if trial.tuning else "report"
        name = f"{purpose}-seed{trial.seed}-lr{trial.learning_rate}{steps}.json"
        return self.folder / TRIALS / trial.regime / trial.method / name


@contextmanager
def open_ledger(folder: Path, settings: CompareSettings, fingerprint: str) -> Iterator[Ledger]:
    """Open the ledger of a comparison, a new one or one to go on with.

    Args:
        folder: Made if it isn't there.
        settings: The comparison's. Other methods, regimes, seeds and grid points than before are
            welcome: trials that both have in common aren't done again. So are other options of
            methods and regimes of which no trial is done.
        fingerprint: Digest of the data.

    Raises:
        ConfigError: The folder is another comparison's, or none's.
        CoterieError: Another process is at it.
    """
    path = folder / COMPARISON_FILE
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is no folder: choose another")
    if not path.exists() and folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"--out {folder} is not the folder of a comparison, and not empty: choose another"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "another coterie compare"):
        now = {"settings": _plain(settings), "data": fingerprint}
        _check_same(path, now)
        write_json(path, now)
        yield Ledger(folder)


def _check_same(path: Path, now: Mapping[str, Any]) -> None:
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
    except FileNotFoundError:
        return
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise RunError(f"{path} is damaged ({error}): move the folder away") from error
    completed = _completed(saved.settings, now["settings"])
    used = _used(path.parent)
    old, new = (dict(_flat(_only(tree, used))) for tree in (completed, now["settings"]))
    differences = [
        f"{key} is {_say(old.get(key))} there and {_say(new.get(key))} here"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in _EXTENDABLE | _ELSEWHERE
    ]
    if saved.data != now["data"]:
        differences.append("the data are not the same")
    if differences:
        more = len(differences) - _SHOWN_DIFFERENCES
        shown = ", ".join(differences[:_SHOWN_DIFFERENCES]) + (f", and {more} more" * (more > 0))
        raise ConfigError(
            f"{path.parent} holds a comparison of another config ({shown}): give another --out, or "
            "remove the trials that went by it, or that folder"
        )


def _used(folder: Path) -> dict[str, set[str]]:
    """Return the sections of which trials are done: names of methods and of regimes."""
    done = [path.parent for path in (folder / TRIALS).glob("*/*/*.json")]
    return {
        "options": {method.name for method in done},
        "regime": {method.parent.name for method in done},
    }


def _only(settings: Mapping[str, Any], used: Mapping[str, set[str]]) -> dict[str, Any]:
    """Return settings without the sections that no trial has gone by: they may still change."""
    kept = {
        key: {name: section for name, section in settings.get(key, {}).items() if name in names}
        for key, names in used.items()
    }
    return {**settings, **kept}


def _completed(settings: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of what could not be set yet when these settings were written."""
    lists = {key: now[key] for key in ("methods", "regimes", "seeds")}  # these may differ
    try:
        return _plain(msgspec.convert({**settings, **lists}, CompareSettings))
    except (ConfigError, msgspec.ValidationError):  # some can't be set any more: they differ
        return settings


def _plain(settings: CompareSettings) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(msgspec.json.encode(settings))
    return plain


def _flat(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _say(value: object) -> str:
    return "not set" if value is None else json.dumps(value)
