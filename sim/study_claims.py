"""What the study of one-shot clustered learning has to show, held against what it found."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from sim.regression import Kind
from sim.study_rows import Interval, Row
from sim.variants import (
    CONVEX,
    IFCA_NEAR,
    IFCA_RANDOM,
    LINKAGE,
    ODCL,
    RANDOM_KMEANS,
    refined,
)

WITHIN = 0.02
"""How far above an oracle's error one may be to count as equal to it."""

DEPENDS = 2.0
"""From this factor between worst and best start on, the start decides."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One claim about one kind of problem.

    Attributes:
        kind: Which regression.
        text: What is claimed.
        holds: Whether it was seen.
        seen: The numbers.
    """

    kind: Kind
    text: str
    holds: bool
    seen: str


def claims(rows: Sequence[Row], found: Sequence[Interval], peers: int) -> list[Claim]:
    """Return all claims, for each kind of problem.

    Args:
        rows: Of all variants.
        found: The recovery intervals for the same kinds and sizes.
        peers: How many there are.
    """
    result: list[Claim] = []
    for kind, group in groupby(rows, lambda row: row.kind):
        table: dict[str, list[Row]] = {}
        for row in group:
            table.setdefault(row.variant, []).append(row)
        opened = [interval for interval in found if interval.kind == kind]
        facts = (
            _as_good(table, ODCL),
            _as_good(table, LINKAGE),
            _convex(table, opened),
            _closes(table),
            _depend(table),
            _depends_not(table),
            _cheaper(table, peers),
        )
        result += [Claim(kind=kind, text=t, holds=h, seen=s) for t, h, s in facts]
    return result


_Fact = tuple[str, bool, str]
_Table = dict[str, list[Row]]


def _as_good(table: _Table, name: str) -> _Fact:
    rows = table[name]
    text = f"{name} is within {_percent(WITHIN)} of the averaging oracle at every n"
    missed = [row for row in rows if row.recovered is not None and row.recovered < 1]
    wrong = ", ".join(
        f"{round((1 - (row.recovered or 0)) * row.runs)} of {row.runs} at n = {row.examples}"
        for row in missed
    )
    seen = f"{_excesses(rows, 'to_averaging')}; wrong clusters: {wrong or 'none'}"
    return text, all(row.to_averaging <= 1 + WITHIN for row in rows), seen


def _convex(table: _Table, found: Sequence[Interval]) -> _Fact:
    rows = table[CONVEX]
    failing = [place for place, row in enumerate(rows) if row.to_averaging > 1 + WITHIN]
    good = rows[failing[-1] + 1 :] if failing else rows
    text = f"{CONVEX} is within {_percent(WITHIN)} of the averaging oracle from some n on"
    start = f"from n = {good[0].examples} on" if good else "at none of these n"
    seen = f"{start} ({_excesses(rows, 'to_averaging')}); {_opening(found)}"
    return text, bool(good), seen


def _opening(found: Sequence[Interval]) -> str:
    """Say where the recovery interval is open, or how far from it at the largest n."""
    opened = ", ".join(
        f"{interval.open} of {interval.seeds} seeds at n = {interval.examples}"
        for interval in found
        if interval.open
    )
    if opened:
        return f"the recovery interval, sufficient only, is open for {opened}"
    last = found[-1]
    return (
        "the recovery interval, sufficient only, is open for no seed: at "
        f"n = {last.examples} it begins at {last.low:.2g} and ends at {last.high:.2g}"
    )


def _closes(table: _Table) -> _Fact:
    rows = table[refined(5)]
    text = f"five gradient rounds after {ODCL} are within {_percent(WITHIN)} of the pooled oracle"
    before = f"without them {_excesses(table[ODCL], 'to_pooled')}"
    seen = f"{_excesses(rows, 'to_pooled')}; {before}"
    return text, all(row.to_pooled <= 1 + WITHIN for row in rows), seen


def _depend(table: _Table) -> _Fact:
    rows = [*table[RANDOM_KMEANS], *table[IFCA_RANDOM]]
    text = "random K-means and IFCA from random starts depend on their start"
    if any(row.start_factor is None for row in rows):
        return text, False, "one start only"
    seen = "; ".join(
        f"{name} {_factors(table[name])}" for name in (RANDOM_KMEANS, IFCA_RANDOM, IFCA_NEAR)
    )
    decides = all((row.start_factor or 1) >= DEPENDS for row in rows)
    return text, decides, f"error of the worst over the best start, at most: {seen}"


def _depends_not(table: _Table) -> _Fact:
    rows = table[ODCL]
    text = f"{ODCL} doesn't depend on its start, and {CONVEX} and {LINKAGE} have none"
    if any(row.start_factor is None for row in rows):
        return text, False, "one start only"
    steady = all((row.start_factor or 1) <= 1 + WITHIN for row in rows)
    return text, steady, f"error of the worst over the best start, at most: {_factors(rows)}"


def _cheaper(table: _Table, peers: int) -> _Fact:
    one, many = table[ODCL][-1], table[IFCA_RANDOM][-1]
    text = f"{ODCL} moves a fraction of IFCA's bytes"
    seen = (
        f"{one.moved_bytes:,} bytes a peer in {one.rounds} round, {many.moved_bytes:,} in "
        f"{many.rounds}: a part in {many.moved_bytes / one.moved_bytes:,.0f}; where each peer "
        f"fetches all models and clusters itself, it receives {(peers - 1) * one.sent_bytes:,}"
    )
    return text, one.moved_bytes < many.moved_bytes, seen


def _excesses(rows: Sequence[Row], attribute: str) -> str:
    return _by_size(rows, [f"{_percent(getattr(row, attribute) - 1, '+.1f')}" for row in rows])


def _factors(rows: Sequence[Row]) -> str:
    return _by_size(rows, [f"{row.start_factor or 1:,.3g}" for row in rows])


def _by_size(rows: Sequence[Row], values: Sequence[str]) -> str:
    sizes = ", ".join(str(row.examples) for row in rows)
    return f"{', '.join(values)} at n = {sizes}"


def _percent(share: float, form: str = ".0f") -> str:
    text = f"{100 * share:{form}}"
    return f"{text.replace('-', '+') if float(text) == 0 else text} %"
