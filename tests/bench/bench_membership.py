"""How soon a crash is noticed, and how often the living are taken for dead, on a virtual clock.

A federation of each size joins without loss. Then for half a minute under loss nobody dies, and
each death that anybody sees is false; then one peer crashes.

Usage: bench_membership.py MEMBERS...
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from protocol.gossip import Standing
from protocol.membership_settings import MembershipSettings
from protocol.suspicion import SuspicionLimits
from sim.membership import MembershipSimulator, Network, Sighting

SEEDS = {8: 20, 64: 6, 256: 2}
LOSSES = (0.0, 0.05, 0.2)
QUIET_S = 30.0
LONGEST_S = 60.0
SETTINGS = MembershipSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One federation's half a minute, and its crash; times in seconds since the crash."""

    false_deaths: int
    probes: int
    probes_failed: int
    suspected_s: float
    found_dead_s: float
    known_s: float


def bench() -> list[dict[str, object]]:
    """Return all rows of this module."""
    return list(rows(tuple(SEEDS)))


def rows(sizes: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Yield two rows for each size and loss."""
    for num_members in sizes:
        for loss in LOSSES:
            seeds = range(SEEDS.get(num_members, 3))
            outcomes = [watch(num_members, loss, seed) for seed in seeds]
            name = f"{num_members} members, {loss:.0%} loss"
            yield _detection(f"{name}: a crash is found", num_members, outcomes)
            yield _false_deaths(f"{name}: false deaths", num_members, loss, outcomes)


def watch(num_members: int, loss: float, seed: int) -> Outcome:
    """Let a federation of so many members have its half a minute and its crash."""
    simulator = MembershipSimulator(num_members, Network(), SETTINGS, seed=seed)
    for peer_id in simulator.ids:
        simulator.start(peer_id)
    if not simulator.run(60, simulator.is_one_view):
        raise RuntimeError(f"{num_members} members didn't find each other")
    simulator.network = Network(loss=loss)
    counters = [simulator.members[each].running.counters for each in simulator.running()]
    start = len(simulator.sightings), sum(each.probes for each in counters)
    failed = sum(each.probes_failed for each in counters)
    simulator.run(QUIET_S)
    false_deaths = _deaths(simulator.sightings[start[0] :])
    probes = sum(each.probes for each in counters) - start[1]
    failed = sum(each.probes_failed for each in counters) - failed

    victim, crashed_s = simulator.ids[seed % num_members], simulator.now_s
    start_of_search = len(simulator.sightings)
    simulator.crash(victim)

    def all_know() -> bool:
        views = (simulator.members[each].running for each in simulator.running())
        return not any(view.believes_present(victim) for view in views)

    known = simulator.run(LONGEST_S, all_know)
    later = simulator.sightings[start_of_search:]
    seen = [each for each in later if each.member.peer_id == victim]
    others = [each for each in later if each.member.peer_id != victim]
    return Outcome(
        false_deaths=len(false_deaths | _deaths(others)),
        probes=probes,
        probes_failed=failed,
        suspected_s=_first(seen, Standing.SUSPECT) - crashed_s,
        found_dead_s=_first(seen, Standing.DEAD) - crashed_s,
        known_s=simulator.now_s - crashed_s if known else math.inf,
    )


def expected_s(num_members: int) -> float:
    """Return when a crash is found: suspected after e / (e - 1) intervals (SWIM, section 3.1).

    Then comes the shortest suspicion, since with so many members others soon confirm it.
    """
    limits = SuspicionLimits.of(
        num_members,
        SETTINGS.probe_interval_s,
        SETTINGS.suspicion_multiplier,
        SETTINGS.suspicion_longest,
    )
    return math.e / (math.e - 1) * SETTINGS.probe_interval_s + limits.shortest_s


def expected_failures(loss: float) -> float:
    """Return the share of probes of the living that fail: two messages lost or three times four."""
    direct, relayed = 1 - (1 - loss) ** 2, 1 - (1 - loss) ** 4
    return float(direct * relayed**SETTINGS.indirect_probes)


def _deaths(sightings: list[Sighting]) -> set[tuple[str, int]]:
    """Return each life that anybody saw end."""
    return {
        (each.member.peer_id, each.member.incarnation)
        for each in sightings
        if each.member.standing is Standing.DEAD
    }


def _first(sightings: list[Sighting], standing: Standing) -> float:
    return next((each.at_s for each in sightings if each.member.standing is standing), math.inf)


def _detection(name: str, num_members: int, outcomes: list[Outcome]) -> dict[str, object]:
    found = [each.found_dead_s for each in outcomes]
    suspected = statistics.median(each.suspected_s for each in outcomes)
    known = statistics.median(each.known_s for each in outcomes)
    return {
        "name": name,
        "value": round(statistics.median(found), 2),
        "spread": [round(min(found), 2), round(max(found), 2)],
        "unit": "s",
        "compared_with": f"by the formulas {expected_s(num_members):.1f}; "
        f"suspected after {suspected:.1f}, known to all after {known:.1f}",
        "command": "make bench only=membership",
    }


def _false_deaths(
    name: str, num_members: int, loss: float, outcomes: list[Outcome]
) -> dict[str, object]:
    deaths = [each.false_deaths for each in outcomes]
    failed = sum(each.probes_failed for each in outcomes) / sum(each.probes for each in outcomes)
    return {
        "name": name,
        "value": sum(deaths),
        "spread": [min(deaths), max(deaths)],
        "unit": f"in {len(outcomes)} runs, half a minute of {num_members} members and a crash each",
        "compared_with": f"probes in vain {failed:.2%}, by the formula "
        f"{expected_failures(loss):.2%}",
        "command": "make bench only=membership",
    }


if __name__ == "__main__":
    for row in rows(tuple(map(int, sys.argv[1:])) or tuple(SEEDS)):
        print(
            row["name"], row["value"], row["spread"], row["unit"], row["compared_with"], flush=True
        )
