"""Send a peer as many wrong messages as it takes: with an allowed key, or with a key nobody knows.

Usage: flooder.py ENDPOINT SERVER_KEY NUM_MESSAGES SECONDS [SECRET_KEY_FILE]
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from protocol.codec import MAX_HEADER_BYTES, encode
from protocol.identity import KeyPair, generate_key_pair, read_key_pair
from protocol.messages import MESSAGES, ChunkRequest, GradientChunk, ModelRequest, Ping

BATCH = 1000
REDIAL_MS = 100


def wrong_messages(rng: random.Random) -> Iterator[Sequence[bytes]]:
    """Yield messages without end: malformed, cut short, out of order, too large, or replayed."""
    right = [
        [bytes(frame) for frame in encode(message, body)]
        for message, body in (
            (Ping(request_id=1), None),
            (ModelRequest(request_id=2, have=None, accept_bytes=1 << 20), None),
            (ChunkRequest(request_id=3, transfer_id=2, offset=0, length=1 << 20), None),
            (GradientChunk(request_id=4, transfer_id=9, offset=1 << 40), b"more"),
        )
    ]
    while True:
        frames = rng.choice(right)
        match rng.randrange(6):
            case 0:
                yield [b"CO\x01" + bytes((rng.randrange(len(MESSAGES) + 3),)), rng.randbytes(40)]
            case 1:
                yield [frame[: rng.randrange(len(frame) + 1)] for frame in frames]
            case 2:
                yield frames[::-1]
            case 3:
                yield [frames[0], bytes(MAX_HEADER_BYTES + 1)]
            case 4:
                yield frames * 3
            case _:
                yield frames


def main(
    endpoint: str, server_key: str, num_messages: int, seconds: float, key_file: Path | None
) -> None:
    """Send until there were enough messages, or for so long; dial again whenever cut off."""
    pair = generate_key_pair() if key_file is None else read_key_pair(key_file)
    context = zmq.Context()
    messages, deadline = wrong_messages(random.Random(0)), time.monotonic() + seconds
    sent = dials = 0
    while sent < num_messages and time.monotonic() < deadline:
        dials += 1
        with dial(context, endpoint, pair, server_key) as socket:
            while sent < num_messages and socket.poll(REDIAL_MS, zmq.POLLOUT):
                with suppress(zmq.Again):  # cut off in the middle of a message
                    socket.send_multipart(next(messages), zmq.DONTWAIT)
                    sent += 1
                while socket.poll(0):
                    socket.recv_multipart()
            socket.linger = 1000 if sent == num_messages else 0
    print(json.dumps({"sent": sent, "dials": dials}))
    context.term()


def dial(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, pair: KeyPair, server_key: str
) -> zmq.Socket[bytes]:
    """Connect once; what is sent is written only while the door is open."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = BATCH
    socket.immediate = 1
    socket.reconnect_ivl = -1
    socket.curve_publickey = pair.public_key.encode()
    socket.curve_secretkey = pair.secret_key.encode()
    socket.curve_serverkey = server_key.encode()
    socket.connect(endpoint)
    return socket


if __name__ == "__main__":
    endpoint, server_key, num_messages, seconds, *secret = sys.argv[1:]
    key_file = Path(secret[0]) if secret else None
    main(endpoint, server_key, int(num_messages), float(seconds), key_file)
