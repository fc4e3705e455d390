"""Addresses that a person or the launcher wrote down: in the config, or in a watched file."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from protocol.errors import ConfigError, IdentityError
from protocol.identity import peer_id_of, read_public_key
from protocol.messages import PeerId
from protocol.transport.interface import Address

logger = logging.getLogger(__name__)

POLL_S = 0.25


class StaticDiscovery:
    """Knows a fixed set of addresses, and those in a file that may change.

    Args:
        endpoints: Endpoint of each peer by its name.
        keys: Directory with each peer's public key, `NAME.pub`.
        file: TOML lines `NAME = "ENDPOINT"`; they win over `endpoints`.
        own: Our own peer id, which is left out.
        name: What we are called; under another name our own key is worth a warning.
    """

    def __init__(
        self,
        endpoints: Mapping[str, str],
        keys: Path,
        file: Path | None,
        own: PeerId,
        name: str = "",
    ) -> None:
        self._endpoints = dict(endpoints)
        self._keys = keys
        self._file = file
        self._own = own
        self._name = name

    async def watch(self) -> AsyncGenerator[Mapping[PeerId, Address], None]:
        """Yield the addresses once the file is there, then whenever it changes.

        A file that can't be used later on is reported once and the addresses stay as they are.

        Raises:
            ConfigError: An address is malformed at the start.
            IdentityError: A peer's public key is missing at the start.
        """
        stamp = None
        first = True
        while True:
            newest = _stamp(self._file) if self._file else None
            if first and (self._file is None or newest is not None):
                yield self._read()
                first = False
            elif newest is not None and newest != stamp:
                try:
                    yield self._read()
                except (ConfigError, IdentityError) as error:
                    logger.warning("addresses stay as they are: %s", error)
            stamp = newest
            if self._file is None:
                return
            await asyncio.sleep(POLL_S)

    def _read(self) -> dict[PeerId, Address]:
        endpoints = dict(self._endpoints)
        if self._file is not None:
            try:
                endpoints |= tomllib.loads(self._file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise ConfigError(f"{self._file} can't be read: {error}") from error
        addresses = {}
        for name, endpoint in endpoints.items():
            check_endpoint(f"neighbor {name}", endpoint)
            public_key = read_public_key(self._keys / f"{name}.pub")
            addresses[peer_id_of(public_key)] = Address(
                name=name, endpoint=endpoint, public_key=public_key
            )
        ourselves = addresses.pop(self._own, None)
        if ourselves is not None and self._name not in ("", ourselves.name):
            logger.warning(
                "the neighbor %s has this peer's own key and is left out: if it is another peer, "
                "give each a key of its own",
                ourselves.name,
            )
            self._name = ourselves.name  # once is enough
        return addresses


def check_endpoint(what: str, endpoint: object) -> None:
    """Check that an endpoint reads `tcp://HOST:PORT`, IPv6 hosts in brackets.

    Raises:
        ConfigError: It doesn't; the message names `what`.
    """
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        raise ConfigError(f"{what}: {endpoint!r} must read tcp://HOST:PORT")
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{what}: {endpoint!r} must end in a port number, 0 to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(
            f"{what}: {endpoint!r}: write an IPv6 address in brackets, tcp://[::1]:7001"
        )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
