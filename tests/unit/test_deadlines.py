"""Deadlines follow what was observed, between their bounds, and never starve who is merely slow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.deadlines import Deadlines, DeadlineSettings
from protocol.messages import PeerId

ADA, BOB = PeerId("a" * 32), PeerId("b" * 32)
LONGEST_S = 30.0

waits = st.floats(0.0, 2 * LONGEST_S, allow_nan=False)
histories = st.lists(st.one_of(waits, st.none()), max_size=60)  # None for a failure


def after(history: list[float | None], deadlines: Deadlines | None = None) -> Deadlines:
    deadlines = deadlines or Deadlines(LONGEST_S)
    for wait in history:
        if wait is None:
            deadlines.failed(ADA)
        else:
            deadlines.answered(ADA, wait)
    return deadlines


def test_a_stranger_is_waited_for_as_long_as_may_be() -> None:
    deadlines = Deadlines(LONGEST_S)
    assert deadlines.of(ADA) == LONGEST_S
    assert after([0.01, 0.01], deadlines).of(ADA) == LONGEST_S


def test_a_quick_neighbor_is_not_waited_for_long_and_others_are_not_judged_by_it() -> None:
    deadlines = after([0.01] * 3)
    assert deadlines.of(ADA) == DeadlineSettings().shortest_s
    assert deadlines.of(BOB) == LONGEST_S


def test_a_slow_answer_counts_until_so_many_quicker_ones_have_come() -> None:
    made = DeadlineSettings(remembered=8)
    deadlines = after([2.0] + [0.5] * 7, Deadlines(LONGEST_S, made))
    assert deadlines.of(ADA) == made.margin * 2.0
    deadlines.answered(ADA, 0.5)
    assert deadlines.of(ADA) == made.margin * 0.5


@given(histories, st.floats(0.01, 100.0))
def test_a_deadline_stays_between_its_bounds(history: list[float | None], longest_s: float) -> None:
    made = DeadlineSettings()
    deadline_s = after(history, Deadlines(longest_s)).of(ADA)
    assert min(made.shortest_s, longest_s) <= deadline_s <= longest_s


@given(histories, st.lists(waits, min_size=3, max_size=16))
def test_who_takes_no_longer_than_the_margin_times_a_remembered_wait_is_in_time(
    history: list[float | None], recent: list[float]
) -> None:
    deadline_s = after([*history, *recent]).of(ADA)
    assert deadline_s >= min(DeadlineSettings().margin * max(recent), LONGEST_S)


@given(histories, st.floats(0.0, LONGEST_S, exclude_max=True))
def test_whoever_takes_less_than_the_longest_is_heard_after_few_failures(
    history: list[float | None], takes_s: float
) -> None:
    deadlines, failures = after(history), 0
    while deadlines.of(ADA) <= takes_s:
        deadlines.failed(ADA)
        failures += 1
    assert failures <= 5  # doublings from a second to half a minute
    deadlines.answered(ADA, takes_s)
    assert deadlines.of(ADA) > takes_s


@given(histories)
def test_a_failure_never_shortens_a_deadline(history: list[float | None]) -> None:
    deadlines = after(history)
    before = deadlines.of(ADA)
    deadlines.failed(ADA)
    assert deadlines.of(ADA) >= before


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_failures_without_end_keep_to_the_longest(failures: int) -> None:
    assert after([0.01] * 3 + [None] * failures).of(ADA) <= LONGEST_S


def test_a_longest_below_the_shortest_wins() -> None:
    assert after([0.01] * 3, Deadlines(0.2)).of(ADA) == pytest.approx(0.2)
