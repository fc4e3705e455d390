"""What holds for every test."""

import torch

torch.set_num_threads(1)  # as peers do: more threads fight over two cores
