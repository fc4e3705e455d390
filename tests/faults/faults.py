"""The faults that a federation must survive, each a function from how long to what was seen."""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from field import Field, is_finite, mean_accuracy, percentile, row
from helpers_machines import V4, two_machines, why_not
from helpers_mqtt import Mosquitto

from protocol.identity import read_key_pair

DIGITS = Path(__file__).parents[2] / "configs" / "digits.toml"
FLOODER = Path(__file__).with_name("flooder.py")
FETCH_TIMEOUT_S = 2.0
Rows = list[dict[str, Any]]


@contextmanager
def field(peers: int, rounds: int, *overrides: str, min_round_s: float = 0.0) -> Iterator[Field]:
    """Peers with digits, in a folder of their own."""
    wanted = [f"peers={peers}", f"rounds={rounds}", "swarm.local_baseline=false"]
    wanted.append(f"swarm.fetch_timeout_s={FETCH_TIMEOUT_S}")
    with (
        tempfile.TemporaryDirectory() as folder,
        Field(
            Path(folder) / "run",
            DIGITS,
            [*wanted, *overrides],
            network={"membership": True},
            min_round_s=min_round_s,
        ) as made,
    ):
        yield made


def churn(seconds: float = 300.0, peers: int = 16, pause_s: float = 5.0) -> Rows:
    """One random peer is killed every few seconds, and started again as many seconds later."""
    min_round_s = 0.25
    rounds = round(seconds / min_round_s)
    accuracies, longest, kills = {}, {}, 0
    for disturbed in (False, True):
        with field(peers, rounds, min_round_s=min_round_s) as swarm:
            swarm.start(*swarm.names)
            if disturbed:
                kills = _kill_and_restart(swarm, seconds, pause_s, random.Random(0))
            results = swarm.until_finished(swarm.names, 2 * seconds + 120)
            accuracies[disturbed] = mean_accuracy(results)
            longest[disturbed] = [
                each["seconds"]["total"] for name in swarm.names for each in swarm.rounds(name)
            ]
    bound = 2 * percentile(longest[False], 95) + FETCH_TIMEOUT_S
    return [
        row("churn: peers killed", kills, None),
        row("churn: longest round undisturbed", max(longest[False]), None, "s"),
        row(
            "churn: 95th percentile of rounds undisturbed",
            percentile(longest[False], 95),
            None,
            "s",
        ),
        row("churn: 99.9th percentile of rounds", percentile(longest[True], 99.9), None, "s"),
        row("churn: longest round of a survivor", max(longest[True]), bound, "s"),
        row("churn: fall of mean accuracy", accuracies[False] - accuracies[True], 0.01),
    ]


def _kill_and_restart(swarm: Field, seconds: float, pause_s: float, rng: random.Random) -> int:
    """Kill a peer every `pause_s` by the clock, and start it as much later; return the kills."""
    began, kills = time.monotonic(), 0
    down: dict[str, float] = {}  # who is to be started, and when
    starting: set[str] = set()
    while (now := time.monotonic()) < began + seconds or down or starting:
        away = {*down, *starting, *swarm.results(swarm.names)}
        present = [name for name in swarm.names if name not in away]
        if present and began + kills * pause_s <= now < began + seconds:
            victim = rng.choice(present)
            swarm.signal(signal.SIGKILL, victim)
            down[victim] = now + pause_s
            kills += 1
        for name in [name for name, at in down.items() if now >= at]:
            swarm.launch(name)
            starting.add(name)
            del down[name]
        if listening := {name for name in starting if swarm.listens(name)}:
            swarm.introduce()
            starting -= listening
        time.sleep(0.1)
    return kills


def freeze(seconds: float = 20.0, peers: int = 8) -> Rows:
    """All peers are stopped at once and resumed: nobody stays dead."""
    with field(peers, 1_000_000, min_round_s=0.05) as swarm:
        swarm.start(*swarm.names)
        swarm.until(
            lambda: all(len(swarm.rounds(name)) > 20 for name in swarm.names), "all learn", 60
        )
        swarm.signal(signal.SIGSTOP, *swarm.names)
        time.sleep(seconds)
        at = {name: len(swarm.rounds(name)) for name in swarm.names}
        swarm.signal(signal.SIGCONT, *swarm.names)

        def whole() -> bool:
            newest = {name: swarm.rounds(name) for name in swarm.names}
            return all(
                len(rounds) > at[name] + 5 and rounds[-1]["neighbors"] == peers - 1
                for name, rounds in newest.items()
            )

        return [
            row("freeze: all see all again after", swarm.until(whole, "one view", 60), 15.0, "s")
        ]


def flood(messages: int = 1_000_000, seconds: float = 10.0, times: int = 4, peers: int = 3) -> Rows:
    """One peer is sent wrong messages now and then, from an allowed and from an unknown key."""
    with field(peers, 1_000_000) as swarm:
        swarm.start(*swarm.names[:-1])  # the last one's key is the flooder's
        victim = swarm.names[0]
        facts = json.loads((swarm.home(victim) / "ready.json").read_text())
        process = psutil.Process(facts["pid"])
        keys: list[list[str]] = [[str(swarm.home(swarm.names[-1]) / "secret.key")], []]
        command = [sys.executable, str(FLOODER), facts["endpoint"], facts["public_key"]]
        swarm.until(lambda: len(swarm.rounds(victim)) > 100, "it learns", 60)
        sent, dials, before = [0, 0], 0, process.memory_info().rss
        quiet, during = _Pace(swarm, victim), _Pace(swarm, victim)
        for _ in range(times):  # in turn, since other work on the machine comes and goes
            with quiet:
                time.sleep(seconds)
            with during:
                told = _storm(
                    [[*command, str(messages - sent[0]), str(seconds), *key] for key in keys]
                )
            sent = [so_far + each["sent"] for so_far, each in zip(sent, told, strict=True)]
            dials += sum(each["dials"] for each in told)
        grown = (process.memory_info().rss - before) / 1e6
        counters = swarm.rounds(victim)[-1]["counters"]
        slower = statistics.median(during.rounds) / statistics.median(quiet.rounds)
        return [
            row("flood: messages from the allowed key, before it was cut off", sent[0], None),
            row("flood: messages that the unknown key got rid of", sent[1], 0.0),
            row("flood: counted as malformed", counters.get("malformed", 0), None),
            row("flood: dropped unread, since it is banned", counters.get("shunned", 0), None),
            row("flood: connections tried", dials, None),
            row("flood: refused connections", counters.get("connections_refused", 0), None),
            row("flood: memory that the peer grew by", grown, 64.0, "MB"),
            row("flood: median round over that in between", slower, 1.1, "x"),
            row("flood: processor time of a round, the same", during.cost / quiet.cost, None, "x"),
        ]


def _storm(commands: list[list[str]]) -> list[dict[str, int]]:
    """Run flooders side by side; return what they tell at their end."""
    flooders = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    return [json.loads(flooder.communicate()[0]) for flooder in flooders]


class _Pace:
    """How long the rounds of a peer took, and what they cost, while this was entered."""

    def __init__(self, swarm: Field, name: str) -> None:
        self._swarm, self._name = swarm, name
        self._process = psutil.Process(swarm.pid(name))
        self._seconds = 0.0
        self.rounds: list[float] = []

    @property
    def cost(self) -> float:
        """Seconds of processor time a round."""
        return self._seconds / len(self.rounds)

    def __enter__(self) -> None:
        self._seen, self._began = len(self._swarm.rounds(self._name)), self._used()

    def __exit__(self, *_: object) -> None:
        self._seconds += self._used() - self._began
        newest = self._swarm.rounds(self._name)[self._seen :]
        self.rounds += [each["seconds"]["total"] for each in newest]

    def _used(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def poison(
    kinds: tuple[str, ...] = ("nan", "huge", "flipped", "zero", "stale", "nan-model"),
    seeds: int = 3,
    counts: tuple[int, ...] = (1, 2),
) -> Rows:
    """Of eight peers one, then two, send or serve poison; the others' accuracy is compared."""
    rows, refused, broken = [], 0, 0
    for count in counts:
        clean = {seed: _honest("", count, seed).accuracy for seed in range(seeds)}
        for kind in kinds:
            seen = [_honest(kind, count, seed) for seed in range(seeds)]
            falls = [clean[seed] - seen[seed].accuracy for seed in range(seeds)]
            name = f"poison: {count} of 8 {kind}, fall of honest accuracy"
            rows.append(row(name, statistics.fmean(falls), 0.02))
            refused += sum(each.refused for each in seen)
            broken += sum(each.broken for each in seen)
    rows.append(row("poison: gradients that honest peers refused", refused, None))
    rows.append(row("poison: honest models with a number that is not finite", broken, 0.0))
    return rows


class Honest(NamedTuple):
    """What the honest peers came to: accuracy, gradients refused, models with NaN or infinity."""

    accuracy: float
    refused: int
    broken: int


def _honest(kind: str, count: int, seed: int) -> Honest:
    """Run eight peers, some of them bad; without a kind those stay away."""
    with field(8, 50, f"seed={seed}", min_round_s=0.05) as swarm:
        # One of each label group, so that each has honest friends left.
        bad = [swarm.names[0], swarm.names[-1]][:count]
        honest = [name for name in swarm.names if name not in bad]
        if kind:
            swarm.poison(kind, *bad)
        swarm.start(*honest)
        results = swarm.until_finished(honest, 120)
        verdicts: Counter[str] = Counter()
        for name in honest:
            for each in swarm.rounds(name):
                verdicts.update(each["gradients"])
        return Honest(
            accuracy=mean_accuracy(results),
            refused=verdicts.total() - verdicts["applied"],
            broken=sum(not is_finite(swarm.home(name)) for name in honest),
        )


def partition(seconds: float = 60.0, peers: int = 8) -> Rows:
    """The cable between two halves is pulled out for a while."""
    if reason := why_not():
        print(f"  left out: {reason}")
        return []
    with two_machines() as machines, field(peers, 1_000_000, min_round_s=0.05) as swarm:
        halves = {"alice": swarm.names[: peers // 2], "bob": swarm.names[peers // 2 :]}
        for machine, names in halves.items():
            for name in names:
                swarm.configure(name, {}, {"listen": f"tcp://{V4[machine]}:0"})
            python = [sys.executable, "-P", "-m", "peer", "--keep-serving"]
            swarm.spawn([*machines.command(machine), *python], *names)

        def see(count: int) -> bool:
            newest = [swarm.rounds(name)[-1:] for name in swarm.names]
            return all(rounds and rounds[0]["neighbors"] == count for rounds in newest)

        swarm.until(lambda: see(peers - 1), "all see all", 120)
        machines.plug("bob", into=False)
        swarm.until(lambda: see(peers // 2 - 1), "both halves notice", 60)
        at = {name: len(swarm.rounds(name)) for name in swarm.names}
        time.sleep(seconds)
        slowest = min(len(swarm.rounds(name)) - at[name] for name in swarm.names) / seconds
        machines.plug("bob", into=True)
        healed = swarm.until(lambda: see(peers - 1), "one view", 120)
        return [
            row("partition: rounds a second in the halves", slowest, None),
            row("partition: one view again after", healed, 15.0, "s"),
        ]


def broker(seconds: float = 5.0, peers: int = 4) -> Rows:
    """Peers that know each other through a broker alone lose it three times."""
    with (
        tempfile.TemporaryDirectory() as folder,
        field(peers, 1_000_000, min_round_s=0.05) as swarm,
    ):
        password = Path(folder) / "password"
        password.write_text("secret")
        password.chmod(0o600)
        ids = [read_key_pair(swarm.home(name) / "secret.key").peer_id for name in swarm.names]
        federation = swarm.folder.name
        mosquitto = Mosquitto(Path(folder), dict.fromkeys(ids, "secret"), (federation,))
        mosquitto.start()
        settings = {
            "host": "localhost",
            "port": mosquitto.port,
            "ca_file": mosquitto.ca_file,
            "password_file": str(password),
            "reconnect_min_s": 0.2,
            "reconnect_max_s": 2.0,
        }
        for name in swarm.names:
            swarm.configure(name, {}, {"mqtt": settings, "neighbors_file": "", "membership": False})
        try:
            swarm.start(*swarm.names)

            def see_all() -> bool:
                newest = [swarm.rounds(name)[-1:] for name in swarm.names]
                return all(rounds and rounds[0]["neighbors"] == peers - 1 for rounds in newest)

            swarm.until(see_all, "all see all", 60)
            lost = 0
            for _ in range(3):
                mosquitto.kill()
                time.sleep(seconds)
                lost += not see_all()
                mosquitto.start()
                time.sleep(seconds)
                lost += not see_all()
            connected = [
                swarm.rounds(name)[-1]["counters"].get("mqtt_connected", 0) for name in swarm.names
            ]
        finally:
            mosquitto.close()
        return [
            row("broker: times that somebody lost a neighbor", lost, 0.0),
            row("broker: peers that are not present again", sum(c < 4 for c in connected), 0.0),
        ]


def clock(peers: int = 4) -> Rows:
    """The wall clock of every peer jumps an hour forth and back at every look."""
    medians = {}
    for jumping in (False, True):
        with field(peers, 60, min_round_s=0.05) as swarm:
            swarm.poison("clock" if jumping else "", *swarm.names)
            swarm.until_finished(swarm.names, 120)
            rounds = [each for name in swarm.names for each in swarm.rounds(name)]
            medians[jumping] = statistics.median(each["seconds"]["total"] for each in rounds)
    # All finish, or there is no figure; the machine alone makes medians of two runs differ so much.
    return [row("clock: median round over that before", medians[True] / medians[False], 1.5, "x")]


FAULTS = {
    "partition": partition,
    "broker": broker,
    "clock": clock,
    "churn": churn,
    "freeze": freeze,
    "flood": flood,
    "poison": poison,
}
