"""Models as they are published: what each reader is sent, and the model that it makes of that.

Without a codec the blob travels as it is. With one, the trainable f32 tensors, as one vector with
the gaps between them, are a `Publication`: they travel in f16, or as differences, the oldest first;
the blob of all other tensors follows. What everyone then holds is the *public copy* of the model,
the same bits for every reader of a version, whatever that reader was sent.

Peers that start from the same initial model hold it without a word. An owner's first model is near
it, and travels to them as a difference to it: the `Origin`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from protocol.deflate import Bytes
from protocol.digest import check_digest, digest_of
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.lowbit import CODECS, Bits, Vector
from protocol.messages import INITIAL, Encoding, ModelSnapshot, Version
from protocol.publication import (
    Publication,
    copy_size_bytes,
    follow,
    read_copy,
)
from protocol.tensors import Layout, Tensors, allocate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What a reader is sent.

    Attributes:
        encoding: How to read it.
        base: For differences, the version that the reader must hold; None for the origin, and where
            the bytes build on nothing.
        leads_to: The digest of the model that comes of it; None for a blob as it is.
        blob: The bytes.
        within: The memory that the bytes are a part of, where more than they are kept for them.
    """

    encoding: Encoding
    base: Version | None = None
    leads_to: str | None = None
    blob: Bytes
    within: Bytes | None = None

    @property
    def memory_bytes(self) -> int:
        """How much memory is kept for it."""
        return (self.blob if self.within is None else self.within).nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """The initial model's public copy, which all hold who start from the same one.

    Attributes:
        vector: Its numbers, such as f16 can hold. Shape (num_values,).
        feature: What it is called in a handshake: who names another one is sent whole copies.
    """

    vector: Vector
    feature: str

    @classmethod
    def of(cls, initial: Tensors | None, layout: Layout) -> Origin | None:
        """Return it, or None where there is no initial model, or none that a codec applies to.

        Args:
            initial: The model.
            layout: Of the models that are exchanged.

        Raises:
            LocalProtocolError: The model has another layout.
        """
        if initial is None or not layout.coded.size_bytes:
            return None
        if initial.layout != layout:
            raise LocalProtocolError("the initial model has another layout than the transport")
        try:
            vector = Publication.first(_coded_numbers(initial), 4).vector
        except LocalProtocolError:
            return None
        return cls(vector=vector, feature=INITIAL + digest_of(vector.data))


def readable(origin: Origin | None) -> frozenset[str]:
    """Return the features of who can read all that is coded.

    Args:
        origin: The reader's.
    """
    return frozenset([*CODECS, *([] if origin is None else [origin.feature])])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edition:
    """One published version, with all that readers may be sent of it; immutable.

    Attributes:
        snapshot: The public copy: the model as whoever fetches it holds it.
        whole: Its blob, for who can read nothing else.
        copy: The same with less bytes; None where nothing is coded.
        since: What readers of earlier versions are sent instead, oldest first; those who hold the
            origin alone are under None.
        publication: What the next edition goes on from; None where nothing is coded.
        origin: The feature of who holds it, while it is in `since`.
    """

    snapshot: ModelSnapshot
    whole: Answer
    copy: Answer | None = None
    since: Mapping[Version | None, Answer] = field(default_factory=dict)
    publication: Publication | None = None
    origin: str | None = None

    def answer(self, have: Version | None, features: Collection[str]) -> Answer:
        """Return the fewest bytes that give a reader this version.

        Args:
            have: The version that the reader holds, any that it claims; None for nothing. One who
                holds this very version is not to be sent anything.
            features: What the reader has announced.
        """
        if self.copy is None or self.publication is None:
            return self.whole
        if codec_of(self.publication.bits) not in features:
            return self.whole
        base = have if have in self.since else None
        if base is None and self.origin not in features:
            return self.copy
        return self.since.get(base, self.copy)

    def answers(self) -> Iterator[Answer]:
        """Yield all that anyone may be sent."""
        yield self.whole
        if self.copy is not None:
            yield self.copy
        yield from self.since.values()


def codec_of(bits: Bits) -> Encoding:
    """Return what a width is called, as an encoding and as a feature."""
    return Encoding(next(name for name, width in CODECS.items() if width == bits))


def publish(
    snapshot: ModelSnapshot,
    bits: Bits | None,
    before: Edition | None = None,
    origin: Origin | None = None,
) -> Edition:
    """Return the edition of an owner's model.

    A model with numbers that f16 can't hold is published as it is, as if there were no codec:
    whoever fetches it is to judge it. What follows it, and a version that isn't newer than the one
    before, starts from a whole copy; but for a model of round 0, which is near the origin.

    Args:
        snapshot: The owner's own model, of the layout of all before it.
        bits: The codec's width, None for no codec; the same for all editions of an owner.
        before: The edition before it, None for the first since the owner started.
        origin: Of the owner; None where there is none, or first models are to be exact.
    """
    whole = Edition(
        snapshot=snapshot, whole=Answer(encoding=Encoding.F32, blob=snapshot.tensors.buffer)
    )
    if bits is None or not snapshot.tensors.layout.coded.size_bytes:
        return whole
    if before is not None and snapshot.version <= before.snapshot.version:
        before = None
    former: Publication | None = None
    bases: tuple[Version | None, ...] = ()
    feature: str | None = None
    if before is not None and before.publication is not None:
        former, feature = before.publication, before.origin
        bases = (*before.since, before.snapshot.version)
    elif origin is not None and snapshot.version.round_number == 0:
        former, feature, bases = Publication.held(origin.vector, bits), origin.feature, (None,)
    vector = _coded_numbers(snapshot.tensors)
    try:
        publication = Publication.first(vector, bits) if former is None else former.then(vector)
    except LocalProtocolError:
        return whole
    edition = _coded(snapshot, publication, bases)
    return replace(edition, origin=feature) if None in edition.since else edition


def check_answer(
    layout: Layout,
    encoding: Encoding,
    base: Version | None,
    size_bytes: int,
    have: Version | None,
    *,
    from_origin: bool = False,
) -> None:
    """Check what a peer announces to send, before memory is taken for it.

    Args:
        layout: Ours.
        encoding: As announced.
        base: As announced.
        size_bytes: As announced.
        have: The version that we hold and said so.
        from_origin: Whether that peer knows that we hold its origin.

    Raises:
        RemoteProtocolError: It isn't what that peer may send us; it says why.
    """
    bits = CODECS.get(encoding)
    if bits is None:
        if base is not None:
            raise RemoteProtocolError(f"{encoding} builds on nothing, yet the base {base} is named")
        least = most = _whole_size(layout, encoding)
    else:
        if base is None and not from_origin:
            raise RemoteProtocolError("differences to an initial model that we don't share")
        if base is not None and base != have:
            held = "nothing" if have is None else str(have)
            raise RemoteProtocolError(f"differences to {base} are offered, we hold {held}")
        least, most = layout.uncoded.size_bytes + 1, _whole_size(layout, Encoding.F16) - 1
    if not least <= size_bytes <= most:
        right = str(most) if least == most else f"{least} to {most}" if least < most else "none"
        raise RemoteProtocolError(f"a model of {size_bytes} bytes as {encoding}, ours has {right}")


def read(
    layout: Layout,
    answer: Answer,
    have: ModelSnapshot | None,
    out: Bytes,
    origin: Origin | None = None,
) -> Tensors:
    """Return the owner's public copy, verified: the very bits, finite, nothing in the gaps.

    A base that isn't what its owner takes it for, such as of an owner that has lost its state and
    counts versions anew, shows in the digest. Soon the owner has no difference to that base left.

    Args:
        layout: Ours.
        answer: What came, as `check_answer` has let it pass; its bytes are not trusted.
        have: What the base of differences is, never changed by anyone since it was fetched.
        out: Memory for the model, which a whole blob doesn't need. Shape (layout.size_bytes,).
        origin: Ours.

    Raises:
        RemoteProtocolError: The bytes don't hold; it says which.
    """
    tensors = Tensors(layout, answer.blob if answer.encoding == Encoding.F32 else out)
    if answer.encoding != Encoding.F32:
        split = answer.blob.size - layout.uncoded.size_bytes
        numbers, others = answer.blob[:split], answer.blob[split:]
        all_coded = not layout.uncoded.specs
        vector = out.view(np.float32) if all_coded else np.empty(_num_coded(layout), np.float32)
        _read_numbers(answer, numbers, have, origin, vector)
        if not all_coded:
            _merge(layout, vector.view(np.uint8), others, out)
    tensors.check_received()
    if answer.encoding != Encoding.F32:
        check_digest("what it leads to", digest_of(tensors.buffer.data), answer.leads_to)
    return tensors


def _read_numbers(
    answer: Answer,
    numbers: Bytes,
    have: ModelSnapshot | None,
    origin: Origin | None,
    out: Vector,
) -> None:
    bits = CODECS.get(answer.encoding)
    if bits is None:
        read_copy(numbers.data, out)
        return
    if answer.base is None and origin is not None:
        public = origin.vector
    elif answer.base is not None and have is not None and have.version == answer.base:
        public = _coded_numbers(have.tensors)
    else:
        base = "the initial model" if answer.base is None else answer.base
        raise LocalProtocolError(f"differences to {base} are read without it")
    follow(public, numbers.data, bits, out)


def _coded(
    snapshot: ModelSnapshot, publication: Publication, bases: Sequence[Version | None]
) -> Edition:
    """Make an edition of a public copy and the snapshot's other tensors.

    Args:
        snapshot: The owner's own model.
        publication: The public copy.
        bases: What its differences go on from, the last of them the last here.
    """
    layout = snapshot.tensors.layout
    public, others = publication.vector.view(np.uint8), _select(snapshot.tensors, layout.uncoded)
    if layout.uncoded.specs:
        buffer = allocate(layout.size_bytes)
        _merge(layout, public, others, buffer)
        public = buffer
    digest, encoding = digest_of(public.data), codec_of(publication.bits)
    count = len(publication.differences)
    tail, start = _joined(*publication.differences, others), 0
    since: dict[Version | None, Answer] = {}
    for base, difference in zip(bases[len(bases) - count :], publication.differences, strict=True):
        since[base] = Answer(
            encoding=encoding, base=base, leads_to=digest, blob=tail[start:], within=tail
        )
        start += difference.size
    return Edition(
        snapshot=replace(snapshot, tensors=Tensors(layout, public)),
        whole=Answer(encoding=Encoding.F32, blob=public),
        copy=Answer(
            encoding=Encoding.F16,
            leads_to=digest,
            blob=_joined(publication.copy.view(np.uint8), others),
        ),
        since=since,
        publication=publication,
    )


def _whole_size(layout: Layout, encoding: Encoding) -> int:
    """Return the size of an answer that builds on nothing."""
    if encoding == Encoding.F32:
        return layout.size_bytes
    return copy_size_bytes(_num_coded(layout)) + layout.uncoded.size_bytes


def _coded_numbers(tensors: Tensors) -> Vector:
    """Return what a codec applies to as one vector, without a copy where that is all."""
    return _select(tensors, tensors.layout.coded).view(np.float32)


def _num_coded(layout: Layout) -> int:
    return layout.coded.size_bytes // 4


def _joined(*parts: Bytes) -> Bytes:
    """Return arrays as one, without a copy where only one has bytes."""
    filled = [part for part in parts if part.size]
    return filled[0] if len(filled) == 1 else np.concatenate((*filled, np.empty(0, np.uint8)))


def _spans(layout: Layout) -> Iterator[tuple[str, slice]]:
    """Yield the name of each tensor, and where it and the gap after it lie in a blob."""
    ends = (*layout.offsets[1:], layout.size_bytes)
    for spec, offset, end in zip(layout.specs, layout.offsets, ends, strict=True):
        yield spec.name, slice(offset, end)


def _select(tensors: Tensors, part: Layout) -> Bytes:
    """Return the blob of some tensors of a model, without a copy where those are all of them."""
    if len(part.specs) == len(tensors.layout.specs):
        return tensors.buffer
    spans = [tensors.buffer[span] for name, span in _spans(tensors.layout) if name in part.index]
    return np.concatenate((*spans, np.empty(0, np.uint8)))


def _merge(layout: Layout, coded: Bytes, others: Bytes, out: Bytes) -> None:
    """Write the blob of a model, given the two that it is made of."""
    read = {True: 0, False: 0}
    for name, span in _spans(layout):
        is_coded, size = name in layout.coded.index, span.stop - span.start
        source = coded if is_coded else others
        out[span] = source[read[is_coded] : read[is_coded] + size]
        read[is_coded] += size
