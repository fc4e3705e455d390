"""The exception tree; every error says who is to blame and how the command line exits.

::

    CoterieError                exit code
    ├── ConfigError             2   settings: an unknown key, an impossible value
    ├── DataError               3   a data set that is missing, malformed or too small
    ├── ModelError              3   a model that can't be built or doesn't fit its data
    ├── IdentityError           4   keys missing, unreadable or readable by others
    ├── BindError               5   an address that can't be listened on
    ├── CheckpointError         6   a saved state that can't be used
    ├── SwarmError              7   peer processes that could not be started or died
    ├── RunError                8   a run folder without the records that were asked for
    └── ProtocolError           9
        ├── LocalProtocolError      we misused the protocol
        ├── PeerUnreachable         nobody answered within the deadline
        └── RemoteProtocolError     the other side broke the protocol
            └── PeerRefused         the other side said no, with a code and a reason

An error of files or system limits (no permission, no space, too many open files) exits with 10, a
usage error with 2, a swarm stopped by Ctrl-C with 130, an unforeseen error with 1 and a traceback.
A peer that was asked to stop, by Ctrl-C too, has done what it should and exits with 0.
"""

from __future__ import annotations


class CoterieError(Exception):
    """Root of all errors that a user can act on; prints as one line."""

    exit_code = 1


class ConfigError(CoterieError):
    """A setting is unknown, of the wrong type or out of range."""

    exit_code = 2


class DataError(CoterieError):
    """A data set is missing, malformed or too small for what was asked."""

    exit_code = 3


class ModelError(CoterieError):
    """A model can't be built, or doesn't fit its data."""

    exit_code = 3


class IdentityError(CoterieError):
    """A key is missing, malformed or readable by others."""

    exit_code = 4


class BindError(CoterieError):
    """An address can't be listened on."""

    exit_code = 5


class CheckpointError(CoterieError):
    """A checkpoint is damaged or belongs to another model."""

    exit_code = 6


class SwarmError(CoterieError):
    """Peer processes could not be started, or all of them died."""

    exit_code = 7


class RunError(CoterieError):
    """A run folder lacks what was asked of it."""

    exit_code = 8


class ProtocolError(CoterieError):
    """Root of what goes wrong between peers."""

    exit_code = 9


class LocalProtocolError(ProtocolError):
    """This side misused the protocol: a fault of ours."""


class PeerUnreachable(ProtocolError):
    """A peer did not answer within the deadline, or its connection was lost."""


class RemoteProtocolError(ProtocolError):
    """The other side sent what the protocol doesn't allow."""


class PeerRefused(RemoteProtocolError):
    """The other side refused, with a code and a reason.

    Attributes:
        code: A member of `protocol.messages.RefusalCode`.
        text: Why, for people.
        retry_after_s: When it makes sense to ask again, in seconds.
    """

    def __init__(self, code: str, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(code, text, retry_after_s)
        self.code = code
        self.text = text
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"
