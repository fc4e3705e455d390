"""A ZeroMQ socket on the asyncio loop: the only place that touches one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from protocol.codec import Buffer

_MAX_MESSAGES_PER_KICK = 64
_MAX_BYTES_PER_KICK = 1 << 20
# More than any message has (a question of ZAP has 9); the rest of an endless one is dropped.
_MAX_FRAMES = 12

# Plain numbers: arithmetic on the enumerations costs more than the calls.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

Frames = Sequence[zmq.Frame]


class Port:
    """Receives by draining the socket whenever its descriptor wakes, and sends without waiting.

    No task and no await: nothing here can be cancelled, or die and leave messages lying. The
    descriptor only signals edges, and a send may eat one, so each send schedules one more look.
    An exception from `on_message` reaches the loop's exception handler; receiving goes on.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[Frames], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._draining = False
        self.closed = False
        self._loop.add_reader(socket.fileno(), self._kick)
        self._kick_soon()

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Hand one message to the socket; return False when it can't take it now.

        Frames over 64 KiB are not copied: their bytes must never change again.
        """
        if self.closed:
            return False
        last = len(frames) - 1
        try:
            for position, frame in enumerate(frames):
                flags = _NOBLOCK if position == last else _NOBLOCK_MORE
                self._socket.send(frame, flags, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        self._kick_soon()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what wasn't sent within `linger_ms` is lost."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger_ms)

    def _kick_soon(self) -> None:
        if not self._scheduled and not self._draining:
            self._scheduled = True
            self._loop.call_soon(self._kick)

    def _kick(self) -> None:
        self._scheduled = False
        self._draining = True  # it looks again after every message, and so after every send
        drained = False
        try:
            drained = self.closed or self._drain()
        finally:
            self._draining = False
            if not drained and not self.closed:
                self._kick_soon()

    def _drain(self) -> bool:
        """Pass on what has arrived, up to a limit; return whether that was everything."""
        num_bytes = 0
        for _ in range(_MAX_MESSAGES_PER_KICK):
            # Asking first is cheaper than an exception from receiving in vain.
            events = int(self._socket.get(_EVENTS))
            if not events & _POLLIN:
                return not self._link_changed(bool(events & _POLLOUT))
            frame = self._socket.recv(_NOBLOCK, copy=False)
            frames = [frame]
            while frame.more:
                frame = self._socket.recv(_NOBLOCK, copy=False)
                if len(frames) < _MAX_FRAMES:
                    frames.append(frame)
            num_bytes += len(frame)
            self._on_message(frames)
            if self.closed or num_bytes > _MAX_BYTES_PER_KICK:
                return False
        return False

    def _link_changed(self, writable: bool) -> bool:
        """Take note of whether the socket can send; return whether it must be looked at again."""
        return False


class DialedPort(Port):
    """The port of a DEALER to one peer: knows whether it is connected, and queues until it is.

    It connects once: libzmq never reconnects it by itself, since that would hide lost requests.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[Frames], None],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(socket, on_message)
        self._on_lost = on_lost
        self._outbox: deque[Sequence[Buffer]] = deque()
        self.connected = False

    def hand_over(self, on_message: Callable[[Frames], None], on_lost: Callable[[], None]) -> None:
        """Tell someone else from now on."""
        self._on_message, self._on_lost = on_message, on_lost

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send now, or as soon as the handshake is over; False once the connection is lost."""
        if self.closed:
            return False
        if not self.connected:
            self._outbox.append(frames)
            self._kick_soon()
            return True
        return super().send(frames)

    def _link_changed(self, writable: bool) -> bool:
        # With IMMEDIATE and no high-water mark, a DEALER is writable exactly while connected.
        if writable == self.connected:
            return False
        self.connected = writable
        if writable:
            while self._outbox and super().send(self._outbox[0]):
                self._outbox.popleft()
        else:
            self._on_lost()
        return True
