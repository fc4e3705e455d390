"""Endpoints are read strictly, and what is advertised can be dialed."""

from __future__ import annotations

import pytest

from protocol.errors import ConfigError
from protocol.transport.endpoint import Endpoint, advertised, parse_endpoint


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:7001", "127.0.0.1", 7001),
        ("tcp://[::1]:0", "::1", 0),
        ("tcp://[fe80::1%eth0]:5", "fe80::1%eth0", 5),
        ("tcp://peer.example:65535", "peer.example", 65535),
        ("tcp://*:*", "*", 0),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    endpoint = parse_endpoint(text, "listen")
    assert (endpoint.host, endpoint.port) == (host, port)
    assert str(endpoint) == text.replace(":*", ":0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:7001",
        "tcp://127.0.0.1",
        "tcp://::1:7001",
        "tcp://host:70000",
        "udp://h:1",
        "tcp://ho st:1",
        "tcp://host:1/path",
        "tcp://[::1:7001",
        "tcp://host:-1",
    ],
)
def test_anything_else_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"listen.*tcp://HOST:PORT"):
        parse_endpoint(text, "listen")


def test_what_is_listened_on_is_advertised_with_its_real_port() -> None:
    assert str(advertised(Endpoint("127.0.0.1", 0), None, 4321)) == "tcp://127.0.0.1:4321"
    assert str(advertised(Endpoint("::1", 0), None, 4321)) == "tcp://[::1]:4321"


def test_an_advertised_port_wins_unless_it_is_0() -> None:
    assert str(advertised(Endpoint("*", 7001), "tcp://h:99", 7001)) == "tcp://h:99"
    assert str(advertised(Endpoint("*", 0), "tcp://h:0", 4321)) == "tcp://h:4321"


@pytest.mark.parametrize("listen", ["tcp://*:7001", "tcp://0.0.0.0:7001", "tcp://[::]:7001"])
def test_a_wildcard_needs_an_address_to_advertise(listen: str) -> None:
    with pytest.raises(ConfigError, match="set advertise"):
        advertised(parse_endpoint(listen, "listen"), None, 7001)
    with pytest.raises(ConfigError, match="can't be dialed"):
        advertised(parse_endpoint(listen, "listen"), listen, 7001)
