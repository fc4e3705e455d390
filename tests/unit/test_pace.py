"""The paces of a daemon: alone with a shortest round, or in step with others."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from helpers import peer_id
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from peer.pace import FreeRunning, Lockstep

DEADLINE_S = 20.0


async def test_a_free_round_takes_at_least_its_shortest_time_and_waits_for_nobody():
    pace = FreeRunning(min_round_s=0.05)
    pace.begin(0)
    began_s = time.monotonic()
    await pace.fetching(0)
    assert time.monotonic() - began_s < 0.05
    never = asyncio.get_running_loop().create_task(asyncio.Event().wait())
    await pace.closing(0, [never])
    assert time.monotonic() - began_s >= 0.05
    never.cancel()


@hypothesis_settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=5), st.integers(0, 2**32))
def test_in_step_nobody_fetches_or_closes_before_all_that_still_take_part(rounds, seed):
    """Each peer does its own number of rounds, with pauses of any order, and then leaves."""
    begun, ready = dict.fromkeys(range(len(rounds)), -1), dict.fromkeys(range(len(rounds)), -1)
    done, rng = set(), np.random.default_rng(seed)

    async def live(number: int, lockstep: Lockstep) -> None:
        pace = lockstep.of(peer_id(number))
        for round_number in range(rounds[number]):
            begun[number] = round_number
            pace.begin(round_number)
            await pauses()
            await pace.fetching(round_number)
            assert all(begun[n] >= round_number for n in begun.keys() - done)
            pushing = [asyncio.create_task(pauses()) for _ in range(int(rng.integers(3)))]
            ready[number] = round_number
            await pace.closing(round_number, pushing)
            assert all(push.done() for push in pushing)
            assert all(ready[n] >= round_number for n in ready.keys() - done)
        done.add(number)
        pace.leave()

    async def pauses() -> None:
        for _ in range(int(rng.integers(6))):
            await asyncio.sleep(0)

    async def run() -> None:
        lockstep = Lockstep(peer_id(number) for number in begun)
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            for number in begun:
                tasks.create_task(live(number, lockstep))

    asyncio.run(run())
    assert done == set(begun)
