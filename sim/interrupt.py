"""Hold Ctrl-C back while a process starts that must not hear it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Deliver what comes of Ctrl-C afterwards; processes started meanwhile ignore it.

    To ignore it alone would lose it. A blocked signal stays pending even while it is ignored
    (signal(7)); whoever is started meanwhile inherits both.
    """
    resource_tracker.ensure_running()  # which would unblock it, if it started later
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
