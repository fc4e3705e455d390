"""kNN-Per's memory: a peer's examples as embeddings and labels, and which of them are kept."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from peer.approximate import APPROXIMATE_FROM, ApproximateSearch
from peer.nearest import Embeddings, Nearest, NearestSearch, check_embeddings
from protocol.errors import CheckpointError, ConfigError, DataError

Labels = npt.NDArray[np.int64]

_SPACING_SAMPLE = 256
_ROW_BYTES = 24  # label, arrival and key


class DatastoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which examples a datastore keeps, and how it is searched.

    Raises:
        ValueError: Two settings exclude each other, or the strategy needs another; or an
            approximate search is asked for, and faiss isn't installed.
    """

    strategy: Literal["concatenate", "fifo", "fixed", "random"] = "concatenate"
    """What becomes of new examples. `concatenate` adds them until the store is full, then turns
    them away; `fifo` lets them replace the oldest, which adapts fastest when the data change;
    `fixed` keeps what it was built with; `random` keeps a uniform sample of all there ever were."""
    capacity: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Most examples kept; none is no bound, which `fifo` and `random` need. Paper: none."""
    capacity_mib: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    """The same as memory in MiB, what makes the search fast included: 8 bytes a number of an
    embedding and 28 an example."""
    search: Literal["exact", "approximate"] = "exact"
    """How the nearest are found. `approximate` looks in a tenth of a store of 5,000 entries or more
    by faiss (the extra `ann`), whose copy of the embeddings takes up to twice that of the exact
    search: it finds nearly all where embeddings cluster, as trained ones do, and pays from some
    hundred questions a renewal; how near what it finds is, is exact."""

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity_mib is not None:
            raise ValueError("capacity and capacity_mib exclude each other: set one of them")
        if self.capacity_mib is not None and not np.isfinite(self.capacity_mib):
            raise ValueError(f"capacity_mib = {self.capacity_mib}: it must be above 0, and finite")
        unbounded = self.capacity is None and self.capacity_mib is None
        if self.strategy in ("fifo", "random") and unbounded:
            raise ValueError(
                f'strategy = "{self.strategy}" needs a bound: set capacity or capacity_mib'
            )
        if self.search == "approximate" and importlib.util.find_spec("faiss") is None:
            raise ValueError(
                'search = "approximate" needs faiss: install the extra `ann` (faiss-cpu), or set '
                'search = "exact"'
            )


class _Entries(NamedTuple):
    """What is kept, in order of arrival.

    Attributes:
        embeddings: Shape (num_entries, dim); (0, dim) while they are dropped.
        labels: Shape (num_entries,).
        arrivals: Which of all examples ever offered each is, from 0. Shape (num_entries,).
        keys: Drawn once for each from 0 to 1; `random` keeps the smallest. Shape (num_entries,).
    """

    embeddings: Embeddings
    labels: Labels
    arrivals: npt.NDArray[np.int64]
    keys: npt.NDArray[np.float64]

    def take(self, chosen: slice | npt.NDArray[Any]) -> _Entries:
        embeddings = self.embeddings[chosen] if len(self.embeddings) else self.embeddings
        return _Entries(embeddings, self.labels[chosen], self.arrivals[chosen], self.keys[chosen])

    def and_then(self, new: _Entries) -> _Entries:
        return _Entries(
            np.concatenate((self.embeddings, new.embeddings)),
            np.concatenate((self.labels, new.labels)),
            np.concatenate((self.arrivals, new.arrivals)),
            np.concatenate((self.keys, new.keys)),
        )


class Datastore:
    """Embeddings and labels of one peer's examples, for one model, to be searched.

    Entries are in order of arrival; of equally near ones the earlier arrival comes first. Arrivals
    count all examples ever offered, so who offers examples in a known order knows by `arrivals`
    which of them to embed again when the model has changed.

    Args:
        settings: What to keep.
        dim: Of the embeddings.
        num_classes: Labels are from 0 to num_classes - 1.
        rng: Decides what `random` keeps.

    Raises:
        ConfigError: The capacity leaves room for no example.
    """

    def __init__(
        self, settings: DatastoreSettings, dim: int, num_classes: int, rng: np.random.Generator
    ) -> None:
        self.settings = settings
        self.num_classes = num_classes
        self.num_offered = 0
        self._rng = rng
        self._entries = _Entries(
            np.empty((0, dim), np.float32),
            np.empty(0, np.int64),
            np.empty(0, np.int64),
            np.empty(0, np.float64),
        )
        self.capacity = _capacity(settings, dim)
        self._search: NearestSearch | ApproximateSearch | None = None

    def __len__(self) -> int:
        return len(self._entries.labels)

    @property
    def dim(self) -> int:
        """The embeddings' dimension."""
        return int(self._entries.embeddings.shape[1])

    @property
    def size_bytes(self) -> int:
        """Memory when full of what it holds now, the search's own copy included."""
        return len(self) * (_ROW_BYTES if self.is_dropped else entry_size_bytes(self.dim))

    @property
    def is_dropped(self) -> bool:
        """Whether the embeddings were dropped, so that it can't be searched or added to."""
        return len(self._entries.embeddings) < len(self)

    @property
    def embeddings(self) -> Embeddings:
        """Shape (num_entries, dim); not to be changed, like all that is handed out."""
        return self._entries.embeddings

    @property
    def labels(self) -> Labels:
        """Shape (num_entries,)."""
        return self._entries.labels

    @property
    def arrivals(self) -> npt.NDArray[np.int64]:
        """Which of all examples ever offered are kept, ascending. Shape (num_entries,)."""
        return self._entries.arrivals

    def add(self, embeddings: Embeddings, labels: Labels) -> int:
        """Offer new examples; return how many of them are kept. All or none arrive.

        Args:
            embeddings: Copied. Shape (num_examples, dim).
            labels: Shape (num_examples,).

        Raises:
            DataError: An embedding is not finite or of another dimension, or a label is not one of
                the classes; or those of the entries were dropped.
        """
        self._check_searchable()
        check_embeddings(embeddings, "new embeddings", self.dim)
        _check_labels(labels, len(embeddings), self.num_classes)
        count, offered = len(labels), self.num_offered
        self.num_offered += count
        closed = self.settings.strategy == "fixed" and offered > 0
        if not count or closed:
            return 0
        new = _Entries(
            embeddings,
            labels.astype(np.int64),
            np.arange(offered, offered + count, dtype=np.int64),
            self._rng.random(count),
        )
        everything = self._entries.and_then(new)
        self._hold(everything.take(self._kept(everything.keys)))
        return int((self.arrivals >= offered).sum())

    def reembed(self, embeddings: Embeddings) -> None:
        """Take the kept examples' embeddings by another model, in the order of `arrivals`.

        Raises:
            DataError: They are not finite or not as many, or of another dimension.
        """
        check_embeddings(embeddings, "new embeddings", self.dim)
        if len(embeddings) != len(self):
            raise DataError(
                f"{len(embeddings)} new embeddings for {len(self)} entries: embed the examples "
                "whose arrivals are kept, all of them, in that order"
            )
        self._hold(self._entries._replace(embeddings=embeddings.copy()))

    def drop_embeddings(self) -> None:
        """Free the embeddings' memory, and remember which examples they were of; see `reembed`."""
        self._hold(self._entries._replace(embeddings=np.empty((0, self.dim), np.float32)))

    def without(self, arrivals: npt.NDArray[np.int64]) -> Datastore:
        """Return a store without these examples, so that it can be asked about them."""
        other = Datastore(self.settings, self.dim, self.num_classes, self._rng)
        other.num_offered = self.num_offered
        other._hold(self._entries.take(~np.isin(self.arrivals, arrivals)))
        return other

    def nearest(self, queries: Embeddings, k_nearest: int) -> Nearest:
        """Find the k nearest entries of each query, as `search` says; all where there are fewer.

        Raises:
            DataError: A query is not finite or of another dimension, or k_nearest is below 1; or
                the embeddings were dropped.
        """
        self._check_searchable()
        if self._search is None:
            approximate = self.settings.search == "approximate" and len(self) >= APPROXIMATE_FROM
            self._search = (ApproximateSearch if approximate else NearestSearch)(self.embeddings)
        return self._search.find(queries, k_nearest)

    def spacing(self) -> float:
        """Return the median distance from an entry to the nearest other: the data's own scale.

        Over 256 entries, evenly spaced; of those with a duplicate none counts, unless all have
        one: then, and with fewer than two entries, it is 1.
        """
        step = max(1, -(-len(self) // _SPACING_SAMPLE))
        distances = self.nearest(self.embeddings[::step], 2).distances[:, 1:]
        apart = distances[distances > 0]
        return float(np.median(apart)) if apart.size else 1.0

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all that a checkpoint needs, as plain arrays."""
        offered = np.array(self.num_offered, np.int64)
        return {**self._entries._asdict(), "num_offered": offered}

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, npt.NDArray[Any]],
        settings: DatastoreSettings,
        num_classes: int,
        rng: np.random.Generator,
    ) -> Datastore:
        """Restore a store; under settings that keep less, only what they would keep.

        Raises:
            CheckpointError: The arrays are no datastore's, or not one of these classes.
            ConfigError: The capacity leaves room for no example.
        """
        try:
            entries = _Entries(*(np.array(arrays[name]) for name in _Entries._fields))
            offered = int(arrays["num_offered"])
            check_embeddings(entries.embeddings, "saved embeddings")
            count = len(entries.embeddings) or len(entries.labels)
            _check_labels(entries.labels, count, num_classes)
        except (KeyError, TypeError, ValueError, DataError) as error:
            raise CheckpointError(f"the saved datastore can't be used: {error}") from error
        _check_arrivals(entries, offered)
        store = cls(settings, entries.embeddings.shape[1], num_classes, rng)
        store.num_offered = offered
        store._hold(entries.take(store._kept(entries.keys)))
        return store

    def _check_searchable(self) -> None:
        if self.is_dropped:
            raise DataError("the embeddings of this datastore were dropped: reembed its examples")

    def _hold(self, entries: _Entries) -> None:
        self._entries, self._search = entries, None

    def _kept(self, keys: npt.NDArray[np.float64]) -> slice | npt.NDArray[np.intp]:
        """Return which of these entries, in order of arrival, are kept."""
        if self.capacity is None or len(keys) <= self.capacity:
            return slice(None)
        match self.settings.strategy:
            case "fifo":
                return slice(len(keys) - self.capacity, None)
            case "random":  # the smallest of keys drawn once are a uniform sample, at any time
                return np.sort(np.argpartition(keys, self.capacity)[: self.capacity])
            case "concatenate" | "fixed":
                return slice(self.capacity)


def embedding_size_bytes(dim: int) -> int:
    """Return the memory of one embedding: twice itself and its norm, for the search has a copy."""
    return 8 * dim + 4


def entry_size_bytes(dim: int) -> int:
    """Return the memory of one entry: its embedding, and what else is known of it."""
    return embedding_size_bytes(dim) + _ROW_BYTES


def _capacity(settings: DatastoreSettings, dim: int) -> int | None:
    """Return the most entries kept.

    Raises:
        ConfigError: It is none.
    """
    if settings.capacity_mib is not None:
        room = int(settings.capacity_mib * 2**20 / entry_size_bytes(dim))
        if room < 1:
            raise ConfigError(
                f"capacity_mib = {settings.capacity_mib:g} has no room for one example: with "
                f"embeddings of dimension {dim} each takes {entry_size_bytes(dim)} bytes"
            )
        return room
    if settings.capacity is not None and settings.capacity < 1:
        raise ConfigError(f"capacity = {settings.capacity}: a datastore needs room for an example")
    return settings.capacity


def _check_labels(labels: Labels, count: int, num_classes: int) -> None:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype} of shape {labels.shape}: there must be one whole number "
            f"for each of the {count} embeddings"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        raise DataError(
            f"the label of example {wrong[0]} is {labels[wrong[0]]}: the model has {num_classes} "
            f"classes, so labels are from 0 to {num_classes - 1}"
        )


def _check_arrivals(entries: _Entries, offered: int) -> None:
    arrivals, keys = entries.arrivals, entries.keys
    shape = entries.labels.shape
    fitting = arrivals.shape == shape == keys.shape and arrivals.dtype == np.int64
    if not fitting or keys.dtype != np.float64 or not np.isfinite(keys).all():
        raise CheckpointError("the saved datastore can't be used: its columns don't fit")
    ordered = np.concatenate(([-1], arrivals, [offered]))
    if (np.diff(ordered) <= 0).any():
        raise CheckpointError(
            f"the saved datastore can't be used: arrivals must ascend from 0 to below {offered}"
        )
