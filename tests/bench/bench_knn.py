"""How fast a datastore is searched, beside faiss, and built, and compressed.

All on one thread, in a process of its own: arithmetic libraries read that number when they start.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peer.approximate import APPROXIMATE_FROM, ApproximateSearch
from peer.compression import compress, prototypes_within
from peer.data import Examples, Split
from peer.datastore import Datastore, DatastoreSettings
from peer.learner import TrainingSettings
from peer.models import build_model
from peer.nearest import NearestSearch
from peer.torch_learner import TorchLearner

try:
    import faiss
except ImportError:  # the extra `ann`
    faiss = None

COMMAND = "make bench only=knn"
POINTS = 100_000
DIM = 128
QUERIES = 256
K_NEAREST = 10
REPEATS = 15
EXAMPLES = 5_000
FAISS = {"at its best": 20, "as it comes": None}
"""From how many queries on faiss multiplies matrices; as it comes it doesn't with 256."""
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}


def bench() -> list[dict[str, object]]:
    """Return all rows of this module."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    rows: list[dict[str, object]] = json.loads(run.stdout)
    return rows


def search_rows() -> Iterator[dict[str, object]]:
    """Yield how many queries a second are answered, by what the points are like."""
    for shape, everything in shapes_of(POINTS + QUERIES).items():
        points, queries = everything[:POINTS], everything[POINTS:]
        search = NearestSearch(points)
        calls: dict[str, Callable[[], Any]] = {"ours": partial(search.find, queries, K_NEAREST)}
        calls |= faiss_calls(points, queries)
        taken = times_of(calls)
        ours = [QUERIES / seconds for seconds in taken.pop("ours")]
        ratios = "; ".join(
            f"{statistics.median(ours) / (QUERIES / statistics.median(theirs)):.0%} of {name}"
            for name, theirs in taken.items()
        )
        name = f"exact search, {POINTS:,} x {DIM}, {shape}, {QUERIES} queries, k = {K_NEAREST}"
        yield row(name, ours, "queries/s", ratios or "faiss is not installed: extra ann")


def shapes_of(count: int) -> dict[str, Any]:
    """Return points where no search can leave any out, and such as it can."""
    rng = np.random.default_rng(0)
    even = rng.standard_normal((count, DIM), dtype=np.float32)
    centers = 4 * rng.standard_normal((10, DIM), dtype=np.float32)
    clustered = np.maximum(even + centers[rng.integers(0, 10, count)], 0)
    return {"even": even, "in ten clusters, rectified": clustered}


def crossing_rows() -> Iterator[dict[str, object]]:
    """Yield from how many queries a renewal on the approximate search pays, its index included."""
    if faiss is None:
        return
    for count in (APPROXIMATE_FROM, POINTS):
        shape, everything = list(shapes_of(count + QUERIES).items())[-1]  # never where all is even
        yield crossing_row(shape, everything[:count], everything[count:])


def crossing_row(shape: str, points: Any, queries: Any) -> dict[str, object]:
    exact, approximate = NearestSearch(points), ApproximateSearch(points)
    calls: dict[str, Callable[[], Any]] = {
        "exact build": partial(NearestSearch, points),
        "exact": partial(exact.find, queries, K_NEAREST),
        "build": partial(ApproximateSearch, points),
        "find": partial(approximate.find, queries, K_NEAREST),
    }
    taken = times_of(calls)
    more = np.subtract(taken["build"], taken["exact build"])
    saved = np.subtract(taken["exact"], taken["find"]) / QUERIES
    crossings = (more / np.maximum(saved, np.median(saved) / 2)).tolist()  # a hiccup saves nothing
    pairs = zip(calls["find"]().positions, calls["exact"]().positions, strict=True)
    recall = np.mean([np.isin(right, found).mean() for found, right in pairs])
    each = {name: statistics.median(seconds) for name, seconds in taken.items()}
    told = f"index {1000 * each['build']:.0f} ms, {each['find'] / QUERIES * 1e6:.0f} us a query"
    told += f" for {each['exact'] / QUERIES * 1e6:.0f} us exactly; recall {recall:.3f}"
    name = f"approximate search pays from, {len(points):,} x {DIM}, {shape}, k = {K_NEAREST}"
    return row(name, crossings, "queries a renewal", told)


def faiss_calls(points: Any, queries: Any) -> dict[str, Callable[[], Any]]:
    """Return searches of faiss's flat index, if it is there."""
    if faiss is None:
        return {}
    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatL2(points.shape[1])
    index.add(points)
    usual = faiss.cvar.distance_compute_blas_threshold

    def call(threshold: int | None) -> Any:
        faiss.cvar.distance_compute_blas_threshold = threshold or usual
        return index.search(queries, K_NEAREST)

    return {f"faiss's flat index {how}": partial(call, t) for how, t in FAISS.items()}


def build_row() -> dict[str, object]:
    """Return how much longer building a store takes than the forward pass that it needs."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    inputs = rng.random((EXAMPLES, 1, 28, 28), dtype=np.float32)
    examples = Examples(inputs, rng.integers(0, 10, EXAMPLES))
    few = examples.take(np.arange(64))
    learner = TorchLearner(
        build_model("cnn", (1, 28, 28), 10, 0),
        Split(fit=few, holdout=few, test=few),
        10,
        TrainingSettings(),
    )
    model = learner.parameters()

    def build() -> None:
        embeddings = learner.embed(model, examples.inputs)
        store = Datastore(DatastoreSettings(), embeddings.shape[1], 10, rng)
        store.add(embeddings, examples.labels)
        store.nearest(embeddings[:1], 1)

    calls = {"build": build, "forward": lambda: learner.predict(model, examples.inputs)}
    taken = times_of(calls)
    more = [
        100 * (build / forward - 1)
        for build, forward in zip(taken["build"], taken["forward"], strict=True)
    ]
    forward_s = statistics.median(taken["forward"])
    name = f"building a store of {EXAMPLES:,} images (cnn), over the forward pass"
    return row(name, more, "%", f"the forward pass alone: {forward_s:.2f} s")


def compress_row() -> dict[str, object]:
    """Return how long prototypes are learned for a sixteenth of a store's memory."""
    rng = np.random.default_rng(0)
    centers = 4 * rng.standard_normal((20, DIM), dtype=np.float32)
    kinds = rng.integers(0, 20, EXAMPLES)
    store = Datastore(DatastoreSettings(), DIM, 10, rng)
    noise = rng.standard_normal((EXAMPLES, DIM), dtype=np.float32)
    store.add(np.maximum(noise + centers[kinds], 0), kinds % 10)
    budget = store.size_bytes // 16
    taken = times_of({"learn": lambda: compress(store, budget, np.random.default_rng(0))})["learn"]
    count, dims = prototypes_within(budget, dim=DIM, num_classes=10, num_examples=EXAMPLES)
    name = f"compressing a store of {EXAMPLES:,} x {DIM}"
    kept = f"{count} prototypes in {dims} dimensions"
    return row(name, [1000 * seconds for seconds in taken], "ms", kept)


def times_of(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return seconds of each call, taken in turns so that a busy machine is alike to all."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat:  # the first one warms up
                taken[name].append(time.perf_counter() - start)
    return taken


def row(name: str, values: list[float], unit: str, compared_with: str) -> dict[str, object]:
    return {
        "name": name,
        "value": round(statistics.median(values), 1),
        "spread": [round(min(values), 1), round(max(values), 1)],
        "unit": unit,
        "compared_with": compared_with,
        "command": COMMAND,
    }


if __name__ == "__main__":
    rows = [*search_rows(), *crossing_rows(), build_row(), compress_row()]
    print(json.dumps(rows, indent=2))
