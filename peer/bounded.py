"""A peer's datastore within a bound of memory: where it is larger, prototypes stand for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compression import Prototypes, compress, prototypes_within
from peer.datastore import Datastore, Labels, embedding_size_bytes, entry_size_bytes
from peer.interpolation import Blend, KnnSettings, Tuning, choose, sigma_of, tune
from peer.learner import Probabilities
from peer.nearest import Embeddings
from protocol.errors import CheckpointError


class BoundedStore:
    """Entries to be searched, or prototypes in place of their embeddings; `settle` decides which.

    Args:
        settings: What is kept, and how it is asked.
        bound: Most bytes that embeddings may take; 0 is none.
        dim: Of the embeddings.
        num_classes: Labels are from 0 to num_classes - 1.
        rng: Decides what the strategy `random` keeps, and how prototypes begin.

    Attributes:
        bound: As given.
        entries: The datastore. Its embeddings are dropped while there are prototypes.
        prototypes: What was learned from the entries; None where they speak themselves.
        blend: How the entries are asked; its λ counts for nothing.

    Raises:
        ConfigError: The capacity leaves room for no example, or the bound for no prototype.
    """

    def __init__(
        self,
        settings: KnnSettings,
        bound: int,
        dim: int,
        num_classes: int,
        rng: np.random.Generator,
    ) -> None:
        self.bound = bound
        self.entries = Datastore(settings, dim, num_classes, rng)
        self.prototypes: Prototypes | None = None
        self.blend = Blend(lam=0.0, k_nearest=settings.k_nearest, sigma=settings.sigma)
        self._settings = settings
        self._rng = rng
        if bound:
            prototypes_within(bound, dim=dim, num_classes=num_classes, num_examples=1)

    @property
    def size_bytes(self) -> int:
        """Memory of all that is kept."""
        learned = 0 if self.prototypes is None else self.prototypes.size_bytes
        return self.entries.size_bytes + learned

    @property
    def exact_size_bytes(self) -> int:
        """Memory that the entries would take with their embeddings."""
        return len(self.entries) * entry_size_bytes(self.entries.dim)

    def recall(self, queries: Embeddings) -> Probabilities | None:
        """Return what the memory says. Shape (num_queries, num_classes); nothing if it is empty.

        Raises:
            DataError: A query is not finite or of another dimension.
        """
        if self.prototypes is not None:
            return self.prototypes.recall(queries)
        return self.blend.recall(self.entries, queries)

    def tune(
        self,
        *,
        embeddings: Embeddings,
        model: Probabilities,
        labels: Labels,
        arrivals: npt.NDArray[np.int64],
    ) -> tuple[Tuning, Tuning | None]:
        """Choose λ before settling, by entries or by the prototypes that will stand for them.

        See `peer.interpolation.tune` for the arguments.

        Returns:
            The choice; and what the entries' own would have been, where there will be prototypes.

        Raises:
            DataError: An embedding or prediction is not finite, or shapes don't fit.
        """
        tuning = tune(
            self.entries,
            self._settings,
            embeddings=embeddings,
            model=model,
            labels=labels,
            arrivals=arrivals,
        )
        if not self._is_too_large or tuning.memory_accuracy is None:
            return tuning, None
        said = self._compressed(self.entries.without(arrivals)).recall(embeddings)
        return choose(said, model, labels, tuning.blend, self._settings.lambdas), tuning

    def settle(self) -> None:
        """Go on with what the entries are now, or with prototypes of them."""
        self.prototypes = None
        if self._is_too_large:
            self.prototypes = self._compressed(self.entries)
            self.entries.drop_embeddings()
        self._scale()

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all that a checkpoint needs, as plain arrays."""
        learned = {} if self.prototypes is None else self.prototypes.to_arrays()
        return {**self.entries.to_arrays(), **learned}

    def restored(self, arrays: Mapping[str, npt.NDArray[Any]], bound: int) -> BoundedStore:
        """Return what was saved, under the settings of this store.

        Args:
            arrays: As `to_arrays` gave them.
            bound: Under which they were saved.

        Raises:
            CheckpointError: They are no store's, or one of other settings or embeddings.
        """
        dim, num_classes = self.entries.dim, self.entries.num_classes
        entries = Datastore.from_arrays(arrays, self._settings, num_classes, self._rng)
        if entries.dim != dim:
            raise CheckpointError(
                f"the saved datastore holds embeddings of dimension {entries.dim}, and this "
                f"model's have {dim}"
            )
        prototypes = Prototypes.from_arrays(arrays, dim, num_classes)
        is_learned = prototypes is not None
        whole = len(entries) == len(arrays["labels"]) and entries.is_dropped == is_learned
        if bound != self.bound or (is_learned and not whole):
            raise CheckpointError("the saved memory is of other settings of [personalization]")
        store = BoundedStore(self._settings, self.bound, dim, num_classes, self._rng)
        store.entries, store.prototypes = entries, prototypes
        store._scale()
        return store

    @property
    def _is_too_large(self) -> bool:
        return 0 < self.bound < len(self.entries) * embedding_size_bytes(self.entries.dim)

    def _compressed(self, entries: Datastore) -> Prototypes:
        # Not by `spawn`, which a checkpoint's state of the generator doesn't tell of.
        return compress(entries, self.bound, np.random.default_rng(self._rng.integers(2**63)))

    def _scale(self) -> None:
        """Follow the entries' own scale where sigma is counted in it; prototypes have theirs."""
        if self.prototypes is None:
            self.blend = replace(self.blend, sigma=sigma_of(self.entries, self._settings))
