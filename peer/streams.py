"""The independent random streams of one peer, all from one seed and its name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Streams:
    """Where one peer's randomness comes from.

    Attributes:
        split: Decides which examples are test and holdout.
        sampling: Decides who is sampled.
        batches: Seed of the batches.
        network: Decides whom to probe and tell, and the length of pauses.
        memory: Decides what a memory with room for a part of the examples keeps.
    """

    split: np.random.Generator
    sampling: np.random.Generator
    batches: int
    network: np.random.Generator
    memory: np.random.Generator

    @classmethod
    def of(cls, seed: int, name: str) -> Streams:
        """Return the streams of the peer of this name; a simulated one has the same."""
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
        first, second, third, fourth, fifth = np.random.SeedSequence((seed, key)).spawn(5)
        return cls(
            np.random.default_rng(first),
            np.random.default_rng(second),
            int(third.generate_state(1)[0]),
            np.random.default_rng(fourth),
            np.random.default_rng(fifth),
        )
