"""When a daemon may fetch the models of a round, and when it may close the round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from protocol.messages import PeerId


class Pace(Protocol):
    """What a daemon asks before it goes on; its waits are cancelled when the daemon stops."""

    def begin(self, round_number: int) -> None:
        """Take note that a round has begun: its model is published, its neighbors are chosen."""

    async def fetching(self, round_number: int) -> None:
        """Return once the models of a round may be fetched."""

    async def closing(self, round_number: int, pushing: Collection[asyncio.Task[None]]) -> None:
        """Return once a round may be closed, whose own work is done.

        Args:
            round_number: The round.
            pushing: The gradients that are still on their way; each ends within its deadline.
        """

    def leave(self) -> None:
        """Take note that the peer begins no more rounds."""


class FreeRunning:
    """Waits for nobody: rounds are as long as the own work takes, or a little longer.

    Args:
        min_round_s: Shortest time for a round.
    """

    def __init__(self, min_round_s: float = 0.0) -> None:
        self._min_round_s = min_round_s
        self._began_s = time.monotonic()

    def begin(self, round_number: int) -> None:
        """Start the round's clock."""
        self._began_s = time.monotonic()

    async def fetching(self, round_number: int) -> None:
        """Fetch at once."""

    async def closing(self, round_number: int, pushing: Collection[asyncio.Task[None]]) -> None:
        """Close when the shortest time is over."""
        await asyncio.sleep(self._began_s + self._min_round_s - time.monotonic())

    def leave(self) -> None:
        """Nobody waits for this peer."""


class Lockstep:
    """The paper's synchronous rounds, for daemons of one process that share this.

    Nobody fetches before all have published the round's model, and nobody closes before all are
    ready and every gradient is delivered, or given up by its deadline.

    Args:
        peer_ids: Who takes part. Each daemon must be run, since the others wait for it until it
            has finished its last round or ended.
    """

    def __init__(self, peer_ids: Iterable[PeerId]) -> None:
        self._begun = dict.fromkeys(peer_ids, -1)
        self._ready = dict.fromkeys(self._begun, -1)
        self._changed = asyncio.Event()

    def of(self, peer_id: PeerId) -> Pace:
        """Return the pace of one of the peers."""
        return _InStep(self, peer_id)

    def begin(self, peer_id: PeerId, round_number: int) -> None:
        """Take note that a peer has begun a round."""
        if peer_id in self._begun:
            self._begun[peer_id] = round_number
            self._tell()

    def ready(self, peer_id: PeerId, round_number: int) -> None:
        """Take note that a peer has done its work of a round and delivered its gradients."""
        if peer_id in self._ready:
            self._ready[peer_id] = round_number
            self._tell()

    def leave(self, peer_id: PeerId) -> None:
        """Wait for a peer no longer."""
        self._begun.pop(peer_id, None)
        self._ready.pop(peer_id, None)
        self._tell()

    async def all_begun(self, round_number: int) -> None:
        """Return once every peer has begun a round."""
        await self._until(lambda: all(begun >= round_number for begun in self._begun.values()))

    async def all_ready(self, round_number: int) -> None:
        """Return once every peer is ready to close a round, or beyond it."""
        await self._until(
            lambda: all(
                ready >= round_number or self._begun[peer_id] > round_number
                for peer_id, ready in self._ready.items()
            )
        )

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _InStep:
    """One peer's part in a lockstep."""

    def __init__(self, lockstep: Lockstep, peer_id: PeerId) -> None:
        self._lockstep = lockstep
        self._peer_id = peer_id

    def begin(self, round_number: int) -> None:
        self._lockstep.begin(self._peer_id, round_number)

    async def fetching(self, round_number: int) -> None:
        await self._lockstep.all_begun(round_number)

    async def closing(self, round_number: int, pushing: Collection[asyncio.Task[None]]) -> None:
        if pushing:
            await asyncio.wait(pushing)
        self._lockstep.ready(self._peer_id, round_number)
        await self._lockstep.all_ready(round_number)

    def leave(self) -> None:
        self._lockstep.leave(self._peer_id)
