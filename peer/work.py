"""Do what a core asks of a learner: from effect to event, alike in a daemon and a simulation."""

from __future__ import annotations

from peer.events import (
    Adopt,
    Cluster,
    Clustered,
    Differentiate,
    Differentiated,
    Measure,
    Measured,
    Step,
    Stepped,
    Train,
)
from peer.learner import Learner, Measurement
from protocol.messages import PeerId

Job = Measure | Differentiate | Cluster | Step | Train | Adopt
Done = Measured | Differentiated | Clustered | Stepped


def do_job(learner: Learner, own: PeerId, job: Job) -> tuple[Done, Measurement | None]:
    """Do one job and return the event that answers it.

    Args:
        learner: Whose examples, model and optimizer are used.
        own: The peer whose learner it is.
        job: What to do.

    Returns:
        The event, and the whole measurement where the job was one.
    """
    number = job.round_number
    match job:
        case Measure(peer_id, _, model):
            measurement = learner.measure(model)
            return Measured(peer_id, number, measurement.loss), measurement
        case Differentiate(peer_id, _, model, batch):
            gradient = learner.differentiate(model, batch, own=peer_id == own)
            return Differentiated(peer_id, number, gradient.tensors, gradient.num_examples), None
        case Cluster():
            return cluster(job), None
        case Step(_, total, batches, held):
            model = learner.step(total)
            if batches:
                model = learner.train(None, batches, held)
            return Stepped(number, model), None
        case Train(_, model, batches):
            return Stepped(number, learner.train(model, batches)), None
        case Adopt(_, _, model):
            return Stepped(number, learner.adopt(model)), None


def cluster(job: Cluster) -> Clustered:
    """Return who belongs together: a job that takes no learner."""
    # Here, since who never clusters needs no scikit-learn in memory.
    from peer.oneshot import group

    # What peers claim to have decides how much they count, and never who belongs together.
    groups, note = group(
        job.models, job.initial, clustering=job.clustering, num_clusters=job.num_clusters
    )
    return Clustered(job.round_number, groups, note)


def num_gradients(job: Job) -> int:
    """Return how many gradients a job computes."""
    match job:
        case Differentiate():
            return 1
        case Step(_, _, batches, _) | Train(_, _, batches):
            return len(batches)
        case _:
            return 0
