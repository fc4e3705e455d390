"""How fast a model is pulled between two processes: beside bare pyzmq, beside memcpy, and coded.

Run as `python tests/bench/bench_transport.py`; `rows` gives the figures to a larger benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from protocol.identity import AllowList, KeyPair, generate_key_pair
from protocol.lowbit import Bits
from protocol.messages import GradientUpdate, ModelSnapshot, PeerId, Version
from protocol.tensors import Layout, Tensors, TensorSpec
from protocol.transport.interface import Address
from protocol.transport.window import MAX_CHUNK_BYTES
from protocol.transport.zeromq import ZeroMQTransport

COMMAND = "make bench only=transport"
WINDOW_CHUNKS = 4
REPEATS = {0.47: 201, 4: 101, 40: 31}
CODED_MB = 4
CODED_REPEATS = 41
DEADLINE_S = 30.0


class Silent:
    """A listener that takes everything and does nothing."""

    def gradient_arrived(self, update: GradientUpdate) -> None: ...

    def model_asked(self, peer_id: PeerId) -> None: ...

    def neighbors_changed(self, neighbors: frozenset[PeerId]) -> None: ...


def model(size_mb: float) -> Tensors:
    """Return a model of this size: one large matrix and a few small tensors, as networks have."""
    count = int(size_mb * 1e6 / 4) - 1000
    layout = Layout(
        [
            TensorSpec("body.weight", "f32", (count // 100, 100)),
            TensorSpec("head.weight", "f32", (90, 10)),
            TensorSpec("head.bias", "f32", (10,)),
        ]
    )
    tensors, rng = Tensors.zeros(layout), np.random.default_rng(0)
    for array in tensors.values():
        array[...] = rng.standard_normal(array.shape, dtype=np.float32)
    return tensors


def trained(tensors: Tensors, number: int) -> ModelSnapshot:
    """Return what a model has become after some training: every number has moved a little."""
    rng = np.random.default_rng(number)
    moved = {
        name: array + 0.001 * rng.standard_normal(array.shape, dtype=np.float32)
        for name, array in tensors.items()
    }
    return ModelSnapshot(version=Version(1, number), tensors=Tensors.of(tensors.layout, moved))


def transport(
    pair: KeyPair, allowed: Path, layout: Layout, bits: Bits | None = None
) -> ZeroMQTransport:
    return ZeroMQTransport(
        key_pair=pair,
        allow_list=AllowList(allowed),
        listen="tcp://127.0.0.1:0",
        advertise=None,
        federation_id="bench",
        name="bench",
        incarnation=1,
        layout=layout,
        task="bench",
        listener=Silent(),
        bits=bits,
    )


def serve_ours(
    pipe: Pipe, pair: KeyPair, allowed: Path, size_mb: float, bits: Bits | None = None
) -> None:
    """Serve a model with our transport, a newer one whenever asked, until the pipe says stop."""

    async def serve() -> None:
        loop, tensors = asyncio.get_running_loop(), model(size_mb)
        ours = transport(pair, allowed, tensors.layout, bits)
        endpoint = await ours.start()
        ours.publish(ModelSnapshot(version=Version(1, 0), tensors=tensors))
        pipe.send(endpoint)
        while (order := await loop.run_in_executor(None, pipe.recv)) != "stop":
            newer = trained(tensors, order)
            began = time.perf_counter()
            ours.publish(newer)
            await loop.run_in_executor(ours._worker, int)  # waits its turn: coding comes first
            pipe.send(seconds(began))
        await ours.close()

    asyncio.run(serve())


def serve_bare(pipe: Pipe, pair: KeyPair, size_mb: float) -> None:
    """Serve the same bytes with nothing but a CURVE ROUTER, without a copy."""
    blob = memoryview(model(size_mb).buffer)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.curve_server = True
        router.curve_secretkey = pair.secret_key.encode()
        router.linger = 0
        pipe.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        while True:
            route, request = router.recv_multipart()
            if request == b"stop":
                return
            offset = int.from_bytes(request, "little")
            router.send(route, zmq.SNDMORE)
            router.send(blob[offset : offset + MAX_CHUNK_BYTES], copy=False)


def pull_bare(dealer: zmq.Socket[bytes], buffer: np.ndarray) -> None:
    """Pull by the same chunks and window into memory that is there already."""
    size, asked = len(buffer), 0
    for _ in range(WINDOW_CHUNKS):
        if asked < size:
            dealer.send(asked.to_bytes(8, "little"))
            asked += MAX_CHUNK_BYTES
    for offset in range(0, size, MAX_CHUNK_BYTES):
        frame = dealer.recv(copy=False)
        if asked < size:
            dealer.send(asked.to_bytes(8, "little"))
            asked += MAX_CHUNK_BYTES
        buffer[offset : offset + len(frame)] = np.frombuffer(frame.buffer, np.uint8)


def seconds(began: float) -> float:
    return time.perf_counter() - began


async def measure(size_mb: float, ours: str, bare: str, pairs: list[KeyPair], allowed: Path) -> Any:
    """Pull in turns and return the seconds of each: ours, bare, memcpy."""
    tensors = model(size_mb)
    buffer, copied = np.zeros_like(tensors.buffer), np.zeros_like(tensors.buffer)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.curve_publickey, dealer.curve_secretkey = (
        key.encode() for key in (pairs[1].public_key, pairs[1].secret_key)
    )
    dealer.curve_serverkey = pairs[0].public_key.encode()
    dealer.connect(bare)
    mine = transport(pairs[1], allowed, tensors.layout)
    await mine.start()
    owner = pairs[0].peer_id
    address = Address(name="owner", endpoint=ours, public_key=pairs[0].public_key)
    mine.set_neighbors({owner: address})
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for repeat in range(-5, REPEATS[size_mb]):
        began = time.perf_counter()
        snapshot = await mine.fetch(owner, None, DEADLINE_S)
        ours_s = seconds(began)
        began = time.perf_counter()
        pull_bare(dealer, buffer)
        bare_s = seconds(began)
        began = time.perf_counter()
        np.copyto(copied, buffer)
        copy_s = seconds(began)
        assert snapshot is not None and np.array_equal(snapshot.tensors.buffer, buffer)
        del snapshot
        if repeat >= 0:
            for kept, value in zip(times, (ours_s, bare_s, copy_s), strict=True):
                kept.append(value)
    dealer.send(b"stop")
    await mine.close()
    dealer.close(1000)
    context.term()
    return times


def run_size(size_mb: float) -> list[dict[str, Any]]:
    pairs = [generate_key_pair(), generate_key_pair()]
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        allowed = Path(folder)
        for number, pair in enumerate(pairs):
            (allowed / f"{number}.pub").write_text(pair.public_key)
        ours, ours_theirs = spawn.Pipe()
        bare, bare_theirs = spawn.Pipe()
        processes = [
            spawn.Process(target=serve_ours, args=(ours_theirs, pairs[0], allowed, size_mb)),
            spawn.Process(target=serve_bare, args=(bare_theirs, pairs[0], size_mb)),
        ]
        for process in processes:
            process.start()
        gc.collect()
        times = asyncio.run(measure(size_mb, ours.recv(), bare.recv(), pairs, allowed))
        ours.send("stop")
        for process in processes:
            process.join(10)
    return describe(size_mb, *times)


def row_of(name: str, values: list[float], unit: str, compared_with: str) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {
        "name": name,
        "value": round(middle, 3),
        "spread": [round(low, 3), round(high, 3)],
        "unit": unit,
        "compared_with": compared_with,
        "command": COMMAND,
    }


def describe(size_mb: float, ours: list[float], bare: list[float], copy: list[float]) -> Any:
    def row(name: str, values: list[float], unit: str, compared_with: str) -> dict[str, Any]:
        return row_of(f"{name}, {size_mb:g} MB", values, unit, compared_with)

    def rates(taken: list[float]) -> list[float]:
        return [size_mb / seconds_taken for seconds_taken in taken]

    # Pairs in turns, since the speed of a shared machine drifts by more than what is measured.
    parts = [b / o for o, b in zip(ours, bare, strict=True)]
    pairs = f"{len(ours)} pairs in turns; quartiles"
    return [
        row("pull with CURVE and digest", rates(ours), "MB/s", pairs),
        row("bare pyzmq with CURVE, same chunks", rates(bare), "MB/s", pairs),
        row("pull, part of bare pyzmq's rate", parts, "x", pairs),
        row("memcpy", rates(copy), "MB/s", "the same bytes in memory"),
    ]


async def measure_coded(
    owners: dict[Bits | None, tuple[str, KeyPair, Pipe]], pair: KeyPair, allowed: Path
) -> dict[str, list[float]]:
    """Pull the next version from each owner in turns; return milliseconds and bytes of each."""
    mine = transport(pair, allowed, model(CODED_MB).layout)
    await mine.start()
    mine.set_neighbors(
        {
            keys.peer_id: Address(name=f"{bits}", endpoint=endpoint, public_key=keys.public_key)
            for bits, (endpoint, keys, _) in owners.items()
        }
    )
    held = {bits: await mine.fetch(owners[bits][1].peer_id, None, DEADLINE_S) for bits in owners}
    figures: dict[str, list[float]] = {}
    for repeat in range(1, CODED_REPEATS + 5):
        for bits, (_, keys, pipe) in owners.items():
            pipe.send(repeat)
            coding_ms = 1000 * pipe.recv()
            before, began = mine.counters.bytes_received, time.perf_counter()
            held[bits] = await mine.fetch(keys.peer_id, held[bits], DEADLINE_S)
            pull_ms = 1000 * seconds(began)
            size_bytes = mine.counters.bytes_received - before
            if repeat >= 5:
                name = "f32" if bits is None else f"{bits} bits"
                for what, value in (
                    ("pull", pull_ms),
                    ("publish", coding_ms),
                    ("size", size_bytes),
                ):
                    figures.setdefault(f"{what} as {name}", []).append(value)
    await mine.close()
    return figures


def run_coded() -> list[dict[str, Any]]:
    """Compare pulls of a model that moves on, as it is and as coded differences."""
    mine, spawn = generate_key_pair(), multiprocessing.get_context("spawn")
    owners: dict[Bits | None, tuple[str, KeyPair, Pipe]] = {}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        allowed = Path(folder)
        (allowed / "mine.pub").write_text(mine.public_key)
        widths: tuple[Bits | None, ...] = (None, 8, 4)
        for bits in widths:
            pair, (ours, theirs) = generate_key_pair(), spawn.Pipe()
            (allowed / f"{bits}.pub").write_text(pair.public_key)
            process = spawn.Process(target=serve_ours, args=(theirs, pair, allowed, CODED_MB, bits))
            process.start()
            processes.append(process)
            owners[bits] = (ours.recv(), pair, ours)
        figures = asyncio.run(measure_coded(owners, mine, allowed))
        for _, _, pipe in owners.values():
            pipe.send("stop")
        for process in processes:
            process.join(10)
    turns = f"{CODED_REPEATS} versions in turns; quartiles"
    return [
        row_of(f"{name}, {CODED_MB} MB", values, "B" if name.startswith("size") else "ms", turns)
        for name, values in figures.items()
    ]


def rows() -> list[dict[str, Any]]:
    """Return name, value, unit, what it is compared with, and the command, for each figure."""
    return [row for size_mb in REPEATS for row in run_size(size_mb)] + run_coded()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for row in rows():
        print(f"{row['name']:50} {row['value']:10.3f} {row['unit']:6} {row['spread']}")
