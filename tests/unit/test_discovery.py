"""Addresses from the config and from a watched file."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from protocol.discovery.static import StaticDiscovery, check_endpoint
from protocol.errors import ConfigError, IdentityError
from protocol.identity import generate_key_pair, write_key_pair
from protocol.messages import PeerId

ENDPOINT = "tcp://127.0.0.1:7001"
DEADLINE_S = 10.0


def make_peer(folder: Path, name: str) -> PeerId:
    pair = generate_key_pair()
    write_key_pair(pair, folder / f"{name}.key", folder / f"{name}.pub")
    return pair.peer_id


async def test_addresses_of_the_config_come_at_once_without_our_own(tmp_path):
    alice, bob = make_peer(tmp_path, "alice"), make_peer(tmp_path, "bob")
    endpoints = {"alice": ENDPOINT, "bob": ENDPOINT}
    discovery = StaticDiscovery(endpoints, tmp_path, None, own=alice)
    (addresses,) = [seen async for seen in discovery.watch()]
    assert list(addresses) == [bob]
    assert (addresses[bob].name, addresses[bob].endpoint) == ("bob", ENDPOINT)


async def test_a_file_is_waited_for_followed_and_kept_when_it_is_damaged(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    alice, bob = make_peer(tmp_path, "alice"), make_peer(tmp_path, "bob")
    file = tmp_path / "neighbors.toml"
    watching = StaticDiscovery({}, tmp_path, file, own=alice).watch()
    first = asyncio.ensure_future(anext(watching))
    await asyncio.sleep(0)
    assert not first.done()
    async with asyncio.timeout(DEADLINE_S):
        file.write_text(f'bob = "{ENDPOINT}"')
        assert list(await first) == [bob]
        for damage in (b"\xff", b"bob = ", b'zoe = "tcp://127.0.0.1:1"', b'bob = "127.0.0.1"'):
            following = asyncio.ensure_future(anext(watching))
            caplog.clear()
            file.write_bytes(damage)
            while not caplog.records:  # noqa: ASYNC110  the log is what is waited for
                await asyncio.sleep(0.01)
            assert "addresses stay as they are" in caplog.text
            file.write_text(f'bob = "{ENDPOINT[:-1]}2"\n#' + "x" * len(damage))
            assert (await following)[bob].endpoint == "tcp://127.0.0.1:7002"
    await watching.aclose()


async def test_a_damaged_file_or_missing_key_at_the_start_is_an_error(tmp_path):
    alice = make_peer(tmp_path, "alice")
    file = tmp_path / "neighbors.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="can't be read"):
        await anext(StaticDiscovery({}, tmp_path, file, own=alice).watch())
    with pytest.raises(IdentityError, match=r"zoe\.pub isn't there"):
        await anext(StaticDiscovery({"zoe": ENDPOINT}, tmp_path, None, own=alice).watch())


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:0", "tcp://[::1]:65535", "tcp://host.example:7001", "tcp://*:1"]
)
def test_endpoints_of_all_forms_are_taken(endpoint):
    check_endpoint("x", endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:1",
        "udp://a:1",
        "tcp://a",
        "tcp://:1",
        "tcp://a:x",
        "tcp://a:65536",
        "tcp://::1:1",
        7,
    ],
)
def test_malformed_endpoints_are_named(endpoint):
    with pytest.raises(ConfigError, match=r"^x: "):
        check_endpoint("x", endpoint)


async def test_a_neighbor_with_our_own_key_is_left_out_and_named_once(tmp_path, caplog):
    alice = make_peer(tmp_path, "alice")
    (tmp_path / "bob.pub").write_text((tmp_path / "alice.pub").read_text())
    for names in (["alice"], ["alice", "bob"]):
        discovery = StaticDiscovery(
            dict.fromkeys(names, ENDPOINT), tmp_path, None, own=alice, name="alice"
        )
        assert [seen async for seen in discovery.watch()] == [{}]
        assert [line for line in caplog.messages if "own key" in line] == [
            "the neighbor bob has this peer's own key and is left out: if it is another peer, "
            "give each a key of its own"
        ] * (len(names) - 1)
