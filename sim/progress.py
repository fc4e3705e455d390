"""Show how far a swarm has come: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sim.matrix import strongest_others
from sim.records import PeerRecords, RoundRecord, Run
from sim.terminal import group_style, new_table, percent, short_names

DOWN = "down"
"""The state of a peer whose process has ended before it finished; others are only shown."""

_KEPT_ROUNDS = 8
"""Newest rounds of each peer that are held in memory, and over which its traffic is averaged."""

_QUIET_S = 15.0
"""Without a terminal, a line comes at least this often while rounds advance."""

_REDRAW_S = 0.5
"""Least time between two drawings of the live table, which cost some 20 ms each."""

_CLOCK_S = 1.0
"""Without news, how often to draw it for the sake of its clock."""

_SHOWN_COLLABORATORS = 3
_FIXED_LINES = 7
"""Lines of the live display that aren't rows of peers."""

_STATE_STYLES = {"running": "green", "finished": "bold green", DOWN: "bold red"}


class SwarmProgress:
    """A context in which `update` keeps a swarm's progress in view.

    It reads the peers' records by itself, only what is new, and holds few of them.

    Args:
        run: The run to watch; what it holds is left as it is.
        console: Where to show it. In a terminal a table stays in place and disappears at the end,
            unless the end is an error. Elsewhere a line is printed when the median peer has done
            another tenth of the rounds, when something is new after 15 s without a line, and
            when a peer goes down or comes back.
        total_rounds: Rounds that each peer will do; None when there is no end.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        run: Run,
        console: Console,
        total_rounds: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = run.name
        self._groups = run.label_groups or {}
        self._peers = [PeerRecords(peer.name, peer.folder, _KEPT_ROUNDS) for peer in run.peers]
        self._short = short_names(run.names)
        self._console = console
        self._total_rounds = total_rounds
        self._clock = clock
        self._started_s = clock()
        self._first_seen: tuple[float, int] | None = None  # when, and the rounds done by then
        self._states: dict[str, str] = {}
        self._live: Live | None = None
        self._said_s, self._said_round = self._started_s, 0.0
        self._unsaid = False
        self._drawn_s = -math.inf

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._refresh()
        if self._live is not None:
            self._live.transient = error is None
            self._live.update(self._display(), refresh=True)
            self._live.stop()
        elif self._unsaid:
            self._say(self._status_line())

    def update(self, states: Mapping[str, str]) -> None:
        """Read what the peers recorded since the last call, and show it.

        Cheap enough to be called four times a second: a peer that recorded nothing costs one look
        at its file's size.

        Args:
            states: What each peer is doing, by name: "starting", "running", "finished", "down".
        """
        before, self._states = self._states, dict(states)
        self._unsaid |= self._refresh() or before != self._states
        if self._live is not None:
            if self._clock() - self._drawn_s >= (_REDRAW_S if self._unsaid else _CLOCK_S):
                self._live.update(self._display(), refresh=True)
                self._drawn_s, self._unsaid = self._clock(), False
            return
        for name, state in states.items():
            if state != before.get(name) and DOWN in (state, before.get(name)):
                self._say(f"{name} is {state}")
        if self._is_due():
            self._say(self._status_line())
            self._said_s, self._said_round = self._clock(), self._median_round()
            self._unsaid = False

    def _refresh(self) -> bool:
        news = [peer.refresh() for peer in self._peers]  # a list, since each must be read
        done = sum(peer.rounds_done for peer in self._peers)
        if self._first_seen is None and done:
            self._first_seen = (self._clock(), done)
        return any(news)

    def _is_due(self) -> bool:
        if self._total_rounds:
            now, said = self._median_round(), self._said_round
            if int(10 * now / self._total_rounds) > int(10 * said / self._total_rounds):
                return True
        return self._unsaid and self._clock() - self._said_s >= _QUIET_S

    def _say(self, line: str) -> None:
        elapsed_s = self._clock() - self._started_s
        self._console.print(
            f"[{elapsed_s:6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True
        )

    def _status_line(self) -> str:
        slowest = min((peer.rounds_done for peer in self._taking_part()), default=0)
        total = f" of {self._total_rounds}" if self._total_rounds else ""
        parts = [f"round {self._median_round():g}{total} (slowest {slowest})"]
        if accuracies := self._validation_accuracies():
            parts.append(f"validation accuracy {percent(fmean(accuracies))} %")
        return ", ".join([*parts, *self._state_counts(self._peers)])

    def _taking_part(self) -> list[PeerRecords]:
        return [p for p in self._peers if self._states.get(p.name) != DOWN] or self._peers

    def _median_round(self) -> float:
        return float(median([peer.rounds_done for peer in self._taking_part()] or [0]))

    def _validation_accuracies(self) -> list[float]:
        newest = [peer.latest for peer in self._peers if peer.latest is not None]
        return [r.validation_accuracy for r in newest if r.validation_accuracy is not None]

    def _state_counts(self, peers: Sequence[PeerRecords]) -> list[str]:
        counts = Counter(self._states.get(peer.name, "starting") for peer in peers)
        return [f"{count} {state}" for state, count in sorted(counts.items())]

    def _left_s(self) -> float | None:
        """Return about how long the slowest peer still needs, from the pace of all so far."""
        if self._first_seen is None or not self._total_rounds:
            return None
        since_s, done_then = self._first_seen
        done = sum(peer.rounds_done for peer in self._peers) - done_then
        slowest = min(peer.rounds_done for peer in self._taking_part())
        if done <= 0:
            return None
        return (self._total_rounds - slowest) * (self._clock() - since_s) * len(self._peers) / done

    def _display(self) -> RenderableType:
        room = max(self._console.height - _FIXED_LINES, 1)
        shown, hidden = self._peers[:room], self._peers[room:]
        table = new_table(self._console)
        table.add_column("peer", no_wrap=True, max_width=24)
        for heading in ("round", "own loss", "val. acc. %"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("strongest collaborators, %", no_wrap=True, min_width=26)
        table.add_column("sent/s", justify="right", no_wrap=True, min_width=9)
        table.add_column("state", no_wrap=True)
        for peer in shown:
            table.add_row(*self._row(peer))
        lines: list[RenderableType] = [self._headline(), table]
        if hidden:
            counts = ", ".join(self._state_counts(hidden))
            lines.append(Text(f"and {len(hidden)} more: {counts}", style="dim"))
        lines.append(Text(self._status_line(), no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _headline(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        clock = f"{_minutes(self._clock() - self._started_s)}"
        if not self._total_rounds:
            grid.add_row(Text(self._name, style="bold"), clock)
            return grid
        done = sum(min(peer.rounds_done, self._total_rounds) for peer in self._peers)
        bar = ProgressBar(total=self._total_rounds * len(self._peers), completed=done, width=30)
        left_s = self._left_s()
        left = "" if left_s is None else f"about {_minutes(left_s)} left"
        grid.add_row(Text(self._name, style="bold"), bar, clock, left)
        return grid

    def _row(self, peer: PeerRecords) -> list[Text]:
        state = self._states.get(peer.name, "starting")
        record = peer.latest
        done = f"{peer.rounds_done}/{self._total_rounds or '-'}"
        cells = [Text(peer.name, style=group_style(self._groups.get(peer.name))), Text(done)]
        if record is None:
            cells += [Text("")] * 4
        else:
            loss = "-" if record.loss is None else f"{record.loss:.3f}"
            rate = _bytes_per_s(peer.records) if state not in (DOWN, "finished") else None
            cells += [
                Text(loss),
                Text(percent(record.validation_accuracy)),
                self._collaborators(peer.name, record),
                Text("-" if rate is None else _traffic(rate)),
            ]
        return [*cells, Text(state, style=_STATE_STYLES.get(state, "dim"))]

    def _collaborators(self, name: str, record: RoundRecord) -> Text:
        cell = Text()
        for other, weight in strongest_others(record.weights, name, _SHOWN_COLLABORATORS):
            cell.append(self._short.get(other, other), style=group_style(self._groups.get(other)))
            cell.append(f" {percent(weight, 0)}  ")
        return cell


def _bytes_per_s(records: Sequence[RoundRecord]) -> float | None:
    """Return the traffic sent over these rounds; None when they don't tell.

    A restart sets time and traffic back to zero: then only what came after it counts.
    """
    since = len(records) - 1
    while since > 0 and records[since - 1].time_s < records[since].time_s:
        since -= 1
    if since < 0 or records[-1].time_s <= records[since].time_s:
        return None
    sent = records[-1].bytes_sent - records[since].bytes_sent
    return max(sent, 0) / (records[-1].time_s - records[since].time_s)


def _traffic(bytes_per_s: float) -> str:
    if bytes_per_s < 1e6:
        return f"{bytes_per_s / 1e3:.0f} kB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
