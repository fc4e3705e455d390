"""The window grows on quick links, shrinks under queues and keeps its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.transport.window import (
    MAX_CHUNK_BYTES,
    MAX_WINDOW_BYTES,
    MIN_CHUNK_BYTES,
    MIN_WINDOW_BYTES,
    START_WINDOW_BYTES,
    Window,
)


def feed(window: Window, num_windows: int, elapsed_s: float) -> None:
    for _ in range(num_windows):
        window.answered(elapsed_s, window.size_bytes)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 2 << 20))))
def test_window_and_chunk_keep_their_bounds(replies: list[tuple[float, int]]) -> None:
    window = Window()
    for elapsed_s, num_bytes in replies:
        window.answered(elapsed_s, num_bytes)
        assert MIN_WINDOW_BYTES <= window.size_bytes <= MAX_WINDOW_BYTES
        assert MIN_CHUNK_BYTES <= window.chunk_bytes <= MAX_CHUNK_BYTES
        assert window.chunk_bytes & (window.chunk_bytes - 1) == 0
        assert window.chunk_bytes <= window.size_bytes


def test_on_a_quick_link_three_windows_reach_the_largest() -> None:
    window = Window()
    feed(window, 3, 0.002)
    assert window.size_bytes == MAX_WINDOW_BYTES
    assert window.chunk_bytes == MAX_CHUNK_BYTES


def test_a_long_round_trip_alone_does_not_shrink_the_window() -> None:
    window = Window()
    feed(window, 10, 0.5)
    assert window.size_bytes == MAX_WINDOW_BYTES


def test_a_queue_shrinks_the_window_by_half_at_most_each_time() -> None:
    window = Window(base_s=0.01)
    window.answered(2.0, START_WINDOW_BYTES)
    assert window.size_bytes == START_WINDOW_BYTES // 2
    feed(window, 10, 2.0)
    assert window.size_bytes == MIN_WINDOW_BYTES


def test_between_the_thresholds_the_window_rests() -> None:
    window = Window(base_s=0.01)
    feed(window, 10, 0.09)
    assert window.size_bytes == START_WINDOW_BYTES


def test_one_quick_reply_among_slow_ones_counts() -> None:
    window = Window(base_s=0.01)
    window.answered(3.0, START_WINDOW_BYTES // 2)
    window.answered(0.011, START_WINDOW_BYTES // 2)
    assert window.size_bytes == 2 * START_WINDOW_BYTES


def test_on_a_narrow_link_the_queue_settles_below_the_threshold() -> None:
    """A link of 2 MB/s: the reply time is the base and what is under way over the rate."""
    window, rate = Window(base_s=0.005), 2e6
    for _ in range(50):
        window.answered(0.005 + window.size_bytes / rate, window.size_bytes)
    assert window.size_bytes / rate < 0.15
