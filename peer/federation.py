"""Drive membership over the transport: who takes part in the federation, and where."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import numpy as np

from protocol.codec import Buffer
from protocol.errors import ProtocolError
from protocol.gossip import (
    AllowedChanged,
    Answered,
    Ask,
    Asked,
    Effect,
    Event,
    Failed,
    MemberChanged,
    MemberForgotten,
    MemberUpdate,
    Misbehaved,
    NobodyFound,
    Reply,
    SaidGoodbye,
    SeedsChanged,
    Standing,
    Tick,
    decode_answer,
    decode_request,
    encode_payload,
)
from protocol.identity import AllowList, peer_id_of
from protocol.membership import Membership
from protocol.membership_settings import MembershipSettings
from protocol.messages import PeerId
from protocol.roster import born
from protocol.transport.interface import Address
from protocol.transport.zeromq import ZeroMQTransport

logger = logging.getLogger(__name__)

ALLOW_INTERVAL_S = 1.0
SUSPICIOUS_TIMES = 3
"""Times that this peer is said to live somewhere else, before we say what that means."""
_LONGEST_TICKET_S = 5.0


class Federation:
    """The members that are known, kept up to date with those of others; the transport's `Gossip`.

    Args:
        allow_list: Who may be a member; their names are those of its files.
        settings: Of membership.
        rng: Whom to probe and tell.
        on_change: Called when a member, its address or its standing has changed.

    Attributes:
        seeds: The addresses that discovery knows.
    """

    def __init__(
        self,
        allow_list: AllowList,
        settings: MembershipSettings,
        rng: np.random.Generator,
        on_change: Callable[[], None],
    ) -> None:
        self._allow_list = allow_list
        self._settings = settings
        self._rng = rng
        self._on_change = on_change
        self._members: dict[PeerId, MemberUpdate] = {}
        self.seeds: Mapping[PeerId, Address] = {}
        self._tickets: dict[int, tuple[float, Callable[[bytes], None]]] = {}
        self._next_ticket = itertools.count()
        self._tasks: asyncio.TaskGroup | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._doubled = False
        self._core: Membership
        self._transport: ZeroMQTransport

    async def run(self, transport: ZeroMQTransport, own: Address, starts: int) -> None:
        """Keep up with the members until cancelled.

        Args:
            transport: A started one, whose `gossip` this is.
            own: What we advertise.
            starts: How often this peer was started before.
        """
        loop = asyncio.get_running_loop()
        self._transport = transport
        own_id = peer_id_of(own.public_key)
        self._core = Membership(born(own_id, own, starts), self._settings, self._rng, loop.time())
        names: Mapping[str, str] | None = None
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._feed(SeedsChanged(seeds=self.seeds))
                while True:
                    if self._allow_list.names() is not names:
                        names = self._allow_list.names()
                        keys = {peer_id_of(key): key for key in names}
                        keys.pop(own_id, None)
                        self._feed(AllowedChanged(keys=keys))
                    self._expire_tickets()
                    await asyncio.sleep(ALLOW_INTERVAL_S)
        finally:
            self._tasks = None
            if self._timer is not None:
                self._timer.cancel()

    def set_seeds(self, seeds: Mapping[PeerId, Address]) -> None:
        """Take the addresses that discovery knows."""
        self.seeds = dict(seeds)
        self._feed(SeedsChanged(seeds=self.seeds))

    def addresses(self) -> dict[PeerId, Address]:
        """Return where peers can be dialed: seeds, and members that haven't left."""
        found = dict(self.seeds)
        for peer_id, member in self._members.items():
            if member.standing is not Standing.LEFT:
                name = self._allow_list.names().get(member.public_key, member.name)
                found[peer_id] = replace(member.address, name=name)
        return found

    @property
    def counters(self) -> dict[str, int]:
        """What membership did since this peer was started."""
        return asdict(self._core.counters) if self._tasks is not None else {}

    # The transport's gossip.

    def asked(self, sender: PeerId, body: Buffer, answer: Callable[[bytes], None]) -> None:
        """Take what a member tells and asks."""
        request = decode_request(body)
        if self._tasks is None:
            return
        ticket = next(self._next_ticket)
        self._tickets[ticket] = (asyncio.get_running_loop().time(), answer)
        self._feed(Asked(sender=sender, ticket=ticket, request=request))

    def left(self, sender: PeerId) -> None:
        """Take note that a peer said goodbye."""
        self._feed(SaidGoodbye(sender=sender))

    def standing_of(self, peer_id: PeerId) -> str:
        """Return how a member stands; empty for one that isn't known."""
        member = self._members.get(peer_id)
        return "" if member is None else member.standing.name.lower()

    # Events and effects.

    def _feed(self, event: Event) -> None:
        if self._tasks is None:
            return
        loop = asyncio.get_running_loop()
        for effect in self._core.handle(event, loop.time()):
            self._interpret(effect, self._tasks)
        self._look_for_double()
        if self._timer is not None:
            self._timer.cancel()
        if self._core.next_deadline < math.inf:
            self._timer = loop.call_at(self._core.next_deadline, self._feed, Tick())

    def _interpret(self, effect: Effect, tasks: asyncio.TaskGroup) -> None:
        match effect:
            case Ask():
                tasks.create_task(self._ask(effect), name=f"ask {effect.to[:8]}")
            case Reply(ticket=ticket, answer=payload):
                if ticket in self._tickets:
                    _, answer = self._tickets.pop(ticket)
                    answer(encode_payload(payload))
            case MemberChanged(member=member):
                self._tell(member)
                self._members[member.peer_id] = member
                self._on_change()
            case MemberForgotten(peer_id=peer_id):
                self._members.pop(peer_id, None)
                self._on_change()
            case NobodyFound(seeds=seeds):
                logger.warning("none of %d seeds answers yet; trying on", len(seeds))
            case Misbehaved(peer_id=peer_id, text=text):
                self._transport.strike(peer_id, text)

    async def _ask(self, ask: Ask) -> None:
        """Ask, and always tell how it ended."""
        try:
            body = encode_payload(ask.request)
            answer = decode_answer(await self._transport.ask_member(ask.to, body, ask.timeout_s))
        except ProtocolError:
            self._feed(Failed(number=ask.number))
        else:
            self._feed(Answered(sender=ask.to, number=ask.number, answer=answer))

    def _expire_tickets(self) -> None:
        horizon = asyncio.get_running_loop().time() - _LONGEST_TICKET_S
        for ticket, (since, _) in list(self._tickets.items()):
            if since < horizon:
                del self._tickets[ticket]

    def _look_for_double(self) -> None:
        """Say once that another process has our key, when it has contradicted us often enough."""
        double, times = self._core.double, self._core.counters.doubles
        if double is not None and times >= SUSPICIOUS_TIMES and not self._doubled:
            self._doubled = True
            logger.warning(
                "another process seems to run with this peer's key, as %s at %s: "
                "give each peer a key of its own",
                double.name,
                double.endpoint,
            )

    def _tell(self, member: MemberUpdate) -> None:
        """Log who comes and goes; what is only suspected isn't news."""
        before = self._members.get(member.peer_id)
        name = self._allow_list.names().get(member.public_key, member.name)
        known = before is not None and before.standing in (Standing.ALIVE, Standing.SUSPECT)
        match member.standing:
            case Standing.ALIVE if not known:
                logger.info("%s is a member, at %s", name, member.endpoint)
            case Standing.DEAD | Standing.LEFT if known:
                state = "is gone" if member.standing is Standing.DEAD else "has left"
                logger.info("%s %s", name, state)
            case _:
                pass
