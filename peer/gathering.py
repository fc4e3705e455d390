"""Whose models a peer gathers to learn who is of its kind (ODCL), and how much each counts.

Either everybody fetches everybody's model and clusters them; or only the first does, by peer id,
and the others ask it who belongs together. Nothing else of what it says is used, so that it can
spoil no average: each fetches the models of its own cluster itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import numpy as np

from peer import algorithm
from peer.algorithm import AlgorithmSettings
from peer.exploration import Candidates
from protocol.groups import MAX_GROUPED, Groups
from protocol.messages import PeerId

MAX_CLUSTERED = MAX_GROUPED - 1
"""Most models of others that are fetched to be clustered."""

MOST_ASKED = 8
"""How many a peer asks, at most, who belongs together, before it finds out itself: each that
doesn't answer costs a deadline."""

ASK_DEADLINES = 2
"""How long a peer may take to find out, in deadlines of a fetch: it may begin later than who asks,
and waits for models itself."""

MOST_TIMES = 4
"""How many times the median of its cluster a peer counts at most, whatever it claims. More lets
honest large peers count in full, and a liar among m members of one size take MOST_TIMES /
(MOST_TIMES + m - 1) of their average."""


class Gathering:
    """How far one peer has come in learning who is of its kind.

    Args:
        own: Itself.
        settings: The algorithm's.
        groups: What a restored peer knows.

    Attributes:
        groups: Who belongs together, as far as it knows: what it tells others.
        clustered_by: Who told of them, or itself; None as long as nobody has found any.
        asked: Whom it asks, until the answer is there, or is given up.
    """

    def __init__(
        self, own: PeerId, settings: AlgorithmSettings, groups: Groups | None = None
    ) -> None:
        self.groups = groups or Groups.of({own: 0})
        self.clustered_by: PeerId | None = None
        self.asked: PeerId | None = None
        self._own = own
        self._asks = settings.clustered_by == "one"
        self._asked_before: set[PeerId] = set()

    def begin(self, neighbors: Candidates, rng: np.random.Generator) -> set[PeerId]:
        """Choose whom to ask, or, where nobody is left to ask, return all whose models are wanted.

        All who reach each other choose alike, without a word: the first of them by peer id, who
        has nobody to ask.

        Args:
            neighbors: Who can be reached.
            rng: Draws from more than can be clustered.
        """
        self.know(Groups.of({self._own: 0}), None)
        self.asked = None
        if self._asks and len(self._asked_before) < MOST_ASKED:
            before = (each for each in neighbors.ordered if each < self._own)
            self.asked = next((each for each in before if each not in self._asked_before), None)
        if self.asked is None:
            return set(algorithm.uniform_neighbors(neighbors.ordered, MAX_CLUSTERED, rng))
        self._asked_before.add(self.asked)
        return set()

    def told(self, groups: Groups, neighbors: Candidates, rng: np.random.Generator) -> set[PeerId]:
        """Take the answer of who was asked, and return whose models are wanted.

        Groups without us, or that put us with nobody but strangers, tell us nothing: whoever comes
        late, too, clusters everybody's models itself.
        """
        teller, self.asked = self.asked, None
        others = groups.others_of(self._own) if self._own in groups.labels else ()
        within_reach = neighbors.members.intersection(others)
        if self._own not in groups.labels or (others and not within_reach):
            return self._gather(neighbors, rng)
        self.know(groups, teller)
        return set(within_reach)

    def know(self, groups: Groups, clustered_by: PeerId | None) -> None:
        """Go by these groups."""
        self.groups, self.clustered_by = groups, clustered_by

    def none_came(self, neighbors: Candidates, rng: np.random.Generator) -> set[PeerId]:
        """Return whose models are wanted when none has come, though there were to be some."""
        promised = self.clustered_by is not None and self.groups.others_of(self._own)
        return self._gather(neighbors, rng) if promised else set()

    def _gather(self, neighbors: Candidates, rng: np.random.Generator) -> set[PeerId]:
        self._asks = False
        return self.begin(neighbors, rng)


def bounded_sizes(claimed: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Return how many examples each model of a cluster counts for in its average.

    Nobody can check how many examples another has. So nobody counts for more than `MOST_TIMES` the
    median, which half of the cluster would have to inflate; everybody bounds alike, so that members
    who were told the same come to the same average. Who doesn't say counts for the median.

    Args:
        claimed: n_i by owner; 0 where it isn't known.
    """
    told = [size for size in claimed.values() if size > 0]
    median = statistics.median_low(told) if told else 1
    most = MOST_TIMES * median
    return {peer_id: min(claimed[peer_id] or median, most) for peer_id in sorted(claimed)}
