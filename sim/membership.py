"""The membership of many peers on a virtual clock, with whatever networks and processes do."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.gossip import (
    AllowedChanged,
    Answered,
    Ask,
    Asked,
    Event,
    Failed,
    LeaveRequested,
    MemberChanged,
    MemberForgotten,
    MemberUpdate,
    Misbehaved,
    NobodyFound,
    Reply,
    SeedsChanged,
    Tick,
)
from protocol.membership import Membership
from protocol.membership_settings import MembershipSettings
from protocol.messages import PeerId
from protocol.roster import born
from protocol.transport.interface import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What the network does to messages.

    Attributes:
        loss: Share of messages lost, requests and answers alike.
        delay_s: The least time that a message takes.
        jitter_s: The most that it takes more.
    """

    loss: float = 0.0
    delay_s: float = 0.005
    jitter_s: float = 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What a peer came to believe of another.

    Attributes:
        at_s: When.
        observer: Who.
        member: The update believed.
    """

    at_s: float
    observer: PeerId
    member: MemberUpdate


@dataclass(slots=True, kw_only=True)
class SimulatedMember:
    """A peer of the simulation.

    Attributes:
        address: What it advertises.
        membership: Its view; None while it doesn't run.
        starts: How often it was started.
        paused: Whether it stands still, its messages waiting.
        waiting: What has come meanwhile.
        waiting_for: Numbers of its requests without an answer.
        misbehaved: What it holds against others.
        nobody_found: How often it told that no seed answers.
    """

    address: Address
    membership: Membership | None = None
    starts: int = 0
    paused: bool = False
    waiting: list[Event] = field(default_factory=list)
    waiting_for: set[int] = field(default_factory=set)
    misbehaved: list[Misbehaved] = field(default_factory=list)
    nobody_found: int = 0

    @property
    def running(self) -> Membership:
        """Its view, while it runs."""
        assert self.membership is not None
        return self.membership


def fake_key(index: int) -> str:
    """Return what stands for the public key of a peer here: as long, but of no secret key."""
    return f"{index:040d}"


def id_of(key: str) -> PeerId:
    """Return the id that such a key stands for."""
    return PeerId(hashlib.blake2b(key.encode(), digest_size=16).hexdigest())


class MembershipSimulator:
    """Runs the memberships of many peers; the same seed gives the same events.

    Attributes:
        now_s: The time, from 0.
        sightings: What all came to believe, in order.
        messages: How many were sent.
        members: All peers, by id.
        ids: Their ids, the seeds' first.
        network: What it does to messages; may be replaced at any time.

    Args:
        num_peers: How many there are; none runs before `start`.
        network: What it does to messages.
        settings: Of every peer.
        num_seeds: How many of the first peers all know from the start.
        seed: Decides everything.
    """

    def __init__(
        self,
        num_peers: int,
        network: Network,
        settings: MembershipSettings,
        *,
        num_seeds: int = 3,
        seed: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.sightings: list[Sighting] = []
        self.messages = 0
        self.members: dict[PeerId, SimulatedMember] = {}
        for index in range(num_peers):
            key = fake_key(index)
            address = Address(
                name=f"peer-{index}", endpoint=f"tcp://10.0.0.1:{index}", public_key=key
            )
            self.members[id_of(key)] = SimulatedMember(address=address)
        self.ids = tuple(self.members)
        self._allowed = {peer: each.address.public_key for peer, each in self.members.items()}
        self._seeds = {peer: self.members[peer].address for peer in self.ids[:num_seeds]}
        self.network = network
        self._settings = settings
        self._seed = seed
        self._rng = np.random.default_rng((seed, 0))
        self._side: Mapping[PeerId, int] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._tickets: dict[int, tuple[PeerId, int]] = {}  # ticket -> asker, number
        self._next_ticket = 0

    # What happens to peers

    def start(self, peer_id: PeerId) -> None:
        """Start a peer, for the first time or again: it remembers only how often it was started."""
        member = self.members[peer_id]
        own = born(peer_id, member.address, member.starts)
        member.starts += 1
        rng = np.random.default_rng((self._seed, 1 + self.ids.index(peer_id), member.starts))
        member.membership = Membership(own, self._settings, rng, self.now_s)
        member.paused = False
        self.tell(peer_id, AllowedChanged(keys=self._allowed))
        self.tell(peer_id, SeedsChanged(seeds=self._seeds))

    def crash(self, peer_id: PeerId) -> None:
        """End a peer without a word."""
        member = self.members[peer_id]
        member.membership = None
        member.paused = False
        member.waiting.clear()
        member.waiting_for.clear()

    def leave(self, peer_id: PeerId) -> None:
        """Let a peer say goodbye, and end."""
        self.tell(peer_id, LeaveRequested())
        self.crash(peer_id)

    def pause(self, peer_id: PeerId) -> None:
        """Let a peer stand still, as SIGSTOP does: what comes waits, and no timer runs."""
        self.members[peer_id].paused = True

    def resume(self, peer_id: PeerId) -> None:
        """Let a paused peer go on: with what has come, and all its timers late."""
        member = self.members[peer_id]
        member.paused = False
        waiting, member.waiting = member.waiting, []
        for event in [*waiting, Tick()]:
            self.tell(peer_id, event)

    def divide(self, sides: Sequence[Collection[PeerId]]) -> None:
        """Let messages pass within the sides only; those on the way between them are lost."""
        self._side = {peer: number for number, side in enumerate(sides) for peer in side}

    def heal(self) -> None:
        """Let messages pass everywhere again."""
        self._side = {}

    def run(self, duration_s: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; end early and return True once `until` holds, asked every 50 ms."""
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            stop_s = min(self.now_s + 0.05, end_s)
            while self._agenda and self._agenda[0][0] <= stop_s:
                self.now_s, _, action = heapq.heappop(self._agenda)
                action()
            self.now_s = stop_s
            if until is not None and until():
                return True
        return False

    # What one may ask

    def running(self) -> Iterator[PeerId]:
        """Yield who runs."""
        return (peer for peer, member in self.members.items() if member.membership is not None)

    def is_one_view(self) -> bool:
        """Say whether all that run see exactly each other as alive, in their own incarnations."""
        truth = {peer: self.members[peer].running.own for peer in self.running()}
        for observer in truth:
            seen = {
                each.peer_id: each
                for each in self.members[observer].running.members
                if each.is_present
            }
            if seen.keys() != truth.keys() - {observer}:
                return False
            if any(each != truth[peer] for peer, each in seen.items()):
                return False
        return True

    # The network

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (when_s, self._order, action))

    def tell(self, peer_id: PeerId, event: Event) -> None:
        """Give a peer an event, and do what it wants; a paused one gets it once it goes on."""
        member = self.members[peer_id]
        membership = member.membership
        if membership is None:
            return
        if member.paused:
            if not isinstance(event, Tick):
                member.waiting.append(event)
            return
        due_before = membership.next_deadline
        for effect in membership.handle(event, self.now_s):
            match effect:
                case Ask():
                    self._ask(peer_id, effect)
                case Reply():
                    self._reply(peer_id, effect)
                case MemberChanged():
                    self.sightings.append(
                        Sighting(at_s=self.now_s, observer=peer_id, member=effect.member)
                    )
                case MemberForgotten():
                    pass
                case NobodyFound():
                    member.nobody_found += 1
                case Misbehaved():
                    member.misbehaved.append(effect)
        due = membership.next_deadline
        if due != due_before and due < np.inf:
            self._at(due, lambda: self._tick(peer_id, membership, due))

    def _tick(self, peer_id: PeerId, membership: Membership, due_s: float) -> None:
        if self.members[peer_id].membership is membership and membership.next_deadline == due_s:
            self.tell(peer_id, Tick())

    def _ask(self, asker: PeerId, ask: Ask) -> None:
        membership = self.members[asker].running
        self.members[asker].waiting_for.add(ask.number)
        self._next_ticket += 1
        ticket = self._next_ticket
        self._tickets[ticket] = (asker, ask.number)
        event = Asked(sender=asker, ticket=ticket, request=ask.request)
        self._carry(asker, ask.to, lambda: self.tell(ask.to, event))

        def give_up() -> None:
            self._tickets.pop(ticket, None)
            self._settle(asker, membership, ask.number, Failed(number=ask.number))

        self._at(self.now_s + ask.timeout_s, give_up)

    def _reply(self, replier: PeerId, reply: Reply) -> None:
        if reply.ticket not in self._tickets:
            return  # the asker waits no longer
        asker, number = self._tickets.pop(reply.ticket)
        membership = self.members[asker].membership
        event = Answered(sender=replier, number=number, answer=reply.answer)
        self._carry(replier, asker, lambda: self._settle(asker, membership, number, event))

    def _settle(
        self, asker: PeerId, membership: Membership | None, number: int, event: Event
    ) -> None:
        """Tell an asker what came of its request, once, and only in the life in which it asked."""
        member = self.members[asker]
        if member.membership is membership and number in member.waiting_for:
            member.waiting_for.remove(number)
            self.tell(asker, event)

    def _carry(self, sender: PeerId, receiver: PeerId, arrive: Callable[[], None]) -> None:
        self.messages += 1
        latency_s = self.network.delay_s + self.network.jitter_s * float(self._rng.random())
        if float(self._rng.random()) >= self.network.loss:
            self._at(self.now_s + latency_s, lambda: self._arrive(sender, receiver, arrive))

    def _arrive(self, sender: PeerId, receiver: PeerId, arrive: Callable[[], None]) -> None:
        if self._side.get(sender) == self._side.get(receiver):
            arrive()
