"""Blobs round-trip any array, and received ones are checked to the last byte."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.tensors import (
    ALIGNMENT,
    DTYPES,
    Layout,
    Tensors,
    TensorSpec,
    allocate,
    parse_canonical,
)

specs = st.builds(
    TensorSpec,
    name=st.text(max_size=12),
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    trainable=st.booleans(),
)
layouts = st.lists(specs, max_size=6, unique_by=lambda spec: spec.name).map(Layout)


def arbitrary(layout: Layout, seed: int) -> Tensors:
    """Return tensors of arbitrary bytes, the gaps zero."""
    tensors, rng = Tensors.zeros(layout), np.random.default_rng(seed)
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        raw = rng.integers(0, 2 if spec.dtype == "bool" else 256, spec.size_bytes)
        tensors.buffer[offset : offset + spec.size_bytes] = raw
    return tensors


@given(layouts, st.integers(0, 99))
def test_arrays_of_any_type_and_shape_round_trip_bit_by_bit(layout: Layout, seed: int) -> None:
    tensors = arbitrary(layout, seed)
    copy = Tensors.of(layout, dict(tensors))
    assert copy.buffer.tobytes() == tensors.buffer.tobytes()
    for spec, array in zip(layout.specs, copy.values(), strict=True):
        assert array.shape == spec.shape
        assert array.nbytes == spec.size_bytes
        assert array.flags.writeable


@given(layouts)
def test_tensors_lie_aligned_and_apart_in_the_order_of_their_names(layout: Layout) -> None:
    assert [spec.name for spec in layout.specs] == sorted(spec.name for spec in layout.specs)
    end = 0
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        assert offset % ALIGNMENT == 0
        assert end <= offset
        end = offset + spec.size_bytes
    assert end <= layout.size_bytes


@given(layouts, st.text(max_size=20))
def test_a_canonical_description_reads_back_as_the_same_layout(layout: Layout, task: str) -> None:
    assert parse_canonical(layout.canonical(task)) == (task, layout)
    assert layout.first_difference(task, layout.canonical(task)) == "no difference"


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_layout_or_a_remote_protocol_error(description: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        parse_canonical(description)


def test_non_contiguous_arrays_are_copied_in_their_own_order() -> None:
    layout = Layout([TensorSpec("w", "f32", (4, 3))])
    source = np.arange(24, dtype=np.float32).reshape(3, 8).T[::2]
    assert not source.flags.c_contiguous
    assert np.array_equal(Tensors.of(layout, {"w": source})["w"], source)


def test_scalars_stay_scalars_and_empty_stays_empty() -> None:
    layout = Layout([TensorSpec("n", "i64", ()), TensorSpec("none", "f32", (0, 7))])
    arrays = {"n": np.array(5, np.int64), "none": np.empty((0, 7), np.float32)}
    tensors = Tensors.of(layout, arrays)
    assert tensors["n"].shape == ()
    assert tensors["n"] == 5
    assert tensors["none"].shape == (0, 7)


def test_a_gradient_has_only_trainable_tensors_and_all_in_f32() -> None:
    layout = Layout(
        [
            TensorSpec("bn.mean", "f32", (3,), trainable=False),
            TensorSpec("bn.count", "i64", (), trainable=False),
            TensorSpec("w", "bf16", (3, 2)),
        ]
    )
    assert [str(spec) for spec in layout.gradient.specs] == ["w f32[3, 2]"]


@pytest.mark.parametrize("offset", [12, 63])
def test_stray_bytes_in_a_gap_are_refused(offset: int) -> None:
    tensors = Tensors.zeros(Layout([TensorSpec("a", "f32", (3,)), TensorSpec("b", "f32", (16,))]))
    tensors.buffer[offset] = 1
    with pytest.raises(RemoteProtocolError, match="'a' is followed by stray bytes"):
        tensors.check_received()


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("f32", 0x7F800000),
        ("f32", 0xFFC00001),
        ("bf16", 0x7F80),
        ("bf16", 0xFFFF),
        ("f16", 0x7C00),
        ("f64", 0x7FF0000000000000),
        ("f64", 0xFFF8000000000000),
    ],
)
def test_numbers_that_are_not_finite_are_refused(dtype: str, bits: int) -> None:
    tensors = Tensors.zeros(Layout([TensorSpec("w", dtype, (5, 3))]))
    raw = tensors["w"].view(f"<u{tensors['w'].itemsize}")
    raw[4, 2] = bits
    with pytest.raises(RemoteProtocolError, match="'w' holds a number that is not finite"):
        tensors.check_received()


def test_huge_but_finite_numbers_pass() -> None:
    tensors = Tensors.zeros(Layout([TensorSpec("w", "f32", (5,)), TensorSpec("x", "f64", (2,))]))
    tensors["w"][...] = np.finfo(np.float32).max
    tensors["x"][...] = np.finfo(np.float64).min
    tensors.check_received()


def test_a_boolean_is_0_or_1() -> None:
    tensors = Tensors.zeros(Layout([TensorSpec("mask", "bool", (3,))]))
    tensors["mask"][1] = True
    tensors.check_received()
    tensors.buffer[2] = 2
    with pytest.raises(RemoteProtocolError, match="boolean"):
        tensors.check_received()


@pytest.mark.parametrize(
    ("other", "clause"),
    [
        (Layout([TensorSpec("a", "f32", (2,)), TensorSpec("b", "f32", (4,))]), r"b f32\[3\]"),
        (Layout([TensorSpec("a", "f16", (2,)), TensorSpec("b", "f32", (3,))]), r"a f16\[2\]"),
        (Layout([TensorSpec("a", "f32", (2,))]), r"only ours has b f32\[3\]"),
    ],
)
def test_the_first_difference_of_two_layouts_is_named(other: Layout, clause: str) -> None:
    ours = Layout([TensorSpec("a", "f32", (2,)), TensorSpec("b", "f32", (3,))])
    with pytest.raises(AssertionError, match=clause):
        raise AssertionError(ours.first_difference("t", other.canonical("t")))
    assert ours.fingerprint("t") != other.fingerprint("t")
    assert "task" in ours.first_difference("t", ours.canonical("u"))


def test_what_does_not_fit_the_layout_is_a_fault_of_ours() -> None:
    layout = Layout([TensorSpec("a", "f32", (2,))])
    with pytest.raises(LocalProtocolError):
        Tensors.of(layout, {"b": np.zeros(2, np.float32)})
    with pytest.raises(LocalProtocolError):
        Tensors.of(layout, {"a": np.zeros(3, np.float32)})
    with pytest.raises(LocalProtocolError):
        Tensors(layout, np.zeros(3, np.uint8))
    with pytest.raises(LocalProtocolError):
        TensorSpec("a", "c64", (2,))
    with pytest.raises(LocalProtocolError):
        Layout([TensorSpec("a", "f32", ()), TensorSpec("a", "f64", ())])


@given(st.integers(1, 5000))
def test_buffers_start_aligned(size_bytes: int) -> None:
    buffer = allocate(size_bytes)
    assert buffer.nbytes == size_bytes
    assert buffer.ctypes.data % ALIGNMENT == 0
