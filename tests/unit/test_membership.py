"""Membership: the rules one by one, and whole federations on a simulated network."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.errors import LocalProtocolError
from protocol.gossip import (
    MAX_EXCHANGED,
    MAX_INCARNATION,
    MAX_UPDATES,
    AllowedChanged,
    Answered,
    Ask,
    Asked,
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
    SaidGoodbye,
    SeedsChanged,
    Standing,
    Tick,
)
from protocol.membership import MAX_RELAYED, Membership
from protocol.membership_settings import MembershipSettings
from protocol.messages import PeerId
from protocol.roster import HEARSAY, LEAP, born
from protocol.rumors import Rumors
from protocol.suspicion import Suspicion, SuspicionLimits
from protocol.transport.interface import Address
from sim.membership import MembershipSimulator, Network, fake_key, id_of

ALIVE, SUSPECT, DEAD, LEFT = Standing


def address(index: int) -> Address:
    return Address(name=f"p{index}", endpoint=f"tcp://h:{index}", public_key=fake_key(index))


def said(index: int, incarnation: int = 0, standing: Standing = ALIVE, **more) -> MemberUpdate:
    own = born(id_of(fake_key(index)), address(index), 0)
    accuser = more.pop("accuser", peer(99) if standing in (SUSPECT, DEAD) else PeerId(""))
    changes = {"incarnation": incarnation, "standing": standing, "accuser": accuser}
    return msgspec.structs.replace(own, **changes, **more)


def peer(index: int) -> PeerId:
    return id_of(fake_key(index))


class Lone:
    """One membership, its driver by hand; it is peer 0."""

    def __init__(self, num_allowed: int = 100, **options) -> None:
        self.now = 10.0
        self.effects: list = []
        own = born(peer(0), address(0), 0)
        rng = np.random.default_rng(0)
        self.core = Membership(own, MembershipSettings(**options), rng, self.now)
        keys = {peer(index): fake_key(index) for index in range(num_allowed)}
        self.do(AllowedChanged(keys=keys))

    def do(self, event):
        self.effects = list(self.core.handle(event, self.now))
        return self.effects

    def hear(self, *updates: MemberUpdate, speaker: int = 99):
        return self.do(Asked(sender=peer(speaker), ticket=1, request=Ping(updates=updates)))

    def exchange(self, *members: MemberUpdate, speaker: int = 99):
        page = Exchange(start="", until="", members=members)
        return self.do(Asked(sender=peer(speaker), ticket=1, request=page))

    def pass_time(self, seconds: float, answering=lambda ask: None):
        """Let time pass, each timer on time; requests are answered as told, or fail in time."""
        end, seen, failing = self.now + seconds, [], {}
        while True:
            events = []
            for ask in self.asks():
                answer = answering(ask)
                if answer is None:
                    failing[ask.number] = self.now + ask.timeout_s
                else:
                    events.append(Answered(sender=ask.to, number=ask.number, answer=answer))
            self.effects = []
            if not events:
                due = min([self.core.next_deadline, *failing.values()])
                if due > end:
                    break
                self.now = max(self.now, due)
                late = [number for number, at in failing.items() if at <= self.now]
                events = [Failed(number=number) for number in late] or [Tick()]
                failing = {number: at for number, at in failing.items() if at > self.now}
            effects = [effect for event in events for effect in self.do(event)]
            seen += effects
            self.effects = effects
        self.now = end
        return seen

    def asks(self):
        return [each for each in self.effects if isinstance(each, Ask)]

    def of(self, index: int) -> MemberUpdate | None:
        return next((each for each in self.core.members if each.peer_id == peer(index)), None)

    def standing(self, index: int) -> Standing | None:
        known = self.of(index)
        return known.standing if known else None


def answers_pings(ask: Ask):
    return Pong() if isinstance(ask.request, Ping) else None


# The rules


ranked = st.tuples(st.integers(0, 5), st.sampled_from([ALIVE, SUSPECT, DEAD, LEFT]))


@given(st.lists(ranked, max_size=12), st.randoms())
def test_whatever_the_order_of_the_same_news_the_same_is_believed_and_nothing_ever_falls(
    news, random
):
    ends = set()
    for _ in range(3):
        lone = Lone()
        lone.hear(said(1))
        before = (0, ALIVE)
        random.shuffle(news)
        for incarnation, standing in news:
            lone.hear(said(1, incarnation, standing))
            known = lone.of(1)
            assert (known.incarnation, known.standing) >= before
            before = (known.incarnation, known.standing)
        ends.add(before)
    assert ends == {max([(0, ALIVE), *news])}


def test_the_dead_do_not_rise_at_an_equal_incarnation_but_at_a_higher_one():
    lone = Lone()
    lone.hear(said(1, 3), said(1, 3, DEAD))
    assert lone.standing(1) is DEAD
    assert not any(isinstance(each, MemberChanged) for each in lone.hear(said(1, 3)))
    lone.hear(said(1, 3), speaker=1)  # not even by its own word
    assert lone.standing(1) is DEAD
    lone.hear(said(1, 4))
    assert lone.standing(1) is ALIVE


def test_nobody_unknown_becomes_a_member_by_being_gone():
    lone = Lone()
    lone.hear(said(1, 1, DEAD), said(2, 1, LEFT))
    assert lone.core.members == ()


def test_a_death_told_in_an_exchange_is_a_suspicion_first():
    lone = Lone()
    lone.hear(said(1))
    lone.exchange(said(1, 0, DEAD), speaker=2)
    assert lone.standing(1) is SUSPECT and lone.of(1).accuser == peer(2)
    lone.hear(said(1, 1))
    lone.hear(said(1, 1, DEAD))
    assert lone.standing(1) is DEAD
    lone.exchange(said(1, 2, DEAD))  # who is dead already doesn't become suspect
    assert lone.standing(1) is DEAD


@pytest.mark.parametrize("standing", [SUSPECT, DEAD, LEFT])
def test_what_is_said_wrongly_of_me_raises_my_incarnation_above_it_and_is_contradicted(standing):
    lone = Lone()
    lone.hear(said(0, 7, standing))
    assert (lone.core.own.incarnation, lone.core.own.standing) == (8, ALIVE)
    assert lone.core.awareness == (standing is not LEFT)
    pong = next(each.answer for each in lone.effects if isinstance(each, Reply))
    assert lone.core.own in pong.updates
    lone.hear(said(0, 7, standing))
    assert lone.core.own.incarnation == 8 and lone.core.counters.refutations == 1


def test_an_address_changes_with_a_higher_incarnation_only_and_a_wrong_one_of_me_is_contradicted():
    lone = Lone()
    lone.hear(said(1, 2))
    lone.hear(said(1, 2, SUSPECT, endpoint="tcp://elsewhere:1"))
    assert lone.standing(1) is SUSPECT and lone.of(1).endpoint == "tcp://h:1"
    lone.hear(said(1, 3, endpoint="tcp://elsewhere:1"))
    assert lone.of(1).endpoint == "tcp://elsewhere:1"
    lone.hear(said(0, 0, endpoint="tcp://elsewhere:1"))
    assert lone.core.own.incarnation == 1


def test_an_update_with_a_foreign_key_changes_nothing_and_is_held_against_the_speaker():
    lone = Lone()
    lone.hear(said(1))
    for forged in (said(1, 5, public_key=fake_key(2)), said(0, 5, DEAD, public_key=fake_key(2))):
        effects = lone.hear(forged, speaker=7)
        assert [each.peer_id for each in effects if isinstance(each, Misbehaved)] == [peer(7)]
    assert lone.of(1) == said(1) and lone.core.own.incarnation == 0


def test_whoever_is_not_allowed_is_no_member_and_whoever_no_longer_is_is_forgotten():
    lone = Lone(num_allowed=5)
    assert not any(isinstance(each, Misbehaved) for each in lone.hear(said(7), said(1)))
    assert lone.standing(7) is None and lone.core.counters.updates_not_allowed == 1
    effects = lone.do(AllowedChanged(keys={peer(0): fake_key(0)}))
    assert MemberForgotten(peer_id=peer(1)) in effects and lone.core.members == ()


@given(st.integers(0, MAX_INCARNATION), st.integers(0, MAX_INCARNATION))
def test_whatever_hearsay_makes_one_believe_of_a_member_the_member_can_contradict(own, claim):
    """One hears that peer 0 is dead, after peer 0 spoke for itself; peer 0 then hears of it."""
    other, liar = Lone(), 99
    other.hear(said(0, own), speaker=0) if own < MAX_INCARNATION else None
    other.core.own = said(1)  # another peer than peer 0
    other.hear(said(0, min(own, MAX_INCARNATION - 1)), speaker=0)
    other.hear(said(0, claim, DEAD), speaker=liar)
    believed = other.of(0)
    myself = Lone()
    myself.core.own = said(0, min(own, MAX_INCARNATION - 1))
    myself.hear(believed, speaker=1)
    assert believed.standing is ALIVE or myself.core.own.outranks(believed)


def test_a_huge_incarnation_counts_for_nothing_unless_the_member_says_it_itself():
    lone = Lone()
    lone.hear(said(1), speaker=1)
    lone.hear(said(1, HEARSAY + 1, DEAD), said(0, HEARSAY + 1, DEAD))
    assert lone.standing(1) is ALIVE and lone.core.own.incarnation == 0
    assert lone.core.counters.updates_refused == 2
    lone.hear(said(1, 2 * HEARSAY), speaker=1)
    assert lone.of(1).incarnation == 2 * HEARSAY
    lone.hear(said(1, 2 * HEARSAY + LEAP + 1, DEAD))
    assert lone.standing(1) is ALIVE
    lone.hear(said(1, 2 * HEARSAY + LEAP, DEAD))
    assert lone.standing(1) is DEAD


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=50) | st.floats(),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=20,
)


@given(junk)
def test_what_is_no_update_is_never_decoded_as_one(value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, MemberUpdate)


def test_messages_of_the_longest_updates_fit_the_limits_of_the_wire():
    longest = said(1, MAX_INCARNATION, SUSPECT, name="\U0001f600" * 64, endpoint="\u20ac" * 264)
    assert len(msgspec.msgpack.encode(Ping(updates=(longest,) * MAX_UPDATES))) < 16 * 1024 + 5000
    ascii_host = msgspec.structs.replace(longest, endpoint="h" * 264)
    assert len(msgspec.msgpack.encode(Ping(updates=(ascii_host,) * MAX_UPDATES))) < 16 * 1024
    page = Exchange(start="", until="", members=(ascii_host,) * MAX_EXCHANGED)
    assert len(msgspec.msgpack.encode(page)) < 1 << 20
    with pytest.raises(LocalProtocolError, match="can't advertise"):
        born(peer(0), Address(name="n" * 65, endpoint="", public_key=fake_key(0)), 0)


def test_the_next_start_of_a_process_is_above_whatever_its_last_one_refuted():
    lone = Lone()
    for _ in range(100):
        lone.hear(said(0, lone.core.own.incarnation, DEAD))
    assert lone.core.own.incarnation == 100
    assert born(peer(0), address(0), 1).outranks(lone.core.own)


# Probing


def test_a_silent_member_is_asked_for_by_others_then_suspected_then_dead():
    lone = Lone()
    lone.hear(*(said(index) for index in range(1, 6)))
    silent = peer(1)

    def answering(ask: Ask):
        if isinstance(ask.request, PingRequest):
            return PingReport(reached=False)
        return answers_pings(ask) if ask.to != silent else None

    seen = lone.pass_time(60, answering)
    asked = [
        each.to for each in seen if isinstance(each, Ask) and each.request.__class__ is PingRequest
    ]
    assert len(asked) >= 3 and silent not in asked and len(set(asked[:3])) == 3
    changes = [each.member.standing for each in seen if isinstance(each, MemberChanged)]
    assert changes == [SUSPECT, DEAD]
    assert lone.core.awareness == 0  # the relays answered: it isn't us
    assert lone.core.counters.deaths == 1


def test_who_is_reached_by_others_is_not_suspected():
    lone = Lone()
    lone.hear(*(said(index) for index in range(1, 6)))

    def answering(ask: Ask):
        if isinstance(ask.request, PingRequest):
            return PingReport(reached=True)
        return answers_pings(ask) if ask.to != peer(1) else None

    seen = lone.pass_time(60, answering)
    assert not any(isinstance(each, MemberChanged) for each in seen)


def test_when_nobody_answers_at_all_it_is_us_and_we_ask_less_and_wait_longer():
    lone = Lone(suspicion_multiplier=100.0)
    lone.hear(*(said(index) for index in range(1, 6)))
    lone.pass_time(20)
    assert lone.core.awareness == 7
    probes = lone.core.counters.probes
    lone.pass_time(40)
    assert lone.core.counters.probes - probes <= 6  # one in eight seconds
    lone.pass_time(100, answers_pings)
    assert lone.core.awareness == 0


def test_every_member_is_probed_within_two_times_round():
    lone = Lone()
    lone.hear(*(said(index) for index in range(1, 9)))
    lone.pass_time(20, answers_pings)  # news is told by pings, too
    seen = lone.pass_time(16, answers_pings)
    assert {each.to for each in seen if isinstance(each, Ask)} >= {peer(i) for i in range(1, 9)}


def test_a_relay_reports_what_came_of_it_and_bounds_how_much_it_does():
    lone = Lone()
    lone.hear(said(1))

    def relay(ticket: int, target: int):
        request = PingRequest(target=peer(target))
        return lone.do(Asked(sender=peer(9), ticket=ticket, request=request))

    def reports():
        return [(e.ticket, e.answer.reached) for e in lone.effects if isinstance(e, Reply)]

    relay(1, 50)
    assert reports() == [(1, False)]  # nobody it knows
    relay(2, 0)
    assert reports() == [(2, True)]  # itself
    relay(3, 1)
    assert reports() == []
    number = lone.asks()[0].number
    lone.do(Answered(sender=peer(1), number=number, answer=Pong()))
    assert reports() == [(3, True)]
    relay(4, 1)
    lone.do(Failed(number=lone.asks()[0].number))
    assert reports() == [(4, False)]
    for ticket in range(MAX_RELAYED + 1):
        relay(ticket, 1)
    assert reports() == [(MAX_RELAYED, False)] and lone.core.counters.relays_refused == 1


@given(st.integers(2, 10_000), st.floats(0.05, 10), st.integers(3, 8), st.floats(1.5, 10))
def test_a_suspicion_lasts_between_its_limits_and_each_confirmation_shortens_it(
    num_members, interval_s, multiplier, longest
):
    limits = SuspicionLimits.of(num_members, interval_s, multiplier, longest)
    floor = multiplier * max(1.0, np.log10(num_members)) * interval_s
    assert limits.shortest_s == pytest.approx(floor)
    suspicion = Suspicion(limits, peer(1), 5.0)
    deadlines = [suspicion.deadline]
    for index in range(2, 12):
        assert not suspicion.confirm(peer(index - 1))
        if suspicion.confirm(peer(index)):
            deadlines.append(suspicion.deadline)
    assert len(deadlines) == limits.confirmations + 1
    assert deadlines == sorted(deadlines, reverse=True)
    assert deadlines[-1] == pytest.approx(5.0 + floor)
    if limits.confirmations:
        assert deadlines[0] == pytest.approx(5.0 + longest * floor)


@given(st.integers(1, 300), st.integers(1, 60))
def test_every_rumor_is_told_as_often_as_it_should_the_least_told_first(num_members, count):
    rumors = Rumors(4)
    for index in range(count):
        rumors.spread(said(index))
    told: dict = {}
    while rumors:
        updates = rumors.tell(num_members)
        assert 0 < len(updates) <= MAX_UPDATES
        for update in updates:
            told[update.peer_id] = told.get(update.peer_id, 0) + 1
        assert (
            max(told.values()) - min([*told.values(), 0] if len(told) < count else told.values())
            <= 1
        )
    assert set(told.values()) == {rumors.times(num_members)} and len(told) == count


# Pauses, leaving, seeds, forgetting


def test_a_peer_that_wakes_suspects_nobody_for_what_it_did_not_hear_and_blames_itself():
    lone = Lone()
    lone.hear(*(said(index) for index in range(1, 6)), said(6, 0, SUSPECT))
    lone.pass_time(1, answers_pings)
    lone.now += 3600
    changed = [each for each in lone.do(Tick()) if isinstance(each, MemberChanged)]
    assert changed == [] and lone.core.awareness >= 1 and lone.core.counters.pauses == 1
    assert lone.standing(6) is SUSPECT  # it has as long as before to say that it lives
    assert any(isinstance(each.request, Exchange) for each in lone.asks())
    seen = lone.pass_time(2.5, answers_pings)
    assert not any(isinstance(each, MemberChanged) for each in seen)


def test_a_probe_under_way_when_the_peer_was_paused_accuses_nobody():
    lone = Lone()
    lone.hear(said(1))
    while not lone.core.counters.probes:
        lone.now = lone.core.next_deadline
        lone.do(Tick())
    lone.now += 20  # the ping isn't answered
    lone.do(Tick())
    assert lone.standing(1) is ALIVE and lone.core.counters.probes_failed == 0


def test_whoever_still_believes_what_was_contradicted_is_told_again():
    lone = Lone()
    lone.hear(said(1), said(0, 0, SUSPECT))
    lone.pass_time(60, answers_pings)
    assert lone.hear()[-1].answer.updates == ()  # all has been told often enough
    lone.hear(said(0, 0, SUSPECT))
    assert lone.effects[0].answer.updates == (lone.core.own,)


def test_leaving_is_told_at_once_to_several_and_whoever_pings_later_hears_it():
    lone = Lone()
    lone.hear(*(said(index) for index in range(1, 30)))
    lone.do(LeaveRequested())
    assert len(lone.asks()) == 8  # 4 times ceil(log10(31))
    left = lone.core.own
    assert left.standing is LEFT and all(each.request.updates[0] == left for each in lone.asks())
    assert lone.core.next_deadline == math.inf and lone.do(Tick()) == []
    lone.hear(said(0, 0, DEAD), speaker=5)
    assert lone.effects[-1].answer.updates[0] == lone.core.own == left
    other = Lone()
    other.core.own = said(31)
    other.hear(said(0))
    other.hear(left)
    assert other.standing(0) is LEFT


def test_a_goodbye_on_the_own_connection_counts_and_is_passed_on():
    lone = Lone()
    lone.hear(said(1, 4))
    effects = lone.do(SaidGoodbye(sender=peer(1)))
    assert lone.standing(1) is LEFT
    assert any(isinstance(e, Ask | MemberChanged) for e in effects)
    lone.do(SaidGoodbye(sender=peer(55)))  # a stranger's means nothing
    assert len(lone.core.members) == 1


def test_seeds_that_are_all_down_are_told_of_once_and_tried_on_with_growing_pauses():
    lone = Lone()
    seeds = {peer(index): address(index) for index in (0, 1, 2)}
    started = lone.now
    seen = lone.do(SeedsChanged(seeds=seeds))
    tried = [lone.now for _ in lone.asks()]
    for _ in range(600):
        part = lone.pass_time(1)
        seen += part
        tried += [lone.now for each in part if isinstance(each, Ask)]
    assert [each for each in seen if isinstance(each, NobodyFound)] == [
        NobodyFound(seeds=tuple(sorted((peer(1), peer(2)))))
    ]
    assert sum(each < started + 5 for each in tried) >= 6
    assert 2 * 75 <= len(tried) <= 2 * 160  # both, every 4 to 8 s
    lone.exchange(said(1), speaker=1)
    lone.pass_time(1, answers_pings)
    assert lone.standing(1) is ALIVE


def test_the_dead_are_forgotten_in_the_end_and_at_most_so_many_are_remembered():
    lone = Lone(max_members=2, forget_s=100.0)
    lone.hear(said(1), said(2), said(3))
    assert lone.core.counters.members_refused == 1 and lone.standing(3) is None
    lone.hear(said(1, 0, DEAD), said(2, 0, LEFT))
    lone.pass_time(90)
    assert lone.standing(1) is DEAD and lone.standing(2) is LEFT
    lone.pass_time(60)
    assert lone.core.members == ()


def test_an_exchange_of_more_than_fits_a_message_goes_on_until_all_is_told():
    many = MAX_EXCHANGED + 700
    one, two = Lone(many), Lone(many)
    two.core.own = said(1)
    two.exchange(*(said(index) for index in range(2, many)), speaker=2)
    one.do(SeedsChanged(seeds={peer(1): address(1)}))
    pending = one.asks()
    messages = 0
    while pending:
        ask = pending.pop()
        messages += 1
        two.do(Asked(sender=peer(0), ticket=1, request=ask.request))
        answer = next(each.answer for each in two.effects if isinstance(each, Reply))
        assert len(answer.members) <= MAX_EXCHANGED
        one.do(Answered(sender=peer(1), number=ask.number, answer=answer))
        pending = [each for each in one.asks() if isinstance(each.request, Exchange)]
    assert len(one.core.members) == many - 1 and messages == 2


# Whole federations


def federation(num_peers: int, seed: int = 0, **network) -> MembershipSimulator:
    simulator = MembershipSimulator(num_peers, Network(**network), MembershipSettings(), seed=seed)
    for peer_id in simulator.ids:
        simulator.start(peer_id)
    return simulator


def deaths(simulator: MembershipSimulator) -> list:
    return [each for each in simulator.sightings if each.member.standing is DEAD]


def test_the_same_seed_gives_the_same_sightings_and_another_seed_others():
    def history(seed: int) -> list:
        simulator = federation(8, seed=seed, loss=0.1)
        simulator.run(5)
        simulator.crash(simulator.ids[3])
        simulator.run(15)
        return simulator.sightings

    assert history(1) == history(1) != history(2)


@pytest.mark.parametrize("num_peers", [1, 2, 3, 40])
def test_all_find_each_other_through_any_seed(num_peers):
    simulator = federation(num_peers)
    assert simulator.run(10, simulator.is_one_view)
    assert not any(each.nobody_found for each in simulator.members.values())


def test_seeds_that_come_late_are_found():
    simulator = MembershipSimulator(6, Network(), MembershipSettings(), num_seeds=2, seed=3)
    for peer_id in simulator.ids[2:]:
        simulator.start(peer_id)
    simulator.run(120)
    assert [simulator.members[each].nobody_found for each in simulator.ids] == [0, 0, 1, 1, 1, 1]
    simulator.start(simulator.ids[1])
    assert simulator.run(10, simulator.is_one_view)


def test_a_partition_of_a_minute_heals_into_one_view_within_15_s():
    for seed, num_peers in ((0, 2), (1, 16), (2, 40)):
        simulator = federation(num_peers, seed=seed)
        simulator.run(10)
        half = num_peers // 2
        simulator.divide((simulator.ids[:half], simulator.ids[half:]))
        simulator.run(60)
        assert not simulator.is_one_view()
        simulator.heal()
        assert simulator.run(15, simulator.is_one_view)
        simulator.run(30)
        assert simulator.is_one_view()


def test_a_partition_heals_without_any_seed():
    simulator = federation(12)
    simulator.run(10)
    for seed in simulator.ids[:3]:
        simulator.crash(seed)
    simulator.divide((simulator.ids[:6], simulator.ids[6:]))
    simulator.run(60)
    simulator.heal()
    assert simulator.run(15, simulator.is_one_view)


def test_when_all_are_frozen_for_20_s_nobody_dies_and_when_half_are_nobody_stays_dead():
    simulator = federation(16)
    simulator.run(10)
    for frozen in (simulator.ids, simulator.ids[8:]):
        for peer_id in frozen:
            simulator.pause(peer_id)
        simulator.run(20)
        for peer_id in frozen:
            simulator.resume(peer_id)
            simulator.run(0.05)
        if frozen == simulator.ids:
            simulator.run(30)
            assert not deaths(simulator)
        assert simulator.run(15, simulator.is_one_view)


def test_killed_and_restarted_peers_are_taken_back_within_seconds():
    simulator = federation(16)
    simulator.run(5)
    rng = np.random.default_rng(0)
    for _ in range(12):
        victim = simulator.ids[int(rng.integers(16))]
        simulator.crash(victim)
        simulator.run(5)
        simulator.start(victim)
        assert simulator.run(5, simulator.is_one_view)


def test_who_leaves_is_known_to_have_left_by_all_at_once_and_may_come_back():
    simulator = federation(32)
    simulator.run(10)
    gone = simulator.ids[9]
    simulator.leave(gone)
    simulator.run(4)
    views = [simulator.members[each].running.members for each in simulator.running()]
    standings = [each.standing for view in views for each in view if each.peer_id == gone]
    assert standings == [LEFT] * 31
    simulator.start(gone)
    assert simulator.run(5, simulator.is_one_view)


def test_a_liar_that_declares_everybody_dead_convinces_nobody_for_long():
    simulator = federation(8)
    simulator.run(10)
    liar = simulator.ids[7]
    for victim in simulator.ids[:7]:
        core = simulator.members[victim].running
        lies = [msgspec.structs.replace(each, standing=DEAD, accuser=liar) for each in core.members]
        simulator.tell(victim, Asked(sender=liar, ticket=-1, request=Ping(updates=lies)))
    assert not simulator.is_one_view()
    assert simulator.run(10, simulator.is_one_view)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 12), st.data())
def test_a_paused_peer_that_resumes_within_the_suspicion_time_is_never_declared_dead(
    seed, num_peers, data
):
    """The probe that it misses takes a second to fail, the shortest suspicion four more.

    One second is left to it to contradict.
    """
    simulator = federation(num_peers, seed=seed)
    assert simulator.run(20, simulator.is_one_view)
    for _ in range(3):
        paused = data.draw(st.sampled_from(simulator.ids))
        simulator.run(data.draw(st.floats(0, 3)))
        simulator.pause(paused)
        simulator.run(data.draw(st.floats(0, 4)))
        simulator.resume(paused)
        simulator.run(10)
    assert not deaths(simulator)
    assert simulator.run(20, simulator.is_one_view)


class Federation(RuleBasedStateMachine):
    """Whatever befalls six peers: once it ends, they agree."""

    peers = st.integers(0, 5)

    @initialize(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.05, 0.2]))
    def begin(self, seed, loss):
        self.simulator = federation(6, seed=seed, loss=loss)
        self.seen = 0
        self.believed: dict = {}

    @rule(seconds=st.floats(0.0, 12.0))
    def pass_time(self, seconds):
        self.simulator.run(seconds)

    @rule(index=peers)
    def crash_or_start(self, index):
        peer_id = self.simulator.ids[index]
        if self.simulator.members[peer_id].membership is None:
            self.simulator.start(peer_id)
        else:
            self.simulator.crash(peer_id)
            self.forget_view(peer_id)

    @rule(index=peers)
    def leave(self, index):
        member = self.simulator.members[self.simulator.ids[index]]
        if member.membership is not None and not member.paused:
            self.simulator.leave(self.simulator.ids[index])
            self.forget_view(self.simulator.ids[index])

    @rule(index=peers)
    def pause_or_resume(self, index):
        member = self.simulator.members[self.simulator.ids[index]]
        if member.paused:
            self.simulator.resume(self.simulator.ids[index])
        elif member.membership is not None:
            self.simulator.pause(self.simulator.ids[index])

    @rule(sides=st.lists(st.integers(0, 1), min_size=6, max_size=6))
    def divide(self, sides):
        ids = self.simulator.ids
        self.simulator.divide(
            [[p for p, s in zip(ids, sides, strict=True) if s == n] for n in (0, 1)]
        )

    @rule()
    def heal(self):
        self.simulator.heal()

    def forget_view(self, observer):
        self.check()
        self.believed = {key: each for key, each in self.believed.items() if key[0] != observer}

    @invariant()
    def check(self):
        """In every view incarnations never fall, and nobody rises at an equal one."""
        if not hasattr(self, "simulator"):
            return
        for each in self.simulator.sightings[self.seen :]:
            key = (each.observer, each.member.peer_id)
            if key in self.believed:
                assert each.member.outranks(self.believed[key])
            self.believed[key] = each.member
        self.seen = len(self.simulator.sightings)
        for member in self.simulator.members.values():
            assert not member.misbehaved

    def teardown(self):
        if not hasattr(self, "simulator"):
            return
        simulator = self.simulator
        simulator.network = Network()
        simulator.heal()
        for peer_id, member in simulator.members.items():
            if member.paused:
                simulator.resume(peer_id)
            if member.membership is None:
                simulator.start(peer_id)
        assert simulator.run(40, simulator.is_one_view)
        self.check()
        for observer, member in simulator.members.items():
            assert not member.running.has_left
            for each in member.running.members:
                assert self.believed[observer, each.peer_id] == each


TestFederation = Federation.TestCase
TestFederation.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


def test_another_process_with_our_key_is_told_from_what_we_were_before():
    lone = Lone()
    lone.hear(said(0, 0, SUSPECT))
    assert lone.core.counters.doubles == 0
    for times in range(1, 4):
        elsewhere = said(0, lone.core.own.incarnation + 1, endpoint="tcp://elsewhere:1")
        lone.hear(elsewhere)
        assert lone.core.counters.doubles == times
        assert lone.core.double is not None
        assert lone.core.double.endpoint == "tcp://elsewhere:1"
        lone.hear(elsewhere)  # old news by now
        assert lone.core.counters.doubles == times
