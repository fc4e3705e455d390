"""A status is bounded and typed both ways, and shows who refuses whom."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import MAX_CHUNK_BYTES
from protocol.errors import RemoteProtocolError
from protocol.identity import generate_key_pair, peer_id_of
from protocol.messages import PeerId
from protocol.status import (
    MAX_LISTED,
    Counted,
    Learning,
    MemberStatus,
    PeerStatus,
    RefusedKey,
    decode_status,
    encode_status,
)

KEY = generate_key_pair().public_key
ADA = peer_id_of(KEY)
MEMBER = MemberStatus(
    peer_id=ADA,
    name="ada",
    endpoint="tcp://[::1]:7001",
    public_key=KEY,
    state="unreachable",
    reason="nobody listens there",
)


def status(**changes: object) -> PeerStatus:
    plain = PeerStatus(
        peer_id=ADA,
        name="bob",
        federation="home",
        endpoint="tcp://127.0.0.1:7002",
        incarnation=2,
        running_s=1.5,
        round_number=7,
        rounds=0,
        loss=None,
        weights=Learning(weights={ADA: 1.0}).largest(),
        members=(MEMBER,),
        num_members=1,
        counters=(Counted("malformed", 3),),
        refused_keys=(RefusedKey(KEY, 2),),
    )
    return msgspec.structs.replace(plain, **changes)


def test_a_status_comes_back_as_it_was() -> None:
    for clustering in ("", "0123456789abcdef"):
        whole = status(clustering=clustering)
        assert decode_status(encode_status(whole)) == whole


def test_a_status_of_very_many_members_fits_one_message_and_says_how_many_there_are() -> None:
    members = (msgspec.structs.replace(MEMBER, reason="x" * 512),) * (2 * MAX_LISTED)
    body = encode_status(status(members=members, num_members=len(members)))
    assert len(body) <= MAX_CHUNK_BYTES
    assert 0 < len(decode_status(body).members) < MAX_LISTED
    assert decode_status(body).num_members == 2 * MAX_LISTED


def test_the_largest_weights_are_told_first_and_rounding_takes_none_above_one() -> None:
    weights = {PeerId(f"{index:032x}"): 1.0 / (1 + index) for index in range(3000)}
    weights[PeerId("f" * 32)] = 1.0 + 1e-12
    told = Learning(weights=weights).largest()
    assert len(told) == MAX_LISTED
    assert told[0] == (PeerId("f" * 32), 1.0)
    assert [weight for _, weight in told] == sorted((w for _, w in told), reverse=True)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_status_or_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="status"):
        decode_status(body)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (b'"rounds":-1', b'"rounds":0'),
        (b'"running_s":"long"', b'"running_s":1.5'),
        (b'"loss":null,"more":1', b'"loss":null'),
        (b'"clustering":"nonsense","members"', b'"members"'),
        (b'"public_key":"short"', b'"public_key":"' + KEY.encode() + b'"'),
    ],
)
def test_a_field_of_another_kind_is_refused(wrong: bytes, right: bytes) -> None:
    body = encode_status(status())
    assert right in body
    with pytest.raises(RemoteProtocolError, match="status"):
        decode_status(body.replace(right, wrong, 1))
