"""Hold Ctrl-C back while a process starts that must not hear it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Deliver what comes of Ctrl-C afterwards; processes started meanwhile have it blocked.

    To ignore it meanwhile would lose it. Another thread may take it, so that it is noted, too.
    """
    resource_tracker.ensure_running()  # which would unblock it, if it started later
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if noted:
            signal.raise_signal(signal.SIGINT)
