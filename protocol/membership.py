"""Who is alive, suspect, dead or left: events and `now` in, effects out (SWIM with Lifeguard).

Das, Gupta, Motivala, "SWIM: Scalable Weakly-consistent Infection-style Process Group Membership
Protocol", with the mechanisms of Lifeguard; settled in details as hashicorp/memberlist does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from protocol.awareness import Awareness
from protocol.gossip import (
    MAX_EXCHANGED,
    AllowedChanged,
    Answer,
    Answered,
    Ask,
    Asked,
    Effect,
    Event,
    Exchange,
    Failed,
    LeaveRequested,
    MemberChanged,
    MemberForgotten,
    MemberUpdate,
    Misbehaved,
    NobodyFound,
    Ping,
    PingReport,
    PingRequest,
    Pong,
    Reply,
    Request,
    SaidGoodbye,
    SeedsChanged,
    Standing,
    Tick,
    Updates,
)
from protocol.membership_settings import MembershipSettings
from protocol.messages import PeerId
from protocol.probing import Probe, Rotation
from protocol.roster import Roster, Verdict, refutable
from protocol.rumors import Rumors
from protocol.suspicion import Suspicion, SuspicionLimits
from protocol.transport.interface import Address

MAX_RELAYED = 256
"""Most pings under way on behalf of others; more are refused."""

MAX_PAGES = 64
"""Most messages in one exchange; ample for 10,000 members, and an end to one that has none."""

RELAY_SHARE = 0.8
"""Share of the probe timeout after which a relay reports in vain, to be heard in time."""


@dataclass(slots=True, kw_only=True)
class MembershipCounters:
    """What membership did since the peer was started.

    Attributes:
        probes: Probes begun.
        probes_failed: Probes that neither the target nor a relay answered.
        suspicions: Times that a member became suspect here, whoever began.
        deaths: Members that this peer found dead itself.
        refutations: Times that this peer had to say that it lives.
        doubles: Times that this peer was said to live somewhere else.
        pauses: Times that this peer was paused, by its late timers.
        reconnects: Attempts to reach seeds and dead members.
        relays_refused: Pings on behalf of others that were too many.
        updates_not_allowed: Updates of peers that aren't allowed here.
        updates_refused: Updates of a foreign key or an implausible incarnation.
        members_refused: Updates of new members beyond the most that are remembered.
    """

    probes: int = 0
    probes_failed: int = 0
    suspicions: int = 0
    deaths: int = 0
    refutations: int = 0
    doubles: int = 0
    pauses: int = 0
    reconnects: int = 0
    relays_refused: int = 0
    updates_not_allowed: int = 0
    updates_refused: int = 0
    members_refused: int = 0


class Membership:
    """One peer's view of its federation.

    `handle` is the only method that changes it. Times are seconds of one monotonic clock. Before
    `AllowedChanged` nobody is believed to be a member.

    Attributes:
        own: What this peer says of itself.
        double: Where it was last said to live, but doesn't: once, it may have lived there before;
            again and again, another process has its key and contradicts it.
        counters: What it did.

    Args:
        own: What this peer says of itself at its start, from `roster.born`.
        settings: Intervals, timeouts and limits.
        rng: Decides who is probed, told and tried.
        now: The time.
    """

    def __init__(
        self,
        own: MemberUpdate,
        settings: MembershipSettings,
        rng: np.random.Generator,
        now: float,
    ) -> None:
        self.own = own
        self.double: Address | None = None
        self.counters = MembershipCounters()
        self._settings = settings
        self._rng = rng
        self._now = now
        self._roster = Roster(settings.max_members)
        self._rumors = Rumors(settings.retransmit_multiplier)
        self._rotation = Rotation(rng)
        self._awareness = Awareness(settings.max_awareness)
        self._suspicions: dict[PeerId, Suspicion] = {}
        self._seeds: Mapping[PeerId, Address] = {}
        self._probe: Probe | None = None
        self._relayed: dict[int, int] = {}  # number of the ping -> ticket of who asked for it
        self._exchanges: dict[int, tuple[str, int]] = {}  # number -> our page's end, pages left
        self._next_number = 0
        self._probe_at = now + settings.probe_interval_s * float(rng.random())
        self._gossip_at = now
        self._exchange_at = now + settings.exchange_interval_s * float(rng.random())
        self._reconnect_at = now
        self._attempts = 0
        self._told = False
        self._effects: list[Effect] = []
        self._due = math.inf

    @property
    def next_deadline(self) -> float:
        """When `Tick` is due at the latest; infinity once this peer has left."""
        return self._due

    @property
    def members(self) -> tuple[MemberUpdate, ...]:
        """All other members that are remembered, by id."""
        return tuple(self._roster)

    @property
    def awareness(self) -> int:
        """How slow this peer seems to be itself, from 0."""
        return self._awareness.score

    @property
    def has_left(self) -> bool:
        """Whether this peer says that it has left."""
        return self.own.standing is Standing.LEFT

    def believes_present(self, peer_id: PeerId) -> bool:
        """Say whether a peer is a member that is alive or suspect."""
        return peer_id in self._roster.present

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """Take an event, do what is due by now, and return what the driver shall do."""
        self._effects = []
        self._now = now
        if now - self._due > self._settings.pause_s:
            self._wake(now - self._due)
        match event:
            case Tick():
                pass
            case Asked():
                self._reply(event)
            case Answered():
                self._take_answer(event)
            case Failed():
                self._take_failure(event.number)
            case AllowedChanged():
                self._roster.allowed = event.keys
                self._forget(self._roster.not_allowed())
                self._reconnect_soon()
            case SeedsChanged():
                self._seeds = event.seeds
                self._reconnect_soon()
            case SaidGoodbye():
                known = self._roster.get(event.sender)
                if known is not None:
                    self._hear(
                        replace(known, standing=Standing.LEFT, accuser=PeerId("")), event.sender
                    )
            case LeaveRequested():
                self._leave()
        self._run_timers()
        self._due = self._find_due()
        return self._effects

    def _run_timers(self) -> None:
        if self.has_left:
            return
        now = self._now
        if self._probe is not None and now >= self._probe.ends_at:
            self._probe_failed(self._probe)
        elif self._probe is not None and now >= self._probe.timeout_at:
            self._ask_others(self._probe)
        if now >= self._probe_at:
            self._begin_probe()
        overdue = [peer_id for peer_id, each in self._suspicions.items() if now >= each.deadline]
        for peer_id in overdue:
            self._accuse(peer_id, Standing.DEAD)
        if now >= self._exchange_at:
            self._exchange_at = now + self._settings.exchange_interval_s
            self._forget(self._roster.gone_since(now - self._settings.forget_s))
            for peer_id in self._some_present(1):
                self._exchange_with(peer_id)
        if now >= self._reconnect_at:
            self._reconnect()
        if self._rumors and now >= self._gossip_at:
            self._gossip_at = now + self._settings.gossip_interval_s
            for peer_id in self._some_present(self._settings.gossip_peers):
                self._ping(peer_id, self._settings.probe_timeout_s)

    def _find_due(self) -> float:
        if self.has_left:
            return math.inf
        due = [self._probe_at, self._exchange_at, self._reconnect_at]
        due += [each.deadline for each in self._suspicions.values()]
        if self._probe is not None:
            due.append(self._probe.deadline)
        if self._rumors and self._roster.present:
            due.append(self._gossip_at)
        return min(due)

    def _wake(self, late_s: float) -> None:
        """Draw no conclusions from silence: this peer itself was paused, and heard nobody."""
        self.counters.pauses += 1
        self._awareness.worsen()
        self._probe = None
        self._relayed.clear()
        self._exchanges.clear()
        for suspicion in self._suspicions.values():
            suspicion.put_off(late_s)
        self._exchange_at = self._now  # to hear what is said of us
        self._reconnect_soon()

    # Probing

    def _begin_probe(self) -> None:
        multiplier = self._awareness.multiplier
        self._probe_at = self._now + multiplier * self._settings.probe_interval_s
        target = self._rotation.next(self._roster.present)
        known = None if target is None else self._roster.get(target)
        if known is None:
            return
        self.counters.probes += 1
        self._probe = Probe(
            target=known.peer_id,
            incarnation=known.incarnation,
            number=self._ping(known.peer_id, multiplier * self._settings.probe_interval_s),
            timeout_at=self._now + multiplier * self._settings.probe_timeout_s,
            ends_at=self._probe_at,
        )

    def _ask_others(self, probe: Probe) -> None:
        """Ask some others to ping who didn't answer us."""
        timeout_s = probe.ends_at - self._now
        relays = self._some_present(self._settings.indirect_probes, besides=probe.target)
        probe.ask_others(
            [
                self._ask(
                    peer_id,
                    PingRequest(target=probe.target, updates=self._news_for(peer_id)),
                    timeout_s,
                )
                for peer_id in relays
            ]
        )

    def _probe_answered(self) -> None:
        self._probe = None
        self._awareness.improve()

    def _probe_failed(self, probe: Probe) -> None:
        self._probe = None
        self.counters.probes_failed += 1
        self._awareness.worsen(probe.signs_of_slowness)
        known = self._roster.get(probe.target)
        if known is not None and known.incarnation == probe.incarnation:
            self._accuse(probe.target, Standing.SUSPECT)

    def _accuse(self, peer_id: PeerId, standing: Standing) -> None:
        known = self._roster.get(peer_id)
        if known is not None:
            self.counters.deaths += standing is Standing.DEAD
            accusation = replace(known, standing=standing, accuser=self.own.peer_id)
            self._hear(accusation, self.own.peer_id)

    # What others ask and answer

    def _reply(self, asked: Asked) -> None:
        request = asked.request
        match request:
            case Ping():
                self._hear_all(request.updates, asked.sender)
                self._answer(asked.ticket, Pong(updates=self._news_for(asked.sender, counts=False)))
            case PingRequest():
                self._hear_all(request.updates, asked.sender)
                self._relay(asked, request.target)
            case Exchange():
                self._hear_exchange(request, asked.sender)
                self._answer(asked.ticket, self._page(request.start))

    def _relay(self, asked: Asked, target: PeerId) -> None:
        full = len(self._relayed) >= MAX_RELAYED
        self.counters.relays_refused += full
        if full or self.has_left or target not in self._roster:
            self._report(asked.ticket, target == self.own.peer_id)
            return
        number = self._ping(target, RELAY_SHARE * self._settings.probe_timeout_s)
        self._relayed[number] = asked.ticket

    def _report(self, ticket: int, reached: bool) -> None:
        self._answer(
            ticket,
            PingReport(reached=reached, updates=self._rumors.tell(self._size(), counts=False)),
        )

    def _take_answer(self, answered: Answered) -> None:
        answer, number = answered.answer, answered.number
        match answer:
            case Pong():
                self._hear_all(answer.updates, answered.sender)
                if number in self._relayed:
                    self._report(self._relayed.pop(number), True)
                elif self._probe is not None and number == self._probe.number:
                    self._probe_answered()
            case PingReport():
                self._hear_all(answer.updates, answered.sender)
                if self._probe is not None and number in self._probe.relays:
                    self._probe.relays.remove(number)
                    if answer.reached:
                        self._probe_answered()
            case Exchange():
                self._hear_exchange(answer, answered.sender)
                self._go_on(answered.sender, number, answer)

    def _take_failure(self, number: int) -> None:
        self._exchanges.pop(number, None)
        if number in self._relayed:
            self._report(self._relayed.pop(number), False)
        elif self._probe is not None and number == self._probe.number:
            self._probe.timeout_at = min(self._probe.timeout_at, self._now)

    # Exchanges of everything

    def _exchange_with(self, peer_id: PeerId, start: str = "", pages: int = MAX_PAGES) -> None:
        page = self._page(start)
        number = self._ask(peer_id, page, self._settings.exchange_timeout_s)
        self._exchanges[number] = (page.until, pages - 1)

    def _go_on(self, peer_id: PeerId, number: int, answer: Exchange) -> None:
        """Ask for the rest where one side had more than fits a message."""
        until, pages = self._exchanges.pop(number, ("", 0))
        ends = [end for end in (until, answer.until) if end > answer.start]
        if ends and pages:
            self._exchange_with(peer_id, min(ends), pages)

    def _page(self, start: str) -> Exchange:
        members = [each for each in self._roster if each.peer_id >= start]
        until = members[MAX_EXCHANGED - 1].peer_id if len(members) >= MAX_EXCHANGED else ""
        return Exchange(start=start, until=until, members=(self.own, *members[: MAX_EXCHANGED - 1]))

    def _hear_exchange(self, exchange: Exchange, speaker: PeerId) -> None:
        """Hear everything that another peer believes, but its dead as suspects.

        So they have the time of a suspicion to say that they live.
        """
        for update in exchange.members:
            present = update.peer_id in self._roster.present or update.peer_id == self.own.peer_id
            if update.standing is Standing.DEAD and present:
                update = replace(update, standing=Standing.SUSPECT, accuser=speaker)
            self._hear(update, speaker)

    def _reconnect(self) -> None:
        """Try seeds that are no members, and dead members, a few at a time."""
        absent = {seed for seed in self._seeds if seed not in self._roster.present}
        absent = (absent | self._roster.dead()) & self._roster.allowed.keys() - {self.own.peer_id}
        if not self._roster.present and absent and self._attempts >= 2 and not self._told:
            self._told = True
            self._effects.append(NobodyFound(seeds=tuple(sorted(absent))))
        for peer_id in self._some(sorted(absent), self._settings.reconnect_peers):
            self.counters.reconnects += 1
            self._exchange_with(peer_id)
        pause_s = self._settings.reconnect_min_s * 2.0 ** min(self._attempts, 32)
        pause_s = min(pause_s, self._settings.reconnect_max_s)
        self._reconnect_at = self._now + pause_s * (0.5 + 0.5 * float(self._rng.random()))
        self._attempts += 1

    def _reconnect_soon(self) -> None:
        self._reconnect_at, self._attempts = self._now, 0

    # What is said of members

    def _hear_all(self, updates: Updates, speaker: PeerId) -> None:
        for update in updates:
            self._hear(update, speaker)

    def _hear(self, update: MemberUpdate, speaker: PeerId) -> None:
        if update.peer_id == self.own.peer_id:
            self._hear_of_self(update, speaker)
            return
        match self._roster.hear(update, speaker, self._now):
            case Verdict.NEWS:
                self._believe(self._roster[update.peer_id])
            case Verdict.SHARED:
                suspicion = self._suspicions[update.peer_id]
                if update.accuser and suspicion.confirm(update.accuser):
                    self._rumors.spread(update)
            case Verdict.STALE:
                pass
            case Verdict.NOT_ALLOWED:
                self.counters.updates_not_allowed += 1
            case Verdict.FORGED:
                self._refuse(update, speaker)
            case Verdict.IMPLAUSIBLE:
                self.counters.updates_refused += 1
            case Verdict.FULL:
                self.counters.members_refused += 1

    def _believe(self, update: MemberUpdate) -> None:
        """Act on news of a member, and pass it on."""
        peer_id = update.peer_id
        self._suspicions.pop(peer_id, None)
        if update.standing is Standing.SUSPECT:
            self.counters.suspicions += 1
            limits = SuspicionLimits.of(
                self._size(),
                self._settings.probe_interval_s,
                self._settings.suspicion_multiplier,
                self._settings.suspicion_longest,
            )
            self._suspicions[peer_id] = Suspicion(limits, update.accuser, self._now)
        if update.is_present:
            self._told = False
            self._rotation.add(peer_id)
        self._rumors.spread(update)
        self._effects.append(MemberChanged(member=update))

    def _hear_of_self(self, claim: MemberUpdate, speaker: PeerId) -> None:
        """Contradict what isn't so, by an incarnation above it."""
        own = self.own
        if claim.public_key != own.public_key:
            self._refuse(claim, speaker)
        elif claim.incarnation > refutable(own.incarnation):
            self.counters.updates_refused += 1
        elif claim.outranks(own) or (
            claim.incarnation == own.incarnation and claim.address != own.address
        ):
            self.counters.refutations += 1
            if claim.standing in (Standing.SUSPECT, Standing.DEAD):
                self._awareness.worsen()
            elif claim.standing is Standing.ALIVE and claim.address != own.address:
                self.counters.doubles += 1
                self.double = claim.address
            self.own = replace(own, incarnation=claim.incarnation + 1)
            self._rumors.spread(self.own)
        elif claim.standing is not Standing.ALIVE and claim.incarnation < own.incarnation:
            self._rumors.spread(own)  # the speaker hasn't heard yet that this isn't so

    def _refuse(self, update: MemberUpdate, speaker: PeerId) -> None:
        self.counters.updates_refused += 1
        text = f"told of {update.peer_id} with a key that doesn't prove this id"
        self._effects.append(Misbehaved(peer_id=speaker, text=text))

    def _forget(self, peer_ids: Collection[PeerId]) -> None:
        for peer_id in peer_ids:
            self._roster.forget(peer_id)
            self._rumors.drop(peer_id)
            self._suspicions.pop(peer_id, None)
            self._effects.append(MemberForgotten(peer_id=peer_id))

    # What is said to others

    def _leave(self) -> None:
        """Say goodbye to as many as pass it on to all; say nothing unasked any more."""
        self.own = replace(self.own, standing=Standing.LEFT)
        for peer_id in self._some_present(self._rumors.times(self._size())):
            self._ping(peer_id, self._settings.probe_timeout_s)

    def _ping(self, peer_id: PeerId, timeout_s: float) -> int:
        return self._ask(peer_id, Ping(updates=self._news_for(peer_id)), timeout_s)

    def _news_for(self, peer_id: PeerId, *, counts: bool = True) -> Updates:
        """Return what to tell a peer: first what it must know to contradict it, then news."""
        first = self.own if self.has_left else self._roster.get(peer_id)
        if first is not None and first.standing is Standing.ALIVE:
            first = None
        return self._rumors.tell(self._size(), first, counts=counts)

    def _ask(self, peer_id: PeerId, request: Request, timeout_s: float) -> int:
        self._next_number += 1
        self._effects.append(
            Ask(to=peer_id, number=self._next_number, request=request, timeout_s=timeout_s)
        )
        return self._next_number

    def _answer(self, ticket: int, answer: Answer) -> None:
        self._effects.append(Reply(ticket=ticket, answer=answer))

    def _size(self) -> int:
        return len(self._roster.present) + 1

    def _some_present(self, count: int, besides: PeerId | None = None) -> Sequence[PeerId]:
        return self._some([each for each in self._roster.present if each != besides], count)

    def _some(self, peer_ids: Sequence[PeerId], count: int) -> Sequence[PeerId]:
        if len(peer_ids) <= count:
            return peer_ids
        chosen = self._rng.choice(len(peer_ids), count, replace=False)
        return [peer_ids[index] for index in chosen]
