"""What holds for every test."""

import signal

import torch

torch.set_num_threads(1)  # as peers do: more threads fight over two cores
# A shell lets its background jobs ignore Ctrl-C, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
