"""The bytes of every message are pinned; any other bytes give a message or RemoteProtocolError."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import MAX_CHUNK_BYTES, MAX_HEADER_BYTES, Buffer, decode, encode
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import (
    MESSAGES,
    WITH_BODY,
    Chunk,
    ChunkRequest,
    Encoding,
    GossipAnswer,
    GossipRequest,
    GradientChunk,
    GradientOffer,
    GradientProgress,
    GroupsAnswer,
    GroupsRequest,
    Hello,
    LayoutExchange,
    Leave,
    Message,
    ModelOffer,
    ModelRequest,
    ModelUnchanged,
    PeerId,
    Ping,
    Pong,
    Refusal,
    RefusalCode,
    StatusReport,
    StatusRequest,
    Version,
    Welcome,
)

V = Version(7, 300)
DIGEST = "0123456789abcdef"
FRIEND = PeerId("0123456789abcdef" * 2)
EXAMPLES: list[tuple[Message, bytes | None]] = [
    (
        Hello(
            request_id=1,
            protocol_min=1,
            protocol_max=1,
            features=[],
            name="ada",
            incarnation=7,
            advertise="tcp://[::1]:7001",
            federation_id="home",
            layout_fingerprint="ab" * 16,
            task="digits",
        ),
        None,
    ),
    (
        Welcome(
            request_id=1,
            version=1,
            features=["x"],
            name="bob",
            incarnation=9,
            max_chunk_bytes=1 << 20,
        ),
        None,
    ),
    (Refusal(request_id=2, code=RefusalCode.LAYOUT, text="no", retry_after_s=30.0), None),
    (Ping(request_id=3), None),
    (Pong(request_id=3), None),
    (ModelRequest(request_id=4, have=V, accept_bytes=65536), None),
    (
        ModelOffer(request_id=4, version=V, size_bytes=70000, digest=DIGEST, friends=(FRIEND,)),
        b"begin",
    ),
    (ModelUnchanged(request_id=4, version=V), None),
    (ChunkRequest(request_id=5, transfer_id=4, offset=65536, length=4464), None),
    (Chunk(request_id=5, transfer_id=4, offset=65536), b"bytes"),
    (
        GradientOffer(
            request_id=6,
            transfer_id=2**60,
            size_bytes=128,
            digest=DIGEST,
            sender_round=12,
            on_version=V,
            weight=0.5,
            num_examples=32,
        ),
        b"",
    ),
    (GradientChunk(request_id=7, transfer_id=2**60, offset=64), b"more"),
    (GradientProgress(request_id=7, transfer_id=2**60, received_bytes=128), None),
    (LayoutExchange(request_id=8), b'["digits",[]]'),
    (Leave(request_id=9), None),
    (StatusRequest(request_id=10), None),
    (StatusReport(request_id=10), b"{}"),
    (GossipRequest(request_id=11), b"{}"),
    (GossipAnswer(request_id=11), b"{}"),
    (GroupsRequest(request_id=12), None),
    (GroupsAnswer(request_id=12), b"{}"),
    (
        ModelOffer(
            request_id=4,
            version=V,
            size_bytes=9000,
            digest=DIGEST,
            friends=(),
            encoding=Encoding.DEFLATE_4,
            base=Version(7, 298),
            leads_to=DIGEST[::-1],
        ),
        b"begin",
    ),
    (
        ModelOffer(
            request_id=4,
            version=V,
            size_bytes=35000,
            digest=DIGEST,
            friends=(),
            encoding=Encoding.F16,
            leads_to=DIGEST,
        ),
        b"begin",
    ),
    (
        GradientOffer(
            request_id=6,
            transfer_id=1,
            size_bytes=34,
            digest=DIGEST,
            sender_round=12,
            on_version=V,
            weight=0.5,
            num_examples=32,
            encoding=Encoding.DEFLATE_8,
        ),
        b"",
    ),
    (
        ModelOffer(
            request_id=4,
            version=V,
            size_bytes=70000,
            digest=DIGEST,
            friends=(),
            num_examples=80,
        ),
        b"begin",
    ),
]


def name_of(message: Message) -> str:
    encoding = getattr(message, "encoding", Encoding.F32)
    name = type(message).__name__ + ("" if encoding == Encoding.F32 else f" {encoding}")
    return name + (
        " with a size" if isinstance(message, ModelOffer) and message.num_examples else ""
    )


GOLDEN = {
    "Hello": (
        "434f0101 8aaa726571756573745f696401ac70726f746f636f6c5f6d696e01ac70726f746f636f6c5f6"
        "d617801a8666561747572657390a46e616d65a3616461ab696e6361726e6174696f6e07a961647665727"
        "4697365b07463703a2f2f5b3a3a315d3a37303031ad66656465726174696f6e5f6964a4686f6d65b26c6"
        "1796f75745f66696e6765727072696e74d92061626162616261626162616261626162616261626162616"
        "26162616261626162a47461736ba6646967697473"
    ),
    "Welcome": (
        "434f0102 86aa726571756573745f696401a776657273696f6e01a8666561747572657391a178a46e616"
        "d65a3626f62ab696e6361726e6174696f6e09af6d61785f6368756e6b5f6279746573ce00100000"
    ),
    "Refusal": (
        "434f0103 84aa726571756573745f696402a4636f6465a64c41594f5554a474657874a26e6fad7265747"
        "2795f61667465725f73cb403e000000000000"
    ),
    "Ping": ("434f0104 81aa726571756573745f696403"),
    "Pong": ("434f0105 81aa726571756573745f696403"),
    "ModelRequest": (
        "434f0106 83aa726571756573745f696404a4686176659207cd012cac6163636570745f6279746573ce0"
        "0010000"
    ),
    "ModelOffer": (
        "434f0107 85aa726571756573745f696404a776657273696f6e9207cd012caa73697a655f6279746573c"
        "e00011170a6646967657374b030313233343536373839616263646566a7667269656e647391d92030313"
        "23334353637383961626364656630313233343536373839616263646566 626567696e"
    ),
    "ModelUnchanged": ("434f0108 82aa726571756573745f696404a776657273696f6e9207cd012c"),
    "ChunkRequest": (
        "434f0109 84aa726571756573745f696405ab7472616e736665725f696404a66f6666736574ce0001000"
        "0a66c656e677468cd1170"
    ),
    "Chunk": (
        "434f010a 83aa726571756573745f696405ab7472616e736665725f696404a66f6666736574ce0001000"
        "0 6279746573"
    ),
    "GradientOffer": (
        "434f010b 88aa726571756573745f696406ab7472616e736665725f6964cf1000000000000000aa73697"
        "a655f6279746573cc80a6646967657374b030313233343536373839616263646566ac73656e6465725f7"
        "26f756e640caa6f6e5f76657273696f6e9207cd012ca6776569676874cb3fe0000000000000ac6e756d5"
        "f6578616d706c657320 "
    ),
    "GradientChunk": (
        "434f010c 83aa726571756573745f696407ab7472616e736665725f6964cf1000000000000000a66f666"
        "673657440 6d6f7265"
    ),
    "GradientProgress": (
        "434f010d 83aa726571756573745f696407ab7472616e736665725f6964cf1000000000000000ae72656"
        "365697665645f6279746573cc80"
    ),
    "LayoutExchange": ("434f010e 81aa726571756573745f696408 5b22646967697473222c5b5d5d"),
    "Leave": ("434f010f 81aa726571756573745f696409"),
    "StatusRequest": ("434f0110 81aa726571756573745f69640a"),
    "StatusReport": ("434f0111 81aa726571756573745f69640a 7b7d"),
    "GossipRequest": ("434f0112 81aa726571756573745f69640b 7b7d"),
    "GossipAnswer": ("434f0113 81aa726571756573745f69640b 7b7d"),
    "GroupsRequest": ("434f0114 81aa726571756573745f69640c"),
    "GroupsAnswer": ("434f0115 81aa726571756573745f69640c 7b7d"),
    "ModelOffer deflate-4": (
        "434f0107 88aa726571756573745f696404a776657273696f6e9207cd012caa73697a655f6279746573"
        "cd2328a6646967657374b030313233343536373839616263646566a7667269656e647390a8656e636f6"
        "4696e67a96465666c6174652d34a4626173659207cd012aa86c656164735f746fb066656463626139383736"
        "353433323130 626567696e"
    ),
    "ModelOffer f16": (
        "434f0107 87aa726571756573745f696404a776657273696f6e9207cd012caa73697a655f6279746573"
        "cd88b8a6646967657374b030313233343536373839616263646566a7667269656e647390a8656e636f6"
        "4696e67a3663136a86c656164735f746fb030313233343536373839616263646566 626567696e"
    ),
    "GradientOffer deflate-8": (
        "434f010b 89aa726571756573745f696406ab7472616e736665725f696401aa73697a655f6279746573"
        "22a6646967657374b030313233343536373839616263646566ac73656e6465725f726f756e640caa6f6"
        "e5f76657273696f6e9207cd012ca6776569676874cb3fe0000000000000ac6e756d5f6578616d706c65"
        "7320a8656e636f64696e67a96465666c6174652d38 "
    ),
    "ModelOffer with a size": (
        "434f0107 86aa726571756573745f696404a776657273696f6e9207cd012caa73697a655f6279746573"
        "ce00011170a6646967657374b030313233343536373839616263646566a7667269656e647390ac6e756d"
        "5f6578616d706c657350 626567696e"
    ),
}


def test_every_kind_of_message_has_an_example_and_each_its_bytes() -> None:
    assert tuple(dict.fromkeys(type(message) for message, _ in EXAMPLES)) == MESSAGES
    assert [name_of(message) for message, _ in EXAMPLES] == list(GOLDEN)


def names(value: object) -> str:
    return name_of(value) if isinstance(value, MESSAGES) else ""


@pytest.mark.parametrize(("message", "body"), EXAMPLES, ids=names)
def test_the_bytes_of_a_message_never_change(message: Message, body: bytes | None) -> None:
    golden = [bytes.fromhex(part) for part in GOLDEN[name_of(message)].split(" ")]
    assert [bytes(frame) for frame in encode(message, body)] == golden
    assert decode(golden) == (message, body)


@pytest.mark.parametrize(("message", "body"), EXAMPLES, ids=names)
def test_a_header_is_plain_msgpack_without_what_is_as_before_there_were_codecs(
    message: Message, body: bytes | None
) -> None:
    fields = msgpack.unpackb(encode(message, body)[1], raw=False)
    assert list(fields) == [
        field.name
        for field in msgspec.structs.fields(message)
        if field.default is msgspec.NODEFAULT or getattr(message, field.name) != field.default
    ]
    assert msgspec.convert(fields, type(message)) == message


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_frames_give_a_message_or_a_remote_protocol_error(frames: list[bytes]) -> None:
    decodes_or_refuses(frames)


@given(st.integers(0, 20), st.binary(max_size=300), st.none() | st.binary(max_size=20))
def test_any_header_of_any_kind_gives_a_message_or_a_remote_protocol_error(
    kind: int, header: bytes, body: bytes | None
) -> None:
    decodes_or_refuses([b"CO\x01" + bytes((kind,)), header, *(() if body is None else (body,))])


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.data(), st.sampled_from(["replace", "drop", "add"]))
def test_a_message_with_one_odd_field_gives_a_message_or_a_remote_protocol_error(
    example: tuple[Message, bytes | None], data: st.DataObject, change: str
) -> None:
    message, body = example
    prefix, header, *rest = encode(message, body)
    fields = msgpack.unpackb(header)
    name = data.draw(st.sampled_from(sorted(fields)))
    if change == "replace":
        fields[name] = data.draw(msgpack_values)
    elif change == "drop":
        del fields[name]
    else:
        fields["surprise"] = data.draw(msgpack_values)
    frames = [prefix, msgpack.packb(fields), *rest]
    optional = any(
        field.name == name and field.default is not msgspec.NODEFAULT
        for field in msgspec.structs.fields(message)
    )
    if (change == "drop" and not optional) or (change == "add" and not isinstance(message, Hello)):
        with pytest.raises(RemoteProtocolError):
            decode(frames)
    else:
        decodes_or_refuses(frames)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_truncated_header_is_refused(
    example: tuple[Message, bytes | None], data: st.DataObject
) -> None:
    prefix, header, *rest = encode(*example)
    length = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(RemoteProtocolError):
        decode([prefix, header[:length], *rest])


def test_only_a_hello_tolerates_unknown_fields() -> None:
    hello = next(message for message, _ in EXAMPLES if isinstance(message, Hello))
    fields = msgspec.to_builtins(hello) | {"from_the_future": 1}
    assert decode([encode(hello)[0], msgpack.packb(fields)]) == (hello, None)


def test_a_deeply_nested_header_is_refused() -> None:
    deep = b"\x91" * (MAX_HEADER_BYTES - 8) + b"\xc0"
    header = b"\x82" + msgpack.packb("request_id") + msgpack.packb(1) + msgpack.packb("x") + deep
    hello = encode(EXAMPLES[0][0])
    for prefix in (hello[0], b"CO\x01\x04"):
        with pytest.raises(RemoteProtocolError):
            decode([prefix, header[:MAX_HEADER_BYTES]])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"CO\x01\x04"],
        [b"CO\x02\x04", b"\x81\xaarequest_id\x01"],
        [b"co\x01\x04", b"\x81\xaarequest_id\x01"],
        [b"CO\x01\x04x", b"\x81\xaarequest_id\x01"],
        [b"CO\x01\x04", b"\x81\xaarequest_id\x01", b"body"],
        [b"CO\x01\x0a", b"\x81\xaarequest_id\x01"],
        [b"CO\x01\x04", b"\x81\xaarequest_id\x01", b"body", b"more"],
        [b"CO\x01\x04", b"\x81\xaarequest_id\xff"],
        [b"CO\x01\x04", b" " * (MAX_HEADER_BYTES + 1)],
    ],
)
def test_malformed_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(frames)


def test_a_body_over_the_limit_is_refused_both_ways() -> None:
    chunk = Chunk(request_id=1, transfer_id=1, offset=0)
    body = bytes(MAX_CHUNK_BYTES)
    frames = encode(chunk, body)
    assert decode(frames) == (chunk, body)
    with pytest.raises(LocalProtocolError):
        encode(chunk, body + b"x")
    with pytest.raises(RemoteProtocolError):
        decode([*frames[:2], body + b"x"])


def test_a_body_of_several_dimensions_is_measured_in_bytes() -> None:
    chunk = Chunk(request_id=1, transfer_id=1, offset=0)
    with pytest.raises(LocalProtocolError):
        encode(chunk, memoryview(bytes(MAX_CHUNK_BYTES + 4)).cast("I"))


def test_a_body_goes_with_the_kinds_that_have_one_and_no_others() -> None:
    for message, body in EXAMPLES:
        assert (body is not None) == (type(message) in WITH_BODY)
        with pytest.raises(LocalProtocolError):
            encode(message, b"odd" if body is None else None)


def decodes_or_refuses(frames: list[Buffer]) -> None:
    try:
        message, body = decode(frames)
    except RemoteProtocolError:
        return
    assert isinstance(message, MESSAGES)
    assert (body is not None) == (type(message) in WITH_BODY)
