"""Exact search for the nearest of stored embeddings, by Euclidean distance.

Matrix products in f32 rule out all stored points but a few, with a bound on what rounding can have
done to them; the few are measured by differences in f64. So the answer is that of measuring every
point, whatever the numbers: cancellation and overflow cost time, never a neighbor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.errors import DataError

Embeddings = npt.NDArray[np.float32]
"""Shape (num_examples, dim), finite."""

_Squares = npt.NDArray[np.float64]
_Positions = npt.NDArray[np.intp]

_QUERIES_AT_ONCE = 256
_POINTS_AT_ONCE = 2048  # times the queries: products that stay in the processor's cache
_PAIRS_AT_ONCE = 1 << 22  # coordinates of f64 differences: bounds temporary memory
_UNIT = 2.0**-24  # what rounding to f32 does at most, relatively
_SMALLEST = 2.0**-124  # what underflow does at most to one product, with a margin
_LARGEST_EXPONENT = 40  # of stored coordinates as prepared: their products can't overflow f32
_FARTHEST = 2.0**60  # of a query's coordinates as prepared, for the same reason


class Nearest(NamedTuple):
    """The k nearest stored points of each query, the nearest first, of equal ones the earlier.

    Attributes:
        positions: Where they are in the store. Shape (num_queries, k).
        distances: Euclidean, rounded once from f64. Shape (num_queries, k), ascending.
    """

    positions: npt.NDArray[np.intp]
    distances: npt.NDArray[np.float64]


class Frame(NamedTuple):
    """Where points are moved and how they are scaled, so that squares fit f32 and little cancels.

    Attributes:
        scale: A power of two, by which scaling is exact.
        middle: Of the scaled points, about. Shape (dim,).
    """

    scale: np.float32
    middle: Embeddings

    @classmethod
    def of(cls, points: Embeddings) -> Frame:
        """Return the frame of finite points of shape (num_points, dim)."""
        largest = float(np.abs(points).max(initial=0.0))
        exponent = _LARGEST_EXPONENT - int(np.frexp(largest)[1])
        scale = np.float32(2.0 ** int(np.clip(exponent, -126, 126)))
        # The middle decides how much cancels, never what is found: a sample's median will do.
        sample = points[:: max(1, len(points) // 1024)]
        if not len(sample):
            sample = np.zeros((1, points.shape[1]), np.float32)
        return cls(scale, np.median(sample * scale, axis=0).astype(np.float32))

    def moved(self, points: Embeddings) -> Embeddings:
        """Return points in this frame; those too far for f32 are infinite, without a warning."""
        with np.errstate(over="ignore", invalid="ignore"):
            moved: Embeddings = points * self.scale - self.middle
        return moved


class NearestSearch:
    """Stored points, prepared to be searched.

    It keeps the points and a copy of them, moved to their middle and scaled so that squares fit.

    Args:
        points: Never changed afterwards. Shape (num_points, dim).

    Raises:
        DataError: They are no finite embeddings.
    """

    def __init__(self, points: Embeddings) -> None:
        check_embeddings(points, "stored embeddings")
        self.points = points
        self._frame = Frame.of(points)
        moved = self._frame.moved(points)
        # (dim + 1) products of f32 added in any order, and the roundings of the moved points
        self._slack = 1.01 * _UNIT * (points.shape[1] + 16)
        squares = _squared_norms(moved) * (1 - 2 * self._slack)
        self._prepared = np.column_stack((moved, squares.astype(np.float32)))

    def find(self, queries: Embeddings, k_nearest: int) -> Nearest:
        """Return the k nearest of each query; all points where there are fewer.

        Args:
            queries: Shape (num_queries, dim).
            k_nearest: At least 1.

        Raises:
            DataError: The queries are no finite embeddings of the stored ones' dimension.
        """
        check_question(queries, k_nearest, self.points.shape[1])
        count = min(k_nearest, len(self.points))
        positions = np.empty((len(queries), count), np.intp)
        distances = np.empty((len(queries), count), np.float64)
        for start in range(0, len(queries) if count else 0, _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
            found = self._find(queries[part], count)
            positions[part] = found.positions
            distances[part] = np.sqrt(found.squares)
        return Nearest(positions, distances)

    def _find(self, queries: Embeddings, count: int) -> _Best:
        """Search the points in blocks, which double in size while the nearest aren't yet near."""
        best = _Best(len(queries), count)
        prepared, norms, too_far = self._asked(queries)
        buffer = np.empty(len(queries) * _POINTS_AT_ONCE, np.float32)
        start, width = 0, min(4 * count, _POINTS_AT_ONCE)
        while start < len(self.points):
            block = self._prepared[start : start + width]
            scores = buffer[: len(queries) * len(block)].reshape(len(block), len(queries))
            np.matmul(block, prepared, out=scores)  # a sixth faster than its transpose
            limits = self._limits(best.squares[:, -1], norms)
            limits[too_far] = np.inf
            near = np.flatnonzero(scores <= limits)
            if len(near):
                positions, rows = np.divmod(near, len(queries))
                order = np.argsort(rows.astype(np.uint16), kind="stable")
                rows, positions = rows[order], positions[order] + start
                best.merge(rows, positions, squares_of(queries, self.points, rows, positions))
            start += len(block)
            width = min(start, _POINTS_AT_ONCE)
        return best

    def _asked(
        self, queries: Embeddings
    ) -> tuple[Embeddings, npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Return queries as their products are taken, their squared norms, and who is too far.

        A prepared point times such a column is |point|² - 2 point·query, less what rounding may do.
        The columns have the shape (dim + 1, num_queries).
        """
        moved = self._frame.moved(queries)
        too_far = ~(np.abs(moved).max(axis=1, initial=0.0) < _FARTHEST)
        moved[too_far] = 0.0
        asked = np.ones((moved.shape[1] + 1, len(moved)), np.float32)
        asked[:-1] = -2 * moved.T
        asked[-1, too_far] = 0.0
        return asked, _squared_norms(moved), too_far

    def _limits(self, squares: _Squares, norms: npt.NDArray[np.float64]) -> Embeddings:
        """Return the product above which no point can be nearer than the k-th. (num_queries,)."""
        room = 1 + 2.0**-50 * (self.points.shape[1] + 16)  # for roundings in f64
        bounds = squares * (float(self._frame.scale) ** 2 * room) - norms * (1 - self._slack)
        bounds += np.abs(bounds) * 4 * _UNIT + _SMALLEST * (self.points.shape[1] + 16)
        with np.errstate(over="ignore"):
            limits: Embeddings = bounds.astype(np.float32)
        return limits


class _Best:
    """The nearest points so far of some queries; infinitely far ones stand for none.

    Attributes:
        squares: Squared distances, ascending. Shape (num_queries, count).
        positions: Of the points. Shape (num_queries, count).
    """

    def __init__(self, num_queries: int, count: int) -> None:
        self.squares = np.full((num_queries, count), np.inf)
        self.positions = np.zeros((num_queries, count), np.intp)

    def merge(self, rows: _Positions, positions: _Positions, squares: _Squares) -> None:
        """Take in points that come after all former ones, by query, then by position."""
        counts = np.bincount(rows)
        asked = np.flatnonzero(counts)
        counts, count = counts[asked], self.squares.shape[1]
        line = np.repeat(np.arange(len(asked)), counts)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + count
        wide_squares = np.full((len(asked), count + int(counts.max())), np.inf)
        wide_positions = np.zeros(wide_squares.shape, np.intp)
        wide_squares[:, :count], wide_positions[:, :count] = (
            self.squares[asked],
            self.positions[asked],
        )
        wide_squares[line, place], wide_positions[line, place] = squares, positions
        # Stable: of equally distant points the earlier one comes first.
        order = np.argsort(wide_squares, axis=1, kind="stable")[:, :count]
        self.squares[asked] = np.take_along_axis(wide_squares, order, axis=1)
        self.positions[asked] = np.take_along_axis(wide_positions, order, axis=1)


def check_embeddings(embeddings: Embeddings, what: str, dim: int | None = None) -> None:
    """Check that an array holds embeddings, finite and of one dimension.

    Raises:
        DataError: It doesn't; it says `what`, and names the first row that is at fault.
    """
    if embeddings.ndim != 2 or embeddings.dtype != np.float32 or not embeddings.shape[1]:
        raise DataError(
            f"{what} are {embeddings.dtype} of shape {embeddings.shape}: they must be f32 of shape "
            "(num_examples, dim), as `Learner.embed` gives them for models of any type"
        )
    if dim is not None and embeddings.shape[1] != dim:
        raise DataError(
            f"{what} have the dimension {embeddings.shape[1]}, the datastore's have {dim}: embed "
            "both with one model"
        )
    # By the extremes first, since a mask would take a quarter of their own memory.
    if embeddings.size and not np.isfinite([embeddings.min(), embeddings.max()]).all():
        fault = int(np.flatnonzero(~np.isfinite(embeddings).all(axis=1))[0])
        raise DataError(
            f"{what}: number {fault} is not finite, so it is near nothing: lower the learning "
            "rate if training diverges; a model in f16 overflows above 65504, so use f32 or bf16"
        )


def check_question(queries: Embeddings, k_nearest: int, dim: int) -> None:
    """Check what a search is asked.

    Raises:
        DataError: The queries are no finite embeddings of this dimension, or k_nearest is below 1.
    """
    check_embeddings(queries, "queries", dim)
    if k_nearest < 1:
        raise DataError(f"k_nearest = {k_nearest}: it must be at least 1")


def squares_of(
    queries: Embeddings, points: Embeddings, rows: _Positions, columns: _Positions
) -> _Squares:
    """Return squared distances of pairs: of two f32 they fit f64 and have no cancellation.

    Args:
        queries: Shape (num_queries, dim).
        points: Shape (num_points, dim).
        rows: Which query each pair is of. Shape (num_pairs,).
        columns: Which point. Shape (num_pairs,).
    """
    squares = np.empty(len(rows))
    step = max(1, _PAIRS_AT_ONCE // points.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        differences = np.subtract(queries[rows[part]], points[columns[part]], dtype=np.float64)
        np.square(differences, out=differences)
        # Not `einsum`: a sum along rows goes alike for each, so duplicates are equally distant.
        differences.sum(axis=1, out=squares[part])
    return squares


def _squared_norms(points: Embeddings) -> npt.NDArray[np.float64]:
    norms: npt.NDArray[np.float64] = np.einsum("ij,ij->i", points, points, dtype=np.float64)
    return norms
