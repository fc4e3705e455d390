"""What the simulation tests share: small swarms of the digits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer.config import build_settings
from peer.events import Effect, Event
from protocol.messages import PeerId
from sim.experiment import SwarmSettings
from sim.plan import load_slices
from sim.simulation import Simulation

Logged = tuple[float, PeerId, Event, Sequence[Effect]]


def swarm_settings(
    peers: int = 4,
    rounds: int = 4,
    *,
    partition: dict[str, Any] | None = None,
    simulate: dict[str, Any] | None = None,
    **others: Any,
) -> SwarmSettings:
    """Return settings of a swarm whose peers have 20 to 30 digits and a linear model each."""
    grouped = {"kind": "permuted", "groups": min(2, peers), "min_examples": 20, "max_examples": 30}
    tree = {
        "name": "test",
        "data": "digits",
        "model": "logistic",
        "peers": peers,
        "rounds": rounds,
        "partition": {**grouped, **(partition or {})},
        "simulate": simulate or {},
        **others,
    }
    return build_settings(tree, SwarmSettings, "a test")


def make_simulation(settings: SwarmSettings) -> Simulation:
    return Simulation(settings, load_slices(settings, Path.cwd()))


def log_of(simulation: Simulation) -> list[Logged]:
    """Run a simulation to its end; return every event, when, at whom, and its effects."""
    log: list[Logged] = []
    simulation.engine._on_event = lambda peer_id, event, effects: log.append(
        (simulation.seconds, peer_id, event, effects)
    )
    simulation.run()
    return log


def effects_of(log: Sequence[Logged], kind: type, peer_id: PeerId | None = None) -> list[Any]:
    """Return the effects of one kind, of all peers or of one, with their times."""
    return [
        (time_s, effect)
        for time_s, who, _, effects in log
        for effect in effects
        if isinstance(effect, kind) and peer_id in (None, who)
    ]


def events_of(log: Sequence[Logged], kind: type, peer_id: PeerId) -> list[Any]:
    """Return the events of one kind that one peer handled, with their times."""
    return [
        (time_s, event)
        for time_s, who, event, _ in log
        if who == peer_id and isinstance(event, kind)
    ]
