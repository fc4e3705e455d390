"""A pull ends with the public copy, whatever a link that keeps the order loses or delays."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from helpers_transport import TASK, snapshot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.handshake import Credentials
from protocol.lowbit import Bits
from protocol.messages import Message, ModelSnapshot, PeerId
from protocol.tensors import Layout, TensorSpec, allocate
from protocol.transport.interface import Address, Counters
from protocol.transport.pull import Pull
from protocol.transport.served import Served
from protocol.transport.settings import TransportSettings
from protocol.transport.window import Window

READER = PeerId("a" * 32)
LAYOUT = Layout(
    [TensorSpec("body", "f32", (700, 500)), TensorSpec("count", "i64", (3,), trainable=False)]
)
QUICK = TransportSettings(offer_timeout_s=0.05, stall_timeout_s=0.05)
CREDENTIALS = Credentials(
    federation_id="home",
    name="ada",
    incarnation=1,
    advertise="tcp://127.0.0.1:1",
    layout=LAYOUT,
    task=TASK,
)


class Visitors:
    """Is not told anything that matters here."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


class Wire:
    """A connection to a real serving side that loses some replies, and never reorders any."""

    def __init__(self, bits: Bits | None, lost: Sequence[bool], late: bool) -> None:
        self.address = Address(name="ada", endpoint="tcp://127.0.0.1:1", public_key="x" * 40)
        self.window = Window()
        self.features: frozenset[str] = frozenset()
        self.offered_bytes: int | None = None
        self.moved_bytes = self.num_requests = 0
        self._ids = itertools.count(10)
        self._lost = iter(lost)
        self._late = late
        self._pending: dict[int, Callable[..., None]] = {}
        self._loop = asyncio.get_running_loop()
        self.served = Served(
            credentials=CREDENTIALS,
            bits=bits,
            origin=None,
            settings=TransportSettings(),
            counters=Counters(),
            visitors=Visitors(),
            offload=self._offload,
            allocate=allocate,
            now=self._loop.time,
        )
        self.served.handle(READER, CREDENTIALS.hello(1), None, lambda *_: None)

    def _offload(self, _: int, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        if self._late:
            self._loop.call_later(0.005, lambda: then(work()))
        else:
            then(work())

    def next_id(self) -> int:
        return next(self._ids)

    def request(self, message: Message, on_reply: Callable[..., None], body: None = None) -> None:
        self._pending[message.request_id] = on_reply
        self.num_requests += 1
        self._loop.call_soon(self.served.handle, READER, message, body, self._reply)

    def _reply(self, message: Message, body: Any) -> None:
        if not next(self._lost, False):
            self._loop.call_soon(self._arrive, message, body)

    def _arrive(self, message: Message, body: Any) -> None:
        self.moved_bytes += 0 if body is None else len(body)
        on_reply = self._pending.pop(message.request_id, None)
        if on_reply is not None:
            on_reply(message, body)

    def cancel(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._pending.pop(request_id, None)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        yield

    def suspect(self, since: float) -> None: ...

    def resumed(self) -> None: ...

    async def back(self) -> bool:
        return True


async def work_here(_: int, work: Callable[[], Any]) -> Any:
    return work()


async def pull(wire: Wire, have: ModelSnapshot | None) -> ModelSnapshot | None:
    connection: Any = wire
    return await Pull(connection, QUICK, LAYOUT, have, None, allocate).run(work_here)


# Only what begins a pull may not be lost: without an offer there is no progress to go on from.
losses = st.lists(st.booleans(), max_size=5).map(lambda lost: [False, *lost])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([None, 4, 8]), losses, st.booleans(), st.integers(0, 3))
def test_a_pull_ends_with_the_public_copy_bit_by_bit(
    bits: Bits | None, lost: list[bool], late: bool, missed: int
) -> None:
    async def run() -> None:
        wire = Wire(bits, (), late)
        wire.served.publish(snapshot(LAYOUT))
        held = await pull(wire, None)
        for number in range(1, missed + 1):
            wire.served.publish(snapshot(LAYOUT, number, seed=number))
            assert await pull(wire, None) is not None  # so that each is coded
        wire._lost = iter(lost)
        fetched = await pull(wire, held)
        public = wire.served.public
        assert public is not None
        assert public.version.round_number == missed
        if missed == 0:
            assert fetched is None
        else:
            assert fetched is not None
            assert fetched.version == public.version
            assert fetched.tensors == public.tensors

    asyncio.run(run())


@pytest.mark.parametrize(("bits", "share"), [(None, 1.0), (4, 0.13), (8, 0.26)])
@pytest.mark.parametrize("late", [False, True])
async def test_asking_before_the_offer_comes_moves_no_byte_too_many(
    bits: Bits | None, share: float, late: bool
) -> None:
    wire = Wire(bits, (), late)
    held = None
    for number in range(2):
        wire.served.publish(snapshot(LAYOUT, number, seed=number))
        before = wire.moved_bytes
        held = await pull(wire, held)
    assert wire.moved_bytes - before <= share * LAYOUT.size_bytes
    assert held is not None
    assert np.array_equal(held.tensors["count"], snapshot(LAYOUT, 1, seed=1).tensors["count"])


async def test_no_more_is_asked_for_than_came_the_last_time() -> None:
    wire = Wire(4, (), late=True)
    wire.served.publish(snapshot(LAYOUT))
    held = await pull(wire, None)
    wire.window = Window(size_bytes=1 << 20)
    requests = []
    for number in range(1, 4):
        wire.served.publish(snapshot(LAYOUT, number, seed=number))
        before = wire.num_requests
        held = await pull(wire, held)
        requests.append(wire.num_requests - before)
    # The first differences come where a copy came before, which took several chunks.
    assert requests[0] > 1
    assert requests[1:] == [1, 1]
