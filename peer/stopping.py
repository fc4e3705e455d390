"""Turn signals, and the loss of whoever started a peer, into one wish to stop."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
SAME_WISH_S = 1.0


@contextmanager
def stop_signals(stop: asyncio.Event, lifeline: int | None) -> Iterator[None]:
    """Set `stop` on the first Ctrl-C, SIGTERM or loss of the lifeline; a later one kills.

    A second signal right after the first is taken for the same wish: shells and wrappers such as
    `timeout` pass on to us what the terminal has sent us already.
    """
    loop = asyncio.get_running_loop()
    began = 0.0

    def begin_stop() -> None:
        nonlocal began
        began = time.monotonic()
        stop.set()
        # Nothing may keep a stopping peer alive; if something does, say where it hung.
        faulthandler.dump_traceback_later(STOP_TIMEOUT_S, exit=True)

    def on_signal(number: int) -> None:
        if stop.is_set():
            if time.monotonic() - began > SAME_WISH_S:
                os._exit(128 + number)
            return
        logger.info("stopping (%s)", signal.Signals(number).name)
        begin_stop()

    def on_lifeline() -> None:
        assert lifeline is not None
        loop.remove_reader(lifeline)
        logger.warning("whoever started this peer is gone: stopping")
        begin_stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    if lifeline is not None:
        loop.add_reader(lifeline, on_lifeline)
    try:
        yield
    finally:
        if lifeline is not None:
            loop.remove_reader(lifeline)
        for number in numbers:
            loop.remove_signal_handler(number)
