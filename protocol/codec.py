"""Messages to frames and back; the only module that knows msgpack, and every size limit.

A message is two or three frames: 4 bytes (`CO`, wire version, kind), a msgpack header, and for
some kinds one raw body.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import msgspec

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import MESSAGES, WITH_BODY, Message

MAGIC = b"CO"
WIRE_VERSION = 1
MAX_HEADER_BYTES = 16 * 1024
MAX_CHUNK_BYTES = 1 << 20
MAX_LAYOUT_BYTES = MAX_CHUNK_BYTES
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 64 * 1024

Buffer = bytes | bytearray | memoryview

_PREFIXES = {
    message_type: MAGIC + bytes((WIRE_VERSION, kind))
    for kind, message_type in enumerate(MESSAGES, start=1)
}
# The decoder reads a header straight into its type: nothing untyped ever exists.
_DECODERS = {
    prefix: (message_type, msgspec.msgpack.Decoder(message_type), 2 + (message_type in WITH_BODY))
    for message_type, prefix in _PREFIXES.items()
}


def encode(message: Message, body: Buffer | None = None) -> tuple[Buffer, ...]:
    """Return the frames of a message.

    Raises:
        LocalProtocolError: The header or body is too large, or a body is missing or not wanted.
    """
    message_type = type(message)
    if (body is not None) != (message_type in WITH_BODY):
        raise LocalProtocolError(f"{message_type.__name__}: wrong number of frames")
    header = msgpack.packb(msgspec.to_builtins(message))
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"{message_type.__name__}: a header of {len(header)} bytes")
    if body is None:
        return _PREFIXES[message_type], header
    if _size_of(body) > MAX_CHUNK_BYTES:
        raise LocalProtocolError(f"{message_type.__name__}: a body over {MAX_CHUNK_BYTES} bytes")
    return _PREFIXES[message_type], header, body


def decode(frames: Sequence[Buffer]) -> tuple[Message, Buffer | None]:
    """Return the message and its body; whatever the bytes, nothing else than this can come out.

    Raises:
        RemoteProtocolError: The frames are no message of this protocol.
    """
    if not 2 <= len(frames) <= 3:
        raise RemoteProtocolError(f"a message of {len(frames)} frames")
    prefix = bytes(frames[0][:5])
    if prefix not in _DECODERS:
        raise RemoteProtocolError(f"an unknown kind of message: {prefix!r}")
    message_type, decoder, num_frames = _DECODERS[prefix]
    if len(frames) != num_frames:
        raise RemoteProtocolError(f"{message_type.__name__}: {len(frames)} frames")
    if _size_of(frames[1]) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(
            f"{message_type.__name__}: a header over {MAX_HEADER_BYTES} bytes"
        )
    body = frames[2] if num_frames == 3 else None
    if body is not None and _size_of(body) > MAX_CHUNK_BYTES:
        raise RemoteProtocolError(f"{message_type.__name__}: a body over {MAX_CHUNK_BYTES} bytes")
    try:
        return decoder.decode(frames[1]), body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"{message_type.__name__}: {error}") from error


def _size_of(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
