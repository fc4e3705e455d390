"""A daemon whose peer's examples change goes on with the others from the next round."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
from helpers_daemons import make_members, run_all, until

from peer.events import ExamplesChanged, RoundFinished
from protocol.transport.memory import MemoryNetwork


def test_other_examples_are_measured_and_trained_on_from_the_next_round():
    async def scenario():
        members = make_members(MemoryNetwork(), peers=2, rounds=100)
        alice = members[min(members)]
        split = alice.participant.split
        more = dataclasses.replace(split, holdout=split.test)
        learner = alice.participant.learner

        async def change():
            await until(lambda: len(alice.reports) >= 5)
            alice.daemon.change_examples(more)

        await run_all(members, change)
        return alice, learner, more

    alice, learner, more = asyncio.run(scenario())
    np.testing.assert_array_equal(learner.measured_labels, more.holdout.labels)
    finished, told = [], []
    for event, effects in alice.events:
        finished += [each.round_number for each in effects if isinstance(each, RoundFinished)]
        if isinstance(event, ExamplesChanged):
            told.append(finished[-1])
    assert len(told) == 1
    accuracies = [report.validation_accuracy for report in alice.reports]
    size = len(more.holdout)
    final = accuracies[told[0] + 1]
    assert final is not None
    assert abs(final * size - round(final * size)) < 1e-6  # a share of the new holdout
