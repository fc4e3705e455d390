"""Every reader of a version makes the same model of fewest bytes; nothing else is taken for one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from helpers_transport import ALL_TYPES, LARGE, SMALL, filled, snapshot
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.editions import Edition, Origin, check_answer, codec_of, publish, read
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.lowbit import CODECS, Bits
from protocol.messages import Encoding, ModelSnapshot, Version
from protocol.publication import copy_size_bytes
from protocol.tensors import Layout, Tensors, TensorSpec, allocate

widths = st.sampled_from(get_args(Bits))
specs = st.builds(
    TensorSpec,
    name=st.text(max_size=4),
    dtype=st.sampled_from(["f32", "f32", "f32", "i64", "bool", "f16", "bf16"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=40),
    trainable=st.booleans(),
)
layouts = st.lists(specs, max_size=5, unique_by=lambda spec: spec.name).map(Layout)
BIASES = Layout([TensorSpec("bias", "f32", (3,)), TensorSpec("steps", "i64", ())])


def history(layout: Layout, count: int, incarnation: int = 1) -> list[ModelSnapshot]:
    """What an owner publishes, its rounds with gaps."""
    return [
        ModelSnapshot(version=Version(incarnation, 3 * number), tensors=filled(layout, number))
        for number in range(count)
    ]


def editions(
    published: Sequence[ModelSnapshot], bits: Bits | None, origin: Origin | None = None
) -> list[Edition]:
    made: list[Edition] = []
    for model in published:
        made.append(publish(model, bits, made[-1] if made else None, origin))
    return made


def received(
    edition: Edition,
    have: ModelSnapshot | None,
    features: Sequence[str] = tuple(CODECS),
    origin: Origin | None = None,
) -> Tensors:
    """Return what a reader makes of an edition."""
    layout, version = edition.snapshot.tensors.layout, None if have is None else have.version
    if origin is not None:
        features = (*features, origin.feature)
    answer = edition.answer(version, features)
    check_answer(
        layout,
        answer.encoding,
        answer.base,
        answer.blob.nbytes,
        version,
        from_origin=origin is not None,
    )
    out = allocate(layout.size_bytes)
    out.fill(0xFF)
    return read(layout, replace(answer, blob=answer.blob.copy()), have, out, origin)


@given(layouts, st.none() | widths, st.data())
def test_every_reader_holds_the_public_copy_bit_by_bit_whatever_it_missed(
    layout: Layout, bits: Bits | None, data: st.DataObject
) -> None:
    count = 11
    published = history(layout, count)
    origin = Origin.of(filled(layout, 99), layout) if data.draw(st.booleans()) else None
    readers = data.draw(st.lists(st.sets(st.integers(0, count - 1)), min_size=1, max_size=4))
    held: list[ModelSnapshot | None] = [None] * len(readers)
    for number, edition in enumerate(editions(published, bits, origin)):
        for reader, reads in enumerate(readers):
            if number not in reads:
                continue
            shared = origin if reader % 2 == 0 else None  # others started elsewhere
            tensors = received(edition, held[reader], origin=shared)
            assert tensors == edition.snapshot.tensors
            held[reader] = ModelSnapshot(version=edition.snapshot.version, tensors=tensors)
        for name in layout.uncoded.index:
            own, public = published[number].tensors[name], edition.snapshot.tensors[name]
            assert public.tobytes() == own.tobytes()


@given(layouts, st.none() | widths)
def test_a_public_copy_is_near_the_model_and_is_that_itself_without_a_codec(
    layout: Layout, bits: Bits | None
) -> None:
    published = history(layout, 3)
    for model, edition in zip(published, editions(published, bits), strict=True):
        assert (edition.snapshot.version, edition.snapshot.friends) == (model.version, ())
        if bits is None:
            assert edition.snapshot is model
        for name in layout.coded.index:
            # Half a scale of a difference between numbers of order 4, and what f16 rounds.
            assert np.allclose(edition.snapshot.tensors[name], model.tensors[name], atol=0.8)


@given(layouts, widths, st.integers(1, 6), st.integers(-1, 6))
def test_a_reader_is_sent_the_missed_differences_or_a_copy_whichever_is_smaller(
    layout: Layout, bits: Bits, count: int, held: int
) -> None:
    published = history(layout, count)
    edition = editions(published, bits)[-1]
    have = None if held < 0 else Version(1, 3 * held)
    answer = edition.answer(have, tuple(CODECS))
    num_values, others = layout.coded.size_bytes // 4, layout.uncoded.size_bytes
    differences = () if edition.publication is None else edition.publication.differences
    missed = count - 1 - held
    if num_values == 0:
        assert answer is edition.whole
    elif held >= 0 and 0 < missed <= len(differences):
        assert (answer.encoding, answer.base) == (codec_of(bits), have)
        assert answer.blob.nbytes == sum(each.size for each in differences[-missed:]) + others
        assert answer.blob.nbytes < copy_size_bytes(num_values) + others
    else:
        assert (answer.encoding, answer.base) == (Encoding.F16, None)
        assert answer.blob.nbytes == copy_size_bytes(num_values) + others
    assert edition.answer(have, ()) is edition.whole
    assert edition.answer(have, ("codec-7", "another")) is edition.whole
    assert set(edition.answers()) >= {answer, edition.whole}


def test_a_reader_of_another_start_of_the_owner_is_sent_a_copy() -> None:
    edition = editions(history(LARGE, 3, incarnation=2), 4)[-1]
    assert edition.answer(Version(1, 3), tuple(CODECS)).encoding == Encoding.F16
    assert edition.answer(Version(2, 3), tuple(CODECS)).encoding == Encoding.DEFLATE_4


def test_an_answer_knows_how_much_memory_is_kept_for_it() -> None:
    edition = editions(history(LARGE, 4), 4)[-1]
    first, *_, last = edition.since.values()
    assert last.blob.nbytes < last.memory_bytes == first.memory_bytes == first.blob.nbytes
    assert edition.whole.memory_bytes == edition.whole.blob.nbytes


@pytest.mark.parametrize("number", [np.nan, -np.inf, 1e6])
def test_a_model_that_f16_cannot_hold_is_published_as_it_is_and_nothing_builds_on_it(
    number: float,
) -> None:
    published = history(SMALL, 5)
    published[2].tensors["head.bias"][3] = number
    made = editions(published, 4)
    for features in ((), tuple(CODECS)):
        assert made[2].answer(Version(1, 3), features) is made[2].whole
    assert np.array_equal(made[2].snapshot.tensors.buffer, published[2].tensors.buffer)
    assert [list(edition.since) for edition in made] == [
        [],
        [Version(1, 0)],
        [],
        [],
        [Version(1, 9)],
    ]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_version_that_is_no_newer_starts_from_a_whole_copy(bits: Bits) -> None:
    first = publish(snapshot(SMALL, 5), bits)
    for number in (4, 5):
        again = publish(snapshot(SMALL, number, seed=number), bits, first)
        assert list(again.since) == []
        assert received(again, None) == again.snapshot.tensors
    assert list(publish(snapshot(SMALL, 6), bits, first).since) == [Version(1, 5)]
    restarted = ModelSnapshot(version=Version(2, 0), tensors=filled(SMALL))
    assert list(publish(restarted, bits, first).since) == [Version(1, 5)]


def test_what_is_published_never_changes_afterwards() -> None:
    made = editions(history(LARGE, 2), 4)
    before = [answer.blob.tobytes() for answer in made[1].answers()]
    publish(history(LARGE, 4)[3], 4, made[1])
    received(made[1], made[0].snapshot).buffer.fill(0)
    assert [answer.blob.tobytes() for answer in made[1].answers()] == before


def test_without_other_tensors_nothing_is_copied_that_need_not_be() -> None:
    published = history(SMALL, 2)
    first, second = editions(published, 4)
    assert np.shares_memory(first.whole.blob, first.snapshot.tensors.buffer)
    assert second.publication is not None
    assert np.shares_memory(second.snapshot.tensors.buffer, second.publication.vector)
    assert second.copy is not None
    assert np.shares_memory(second.copy.blob, second.publication.copy)
    assert not np.shares_memory(second.snapshot.tensors.buffer, published[1].tensors.buffer)


@pytest.mark.parametrize("layout", [SMALL, ALL_TYPES, BIASES, LARGE])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_what_an_edition_never_is_is_refused_before_a_byte_of_it_is_taken(
    layout: Layout, encoding: Encoding
) -> None:
    """A size, base or encoding is let pass when an owner may answer with it.

    Only then, too, but that differences may have any size below a whole copy's.
    """
    held, other = Version(1, 3), Version(1, 0)
    right: set[tuple[Version | None, int]] = set()
    for bits in get_args(Bits):
        for edition in editions(history(layout, 5), bits):
            right |= {
                (None if answer.base is None else held, answer.blob.nbytes)
                for answer in edition.answers()
                if answer.encoding == encoding
            }
    whole = copy_size_bytes(layout.coded.size_bytes // 4) + layout.uncoded.size_bytes
    if encoding in CODECS:
        between = range(layout.uncoded.size_bytes + 1, whole)
        assert all(base == held and size in between for base, size in right)
        right |= {(held, size) for size in (between[0], between[-1])}
    sizes = {0, 1, layout.size_bytes, 2**62} | {size + by for _, size in right for by in (-1, 0, 1)}
    for size in sizes:
        for base in (None, held, other):
            allowed = contextlib.nullcontext()
            refused = pytest.raises(RemoteProtocolError)
            may = base == held and size in between if encoding in CODECS else (base, size) in right
            with allowed if may else refused:
                check_answer(layout, encoding, base, size, held)
            if base is not None:
                with pytest.raises(RemoteProtocolError):
                    check_answer(layout, encoding, base, size, None)


@given(st.sampled_from([SMALL, ALL_TYPES, BIASES]), st.sampled_from(Encoding), st.data())
def test_any_bytes_give_a_finite_model_or_a_remote_protocol_error(
    layout: Layout, encoding: Encoding, data: st.DataObject
) -> None:
    origin = Origin.of(filled(layout, 99), layout)
    for bits in get_args(Bits):
        first, second = editions(history(layout, 2), bits, origin)
        for answer in second.answers():
            if answer.encoding == encoding:
                blob = answer.blob.copy()
                changes = st.tuples(st.integers(0, max(blob.size - 1, 0)), st.integers(0, 255))
                for place, byte in data.draw(st.lists(changes, max_size=5)):
                    blob[place] = byte
                out = allocate(layout.size_bytes)
                out.fill(0xFF)
                with contextlib.suppress(RemoteProtocolError):
                    changed = replace(answer, blob=blob)
                    read(layout, changed, first.snapshot, out, origin).check_received()
                    if encoding != Encoding.F32:  # those bytes are what the digest is for
                        assert np.array_equal(out, second.snapshot.tensors.buffer)


@given(layouts.filter(lambda layout: layout.coded.size_bytes), widths)
def test_a_first_model_costs_who_holds_the_initial_one_no_more_than_a_difference(
    layout: Layout, bits: Bits
) -> None:
    origin, other = Origin.of(filled(layout, 5), layout), Origin.of(filled(layout, 6), layout)
    assert origin is not None and other is not None
    made = editions(history(layout, 12), bits, origin)
    ours, theirs = (*CODECS, origin.feature), (*CODECS, other.feature)
    for edition in made:
        assert edition.answer(None, theirs) is edition.copy
        offered = edition.answer(None, ours)
        if None in edition.since:
            assert offered.encoding == codec_of(bits) and offered.base is None
            assert edition.copy is not None and offered.blob.nbytes < edition.copy.blob.nbytes
        else:
            assert offered is edition.copy
        # A version that is no longer built on is worth as much as the initial model.
        assert edition.answer(Version(7, 7), ours) is offered
    assert None not in made[-1].since and made[-1].origin is None


def test_only_a_model_of_round_0_is_near_the_initial_one() -> None:
    origin = Origin.of(filled(LARGE, 5), LARGE)
    first, later = history(LARGE, 2)
    assert None in publish(first, 4, None, origin).since
    assert None not in publish(later, 4, None, origin).since
    assert not publish(first, None, None, origin).since


def test_an_initial_model_that_f16_cant_hold_is_no_origin() -> None:
    model = filled(SMALL, 5)
    beyond = Tensors.of(SMALL, {name: model.as_f32(name) for name in SMALL.index})
    beyond.set_f32(SMALL.specs[0].name, np.full(SMALL.specs[0].shape, 1e6, np.float32))
    assert Origin.of(beyond, SMALL) is None
    counters = Layout([TensorSpec("steps", "i64", (3,))])
    assert Origin.of(filled(counters, 1), counters) is None
    assert Origin.of(None, SMALL) is None
    with pytest.raises(LocalProtocolError, match="another layout"):
        Origin.of(model, LARGE)


def test_differences_are_only_read_with_their_base() -> None:
    first, second = editions(history(SMALL, 2), 4)
    answer, out = second.answer(Version(1, 0), tuple(CODECS)), allocate(SMALL.size_bytes)
    for have in (None, second.snapshot):
        with pytest.raises(LocalProtocolError, match="are read without it"):
            read(SMALL, answer, have, out)
    assert read(SMALL, answer, first.snapshot, out) == second.snapshot.tensors


def test_a_base_of_the_same_version_from_another_life_of_the_owner_is_found_out() -> None:
    first, second = editions(history(LARGE, 2), 4)
    other = ModelSnapshot(version=first.snapshot.version, tensors=filled(LARGE, seed=77))
    with pytest.raises(RemoteProtocolError, match="what it leads to has the digest"):
        received(second, other)
    assert received(second, first.snapshot) == second.snapshot.tensors


@pytest.mark.parametrize(
    ("encoding", "base", "size", "clause"),
    [
        (
            Encoding.DEFLATE_4,
            Version(1, 2),
            114,
            r"differences to .*round_number=2\) are offered, we",
        ),
        (Encoding.DEFLATE_4, None, 114, "differences to an initial model that we don't"),
        (Encoding.F16, Version(1, 3), 448, "f16 builds on nothing, yet the base"),
        (Encoding.F16, None, 449, "a model of 449 bytes as f16, ours has 448"),
        (
            Encoding.DEFLATE_4,
            Version(1, 3),
            448,
            "448 bytes as deflate-4, ours has 1 to 447",
        ),
        (Encoding.F32, None, 2**50, "a model of 1125899906842624 bytes as f32, ours has 896"),
    ],
)
def test_what_is_wrong_with_an_offer_is_said(
    encoding: Encoding, base: Version | None, size: int, clause: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=clause):
        check_answer(SMALL, encoding, base, size, Version(1, 3))
