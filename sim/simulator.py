"""Run a simulation into its run folder: records, progress and results, and a safe end by Ctrl-C."""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType

from rich.console import Console

from peer.daemon import RoundReport
from peer.record import RECORD_FILE, RESULT_FILE, Recorder, write_json
from peer.stopping import SAME_WISH_S
from protocol.messages import PeerId
from sim.progress import DOWN, SwarmProgress
from sim.records import Run
from sim.simulation import SimulatedPeer, Simulation

_LOOK_S = 0.25
"""Least time between two looks at the records to show progress."""

_OTHER_FILES = 64
"""Files that are open beside the peers' records, generously."""


class Simulator:
    """Runs one simulation.

    Args:
        simulation: What to run.
        run: The laid-out run folder.
        console: Where to show progress.
        rounds: Of each peer.
    """

    def __init__(self, simulation: Simulation, run: Run, console: Console, rounds: int) -> None:
        self._simulation = simulation
        self._run = run
        self._progress = SwarmProgress(run, console, rounds)
        self._recorders: dict[PeerId, Recorder] = {}
        self._evaluated: set[str] = set()
        self._looked_s = -math.inf
        self._stopped_s: float | None = None

    def run(self) -> bool:
        """Do all rounds and evaluate; say whether it came to its end before a signal did.

        The first Ctrl-C, SIGTERM or SIGHUP ends it between two pieces of work, with whole records;
        a later one at once.

        Raises:
            ModelError: A model failed.
            KeyboardInterrupt: A second signal.
        """
        _allow_open_files(len(self._simulation.peers) + _OTHER_FILES)
        with ExitStack() as stack:
            stack.enter_context(self._signals())
            names = {peer_id: peer.name for peer_id, peer in self._simulation.peers.items()}
            for peer_id, home in zip(names, self._run.peers, strict=True):
                self._recorders[peer_id] = Recorder(home.folder / RECORD_FILE, names)
                stack.callback(self._recorders[peer_id].close)
            stack.enter_context(self._progress)
            self._simulation.run(self._round_finished, self._wanted)
            for peer, home in zip(self._simulation.peers.values(), self._run.peers, strict=True):
                if self._wanted() and self._simulation.has_finished(peer):
                    result = self._simulation.evaluate(peer, self._wanted)
                    if result is not None:
                        write_json(home.folder / RESULT_FILE, result)
                        self._evaluated.add(peer.name)
            self._show()
        return self._stopped_s is None

    def _round_finished(
        self, peer: SimulatedPeer, report: RoundReport, totals: Mapping[str, float]
    ) -> None:
        self._recorders[peer.peer_id].round_finished(
            report.finished,
            own=peer.peer_id,
            validation_accuracy=report.validation_accuracy,
            num_neighbors=self._simulation.engine.num_neighbors(peer.peer_id),
            totals=totals,
            counters={},
            seconds=report.seconds,
            work=report.work,
            memory=peer.memory.report() if peer.memory else None,
        )

    def _wanted(self) -> bool:
        """Say whether to go on; asked so often that progress is shown from here."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._show()
        return self._stopped_s is None

    def _show(self) -> None:
        self._progress.update(
            {peer.name: self._state(peer) for peer in self._simulation.peers.values()}
        )
        self._looked_s = time.monotonic()

    def _state(self, peer: SimulatedPeer) -> str:
        if peer.name in self._evaluated:
            return "finished"
        if self._simulation.is_present(peer):
            return "running"
        return DOWN if peer.reported[2] else "starting"  # gone, or not there yet

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Take signals for a wish to stop; a second one right after the first is the same wish."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            now_s = time.monotonic()
            if self._stopped_s is None:
                self._stopped_s = now_s
            elif now_s - self._stopped_s > SAME_WISH_S:
                raise KeyboardInterrupt

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _allow_open_files(count: int) -> None:
    """Raise the soft limit as far as it goes; if that is too little, opening says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
