"""Models of others that are let go of are held for a while, for their next to build on."""

from __future__ import annotations

import pytest
from helpers import peer_id
from helpers_transport import SMALL, filled

from peer import acquaintances
from peer.acquaintances import Acquaintances
from protocol.messages import ModelSnapshot, PeerId, Version

ME, FRIEND, STRANGER = (peer_id(number) for number in range(3))
SIZE = SMALL.size_bytes


def model(number: int) -> ModelSnapshot:
    return ModelSnapshot(version=Version(1, number), tensors=filled(SMALL, seed=number))


def met(*peer_ids: PeerId, holds_bases: bool = True) -> Acquaintances:
    known = Acquaintances({}, {}, {}, holds_bases)
    for each in peer_ids:
        known.keep(each, model(3), 3)
        known.measured(each, 0.7)
    return known


def test_a_model_that_is_let_go_of_is_held_but_counts_no_more():
    known = met(FRIEND, STRANGER)
    known.keep_only({FRIEND}, 3)
    assert known.kept.keys() == known.recommended().keys() == {FRIEND}
    assert known.held(STRANGER) == model(3)
    assert known.held(peer_id(9)) is None


def test_a_model_held_that_is_still_the_newest_is_kept_again_and_measured_again():
    known = met(FRIEND, STRANGER)
    known.keep_only({FRIEND}, 3)
    assert known.confirm(FRIEND, 5).loss == 0.7
    assert known.confirm(STRANGER, 5).loss is None  # nobody has its predictions any more
    assert known.kept[STRANGER].fetched_round == 5
    known.keep_only((), 5)
    known.forget_base(STRANGER)
    assert known.held(STRANGER) is None


def test_a_newer_model_takes_the_place_of_the_one_held():
    known = met(STRANGER)
    known.keep_only((), 3)
    known.keep(STRANGER, model(4), 4)
    assert known.held(STRANGER) == model(4)
    known.fold({STRANGER: float("inf")}, 4, 0.6)  # it is worthless: forgotten altogether
    assert known.held(STRANGER) is None


def test_nothing_is_held_that_no_difference_can_build_on():
    known = met(STRANGER)
    known.keep_only((), 3)
    known.keep_only((), 10)
    assert known.held(STRANGER)
    known.keep_only((), 11)  # eight rounds later: an owner has no more than eight differences
    assert known.held(STRANGER) is None
    uncoded = met(STRANGER, holds_bases=False)
    uncoded.keep_only((), 3)
    assert uncoded.held(STRANGER) is None


def test_memory_for_models_held_is_bounded_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acquaintances, "MAX_BASES_BYTES", 2 * SIZE)
    strangers = [peer_id(number) for number in range(4)]
    known = met()
    for number, stranger in enumerate(strangers):
        known.keep(stranger, model(number), number)
        known.keep_only((), number)
    assert [known.held(each) is not None for each in strangers] == [False, False, True, True]
    known.keep(strangers[0], model(9), 9)
    known.keep_only((), 9)
    known.keep(strangers[1], model(2), 2)  # fetched long ago, let go of only now
    known.keep_only((), 10)
    assert [known.held(each) is not None for each in strangers] == [True, False, False, True]


def test_weights_are_over_whoever_is_asked_about_now():
    known = Acquaintances({}, {}, {})
    known.fold({ME: 1.0, FRIEND: 1.0, STRANGER: 1.0}, 0, 0.6)
    few, all_ = frozenset({FRIEND}), frozenset({FRIEND, STRANGER})
    for others, weight in ((few, 1 / 2), (all_, 1 / 3), (few, 1 / 2)):
        assert known.weights(ME, others, 0.3) == dict.fromkeys(sorted({ME, *others}), weight)
    sizes = {ME: 2, FRIEND: 1, STRANGER: 1}
    assert known.weights(ME, all_, 0.3, sizes)[ME] == 0.5
    known.fold({FRIEND: float("nan")}, 1, 0.6)
    assert known.weights(ME, all_, 0.3) == {ME: 0.5, STRANGER: 0.5}


def test_what_was_measured_is_replaced_in_order_and_never_changed():
    known = Acquaintances({STRANGER: 1.0, FRIEND: 0.5}, {}, {})
    before, at = known.loss_averages, known.measured_at
    known.fold({FRIEND: 1.5}, 4, 0.5)
    known.take_over(ME, FRIEND)
    known.hold({ME: 9.0, STRANGER: 2.0}, [ME], [ME], 5, 0.5)
    assert before == {FRIEND: 0.5, STRANGER: 1.0}
    assert at == {}
    assert list(known.loss_averages) == [ME, FRIEND, STRANGER]
    assert known.measured_at == {FRIEND: 4, ME: 5, STRANGER: 5}
