"""A slow, long and lossy link, as TCP shows it to those who talk through it."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

SEGMENT_BYTES = 1448
IN_FLIGHT_BYTES = 512 * 1024


class Link:
    """Passes TCP connections on to an endpoint, at the pace of a link that kernels need netem for.

    Each way has one wire for all connections. A lost segment arrives late by the time after which
    it is sent again, and whatever is behind it on its connection waits, since TCP keeps the order.
    The sender isn't slowed otherwise: what congestion control would do is left out.

    Args:
        endpoint: Where to pass connections on to, on this machine.
        rate: Bytes a second, each way.
        delay_s: How long a segment travels, each way.
        loss: Probability that a segment is lost.
        retransmit_s: How late it is then.
        seed: Which ones are.

    Attributes:
        endpoint: What to dial instead.
        lost: Segments so far.
        silent: Whether nothing passes any more.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        rate: float = 2e6,
        delay_s: float = 0.1,
        loss: float = 0.02,
        retransmit_s: float = 0.4,
        seed: int = 0,
    ) -> None:
        self._target_port = int(endpoint.rpartition(":")[2])
        self._rate = rate
        self._delay_s = delay_s
        self._loss = loss
        self._retransmit_s = retransmit_s
        self._random = random.Random(seed)
        self._free_at = {"up": 0.0, "down": 0.0}
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost = 0
        self.silent = False

    async def __aenter__(self) -> Link:
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        for way, source, sink in (("up", reader, far_writer), ("down", far_reader, writer)):
            under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(
                IN_FLIGHT_BYTES // SEGMENT_BYTES
            )
            self._spawn(self._send(way, source, under_way))
            self._spawn(self._deliver(under_way, sink))

    def _spawn(self, work) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(
        self,
        way: str,
        source: asyncio.StreamReader,
        under_way: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        """Put segments on the wire as they come; an empty one is the end."""
        in_order = 0.0
        data = b"-"
        while data:
            try:
                data = await source.read(SEGMENT_BYTES)
            except ConnectionError:
                data = b""
            self._free_at[way] = max(self._free_at[way], self._loop.time()) + len(data) / self._rate
            arrives = self._free_at[way] + self._delay_s
            if data and self._random.random() < self._loss:
                self.lost += 1
                arrives += self._retransmit_s
            in_order = max(in_order, arrives)
            await under_way.put((in_order, data))

    async def _deliver(
        self, under_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter
    ) -> None:
        data = b"-"
        with suppress(ConnectionError):
            try:
                while data:
                    at, data = await under_way.get()
                    await asyncio.sleep(at - self._loop.time())
                    if not self.silent:
                        sink.write(data)
                        await sink.drain()
            finally:
                sink.transport.abort()
