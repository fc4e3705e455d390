"""Approximate search for the nearest of many stored embeddings, by inverted lists of faiss.

The points are clustered, and a query is compared with those of the clusters nearest to it alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from peer.clustering.interface import on_one_thread
from peer.nearest import (
    Embeddings,
    Frame,
    Nearest,
    NearestSearch,
    check_embeddings,
    check_question,
    squares_of,
)

APPROXIMATE_FROM = 5_000
"""Points from which it pays: a memory of so many asks its holdout of a thousand at each renewal,
and making their index took as long as answering 160 queries exactly. With fewer there is nothing to
gain: those thousand took 70 ms exactly, on a busy machine."""

_PARTS_SEARCHED = 10  # one in so many of the lists: with one in 16 it found 94 % in wide clusters
_FEWEST_SEARCHED = 8  # with 4 of 70 lists it found 85 % there
_STEPS = 4  # of k-means: ten found no more of the nearest, in 1.6 times the time
_EXAMPLES_EACH = 16  # that k-means sees for a list: 64 found no more, in twice the time
_POINTS_AT_ONCE = 1 << 14  # bounds temporary memory


class ApproximateSearch:
    """Stored points in about as many lists as the square root of their number.

    It keeps the points and faiss's copy of them. The same points and queries always give the same
    answer: faiss begins its clusters by a seed of its own, and runs on one thread.

    Args:
        points: Never changed afterwards. Shape (num_points, dim), at least one.

    Raises:
        DataError: They are no finite embeddings.
    """

    def __init__(self, points: Embeddings) -> None:
        check_embeddings(points, "stored embeddings")
        self.points = points
        self._frame = Frame.of(points)
        self._exact: NearestSearch | None = None
        faiss: Any = importlib.import_module("faiss")  # an extra, and slow to import
        dim, lists = points.shape[1], int(len(points) ** 0.5)
        self._index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, lists)
        self._index.nprobe = min(lists, max(_FEWEST_SEARCHED, lists // _PARTS_SEARCHED))
        self._index.cp.niter = _STEPS
        self._index.cp.min_points_per_centroid = 1  # fewer than 39 are said on standard error
        sample = points[:: max(1, len(points) // (_EXAMPLES_EACH * lists))]
        with on_one_thread():
            self._index.train(self._frame.moved(sample))
            for start in range(0, len(points), _POINTS_AT_ONCE):
                self._index.add(self._frame.moved(points[start : start + _POINTS_AT_ONCE]))

    def find(self, queries: Embeddings, k_nearest: int) -> Nearest:
        """Return k points near each query, at their exact distances; all where there are fewer.

        Queries whose lists hold fewer than k, as those far from all points, are answered exactly.

        Args:
            queries: Shape (num_queries, dim).
            k_nearest: At least 1.

        Raises:
            DataError: The queries are no finite embeddings of the stored ones' dimension.
        """
        check_question(queries, k_nearest, self.points.shape[1])
        count = min(k_nearest, len(self.points))
        with on_one_thread():
            found = self._index.search(self._frame.moved(queries), count)[1]
        found = np.sort(found.astype(np.intp), axis=1)  # of equally near ones the earlier is first
        lacking = (found < 0).any(axis=1)
        found[lacking] = 0
        rows = np.arange(len(queries)).repeat(count)
        squares = squares_of(queries, self.points, rows, found.reshape(-1)).reshape(found.shape)
        order = np.argsort(squares, axis=1, kind="stable")
        positions = np.take_along_axis(found, order, axis=1)
        distances = np.sqrt(np.take_along_axis(squares, order, axis=1))
        if lacking.any():
            self._exact = self._exact or NearestSearch(self.points)
            positions[lacking], distances[lacking] = self._exact.find(queries[lacking], k_nearest)
        return Nearest(positions, distances)
