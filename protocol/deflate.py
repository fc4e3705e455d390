"""Codes made smaller without loss, as raw DEFLATE (RFC 1951).

Most integers of a code are 0 or next to it: DEFLATE takes a half to two thirds of its bytes away.
Only runs of one byte are looked for, and frequent bytes given short names: to search for
longer matches takes ten times as long, and saves no more.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from protocol.codec import Buffer
from protocol.errors import RemoteProtocolError

Bytes = npt.NDArray[np.uint8]

_RAW = -15
_FAST = 1
_MEMORY = 8
_BLOCK_BYTES = 1 << 13
_BLOCK_HEADER_BYTES = 5


def deflate(code: Bytes) -> Bytes:
    """Return a code, deflated. How small it becomes may differ between builds of zlib."""
    deflater = zlib.compressobj(_FAST, zlib.DEFLATED, _RAW, _MEMORY, zlib.Z_RLE)
    return np.frombuffer(deflater.compress(code.data) + deflater.flush(), np.uint8)


def most_deflated(size_bytes: int) -> int:
    """Return how many bytes a deflated code of so many takes at most.

    What can't be made smaller is stored, in blocks that are half as large here as zlib's.
    """
    return size_bytes + _BLOCK_HEADER_BYTES * (2 + size_bytes // _BLOCK_BYTES)


def inflate(blob: Buffer, size_bytes: int) -> tuple[bytes, bytes]:
    """Return the code at the beginning of a blob, and the bytes after it.

    Args:
        blob: What came from a peer; nothing about it is trusted.
        size_bytes: Of the code: no more memory than that is taken for it, whatever the blob says.

    Raises:
        RemoteProtocolError: No deflated code of this size is there.
    """
    inflater = zlib.decompressobj(_RAW)
    try:
        code = inflater.decompress(blob, size_bytes + 1)
    except zlib.error as error:
        raise RemoteProtocolError(f"what should be deflated is not: {error}") from error
    if not inflater.eof or len(code) != size_bytes:
        size = f"{len(code)} bytes" if inflater.eof else "too much, or cut short"
        raise RemoteProtocolError(f"a code that inflates to {size}: it takes {size_bytes}")
    return code, inflater.unused_data
