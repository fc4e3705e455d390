"""How long to wait for a neighbor, by how long it took before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from protocol.messages import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineSettings:
    """Between which bounds deadlines follow what was observed."""

    shortest_s: float = 2.0
    """No deadline is shorter, or than the longest where that is less. Shorter finds the silent
    sooner; a busy machine can keep its peers waiting for a second."""

    margin: float = 10.0
    """Times the slowest of the remembered waits. More bears more change, such as a whole copy after
    coded differences to it, deflated some ten times as small, and finds the silent later."""

    remembered: int = 16
    """Waits that count; the more, the longer a slow one keeps the deadline long."""

    experience: int = 3
    """Waits before which the deadline stays the longest."""


@dataclass(slots=True)
class _Seen:
    waits: deque[float]
    failures: int = 0


class Deadlines:
    """A deadline for each neighbor: a margin over the slowest of its last answers.

    A failure doubles it until the next answer, as TCP's timeouts do (RFC 6298, section 5.5), so
    that a neighbor that has become slower is waited for in the end; the answers that were given
    up would else be missing from what is observed (Karn's problem).

    Args:
        longest_s: No deadline is longer.
        settings: How far below that it may follow what was observed.

    Attributes:
        longest_s: The same.
    """

    def __init__(self, longest_s: float, settings: DeadlineSettings | None = None) -> None:
        self.longest_s = longest_s
        self._settings = settings or DeadlineSettings()
        self._seen: dict[PeerId, _Seen] = {}

    def of(self, peer_id: PeerId) -> float:
        """Return how many seconds to wait for a neighbor now."""
        seen, settings = self._seen.get(peer_id), self._settings
        if seen is None or len(seen.waits) < settings.experience:
            return self.longest_s
        usual_s = max(settings.margin * max(seen.waits), settings.shortest_s)
        # After 60 doublings the longest is reached from anywhere, and no float has overflowed.
        return min(usual_s * 2.0 ** min(seen.failures, 60), self.longest_s)

    def answered(self, peer_id: PeerId, seconds: float) -> None:
        """Take note that a neighbor took so long to answer what was asked."""
        seen = self._of(peer_id)
        seen.waits.append(seconds)
        seen.failures = 0

    def failed(self, peer_id: PeerId) -> None:
        """Take note that a neighbor's deadline passed without an answer."""
        self._of(peer_id).failures += 1

    def _of(self, peer_id: PeerId) -> _Seen:
        if peer_id not in self._seen:
            self._seen[peer_id] = _Seen(deque(maxlen=self._settings.remembered))
        return self._seen[peer_id]
