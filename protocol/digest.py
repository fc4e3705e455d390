"""The digest of bytes: it finds faults of assembly, while CURVE is what authenticates."""

from __future__ import annotations

import xxhash

from protocol.codec import Buffer
from protocol.errors import RemoteProtocolError

Hasher = xxhash.xxh3_64


def digest_of(data: Buffer) -> str:
    """Return XXH3-64 in hex."""
    return xxhash.xxh3_64_hexdigest(data)


def check_digest(what: str, digest: str, promised: str | None) -> None:
    """Check that what has arrived is what was announced.

    Raises:
        RemoteProtocolError: It has another digest.
    """
    if digest != promised:
        raise RemoteProtocolError(f"{what} has the digest {digest}, not {promised} as announced")
