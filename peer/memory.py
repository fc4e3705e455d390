"""A running peer's memory of its own examples, which makes its mixture's predictions personal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from peer.bounded import BoundedStore
from peer.collection import Collection
from peer.config import PersonalizationSettings
from peer.data import Examples
from peer.datastore import Labels
from peer.interpolation import Tuning, choose, interpolate
from peer.learner import Learner, Probabilities
from peer.mixture import Mixture
from peer.nearest import Embeddings, check_embeddings
from peer.validation import accuracy_of
from protocol.digest import Hasher
from protocol.errors import CheckpointError, DataError
from protocol.tensors import Tensors

FEWEST_JUDGES = 30
"""New examples that choose λ once the holdout is trained on, at least: of 30 the standard error of
an accuracy is 0.09 at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMemory:
    """What a checkpoint holds of a memory.

    Attributes:
        arrays: The datastore's, see `BoundedStore.to_arrays`.
        model: The one that embedded them; None where it couldn't be read.
        state: The rest, as plain values for JSON.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    model: Tensors | None
    state: Mapping[str, Any]


class _Judged(NamedTuple):
    """What was said of new examples before anything had learned from them.

    Attributes:
        memory: By the memory. Shape (num_examples, num_classes).
        model: By the mixture. Shape (num_examples, num_classes).
        labels: The truth. Shape (num_examples,).
    """

    memory: Probabilities
    model: Probabilities
    labels: Labels


class Memory:
    """Embeds a peer's examples by one model at a time, and blends what they say with the mixture.

    Called in the learner's thread. Embeddings of more than `compress_kib` are there only while
    prototypes are learned from them: the examples themselves are at hand, for training.

    Args:
        settings: The memory's.
        learner: Embeds and predicts.
        collection: The examples, the holdout included; what is added to it later is remembered
            with the next `renew`, or at once by `take`.
        num_classes: Of the model.
        rng: Decides what the strategy `random` keeps.

    Attributes:
        collection: The examples.
        renewed_at: After how many rounds all was last embedded; -1 before.
        tuned_at: The same of the choice of the interpolation weight; None before.
        tuning: How the interpolation weight was chosen; None before.
        exact_tuning: How it would have been chosen without prototypes; None where there were none.

    Raises:
        ModelError: The model's head can't be told.
        ConfigError: The capacity leaves room for no example, or `compress_kib` for no prototype.
    """

    def __init__(
        self,
        settings: PersonalizationSettings,
        learner: Learner,
        collection: Collection,
        num_classes: int,
        rng: np.random.Generator,
    ) -> None:
        self.collection = collection
        self.renewed_at = -1
        self.tuned_at: int | None = None
        self.tuning: Tuning | None = None
        self.exact_tuning: Tuning | None = None
        self._settings = settings
        self._learner = learner
        self._rng = rng
        self._model = learner.parameters()
        dim = learner.embed(self._model, collection.examples.inputs[:1]).shape[1]
        bound = int(settings.compress_kib * 1024)
        self._store = BoundedStore(settings, bound, dim, num_classes, rng)
        self._judged: list[_Judged] = []

    @property
    def lam(self) -> float:
        """The interpolation weight λ; 0, the mixture alone, until one was chosen."""
        return self.tuning.blend.lam if self.tuning is not None else 0.0

    def renew(self, mixture: Mixture, rounds_done: int, *, may_tune: bool) -> None:
        """Embed all that is kept by the mixture's model of now, and choose λ if it may be chosen.

        λ is chosen on the part of the holdout that is as recent as what the store keeps, which the
        store forgets meanwhile: so it follows data that change.

        Raises:
            DataError: An embedding is not finite, and all stays as it was; or a prediction isn't,
                and λ does.
        """
        use_own = self._settings.embedding == "own"
        model = mixture.model if use_own else mixture.strongest
        inputs, labels = self.collection.examples.inputs, self.collection.examples.labels
        entries = self._store.entries
        offered = entries.num_offered
        kept = self._embed(model, inputs[entries.arrivals])
        new = self._embed(model, inputs[offered:])
        entries.reembed(kept)
        entries.add(new, labels[offered:])
        self._model = model
        self.renewed_at = rounds_done
        try:
            if may_tune:
                self._tune(mixture)
                self.tuned_at = rounds_done
        finally:
            self._store.settle()

    def embed_new(self, examples: Examples) -> Embeddings:
        """Embed examples before they are taken.

        Raises:
            DataError: An embedding is not finite.
        """
        return self._embed(self._model, examples.inputs)

    def judge(
        self, mixture: Mixture, examples: Examples, embeddings: Embeddings, rounds_done: int
    ) -> None:
        """Let new examples choose λ where the holdout can't any more; call it before `take`.

        Nothing has learned from them yet, so they are as fair as a holdout. λ is chosen by those
        that came since it last was, once they are as many as chose it then, and 30 at least.

        Args:
            mixture: What the peer predicts with now.
            examples: The new ones.
            embeddings: Theirs, as `embed_new` gave them.
            rounds_done: By the peer.

        Raises:
            DataError: A prediction is not finite, and λ stays as it is.
        """
        memory = self._store.recall(embeddings)
        if memory is None or not len(examples):
            return
        model = mixture.predict(self._learner, examples.inputs)
        interpolate(memory, model, 0.0)  # refuses what a diverged model says
        self._judged.append(_Judged(memory, model, examples.labels))
        known = self.tuning.num_examples if self.tuning is not None else 0
        if sum(len(each.labels) for each in self._judged) < max(known, FEWEST_JUDGES):
            return
        said = _Judged(*(np.concatenate(parts) for parts in zip(*self._judged, strict=True)))
        self.tuning = choose(*said, self._store.blend, self._settings.lambdas)
        self.exact_tuning, self.tuned_at, self._judged = None, rounds_done, []

    def take(
        self,
        examples: Examples,
        embeddings: Embeddings,
        is_held: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Remember new examples at once, as `embed_new` embedded them.

        Args:
            examples: They join the collection.
            embeddings: Theirs.
            is_held: As for `Collection.add`.
        """
        if self._store.entries.num_offered == len(self.collection):  # else with the first renewal
            self._remember(embeddings, examples.labels)
        self.collection.add(examples, is_held)

    def predict(self, mixture: Mixture, inputs: npt.NDArray[np.float32]) -> Probabilities:
        """Return λ p_kNN + (1 - λ) p_mixture. Shape (num_examples, num_classes)."""
        queries = self._learner.embed(self._model, inputs)
        model = mixture.predict(self._learner, inputs)
        return interpolate(self._store.recall(queries), model, self.lam)

    def evaluate(self, mixture: Mixture, test: Examples) -> dict[str, float | None]:
        """Return `memory_accuracy`, `blend_accuracy` and `lam`.

        Accuracies are None without test examples, or where a model has diverged. Of prototypes
        there are also `memory_bytes` and `exact_memory_bytes`, what the datastore would take; and
        `holdout_memory_accuracy` and `exact_holdout_memory_accuracy`, of both where λ was chosen.
        """
        memory_accuracy, blend_accuracy = None, None
        if len(test):
            with suppress(DataError):
                predicted = mixture.predict(self._learner, test.inputs)
                memory = self._store.recall(self._embed(self._model, test.inputs))
                blend = interpolate(memory, predicted, self.lam)
                blend_accuracy = accuracy_of(blend, test.labels)
                memory_accuracy = None if memory is None else accuracy_of(memory, test.labels)
        return {
            "memory_accuracy": memory_accuracy,
            "blend_accuracy": blend_accuracy,
            "lam": self.lam,
            **(self._compressed_result() if self._store.prototypes is not None else {}),
        }

    def report(self) -> dict[str, Any]:
        """Return what a record says: see `peer.record.Recorder`.

        Of prototypes also `exact_size_bytes`, `exact_accuracy` and `exact_memory_accuracy`: the
        same of the datastore that they are learned from. They have no `sigma`.
        """
        tuning, entries = self.tuning, self._store.entries
        is_exact = self._store.prototypes is None
        return {
            "round": self.renewed_at,
            "tuned_round": self.tuned_at,
            "lam": self.lam,
            "sigma": self._store.blend.sigma if is_exact else None,
            "num_entries": len(entries),
            "num_offered": entries.num_offered,
            "size_bytes": self._store.size_bytes,
            "num_validation": tuning.num_examples if tuning else 0,
            "accuracy": tuning.accuracy if tuning else None,
            "model_accuracy": tuning.model_accuracy if tuning else None,
            "memory_accuracy": tuning.memory_accuracy if tuning else None,
            **({} if is_exact else self._compressed_report()),
        }

    def save(self) -> SavedMemory:
        """Return what `restore` needs."""
        arrays = self._store.to_arrays()
        state = {
            "renewed_at": self.renewed_at,
            "tuned_at": self.tuned_at,
            "tuning": msgspec.to_builtins(self.tuning),
            "exact_tuning": msgspec.to_builtins(self.exact_tuning),
            "compress_bytes": self._store.bound,
            "rng_state": self._rng.bit_generator.state,
            "digest": _digest_of(arrays),
        }
        return SavedMemory(arrays=arrays, model=self._model, state=state)

    def restore(self, saved: SavedMemory) -> None:
        """Go on from a saved memory, with the same bits.

        Raises:
            CheckpointError: The store can't be used; λ is as it was, where that can be read, and
                the next `renew` builds the store anew.
        """
        state = saved.state
        try:
            tuning, exact_tuning = (
                msgspec.convert(each, Tuning | None)
                for each in (state["tuning"], state.get("exact_tuning"))
            )
            tuned_at = msgspec.convert(state["tuned_at"], int | None)
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise CheckpointError(f"the saved memory can't be used: {error}") from error
        if tuning is not None and not 0 <= tuning.blend.lam <= 1:
            raise CheckpointError(f"the saved memory can't be used: λ = {tuning.blend.lam}")
        self.tuning, self.exact_tuning, self.tuned_at = tuning, exact_tuning, tuned_at
        self._restore_store(saved)

    def _restore_store(self, saved: SavedMemory) -> None:
        state, model = saved.state, saved.model
        if model is None or _digest_of(saved.arrays) != state.get("digest"):
            raise CheckpointError("the saved datastore is damaged")
        store = self._store.restored(saved.arrays, state.get("compress_bytes", 0))
        entries = store.entries
        labels = self.collection.examples.labels
        if entries.num_offered > len(labels) or not np.array_equal(
            entries.labels, labels[entries.arrivals]
        ):
            raise CheckpointError("the saved datastore is of other examples than there are now")
        try:
            self._rng.bit_generator.state = state["rng_state"]
            self.renewed_at = int(state["renewed_at"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved datastore can't be used: {error}") from error
        self._store, self._model = store, model

    def catch_up(self) -> None:
        """Remember what was added to the collection since the store was saved.

        Raises:
            DataError: An embedding is not finite.
        """
        offered, examples = self._store.entries.num_offered, self.collection.examples
        if 0 < offered < len(examples):
            new = self._embed(self._model, examples.inputs[offered:])
            self._remember(new, examples.labels[offered:])

    def _remember(self, embeddings: Embeddings, labels: Labels) -> None:
        entries = self._store.entries
        if entries.is_dropped:
            kept = self.collection.examples.inputs[entries.arrivals]
            entries.reembed(self._embed(self._model, kept))
        entries.add(embeddings, labels)
        self._store.settle()

    def _compressed_report(self) -> dict[str, Any]:
        exact = self.exact_tuning
        return {
            "exact_size_bytes": self._store.exact_size_bytes,
            "exact_accuracy": exact.accuracy if exact else None,
            "exact_memory_accuracy": exact.memory_accuracy if exact else None,
        }

    def _compressed_result(self) -> dict[str, float | None]:
        tuning, exact = self.tuning, self.exact_tuning
        return {
            "memory_bytes": self._store.size_bytes,
            "exact_memory_bytes": self._store.exact_size_bytes,
            "holdout_memory_accuracy": tuning.memory_accuracy if tuning and exact else None,
            "exact_holdout_memory_accuracy": exact.memory_accuracy if exact else None,
        }

    def _tune(self, mixture: Mixture) -> None:
        held, entries = self.collection.held, self._store.entries
        if len(entries):
            held = held[held >= entries.arrivals[0]]
        examples = self.collection.examples.take(held)
        predicted = np.empty((0, entries.num_classes), np.float32)
        if len(examples):
            predicted = mixture.predict(self._learner, examples.inputs)
        self.tuning, self.exact_tuning = self._store.tune(
            embeddings=self._embed(self._model, examples.inputs),
            model=predicted,
            labels=examples.labels,
            arrivals=held,
        )

    def _embed(self, model: Tensors, inputs: npt.NDArray[np.float32]) -> Embeddings:
        if not len(inputs):
            return np.empty((0, self._store.entries.dim), np.float32)
        embeddings = self._learner.embed(model, inputs)
        check_embeddings(embeddings, "embeddings of the own examples", self._store.entries.dim)
        return embeddings


def _digest_of(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    hasher = Hasher()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()
