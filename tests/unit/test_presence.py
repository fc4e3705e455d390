"""What peers say through a broker is verified, and settings that can't be used are named."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import protocol.discovery
from protocol.discovery.mqtt import MqttDiscovery, MqttSettings
from protocol.discovery.presence import (
    MAX_PRESENCE_BYTES,
    MAX_STRANGERS,
    Fault,
    Presence,
    PresenceIgnored,
    Sightings,
    State,
    Topics,
    read_presence,
)
from protocol.errors import ConfigError
from protocol.identity import generate_key_pair, peer_id_of
from protocol.messages import PeerId

KEYS = [generate_key_pair() for _ in range(3)]
ALICE, BOB, CAROL = (each.peer_id for each in KEYS)
NAMES = {each.public_key: name for each, name in zip(KEYS, ("alice", "bob", "carol"), strict=True)}


def presence(who: int = 0, **changes: object) -> Presence:
    up = Presence(
        state=State.UP,
        incarnation=1,
        advertise=f"tcp://192.0.2.{who + 1}:7001",
        public_key=KEYS[who].public_key,
        layout_fingerprint="0" * 32,
        name="what it calls itself",
    )
    return msgspec.structs.replace(up, **changes)


def fault_of(peer_id: PeerId, payload: bytes) -> Fault:
    with pytest.raises(PresenceIgnored) as caught:
        read_presence(peer_id, payload)
    assert "\n" not in str(caught.value)
    return caught.value.fault


@pytest.mark.parametrize("state", State)
def test_a_presence_comes_back_as_it_was_said(state):
    said = presence(incarnation=2**62, advertise="tcp://[2001:db8::1]:7001")
    read = read_presence(ALICE, said.encode(state))
    assert read == msgspec.structs.replace(said, state=state)
    assert read.is_of_same_life(said) and said.encode(state) == read.encode(state)
    assert not presence(advertise="tcp://192.0.2.9:7001").is_of_same_life(presence())


def test_the_key_must_be_that_of_the_topic():
    assert fault_of(BOB, presence().encode(State.UP)) is Fault.FORGED


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"advertise": "tcp://*:7001"}, Fault.UNDIALABLE),
        ({"advertise": "tcp://0.0.0.0:7001"}, Fault.UNDIALABLE),
        ({"advertise": "tcp://192.0.2.1:0"}, Fault.UNDIALABLE),
        ({"advertise": "192.0.2.1:7001"}, Fault.UNDIALABLE),
        ({"public_key": "#" * 40}, Fault.MALFORMED),
        ({"public_key": "short"}, Fault.MALFORMED),
        ({"incarnation": 2**62 + 1}, Fault.MALFORMED),
        ({"incarnation": -1}, Fault.MALFORMED),
        ({"name": ""}, Fault.MALFORMED),
        ({"name": "x" * 65}, Fault.MALFORMED),
        ({"layout_fingerprint": "x" * MAX_PRESENCE_BYTES}, Fault.OVERSIZED),
    ],
)
def test_what_is_no_presence_is_named(changes, fault):
    assert fault_of(ALICE, presence(**changes).encode(State.UP)) is fault


def test_unknown_fields_and_states_are_refused():
    fields = msgspec.structs.asdict(presence())
    for changes in ({"state": "asleep"}, {"more": 1}, {"incarnation": None}, {"name": b"\xff"}):
        payload = msgspec.msgpack.encode({**fields, **changes})
        assert fault_of(ALICE, payload) is Fault.MALFORMED
    assert fault_of(ALICE, b"\x91" * MAX_PRESENCE_BYTES) is Fault.MALFORMED


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_give_a_presence_of_that_peer_or_a_named_fault(data):
    whole = presence().encode(State.UP)
    at = data.draw(st.integers(0, len(whole)))
    payload = data.draw(
        st.binary(max_size=64)
        | st.just(whole[:at])
        | st.binary(min_size=1, max_size=4).map(lambda new: whole[:at] + new + whole[at + 1 :])
    )
    try:
        assert peer_id_of(read_presence(ALICE, payload).public_key) == ALICE
    except PresenceIgnored as ignored:
        assert ignored.fault in Fault


def test_topics_of_others_and_of_nobody_are_told_apart():
    topics = Topics("a b")
    assert topics.peer_id(topics.of(ALICE)) == ALICE
    for topic in (
        Topics("b").of(ALICE),
        topics.all,
        topics.of(PeerId(ALICE.upper() + "A")),
        topics.of(PeerId("G" * 32)),
        topics.of(ALICE) + "/x",
        "",
    ):
        with pytest.raises(PresenceIgnored) as caught:
            topics.peer_id(topic)
        assert caught.value.fault is Fault.TOPIC


@pytest.mark.parametrize("federation", ["", "a/b", "+", "#", "a\0", "x" * 257])
def test_a_federation_that_cannot_be_in_a_topic_is_named(federation):
    with pytest.raises(ConfigError, match=r"^network\.federation"):
        Topics(federation)


def test_names_come_from_the_allow_list_and_addresses_in_order():
    sightings = Sightings(NAMES.get)
    for who in (2, 0, 1):
        sightings.take(KEYS[who].peer_id, presence(who, name="alice"))
    addresses = sightings.addresses()
    assert list(addresses) == sorted([ALICE, BOB, CAROL])
    assert addresses[BOB].name == "bob"
    assert addresses[BOB].endpoint == "tcp://192.0.2.2:7001"


def test_a_lost_peer_keeps_its_address_and_one_that_left_does_not():
    sightings = Sightings(NAMES.get)
    for state, known in ((State.LOST, True), (State.LEFT, False), (State.UP, True)):
        sightings.take(ALICE, presence(state=state))
        assert (ALICE in sightings.addresses()) is known


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(State)), min_size=1))
def test_incarnations_never_fall_and_the_latest_word_of_the_newest_counts(words):
    sightings, expected = Sightings(NAMES.get), (-1, State.LEFT)
    for incarnation, state in words:
        try:
            sightings.take(ALICE, presence(incarnation=incarnation, state=state))
            assert incarnation >= expected[0]
            expected = (incarnation, state)
        except PresenceIgnored as ignored:
            assert ignored.fault is Fault.STALE and incarnation < expected[0]
        assert (ALICE in sightings.addresses()) is (expected[1] is not State.LEFT)


def test_a_stranger_is_remembered_until_its_key_is_allowed_but_not_without_end():
    names: dict[str, str] = {}
    sightings = Sightings(names.get)
    with pytest.raises(PresenceIgnored, match=r"isn't allowed"):
        sightings.take(ALICE, presence())
    assert not sightings.addresses()
    names[KEYS[0].public_key] = "alice"
    assert sightings.addresses()[ALICE].name == "alice"
    names.clear()
    for number in range(MAX_STRANGERS + 5):
        with pytest.raises(PresenceIgnored):
            sightings.take(PeerId(f"{number:032x}"), presence(1))
    names[KEYS[1].public_key] = "bob"
    assert len(sightings.addresses()) == MAX_STRANGERS


def test_two_peers_at_one_endpoint_are_noticed_while_both_are_up():
    sightings, own = Sightings(NAMES.get), presence(0)
    sightings.take(BOB, presence(1))
    assert sightings.twin(BOB, own) is None
    sightings.take(CAROL, presence(2, advertise=presence(1).advertise))
    assert sightings.twin(CAROL, own) == presence(1)
    sightings.take(BOB, presence(1, state=State.LOST))
    assert sightings.twin(CAROL, own) is None
    sightings.take(BOB, presence(1, advertise=own.advertise))
    assert sightings.twin(BOB, own) == own


def discovery(folder: Path, **chosen: object) -> MqttDiscovery:
    return MqttDiscovery(
        msgspec.convert(chosen, MqttSettings),
        folder,
        federation="coterie",
        birth=presence(),
        name_of=NAMES.get,
        rng=np.random.default_rng(0),
    )


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({}, "host is empty"),
        ({"host": "broker.example", "tls": False}, "set network.mqtt.insecure = true, too"),
        ({"host": "192.0.2.1", "tls": False}, "would show the password to the network"),
        ({"host": "localhost", "tls": False, "ca_file": "ca.pem"}, "remove one"),
        ({"host": "localhost", "ca_file": "ca.pem"}, r"ca\.pem can't be read \(No such file"),
        ({"host": "localhost", "ca_file": "open"}, "holds no PEM certificate"),
        ({"host": "localhost", "username": "alice"}, "set network.mqtt.password_file"),
        ({"host": "localhost", "password_file": "gone"}, "gone can't be read"),
        ({"host": "localhost", "password_file": "open"}, r"readable by others \(mode 0644\)"),
        ({"host": "localhost", "password_file": "empty"}, "must hold one line"),
        ({"host": "localhost", "password_file": "lines"}, "must hold one line"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_at_once(tmp_path, chosen, reason):
    for name, text, mode in (
        ("open", "secret\n", 0o644),
        ("empty", "\n", 0o600),
        ("lines", "a\nb\n", 0o600),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    with pytest.raises(ConfigError, match=reason) as caught:
        discovery(tmp_path, **chosen)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "chosen",
    [
        {"host": "broker.example"},
        {"host": "::1", "tls": False},
        {"host": "127.0.0.1", "tls": False},
        {"host": "broker.example", "tls": False, "insecure": True},
    ],
)
def test_plain_text_is_for_this_machine_or_said_twice(tmp_path, chosen):
    broker = discovery(tmp_path, **chosen)._broker
    assert (broker.tls is None) is (chosen.get("tls") is False)
    assert broker.port == (8883 if broker.tls else 1883)
    assert broker.username == ALICE and broker.password is None


def test_without_the_extra_the_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "protocol.discovery.broker", raising=False)
    monkeypatch.delattr(protocol.discovery, "broker", raising=False)
    monkeypatch.setitem(sys.modules, "aiomqtt", None)
    with pytest.raises(ConfigError, match=r"needs aiomqtt, .* pip install 'coterie\[mqtt\]'"):
        discovery(tmp_path, host="localhost")
