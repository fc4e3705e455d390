"""Send a peer as many wrong messages as it takes: with an allowed key, or with a key nobody knows.

Usage: flooder.py ENDPOINT SERVER_KEY NUM_MESSAGES [SECRET_KEY_FILE]
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from protocol.codec import MAX_HEADER_BYTES, encode
from protocol.identity import generate_key_pair, read_key_pair
from protocol.messages import MESSAGES, ChunkRequest, GradientChunk, ModelRequest, Ping

BATCH = 1000
GIVE_UP_S = 10.0


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


def main(endpoint: str, server_key: str, num_messages: int, key_file: Path | None) -> None:
    pair = generate_key_pair() if key_file is None else read_key_pair(key_file)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = BATCH
    socket.immediate = 1  # nothing is written while the door is shut
    socket.curve_publickey = pair.public_key.encode()
    socket.curve_secretkey = pair.secret_key.encode()
    socket.curve_serverkey = server_key.encode()
    socket.connect(endpoint)
    messages, sent, waiting_since = wrong_messages(random.Random(0)), 0, time.monotonic()
    while sent < num_messages and time.monotonic() - waiting_since < GIVE_UP_S:
        if socket.poll(100, zmq.POLLOUT):
            with suppress(zmq.Again):  # shut in the middle of a message
                socket.send_multipart(next(messages), zmq.DONTWAIT)
                sent, waiting_since = sent + 1, time.monotonic()
        while socket.poll(0):
            socket.recv_multipart()
    print(sent)
    context.destroy(linger=0 if key_file is None else 1000)


if __name__ == "__main__":
    secret = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), secret)
