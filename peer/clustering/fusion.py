"""The minimizer of the convex clustering objective, to rounding, with a certified duality gap.

For weights w (1 each in the paper) it is the u that minimizes

    ½ Σ_i w_i ‖a_i - u_i‖² + λ Σ_{i<j} w_i w_j ‖u_i - u_j‖,

where i and j share a cluster if u_i = u_j. Its dual has a vector z_ij = -z_ji of norm 1 or less for
each pair, and with p_i = a_i - λ Σ_j w_j z_ij the gap is a sum of squares and of what no pair can
make negative: ½ Σ w_i ‖p_i - u_i‖² + λ Σ_{i<j} w_i w_j (‖u_i - u_j‖ - z_ij·(u_i - u_j)).

Two facts make it fast. A set C is fused if it has z of norm 1 or less with
Σ_{j in C} w_j z_ij = (a_i - μ_C) / λ, whatever is outside (Chiquet et al. 2017; Jiang, Vavasis
and Zhai 2020); then one point μ_C of the weight Σ w_i does for all of it, for this and every larger
λ. And where no points coincide the objective is smooth; with weights that are products, its
derivatives are products of matrices: no pair's vector is ever stored. So: minimize with norms
√(r² + ε²), fuse what can be proven to be one, minimize the rest without ε; if points still meet,
take a smaller ε.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist, pdist

from peer.clustering.interface import Labels, Points

_Vector = npt.NDArray[np.float64]
_Matrix = npt.NDArray[np.float64]

_GAP = 1e-20
"""Of the points' scatter: bounds the error of u by 1.4e-10 of its root."""
_ROUGH_GAP = 1e-16  # the same, with ε
_ROUNDED = 1e-9  # how far over 1 a certificate may be: it costs the square of it in the gap
_SMOOTHINGS = tuple(10.0**-power for power in range(2, 10))  # of the points' root mean square
_NEAR = (1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)
"""In units of ε: the distances at which sets are cut out that may be one point."""
_APART = 10.0  # in units of ε: two points so far apart are two
_MOST_STEPS = 60
_MOST_PRODUCTS = 100  # of the Hessian, in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Points of which some are known to coincide in the solution, and the solution.

    Attributes:
        members: The merged point that each given point is part of. Shape (num_points,).
        middle: What was subtracted from all points, so that differences keep their digits.
        points: The merged points: weighted means. Shape (num_merged, dim).
        weights: Their weights. Shape (num_merged,).
        solution: The u of each. Shape (num_merged, dim).
        gap: The duality gap.
    """

    members: Labels
    middle: _Vector
    points: Points
    weights: _Vector
    solution: Points
    gap: float

    @property
    def centers(self) -> Points:
        """The u of each given point. Shape (num_points, dim)."""
        centers: Points = self.solution[self.members] + self.middle
        return centers

    def merge(self, groups: Labels) -> Fused:
        """Merge merged points into fewer; `groups` has all numbers from 0 to its largest."""
        weights = _totals(self.weights, groups)
        return replace(
            self,
            members=groups[self.members],
            points=_means(self.points, self.weights, groups),
            weights=weights,
            solution=_means(self.solution, self.weights, groups),
        )


def unfused(points: Points, weights: _Vector) -> Fused:
    """Return the solution for λ = 0: every point is its own, equal ones are one."""
    middle = np.median(points, axis=0)  # not the mean, which one huge point could draw far away
    distinct, groups = np.unique(points - middle, axis=0, return_inverse=True)
    members = groups.reshape(-1).astype(np.intp)
    return Fused(
        members=members,
        middle=middle,
        points=distinct,
        weights=_totals(weights, members),
        solution=distinct,
        gap=0.0,
    )


def fuse(before: Fused, penalty: float) -> Fused:
    """Minimize for a λ from the solution for a smaller one.

    The clusters are proven ones, but for a λ within rounding of where two of them meet; then
    they may be told apart still. Either way the gap is the one that the solution has.

    Args:
        before: The solution for a smaller λ, or `unfused`.
        penalty: λ.
    """
    scatter = _scatter(before)
    fused = _merge_by_diameter(before, penalty)
    for smoothing in _SMOOTHINGS:
        if len(fused.weights) == 1:
            break
        epsilon = smoothing * np.sqrt(scatter / fused.weights.sum())
        start = fused if smoothing == _SMOOTHINGS[0] else _contract(fused, 10 * _APART * epsilon)
        fused = _minimize(start, penalty, epsilon, _ROUGH_GAP * scatter)
        fused = _merge_certified(fused, penalty, epsilon)
        if len(fused.weights) > 1 and pdist(fused.solution).min() > _APART * epsilon:
            exact = _minimize(fused, penalty, 0.0, _GAP * scatter / 100)
            if exact.gap <= _GAP * scatter:
                return exact
    if len(fused.weights) == 1:
        return replace(fused, solution=fused.points, gap=0.0)
    return _minimize(fused, penalty, epsilon, _ROUGH_GAP * scatter)


def _merge_by_diameter(fused: Fused, penalty: float) -> Fused:
    """Merge every set whose diameter is at most λ times its weight: z_ij ∝ a_i - a_j proves it."""
    number = len(fused.weights)
    if number == 1:
        return fused
    tree = linkage(pdist(fused.points), "complete")  # its heights are diameters
    children = tree[:, :2].astype(np.intp)
    weights = np.concatenate((fused.weights, np.zeros(number - 1)))
    for node, pair in enumerate(children, number):
        weights[node] = weights[pair].sum()
    root = np.arange(len(weights))
    for node in range(len(weights) - 1, number - 1, -1):
        height = tree[node - number, 2]
        if root[node] != node or height <= penalty * weights[node]:
            root[children[node - number]] = root[node]
    return fused.merge(_numbered(root[:number]))


def _merge_certified(fused: Fused, penalty: float, epsilon: float) -> Fused:
    """Merge what is within a few ε of each other, where the minimizer for ε proves that it may."""
    if len(fused.weights) == 1:
        return fused
    tree = linkage(pdist(fused.solution), "single")
    groups = np.arange(len(fused.weights))
    for near in _NEAR:
        cut = fcluster(tree, near * epsilon, "distance")
        for component in np.flatnonzero(np.bincount(cut) > 1):
            inside = np.flatnonzero(cut == component)
            if np.ptp(groups[inside]) and _is_certified(fused, inside, penalty, epsilon):
                groups[inside] = inside[0]
    return fused.merge(_numbered(groups))


def _is_certified(fused: Fused, inside: Labels, penalty: float, epsilon: float) -> bool:
    """Return whether a set is proven to be one point, by the minimizer's z and a correction.

    z_ij = (u_i - u_j) / √(r² + ε²) misses what is asked of it by m_i; with (m_i - m_j) / λW added
    it doesn't, and its norm is at most the sum of both norms.
    """
    points, weights = fused.points[inside], fused.weights[inside]
    total = weights.sum()
    solution = fused.solution[inside] - weights @ fused.solution[inside] / total
    distances = cdist(solution, solution)
    smoothed = np.hypot(distances, epsilon)
    flow = penalty * _laplacian(weights / smoothed, solution)
    missing = points - weights @ points / total - flow
    norms = distances / smoothed + cdist(missing, missing) / (penalty * total)
    return bool(norms.max() <= 1 + _ROUNDED)


def _contract(fused: Fused, near: float) -> Fused:
    """Move what is near each other together, as ε was: a tenth of r and of ε have the same z."""
    if len(fused.weights) == 1:
        return fused
    groups = fcluster(linkage(pdist(fused.solution), "single"), near, "distance") - 1
    means = _means(fused.solution, fused.weights, groups)[groups]
    return replace(fused, solution=means + (fused.solution - means) / 10)


def _minimize(fused: Fused, penalty: float, epsilon: float, gap: float) -> Fused:
    """Minimize by Newton's method with norms √(r² + ε²), until their own gap is as small.

    Without ε it may fail, where points meet; the gap of the result says so.
    """
    objective = _Objective(fused.points, fused.weights, penalty, epsilon)
    here = objective.at(fused.solution)
    if here is None:
        return replace(fused, gap=np.inf)
    scatter = _scatter(fused)
    for _ in range(_MOST_STEPS):
        if here.slope_gap <= gap:
            break
        accuracy = float(np.clip(np.sqrt(here.slope_gap / scatter), 1e-6, 0.1))
        there = _search(objective, here, objective.step(here, accuracy))
        if there is None:
            break
        here = there
    return replace(fused, solution=here.solution, gap=here.slope_gap + objective.slack(here))


class _State(NamedTuple):
    """A solution, and what the objective and its derivatives are made of there."""

    solution: Points
    value: float
    smoothed: _Matrix  # √(r² + ε²), 1 on the diagonal. Shape (num_merged, num_merged).
    pulls: _Matrix  # λ w_i w_j / the smoothed, 0 on the diagonal
    slope: Points
    slope_gap: float  # ½ Σ ‖slope_i‖² / w_i: the first sum of the gap


class _Objective:
    """The objective with norms √(r² + ε²)."""

    def __init__(self, points: Points, weights: _Vector, penalty: float, epsilon: float) -> None:
        self.points, self.weights, self.epsilon = points, weights, epsilon
        self.products = penalty * np.outer(weights, weights)
        np.fill_diagonal(self.products, 0.0)

    def at(self, solution: Points) -> _State | None:
        """Return what there is to know at a solution; nothing if two points coincide there."""
        smoothed = np.hypot(cdist(solution, solution), self.epsilon)
        np.fill_diagonal(smoothed, 1.0)
        if not smoothed.all():
            return None
        pulls = self.products / smoothed
        moved = solution - self.points
        slope = self.weights[:, np.newaxis] * moved + _laplacian(pulls, solution)
        squares = np.square(slope).sum(axis=1)
        value = self.weights @ np.square(moved).sum(axis=1) + np.vdot(self.products, smoothed)
        return _State(
            solution=solution,
            value=float(value) / 2,
            smoothed=smoothed,
            pulls=pulls,
            slope=slope,
            slope_gap=float((squares / self.weights).sum()) / 2,
        )

    def slack(self, state: _State) -> float:
        """Return the second sum of the gap: λ Σ_{i<j} w_i w_j (r - r²/√(r² + ε²))."""
        distances = cdist(state.solution, state.solution)
        return float(np.vdot(state.pulls, distances * (state.smoothed - distances))) / 2

    def step(self, state: _State, accuracy: float) -> Points:
        """Return Newton's step, by conjugate gradients.

        Their preconditioner is the Hessian without the part along each pair's direction: that of
        the quadratic that lies above, a matrix of num_merged² solved for all coordinates at once.
        """
        diagonal = self.weights + state.pulls.sum(axis=1)
        factor = cho_factor(np.diag(diagonal) - state.pulls, lower=True, check_finite=False)
        curvature = state.pulls / np.square(state.smoothed)
        solution = state.solution

        def product(step: Points) -> Points:
            mixed = solution @ step.T
            own = np.diagonal(mixed)
            along = curvature * (own[:, np.newaxis] + own - mixed - mixed.T)
            whole: Points = diagonal[:, np.newaxis] * step - state.pulls @ step
            return whole - _laplacian(along, solution)

        step = np.zeros_like(solution)
        residual = -state.slope
        direction = better = cho_solve(factor, residual, check_finite=False)
        size = first = float(np.vdot(residual, better))
        for _ in range(_MOST_PRODUCTS):
            image = product(direction)
            curved = float(np.vdot(direction, image))
            if curved <= 0:  # by rounding only
                break
            step += size / curved * direction
            residual = residual - size / curved * image
            better = cho_solve(factor, residual, check_finite=False)
            size, former = float(np.vdot(residual, better)), size
            if size <= accuracy**2 * first:
                break
            direction = better + size / former * direction
        return step if step.any() else better


def _search(objective: _Objective, here: _State, step: Points) -> _State | None:
    """Return a better state on the way of a step, or None where rounding leaves no better one."""
    descent = float(np.vdot(here.slope, step))
    length = 1.0
    for _ in range(40):
        there = objective.at(here.solution + length * step)
        if there is not None and there.value <= here.value + 1e-4 * length * descent:
            return there
        # The value is rounded to more than what the last steps win.
        rounded = there is not None and there.value - here.value <= 1e-14 * abs(here.value)
        if there is not None and rounded and there.slope_gap < 0.5 * here.slope_gap:
            return there
        length /= 2
    return None


def _laplacian(pulls: _Matrix, values: Points) -> Points:
    """Return Σ_j pulls_ij (values_i - values_j)."""
    total: Points = pulls.sum(axis=1)[:, np.newaxis] * values
    return total - pulls @ values


def _scatter(fused: Fused) -> float:
    middle = np.average(fused.points, axis=0, weights=fused.weights)
    return float(fused.weights @ np.square(fused.points - middle).sum(axis=1))


def _totals(weights: _Vector, groups: Labels) -> _Vector:
    totals: _Vector = np.zeros(groups.max() + 1)
    np.add.at(totals, groups, weights)
    return totals


def _means(values: Points, weights: _Vector, groups: Labels) -> Points:
    sums = np.zeros((groups.max() + 1, values.shape[1]))
    np.add.at(sums, groups, weights[:, np.newaxis] * values)
    means: Points = sums / _totals(weights, groups)[:, np.newaxis]
    alone = np.bincount(groups)[groups] == 1
    means[groups[alone]] = values[alone]  # as they were, to the bit
    return means


def _numbered(groups: Labels) -> Labels:
    return np.unique(groups, return_inverse=True)[1].reshape(-1).astype(np.intp)
