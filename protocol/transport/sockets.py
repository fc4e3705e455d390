"""Making ZeroMQ sockets with the options that the protocol needs; CURVE is on for all of them."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket as system_socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

import zmq

from protocol.codec import MAX_FRAME_BYTES
from protocol.errors import BindError, PeerUnreachable
from protocol.identity import KeyPair
from protocol.transport.endpoint import Endpoint
from protocol.transport.port import Frames, Port

if sys.platform != "win32":
    import resource

Context = zmq.Context[zmq.Socket[bytes]]

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"coterie"

_MAX_SOCKETS = 4096
_WANTED_DESCRIPTORS = 16_384
_REPLIES_PER_PEER = 64
_BACKLOG = 512
_CONNECT_TIMEOUT_MS = 5_000
_HANDSHAKE_TIMEOUT_MS = 5_000
_KEEPALIVE_IDLE_S = 60
_BIND_PAUSE_S = 0.1
_OTHER_FAMILY = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL})
_EVENT = struct.Struct("=Hi")
_monitor_numbers = itertools.count()


def make_context() -> Context:
    """Make a context for one transport, and let the process open enough descriptors for it."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = hard == resource.RLIM_INFINITY
        wanted = _WANTED_DESCRIPTORS if unlimited else min(_WANTED_DESCRIPTORS, hard)
        if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    context: Context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


def make_listener(context: Context, key_pair: KeyPair) -> zmq.Socket[bytes]:
    """Make the ROUTER that others dial, not yet bound; bind it once a ZAP handler is there.

    Without the enforced ZAP domain, or without a handler, a CURVE server admits anyone.
    """
    router = context.socket(zmq.ROUTER)
    _set_common(router, key_pair)
    router.set(zmq.CURVE_SERVER, 1)
    router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.SNDHWM, _REPLIES_PER_PEER)
    router.set(zmq.BACKLOG, _BACKLOG)
    return router


def make_dialer(context: Context, key_pair: KeyPair, their_key: str) -> zmq.Socket[bytes]:
    """Make a DEALER for one connection to the peer that has this public key."""
    dealer = context.socket(zmq.DEALER)
    _set_common(dealer, key_pair)
    dealer.set(zmq.CURVE_PUBLICKEY, key_pair.public_key.encode())
    dealer.set(zmq.CURVE_SERVERKEY, their_key.encode())
    dealer.set(zmq.IMMEDIATE, 1)
    # libzmq must not reconnect behind our back: requests under way would be lost unnoticed.
    dealer.set(zmq.RECONNECT_IVL, -1)
    dealer.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    # Bounded by the transfer windows; without a mark, "writable" means "connected".
    dealer.set(zmq.SNDHWM, 0)
    return dealer


def _set_common(socket: zmq.Socket[bytes], key_pair: KeyPair) -> None:
    socket.set(zmq.CURVE_SECRETKEY, key_pair.secret_key.encode())
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)


async def bind(router: zmq.Socket[bytes], listen: Endpoint, retry_s: float) -> int:
    """Bind, waiting up to `retry_s` for a port in use; return the real port.

    Raises:
        BindError: The port stays in use, or the address can't be listened on.
    """
    host = "*" if listen.is_wildcard and ":" not in listen.host else listen.host
    if not listen.is_wildcard:
        host = (await _resolve(listen, BindError))[0]
    deadline = asyncio.get_running_loop().time() + retry_s
    while (fault := _try_bind(router, host, listen.port)) is not None:
        if fault.errno != zmq.EADDRINUSE:
            raise BindError(
                f"can't listen on {listen}: {fault.strerror}; set listen to an address of this "
                "machine and a port that you may use"
            )
        if asyncio.get_running_loop().time() > deadline:
            raise BindError(
                f"can't listen on {listen}: port {listen.port} is in use; stop what uses it, or "
                "set listen to another port (0 lets the system pick one)"
            )
        await asyncio.sleep(_BIND_PAUSE_S)
    return int(router.get_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])


def _try_bind(router: zmq.Socket[bytes], host: str, port: int) -> zmq.ZMQError | None:
    """Bind, or return why not; the wildcard falls back to IPv4 on machines without IPv6."""
    where = f"[{host}]" if ":" in host else host
    fault = None
    for v6 in (True, False) if host == "*" else (":" in host,):
        router.set(zmq.IPV6, v6)
        try:
            router.bind(f"tcp://{where}:{port or '*'}")
        except zmq.ZMQError as error:
            fault = error
            if error.errno not in _OTHER_FAMILY:
                break
        else:
            return None
    return fault


def hang_up(frame: zmq.Frame, port: int) -> None:
    """Cut the connection that a frame came through; libzmq, which can't be told to, follows.

    The frame knows a descriptor, which may be closed by now and name something else: only a
    connection to our `port` is cut, and a wrong one there costs its owner a redial.
    """
    with suppress(OSError, zmq.ZMQError):
        descriptor = int(frame.get(zmq.SRCFD))
        with system_socket.fromfd(
            descriptor, system_socket.AF_INET, system_socket.SOCK_STREAM
        ) as connection:
            if connection.getsockname()[1:2] == (port,):
                connection.shutdown(system_socket.SHUT_RDWR)


async def resolve(endpoint: Endpoint, attempt: int) -> Endpoint:
    """Return the endpoint with a literal address; each attempt takes the next one of a name.

    Raises:
        PeerUnreachable: The name can't be resolved.
    """
    hosts = await _resolve(endpoint, PeerUnreachable)
    return Endpoint(hosts[attempt % len(hosts)], endpoint.port)


def connect(dealer: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    """Start connecting to a resolved endpoint."""
    dealer.set(zmq.IPV6, ":" in endpoint.host)
    dealer.connect(str(endpoint))


async def _resolve(endpoint: Endpoint, blame: type[BindError] | type[PeerUnreachable]) -> list[str]:
    """Return the addresses of a host; never left to libzmq, which would stall its I/O thread."""
    if endpoint.is_literal:
        return [endpoint.host]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            endpoint.host, endpoint.port, type=system_socket.SOCK_STREAM
        )
    except OSError as error:
        raise blame(
            f"the host of {endpoint} can't be resolved ({error.strerror}): check its spelling, or "
            "write its address"
        ) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class DialMonitor:
    """Tells why a dial failed; only a socket monitor knows a refused key from an absent peer."""

    def __init__(
        self, context: Context, dealer: zmq.Socket[bytes], on_failure: Callable[[str], None]
    ) -> None:
        self._dealer = dealer
        self._on_failure = on_failure
        address = f"inproc://coterie-monitor-{next(_monitor_numbers)}"
        dealer.monitor(
            address,
            zmq.EVENT_CLOSED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        )
        pair = context.socket(zmq.PAIR)
        pair.connect(address)
        self._port = Port(pair, self._on_event)

    def close(self) -> None:
        """Stop watching, once the peer is connected or the dial has failed."""
        if not self._dealer.closed:
            self._dealer.disable_monitor()
        self._port.close()

    def _on_event(self, frames: Frames) -> None:
        event, _ = _EVENT.unpack(frames[0].bytes)
        match event:
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._on_failure(
                    "it refuses our key: put our .pub file into the allow-list of that peer, "
                    "unless its log says that we are refused for malformed messages"
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._on_failure(
                    "the handshake failed: another program answers there, or its key isn't the one "
                    "we were told"
                )
            case zmq.EVENT_CLOSED:
                self._on_failure("nobody listens there")
            case _:
                self._on_failure("the connection was closed")
