"""How long messages between simulated peers take, and which are lost."""

from __future__ import annotations

import math

import numpy as np

from protocol.messages import PeerId
from sim.simulate_settings import SimulateSettings


class Links:
    """The network of a simulation: each peer has one uplink, on which what it sends waits its turn.

    Args:
        settings: Delay, jitter, loss and the uplinks' speed.
        rng: Decides every draw.
    """

    def __init__(self, settings: SimulateSettings, rng: np.random.Generator) -> None:
        self._settings = settings
        self._rng = rng
        self._free_at_s: dict[PeerId, float] = {}

    def loses(self) -> bool:
        """Draw whether the next message is lost."""
        return self._settings.loss > 0 and float(self._rng.random()) < self._settings.loss

    def latency_s(self) -> float:
        """Draw how long a message takes besides what its size costs."""
        jitter_s = self._settings.jitter_s
        extra_s = jitter_s * float(self._rng.random()) if jitter_s else 0.0
        return self._settings.delay_s + extra_s

    def send(
        self, sender: PeerId, size_bytes: int, now_s: float, deadline_s: float = math.inf
    ) -> tuple[float, int]:
        """Send something as soon as the sender's uplink is free.

        Args:
            sender: Whose uplink it takes.
            size_bytes: How much.
            now_s: The time.
            deadline_s: When the receiver breaks off, and the rest isn't sent any more.

        Returns:
            When it arrives, infinity when it was broken off, and how many bytes were sent.
        """
        latency_s = self.latency_s()
        rate = self._settings.uplink_bytes_per_s
        if not rate:
            return now_s + latency_s, size_bytes
        start_s = max(now_s, self._free_at_s.get(sender, 0.0))
        end_s = start_s + size_bytes / rate
        if end_s <= deadline_s:
            self._free_at_s[sender] = end_s
            return end_s + latency_s, size_bytes
        if start_s >= deadline_s:
            return math.inf, 0
        self._free_at_s[sender] = deadline_s
        return math.inf, int((deadline_s - start_s) * rate)

    def hang_up(self, peer_id: PeerId) -> None:
        """Break off whatever a peer was sending."""
        self._free_at_s.pop(peer_id, None)
