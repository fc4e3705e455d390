"""What goes into a peer's core and what comes out of it: the closed unions `Event` and `Effect`.

A driver carries out effects and answers with events; events that answer carry the round number of
the effect. These are not messages: chunks, retries and deadlines are the transport's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer.algorithm import ClusteringName, Verdict
from peer.learner import Batch
from protocol.groups import Groups
from protocol.messages import GradientUpdate, ModelSnapshot, PeerId
from protocol.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Started:
    """The driver is ready; these peers are reachable. The first event."""

    neighbors: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class NeighborsChanged:
    """These peers are reachable now."""

    neighbors: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class ModelFetched:
    """Answers `Fetch` with a model."""

    peer_id: PeerId
    round_number: int
    snapshot: ModelSnapshot


@dataclass(frozen=True, slots=True)
class ModelUnchanged:
    """Answers `Fetch`: the version at hand is the newest."""

    peer_id: PeerId
    round_number: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Answers `Fetch`: no model within the deadline."""

    peer_id: PeerId
    round_number: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Answers `Measure` with the model's loss on the own data."""

    peer_id: PeerId
    round_number: int
    loss: float


@dataclass(frozen=True, slots=True)
class Differentiated:
    """Answers `Differentiate`."""

    peer_id: PeerId
    round_number: int
    gradient: Tensors
    num_examples: int


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """Another peer made a gradient for the own model; may come at any time."""

    update: GradientUpdate


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """Another peer asked for the own model; may come at any time."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class ExamplesChanged:
    """The own data are others now: losses measured before say nothing of kept models.

    Attributes:
        replaced: Whether none of the former ones are left: the holdout is new.
    """

    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Clustered:
    """Answers `Cluster`.

    Attributes:
        round_number: The round.
        groups: Who belongs together.
        note: All that was found, in plain words.
    """

    round_number: int
    groups: Groups
    note: str


@dataclass(frozen=True, slots=True)
class GroupsTold:
    """Answers `AskGroups` with what the peer says, true or not."""

    peer_id: PeerId
    round_number: int
    groups: Groups


@dataclass(frozen=True, slots=True)
class AskFailed:
    """Answers `AskGroups`: the peer can't be reached, or knew nothing within the deadline."""

    peer_id: PeerId
    round_number: int


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Answers `ReadyToClose`: step with what has arrived."""

    round_number: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """Answers `Step`, `Train` and `Adopt` with the new own model."""

    round_number: int
    model: Tensors


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Stop at once; the current round counts as not begun."""


Event = (
    Started
    | NeighborsChanged
    | ModelFetched
    | ModelUnchanged
    | FetchFailed
    | Measured
    | Differentiated
    | GradientArrived
    | ModelAsked
    | ExamplesChanged
    | Clustered
    | GroupsTold
    | AskFailed
    | RoundClosed
    | Stepped
    | StopRequested
)


@dataclass(frozen=True, slots=True)
class Publish:
    """Serve this version of the own model from now on."""

    snapshot: ModelSnapshot


@dataclass(frozen=True, slots=True)
class PublishGroups:
    """Tell whoever asks from now on that these belong together."""

    groups: Groups


@dataclass(frozen=True, slots=True)
class AskGroups:
    """Ask a peer who belongs together; it may need to find out first, so wait up to a deadline."""

    peer_id: PeerId
    round_number: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch a peer's newest model unless it is the one at hand, on which the answer may build.

    A patient one waits, up to the deadline, for a peer that has no model to show yet.
    """

    peer_id: PeerId
    round_number: int
    have: ModelSnapshot | None
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure a model on the own data."""

    peer_id: PeerId
    round_number: int
    model: Tensors


@dataclass(frozen=True, slots=True)
class Differentiate:
    """Differentiate a model on a batch."""

    peer_id: PeerId
    round_number: int
    model: Tensors
    batch: Batch


@dataclass(frozen=True, slots=True)
class Cluster:
    """Find out who belongs together, by where models went from the common initial one.

    Attributes:
        round_number: The round.
        models: By owner, the own one among them.
        initial: Where all started.
        clustering: The name of the clustering.
        num_clusters: What it is told, 0 for nothing.
    """

    round_number: int
    models: Mapping[PeerId, Tensors]
    initial: Tensors
    clustering: ClusteringName
    num_clusters: int


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Deliver a gradient; the newest to a destination replaces any that waits."""

    peer_id: PeerId
    update: GradientUpdate


@dataclass(frozen=True, slots=True)
class ReadyToClose:
    """The round's own work is done."""

    round_number: int


@dataclass(frozen=True, slots=True)
class Step:
    """Take one optimizer step on the own model, then local steps on these batches.

    To the own gradient of each of those, what others sent is added once more, where `held` has it.
    """

    round_number: int
    gradient: Tensors
    batches: Sequence[Batch]
    held: Tensors | None


@dataclass(frozen=True, slots=True)
class Train:
    """Go on from this model, the optimizer as it is, with local steps on these batches."""

    round_number: int
    model: Tensors
    batches: Sequence[Batch]


@dataclass(frozen=True, slots=True)
class Adopt:
    """Start from another's model instead of the initial parameters."""

    round_number: int
    peer_id: PeerId
    model: Tensors


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """What a round came to.

    Attributes:
        round_number: The round.
        loss_averages: L̂_ij of every peer ever measured.
        training_weights: Whom to sample and train: over self and the reachable peers.
        collaboration_weights: Who makes up this peer's predictions, by a mixture of kept models or
            by averaging: what a weight matrix shows.
        prediction_weights: The mixture: over self and the peers whose models are kept.
        sampled: The round's sampled neighbors.
        verdicts: How many gradients of others were applied, and refused by reason.
        clustering: Digest of the clustering that the round went by; empty where there was none.
        clustered_by: Who told of it, or the peer itself; None where there was none.
    """

    round_number: int
    loss_averages: Mapping[PeerId, float]
    training_weights: Mapping[PeerId, float]
    collaboration_weights: Mapping[PeerId, float]
    prediction_weights: Mapping[PeerId, float]
    sampled: tuple[PeerId, ...]
    verdicts: Mapping[Verdict, int]
    clustering: str = ""
    clustered_by: PeerId | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last round is done; keep serving."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing more will happen."""


Effect = (
    Publish
    | PublishGroups
    | AskGroups
    | Fetch
    | Measure
    | Differentiate
    | Cluster
    | SendGradient
    | ReadyToClose
    | Step
    | Train
    | Adopt
    | RoundFinished
    | Finished
    | Stopped
)
