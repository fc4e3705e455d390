"""Drive a peer's memory beside its daemon: renew it, feed it, and tell what it came to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from peer.collection import Collection, read_new
from peer.config import PeerSettings, resolve
from peer.daemon import Daemon
from peer.data import Dataset, Examples, Split
from peer.horizon import Horizon
from peer.inbox import Inbox, Waiting
from peer.learner import Learner
from peer.memory import Memory, SavedMemory
from peer.mixture import Mixture
from peer.schedule import Schedule
from protocol.errors import CheckpointError, DataError

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""How often the watched folder is looked at."""


class Intake:
    """A peer's own examples, with those that were taken from its watched folder before.

    Args:
        settings: The peer's.
        base: The config file's folder, which relative paths start from.
        dataset: What its settings name.
        split: That, split.
        seed: Decides which of the others are held out.

    Attributes:
        collection: All of them.
        inbox: The watched folder, if there is one.

    Raises:
        OSError: The watched folder can't be read.
    """

    def __init__(
        self, settings: PeerSettings, base: Path, dataset: Dataset, split: Split, seed: int
    ) -> None:
        self.collection = Collection(split, settings.algorithm.holdout_fraction, seed)
        self.inbox: Inbox | None = None
        self._input_shape = dataset.input_shape
        self._num_classes = dataset.num_classes
        self._pool = settings.pool
        if settings.personalization.watch:
            self.inbox = Inbox(resolve(base, settings.personalization.watch))
            for path in self.inbox.taken():
                try:
                    self.collection.add(self.read(path))
                except DataError as error:
                    logger.warning("%s was taken before, and is left out now: %s", path, error)

    def read(self, path: Path) -> Examples:
        """Read a file of new examples.

        Raises:
            DataError: It can't be read, or holds none for this model.
        """
        return read_new(path, self._input_shape, self._num_classes, self._pool)


class Remembering:
    """A memory, renewed as its schedule says and fed from a watched folder.

    Args:
        memory: Called in the learner's thread only.
        schedule: When to renew it.
        mixture: Returns what the peer predicts with.
        intake: Where new examples come from.
        on_examples: Told in the event loop what the examples are since files were taken.

    Attributes:
        report: What a record says of the memory; None before the first renewal.
    """

    def __init__(
        self,
        memory: Memory,
        schedule: Schedule,
        mixture: Callable[[], Mixture],
        *,
        intake: Intake,
        on_examples: Callable[[Split], None],
    ) -> None:
        self._memory = memory
        self._schedule = schedule
        self._mixture = mixture
        self._intake = intake
        self._on_examples = on_examples
        self._told: str | None = None
        self._rounds_done = 0
        self._seconds = 0.0
        self.report: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        settings: PeerSettings,
        learner: Learner,
        intake: Intake,
        *,
        num_classes: int,
        rng: np.random.Generator,
        horizon: Horizon,
        mixture: Callable[[], Mixture],
        on_examples: Callable[[Split], None],
    ) -> Remembering:
        """Return the memory of a peer with these settings; see the parts for the arguments.

        Raises:
            ModelError: The model's head can't be told.
            ConfigError: The capacity leaves room for no example.
        """
        personalization = settings.personalization
        return cls(
            Memory(personalization, learner, intake.collection, num_classes, rng),
            Schedule(every=personalization.every, horizon=horizon),
            mixture,
            intake=intake,
            on_examples=on_examples,
        )

    def restore(self, saved: SavedMemory | None) -> None:
        """Go on from a checkpoint; a store that can't be used is said to be, and built anew."""
        if saved is None:
            return
        try:
            self._memory.restore(saved)
        except CheckpointError as error:
            logger.warning("%s: it is built anew", error)

    def begin(self, daemon: Daemon, rounds_done: int) -> None:
        """Let the learner's thread build the store, or bring a restored one up to date."""
        memory, schedule = self._memory, self._schedule
        self._rounds_done = rounds_done
        if memory.tuning is None and not schedule.may_tune(rounds_done):
            logger.warning(
                "the holdout is trained on already, so no interpolation weight can be chosen: the "
                "memory stays unused until new examples choose one (personalization.watch), or you "
                "begin anew with another state"
            )
        missed = schedule.is_due(rounds_done) and memory.renewed_at < rounds_done
        if memory.renewed_at < 0 or missed:
            self.renew(daemon, rounds_done)
        else:
            daemon.submit(partial(self._guarded, memory.catch_up))

    def round_finished(self, daemon: Daemon, rounds_done: int) -> None:
        """Let the learner's thread renew the memory where it is due, before the next round."""
        self._rounds_done = rounds_done
        if self._schedule.is_due(rounds_done):
            self.renew(daemon, rounds_done)

    def renew(self, daemon: Daemon, rounds_done: int) -> None:
        """Let the learner's thread renew the memory by what the peer predicts with now."""
        may_tune = self._schedule.may_tune(rounds_done)
        renew = partial(self._memory.renew, self._mixture(), rounds_done, may_tune=may_tune)
        daemon.submit(partial(self._guarded, renew))

    async def watch(self, daemon: Daemon) -> None:
        """Take what comes into the watched folder, as long as the task runs."""
        inbox = self._intake.inbox
        while inbox is not None:
            try:
                waiting = await asyncio.to_thread(inbox.waiting)
            except OSError as error:
                self._tell(f"{inbox.folder} can't be watched: {error}")
            else:
                for file in waiting:
                    await self._consider(inbox, file, daemon)
            await asyncio.sleep(POLL_S)

    async def _consider(self, inbox: Inbox, file: Waiting, daemon: Daemon) -> None:
        """Take a file, or doubt it."""
        try:
            examples = await asyncio.to_thread(self._intake.read, file.path)
        except (DataError, OSError) as error:
            inbox.refuse(file, error)
            return
        judged = not self._schedule.may_tune(self._rounds_done)
        mixture = self._mixture() if judged else None
        fault = await daemon.call(partial(self._take, inbox, file, examples, mixture))
        if isinstance(fault, Exception):
            inbox.refuse(file, fault)
            return
        self._on_examples(fault)
        logger.info(
            "took %d examples of %s: there are %d to train on from the next round",
            len(examples),
            file.path.name,
            len(fault.fit),
        )

    def _take(
        self, inbox: Inbox, file: Waiting, examples: Examples, mixture: Mixture | None
    ) -> Split | Exception:
        """In the learner's thread: remember examples at once, and return what all are now.

        With a mixture they first judge it and the memory, see `Memory.judge`.
        """
        try:
            embeddings = self._memory.embed_new(examples)
            inbox.take(file)
        except (DataError, OSError) as error:
            return error  # raised here, it would end the learner
        if mixture is not None:
            try:
                self._memory.judge(mixture, examples, embeddings, self._rounds_done)
            except DataError as error:
                self._tell(f"new examples choose no interpolation weight: {error}")
        self._memory.take(examples, embeddings)
        self._update_report()
        return self._memory.collection.split()

    def evaluate(self, test: Examples) -> dict[str, float | None]:
        """In the learner's thread, after the last round: what a result says."""
        return self._memory.evaluate(self._mixture(), test)

    def save(self) -> SavedMemory:
        """In the learner's thread: what a checkpoint holds."""
        return self._memory.save()

    def _guarded(self, work: Callable[[], None]) -> None:
        """In the learner's thread: work that a diverged model must not end the peer by."""
        began = time.monotonic()
        try:
            work()
        except DataError as error:
            self._tell(f"the memory stays as it was: {error}")
        self._seconds = time.monotonic() - began
        self._update_report()

    def _update_report(self) -> None:
        self.report = {**self._memory.report(), "seconds": round(self._seconds, 5)}

    def _tell(self, fault: str) -> None:
        """Say what is wrong, once for as long as it is the same."""
        if fault != self._told:
            self._told = fault
            logger.warning("%s", fault)
