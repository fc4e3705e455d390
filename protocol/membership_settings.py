"""The settings of membership: how often to look, how long to wait, how much to tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    """Settings of membership; the values are those of memberlist for a LAN where it has them."""

    probe_interval_s: float = 1.0
    """Between two probes, each of one member; shorter detects sooner, at more traffic."""

    probe_timeout_s: float = 0.5
    """After which a member that doesn't answer is asked for by way of others; above the slowest
    usual round trip, below the interval."""

    indirect_probes: int = 3
    """How many others are asked; more make a bad link between two less of a false alarm."""

    suspicion_multiplier: float = 4.0
    """Of the shortest suspicion, in probe intervals times max(1, log10(members)); larger is slower
    and spares peers that are slow for a while."""

    suspicion_longest: float = 6.0
    """The longest suspicion, by the shortest: what one accuser alone has to wait."""

    retransmit_multiplier: int = 4
    """Each update is told this times ceil(log10(members + 1)) times; more is surer."""

    gossip_interval_s: float = 0.5
    """Between two tellings of news, while there is any; probes carry news besides."""

    gossip_peers: int = 3
    """How many are told each time."""

    exchange_interval_s: float = 30.0
    """Between two exchanges of everything with a random member; mends what gossip missed."""

    exchange_timeout_s: float = 5.0
    """How long an exchange may take, a new connection included."""

    reconnect_min_s: float = 1.0
    """Before the second attempt to reach seeds and dead members; then twice as long each time."""

    reconnect_max_s: float = 8.0
    """Longest between two such attempts; a healed partition is noticed within it."""

    reconnect_peers: int = 3
    """How many are tried each time."""

    pause_s: float = 0.25
    """A timer this late shows that this peer was paused, and that silence says nothing."""

    forget_s: float = 3600.0
    """How long dead and left members are remembered and, when dead, tried again. Whoever was away
    for longer may bring one back at its old incarnation, until a probe finds it dead again."""

    max_members: int = 10_000
    """Most members remembered; no more are taken in until some are forgotten."""

    max_awareness: int = 7
    """Largest awareness score: intervals and timeouts are multiplied by up to one more."""
