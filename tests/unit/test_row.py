"""A row is a mapping that never changes, whatever else follows from it."""

from __future__ import annotations

from helpers import peer_id
from hypothesis import given
from hypothesis import strategies as st

from peer.row import Row

peers = st.integers(0, 12).map(peer_id)
numbers = st.floats(-3, 3)
rows = st.dictionaries(peers, numbers)


@given(rows, st.lists(st.dictionaries(peers, st.none() | numbers), max_size=5))
def test_a_row_follows_a_dict_through_changes_and_its_ancestors_stay(first, changes):
    row, expected, before = Row.of(first), dict(first), []
    for change in changes:
        before.append((row, dict(expected)))
        row = row.changed(change)
        expected = {
            each: number for each, number in {**expected, **change}.items() if number is not None
        }
    for each, numbers_then in [*before, (row, expected)]:
        assert each == numbers_then
        assert list(each) == sorted(numbers_then)
        assert len(each) == len(numbers_then)
        assert Row.of(each) is each


@given(rows, st.sets(peers), numbers)
def test_parts_of_a_row(first, some, least):
    row = Row.of(first)
    assert row.only(some) == {each: first[each] for each in first.keys() & some}
    assert row.at_least(least) == {each: x for each, x in first.items() if x >= least}


@given(rows, st.integers(1, 14))
def test_the_largest_are_as_many_as_wanted_and_all_that_equal_the_last(first, count):
    largest = Row.of(first).largest(count)
    assert len(largest) >= min(count, len(first))
    ranked = sorted(first.values(), reverse=True)[:count]
    assert largest == {each: x for each, x in first.items() if ranked and x >= ranked[-1]}
