"""A receive buffer is used again exactly when nobody holds a view of it."""

from __future__ import annotations

import numpy as np

from protocol.tensors import ALIGNMENT, Layout, Tensors, TensorSpec
from protocol.transport.pool import BufferPool

SIZE = 1 << 20


def address(buffer: np.ndarray) -> int:
    return int(buffer.ctypes.data)


def test_a_buffer_is_reused_once_it_is_dropped() -> None:
    pool = BufferPool(idle_s=10)
    first = pool.take(SIZE, 0.0)
    where = address(first)
    second = pool.take(SIZE, 0.0)
    assert address(second) != where
    del first
    assert address(pool.take(SIZE, 0.0)) == where
    assert where % ALIGNMENT == 0


def test_a_view_of_a_tensor_keeps_its_buffer() -> None:
    pool = BufferPool(idle_s=10)
    layout = Layout([TensorSpec("w", "f32", (SIZE // 4,))])
    weights = Tensors(layout, pool.take(SIZE, 0.0))["w"]
    where = address(weights)
    assert address(pool.take(SIZE, 0.0)) != where
    part = memoryview(weights)[10:20]
    del weights
    assert address(pool.take(SIZE, 0.0)) != where
    part.release()
    del part
    assert where in [address(pool.take(SIZE, 0.0)), address(pool.take(SIZE, 0.0))]


def test_another_size_gets_another_buffer() -> None:
    pool = BufferPool(idle_s=10)
    where = address(pool.take(SIZE, 0.0))
    assert address(pool.take(2 * SIZE, 0.0)) != where


def test_buffers_that_nobody_needs_are_let_go() -> None:
    pool = BufferPool(idle_s=10)
    held = pool.take(SIZE, 0.0)
    pool.take(SIZE, 0.0)
    pool.sweep(5.0)
    assert len(pool._pooled) == 2
    pool.sweep(11.0)
    assert len(pool._pooled) == 1
    del held
    pool.sweep(22.0)
    assert not pool._pooled
