"""Codes deflated come back whole; what was never deflated so is refused, and costs no memory."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.deflate import deflate, inflate, most_deflated
from protocol.errors import RemoteProtocolError
from protocol.lowbit import encode


@given(st.binary(max_size=600), st.binary(max_size=20))
def test_a_code_comes_back_with_what_follows_it(code: bytes, rest: bytes) -> None:
    blob = deflate(np.frombuffer(code, np.uint8)).tobytes() + rest
    assert inflate(blob, len(code)) == (code, rest)


@pytest.mark.parametrize("size", [0, 1, 2**13 - 1, 2**14, 2**14 + 1, 2**20 + 3])
def test_what_cannot_be_made_smaller_grows_by_no_more_than_is_allowed_for(size: int) -> None:
    noise = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert deflate(noise).size <= most_deflated(size) <= 1.001 * size + 10


def test_the_code_of_a_gradient_with_many_small_numbers_takes_less_than_half() -> None:
    rng = np.random.default_rng(0)
    gradient = (rng.standard_t(2, 100_000) * (rng.random(100_000) < 0.5)).astype(np.float32)
    code = np.frombuffer(encode(gradient, 4).blob, np.uint8)
    assert deflate(code).size < 0.5 * code.size


@given(st.binary(max_size=40), st.integers(0, 60))
def test_any_bytes_give_a_code_of_the_size_or_a_remote_protocol_error(
    blob: bytes, size: int
) -> None:
    with contextlib.suppress(RemoteProtocolError):
        code, rest = inflate(blob, size)
        assert len(code) == size
        assert blob.endswith(rest)


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"\xff" * 9, "what should be deflated is not"),
        (b"", "cut short"),
        (deflate(np.zeros(100, np.uint8)).tobytes()[:-1], "cut short"),
        (deflate(np.zeros(99, np.uint8)).tobytes(), "inflates to 99 bytes: it takes 100"),
        (deflate(np.zeros(101, np.uint8)).tobytes(), "it takes 100"),
    ],
)
def test_another_size_is_refused_with_the_reason(blob: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        inflate(blob, 100)


def test_a_bomb_takes_no_more_memory_than_the_code_would() -> None:
    bomb = zlib.compress(bytes(100_000_000), 9, -15)
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match="too much"):
        inflate(bomb, 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # the bomb's own rest, about 97 kB, and a buffer
