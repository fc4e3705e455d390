"""What the study of one-shot clustered learning keeps of each problem, and sums up over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean

import msgspec
import numpy as np

from peer.clustering.convex import recovery_interval
from peer.clustering.interface import on_one_thread
from sim.regression import Design, Kind
from sim.variants import ORACLE, POOLED, Attempt, attempt_all


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one problem.

    Attributes:
        kind: Which regression.
        examples: n, of each peer.
        seed: What all was drawn by.
        attempts: One a variant.
        low: Lower end of the interval of penalties that surely recover the clusters (see
            `recovery_interval`), of the exact local models.
        high: Upper end; not above `low` where there are no such penalties.
    """

    kind: Kind
    examples: int
    seed: int
    attempts: tuple[Attempt, ...]
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.kind}, n = {self.examples}, seed {self.seed}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """How one variant did on problems of one kind and size, over all seeds.

    Attributes:
        kind: Which regression.
        examples: n, of each peer.
        variant: Its name.
        error: Normalized MSE: mean over starts and seeds.
        to_averaging: `error` as a multiple of that of the oracle that averages.
        to_pooled: `error` as a multiple of that of the oracle that pools examples.
        start_factor: The worst start's error as a multiple of the best start's, at the seed where
            this is largest; None for what draws nothing.
        recovered: Share of runs that found the true clusters; None where none are sought.
        runs: Starts and seeds.
        rounds: See `Attempt`, as are the others.
        gradients: See there.
        sent_bytes: See there.
        received_bytes: See there.
    """

    kind: Kind
    examples: int
    variant: str
    error: float
    to_averaging: float
    to_pooled: float
    start_factor: float | None
    recovered: float | None
    runs: int
    rounds: int
    gradients: int
    sent_bytes: int
    received_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received by a peer."""
        return self.sent_bytes + self.received_bytes


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Whether convex clustering is sure to recover the clusters, at one size.

    Attributes:
        kind: Which regression.
        examples: n, of each peer.
        low: Lower end of the recovery interval: mean over seeds.
        high: Upper end: mean over seeds.
        open: At how many seeds there is any penalty in it.
        seeds: Of how many.
    """

    kind: Kind
    examples: int
    low: float
    high: float
    open: int
    seeds: int


def do_cell(design: Design, kind: Kind, examples: int, seed: int, starts: int) -> Cell:
    """Draw a problem and let every variant try it.

    Args:
        design: What problems are like.
        kind: Which regression.
        examples: n, of each peer.
        seed: Of all that is drawn.
        starts: How often those are repeated that draw where they start.
    """
    rng = np.random.default_rng(seed)
    problem = design.draw(kind, examples, rng)
    with on_one_thread():
        attempts = tuple(attempt_all(problem, starts, rng))
        models = problem.examples.solve()
        interval = recovery_interval(models, np.ones(len(models)), problem.truth)
    return Cell(
        kind=kind,
        examples=examples,
        seed=seed,
        attempts=attempts,
        low=interval.low,
        high=interval.high,
    )


def sum_up(cells: Sequence[Cell]) -> list[Row]:
    """Return a row for each kind, size and variant, in the order of the cells."""
    rows: list[Row] = []
    for group in by_size(cells):
        columns = [list(column) for column in zip(*(c.attempts for c in group), strict=True)]
        errors = {column[0].variant: _mean_error(column) for column in columns}
        rows += [_row(group[0], column, errors) for column in columns]
    return rows


def intervals(cells: Sequence[Cell]) -> list[Interval]:
    """Return the recovery intervals for each kind and size."""
    return [
        Interval(
            kind=group[0].kind,
            examples=group[0].examples,
            low=fmean(cell.low for cell in group),
            high=fmean(cell.high for cell in group),
            open=sum(cell.low < cell.high for cell in group),
            seeds=len(group),
        )
        for group in by_size(cells)
    ]


def by_size(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield neighbors of one kind and size together: its seeds."""
    for _, group in groupby(cells, lambda cell: (cell.kind, cell.examples)):
        yield list(group)


def _mean_error(attempts: Sequence[Attempt]) -> float:
    return fmean(error for attempt in attempts for error in attempt.errors)


def _row(cell: Cell, attempts: Sequence[Attempt], errors: Mapping[str, float]) -> Row:
    first = attempts[0]
    error = errors[first.variant]
    found = [recovered for attempt in attempts for recovered in attempt.recovered]
    several = len(first.errors) > 1
    return Row(
        kind=cell.kind,
        examples=cell.examples,
        variant=first.variant,
        error=error,
        to_averaging=error / errors[ORACLE],
        to_pooled=error / errors[POOLED],
        start_factor=max(max(a.errors) / min(a.errors) for a in attempts) if several else None,
        recovered=fmean(found) if found else None,
        runs=sum(len(attempt.errors) for attempt in attempts),
        rounds=first.rounds,
        gradients=first.gradients,
        sent_bytes=first.sent_bytes,
        received_bytes=first.received_bytes,
    )
