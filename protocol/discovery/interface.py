"""The `Discovery` interface: a stream of the addresses that a peer knows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from protocol.messages import PeerId
from protocol.transport.interface import Address


class Discovery(Protocol):
    """Tells where other peers are; a hint, never trust: the handshake decides."""

    def watch(self) -> AsyncGenerator[Mapping[PeerId, Address], None]:
        """Yield all known addresses at once, then again whenever one was seen or is gone."""
