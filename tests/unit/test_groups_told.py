"""What one peer tells of who belongs together: bounded, typed, and with the digest it says."""

from __future__ import annotations

import json

import pytest
from helpers import peer_id
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from protocol.codec import MAX_CHUNK_BYTES
from protocol.errors import RemoteProtocolError
from protocol.groups import MAX_GROUPED, Groups, decode_groups, encode_groups

LABELS = st.dictionaries(
    st.integers(0, 2**100).map(peer_id), st.integers(0, MAX_GROUPED - 1), min_size=1, max_size=30
)


@given(LABELS)
@hypothesis_settings(max_examples=60)
def test_groups_arrive_as_they_were_found_in_whatever_order(labels):
    groups = Groups.of(labels)
    assert Groups.of(dict(reversed(labels.items()))) == groups
    told = decode_groups(encode_groups(groups))
    assert told == groups
    assert list(told.labels) == sorted(labels)
    for each in labels:
        assert {each, *told.others_of(each)} == {n for n in labels if labels[n] == labels[each]}


def test_the_most_peers_that_are_grouped_fit_one_message_and_one_more_is_refused():
    most = Groups.of({peer_id(number): number for number in range(MAX_GROUPED)})
    assert len(encode_groups(most)) < MAX_CHUNK_BYTES
    assert decode_groups(encode_groups(most)) == most
    too_many = Groups.of({peer_id(number): 0 for number in range(MAX_GROUPED + 1)})
    with pytest.raises(RemoteProtocolError, match="length <= 1025"):
        decode_groups(encode_groups(too_many))


def body_of(labels: object, digest: str) -> bytes:
    return json.dumps({"labels": labels, "digest": digest}).encode()


ONE = Groups.of({peer_id(1): 0})


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "can't be read"),
        (b"\xff{", "can't be read"),
        (body_of({}, ONE.digest), "length >= 1"),
        (body_of({"ada": 0}, ONE.digest), "regex"),
        (body_of({peer_id(1): -1}, ONE.digest), ">= 0"),
        (body_of({peer_id(1): MAX_GROUPED}, ONE.digest), "<= 1024"),
        (body_of({peer_id(1): 0.5}, ONE.digest), "int"),
        (body_of({peer_id(1): 1}, ONE.digest), "has the digest"),
        (body_of({peer_id(1): 0}, "0" * 16), f"has the digest {ONE.digest}"),
        (body_of([peer_id(1)], ONE.digest), "object"),
    ],
)
def test_a_body_that_lies_about_its_digest_or_is_no_groups_is_refused_by_what_is_wrong(body, what):
    with pytest.raises(RemoteProtocolError, match=what):
        decode_groups(body)
