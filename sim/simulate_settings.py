"""The settings of a simulation."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from peer.algorithm import Fraction

_LONGEST = 1e9
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=_LONGEST)]
_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0.0, le=_LONGEST)]
_Factor = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]


class ChurnSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When one peer is there, in virtual seconds from the start.

    Raises:
        ValueError: It would go before it came.
    """

    joins_s: _Seconds = 0.0
    """When it comes; the others don't know it before."""
    leaves_s: _PositiveSeconds | None = None
    """When it goes, and with it whatever is on its way to it or from it; unset: it stays."""
    returns_s: _PositiveSeconds | None = None
    """When it is back; unset: never."""
    forgets: bool = False
    """Whether it comes back without its model, losses and optimizer, as a newcomer that begins with
    round 0; else it goes on from where its last round ended, as from a checkpoint."""

    def __post_init__(self) -> None:
        if self.returns_s is not None and self.leaves_s is None:
            raise ValueError("returns_s needs a leaves_s: set when it goes, too")
        for first, then in (("joins_s", "leaves_s"), ("leaves_s", "returns_s")):
            begin, end = getattr(self, first), getattr(self, then)
            if end is not None and end <= begin:
                raise ValueError(f"{then} = {end:g} must be above {first} = {begin:g}")


class SimulateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `coterie simulate` drives the peers; `coterie swarm` has no use for it.

    Raises:
        ValueError: No model could ever arrive in time.
    """

    mode: Literal["lockstep", "asynchronous"] = "lockstep"
    """`lockstep`: the paper's rounds, in which all sample, all deliver and all step; nothing below
    matters. `asynchronous`: each peer goes at its own pace on a virtual clock, as real peers do."""
    measure_s: _Seconds = 0.005
    """Virtual seconds that measuring one model takes."""
    gradient_s: _Seconds = 0.01
    """Virtual seconds that one gradient takes."""
    step_s: _Seconds = 0.001
    """Virtual seconds that one optimizer step takes."""
    slow: dict[str, _Factor] = {}
    """How many times longer than that a peer takes, by name, as in `slow = { peer-03 = 20.0 }`."""
    slow_share: Fraction = 0.0
    """Share of the peers, drawn by the seed among those not in `slow`, that take `slow_factor`
    times longer."""
    slow_factor: _Factor = 5.0
    """See `slow_share`."""
    delay_s: _Seconds = 0.01
    """Virtual seconds that any message is on its way; fetching a model takes two messages."""
    jitter_s: _Seconds = 0.0
    """Greatest further delay; each message's is drawn evenly from 0 to this."""
    uplink_bytes_per_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] = 0.0
    """How fast a peer sends models and gradients, one after another; 0 sets no limit."""
    loss: Fraction = 0.0
    """Probability that a fetch is never answered, and that a gradient never arrives."""
    fetch_timeout_s: _PositiveSeconds = 0.1
    """Longest wait for a model; shorter waits for nobody, longer loses fewer models of peers far
    away. A lost fetch costs the asker this once."""
    churn: dict[str, ChurnSettings] = {}
    """When a peer comes and goes, by name; all others are there from the start to the end."""

    def __post_init__(self) -> None:
        if self.fetch_timeout_s <= 2 * self.delay_s:
            raise ValueError(
                f"fetch_timeout_s = {self.fetch_timeout_s:g} is over before a model can arrive: "
                f"set it above two times delay_s = {self.delay_s:g}"
            )
