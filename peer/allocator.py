"""Have the C library keep the memory of one batch for the next."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""What glibc allows; it ignores more."""


def keep_freed_memory() -> None:
    """Let a peer's threads keep up to 64 MiB each that they freed.

    As it comes, glibc gives what a batch took back to the system, which then maps and clears it
    anew, page by page, for the next batch: a twentieth of all that a peer computes. Other C
    libraries are left as they are.

    Source: mallopt(3); setting the one threshold also ends the guessing of the other.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
