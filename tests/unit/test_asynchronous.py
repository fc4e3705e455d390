"""The asynchronous engine: never a hang, the same bits twice, and churn as it would be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import peer_id
from helpers_simulation import (
    Logged,
    effects_of,
    events_of,
    log_of,
    make_simulation,
    swarm_settings,
)
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from peer.algorithm import AlgorithmSettings
from peer.events import (
    Adopt,
    AskFailed,
    Fetch,
    FetchFailed,
    Finished,
    GradientArrived,
    GroupsTold,
    ModelAsked,
    ModelFetched,
    NeighborsChanged,
    Publish,
    RoundFinished,
    SendGradient,
    Started,
)
from protocol.errors import ConfigError
from protocol.messages import PeerId
from sim.links import Links
from sim.simulate_settings import SimulateSettings
from sim.simulation import Simulation

PEERS, ROUNDS = 4, 4
NAMES = [f"peer-0{number}" for number in range(PEERS)]


CLUSTERED_BY_ONE = {"profile": "odcl", "start_steps": 3, "clustered_by": "one"}


def simulate(
    rounds: int = ROUNDS, peers: int = PEERS, seed: int = 0, algorithm=None, **simulate
) -> Simulation:
    settings = swarm_settings(
        peers,
        rounds,
        seed=seed,
        algorithm=algorithm or {},
        simulate={"mode": "asynchronous", **simulate},
    )
    return make_simulation(settings)


def finish_times(log: list[Logged]) -> dict[PeerId, float]:
    return {who: time_s for time_s, who, _, effects in log if Finished() in effects}


def rounds_at(log: list[Logged], who: PeerId) -> list[int]:
    return [finished.round_number for _, finished in effects_of(log, RoundFinished, who)]


@st.composite
def stays(draw: st.DrawFn) -> dict[str, object]:
    joins_s = draw(st.sampled_from([0.0, 0.0, 0.05, 0.3]))
    stay: dict[str, object] = {"joins_s": joins_s}
    if draw(st.booleans()):
        leaves_s = joins_s + draw(st.floats(0.01, 0.5))
        stay["leaves_s"] = leaves_s
        if draw(st.booleans()):
            stay["returns_s"] = leaves_s + draw(st.floats(0.001, 0.5))
            stay["forgets"] = draw(st.booleans())
    return stay


@st.composite
def networks(draw: st.DrawFn) -> dict[str, object]:
    delay_s = draw(st.sampled_from([0.0, 0.003, 0.05]))
    return {
        "delay_s": delay_s,
        "jitter_s": draw(st.sampled_from([0.0, 0.01])),
        "loss": draw(st.sampled_from([0.0, 0.2, 1.0])),
        "uplink_bytes_per_s": draw(st.sampled_from([0.0, 1e5, 1e3])),
        "fetch_timeout_s": 2 * delay_s + draw(st.sampled_from([0.001, 0.1])),
        "algorithm": draw(st.sampled_from([{}, CLUSTERED_BY_ONE])),
        "measure_s": draw(st.sampled_from([0.0, 0.005])),
        "gradient_s": draw(st.sampled_from([0.0, 0.01])),
        "slow": draw(st.dictionaries(st.sampled_from(NAMES), st.floats(0.1, 30), max_size=2)),
        "churn": draw(st.dictionaries(st.sampled_from(NAMES), stays(), max_size=3)),
    }


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.integers(0, 3))
def test_whatever_happens_every_peer_that_stays_does_all_its_rounds_and_replays_the_same(
    network, seed
):
    first, second = simulate(seed=seed, **network), simulate(seed=seed, **network)
    log = log_of(first)
    assert log == log_of(second), "the same seed gave other events"
    times = [time_s for time_s, *_ in log]
    assert times == sorted(times)
    for name, peer in zip(NAMES, first.peers.values(), strict=True):
        stay = network["churn"].get(name, {})
        if "leaves_s" not in stay or "returns_s" in stay:
            assert first.has_finished(peer)
            assert rounds_at(log, peer.peer_id)[-1] == ROUNDS - 1
        if "leaves_s" not in stay:
            assert_replays(first, log, peer.peer_id)
    work = first.engine.work.values()
    assert sum(each.bytes_received for each in work) <= sum(each.bytes_sent for each in work)


def assert_replays(simulation: Simulation, log: list[Logged], who: PeerId) -> None:
    """Feed what one peer was told to a fresh core of its own: the same effects."""
    peer = simulation.peers[who]
    model = simulation._new_learner(peer.name, 10, peer.examples).parameters()
    fresh = simulation._new_core(peer.name, peer.examples, model)
    for _, each, event, effects in log:
        if each == who:
            assert list(fresh.handle(event)) == list(effects)


def test_a_lost_model_costs_one_deadline_and_not_one_each():
    log = log_of(simulate(loss=1.0, fetch_timeout_s=5.0, peers=6))
    for who, time_s in finish_times(log).items():
        failures = events_of(log, FetchFailed, who)
        asking = {failed.round_number for _, failed in failures}
        assert len(failures) > len(asking)
        assert 5.0 * len(asking) < time_s < 5.0 * len(asking) + 1.0


def test_with_every_message_lost_a_peer_learns_as_if_it_were_alone():
    lost = simulate(loss=1.0)
    log_of(lost)
    alone = make_simulation(swarm_settings(PEERS, ROUNDS, algorithm={"num_neighbors": 0}))
    alone.run()
    for who, peer in lost.peers.items():
        assert peer.learner.parameters() == alone.peers[who].learner.parameters()
        assert lost.engine.work[who].bytes_received == 0


def test_a_straggler_delays_nobody():
    fast = finish_times(log_of(simulate(rounds=8)))
    slow = finish_times(log_of(simulate(rounds=8, slow={"peer-02": 20.0})))
    straggler = peer_id(2)
    assert slow[straggler] > 10 * fast[straggler]  # its work takes 20 times as long, not its links
    for who in fast.keys() - {straggler}:
        assert slow[who] <= 1.05 * fast[who]


def test_a_share_of_the_peers_is_drawn_to_be_slow():
    simulation = simulate(peers=8, rounds=2, slow_share=0.5, slow_factor=10.0)
    times = sorted(finish_times(log_of(simulation)).values())
    assert times[3] * 5 < times[4]


def test_on_the_virtual_clock_a_round_takes_what_its_work_takes():
    settings = {"delay_s": 0.0, "measure_s": 1.0, "gradient_s": 10.0, "step_s": 100.0}
    log = log_of(simulate(peers=1, rounds=1, fetch_timeout_s=1.0, **settings))
    steps = AlgorithmSettings().steps_after(1)
    assert finish_times(log)[peer_id(0)] == pytest.approx(1.0 + steps * 110.0)


def test_a_message_takes_its_delay_each_way():
    log = log_of(simulate(delay_s=0.02, measure_s=0.0, gradient_s=0.0, step_s=0.0, peers=2))
    sent, arrived = effects_of(log, SendGradient), {}
    for who in (peer_id(0), peer_id(1)):
        for time_s, event in events_of(log, GradientArrived, who):
            arrived[event.update.sender, event.update.sender_round] = time_s
    assert sent
    for time_s, effect in sent:
        key = effect.update.sender, effect.update.sender_round
        assert arrived[key] == pytest.approx(time_s + 0.02)
    (first, _), *_ = events_of(log, ModelFetched, peer_id(0))
    assert first == pytest.approx(0.04)


def test_whoever_leaves_is_heard_of_no_more_and_missed_by_all():
    churn = {"peer-01": {"leaves_s": 0.3}}
    simulation = simulate(rounds=12, delay_s=0.02, churn=churn)
    log = log_of(simulation)
    gone = peer_id(1)
    assert not simulation.has_finished(simulation.peers[gone])
    for time_s, who, event, _ in log:
        if time_s > 0.3:
            assert who != gone
            match event:
                case ModelFetched(owner):
                    assert owner != gone
                case GradientArrived(update):
                    assert update.sender != gone
                case ModelAsked(asker):
                    assert asker != gone
    for who in simulation.peers.keys() - {gone}:
        ((heard_s, event),) = events_of(log, NeighborsChanged, who)
        assert heard_s == pytest.approx(0.32)
        assert event.neighbors == simulation.peers.keys() - {gone}
        late = [e for t, e in effects_of(log, RoundFinished, who) if t > 0.6]
        assert late
        assert all(gone not in finished.sampled for finished in late[1:])


@pytest.mark.parametrize("forgets", [False, True])
def test_whoever_returns_goes_on_from_its_last_round_or_begins_anew(forgets):
    churn = {"peer-01": {"leaves_s": 0.5, "returns_s": 0.9, "forgets": forgets}}
    simulation = simulate(rounds=10, churn=churn)
    log = log_of(simulation)
    who = peer_id(1)
    rounds = [(t, finished.round_number) for t, finished in effects_of(log, RoundFinished, who)]
    before = [number for t, number in rounds if t < 0.5]
    after = [number for t, number in rounds if t > 0.5]
    assert before == list(range(before[-1] + 1))
    assert after == list(range(0 if forgets else before[-1] + 1, 10))
    assert [t for t, _ in events_of(log, Started, who)] == [0.0, 0.9]
    published = effects_of(log, Publish, who)
    (last,) = [e.snapshot for t, e in published if t < 0.5][-1:]
    (first,) = [e.snapshot for t, e in published if t >= 0.9][:1]
    assert (last.version.incarnation, first.version.incarnation) == (0, 1)
    assert (first.tensors == last.tensors) is not forgets
    saved = simulation.peers[who].core.snapshot()
    steps = simulation.peers[who].learner.optimizer_state()["1.bias/step"]
    adopted = any(effects_of(log, Adopt, who))
    assert steps == simulation._settings.algorithm.steps_after(saved.round_number) or adopted


def test_a_late_newcomer_is_told_to_all_and_starts_from_the_best_model():
    churn = {"peer-03": {"joins_s": 1.0}}
    settings = swarm_settings(
        PEERS, 40, simulate={"mode": "asynchronous", "churn": churn}, algorithm={"adopt_after": 5}
    )
    simulation = make_simulation(settings)
    log = log_of(simulation)
    newcomer = peer_id(3)
    assert events_of(log, Started, newcomer)[0][0] == 1.0
    ((_, adopt),) = effects_of(log, Adopt, newcomer)
    assert adopt.peer_id == peer_id(2)  # the other one of its group
    for who in simulation.peers.keys() - {newcomer}:
        assert newcomer not in events_of(log, Started, who)[0][1].neighbors
        heard_s, event = events_of(log, NeighborsChanged, who)[0]
        assert heard_s == pytest.approx(1.01)
        assert newcomer in event.neighbors
    assert any(
        newcomer in finished.sampled
        for who in simulation.peers.keys() - {newcomer}
        for _, finished in effects_of(log, RoundFinished, who)
    )


def clusterings(log: list[Logged]) -> dict[PeerId, tuple[str, PeerId | None]]:
    return {
        who: (effect.clustering, effect.clustered_by)
        for _, who, _, effects in log
        for effect in effects
        if isinstance(effect, RoundFinished) and effect.round_number == 0
    }


def test_when_the_one_who_clusters_leaves_in_the_middle_the_next_tells_the_others():
    algorithm = {**CLUSTERED_BY_ONE, "start_steps": 20}
    calm = log_of(simulate(rounds=1, peers=6, algorithm=algorithm))
    first, second, *others = (peer_id(number) for number in range(6))
    assert {teller for _, teller in clusterings(calm).values()} == {first}
    ((begins_s, _), *_) = effects_of(calm, Fetch, first)
    ((ends_s, _),) = effects_of(calm, RoundFinished, first)
    churn = {"peer-00": {"leaves_s": (begins_s + ends_s) / 2}}
    simulation = simulate(rounds=1, peers=6, algorithm=algorithm, churn=churn)
    log = log_of(simulation)
    found = clusterings(log)
    assert set(found) == {second, *others}
    assert {teller for _, teller in found.values()} == {second}
    assert len({digest for digest, _ in found.values()}) == 1
    assert {time_s for time_s, _ in events_of(log, AskFailed, second)} == {
        time_s for time_s, _ in events_of(log, NeighborsChanged, second)
    }


def test_a_late_peer_is_not_in_the_groups_it_is_told_and_clusters_itself():
    algorithm = {**CLUSTERED_BY_ONE, "start_steps": 20}
    churn = {"peer-03": {"joins_s": 5.0}}
    log = log_of(simulate(rounds=1, algorithm=algorithm, churn=churn))
    late = peer_id(3)
    assert [event.peer_id for _, event in events_of(log, GroupsTold, late)] == [peer_id(0)]
    assert sum(1 for _ in events_of(log, ModelFetched, late)) == 3
    assert clusterings(log)[late][1] == late


def test_nobody_sends_faster_than_its_uplink():
    rate = 20_000.0
    simulation = simulate(rounds=8, uplink_bytes_per_s=rate, fetch_timeout_s=0.4)
    log = log_of(simulation)
    for who, work in simulation.engine.work.items():
        assert work.bytes_sent <= rate * log[-1][0] + 1
        assert simulation.has_finished(simulation.peers[who])
    assert sum(work.bytes_sent for work in simulation.engine.work.values()) > 0


def test_links_send_one_thing_after_another_and_break_off_at_the_deadline():
    settings = SimulateSettings(delay_s=1.0, uplink_bytes_per_s=10.0, fetch_timeout_s=3.0)
    links, me, other = Links(settings, np.random.default_rng(0)), peer_id(0), peer_id(1)
    assert links.send(me, 20, 0.0) == (3.0, 20)
    assert links.send(me, 20, 0.0) == (5.0, 20)
    assert links.send(other, 20, 0.0) == (3.0, 20)
    assert links.send(me, 20, 0.0, deadline_s=5.0) == (math.inf, 10)  # half of it, from 4 to 5
    assert links.send(me, 20, 0.0, deadline_s=5.0) == (math.inf, 0)
    assert links.send(me, 20, 9.0) == (12.0, 20)
    links.hang_up(me)
    assert links.send(me, 20, 9.0) == (12.0, 20)


@given(
    st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1), st.integers(0, 2**32), st.integers(0, 99)
)
def test_latency_lies_between_delay_and_delay_with_jitter(delay_s, jitter_s, loss, seed, size):
    settings = SimulateSettings(
        delay_s=delay_s, jitter_s=jitter_s, loss=loss, fetch_timeout_s=2 * delay_s + 1
    )
    links = Links(settings, np.random.default_rng(seed))
    assert delay_s <= links.latency_s() <= delay_s + jitter_s
    arrival_s, sent_bytes = links.send(peer_id(0), size, 5.0)
    assert 5.0 + delay_s <= arrival_s <= 5.0 + delay_s + jitter_s
    assert sent_bytes == size


def test_a_run_that_is_no_longer_wanted_ends_at_once():
    simulation = simulate(rounds=1000)
    done: list[float] = []
    simulation.run(
        on_round=lambda peer, report, totals: done.append(totals["seconds"]),
        wanted=lambda: len(done) < 10,
    )
    assert len(done) == 10
    assert done == sorted(done)


@pytest.mark.parametrize(
    ("simulate", "message"),
    [
        ({"mode": "synchronous"}, "simulate.mode"),
        ({"delay_s": -0.1}, "simulate.delay_s"),
        ({"delay_s": math.nan}, "simulate.delay_s"),
        ({"jitter_s": math.inf}, "simulate.jitter_s"),
        ({"loss": 1.5}, "simulate.loss"),
        ({"slow": {"peer-00": 0.0}}, "simulate.slow"),
        ({"fetch_timeout_s": 0.0}, "simulate.fetch_timeout_s"),
        ({"delay_s": 1.0, "fetch_timeout_s": 2.0}, "over before a model can arrive"),
        ({"churn": {"peer-00": {"leaves_s": 2.0, "joins_s": 3.0}}}, "leaves_s = 2 must be above"),
        ({"churn": {"peer-00": {"leaves_s": 2.0, "returns_s": 2.0}}}, "returns_s = 2 must be"),
        ({"churn": {"peer-00": {"returns_s": 2.0}}}, "needs a leaves_s"),
        ({"churn": {"peer-00": {"goes_s": 2.0}}}, "goes_s"),
        ({"churn": {"peer-00": 2.0}}, "simulate.churn"),
        ({"delay": 1.0}, "did you mean simulate.delay_s"),
    ],
)
def test_impossible_settings_are_one_error_that_names_them(simulate, message):
    with pytest.raises(ConfigError) as caught:
        swarm_settings(simulate=simulate)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
