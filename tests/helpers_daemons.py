"""What the daemon tests share: daemons with real learners over memory transports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from helpers import Participant, make_participants

from peer.algorithm import AlgorithmSettings
from peer.core import PeerCore
from peer.daemon import Daemon, RoundReport
from peer.data import Dataset
from peer.pace import FreeRunning, Pace
from peer.sources import load_source
from protocol.messages import PeerId
from protocol.transport.interface import Address
from protocol.transport.memory import MemoryNetwork, MemoryTransport
from sim.partition import PartitionSettings, partition

DEADLINE_S = 60.0
FETCH_S = 2.0  # long beside a round's work, also on a busy machine


@dataclass
class Member:
    participant: Participant
    daemon: Daemon
    transport: MemoryTransport
    reports: list[RoundReport] = field(default_factory=list)
    events: list[object] = field(default_factory=list)


def digits(peers: int) -> list[Dataset]:
    settings = PartitionSettings(
        kind="permuted", groups=min(2, peers), min_examples=30, max_examples=40
    )
    slices = partition(load_source("digits"), peers, settings, np.random.default_rng(0))
    return [part.dataset for part in slices]


def make_members(
    network: MemoryNetwork,
    peers: int = 4,
    rounds: int | None = 20,
    *,
    settings: AlgorithmSettings | None = None,
    pace_of: Callable[[PeerId], Pace] = lambda each: FreeRunning(),
) -> dict[PeerId, Member]:
    settings = settings or AlgorithmSettings()
    participants = make_participants(
        digits(peers), model="logistic", rounds=rounds, settings=settings
    )
    return members_of(participants, network, pace_of, settings)


def members_of(
    participants: Mapping[PeerId, Participant],
    network: MemoryNetwork,
    pace_of: Callable[[PeerId], Pace],
    settings: AlgorithmSettings,
) -> dict[PeerId, Member]:
    members: dict[PeerId, Member] = {}
    for each, participant in participants.items():
        daemon = Daemon(
            peer_id=each,
            core=participant.core,
            learner=participant.learner,
            labels=participant.learner.measured_labels,
            fetch_timeout_s=FETCH_S,
            push_timeout_s=FETCH_S,
            pace=pace_of(each),
            on_round=lambda report, each=each: members[each].reports.append(report),
        )
        transport = MemoryTransport(
            network=network,
            peer_id=each,
            layout=participant.learner.layout,
            task=participant.learner.task,
            listener=daemon,
            bits=settings.bits,
            initial=participant.learner.parameters() if settings.codes_first_models else None,
        )
        members[each] = Member(participant, daemon, transport)
        record_events(participant.core, members[each].events)
    return members


def record_events(core: PeerCore, events: list[object]) -> None:
    """Keep what goes into a core and what comes out, for a replay."""
    handle = core.handle

    def recording(event):
        effects = handle(event)
        events.append((event, effects))
        return effects

    core.handle = recording  # type: ignore[method-assign]


async def start(members: dict[PeerId, Member]) -> None:
    addresses = {
        each: Address(name=each, endpoint="tcp://127.0.0.1:1", public_key="x") for each in members
    }
    for member in members.values():
        await member.transport.start()
        member.transport.set_neighbors(addresses)
    await asyncio.sleep(0)  # the transports report their neighbors on the next turn of the loop


async def until(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for has no event of its own."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def run_all(members: dict[PeerId, Member], during=None) -> None:
    """Run every daemon until all have finished, then stop them."""
    await start(members)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        for member in members.values():
            tasks.create_task(member.daemon.run(member.transport))
        if during is not None:
            await during()
        for member in members.values():
            await member.daemon.finished.wait()
        for member in members.values():
            member.daemon.stop()
    for member in members.values():
        await member.transport.close()
