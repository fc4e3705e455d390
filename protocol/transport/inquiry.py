"""Ask a running peer for its status, as an operator: one dial, one question, one answer."""

from __future__ import annotations

import asyncio

from protocol.codec import Buffer, encode
from protocol.errors import PeerUnreachable, ProtocolError, RemoteProtocolError
from protocol.identity import KeyPair
from protocol.messages import Message, Refusal, StatusReport, StatusRequest
from protocol.status import PeerStatus, decode_status
from protocol.transport.dial import refused, unpack
from protocol.transport.endpoint import parse_endpoint
from protocol.transport.interface import Address, Counters
from protocol.transport.port import DialedPort, Frames
from protocol.transport.sockets import Context, DialMonitor, connect, make_dialer, resolve


async def ask_status(
    context: Context, key_pair: KeyPair, address: Address, timeout_s: float
) -> PeerStatus:
    """Return how a peer is doing.

    Args:
        context: The ZeroMQ context to dial in.
        key_pair: Our keys; the peer must have the public one in its folder of operators.
        address: Where and who it is.
        timeout_s: Longest wait for the answer.

    Raises:
        ConfigError: The endpoint is malformed.
        PeerUnreachable: Nobody answers there, or the door stays shut.
        PeerRefused: The peer doesn't take us for an operator.
        RemoteProtocolError: What came is no status.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[tuple[Message, Buffer | None]] = loop.create_future()

    def fail(error: ProtocolError) -> None:
        if not answered.done():
            answered.set_exception(error)

    def on_message(frames: Frames) -> None:
        try:
            answer = unpack(frames, Counters())
        except RemoteProtocolError as error:
            fail(error)
        else:
            if not answered.done():
                answered.set_result(answer)

    def on_failure(why: str) -> None:
        fail(PeerUnreachable(f"{address.name} at {address.endpoint}: {why}"))

    endpoint = parse_endpoint(address.endpoint, f"the address of {address.name}")
    try:
        async with asyncio.timeout(timeout_s):
            resolved = await resolve(endpoint, 0)
            dealer = make_dialer(context, key_pair, address.public_key)
            monitor = DialMonitor(context, dealer, on_failure)
            port = DialedPort(dealer, on_message, lambda: on_failure("the connection was lost"))
            try:
                connect(dealer, resolved)
                port.send(encode(StatusRequest(request_id=1)))
                message, body = await answered
            finally:
                port.close()
                monitor.close()
    except TimeoutError:
        raise PeerUnreachable(
            f"{address.name} at {address.endpoint}: no answer within {timeout_s:g} s"
        ) from None
    match message:
        case StatusReport() if body is not None:
            return decode_status(body)
        case Refusal():
            raise refused(address.name, message)
        case _:
            raise RemoteProtocolError(f"{address.name}: an unexpected {type(message).__name__}")
