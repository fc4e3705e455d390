"""A peer's own examples: those that its settings name, and those that come while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from peer.config import PeerSettings, resolve
from peer.data import Dataset, Examples, Split
from peer.sources import load_source
from protocol.errors import DataError


def load_own(settings: PeerSettings, base: Path, import_paths: Sequence[Path]) -> Dataset:
    """Load the data that a peer's settings name.

    Args:
        settings: The peer's.
        base: The config file's folder, which relative paths start from.
        import_paths: Where to look for a function of the user's own.

    Raises:
        DataError: The data can't be loaded.
    """
    source = settings.data
    return load_source(
        str(resolve(base, source)) if source.endswith(".npz") else source,
        folder=resolve(base, settings.data_folder) if settings.data_folder else None,
        download=settings.download,
        num_classes=settings.classes or None,
        labels=settings.labels or None,
        part=settings.part,
        pool=settings.pool,
        import_paths=import_paths,
    )


def read_new(path: Path, input_shape: tuple[int, ...], num_classes: int, pool: int) -> Examples:
    """Read a file of new labelled examples, prepared as the peer's own `.npz` data would be.

    Args:
        path: An `.npz` file with `train_inputs` and `train_labels`; what else is in it is unused.
        input_shape: Of one input, as the model takes it.
        num_classes: Of the model.
        pool: As in the settings.

    Raises:
        DataError: The file can't be read, or holds no examples for this model.
    """
    if path.suffix != ".npz":
        raise DataError(f"{path} is no .npz file: save with numpy.savez, as NAME.npz")
    examples = load_source(str(path), num_classes=num_classes, pool=pool).train
    if examples.inputs.shape[1:] != input_shape:
        raise DataError(
            f"{path}: its inputs have the shape {examples.inputs.shape[1:]}, the model takes "
            f"{input_shape}: prepare them as the peer's own data"
        )
    return examples


class Collection:
    """All examples that a peer trains on or measures on, in order of arrival.

    First those that fit, then the holdout, then what came later, of which each example joins the
    holdout with the same probability as before, so that measuring follows the data.

    Args:
        split: What the peer began with.
        holdout_fraction: Of what comes later.
        seed: Decides, with the number of examples before, which of what comes later is held out;
            so the same files in the same order always make the same split.
    """

    def __init__(self, split: Split, holdout_fraction: float, seed: int) -> None:
        self._test = split.test
        self._fraction = holdout_fraction
        self._seed = seed
        self._all = split.train
        self._is_held = np.repeat([False, True], [len(split.fit), len(split.holdout)])

    def __len__(self) -> int:
        return len(self._all)

    @property
    def examples(self) -> Examples:
        """All of them."""
        return self._all

    @property
    def held(self) -> npt.NDArray[np.intp]:
        """The arrivals that are held out, ascending. Shape (num_held,)."""
        return np.flatnonzero(self._is_held)

    def add(self, examples: Examples, is_held: npt.NDArray[np.bool_] | None = None) -> None:
        """Take in examples that came later.

        Args:
            examples: The examples.
            is_held: Which of them are held out, if that is decided already. Shape (num_examples,).
        """
        if is_held is None:
            rng = np.random.default_rng((self._seed, len(self)))
            is_held = rng.random(len(examples)) < self._fraction
        self._is_held = np.concatenate((self._is_held, is_held))
        self._all = Examples(
            np.concatenate((self._all.inputs, examples.inputs)),
            np.concatenate((self._all.labels, examples.labels)),
        )

    def split(self) -> Split:
        """Return what to train on, to measure on and to test on now."""
        return Split(
            fit=self._all.take(np.flatnonzero(~self._is_held)),
            holdout=self._all.take(self.held),
            test=self._test,
        )
