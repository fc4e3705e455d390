"""One connection to an MQTT broker: whatever goes wrong is one line, and nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiomqtt

from protocol.errors import ConfigError, ProtocolError

MAX_QUEUED_MESSAGES = 16_384
GOODBYE_S = 1.0
"""How long what was begun may take to end once nobody wants it any more."""

_NO_ENTRY = frozenset({134, 135})  # what paho makes of MQTT 3.1.1's codes 4 and 5
_CUT = frozenset({4, 128})  # paho's codes for not being connected, without and with a cause
_FAILED = 0x80  # a refused subscription, and whatever is greater
_WRONG_NAME = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
# The library logs tracebacks of its own; all that matters arrives as an exception, too.
_SILENT = logging.Logger("aiomqtt", logging.CRITICAL + 1)


class BrokerLost(ProtocolError):
    """The broker can't be reached, refused us, or is gone; another attempt may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """Where a broker is, and how it knows us.

    Attributes:
        host: A name or an address.
        port: Its TCP port.
        tls: How its certificate is checked; None for plain text.
        username: As whom we log in, if there is a password.
        password: None to log in as nobody.
        client_id: Of two connections with one, a broker ends the older.
        keepalive_s: A silence longer than one and a half of these ends a connection.
        timeout_s: Longest wait for an answer.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    username: str
    password: str | None
    client_id: str
    keepalive_s: int
    timeout_s: float

    def __str__(self) -> str:
        return f"the broker {self.host}:{self.port}"

    @asynccontextmanager
    async def connected(self, topic: str, will: bytes) -> AsyncIterator[Connection]:
        """Connect, leaving a will that the broker publishes, retained, should it lose us.

        Raises:
            BrokerLost: It can't be reached or doesn't let us in.
        """
        await self._look()
        client = aiomqtt.Client(
            self.host,
            self.port,
            username=self.username if self.password is not None else None,
            password=self.password,
            identifier=self.client_id,
            protocol=aiomqtt.ProtocolVersion.V311,
            clean_session=True,
            will=aiomqtt.Will(topic, will, qos=1, retain=True),
            timeout=self.timeout_s,
            keepalive=self.keepalive_s,
            max_queued_incoming_messages=MAX_QUEUED_MESSAGES,
            tls_context=self.tls,
            logger=_SILENT,
        )
        entering = asyncio.create_task(client.__aenter__(), name="broker")
        for future in (entering, client._connected, client._disconnected):
            future.add_done_callback(_look_at)
        try:
            with self._in_words("doesn't answer; does network.mqtt.tls fit its listener?"):
                await asyncio.shield(entering)  # it connects in a thread, which can't be cancelled
            yield Connection(self, client)
        finally:
            await _let_go(client, entering)

    async def _look(self) -> None:
        """See whether the broker answers, in a way that can be cancelled at any time.

        aiomqtt connects in a thread: a broker that takes connections and never answers would hold
        up the end of the process. Here the reason of a failure is also known exactly.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                _, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls)
        except ssl.SSLCertVerificationError as error:
            raise BrokerLost(f"{self}: {_distrust(error)}") from error
        except (ssl.SSLError, ConnectionResetError) as error:
            raise BrokerLost(
                f"{self} doesn't speak TLS on this port ({error.strerror}): correct "
                "network.mqtt.port, or the broker's listener"
            ) from error
        except TimeoutError as error:
            raise BrokerLost(f"{self}: nobody answers within {self.timeout_s:g} s") from error
        except socket.gaierror as error:
            raise BrokerLost(f"{self}: no such host ({error.strerror})") from error
        except (OSError, UnicodeError) as error:
            raise BrokerLost(f"{self} can't be reached: {error}") from error
        writer.transport.abort()

    @contextmanager
    def _in_words(self, fault: str = "is gone") -> Iterator[None]:
        try:
            yield
        except aiomqtt.MqttCodeError as error:
            code = error.rc if isinstance(error.rc, int) else getattr(error.rc, "value", None)
            if code in _NO_ENTRY:
                who = repr(self.username) if self.password is not None else "anybody without a name"
                raise BrokerLost(
                    f"{self} doesn't let {who} in: check network.mqtt.username and "
                    "network.mqtt.password_file against the password file of the broker"
                ) from error
            if code in _CUT:
                raise BrokerLost(f"{self}: the connection was lost") from error
            raise BrokerLost(f"{self} {fault} ({error})") from error
        except aiomqtt.MqttError as error:
            if isinstance(error.__cause__, aiomqtt.MqttCodeError):
                raise BrokerLost(f"{self}: the connection was lost") from error
            raise BrokerLost(f"{self} {fault} ({error.__cause__ or error})") from error


class Connection:
    """What can be done while connected."""

    def __init__(self, broker: Broker, client: aiomqtt.Client) -> None:
        self._broker = broker
        self._client = client

    async def publish(self, topic: str, payload: bytes) -> None:
        """Publish a retained message, at least once.

        The broker says that it has it even if its access rules made it drop it.

        Raises:
            BrokerLost: It didn't answer in time.
        """
        with self._broker._in_words():
            await self._client.publish(topic, payload, qos=1, retain=True)

    async def subscribe(self, topics: str) -> None:
        """Ask for all messages on these topics, those retained first.

        Raises:
            BrokerLost: It refused, or didn't answer in time.
        """
        with self._broker._in_words():
            answers = await self._client.subscribe(topics, qos=1)
        for answer in answers:
            if (answer if isinstance(answer, int) else answer.value) >= _FAILED:
                raise BrokerLost(
                    f"{self._broker} refuses the subscription to {topics}: let "
                    f"{self._broker.username!r} read it in the broker's access rules"
                )

    async def messages(self) -> AsyncGenerator[tuple[str, bytes, bool], None]:
        """Yield topic, payload and whether it was retained, until the connection is lost.

        Raises:
            BrokerLost: It was.
        """
        with self._broker._in_words():
            async for message in self._client.messages:
                payload = message.payload if isinstance(message.payload, bytes) else b""
                yield message.topic.value, payload, message.retain


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return how a broker's certificate is checked, its name included.

    Args:
        ca_file: Certificate of the authority that signed it; None for those the system trusts.

    Raises:
        ConfigError: The file isn't there, or no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"network.mqtt.ca_file = {ca_file} holds no PEM certificate") from error
    except OSError as error:
        raise ConfigError(
            f"network.mqtt.ca_file = {ca_file} can't be read ({error.strerror}): ask whoever runs "
            "the broker for the certificate of its authority"
        ) from error


def read_password(path: Path) -> str:
    """Read a password, the only line of its file.

    Raises:
        ConfigError: Missing, unreadable, empty, or readable by others than its owner.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"network.mqtt.password_file = {path} can't be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(
            f"network.mqtt.password_file = {path} is readable by others (mode {mode:04o}): "
            f"if nobody has read it, run chmod 600 {path}; else choose a new password"
        )
    if not password or "\n" in password:
        raise ConfigError(f"network.mqtt.password_file = {path} must hold one line, the password")
    return password


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _WRONG_NAME:
        return (
            f"its certificate is made out to another name ({error.verify_message}): "
            "set network.mqtt.host to the name in the certificate"
        )
    return (
        f"its certificate can't be trusted ({error.verify_message}): set network.mqtt.ca_file "
        "to the certificate of the authority that signed it"
    )


async def _let_go(client: aiomqtt.Client, entering: asyncio.Task[aiomqtt.Client]) -> None:
    """Disconnect, also while connecting or after it has failed.

    aiomqtt would then leave its socket and a task for as long as the keepalive; it can only be told
    from inside, as it can be kept from logging a traceback of a failure that nobody looked at.
    """
    if not entering.done():
        await asyncio.wait({entering}, timeout=GOODBYE_S)
    client._client.disconnect()
    looking_after = client._misc_task
    if looking_after is not None:
        await asyncio.wait({looking_after}, timeout=GOODBYE_S)
        looking_after.cancel()
    entering.cancel()  # not before: without its future, the library fails to close the socket
    await asyncio.wait({entering})
    client._disconnected.add_done_callback(_look_at)  # another than at first, if lost at once


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
