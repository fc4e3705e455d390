"""Whether a newcomer speaks our version, federation and model layout, and the reason if not."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import MAX_CHUNK_BYTES, MAX_LAYOUT_BYTES
from protocol.errors import PeerRefused, RemoteProtocolError
from protocol.lowbit import CODECS
from protocol.messages import (
    GROUPS,
    PROTOCOL_MIN,
    PROTOCOL_VERSION,
    SIZES,
    Hello,
    Refusal,
    RefusalCode,
    Welcome,
)
from protocol.tensors import Layout

# How long a peer that doesn't fit should wait before it asks again: somebody must act first.
RETRY_MISFIT_S = 30.0
_MAX_TEXT = 512

FEATURES = tuple(sorted([*CODECS, GROUPS, SIZES]))
"""What every peer of ours can do beyond the protocol's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What we say of ourselves in a handshake.

    Attributes:
        federation_id: Keeps two federations on one network apart.
        name: What people call us.
        incarnation: Grows with every start.
        advertise: The endpoint where others reach us.
        layout: Of the models that we exchange.
        task: What the models are for, with its label map; part of the layout's fingerprint.
        features: What we can do beyond the protocol's version: the codecs that we can read, whether
            or not we code what we send, what offers may say of a model, what we answer, and which
            initial model we began with.
    """

    federation_id: str
    name: str
    incarnation: int
    advertise: str
    layout: Layout
    task: str
    features: tuple[str, ...] = FEATURES

    def hello(self, request_id: int) -> Hello:
        """Return the first message that we send to a peer."""
        return Hello(
            request_id=request_id,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_VERSION,
            features=list(self.features),
            name=self.name,
            incarnation=self.incarnation,
            advertise=self.advertise,
            federation_id=self.federation_id,
            layout_fingerprint=self.layout.fingerprint(self.task),
            task=self.task,
        )

    def description(self) -> bytes:
        """Return our canonical layout, or nothing when it is too long for one message."""
        canonical = self.layout.canonical(self.task)
        return canonical if len(canonical) <= MAX_LAYOUT_BYTES else b""


def answer(hello: Hello, ours: Hello) -> Welcome | Refusal:
    """Welcome a newcomer, or refuse it with the reason.

    Args:
        hello: What the newcomer says of itself.
        ours: What we would say of ourselves.
    """
    version = min(hello.protocol_max, ours.protocol_max)
    if version < hello.protocol_min or version < ours.protocol_min:
        return _refusal(
            hello,
            RefusalCode.VERSION,
            f"{ours.name} speaks protocol {ours.protocol_min} to {ours.protocol_max}, not "
            f"{hello.protocol_min} to {hello.protocol_max}: install the same release on both",
        )
    if hello.federation_id != ours.federation_id:
        return _refusal(
            hello,
            RefusalCode.FEDERATION,
            f"{ours.name} belongs to the federation {ours.federation_id!r}, not "
            f"{hello.federation_id!r}: set the same federation id, or remove the address",
        )
    if hello.layout_fingerprint != ours.layout_fingerprint:
        return _refusal(
            hello,
            RefusalCode.LAYOUT,
            f"the models of {ours.name} have another layout or task: build the same model",
        )
    return Welcome(
        request_id=hello.request_id,
        version=version,
        features=[feature for feature in hello.features if feature in ours.features],
        name=ours.name,
        incarnation=ours.incarnation,
        max_chunk_bytes=MAX_CHUNK_BYTES,
    )


def check_welcome(welcome: Welcome, ours: Hello) -> None:
    """Check what a peer answered to our hello.

    Raises:
        RemoteProtocolError: It chose a version that we didn't offer, or can't take our chunks.
    """
    if not ours.protocol_min <= welcome.version <= ours.protocol_max:
        raise RemoteProtocolError(f"{welcome.name} chose protocol {welcome.version}, not offered")
    if welcome.max_chunk_bytes < MAX_CHUNK_BYTES:
        raise RemoteProtocolError(
            f"{welcome.name} takes chunks of {welcome.max_chunk_bytes} bytes at most, protocol "
            f"{welcome.version} has {MAX_CHUNK_BYTES}"
        )


def layout_misfit(name: str, ours: Credentials, theirs: bytes) -> PeerRefused:
    """Say how the layout of a peer differs from ours, given its canonical description.

    Raises:
        RemoteProtocolError: It is no such description.
    """
    difference = "too many tensors to name the first that differs"
    if theirs and ours.description():
        difference = ours.layout.first_difference(ours.task, theirs)
    return PeerRefused(
        RefusalCode.LAYOUT,
        f"{name} has another model, none is exchanged: {difference}",
        RETRY_MISFIT_S,
    )


def _refusal(hello: Hello, code: RefusalCode, text: str) -> Refusal:
    return Refusal(
        request_id=hello.request_id,
        code=code,
        text=text[:_MAX_TEXT],
        retry_after_s=RETRY_MISFIT_S,
    )
