"""Ctrl-C that comes while a process starts is late, and not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from sim.interrupt import ctrl_c_held_back


@pytest.fixture
def hearing():
    """Hear Ctrl-C, as in a foreground process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.usefixtures("hearing")
def test_ctrl_c_that_was_held_back_comes_afterwards(threads):
    done, reached = threading.Event(), False
    for _ in range(threads):  # which may take the signal
        threading.Thread(target=done.wait, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), ctrl_c_held_back():
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
    done.set()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_who_starts_meanwhile_does_not_hear_it():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('still here')"
    with ctrl_c_held_back():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "still here\n"
