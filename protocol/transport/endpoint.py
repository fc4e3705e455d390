"""Endpoints such as `tcp://host:7001`: their parts, and which may be advertised."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from protocol.errors import ConfigError

_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})
_FORM = re.compile(r"tcp://(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:/\s]+)):(?P<port>\d{1,5}|\*)")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a TCP port.

    Attributes:
        host: A name, an IPv4 or IPv6 literal without brackets, or `*`.
        port: From 0 to 65535; 0 means that the system picks one.
    """

    host: str
    port: int

    @property
    def is_wildcard(self) -> bool:
        """Whether it means every interface, and so no address that others could dial."""
        return self.host in _WILDCARDS

    @property
    def is_literal(self) -> bool:
        """Whether the host needs no name resolution."""
        try:
            ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_endpoint(text: str, setting: str) -> Endpoint:
    """Read an endpoint; `setting` is where it came from, for the message.

    Raises:
        ConfigError: It isn't of the form `tcp://host:port`.
    """
    found = _FORM.fullmatch(text)
    port = 0 if found is None or found["port"] == "*" else int(found["port"])
    if found is None or port > 65535:
        raise ConfigError(
            f"{setting} = {text!r} is no endpoint: write tcp://HOST:PORT, "
            "an IPv6 address in brackets, such as tcp://[::1]:7001"
        )
    return Endpoint(found["v6"] or found["host"], port)


def advertised(listen: Endpoint, advertise: str | None, port: int) -> Endpoint:
    """Return what others are told to dial, given the port that was really bound.

    Raises:
        ConfigError: It would be a wildcard, which nobody can dial.
    """
    told = listen if advertise is None else parse_endpoint(advertise, "advertise")
    if told.is_wildcard and advertise is None:
        raise ConfigError(
            f"listen = '{listen}' means every interface, so others can't know where to dial: "
            "set advertise to an address of this machine, such as tcp://192.0.2.7:7001"
        )
    if told.is_wildcard:
        raise ConfigError(f"advertise = '{told}' can't be dialed: write an address, not a wildcard")
    return Endpoint(told.host, port if advertise is None or told.port == 0 else told.port)
