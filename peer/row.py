"""A number for each of many peers: one row of the matrices of losses and of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from protocol.messages import PeerId


class Row(Mapping[PeerId, float]):
    """Numbers by peer, in the order of peer ids, never changed: whoever holds it needs no copy.

    Among thousands, a peer knows hundreds and looks at all of them in every round: the numbers lie
    side by side, in any order, and rows of the same peers share what says whose they are.

    Attributes:
        positions: Where each peer's number is, the first one first.
        numbers: The numbers. Shape (number of peers,).
    """

    __slots__ = ("numbers", "positions")

    def __init__(self, positions: dict[PeerId, int], numbers: npt.NDArray[np.float64]) -> None:
        self.positions = positions
        self.numbers = numbers

    @classmethod
    def of(cls, numbers: Mapping[PeerId, float]) -> Row:
        """Return a mapping as a row; a row as it is."""
        if isinstance(numbers, Row):
            return numbers
        positions = {peer_id: position for position, peer_id in enumerate(numbers)}
        return cls(positions, np.array([*numbers.values()], np.float64))

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[PeerId]:
        return iter(sorted(self.positions))

    def __getitem__(self, peer_id: PeerId) -> float:
        return self.numbers.item(self.positions[peer_id])

    def __contains__(self, peer_id: object) -> bool:
        return peer_id in self.positions

    def __repr__(self) -> str:
        return f"Row({dict(self)})"

    def changed(self, changes: Mapping[PeerId, float | None]) -> Row:
        """Return a row with other numbers of some peers, and without those whose one is None."""
        if None in changes.values():
            merged = {**self, **changes}
            return Row.of({each: number for each, number in merged.items() if number is not None})
        positions, added = self.positions, [each for each in changes if each not in self.positions]
        if added:
            positions = {**positions}
            for peer_id in added:
                positions[peer_id] = len(positions)
        numbers = np.empty(len(positions), np.float64)
        numbers[: self.numbers.size] = self.numbers
        for peer_id, number in changes.items():
            numbers[positions[peer_id]] = number
        return Row(positions, numbers)

    def only(self, peer_ids: Iterable[PeerId]) -> Row:
        """Return the numbers of those of some peers that have one."""
        return Row.of({each: self[each] for each in peer_ids if each in self.positions})

    def largest(self, count: int) -> dict[PeerId, float]:
        """Return so many of the largest numbers, at least 1; more where the last are equal."""
        return self.at_least(np.sort(self.numbers)[-count:].min(initial=np.inf))

    def at_least(self, number: float) -> dict[PeerId, float]:
        """Return all that are no smaller than a number."""
        ids, (positions,) = list(self.positions), (self.numbers >= number).nonzero()
        return {ids[position]: self.numbers.item(position) for position in positions.tolist()}
