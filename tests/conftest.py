"""What holds for every test."""

import faulthandler
import os
import signal

import pytest
import torch

torch.set_num_threads(1)  # as peers do: more threads fight over two cores
# A shell lets its background jobs ignore Ctrl-C, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Show where every thread is when somebody ends the run: a test's own timeout can't if the
    interpreter stands still."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        stderr = os.dup(2)
    faulthandler.register(signal.SIGTERM, file=stderr, all_threads=True, chain=True)
