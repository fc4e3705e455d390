"""`coterie compare`: methods side by side, in several regimes, tuned alike."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from peer.cli import add_settings_argument
from peer.config import read_settings
from protocol.errors import SwarmError

if TYPE_CHECKING:
    from sim.comparison import Choices, CompareSettings, Trial
    from sim.ledger import Ledger
    from sim.supply import Supply, Task
    from sim.trial import TrialResult
    from sim.workers import Workers

LOG = "log.txt"

HOPELESS = 8
"""When so many trials have failed and none ever went well, the others aren't tried."""

DESCRIPTION = """\
Run each method of a config in each of its regimes under each of its seeds, in parallel, from the
same initial parameters, with the same peers, examples, batches and number of steps; end with tables
of accuracy and cost, a picture, and a result folder.

Each method is tuned, for each regime, over one grid of learning rates and local steps. Tuning never
sees the test part of the data: a fifth of the training part stands in for it, and the peers are
others, made of the rest under seeds of their own. What is reported is trained on all of a peer's
training examples and tested on the test part.

Every finished trial is kept: after Ctrl-C or a failure the same command does the rest. Methods,
regimes and seeds may be added to a comparison that is done.
"""
EPILOG = """\
examples:
  coterie compare configs/compare-digits.toml
  coterie compare configs/compare-digits.toml --methods local,fedavg,oracle --seeds 1,2
  coterie compare configs/compare-digits.toml --regimes rotated --set tune.local_steps=[1,5]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie compare`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    parser.add_argument("--methods", type=_names, metavar="A,B", help="what to compare")
    parser.add_argument("--regimes", type=_names, metavar="A,B", help="in which partitions")
    parser.add_argument("--seeds", type=_numbers, metavar="1,2", help="seeds to report")
    parser.add_argument("--peers", type=int, metavar="K", help="number of peers")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of each peer")
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="trials at a time (default: one a core)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="the result folder (default: runs/compare-NAME)"
    )
    add_settings_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `coterie compare`."""
    from sim.comparison import CompareSettings
    from sim.supply import Supply

    settings = read_settings(arguments.config, CompareSettings, _overrides(arguments))
    for number in (signal.SIGTERM, signal.SIGHUP):  # stop as by Ctrl-C, the terminal put right
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, signal.default_int_handler)
    jobs = arguments.jobs or max(1, len(os.sched_getaffinity(0)) // settings.training.threads)
    supply = Supply(settings, arguments.config.resolve().parent)
    _check(settings, supply)
    from sim.ledger import open_ledger  # brings torch, which takes seconds
    from sim.plan import RUNS

    folder = arguments.out or RUNS / f"compare-{settings.name}"
    with open_ledger(folder.resolve(), settings, supply.fingerprint) as ledger:
        return _Comparison(settings, supply, ledger, jobs, Console()).run()


def _overrides(arguments: argparse.Namespace) -> list[str]:
    given = {
        key: getattr(arguments, key) for key in ("methods", "regimes", "seeds", "peers", "steps")
    }
    return [
        *arguments.overrides,
        *(f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None),
    ]


def _check(settings: CompareSettings, supply: Supply) -> None:
    """Refuse what can't work before the first trial begins: all regimes, and the model."""
    from sim.comparison import Trial, tuning_trials
    from sim.trial import make_members

    seeds = [(seed, False) for seed in settings.seeds]
    if tuning_trials(settings):
        seeds += [(seed, True) for seed in settings.tune.seeds]
    trials = [
        Trial(
            regime=regime,
            method=settings.methods[0],
            seed=seed,
            tuning=tuning,
            learning_rate=settings.tune.learning_rate[0],
            local_steps=None,
        )
        for regime in settings.regimes
        for seed, tuning in seeds
    ]
    for task in supply.tasks(trials):
        members = make_members(task)
    members[0].new_learner()


class _Comparison:
    """A comparison while it is being run."""

    def __init__(
        self,
        settings: CompareSettings,
        supply: Supply,
        ledger: Ledger,
        jobs: int,
        console: Console,
    ) -> None:
        from sim.comparison import count_trials, tuning_trials
        from sim.trial_progress import TrialProgress

        self._settings = settings
        self._supply = supply
        self._ledger = ledger
        self._jobs = jobs
        self._console = console
        self._failed: list[str] = []
        self._total = count_trials(settings)
        planned = Counter(trial.method for trial in tuning_trials(settings))
        planned.update(dict.fromkeys(settings.methods, len(settings.regimes) * len(settings.seeds)))
        self._progress = TrialProgress(console, planned, jobs)

    def run(self) -> int:
        settings, folder = self._settings, self._ledger.folder
        self._say(
            f"{settings.name}: {len(settings.methods)} methods, {len(settings.regimes)} regimes, "
            f"{len(settings.seeds)} seeds: {self._total} trials, {self._jobs} at a time, in "
            f"{folder}"
        )
        try:
            choices = self._do_trials()
        except KeyboardInterrupt:
            done = len(self._ledger.results())
            self._say(
                f"stopped with {done} of {self._total} trials done: go on by the same command"
            )
            return 130
        self._report(choices)
        if self._failed:
            raise SwarmError(
                f"{len(self._failed)} of {self._total} trials failed, as said above and in full in "
                f"{folder / LOG}: the same command tries them again"
            )
        return 0

    def _do_trials(self) -> Choices:
        from sim.comparison import choose, reported_trials, tuning_trials
        from sim.trial import run_trial
        from sim.workers import Workers

        preload, log = ("peer.preload", "sim.trial"), self._ledger.folder / LOG
        with Workers(run_trial, self._jobs, log, preload) as workers, self._progress:
            self._complete(tuning_trials(self._settings), workers)
            results = self._ledger.results().values()
            scores = {each.trial: each.mean for each in results if each.trial.tuning}
            choices = choose(self._settings, scores)
            self._complete(reported_trials(self._settings, choices), workers)
        return choices

    def _complete(self, trials: Sequence[Trial], workers: Workers[Task, TrialResult]) -> None:
        """Do those of the trials that aren't done yet."""
        from sim.workers import Failure

        missing = self._ledger.read(trials)
        found = [self._ledger.results()[trial] for trial in trials if trial not in missing]
        for result in found:
            self._progress.found(result)
        if found and missing:
            self._progress.say(f"{len(found)} of {len(trials)} trials were done before")
        for task, outcome in workers.run(self._supply.tasks(missing)):
            if isinstance(outcome, Failure):
                self._failed.append(f"{task.trial}: {outcome.reason}")
                self._progress.failed(task.trial, outcome.reason)
                if not self._ledger.results() and len(self._failed) == HOPELESS:
                    raise SwarmError(f"the first {HOPELESS} trials failed, all of them: see above")
            else:
                self._ledger.add(outcome)
                self._progress.finished(outcome)

    def _report(self, choices: Choices) -> None:
        from sim.comparison_report import Results, print_results, write_results
        from sim.standings import standings

        folder = self._ledger.folder
        trials = self._ledger.results()
        found = standings(self._settings, choices, trials)
        outdated = sum(result.code != self._supply.code for result in trials.values())
        results = Results.of(self._settings, found, self._failed, outdated)
        write_results(folder, results)
        print_results(results, self._console)
        self._say(f"\nresults: {folder}/results.md, .csv, .json, .png")

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    return [_positive(number, least=0) for number in _names(text)]


def _positive(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} or more")
    return int(text)
