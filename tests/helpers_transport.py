"""What the transport tests share: listeners that can be waited on, models, and small swarms."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from protocol.gradients import pack
from protocol.identity import AllowList, KeyPair, generate_key_pair
from protocol.lowbit import Bits, Feedback
from protocol.messages import GradientUpdate, ModelSnapshot, PeerId, Version
from protocol.tensors import DTYPES, Layout, Tensors, TensorSpec
from protocol.transport.interface import Address
from protocol.transport.memory import MemoryNetwork, MemoryTransport
from protocol.transport.settings import TransportSettings
from protocol.transport.zeromq import ZeroMQTransport

DEADLINE_S = 20.0
TASK = "digits:0,1,2"
FEDERATION = "tests"

SMALL = Layout([TensorSpec("head.bias", "f32", (10,)), TensorSpec("head.weight", "f32", (20, 10))])
LARGE = Layout(
    [
        TensorSpec("body.weight", "f32", (3000, 1000)),
        TensorSpec("count", "i64", (), trainable=False),
        TensorSpec("head.bias", "f32", (10,)),
    ]
)
EMPTY = Layout([TensorSpec("nothing", "f32", (0, 3))])
OTHER = Layout([TensorSpec("head.bias", "f32", (10,)), TensorSpec("head.weight", "f32", (20, 11))])
ALL_TYPES = Layout(
    [
        TensorSpec(f"{dtype}.{len(shape)}", dtype, shape, trainable=dtype == "f32")
        for dtype in sorted(DTYPES)
        for shape in ((), (3,), (0, 4), (2, 3, 5), (1, 1, 1, 1))
    ]
)


def filled(layout: Layout, seed: int = 0) -> Tensors:
    """Return tensors of random finite numbers."""
    rng, tensors = np.random.default_rng(seed), Tensors.zeros(layout)
    for spec, array in zip(layout.specs, tensors.values(), strict=True):
        if spec.dtype == "bool":
            array[...] = rng.integers(0, 2, spec.shape).astype(bool)
        elif spec.dtype in ("f16", "f32", "f64"):
            array[...] = rng.standard_normal(spec.shape)
        else:  # bf16 bits below the exponent of infinity are finite
            array[...] = rng.integers(0, 100, spec.shape)
    return tensors


def snapshot(layout: Layout, round_number: int = 0, seed: int = 0) -> ModelSnapshot:
    return ModelSnapshot(version=Version(1, round_number), tensors=filled(layout, seed))


def gradient(layout: Layout, sender: PeerId, sender_round: int = 3) -> GradientUpdate:
    return GradientUpdate(
        sender=sender,
        sender_round=sender_round,
        on_version=Version(1, 2),
        weight=0.25,
        num_examples=32,
        gradient=filled(layout.gradient, seed=sender_round),
    )


class Recorder:
    """A listener that keeps what it hears, and lets a test wait for it."""

    def __init__(self) -> None:
        self.gradients: list[GradientUpdate] = []
        self.asked: list[PeerId] = []
        self.neighbors: list[frozenset[PeerId]] = []
        self._changed = asyncio.Event()

    def gradient_arrived(self, update: GradientUpdate) -> None:
        self.gradients.append(update)
        self._changed.set()

    def model_asked(self, peer_id: PeerId) -> None:
        self.asked.append(peer_id)
        self._changed.set()

    def neighbors_changed(self, neighbors: frozenset[PeerId]) -> None:
        self.neighbors.append(neighbors)
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something heard makes a condition true."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def until_neighbors(self, *peers: Peer) -> None:
        wanted = frozenset(peer.peer_id for peer in peers)
        await self.until(lambda: bool(self.neighbors) and self.neighbors[-1] == wanted)


@dataclass(slots=True)
class Peer:
    """One participant of a test."""

    name: str
    key_pair: KeyPair
    layout: Layout
    transport: Any
    listener: Recorder
    address: Address

    @property
    def peer_id(self) -> PeerId:
        return self.key_pair.peer_id


class Swarm(Protocol):
    """Peers over one kind of transport.

    `bits` is the codec of those added from now on, and `initial` what they begin with.
    """

    peers: list[Peer]
    bits: Bits | None
    initial: Tensors | None

    def public(self, peer: Peer) -> ModelSnapshot:
        """Return what a peer has published, as others should have it."""

    async def add(self, layout: Layout) -> Peer: ...

    async def kill(self, peer: Peer) -> None:
        """End a peer as `kill -9` would."""

    async def revive(self, peer: Peer) -> None:
        """Start a killed peer again where it was."""

    async def close(self) -> None: ...


def as_delivered(update: GradientUpdate, bits: Bits | None) -> Tensors:
    """Return the first gradient on a link as it should arrive."""
    return pack(update, None if bits is None else Feedback(bits)).update.gradient


def introduce(*peers: Peer) -> None:
    """Make all peers known to each other."""
    addresses = {peer.peer_id: peer.address for peer in peers}
    for peer in peers:
        peer.transport.set_neighbors(addresses)


class MemorySwarm:
    """Peers over memory transports."""

    def __init__(self, bits: Bits | None = None) -> None:
        self.network = MemoryNetwork(delay_s=0.001)
        self.peers: list[Peer] = []
        self.bits: Bits | None = bits
        self.initial: Tensors | None = None

    async def add(self, layout: Layout) -> Peer:
        pair, listener = generate_key_pair(), Recorder()
        name = f"peer-{len(self.peers)}"
        transport = MemoryTransport(
            network=self.network,
            peer_id=pair.peer_id,
            layout=layout,
            task=TASK,
            listener=listener,
            bits=self.bits,
            initial=self.initial,
        )
        address = Address(name=name, endpoint=await transport.start(), public_key=pair.public_key)
        self.peers.append(Peer(name, pair, layout, transport, listener, address))
        return self.peers[-1]

    def public(self, peer: Peer) -> ModelSnapshot:
        edition = peer.transport.edition
        assert edition is not None
        return edition.snapshot

    async def kill(self, peer: Peer) -> None:
        self.network.kill(peer.peer_id)

    async def revive(self, peer: Peer) -> None:
        self.network.revive(peer.peer_id)

    async def close(self) -> None:
        for peer in self.peers:
            await peer.transport.close()


@dataclass
class ZeroMQSwarm:
    """Peers over ZeroMQ transports that allow each other."""

    settings: TransportSettings = field(default_factory=TransportSettings)
    bits: Bits | None = None
    initial: Tensors | None = None
    host: str = "127.0.0.1"
    peers: list[Peer] = field(default_factory=list)
    extra: Mapping[str, Any] = field(default_factory=dict)
    allowed: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="coterie-")))

    def allow(self, name: str, pair: KeyPair) -> None:
        (self.allowed / f"{name}.pub").write_text(pair.public_key)

    def build(
        self, name: str, pair: KeyPair, layout: Layout, listener: Recorder, listen: str
    ) -> ZeroMQTransport:
        options: dict[str, Any] = {
            "advertise": None,
            "federation_id": FEDERATION,
            "incarnation": 1,
            "task": TASK,
            "bits": self.bits,
            "initial": self.initial,
            "settings": self.settings,
        }
        return ZeroMQTransport(
            key_pair=pair,
            allow_list=AllowList(self.allowed),
            listen=listen,
            name=name,
            layout=layout,
            listener=listener,
            **{**options, **self.extra},
        )

    async def add(self, layout: Layout) -> Peer:
        name, pair, listener = f"peer-{len(self.peers)}", generate_key_pair(), Recorder()
        self.allow(name, pair)
        transport = self.build(name, pair, layout, listener, f"tcp://{self.host}:0")
        address = Address(name=name, endpoint=await transport.start(), public_key=pair.public_key)
        self.peers.append(Peer(name, pair, layout, transport, listener, address))
        return self.peers[-1]

    def public(self, peer: Peer) -> ModelSnapshot:
        public = peer.transport._served.public
        assert public is not None
        return public

    async def kill(self, peer: Peer) -> None:
        # What others see of a `kill -9`: every socket closes, and nobody said goodbye.
        for connection in peer.transport._connections.values():
            connection.close(goodbye=False)
        await peer.transport.close()

    async def revive(self, peer: Peer) -> None:
        neighbors = peer.transport._addresses
        peer.transport = self.build(
            peer.name, peer.key_pair, peer.layout, peer.listener, peer.address.endpoint
        )
        await peer.transport.start()
        peer.transport.set_neighbors(neighbors)

    async def close(self) -> None:
        for peer in self.peers:
            await peer.transport.close()
        shutil.rmtree(self.allowed)
