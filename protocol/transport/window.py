"""How many bytes may be under way on a connection: a window that follows the measured delay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MIN_WINDOW_BYTES = 128 * 1024
MAX_WINDOW_BYTES = 4 << 20
START_WINDOW_BYTES = 512 * 1024
MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 1 << 20

_DOUBLE_BELOW_S = 0.010
_GROW_BELOW_S = 0.050
_SHRINK_ABOVE_S = 0.100
_SHRINK_TOWARD_S = 0.075


@dataclass(slots=True)
class Window:
    """The window of one connection, kept between transfers; grows while replies come quickly.

    Once per window the quickest reply is compared with the quickest ever seen: a delay of up to
    10 ms more doubles the window, up to 50 ms grows it by half, over 100 ms shrinks it toward 75 ms
    of queue, at most by half. The quickest reply, since one slow reply may be a busy processor; a
    delay and not a rate, since a window made from the measured rate collapses on long links.

    Attributes:
        size_bytes: Bytes that may be asked for and not yet answered.
        base_s: The quickest reply ever seen, in seconds.
    """

    size_bytes: int = START_WINDOW_BYTES
    base_s: float = math.inf
    _best_s: float = field(default=math.inf, repr=False)
    _seen_bytes: int = field(default=0, repr=False)

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk: a quarter of the window, a power of two, 64 KiB to 1 MiB."""
        quarter = max(self.size_bytes // 4, 1)
        power = 1 << (quarter.bit_length() - 1)
        return min(max(power, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)

    def answered(self, elapsed_s: float, num_bytes: int) -> None:
        """Take note of a reply that came `elapsed_s` after its request and moved `num_bytes`."""
        self.base_s = min(self.base_s, elapsed_s)
        self._best_s = min(self._best_s, elapsed_s)
        self._seen_bytes += num_bytes
        if self._seen_bytes >= self.size_bytes:
            self._adapt(self._best_s - self.base_s)
            self._best_s, self._seen_bytes = math.inf, 0

    def _adapt(self, queued_s: float) -> None:
        if queued_s < _DOUBLE_BELOW_S:
            factor = 2.0
        elif queued_s < _GROW_BELOW_S:
            factor = 1.5
        elif queued_s > _SHRINK_ABOVE_S:
            factor = max(0.5, (self.base_s + _SHRINK_TOWARD_S) / (self.base_s + queued_s))
        else:
            return
        size = int(self.size_bytes * factor)
        self.size_bytes = min(max(size, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)
