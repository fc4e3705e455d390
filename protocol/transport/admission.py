"""Who may connect, and who still may ask: the allow-list at the door and at every request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq
import zmq.utils.z85

from protocol.errors import IdentityError
from protocol.identity import AllowList, peer_id_of
from protocol.messages import PeerId
from protocol.status import RefusedKey
from protocol.transport.interface import Counters
from protocol.transport.port import Frames, Port
from protocol.transport.sockets import ZAP_DOMAIN, ZAP_ENDPOINT, Context

logger = logging.getLogger(__name__)

# Looking at a long allow-list may cost at most this part of one processor.
_MAX_SHARE = 0.005
_LOG_INTERVAL_S = 60.0
_REMEMBERED_KEYS = 64


class Admission:
    """The allow-list, looked at again when it is asked and some time has passed."""

    def __init__(self, allow_list: AllowList, interval_s: float) -> None:
        self._allow_list = allow_list
        self._interval_s = interval_s
        self._next_look = time.monotonic() + interval_s
        self._next_early_look = 0.0
        self._fault = ""
        self._peer_ids: dict[str, PeerId] = {}
        self._tell_faults()
        if not allow_list.names():
            logger.warning(
                "%s names nobody, so that nobody may connect: put the .pub file of every allowed "
                "peer in it, which may be done at any time",
                allow_list.directory,
            )

    def sender(self, public_key: str) -> PeerId | None:
        """Return the peer id of this z85-encoded key, or None when it isn't allowed now."""
        now = time.monotonic()
        stranger = public_key not in self._allow_list
        if now >= self._next_look or (stranger and now >= self._next_early_look):
            self._look_again()
            stranger = public_key not in self._allow_list
        if stranger:
            return None
        peer_id = self._peer_ids.get(public_key)
        if peer_id is None:
            peer_id = self._peer_ids[public_key] = peer_id_of(public_key)
        return peer_id

    def name_of(self, public_key: str) -> str:
        """Return what people call the owner of an allowed key."""
        return self._allow_list.names().get(public_key, public_key)

    def _look_again(self) -> None:
        began = time.monotonic()
        faults = self._allow_list.faults
        try:
            changed = self._allow_list.refresh()
        except IdentityError as error:
            if str(error) != self._fault:
                logger.error("%s; the last known list stays in force", error)
            changed, self._fault = False, str(error)
        else:
            self._fault = ""
        if changed:
            self._peer_ids.clear()
            allow_list = self._allow_list
            logger.info("%s now names %d keys", allow_list.directory, len(allow_list.names()))
        if self._allow_list.faults != faults:
            self._tell_faults()
        ended = time.monotonic()
        # A newcomer is looked up at once where that is cheap; a removed key can wait a little.
        self._next_early_look = ended + (ended - began) / _MAX_SHARE
        self._next_look = max(self._next_early_look, ended + self._interval_s)

    def _tell_faults(self) -> None:
        for fault in self._allow_list.faults:
            logger.warning("left out of the allow-list: %s", fault)


class Doorkeeper:
    """Answers libzmq's question (ZAP, RFC 27) whether a CURVE key may connect.

    The key becomes the `User-Id` of every frame of that connection.
    """

    def __init__(
        self, context: Context, objection: Callable[[str], str], counters: Counters
    ) -> None:
        """Open the door.

        Args:
            context: The one whose sockets are asked for.
            objection: Says what is wrong with a z85-encoded key; nothing when it may connect now.
            counters: Where to count.
        """
        self._objection = objection
        self._counters = counters
        self._refused: dict[str, int] = {}
        self._next_log = 0.0
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.bind(ZAP_ENDPOINT)
        self._port = Port(socket, self._on_request)

    @property
    def refused_keys(self) -> tuple[RefusedKey, ...]:
        """The keys that were refused last, the newest at the end."""
        return tuple(RefusedKey(*item) for item in self._refused.items())

    def close(self) -> None:
        """Stop answering; new connections are then refused."""
        self._port.close()

    def _on_request(self, frames: Frames) -> None:
        # [route, "", version, request id, domain, address, identity, mechanism, credentials]
        route, _, version, request_id, domain, address, _, mechanism, *rest = (
            frame.bytes for frame in frames
        )
        public_key = ""
        if domain == ZAP_DOMAIN and mechanism == b"CURVE" and len(rest) == 1 and len(rest[0]) == 32:
            public_key = zmq.utils.z85.encode(rest[0]).decode()
        objection = (
            self._objection(public_key) if public_key else "is of another security mechanism"
        )
        if objection:
            verdict = (b"400", objection.encode(), b"", b"")
            self._log_refusal(public_key, address.decode(errors="replace"), objection)
        else:
            verdict = (b"200", b"OK", public_key.encode(), b"")
        self._port.send((route, b"", version, request_id, *verdict))

    def _log_refusal(self, public_key: str, address: str, objection: str) -> None:
        self._counters.connections_refused += 1
        if public_key:
            self._refused[public_key] = self._refused.pop(public_key, 0) + 1
            if len(self._refused) > _REMEMBERED_KEYS:
                del self._refused[next(iter(self._refused))]
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL_S
            logger.warning(
                "refused a connection from %s: its key %s %s (%d refused so far)",
                address,
                public_key,
                objection,
                self._counters.connections_refused,
            )
