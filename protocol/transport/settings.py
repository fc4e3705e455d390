"""The deadlines and limits of the ZeroMQ transport, all in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """Deadlines in seconds, limits in bytes and counts; the defaults fit links from 1 Mbit/s up."""

    dial_timeout_s: float = 5.0
    """From the dial to the answered hello. Longer serves slow links, shorter finds the silent
    sooner; a refused connection is known at once either way."""

    offer_timeout_s: float = 10.0
    """From asking for a model, or announcing a gradient, to the first answer."""

    stall_timeout_s: float = 15.0
    """How long a transfer may go on without one new byte; a chunk of 64 KiB must fit it."""

    resume_timeout_s: float = 3.0
    """How long a transfer that had begun waits for a lost connection to come back."""

    redial_min_s: float = 0.2
    """The first pause before an unreachable peer is dialed again; pauses double, with jitter."""

    redial_max_s: float = 30.0
    """The longest pause: how late a silent return is noticed. Whoever returns dials us, too, and is
    then dialed at once."""

    log_again_s: float = 60.0
    """When a peer that stays unreachable is logged a second time; the interval then doubles."""

    bulk_idle_s: float = 60.0
    """After how long without a transfer the bulk connection to a peer is closed."""

    max_idle_bulk: int = 24
    """Bulk connections kept open between transfers. One costs some 60 KB on both sides together,
    opening one a handshake of 2 ms."""

    transfer_idle_s: float = 30.0
    """After how long without a request a served or incoming transfer is forgotten."""

    max_incoming_per_peer: int = 4
    """Gradients that one peer may be sending at once; with one more, its oldest is dropped."""

    max_receive_bytes: int = 1 << 30
    """Memory for unfinished incoming gradients of all peers together; beyond, BUSY."""

    max_feedback_bytes: int = 1 << 28
    """Memory for the rounding errors of coded gradients, a gradient's size for each receiver;
    beyond, the longest unused is forgotten and its receiver never gets them."""

    max_pinned_bytes: int = 1 << 30
    """Memory for models that are no longer the newest, kept for pulls under way; beyond, the
    oldest goes, and its pulls start over with the newest."""

    max_sessions: int = 10_000
    """Peers remembered by the serving side; the longest silent is forgotten first."""

    verify_inline_bytes: int = 8 << 20
    """Up to this size a blob is verified at once (some 0.1 ms per MiB), beyond in a worker thread
    (whose hand-over costs as much as 2 MiB)."""

    buffer_idle_s: float = 10.0
    """How long receive buffers are kept for the next transfer. New memory costs as much as
    encryption: the kernel hands it out page by page, zeroed."""

    allow_list_interval_s: float = 1.0
    """How often the allow-list is looked at, at most: how long a removed key still works."""

    max_strikes: int = 20
    """Malformed messages within `strike_window_s` after which a peer is refused for `ban_s`."""

    strike_window_s: float = 60.0
    """See `max_strikes`."""

    ban_s: float = 600.0
    """See `max_strikes`."""

    bind_retry_s: float = 2.0
    """How long to retry while the port is in use: a predecessor may be about to let go of it."""

    goodbye_s: float = 0.25
    """How long `close` waits for goodbyes to leave."""
