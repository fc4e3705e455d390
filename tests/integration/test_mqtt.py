"""Peers find each other through a real Mosquitto, whatever it and others do."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers_mqtt import Mosquitto, needs_mosquitto

from protocol.discovery import mqtt
from protocol.discovery.mqtt import MqttDiscovery, MqttSettings
from protocol.discovery.presence import Presence, State
from protocol.identity import KeyPair, generate_key_pair
from protocol.messages import PeerId
from protocol.transport.interface import Address

pytestmark = needs_mosquitto
aiomqtt = pytest.importorskip("aiomqtt", reason="needs the extra mqtt")

DEADLINE_S = 10.0
NAMES = ("alice", "bob", "carol")
PASSWORD = "correct horse"


@dataclass
class Circle:
    """Peers that allow each other, and their broker."""

    folder: Path
    broker: Mosquitto
    keys: dict[str, KeyPair]
    allowed: dict[str, str] = field(default_factory=dict)
    port: int = 7000

    def id_of(self, name: str) -> PeerId:
        return self.keys[name].peer_id

    def topic(self, name: str, federation: str = "coterie") -> str:
        return f"coterie/v1/{federation}/presence/{self.id_of(name)}"

    def birth(self, name: str, incarnation: int = 0, **changes: object) -> Presence:
        self.port += 1
        birth = Presence(
            state=State.UP,
            incarnation=incarnation,
            advertise=f"tcp://127.0.0.1:{self.port}",
            public_key=self.keys[name].public_key,
            layout_fingerprint="0" * 32,
            name=name,
        )
        return msgspec.structs.replace(birth, **changes)

    def discovery(
        self, birth: Presence, federation: str = "coterie", **settings: object
    ) -> MqttDiscovery:
        password = self.folder / "password"
        password.write_text(PASSWORD + "\n")
        password.chmod(0o600)
        chosen = {
            "host": "localhost",
            "port": self.broker.port,
            "ca_file": self.broker.ca_file,
            "password_file": "password",
            "reconnect_min_s": 0.05,
            "reconnect_max_s": 0.2,
            **settings,
        }
        return MqttDiscovery(
            MqttSettings(**chosen),
            self.folder,
            federation=federation,
            birth=birth,
            name_of=self.allowed.get,
            rng=np.random.default_rng(0),
        )

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[aiomqtt.Client]:
        """Whatever somebody with a peer's password might do."""
        async with aiomqtt.Client(
            "127.0.0.1",
            self.broker.plain_port,
            username=self.id_of(name),
            password=PASSWORD,
            protocol=aiomqtt.ProtocolVersion.V311,
        ) as client:
            yield client

    async def retained(self, name: str) -> Presence | None:
        """What the broker keeps of a peer."""
        async with self.client("mallory") as client:
            await client.subscribe(self.topic(name), qos=1)
            try:
                async with asyncio.timeout(0.3):
                    message = await anext(client.messages)
            except TimeoutError:
                return None
        return msgspec.msgpack.decode(message.payload, type=Presence)

    async def until_retained(self, name: str, state: State) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (kept := await self.retained(name)) is None or kept.state is not state:
                pass


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever happens is a line each, ours, and never a traceback."""
    yield
    for record in caplog.get_records("call"):
        assert record.name != "asyncio" or record.levelno < logging.WARNING, record.getMessage()
        assert "\n" not in record.getMessage() and record.exc_info is None


@pytest.fixture
def circle(tmp_path: Path) -> Iterator[Circle]:
    yield from make_circle(tmp_path, ("coterie", "other"))


@pytest.fixture
def lawless(tmp_path: Path) -> Iterator[Circle]:
    """A broker without access rules: anybody who is let in may write anywhere."""
    yield from make_circle(tmp_path, ())


def make_circle(folder: Path, federations: tuple[str, ...]) -> Iterator[Circle]:
    keys = {name: generate_key_pair() for name in (*NAMES, "mallory")}
    passwords = {each.peer_id: PASSWORD for each in keys.values()}
    broker = Mosquitto(folder, passwords, federations)
    try:
        broker.start()
        yield Circle(folder, broker, keys, {keys[name].public_key: name for name in NAMES})
    finally:
        broker.close()


@dataclass
class Seen:
    """What a peer was told last."""

    addresses: Mapping[PeerId, Address] | None = None

    @property
    def names(self) -> list[str]:
        return sorted(each.name for each in (self.addresses or {}).values())


@asynccontextmanager
async def present(discovery: MqttDiscovery) -> AsyncIterator[Seen]:
    seen = Seen()

    async def follow() -> None:
        async for addresses in discovery.watch():
            seen.addresses = addresses

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  the broker is another process
            await asyncio.sleep(0.02)


def only_task() -> bool:
    return len(asyncio.all_tasks()) == 1


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


async def test_peers_find_each_other_and_who_leaves_is_gone_at_once(circle):
    alice, bob = (circle.discovery(circle.birth(name)) for name in ("alice", "bob"))
    async with present(alice) as of_alice:
        assert of_alice.addresses is None
        async with present(bob) as of_bob:
            await until(lambda: of_alice.names == ["bob"] and of_bob.names == ["alice"])
            (address,) = of_alice.addresses.values()
            assert address.public_key == circle.keys["bob"].public_key
            assert address.endpoint == "tcp://127.0.0.1:7002"
        await until(lambda: of_alice.names == [])
        assert (await circle.retained("bob")).state is State.LEFT
    assert only_task()


async def test_a_broker_killed_three_times_changes_nothing_and_presence_comes_back(circle):
    discoveries = [circle.discovery(circle.birth(name)) for name in NAMES]
    async with AsyncExitStack() as stack:
        everybody = [await stack.enter_async_context(present(each)) for each in discoveries]
        await until(lambda: all(len(seen.names) == 2 for seen in everybody))
        for _ in range(3):
            circle.broker.kill()
            failed = [each.counters["broker_failures"] for each in discoveries]
            await until(
                lambda failed=failed: all(
                    each.counters["broker_failures"] > before + 1
                    for each, before in zip(discoveries, failed, strict=True)
                )
            )
            assert all(len(seen.names) == 2 for seen in everybody)
            circle.broker.start()
            for name in NAMES:
                async with asyncio.timeout(DEADLINE_S):
                    while (
                        kept := await circle.retained(name)
                    ) is None or kept.state is not State.UP:
                        pass
        assert all(len(seen.names) == 2 for seen in everybody)


async def test_a_broker_that_is_down_at_the_start_is_awaited_and_named_once(circle, caplog):
    circle.broker.kill()
    discovery = circle.discovery(circle.birth("alice"))
    async with present(discovery) as seen:
        await until(lambda: discovery.counters["broker_failures"] >= 4)
        assert seen.addresses == {}
        (line,) = warnings(caplog)
        assert f"the broker localhost:{circle.broker.port} can't be reached" in line
        circle.broker.start()
        await until(lambda: discovery.counters["births"])
    assert (await circle.retained("alice")).state is State.LEFT


KILLED = """
import asyncio, sys, msgspec, numpy as np
from pathlib import Path
from protocol.discovery.mqtt import MqttDiscovery, MqttSettings
from protocol.discovery.presence import Presence

async def main():
    settings = msgspec.json.decode(sys.argv[1], type=MqttSettings)
    birth = msgspec.json.decode(sys.argv[2], type=Presence)
    discovery = MqttDiscovery(settings, Path(sys.argv[3]), federation="coterie", birth=birth,
        name_of=lambda key: "?", rng=np.random.default_rng(0))
    async for _ in discovery.watch():
        print("present", flush=True)

asyncio.run(main())
"""


async def test_a_killed_peer_is_lost_but_its_address_stays_until_it_is_back(circle):
    birth, alice = circle.birth("bob"), circle.discovery(circle.birth("alice"))
    settings = circle.discovery(birth)._settings
    arguments = [msgspec.json.encode(each).decode() for each in (settings, birth)]
    async with present(alice) as seen:
        bob = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, *arguments, str(circle.folder), stdout=subprocess.PIPE
        )
        try:
            await until(lambda: seen.names == ["bob"])
        finally:
            bob.kill()
            await bob.communicate()
        await circle.until_retained("bob", State.LOST)
        assert await circle.retained("bob") == msgspec.structs.replace(birth, state=State.LOST)
        assert seen.names == ["bob"]
        async with present(circle.discovery(circle.birth("bob", 1))):
            await until(lambda: seen.addresses[circle.id_of("bob")].endpoint.endswith("7003"))


async def test_a_refused_password_is_one_line_until_it_is_put_right(circle, caplog):
    right = {each.peer_id: PASSWORD for each in circle.keys.values()}
    circle.broker.set_passwords(right | {circle.id_of("alice"): "another"})
    discovery = circle.discovery(circle.birth("alice"))
    async with present(discovery):
        await until(lambda: discovery.counters["broker_failures"] >= 3)
        (line,) = warnings(caplog)
        assert f"doesn't let '{circle.id_of('alice')}' in: check network.mqtt.username" in line
        assert PASSWORD not in line
        circle.broker.set_passwords(right)
        await until(lambda: discovery.counters["births"])
    assert only_task()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"host": "127.0.0.1"}, "its certificate is made out to another name"),
        ({"ca_file": ""}, "its certificate can't be trusted"),
        ({"port": "plain"}, "doesn't speak TLS on this port"),
        ({"tls": False, "ca_file": ""}, "does network.mqtt.tls fit its listener?"),
        ({"host": "nowhere.invalid"}, "no such host"),
    ],
)
async def test_what_keeps_a_peer_from_its_broker_is_named_in_a_line(
    circle, caplog, settings, reason
):
    if settings.get("port") == "plain":
        settings = {"port": circle.broker.plain_port}
    discovery = circle.discovery(circle.birth("alice"), timeout_s=1.0, **settings)
    async with present(discovery) as seen:
        await until(lambda: discovery.counters["broker_failures"] >= 2)
        assert seen.addresses == {}
    assert reason in warnings(caplog)[0]
    assert not discovery.counters["births"]
    assert only_task()


async def test_access_rules_let_nobody_write_for_another(circle, monkeypatch, caplog):
    monkeypatch.setattr(mqtt, "ECHO_S", 0.3)
    bob = circle.birth("bob")
    async with present(circle.discovery(circle.birth("alice"))) as seen, AsyncExitStack() as stack:
        await stack.enter_async_context(present(circle.discovery(bob)))
        await until(lambda: seen.names == ["bob"])
        async with circle.client("mallory") as client:
            forged = circle.birth("bob", 7).encode(State.LEFT)
            await client.publish(circle.topic("bob"), forged, qos=1, retain=True)
        assert await circle.retained("bob") == bob
        password = circle.discovery(circle.birth("carol"), username=circle.id_of("alice"))
        async with present(password):
            await until(lambda: password.counters["unheard"])
        assert "doesn't pass on what this peer says" in caplog.text
        assert seen.names == ["bob"]


async def test_what_forgers_write_without_access_rules_gains_nothing(lawless, caplog):
    circle = lawless
    bob, alice = circle.discovery(circle.birth("bob")), circle.discovery(circle.birth("alice"))
    mallory = circle.birth("mallory")
    async with present(alice) as seen, present(bob):
        await until(lambda: seen.names == ["bob"] and bob.counters["births"])
        before = dict(seen.addresses)
        async with circle.client("mallory") as client:
            for topic, payload in (
                (circle.topic("carol"), mallory.encode(State.UP)),
                (circle.topic("mallory"), mallory.encode(State.UP)),
                (circle.topic("carol"), b"\x81" * 64),
                (circle.topic("carol"), b"x" * 2048),
                (circle.topic("carol"), b"x" * 2049),
                (circle.topic("carol"), circle.birth("carol", advertise="tcp://*:1").encode("up")),
                ("coterie/v1/coterie/presence/carol", b""),
                (circle.topic("carol", "other"), circle.birth("carol").encode(State.UP)),
            ):
                await client.publish(topic, payload, qos=1, retain=True)
            await until(lambda: alice.counters["ignored_topic"])
        assert seen.addresses == before
        ignored = {key: n for key, n in alice.counters.items() if key.startswith("ignored_")}
        assert ignored == {
            "ignored_forged": 1,
            "ignored_not_allowed": 1,
            "ignored_malformed": 2,
            "ignored_oversized": 1,
            "ignored_undialable": 1,
            "ignored_topic": 1,
        }


async def test_a_late_will_or_a_forged_goodbye_is_contradicted(lawless, monkeypatch, caplog):
    monkeypatch.setattr(mqtt, "REASSERT_S", 0.05)
    circle, birth = lawless, lawless.birth("bob", 3)
    bob, alice = circle.discovery(birth), circle.discovery(circle.birth("alice"))
    async with present(alice) as seen, present(bob), circle.client("mallory") as client:
        await until(lambda: seen.names == ["bob"] and bob.counters["births"] == 1)
        for births, late in enumerate(
            (birth.encode(State.LOST), circle.birth("bob", 2).encode(State.LOST)), 2
        ):
            await client.publish(circle.topic("bob"), late, qos=1, retain=True)
            await until(lambda births=births: bob.counters["births"] == births)
            assert await circle.retained("bob") == birth
            assert seen.addresses[circle.id_of("bob")].endpoint == birth.advertise
        assert alice.counters["ignored_stale"] == 1
        assert not bob.counters["impersonated"]
        forged = circle.birth("bob", 9, advertise="tcp://127.0.0.1:9")
        await client.publish(circle.topic("bob"), forged.encode(State.LEFT), qos=1, retain=True)
        await until(lambda: alice._sightings._members[circle.id_of("bob")].incarnation == 10)
        assert seen.addresses[circle.id_of("bob")].endpoint == birth.advertise
        assert (await circle.retained("bob")).incarnation == 10
        assert "another process seems to run with this peer's key" in caplog.text


async def test_two_processes_with_one_key_say_so(circle, caplog):
    first, second = (circle.discovery(circle.birth("alice")) for _ in range(2))
    async with present(first), present(second):
        await until(lambda: "another process seems to run with this peer's key" in caplog.text)
    assert only_task()


async def test_two_copies_of_one_peer_that_say_the_same_are_found_out_too(circle, caplog):
    birth = circle.birth("alice")
    async with present(circle.discovery(birth)), present(circle.discovery(birth)):
        await until(lambda: "the broker ends each connection within seconds" in caplog.text)


async def test_two_federations_on_one_broker_do_not_mix(circle):
    async with AsyncExitStack() as stack:
        seen = {}
        for name, federation in (("alice", "coterie"), ("bob", "coterie"), ("carol", "other")):
            discovery = circle.discovery(circle.birth(name), federation)
            seen[name] = await stack.enter_async_context(present(discovery))
        await stack.enter_async_context(
            present(circle.discovery(circle.birth("bob"), "other"))  # one key, two federations
        )
        await until(lambda: seen["carol"].names == ["bob"] and seen["alice"].names == ["bob"])
        assert seen["bob"].names == ["alice"]


async def test_a_key_that_is_allowed_or_no_longer_is_counts_within_seconds(circle):
    key = circle.keys["bob"].public_key
    del circle.allowed[key]
    alice, bob = (circle.discovery(circle.birth(name)) for name in ("alice", "bob"))
    async with present(alice) as seen, present(bob):
        await until(lambda: alice.counters["ignored_not_allowed"])
        assert seen.names == []
        circle.allowed[key] = "bob"
        await until(lambda: seen.names == ["bob"])
        del circle.allowed[key]
        await until(lambda: seen.names == [])


async def test_two_peers_at_one_endpoint_are_named(circle, caplog):
    bob = circle.birth("bob")
    alice = circle.discovery(circle.birth("alice"))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(present(alice))
        await stack.enter_async_context(present(circle.discovery(bob)))
        carol = circle.discovery(circle.birth("carol", advertise=bob.advertise))
        await stack.enter_async_context(present(carol))
        await until(lambda: alice.counters["shared_endpoints"])
    assert f"both advertise {bob.advertise}" in caplog.text


@pytest.mark.parametrize("tls", [True, False])
async def test_a_frozen_broker_holds_up_neither_start_nor_end(circle, tls):
    settings = {} if tls else {"tls": False, "ca_file": "", "port": circle.broker.plain_port}
    alice = circle.discovery(circle.birth("alice"), **settings)
    async with present(alice):
        await until(lambda: alice.counters["births"])
        circle.broker.pause(True)
        late = circle.discovery(circle.birth("bob"), **settings)
        clock = asyncio.get_running_loop().time
        async with present(late) as seen:
            await until(lambda: seen.addresses == {})
            await asyncio.sleep(0.2)
            began = clock()
    assert clock() - began < 5.0
    circle.broker.pause(False)
    assert only_task()
