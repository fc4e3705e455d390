"""Turn the `data` setting, a name, a file or the user's own function, into a checked data set."""

from __future__ import annotations

import difflib
import functools
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.cifar import read_cifar
from peer.data import Dataset, Examples, StoredExamples
from peer.datasets import RawDataset, read_digits, read_fashion_mnist
from peer.files import replacing
from peer.hooks import is_hook, load_hook
from peer.shakespeare import read_shakespeare
from protocol.errors import DataError

_Array = npt.NDArray[Any]
_NAMES = ("digits", "fashion-mnist", "cifar-10", "cifar-100", "shakespeare")
_KINDS = f"{', '.join(_NAMES)}, a file ending in .npz, or your own package.module:function"


def load_source(
    source: str,
    *,
    folder: Path | None = None,
    download: bool = False,
    num_classes: int | None = None,
    labels: Sequence[int] | None = None,
    part: tuple[int, int] | None = None,
    pool: int = 1,
    import_paths: Sequence[Path] = (),
    as_stored: bool = False,
) -> Dataset:
    """Load a data set and keep the wanted examples of it.

    Unsigned bytes are taken for pixels and scaled to [0, 1]; all other numbers become f32 as they
    are. Only what is kept is converted, so a small part of a large set costs little memory.

    Args:
        source: "digits", "fashion-mnist", "cifar-10", "cifar-100" or "shakespeare"; the path of an
            .npz file with the arrays train_inputs, train_labels and, if it likes, test_inputs,
            test_labels and num_classes; or "package.module:function", which returns
            `((train_inputs, train_labels), (test_inputs, test_labels) or None)` as arrays or torch
            tensors.
        folder: Where the files of a named data set lie, when in no usual place.
        download: Whether to download Fashion-MNIST when it isn't there; other sets never are.
        num_classes: Number of classes; None takes it from the source, else the largest label + 1.
        labels: Keep the examples with these labels only; None keeps all.
        part: (i, n) keeps the i-th (from 0) of n parts of train and test, interleaved label by
            label, so that the parts are disjoint, cover everything and hold each label equally.
        pool: Average each square of pool by pool pixels into one; 1 leaves images as they are.
        import_paths: Folders that a hook is looked up in, after those of Python.
        as_stored: Keep bytes as bytes until some of the examples are taken: for who takes a few.

    Returns:
        Train inputs and labels, the test part if the source has its own, the owners of both if the
        source knows them, and the number of classes and owners in the whole source, whatever
        `labels` and `part` keep.

    Raises:
        DataError: Anything is missing, malformed or out of range.
    """
    raw = _read(source, folder, download, import_paths)
    parts = {"train": raw.train} | ({"test": raw.test} if raw.test is not None else {})
    checked = {name: _check(*pair, f"{raw.name}: {name}") for name, pair in parts.items()}
    num_classes = _count_classes(raw, checked, num_classes)
    owners = {"train": raw.train_owners, "test": raw.test_owners}
    kept: dict[str, Examples] = {}
    for name, (inputs, given) in checked.items():
        chosen = _select(given, labels, part, num_classes, raw.name)
        convert = functools.partial(_convert, pool=pool, name=raw.name)
        if as_stored and inputs.dtype == np.uint8:
            if pool != 1:
                _check_pool(inputs.shape, pool, raw.name)
            kept[name] = StoredExamples(inputs[chosen], given[chosen], convert)
        else:
            kept[name] = convert(inputs[chosen], given[chosen])
        if (whose := owners[name]) is not None:
            owners[name] = whose[chosen]
    if not len(kept["train"]):
        raise DataError(
            f"{raw.name}: no training example is left with labels = {labels} and part = {part}: "
            "keep more labels or make fewer parts"
        )
    return Dataset(
        name=raw.name,
        train=kept["train"],
        test=kept.get("test"),
        num_classes=num_classes,
        train_owners=owners["train"],
        test_owners=owners["test"],
        owner_names=raw.owner_names,
        owner_groups=raw.owner_groups,
    )


def save_npz(dataset: Dataset, path: Path) -> None:
    """Write a data set as `load_source` reads it, whole or not at all; owners stay behind.

    Raises:
        DataError: The file can't be written.
    """
    arrays: dict[str, _Array] = {
        "train_inputs": dataset.train.inputs,
        "train_labels": dataset.train.labels,
        "num_classes": np.array(dataset.num_classes),
    }
    if dataset.test is not None:
        arrays |= {"test_inputs": dataset.test.inputs, "test_labels": dataset.test.labels}
    try:
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise DataError(f"{path} can't be written: {error.strerror or error}") from error


def _read(
    source: str, folder: Path | None, download: bool, import_paths: Sequence[Path]
) -> RawDataset:
    match source:
        case "digits":
            return read_digits()
        case "fashion-mnist":
            return read_fashion_mnist(folder, download=download)
        case "cifar-10" | "cifar-100":
            return read_cifar(source, folder)
        case "shakespeare":
            return read_shakespeare(folder)
        case _ if source.endswith(".npz"):
            return _read_npz(Path(source))
        case _ if is_hook(source):
            return _call_hook(source, import_paths)
        case _:
            near = difflib.get_close_matches(source.lower(), _NAMES, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"write {_KINDS}"
            raise DataError(f"{source!r} is no data source: {advice}")


def _read_npz(path: Path) -> RawDataset:
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds one bare array: save with numpy.savez")
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError as error:
        raise DataError(f"{path} isn't there: correct the path of the data") from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path} can't be read as an .npz file of plain arrays ({error}): "
            "save it again with numpy.savez"
        ) from error
    needed = ["train_inputs", "train_labels"]
    if arrays.keys() & {"test_inputs", "test_labels"}:
        needed += ["test_inputs", "test_labels"]
    if missing := [key for key in needed if key not in arrays]:
        found = ", ".join(sorted(arrays)) or "nothing"
        raise DataError(f"{path} lacks {' and '.join(missing)} (it holds {found}): add it")
    num_classes = arrays.get("num_classes")
    if num_classes is not None and (num_classes.size != 1 or num_classes.dtype.kind not in "iu"):
        raise DataError(f"{path}: num_classes must be one whole number, not {num_classes!r}")
    return RawDataset(
        name=path.stem,
        train=(arrays["train_inputs"], arrays["train_labels"]),
        test=(arrays["test_inputs"], arrays["test_labels"]) if len(needed) > 2 else None,
        num_classes=None if num_classes is None else int(num_classes.item()),
    )


def _call_hook(reference: str, import_paths: Sequence[Path]) -> RawDataset:
    found: Any = load_hook(reference, import_paths)()
    match found:
        case (train, None) | [train, None]:
            test = None
        case (train, test) | [train, test]:
            pass
        case _:
            raise _wrong_return(reference, found)
    for pair in (train, test):
        if pair is not None and not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise _wrong_return(reference, found)
    return RawDataset(
        name=reference,
        train=(_array(train[0], reference), _array(train[1], reference)),
        test=None if test is None else (_array(test[0], reference), _array(test[1], reference)),
        num_classes=None,
    )


def _wrong_return(reference: str, found: object) -> DataError:
    return DataError(
        f"{reference} returned {_describe(found)}: return ((train_inputs, train_labels), "
        "(test_inputs, test_labels)), or None for the second pair"
    )


def _describe(found: object) -> str:
    if isinstance(found, (tuple, list)):
        return f"a {type(found).__name__} of ({', '.join(type(item).__name__ for item in found)})"
    return f"a {type(found).__name__}"


def _array(values: object, reference: str) -> _Array:
    """Convert what the user returned; tensors by their methods, since torch is not ours here."""
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{reference} returned a {type(values).__name__} that is no array ({error}): "
            "return numpy arrays or torch tensors of plain numbers"
        ) from error


def _check(inputs: _Array, labels: _Array, what: str) -> tuple[_Array, npt.NDArray[np.int64]]:
    """Check one part; convert its labels only."""
    if inputs.dtype.kind not in "buif":
        raise DataError(f"{what}: inputs are {inputs.dtype}: give bytes, integers or floats")
    if labels.dtype.kind not in "iu":
        raise DataError(f"{what}: labels are {labels.dtype}: give whole numbers from 0")
    if labels.ndim != 1:
        raise DataError(
            f"{what}: labels have the shape {labels.shape}: give (num_examples,), one class number "
            "each and not one-hot rows"
        )
    if inputs.ndim < 2 or 0 in inputs.shape[1:] or len(inputs) != len(labels):
        raise DataError(
            f"{what}: inputs of shape {inputs.shape} and labels of shape {labels.shape} don't fit: "
            "give (num_examples, ...) and (num_examples,)"
        )
    if labels.size and (labels.min() < 0 or labels.max() > np.iinfo(np.int32).max):
        raise DataError(
            f"{what}: labels go from {labels.min()} to {labels.max()}: count classes from 0"
        )
    return inputs, labels.astype(np.int64)


def _count_classes(
    raw: RawDataset,
    checked: dict[str, tuple[_Array, npt.NDArray[np.int64]]],
    num_classes: int | None,
) -> int:
    if not checked["train"][1].size:
        raise DataError(f"{raw.name}: no training example: give it some data")
    seen = 1 + max(int(labels.max(initial=0)) for _, labels in checked.values())
    count = num_classes or raw.num_classes or seen
    if not seen <= count:
        raise DataError(
            f"{raw.name}: a label is {seen - 1}, but with num_classes = {count} labels end at "
            f"{count - 1}: correct num_classes or the labels"
        )
    return count


def _select(
    labels: npt.NDArray[np.int64],
    keep: Sequence[int] | None,
    part: tuple[int, int] | None,
    num_classes: int,
    name: str,
) -> npt.NDArray[np.intp] | slice:
    """Return the positions of the examples to keep; a slice of all of them copies none."""
    chosen = np.arange(len(labels))
    if keep is not None:
        if strange := [label for label in keep if not 0 <= label < num_classes]:
            raise DataError(
                f"labels = {list(keep)}: {name} has no label {strange[0]}, only 0 to "
                f"{num_classes - 1}"
            )
        chosen = np.flatnonzero(np.isin(labels, np.asarray(keep, dtype=np.int64)))
    if part is not None:
        index, count = part
        if not 0 <= index < count:
            raise DataError(f"part = [{index}, {count}]: the first must be from 0 to {count - 1}")
        # By label first: digits, for one, come as 0 1 … 9 0 1 …, where every second is even.
        by_label = chosen[np.argsort(labels[chosen], kind="stable")]
        chosen = np.sort(by_label[index::count])
    return chosen if len(chosen) < len(labels) else slice(None)


def _convert(inputs: _Array, labels: npt.NDArray[np.int64], pool: int, name: str) -> Examples:
    if pool != 1:
        _check_pool(inputs.shape, pool, name)
    scaled = inputs
    if pool != 1 or inputs.dtype != np.float32:
        corners = [(row, column) for row in range(pool) for column in range(pool)]
        with np.errstate(over="ignore", invalid="ignore"):  # Examples refuses what overflows f32
            scaled = inputs[..., ::pool, ::pool].astype(np.float32)
            for row, column in corners[1:]:
                scaled += inputs[..., row::pool, column::pool]
        if (divisor := pool * pool * (255 if inputs.dtype == np.uint8 else 1)) != 1:
            scaled /= divisor
    try:
        return Examples(np.ascontiguousarray(scaled), labels)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _check_pool(shape: tuple[int, ...], pool: int, name: str) -> None:
    if len(shape) < 3 or (len(shape) > 3 and shape[-1] <= 4 < min(shape[-3:-1])):
        raise DataError(
            f"pool = {pool} needs images, (num_examples, channels, height, width), but the inputs "
            f"of {name} have the shape {shape}: set pool = 1, or reorder them"
        )
    if pool < 1 or shape[-1] % pool or shape[-2] % pool:
        raise DataError(
            f"pool = {pool} doesn't divide the images of {name}, {shape[-2]} by {shape[-1]}: "
            "set it to a common divisor of both"
        )
