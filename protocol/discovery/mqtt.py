"""Addresses that peers tell each other through an MQTT broker; models never pass through it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from protocol.discovery.presence import (
    MAX_INCARNATION,
    Presence,
    PresenceIgnored,
    Sightings,
    State,
    Topics,
    read_presence,
)
from protocol.errors import ConfigError, ProtocolError
from protocol.identity import peer_id_of
from protocol.messages import PeerId
from protocol.transport.interface import Address

if TYPE_CHECKING:
    from protocol.discovery.broker import Broker, Connection

logger = logging.getLogger(__name__)

RECHECK_S = 1.0
"""How often to see whether keys were allowed or no longer are."""
STEADY_S = 10.0
"""A connection that lasted so long was a good one: the next pause is short again."""
SUSPICIOUS_TIMES = 3
"""Connections in a row that the broker ended sooner than that, before we say what that means."""
ECHO_S = 5.0
"""How long our own presence may take to come back from the broker."""
REASSERT_S = 1.0
"""Shortest time between two publications, whatever others write on our topic."""
GOODBYE_S = 1.0
"""How long to wait for the broker to take our goodbye."""
LOG_AGAIN_S = 60.0
"""When the same kind of line may be logged a second time; the interval then doubles."""

_Positive = Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)]


class MqttSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The MQTT broker through which peers find each other, if there is one."""

    host: str = ""
    """Name or address of the broker, as in its certificate; empty does without a broker."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Its TCP port; 0 takes MQTT's own, 8883 with TLS and 1883 without."""
    tls: bool = True
    """Whether to talk TLS. Plain text shows the password to whoever listens, so that it is refused
    but for a broker on this machine; there is no falling back to it."""
    insecure: bool = False
    """Allows plain text to a broker elsewhere, when the network between is yours alone."""
    ca_file: str = ""
    """PEM file of the authority that signed the broker's certificate; empty trusts those that the
    system trusts."""
    username: str = ""
    """As whom to log in; empty takes the own peer id, which the access rules in
    `configs/mosquitto` expect."""
    password_file: str = ""
    """File with the password in its only line, readable by its owner alone; empty logs in as
    nobody."""
    keepalive_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 20
    """After one and a half of these in silence the broker takes us for lost, after two we it.
    Shorter finds out sooner and costs a few bytes each time."""
    timeout_s: _Positive = 5.0
    """Longest wait for the broker to answer."""
    reconnect_min_s: _Positive = 0.5
    """The first pause before a lost broker is tried again; pauses double, with jitter."""
    reconnect_max_s: _Positive = 30.0
    """The longest pause: how late a broker's return is noticed."""


class MqttDiscovery:
    """Tells others through a broker where we are, and learns where they are.

    What is wrong on this machine is an error at once; what is wrong with the broker or with what
    others write there is logged in one line, counted and tried again: without a broker, the
    federation goes on with the addresses that it knows.

    Args:
        settings: The broker's.
        base: The folder that relative paths in them start from.
        federation: Keeps federations on one broker apart.
        birth: Our own presence, up, with the endpoint that really is ours.
        name_of: Our name of a public key, None for one that isn't allowed.
        rng: For the jitter of the pauses.

    Attributes:
        counters: How often each thing happened: `connected`, `broker_failures`, `births`,
            `unheard`, `impersonated`, `shared_endpoints`, `cleared`, and `ignored_` with each
            `Fault`.

    Raises:
        ConfigError: A setting or a file can't be used, or the extra `mqtt` isn't installed.
    """

    def __init__(
        self,
        settings: MqttSettings,
        base: Path,
        *,
        federation: str,
        birth: Presence,
        name_of: Callable[[str], str | None],
        rng: np.random.Generator,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._birth = birth
        self._own = peer_id_of(birth.public_key)
        self._topics = Topics(federation)
        self._topic = self._topics.of(self._own)
        self._broker = _broker(settings, base, f"coterie/{federation}/{self._own}", self._own)
        self._sightings = Sightings(name_of)
        self._rng = rng
        self._changed = asyncio.Event()
        self._doubted = asyncio.Event()
        self._heard = asyncio.Event()
        self._seen_up = False
        self._short_connections = 0
        self._pauses = 0
        self._next_log: dict[str, tuple[float, float]] = {}

    async def watch(self) -> AsyncGenerator[Mapping[PeerId, Address], None]:
        """Yield the addresses known, none at first, then again whenever they change.

        While this is iterated over we are present; afterwards we have left.
        """
        presence = asyncio.create_task(self._stay_present(), name="presence")
        presence.add_done_callback(lambda _: self._changed.set())
        told = None
        try:
            while not presence.done():
                self._changed.clear()
                addresses = self._sightings.addresses()
                if addresses != told:
                    told = addresses
                    yield addresses
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S):
                        await self._changed.wait()
            presence.result()  # it never ends but by a fault of ours
        finally:
            presence.cancel()
            await asyncio.wait({presence})

    async def _stay_present(self) -> None:
        clock, task = asyncio.get_running_loop().time, asyncio.current_task()
        while True:
            began, connected = clock(), self.counters["connected"]
            try:
                await self._be_present()
            except* ProtocolError as lost:
                reason = str(lost.exceptions[0])
                self.counters["broker_failures"] += 1
                self._tell(reason, f"{reason}; trying again, known peers stay known")
                ended_early = self.counters["connected"] > connected
                self._short_connections = self._short_connections + 1 if ended_early else 0
            if task is not None and task.cancelling():
                raise asyncio.CancelledError  # a failure at the same moment has swallowed it
            if clock() - began >= STEADY_S:
                self._pauses = self._short_connections = 0
                self._next_log.clear()
            if self._short_connections >= SUSPICIOUS_TIMES:
                self._tell("clash", self._clash("the broker ends each connection within seconds"))
            await asyncio.sleep(self._pause_s())

    async def _be_present(self) -> None:
        """Stay until the broker is lost, or has the will of an incarnation that is ours no more."""
        incarnation = self._birth.incarnation
        async with self._broker.connected(self._topic, self._birth.encode(State.LOST)) as broker:
            self.counters["connected"] += 1
            self._doubted.set()
            try:
                await broker.subscribe(self._topics.all)
                async with asyncio.TaskGroup() as tasks, aclosing(broker.messages()) as messages:
                    asserting = tasks.create_task(self._assert_birth(broker), name="birth")
                    async for topic, payload, retained in messages:
                        self._take(topic, payload, retained)
                        if self._birth.incarnation != incarnation:
                            break
                    asserting.cancel()
            except asyncio.CancelledError:
                with suppress(ProtocolError, TimeoutError):
                    async with asyncio.timeout(GOODBYE_S):
                        await broker.publish(self._topic, self._birth.encode(State.LEFT))
                raise

    async def _assert_birth(self, broker: Connection) -> None:
        """Publish that we are up, and again whenever our topic says something else."""
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            self._heard.clear()
            await broker.publish(self._topic, self._birth.encode(State.UP))
            self.counters["births"] += 1
            try:
                async with asyncio.timeout(ECHO_S):
                    await self._heard.wait()
                self._tell("present", f"present at {self._broker}", logging.INFO)
            except TimeoutError:
                self.counters["unheard"] += 1
                self._tell(
                    "unheard",
                    f"{self._broker} doesn't pass on what this peer says: let "
                    f"{self._broker.username!r} read and write {self._topic} in its access rules",
                )
                self._doubted.set()
            await asyncio.sleep(REASSERT_S)

    def _take(self, topic: str, payload: bytes, retained: bool) -> None:
        try:
            peer_id = self._topics.peer_id(topic)
            if peer_id == self._own:
                self._take_own(payload, retained)
                return
            if not payload:  # somebody cleaned up at the broker
                self.counters["cleared"] += 1
                return
            presence = read_presence(peer_id, payload)
            self._sightings.take(peer_id, presence)
        except PresenceIgnored as ignored:
            self.counters[f"ignored_{ignored.fault}"] += 1
            self._tell(ignored.fault, f"ignored at {self._broker}: {ignored}")
            return
        self._changed.set()
        twin = self._sightings.twin(peer_id, self._birth)
        if twin is not None:
            self.counters["shared_endpoints"] += 1
            self._tell(
                "shared_endpoints",
                f"{presence.name!r} and {twin.name!r} both advertise {twin.advertise}: one of them "
                "can't be there; correct network.advertise",
            )

    def _take_own(self, payload: bytes, retained: bool) -> None:
        """Compare what our topic says with what we say.

        The will of a connection that is no more can come after our birth, another process can have
        our key, and without access rules anybody can write here: we say it again. A later
        incarnation than ours (another's, or ours when its count was lost) we surpass.

        Raises:
            PresenceIgnored: It is no presence of ours at all.
        """
        if payload == self._birth.encode(State.UP):
            self._seen_up = True
            self._heard.set()
            return
        if not retained:  # what was retained is older than the birth that is on its way
            self._doubted.set()
        if not payload:
            return
        said, ours = read_presence(self._own, payload), self._birth
        if said.incarnation > ours.incarnation:
            incarnation = min(said.incarnation + 1, MAX_INCARNATION)
            self._birth = msgspec.structs.replace(ours, incarnation=incarnation)
        late_will = said.state is State.LOST and said.incarnation < ours.incarnation
        if self._seen_up and not late_will and not said.is_of_same_life(ours):
            self.counters["impersonated"] += 1
            self._tell("clash", self._clash(f"it is said to be {said.state} at {said.advertise}"))

    def _clash(self, sign: str) -> str:
        return (
            f"another process seems to run with this peer's key ({sign}, seen at {self._broker}): "
            "give each peer a key of its own, and let the broker's access rules keep others from "
            f"writing {self._topic}"
        )

    def _pause_s(self) -> float:
        settings = self._settings
        longest = min(settings.reconnect_max_s, settings.reconnect_min_s * 2.0**self._pauses)
        self._pauses = min(self._pauses + 1, 32)
        return longest * self._rng.uniform(0.25, 1.0)

    def _tell(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """Log the first of a kind, then one at a growing interval."""
        now = asyncio.get_running_loop().time()
        due, interval = self._next_log.get(kind, (now, LOG_AGAIN_S))
        if now >= due:
            self._next_log[kind] = (now + interval, 2.0 * interval)
            logger.log(level, "%s", text)


def _broker(settings: MqttSettings, base: Path, client_id: str, own: PeerId) -> Broker:
    try:
        from protocol.discovery import broker  # noqa: PLC0415  only who has one needs the extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"network.mqtt needs {error.name}, which isn't installed: pip install 'coterie[mqtt]'"
        ) from error
    _check(settings)
    ca_file, password_file = (
        base / Path(file).expanduser() if file else None
        for file in (settings.ca_file, settings.password_file)
    )
    return broker.Broker(
        host=settings.host,
        port=settings.port or (8883 if settings.tls else 1883),
        tls=broker.tls_context(ca_file) if settings.tls else None,
        username=settings.username or own,
        password=broker.read_password(password_file) if password_file else None,
        client_id=client_id,
        keepalive_s=settings.keepalive_s,
        timeout_s=settings.timeout_s,
    )


def _check(settings: MqttSettings) -> None:
    if not settings.host:
        raise ConfigError("network.mqtt.host is empty: write the name of the broker")
    if settings.username and not settings.password_file:
        raise ConfigError(
            f"network.mqtt.username is {settings.username!r}, but there is no password: "
            "set network.mqtt.password_file"
        )
    if not settings.tls and settings.ca_file:
        raise ConfigError("network.mqtt.ca_file is of no use with tls = false: remove one")
    if not (settings.tls or settings.insecure or _is_loopback(settings.host)):
        raise ConfigError(
            f"network.mqtt.tls = false would show the password to the network between here and "
            f"{settings.host}: remove it, or set network.mqtt.insecure = true, too"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
