"""A running peer's memory of its own examples, which makes its mixture's predictions personal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from peer.algorithm import AlgorithmSettings, mix_predictions
from peer.collection import Collection
from peer.compression import Prototypes, compress, prototypes_within, tune_compressed
from peer.config import PersonalizationSettings
from peer.data import Examples
from peer.datastore import Datastore, Labels, embedding_size_bytes, entry_size_bytes
from peer.interpolation import Blend, Tuning, accuracy_of, interpolate, sigma_of, tune
from peer.learner import Learner, Probabilities
from peer.nearest import Embeddings, check_embeddings
from protocol.digest import Hasher
from protocol.errors import CheckpointError, DataError
from protocol.messages import PeerId
from protocol.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What a peer predicts with, as of the end of a round.

    Attributes:
        own: The peer.
        model: Its own model.
        models: The mixture's members.
        weights: Theirs; they sum to 1.
    """

    own: PeerId
    model: Tensors
    models: Mapping[PeerId, Tensors]
    weights: Mapping[PeerId, float]

    def predict(self, learner: Learner, inputs: npt.NDArray[np.float32]) -> Probabilities:
        """Return the mixture prediction. Shape (num_examples, num_classes)."""
        predictions = {
            peer_id: learner.predict(model, inputs) for peer_id, model in self.models.items()
        }
        return mix_predictions(self.weights, predictions)

    @property
    def strongest(self) -> Tensors:
        """The member of most weight; of equal ones the own, else the first by peer id."""
        best = max(
            sorted(self.weights),
            key=lambda peer_id: (self.weights[peer_id], peer_id == self.own),
        )
        return self.models[best]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a memory is renewed, and when its interpolation weight may be chosen.

    Attributes:
        every: Rounds from one renewal to the next.
        rounds: Of the peer in all; None for ever.
        tunable: Rounds after which the models of the mixture have not trained on the holdout yet.
    """

    every: int
    rounds: int | None
    tunable: int | None

    @classmethod
    def of(
        cls, settings: PersonalizationSettings, algorithm: AlgorithmSettings, rounds: int | None
    ) -> Schedule:
        """Return the schedule of a peer with these settings."""
        # As `PeerCore` counts its final rounds, whose batches hold the holdout.
        tunable = None if rounds is None else rounds - int(algorithm.final_full * rounds)
        return cls(every=settings.every, rounds=rounds, tunable=tunable)

    def is_due(self, rounds_done: int) -> bool:
        """Say whether the memory is to be renewed after so many rounds."""
        return rounds_done % self.every == 0 or rounds_done in (self.rounds, self.tunable)

    def may_tune(self, rounds_done: int) -> bool:
        """Say whether the holdout still judges fairly after so many rounds."""
        return self.tunable is None or rounds_done <= self.tunable


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMemory:
    """What a checkpoint holds of a memory.

    Attributes:
        arrays: The datastore's, see `Datastore.to_arrays`, and the prototypes', if there are any.
        model: The one that embedded them; None where it couldn't be read.
        state: The rest, as plain values for JSON.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    model: Tensors | None
    state: Mapping[str, Any]


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
        self._store = Datastore(settings, dim, num_classes, rng)
        self._prototypes: Prototypes | None = None
        self._budget = int(settings.compress_kib * 1024)
        if self._budget:
            prototypes_within(self._budget, dim=dim, num_classes=num_classes, num_examples=1)
        self._blend = Blend(lam=0.0, k_nearest=settings.k_nearest, sigma=settings.sigma)

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
        offered = self._store.num_offered
        kept = self._embed(model, inputs[self._store.arrivals])
        new = self._embed(model, inputs[offered:])
        self._store.reembed(kept)
        self._store.add(new, labels[offered:])
        self._model = model
        self.renewed_at = rounds_done
        try:
            if may_tune:
                self._tune(mixture)
                self.tuned_at = rounds_done
        finally:
            self._settle()

    def embed_new(self, examples: Examples) -> Embeddings:
        """Embed examples before they are taken.

        Raises:
            DataError: An embedding is not finite.
        """
        return self._embed(self._model, examples.inputs)

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
        if self._store.num_offered == len(self.collection):  # else with the first renewal
            self._remember(embeddings, examples.labels)
        self.collection.add(examples, is_held)

    def predict(self, mixture: Mixture, inputs: npt.NDArray[np.float32]) -> Probabilities:
        """Return λ p_kNN + (1 - λ) p_mixture. Shape (num_examples, num_classes)."""
        queries = self._learner.embed(self._model, inputs)
        model = mixture.predict(self._learner, inputs)
        return interpolate(self._recall(queries), model, self._blend.lam)

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
                memory = self._recall(self._embed(self._model, test.inputs))
                blend = interpolate(memory, predicted, self._blend.lam)
                blend_accuracy = accuracy_of(blend, test.labels)
                memory_accuracy = None if memory is None else accuracy_of(memory, test.labels)
        return {
            "memory_accuracy": memory_accuracy,
            "blend_accuracy": blend_accuracy,
            "lam": self._blend.lam,
            **(self._compressed_result() if self._prototypes is not None else {}),
        }

    def report(self) -> dict[str, Any]:
        """Return what a record says: see `peer.record.Recorder`.

        Of prototypes also `exact_size_bytes`, `exact_accuracy` and `exact_memory_accuracy`: the
        same of the datastore that they are learned from. They have no `sigma`.
        """
        tuning = self.tuning
        return {
            "round": self.renewed_at,
            "tuned_round": self.tuned_at,
            "lam": self._blend.lam,
            "sigma": self._blend.sigma if self._prototypes is None else None,
            "num_entries": len(self._store),
            "num_offered": self._store.num_offered,
            "size_bytes": self._size_bytes,
            "num_validation": tuning.num_examples if tuning else 0,
            "accuracy": tuning.accuracy if tuning else None,
            "model_accuracy": tuning.model_accuracy if tuning else None,
            "memory_accuracy": tuning.memory_accuracy if tuning else None,
            **(self._compressed_report() if self._prototypes is not None else {}),
        }

    def save(self) -> SavedMemory:
        """Return what `restore` needs."""
        arrays = self._store.to_arrays()
        if self._prototypes is not None:
            arrays |= self._prototypes.to_arrays()
        state = {
            "renewed_at": self.renewed_at,
            "tuned_at": self.tuned_at,
            "tuning": msgspec.to_builtins(self.tuning),
            "exact_tuning": msgspec.to_builtins(self.exact_tuning),
            "compress_bytes": self._budget,
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
        self._blend = self._current_blend()
        self._restore_store(saved)
        self._blend = self._current_blend()

    def _restore_store(self, saved: SavedMemory) -> None:
        state, model = saved.state, saved.model
        if model is None or _digest_of(saved.arrays) != state.get("digest"):
            raise CheckpointError("the saved datastore is damaged")
        classes, dim = self._store.num_classes, self._store.dim
        store = Datastore.from_arrays(saved.arrays, self._settings, classes, self._rng)
        if store.dim != dim:
            raise CheckpointError(
                f"the saved datastore holds embeddings of dimension {store.dim}, and this model's "
                f"have {dim}"
            )
        prototypes = Prototypes.from_arrays(saved.arrays, dim, classes)
        fitting = len(store) == len(saved.arrays["labels"]) and store.is_dropped == bool(prototypes)
        if state.get("compress_bytes", 0) != self._budget or (prototypes and not fitting):
            raise CheckpointError("the saved memory is of other settings of [personalization]")
        labels = self.collection.examples.labels
        if store.num_offered > len(labels) or not np.array_equal(
            store.labels, labels[store.arrivals]
        ):
            raise CheckpointError("the saved datastore is of other examples than there are now")
        try:
            self._rng.bit_generator.state = state["rng_state"]
            self.renewed_at = int(state["renewed_at"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved datastore can't be used: {error}") from error
        self._store, self._model, self._prototypes = store, model, prototypes

    def catch_up(self) -> None:
        """Remember what was added to the collection since the store was saved.

        Raises:
            DataError: An embedding is not finite.
        """
        new = slice(self._store.num_offered, None)
        examples = self.collection.examples
        if self._store.num_offered and len(examples) > self._store.num_offered:
            self._remember(self._embed(self._model, examples.inputs[new]), examples.labels[new])

    def _remember(self, embeddings: Embeddings, labels: Labels) -> None:
        if self._store.is_dropped:
            kept = self.collection.examples.inputs[self._store.arrivals]
            self._store.reembed(self._embed(self._model, kept))
        self._store.add(embeddings, labels)
        self._settle()

    def _settle(self) -> None:
        """Go on with what the store holds now, or with prototypes in its place."""
        self._prototypes = None
        if self._is_too_large:
            self._prototypes = self._compressed(self._store)
            self._store.drop_embeddings()
        self._blend = self._current_blend()

    @property
    def _is_too_large(self) -> bool:
        return 0 < self._budget < len(self._store) * embedding_size_bytes(self._store.dim)

    @property
    def _size_bytes(self) -> int:
        learned = 0 if self._prototypes is None else self._prototypes.size_bytes
        return self._store.size_bytes + learned

    @property
    def _exact_size_bytes(self) -> int:
        return len(self._store) * entry_size_bytes(self._store.dim)

    def _compressed(self, store: Datastore) -> Prototypes:
        # Not by `spawn`, which a checkpoint's state of the generator doesn't tell of.
        return compress(store, self._budget, np.random.default_rng(self._rng.integers(2**63)))

    def _recall(self, queries: Embeddings) -> Probabilities | None:
        if self._prototypes is not None:
            return self._prototypes.recall(queries)
        return self._blend.recall(self._store, queries)

    def _compressed_report(self) -> dict[str, Any]:
        exact = self.exact_tuning
        return {
            "exact_size_bytes": self._exact_size_bytes,
            "exact_accuracy": exact.accuracy if exact else None,
            "exact_memory_accuracy": exact.memory_accuracy if exact else None,
        }

    def _compressed_result(self) -> dict[str, float | None]:
        tuning, exact = self.tuning, self.exact_tuning
        return {
            "memory_bytes": self._size_bytes,
            "exact_memory_bytes": self._exact_size_bytes,
            "holdout_memory_accuracy": tuning.memory_accuracy if tuning and exact else None,
            "exact_holdout_memory_accuracy": exact.memory_accuracy if exact else None,
        }

    def _tune(self, mixture: Mixture) -> None:
        held = self.collection.held
        if len(self._store):
            held = held[held >= self._store.arrivals[0]]
        examples = self.collection.examples.take(held)
        predicted = np.empty((0, self._store.num_classes), np.float32)
        if len(examples):
            predicted = mixture.predict(self._learner, examples.inputs)
        embeddings = self._embed(self._model, examples.inputs)
        tuning = tune(
            self._store,
            self._settings,
            embeddings=embeddings,
            model=predicted,
            labels=examples.labels,
            arrivals=held,
        )
        exact_tuning = None
        if self._is_too_large and tuning.memory_accuracy is not None:
            exact_tuning = tuning
            tuning = tune_compressed(
                self._compressed(self._store.without(held)),
                exact_tuning,
                self._settings.lambdas,
                embeddings=embeddings,
                model=predicted,
                labels=examples.labels,
            )
        self.tuning, self.exact_tuning = tuning, exact_tuning

    def _current_blend(self) -> Blend:
        """The λ that was chosen, and sigma by what is in the store now; prototypes need none."""
        return replace(
            self._blend,
            lam=self.tuning.blend.lam if self.tuning is not None else 0.0,
            sigma=sigma_of(self._store, self._settings) if self._prototypes is None else 1.0,
        )

    def _embed(self, model: Tensors, inputs: npt.NDArray[np.float32]) -> Embeddings:
        if not len(inputs):
            return np.empty((0, self._store.dim), np.float32)
        embeddings = self._learner.embed(model, inputs)
        check_embeddings(embeddings, "embeddings of the own examples", self._store.dim)
        return embeddings


def _digest_of(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    hasher = Hasher()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()
