"""The weight matrix: who puts how much collaboration weight on whose model, and its measures."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TextIO

import numpy as np
import numpy.typing as npt

_NO_WEIGHT = 1e-9
"""What rounding leaves of a weight that is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMatrix:
    """Collaboration weights `w[i][j]`: how much peer i predicts with peer j's model.

    Attributes:
        rows: The peers whose weights these are.
        columns: The peers whose models are weighted; the rows' own names are among them.
        values: Shape (num_rows, num_columns); a row sums to 1, or is NaN throughout when its peer
            has recorded nothing yet.
        rounds: Per row, the round its weights were recorded in; None without a record.
        label_groups: The label group of each peer by name; None when nobody knows them.
        descriptions: What a label group stands for, by its number.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: npt.NDArray[np.float64]
    rounds: tuple[int | None, ...]
    label_groups: Mapping[str, int] | None
    descriptions: Mapping[int, str]

    def group(self, name: str) -> int | None:
        """Return the label group of a peer; None when it is unknown."""
        return None if self.label_groups is None else self.label_groups.get(name)

    def describe(self, group: int | None) -> str:
        """Return what a label group stands for, or its number where nothing says so."""
        if group is None:
            return "no label group"
        return self.descriptions.get(group) or f"group {group}"

    def largest(self) -> float:
        """Return the largest weight; 0 when nothing is recorded."""
        return float(np.nanmax(self.values, initial=0.0))

    def by_group(self) -> WeightMatrix:
        """Return the matrix with the peers of each label group side by side, unknown ones last."""
        rows = self._grouped_order(self.rows)
        columns = self._grouped_order(self.columns)
        return replace(
            self,
            rows=tuple(self.rows[row] for row in rows),
            columns=tuple(self.columns[column] for column in columns),
            values=self.values[np.ix_(rows, columns)],
            rounds=tuple(self.rounds[row] for row in rows),
        )

    def _grouped_order(self, names: tuple[str, ...]) -> list[int]:
        groups = [self.group(name) for name in names]
        return sorted(range(len(names)), key=lambda i: (groups[i] is None, groups[i] or 0))

    def own_weight(self) -> npt.NDArray[np.float64]:
        """Return each row's weight on its own model, shape (num_rows,); NaN without a record."""
        own = [self.columns.index(name) for name in self.rows]
        return self.values[np.arange(len(self.rows)), own]

    def same_group_share(self) -> npt.NDArray[np.float64]:
        """Return the weight of each row on the peers of its own label group, itself included.

        Returns:
            Shape (num_rows,); NaN where a row has no record or its label group is unknown.
        """
        same = self._same_group().astype(float)
        known = np.array([self.group(name) is not None for name in self.rows])
        shares: npt.NDArray[np.float64] = np.where(known, (self.values * same).sum(axis=1), np.nan)
        return shares

    def same_group_share_of_others(self) -> npt.NDArray[np.float64]:
        """Return how much of the weight given to *others* stays inside the own label group.

        Returns:
            Shape (num_rows,); NaN where that says nothing: no record, no label group, nobody else
            in the group, or all weight on the own model.
        """
        own = self.own_weight()
        given = 1.0 - own
        lonely = self._same_group().sum(axis=1) < 2
        speaks = ~lonely & (given > _NO_WEIGHT)  # NaN compares as False
        shares = np.full(len(self.rows), np.nan)
        np.divide(self.same_group_share() - own, given, out=shares, where=speaks)
        return shares.clip(0.0, 1.0)

    def _same_group(self) -> npt.NDArray[np.bool_]:
        """Return who shares a known label group, shape (num_rows, num_columns)."""
        groups = [self.group(name) for name in self.columns]
        same = [
            [self.group(row) is not None and self.group(row) == g for g in groups]
            for row in self.rows
        ]
        return np.array(same, dtype=np.bool_).reshape(self.values.shape)

    def strongest(self, row: int, count: int) -> list[tuple[str, float]]:
        """Return the other peers that a row puts most weight on, strongest first.

        Args:
            row: Position of the peer among `rows`.
            count: How many at most; peers without any weight are never listed.
        """
        weights = dict(zip(self.columns, self.values[row].tolist(), strict=True))
        return strongest_others(weights, self.rows[row], count)

    def write_csv(self, file: TextIO) -> None:
        """Write a header of names, then a line per peer; no record leaves its cells empty."""
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["peer", *self.columns])
        for name, weights in zip(self.rows, self.values.tolist(), strict=True):
            lines.writerow(
                [name, *("" if np.isnan(weight) else repr(weight) for weight in weights)]
            )


def strongest_others(
    weights: Mapping[str, float], own_name: str, count: int
) -> list[tuple[str, float]]:
    """Return the strongest collaborators in one peer's weights, itself left out.

    Args:
        weights: Collaboration weights by peer name.
        own_name: The peer whose weights these are.
        count: How many at most; of equal weights the first in name order comes first.
    """
    others = [
        (name, weight)
        for name, weight in weights.items()
        if name != own_name and weight > _NO_WEIGHT  # NaN compares as False
    ]
    return sorted(others, key=lambda other: (-other[1], other[0]))[:count]


def total_variation(
    before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return how much weight moved between two matrices: half of the sum of absolute changes.

    Args:
        before: Shape (num_rows, num_columns).
        after: Shape (num_rows, num_columns).

    Returns:
        Shape (num_rows,), from 0 (nothing moved) to 1 (all of it did); NaN where a row is missing.
    """
    distance: npt.NDArray[np.float64] = np.abs(after - before).sum(axis=1) / 2
    return distance
