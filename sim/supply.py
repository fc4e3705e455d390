"""Load a comparison's data once, and deal each trial the slices of its peers.

Reported trials learn from the data set's train part and are tested on its test part. Tuning never
sees the latter: there, a fifth of the train part stands in for the test part, and the peers are
others, made of the rest. A data set that comes in one piece is divided so first, once for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from peer.config import resolve
from peer.data import TEST_FRACTION, Dataset
from peer.sources import load_source
from peer.streams import Streams
from protocol.errors import ConfigError, DataError
from sim.comparison import CompareSettings, Trial
from sim.partition import partition
from sim.provenance import code_digest
from sim.slices import Slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A trial with all it needs.

    Attributes:
        trial: Which.
        settings: The comparison's.
        slices: What each peer has.
        import_paths: Where to look for a model of the user's own.
        code: Digest of the code that does it.
    """

    trial: Trial
    settings: CompareSettings
    slices: list[Slice]
    import_paths: list[Path]
    code: str


class Supply:
    """The data of one comparison.

    One process holds them and hands the others what their peers get: memory doesn't grow with the
    number of processes, and all methods learn from the very same examples.

    Args:
        settings: The comparison's.
        base: The config file's folder, which relative paths start from.

    Attributes:
        code: Digest of the code that does its trials.

    Raises:
        ConfigError: A path is none.
        DataError: The data can't be loaded.
    """

    def __init__(self, settings: CompareSettings, base: Path) -> None:
        self.code = code_digest()
        self._settings = settings
        self._import_paths = [base, *(resolve(base, path) for path in settings.import_paths)]
        source, folder = settings.data, settings.data_folder
        dataset = load_source(
            str(resolve(base, source)) if source.endswith(".npz") else source,
            folder=resolve(base, folder) if folder else None,
            download=settings.download,
            num_classes=settings.classes or None,
            pool=settings.pool,
            import_paths=self._import_paths,
        )
        self._reported = dataset if dataset.test else divide(dataset, np.random.default_rng(0))
        # Trials come regime by regime and seed by seed, so that one of each need be kept.
        self._tuned = functools.lru_cache(maxsize=1)(self._divide_again)
        self._dealt = functools.lru_cache(maxsize=1)(self._deal)

    @property
    def fingerprint(self) -> str:
        """A digest of all examples."""
        digest = xxhash.xxh3_128()
        for part in (self._reported.train, self._reported.test):
            if part is not None:
                digest.update(np.ascontiguousarray(part.inputs).data)
                digest.update(np.ascontiguousarray(part.labels).data)
        return digest.hexdigest()

    def tasks(self, trials: Iterable[Trial]) -> Iterator[Task]:
        """Yield each trial with its slices, dealt when they are wanted.

        Raises:
            ConfigError: The regime is impossible with these data.
            DataError: Its images can't be rotated.
        """
        for trial in trials:
            slices = self._dealt(trial.regime, trial.seed, trial.tuning)
            yield Task(
                trial=trial,
                settings=self._settings,
                slices=slices,
                import_paths=self._import_paths,
                code=self.code,
            )

    def _deal(self, regime: str, seed: int, tuning: bool) -> list[Slice]:
        settings = self._settings
        dataset = self._tuned(seed) if tuning else self._reported
        peers = (tuning and settings.tune.peers) or settings.peers
        rng = np.random.default_rng(seed)
        try:
            slices = partition(dataset, peers, settings.partition_of(regime), rng)
        except (ConfigError, DataError) as error:
            where = ", tuning (on four fifths of the training part)" if tuning else ""
            raise type(error)(f"{regime}, seed {seed}{where}: {error}") from error
        if not any(len(part.dataset.test or ()) for part in slices):
            raise DataError(f"{regime}, seed {seed}: no peer gets a test example: have more data")
        return slices

    def _divide_again(self, seed: int) -> Dataset:
        return divide(self._reported, Streams.of(seed, "validation").split)


def divide(dataset: Dataset, rng: np.random.Generator) -> Dataset:
    """Make a fifth of a data set's train part the test part; its own is left out.

    Args:
        dataset: The whole.
        rng: Draws the fifth. Where examples have owners it is the last of each owner's instead,
            since a text or a series must not be tested between its own examples.
    """
    is_test = np.zeros(len(dataset.train), np.bool_)
    if dataset.train_owners is None:
        order = rng.permutation(len(is_test))
        is_test[order[: round(TEST_FRACTION * len(order))]] = True
    else:
        is_test = _is_last(dataset.train_owners)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    owners = dataset.train_owners
    return Dataset(
        name=dataset.name,
        train=dataset.train.take(train),
        test=dataset.train.take(test),
        num_classes=dataset.num_classes,
        train_owners=None if owners is None else owners[train],
        test_owners=None if owners is None else owners[test],
        owner_names=dataset.owner_names,
        owner_groups=dataset.owner_groups,
    )


def _is_last(owners: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Say of each example whether it is in the last fifth of its owner's."""
    counts = np.bincount(owners)
    by_owner = np.argsort(owners, kind="stable")
    place = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = counts - np.round(TEST_FRACTION * counts).astype(np.int64)
    result = np.zeros(len(owners), np.bool_)
    result[by_owner] = place >= np.repeat(kept, counts)
    return result
