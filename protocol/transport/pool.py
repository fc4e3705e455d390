"""Receive buffers that are used again once nobody holds them, to spare their page faults."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.tensors import ALIGNMENT, allocate

# Smaller ones come from memory that the allocator keeps at hand anyway.
_MIN_POOLED_BYTES = 256 * 1024


@dataclass(slots=True)
class _Pooled:
    memory: npt.NDArray[np.uint8]
    used_at: float = 0.0


class BufferPool:
    """Gives out 64-byte aligned buffers, reusing those that have no other holder left.

    A view of a numpy array, and a torch tensor made from one, holds a reference to the array that
    owns the memory. So a buffer is free exactly when the pool holds the only reference to its
    owner; nobody gives anything back, and forgetting to is no fault.
    """

    def __init__(self, idle_s: float) -> None:
        """Keep buffers that were free for at most `idle_s` seconds."""
        self._idle_s = idle_s
        self._pooled: list[_Pooled] = []

    def take(self, size_bytes: int, now: float) -> npt.NDArray[np.uint8]:
        """Return a buffer of arbitrary content.  Shape (size_bytes,)."""
        if size_bytes < _MIN_POOLED_BYTES:
            return allocate(size_bytes)
        for pooled in self._pooled:
            if pooled.memory.nbytes == size_bytes + ALIGNMENT and _is_free(pooled):
                break
        else:
            pooled = _Pooled(np.empty(size_bytes + ALIGNMENT, np.uint8))
            self._pooled.append(pooled)
        pooled.used_at = now
        start = -pooled.memory.ctypes.data % ALIGNMENT
        return pooled.memory[start : start + size_bytes]

    def sweep(self, now: float) -> None:
        """Let go of buffers that have been free for long; to be called now and then."""
        for pooled in self._pooled:
            if not _is_free(pooled):
                pooled.used_at = now
        self._pooled = [pooled for pooled in self._pooled if pooled.used_at >= now - self._idle_s]


def _holders(pooled: _Pooled) -> int:
    return sys.getrefcount(pooled.memory)


def _is_free(pooled: _Pooled) -> bool:
    return _holders(pooled) == _UNSHARED


_UNSHARED = _holders(_Pooled(np.empty(0, np.uint8)))
