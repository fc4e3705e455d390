"""On every transport coded models arrive bit by bit, gradients make up for rounding, bytes fall."""

from __future__ import annotations

import asyncio
import functools
import pkgutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers_transport import (
    ALL_TYPES,
    DEADLINE_S,
    EMPTY,
    LARGE,
    SMALL,
    MemorySwarm,
    Peer,
    Swarm,
    ZeroMQSwarm,
    as_delivered,
    filled,
    gradient,
    introduce,
    snapshot,
)

from protocol.editions import publish
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.lowbit import Bits
from protocol.messages import ModelSnapshot, Version
from protocol.tensors import Layout, Tensors, TensorSpec

KINDS = [MemorySwarm, ZeroMQSwarm]
FOUR_MB = Layout(
    [TensorSpec("body.weight", "f32", (1000, 1000)), TensorSpec("body.bias", "f32", (1000,))]
)


@pytest.fixture(params=KINDS)
async def swarm(request: pytest.FixtureRequest) -> AsyncIterator[Swarm]:
    made: Swarm = request.param()
    made.bits = 4
    yield made
    async with asyncio.timeout(DEADLINE_S):
        await made.close()


@pytest.fixture(params=[4, 8])
def bits(request: pytest.FixtureRequest, swarm: Swarm) -> Bits:
    swarm.bits = request.param
    return request.param


async def pair(swarm: Swarm, layout: Layout) -> tuple[Peer, Peer]:
    one, two = await swarm.add(layout), await swarm.add(layout)
    introduce(one, two)
    return one, two


def training(layout: Layout, rounds: int, incarnation: int = 1) -> Sequence[ModelSnapshot]:
    """What an owner publishes that trains: every number moves a little in every round."""
    rng, tensors = np.random.default_rng(incarnation), filled(layout, seed=incarnation)
    made = []
    for number in range(rounds):
        version = Version(incarnation, number)
        made.append(ModelSnapshot(version=version, tensors=Tensors.of(layout, dict(tensors))))
        for spec, array in zip(layout.specs, tensors.values(), strict=True):
            if spec.dtype == "f32":
                array += 0.01 * rng.standard_normal(spec.shape, dtype=np.float32)
            elif spec.dtype == "i64":
                array += 1
    return made


async def fetch(one: Peer, two: Peer, have: ModelSnapshot | None = None) -> ModelSnapshot:
    fetched = await one.transport.fetch(two.peer_id, have, DEADLINE_S)
    assert fetched is not None
    return fetched


@pytest.mark.parametrize("layout", [SMALL, FOUR_MB, LARGE, ALL_TYPES, EMPTY])
async def test_whatever_versions_a_reader_missed_it_holds_the_public_copy_bit_by_bit(
    swarm: Swarm, bits: Bits, layout: Layout
) -> None:
    reads = ["1111111", "1010101", "1001001", "1000100", "1000010", "0010000", "0000001"]
    owner, *readers = [await swarm.add(layout) for _ in range(1 + len(reads))]
    introduce(owner, *readers)
    held: list[ModelSnapshot | None] = [None] * len(reads)
    for number, published in enumerate(training(layout, 7)):
        owner.transport.publish(published)
        for index, reader in enumerate(readers):
            if reads[index][number] == "1":
                held[index] = fetched = await fetch(reader, owner, held[index])
                public = swarm.public(owner)
                assert fetched.version == public.version == published.version
                assert fetched.tensors.buffer.tobytes() == public.tensors.buffer.tobytes()
                assert fetched.tensors.buffer.flags.writeable
        for name in layout.uncoded.index:
            assert public.tensors[name].tobytes() == published.tensors[name].tobytes()


@pytest.mark.parametrize("width", [None, 4, 8])
async def test_a_difference_takes_a_seventh_of_the_model_or_less_and_a_whole_copy_half(
    swarm: Swarm, width: Bits | None
) -> None:
    swarm.bits = width
    one, two = await pair(swarm, FOUR_MB)
    first, second = training(FOUR_MB, 2)
    whole, counters = FOUR_MB.size_bytes, one.transport.counters
    two.transport.publish(first)
    held = await fetch(one, two)
    copied = counters.bytes_received
    two.transport.publish(second)
    await fetch(one, two, held)
    difference = counters.bytes_received - copied
    if width is None:
        assert whole <= copied < 1.01 * whole
        assert whole <= difference < 1.01 * whole
    else:
        assert copied < 0.51 * whole
        assert difference < whole / {4: 7, 8: 3.5}[width]


async def test_a_first_model_is_a_difference_for_who_began_with_the_same_one(
    swarm: Swarm, bits: Bits
) -> None:
    first, second = training(FOUR_MB, 2)
    ours, elsewhere = first.tensors, filled(FOUR_MB, seed=9)
    peers = []
    for swarm.initial in (ours, ours, elsewhere, None):
        peers.append(await swarm.add(FOUR_MB))
    introduce(*peers)
    owner, friend, stranger, blank = peers
    owner.transport.publish(replace(second, version=first.version))
    whole = FOUR_MB.size_bytes
    for reader, most in ((friend, whole / {4: 7, 8: 3.5}[bits]), (stranger, 0.51 * whole)):
        fetched = await fetch(reader, owner)
        assert fetched.tensors == swarm.public(owner).tensors
        assert reader.transport.counters.bytes_received < most
    copied = stranger.transport.counters.bytes_received
    assert copied > 0.49 * whole
    assert (await fetch(blank, owner)).tensors == swarm.public(owner).tensors
    # The next one is a difference to this one, and to the first for who comes late.
    owner.transport.publish(second)
    before = friend.transport.counters.bytes_received
    late = await fetch(friend, owner)
    assert late.tensors == swarm.public(owner).tensors
    assert friend.transport.counters.bytes_received - before < 0.98 * copied


async def test_a_gradient_takes_a_seventh_of_its_numbers_in_f32_or_less(swarm: Swarm) -> None:
    one, two = await pair(swarm, FOUR_MB)
    two.transport.publish(snapshot(FOUR_MB))
    await fetch(one, two)
    before = one.transport.counters.bytes_sent
    await one.transport.push(two.peer_id, gradient(FOUR_MB, one.peer_id), DEADLINE_S)
    assert one.transport.counters.bytes_sent - before < FOUR_MB.size_bytes / 7


async def test_what_rounding_takes_from_a_gradient_comes_with_the_next(
    swarm: Swarm, bits: Bits
) -> None:
    one, two, three = [await swarm.add(SMALL) for _ in range(3)]
    introduce(one, two, three)
    update = gradient(SMALL, one.peer_id)
    true = update.gradient.flat_f32().astype(np.float64)
    total = np.zeros_like(true)
    for count in range(1, 21):
        for other in (two, three):
            await one.transport.push(other.peer_id, replace(update, sender_round=count), DEADLINE_S)
        arrived = two.listener.gradients[-1].gradient
        assert arrived == three.listener.gradients[-1].gradient
        total += arrived.flat_f32()
        step = np.abs(true).max() * 1.2 / {4: 7, 8: 127}[bits]
        assert np.abs(total - count * true).max() <= step / 2
    first, last = (two.listener.gradients[at].gradient for at in (0, -1))
    assert first == as_delivered(update, bits)
    assert first != last


async def test_a_receiver_that_was_away_is_owed_nothing(swarm: Swarm) -> None:
    one, two = await pair(swarm, SMALL)
    update = gradient(SMALL, one.peer_id)
    await one.transport.push(two.peer_id, update, DEADLINE_S)
    await one.transport.push(two.peer_id, update, DEADLINE_S)
    assert two.listener.gradients[1].gradient != two.listener.gradients[0].gradient
    await swarm.kill(two)
    await one.listener.until_neighbors()
    await swarm.revive(two)
    await one.listener.until_neighbors(two)
    await one.transport.push(two.peer_id, update, DEADLINE_S)
    assert two.listener.gradients[2].gradient == two.listener.gradients[0].gradient


async def test_an_owner_that_starts_again_is_read_from_a_whole_copy(swarm: Swarm) -> None:
    one, two = await pair(swarm, SMALL)
    held = None
    for published in training(SMALL, 3):
        two.transport.publish(published)
        held = await fetch(one, two, held)
    await swarm.kill(two)
    await one.listener.until_neighbors()
    await swarm.revive(two)
    await one.listener.until_neighbors(two)
    for published in training(SMALL, 3, incarnation=2):
        two.transport.publish(published)
        held = await fetch(one, two, held)
        assert held.version == published.version
        assert held.tensors == swarm.public(two).tensors


async def test_an_owner_that_counts_versions_anew_is_never_misread_and_soon_read_again() -> None:
    """Its state was lost, its key was not: what others hold has versions that it uses again."""
    swarm = ZeroMQSwarm(bits=4)
    one, two = await pair(swarm, SMALL)
    held = None
    for published in training(SMALL, 3):
        two.transport.publish(published)
        held = await fetch(one, two, held)
    await swarm.kill(two)
    await one.listener.until_neighbors()
    await swarm.revive(two)
    await one.listener.until_neighbors(two)
    misread = []
    for number in range(7):
        two.transport.publish(snapshot(SMALL, number, seed=50 + number))
        if number > 2:
            try:
                held = await fetch(one, two, held)
            except RemoteProtocolError as error:
                misread.append(str(error))
            else:
                assert held.tensors == swarm.public(two).tensors
    assert held is not None
    assert held.version == Version(1, 6)
    assert len(misread) == 3
    assert all("what it leads to has the digest" in error for error in misread)
    await swarm.close()


async def test_peers_of_different_codecs_read_each_other(swarm: Swarm) -> None:
    peers = []
    for width in (None, 4, 8):
        swarm.bits = width
        peers.append(await swarm.add(SMALL))
    introduce(*peers)
    held: dict[tuple[str, str], ModelSnapshot] = {}
    for published in training(SMALL, 4):
        for peer in peers:
            peer.transport.publish(published)
        for one in peers:
            for two in peers:
                if one is not two:
                    key = (one.name, two.name)
                    held[key] = await fetch(one, two, held.get(key))
                    assert held[key].tensors == swarm.public(two).tensors
    for number, (one, width) in enumerate(zip(peers, (None, 4, 8), strict=True)):
        update = gradient(SMALL, one.peer_id, sender_round=number)
        for two in peers:
            if one is not two:
                await one.transport.push(two.peer_id, update, DEADLINE_S)
                assert two.listener.gradients[-1].gradient == as_delivered(update, width)


@pytest.mark.parametrize("number", [1e6, np.nan])
async def test_a_model_that_f16_cannot_hold_travels_as_it_is_and_the_next_from_a_whole_copy(
    swarm: Swarm, number: float
) -> None:
    one, two = await pair(swarm, SMALL)
    published = training(SMALL, 5)
    published[2].tensors["head.bias"][3] = number
    held = None
    for model in published:
        two.transport.publish(model)
        if np.isfinite(model.tensors["head.bias"]).all():
            held = await fetch(one, two, held)
            assert held.tensors == swarm.public(two).tensors
    assert held is not None
    assert np.allclose(held.tensors["head.weight"], published[4].tensors["head.weight"], atol=0.01)


async def test_a_gradient_that_cannot_be_coded_travels_as_it_is(swarm: Swarm) -> None:
    one, two = await pair(swarm, SMALL)
    update = gradient(SMALL, one.peer_id)
    update.gradient["head.weight"][0, 0] = 1e30
    await one.transport.push(two.peer_id, update, DEADLINE_S)
    assert two.listener.gradients[0].gradient == update.gradient


async def test_a_model_published_twice_is_one_and_another_of_its_version_starts_anew(
    swarm: Swarm,
) -> None:
    one, two = await pair(swarm, SMALL)
    first, second = training(SMALL, 2)
    for published in (first, second, second):
        two.transport.publish(published)
    held = await fetch(one, two)
    assert held.tensors == swarm.public(two).tensors
    two.transport.publish(snapshot(SMALL, round_number=1, seed=9))
    again = await fetch(one, two)
    assert again.tensors == swarm.public(two).tensors
    assert again.version == held.version
    assert again.tensors != held.tensors


async def test_a_model_of_another_layout_is_nothing_to_build_on(swarm: Swarm) -> None:
    one, two = await pair(swarm, SMALL)
    two.transport.publish(snapshot(SMALL))
    with pytest.raises(LocalProtocolError, match="another layout"):
        await one.transport.fetch(two.peer_id, snapshot(EMPTY), DEADLINE_S)


async def test_a_peer_that_knows_no_codec_gets_the_same_model_and_gradients_as_they_are() -> None:
    swarm = ZeroMQSwarm(bits=4)
    old, new, owner = [await swarm.add(FOUR_MB) for _ in range(3)]
    await swarm.kill(old)  # and start it as it was before there were codecs
    old.transport = swarm.build(old.name, old.key_pair, FOUR_MB, old.listener, old.address.endpoint)
    old.transport._describe = functools.partial(old.transport._describe, features=())
    await old.transport.start()
    introduce(old, new, owner)
    held_old = held_new = None
    for published in training(FOUR_MB, 3):
        owner.transport.publish(published)
        before = old.transport.counters.bytes_received
        held_old, held_new = await fetch(old, owner, held_old), await fetch(new, owner, held_new)
        assert held_old.tensors == held_new.tensors == swarm.public(owner).tensors
        assert old.transport.counters.bytes_received - before > FOUR_MB.size_bytes
    update = gradient(FOUR_MB, owner.peer_id)
    for other, width in ((old, None), (new, 4)):
        await owner.transport.push(other.peer_id, update, DEADLINE_S)
        assert other.listener.gradients[-1].gradient == as_delivered(update, width)
    # It can't know that it would be understood: what it sends is not coded, either.
    await old.transport.push(new.peer_id, update, DEADLINE_S)
    assert new.listener.gradients[-1].gradient == update.gradient
    await swarm.close()


async def test_a_version_that_is_succeeded_while_another_is_coded_is_never_coded() -> None:
    swarm = ZeroMQSwarm(bits=4)
    one, two = await pair(swarm, LARGE)  # large enough to be coded in the worker
    published = training(LARGE, 4)
    for model in published:
        two.transport.publish(model)
    fetched = await fetch(one, two)
    assert fetched.version == published[-1].version
    first = publish(published[0], 4)
    assert fetched.tensors == publish(published[-1], 4, first).snapshot.tensors
    await swarm.close()


@pytest.mark.parametrize(("layout", "thread"), [(LARGE, "verify"), (SMALL, "MainThread")])
async def test_what_takes_long_is_done_in_the_worker_and_only_that(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, thread: str
) -> None:
    done: dict[str, str] = {}
    for place in ("outbox.publish", "pull.read", "asking.pack", "inbox.unpack"):

        def noted(*args: Any, work: Callable[..., Any], place: str) -> Any:
            done[place] = threading.current_thread().name
            return work(*args)

        name = f"protocol.transport.{place}"
        work = pkgutil.resolve_name(name)
        monkeypatch.setattr(name, functools.partial(noted, work=work, place=place))
    swarm = ZeroMQSwarm(bits=4)
    one, two = await pair(swarm, layout)
    two.transport.publish(snapshot(layout))
    await fetch(one, two)
    await one.transport.push(two.peer_id, gradient(layout, one.peer_id), DEADLINE_S)
    await swarm.close()
    assert len(done) == 4
    assert all(name.startswith(thread) for name in done.values()), done
