"""Show how far a comparison has come: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sim.comparison import Trial
from sim.trial import TrialResult

_QUIET_S = 15.0
"""Without a terminal, a line comes at most this seldom, or with each tenth of the trials."""


class TrialProgress:
    """A context in which a comparison's trials are counted.

    Args:
        console: Where to show it. In a terminal a bar stays in place and disappears at the end.
        planned: How many trials each method has in all.
        jobs: How many run at a time.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        console: Console,
        planned: Mapping[str, int],
        jobs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._left = Counter(planned)
        self._total = self._left.total()
        self._jobs = jobs
        self._clock = clock
        self._seconds: dict[str, list[float]] = {}
        self._started_s = self._said_s = clock()
        self._said = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("trials", total=self._total, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @property
    def done(self) -> int:
        """Trials that are behind us, failed ones included."""
        return self._total - self._left.total()

    def found(self, result: TrialResult) -> None:
        """Count a trial that had been done before."""
        self._count(result.trial, result.seconds)
        self._said = self.done

    def finished(self, result: TrialResult) -> None:
        """Count a trial and show it."""
        self._count(result.trial, result.seconds)
        self._show(str(result.trial))

    def failed(self, trial: Trial, reason: str) -> None:
        """Count a trial that failed, and say so."""
        self._left[trial.method] -= 1
        self.say(f"failed: {trial}: {reason}")
        self._show(str(trial))

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def left_s(self) -> float | None:
        """Return about how long the rest takes, by what each method took so far."""
        if not self._seconds:
            return None
        known = {method: fmean(values) for method, values in self._seconds.items()}
        unknown = fmean(known.values())
        total = sum(known.get(method, unknown) * left for method, left in self._left.items())
        return total / self._jobs

    def _count(self, trial: Trial, seconds: float) -> None:
        self._left[trial.method] -= 1
        self._seconds.setdefault(trial.method, []).append(seconds)

    def _show(self, newest: str) -> None:
        left_s = self.left_s()
        left = "" if left_s is None else f"about {_minutes(left_s)} left"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self.done, left=left, description="trials")
            return
        now_s = self._clock()
        tenth = 10 * self.done // self._total > 10 * self._said // self._total
        if tenth or now_s - self._said_s >= _QUIET_S:
            elapsed = f"[{now_s - self._started_s:6.1f} s]"
            self.say(f"{elapsed} {self.done} of {self._total} trials, {left}: {newest}")
            self._said_s, self._said = now_s, self.done


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
