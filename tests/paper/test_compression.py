"""ProtoNN's claim for kNN-Per: a third as many prototypes in fewer dimensions lose little.

Peers, embeddings and split as in `test_knn.py`: of Fashion-MNIST, or digits where that isn't
installed. Bounds lie well inside what was seen.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers_cohort import accuracies, digits, make_members, run
from helpers_knn import DEFAULT, Remembering, World, memory_of, remember, tuned

from peer import compression
from peer.compression import Prototypes, compress
from peer.datastore import Datastore
from peer.interpolation import LAMBDAS, choose, interpolate
from peer.validation import accuracy_of
from sim.federico_knn import federico_knn

WORLD = World(peers=10, alpha=0.3, steps=60)


def judged(share: float) -> dict[str, tuple[float, float]]:
    """Return mean test accuracies, exact and compressed to a share of the memory, λ chosen anew."""
    rows = [_judge(peer, memory_of(peer), share) for peer in remember(WORLD, 0)]
    memory, blend = np.mean(rows, axis=0)
    return {"memory": tuple(memory.tolist()), "blend": tuple(blend.tolist())}


def _judge(peer: Remembering, store: Datastore, share: float) -> list[list[float]]:
    found = compress(store, int(share * store.size_bytes), np.random.default_rng(0))
    assert found.size_bytes <= share * store.size_bytes
    held, test = peer.holdout, peer.test
    exact = tuned(peer, store, DEFAULT)
    recalled = found.recall(held.embeddings)
    tuning = choose(recalled, held.predicted, held.labels, exact.blend, LAMBDAS)
    said = [exact.blend.recall(store, test.embeddings), found.recall(test.embeddings)]
    lams = (exact.blend.lam, tuning.blend.lam)
    blends = [interpolate(one, test.predicted, lam) for one, lam in zip(said, lams, strict=True)]
    return [[accuracy_of(each, test.labels) for each in kind] for kind in (said, blends)]


def test_a_third_as_many_prototypes_in_half_the_dimensions_lose_little(monkeypatch):
    monkeypatch.setattr(compression, "EXAMPLES_EACH", 3)
    store = memory_of(remember(WORLD, 0)[0])
    found: Prototypes = compress(store, store.size_bytes // 4, np.random.default_rng(0))
    assert found.positions.shape == (len(store) // 3, store.dim // 2)
    before, after = judged(1 / 4)["memory"]
    assert after > before - 0.04
    before, after = judged(1 / 4)["blend"]
    assert after > before - 0.04


@pytest.mark.parametrize("share", [1 / 4, 1 / 16, 1 / 32])
def test_fewer_prototypes_do_about_as_well_as_all_examples(share):
    before, after = judged(share)["memory"]
    assert after > before - 0.02
    before, after = judged(share)["blend"]
    assert after > before - 0.03


def test_models_that_tell_all_they_remember_leave_little_to_learn_and_nothing_is_undone():
    peers = make_members(digits(4, size=70), model="mlp")
    exact, compressed = (
        accuracies(run(federico_knn, peers, steps=100, lambdas=[1.0], **changes), peers).mean()
        for changes in ({}, {"compress_kib": 8.0})
    )
    assert compressed > exact - 0.05
