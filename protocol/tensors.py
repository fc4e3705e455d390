"""Named sets of arrays laid out in one buffer, and the fingerprint of that layout.

A blob is the little-endian, C-order concatenation of all tensors sorted by name, each at an offset
that is a multiple of 64 bytes, the gaps zero. Offsets are always derived from the receiver's own
`Layout`; no header ever names one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError, RemoteProtocolError

ALIGNMENT = 64
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 16
MAX_NAME_CHARACTERS = 512
MAX_BLOB_BYTES = 1 << 40

# numpy has no bfloat16: its arrays are views of the raw 16 bits.
_NUMPY_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "f64": np.dtype("<f8"),
    "i8": np.dtype("i1"),
    "u8": np.dtype("u1"),
    "i16": np.dtype("<i2"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
    "bool": np.dtype("?"),
}
DTYPES = frozenset(_NUMPY_DTYPES)
_FLOATING = frozenset(("f32", "f16", "bf16", "f64"))

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layout.

    Attributes:
        name: Its name in the model, as in a torch state dict.
        dtype: One of `DTYPES`.
        shape: Its shape; `()` for a scalar, any dimension may be 0.
        trainable: Whether it takes a gradient; buffers and frozen parameters do not.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LocalProtocolError(
                f"tensor {self.name!r} has type {self.dtype}; peers exchange {sorted(DTYPES)}"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * _NUMPY_DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}{'' if self.trainable else ' fixed'}"


class Layout:
    """The sorted tensors of a model and where each lies in a blob.

    Two peers exchange models only when their layouts and tasks are equal.

    Attributes:
        specs: The tensors, sorted by name.
        offsets: The byte offset of each, a multiple of 64.
        size_bytes: The size of a blob.
    """

    __slots__ = ("__dict__", "offsets", "size_bytes", "specs")

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs: tuple[TensorSpec, ...] = tuple(sorted(specs, key=lambda spec: spec.name))
        offsets, end = [], 0
        for before, spec in zip((None, *self.specs), self.specs, strict=False):
            if before is not None and before.name == spec.name:
                raise LocalProtocolError(f"two tensors are named {spec.name!r}")
            offsets.append(end)
            end += -(-spec.size_bytes // ALIGNMENT) * ALIGNMENT
        self.offsets: tuple[int, ...] = tuple(offsets)
        self.size_bytes = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.specs)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position of each tensor in `specs` by its name."""
        return {spec.name: position for position, spec in enumerate(self.specs)}

    @cached_property
    def is_f32(self) -> bool:
        """Whether every tensor is f32, so that a blob is one vector with zeros in its gaps."""
        return all(spec.dtype == "f32" for spec in self.specs)

    @cached_property
    def floating(self) -> tuple[str, ...]:
        """Names of the floating-point tensors."""
        return tuple(spec.name for spec in self.specs if spec.dtype in _FLOATING)

    @cached_property
    def gradient(self) -> Layout:
        """The layout of a gradient: the trainable tensors, always in f32."""
        return Layout(
            TensorSpec(spec.name, "f32", spec.shape) for spec in self.specs if spec.trainable
        )

    @cached_property
    def coded(self) -> Layout:
        """The layout of what a codec may take: the trainable tensors that are f32."""
        return Layout(spec for spec in self.specs if spec.trainable and spec.dtype == "f32")

    @cached_property
    def uncoded(self) -> Layout:
        """The layout of what no codec takes."""
        return Layout(spec for spec in self.specs if spec.name not in self.coded.index)

    def canonical(self, task: str) -> bytes:
        """Return the canonical description of layout and task, as UTF-8 JSON."""
        rows = [[spec.name, spec.dtype, list(spec.shape), spec.trainable] for spec in self.specs]
        return json.dumps([task, rows], separators=(",", ":"), ensure_ascii=True).encode()

    def fingerprint(self, task: str) -> str:
        """Return BLAKE2b-16 of the canonical description, in hex."""
        return hashlib.blake2b(self.canonical(task), digest_size=16).hexdigest()

    def first_difference(self, task: str, theirs: bytes) -> str:
        """Say in one clause how a remote canonical description differs from ours.

        Raises:
            RemoteProtocolError: `theirs` is no such description.
        """
        their_task, their_layout = parse_canonical(theirs)
        if their_task != task:
            return f"task: ours is {task!r}, theirs {their_task!r}"
        for ours, other in zip(self.specs, their_layout.specs, strict=False):
            if ours != other:
                return f"tensor: ours is {ours}, theirs {other}"
        if len(self.specs) != len(their_layout.specs):
            longer = max(self.specs, their_layout.specs, key=len)
            whose = "ours" if longer is self.specs else "theirs"
            shorter = min(len(self.specs), len(their_layout.specs))
            return f"tensor: only {whose} has {longer[shorter]}"
        return "no difference"


def parse_canonical(description: bytes) -> tuple[str, Layout]:
    """Read a canonical description that a peer sent.

    Raises:
        RemoteProtocolError: It isn't one; every part is bounded and typed first.
    """
    try:
        task, rows = json.loads(description)
        if not isinstance(task, str) or len(task) > MAX_NAME_CHARACTERS or len(rows) > MAX_TENSORS:
            raise ValueError("task or number of tensors out of bounds")
        return task, Layout(_spec_of(row) for row in rows)
    except (ValueError, TypeError, RecursionError, LocalProtocolError) as error:
        raise RemoteProtocolError(f"a layout description is malformed: {error}") from error


def _spec_of(row: object) -> TensorSpec:
    match row:
        case [str(name), str(dtype), list(shape), bool(trainable)] if (
            len(name) <= MAX_NAME_CHARACTERS
            and len(shape) <= MAX_DIMENSIONS
            and all(type(size) is int and 0 <= size <= MAX_BLOB_BYTES for size in shape)
        ):
            spec = TensorSpec(name, dtype, tuple(shape), trainable)
            if spec.size_bytes > MAX_BLOB_BYTES:
                raise ValueError(f"tensor {name!r} is too large")
            return spec
        case _:
            raise ValueError(f"not a tensor: {str(row)[:80]}")


def allocate(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return an uninitialized buffer whose first byte is 64-byte aligned."""
    raw = np.empty(size_bytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size_bytes]


class Tensors(Mapping[str, Array]):
    """A named set of arrays over one buffer that holds exactly one blob.

    Indexing by name gives a view, bf16 tensors as their raw uint16. Treat published tensors as
    immutable: others may be fetching the very bytes.

    Attributes:
        layout: Names, types, shapes and offsets.
        buffer: The blob. Shape (layout.size_bytes,), uint8.
    """

    __slots__ = ("buffer", "layout")

    def __init__(self, layout: Layout, buffer: npt.NDArray[np.uint8]) -> None:
        if buffer.shape != (layout.size_bytes,) or buffer.dtype != np.uint8:
            raise LocalProtocolError(
                f"a blob of this layout has {layout.size_bytes} bytes, not {buffer.nbytes}"
            )
        self.layout = layout
        self.buffer = buffer

    @classmethod
    def zeros(cls, layout: Layout) -> Tensors:
        """Return tensors of zeros."""
        buffer = allocate(layout.size_bytes)
        buffer.fill(0)
        return cls(layout, buffer)

    @classmethod
    def of(cls, layout: Layout, arrays: Mapping[str, Array]) -> Tensors:
        """Copy arrays of any strides into a new blob.

        Raises:
            LocalProtocolError: A name, type or shape differs from the layout.
        """
        if arrays.keys() != layout.index.keys():
            odd = sorted(arrays.keys() ^ layout.index.keys())
            raise LocalProtocolError(f"these tensors are on one side only: {odd[:5]}")
        tensors = cls.zeros(layout)
        for name, target in tensors.items():
            source = arrays[name]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise LocalProtocolError(
                    f"tensor {name!r} is {source.dtype}{list(source.shape)}, "
                    f"the layout says {target.dtype}{list(target.shape)}"
                )
            target[...] = source
        return tensors

    def __getitem__(self, name: str) -> Array:
        position = self.layout.index[name]
        spec, offset = self.layout.specs[position], self.layout.offsets[position]
        raw = self.buffer[offset : offset + spec.size_bytes]
        return raw.view(_NUMPY_DTYPES[spec.dtype]).reshape(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.index)

    def __len__(self) -> int:
        return len(self.layout.specs)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tensors)
            and self.layout == other.layout
            and np.array_equal(self.buffer, other.buffer)
        )

    __hash__ = None  # type: ignore[assignment]  # the buffer may be written to

    def __repr__(self) -> str:
        digest = hashlib.blake2b(self.buffer.data, digest_size=8).hexdigest()
        return f"Tensors({len(self)} tensors, {self.layout.size_bytes} bytes, {digest})"

    def as_f32(self, name: str) -> npt.NDArray[np.float32]:
        """Return a floating-point tensor's values in f32: a view where they are f32 already."""
        array = self[name]
        if self._dtype_of(name) == "bf16":  # the upper half of an f32
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32, copy=False)

    def set_f32(self, name: str, values: npt.NDArray[np.float32]) -> None:
        """Write f32 values into a floating-point tensor, rounded to its type."""
        if self._dtype_of(name) == "bf16":  # to the nearest, ties to even
            bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            self[name][...] = rounded.astype(np.uint16)
        else:
            self[name][...] = values

    def _dtype_of(self, name: str) -> str:
        return self.layout.specs[self.layout.index[name]].dtype

    def flat_f32(self) -> npt.NDArray[np.float32]:
        """View an all-f32 blob, such as a gradient, as one vector; the zero gaps are in it.

        Raises:
            LocalProtocolError: Some tensor isn't f32.
        """
        if not self.layout.is_f32:
            raise LocalProtocolError("only tensors that are all f32 can be viewed as one vector")
        return self.buffer.view(np.float32)

    def check_received(self) -> None:
        """Check a blob that came from a peer: gaps zero, numbers finite, booleans 0 or 1.

        Raises:
            RemoteProtocolError: It names the first tensor at fault.
        """
        layout = self.layout
        ends = (*layout.offsets, layout.size_bytes)[1:]
        for spec, offset, end in zip(layout.specs, layout.offsets, ends, strict=True):
            used = offset + spec.size_bytes
            if used < end and self.buffer[used:end].any():
                raise RemoteProtocolError(f"tensor {spec.name!r} is followed by stray bytes")
        if layout.is_f32 and _is_finite(self.flat_f32()):
            return  # one pass over the whole blob instead of one for each tensor
        for spec in layout.specs:
            fault = _fault_of(self[spec.name], spec.dtype)
            if fault:
                raise RemoteProtocolError(f"tensor {spec.name!r} {fault}")


def _is_finite(array: npt.NDArray[Any]) -> bool:
    """One pass that allocates nothing; it overflows only for huge values, then look again."""
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(flat, flat))) or bool(np.isfinite(flat).all())


def _fault_of(array: Array, dtype: str) -> str:
    """Say what is wrong with the values of a received array, or nothing."""
    finite = True
    if dtype == "bf16":  # all exponent bits set: infinite or not a number
        finite = not bool(((array.view(np.uint16) & 0x7F80) == 0x7F80).any())
    elif dtype in ("f32", "f64"):
        finite = _is_finite(array)
    elif dtype == "f16":
        finite = bool(np.isfinite(array).all())
    elif dtype == "bool" and bool((array.view(np.uint8) > 1).any()):
        return "holds a boolean that is neither 0 nor 1"
    return "" if finite else "holds a number that is not finite"
