"""`coterie study`: what an algorithm does on problems of which the truth is known."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from sim.study_ledger import Key, Ledger, Plan

DESCRIPTION = """\
odcl: one-shot clustered learning on synthetic regressions. Each of many peers has few examples of
its cluster's true model; error against examples is measured for every way to cluster the models
that peers solved for alone, for what gradient rounds after it add, for IFCA, for peers alone and
for oracles; at the end, whether what is claimed of ODCL was seen.

Every problem that is done is kept: after Ctrl-C the same command does the rest. Other problems,
examples and seeds may be added to a study that is done. One core does it all, in minutes.
"""
EPILOG = """\
examples:
  coterie study odcl
  coterie study odcl --problem linear --examples 25,50 --seeds 20
  coterie study odcl --peers 30 --clusters 3 --out runs/three-clusters
"""

STUDIES = ("odcl",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie study`."""
    parser.add_argument("study", metavar="STUDY", help=f"which one: {', '.join(STUDIES)}")
    parser.add_argument(
        "--problem",
        default="linear,logistic",
        metavar="A,B",
        help="linear, logistic (default: both)",
    )
    parser.add_argument(
        "--examples",
        default="25,50,100,200,400",
        metavar="N,N",
        help="examples of each peer (default: 25,50,100,200,400)",
    )
    for name, default, text in (
        ("seeds", 5, "problems of each kind and size"),
        ("starts", 5, "random starts at each problem, of what draws them"),
        ("peers", 100, "number of peers"),
        ("clusters", 10, "number of true models"),
        ("dim", 20, "parameters of a model"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="the result folder (default: runs/study-STUDY)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `coterie study`.

    Raises:
        ConfigError: A study, problem or number can't be.
        DataError: A problem can't be solved.
        RunError: The results can't be written or gone on with.
    """
    if arguments.study not in STUDIES:
        raise ConfigError(f"unknown study {arguments.study!r}; known are {', '.join(STUDIES)}")
    from sim.plan import RUNS
    from sim.study_ledger import open_ledger

    plan = _plan(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):  # stop as by Ctrl-C, the terminal put right
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, signal.default_int_handler)
    folder = arguments.out or RUNS / f"study-{arguments.study}"
    with open_ledger(folder.resolve(), plan) as ledger:
        return _run(plan, ledger, Console())


def _plan(arguments: argparse.Namespace) -> Plan:
    from sim.regression import Design, kinds_of
    from sim.study_ledger import Plan

    return Plan(
        design=Design(peers=arguments.peers, clusters=arguments.clusters, dim=arguments.dim),
        starts=arguments.starts,
        kinds=kinds_of(_names(arguments.problem)),
        sizes=tuple(sorted(set(_numbers(arguments.examples)))),
        seeds=arguments.seeds,
    )


def _run(plan: Plan, ledger: Ledger, console: Console) -> int:
    cells = list(plan.problems())
    missing = ledger.read(cells)
    _say(console, f"{len(cells)} problems, in {ledger.folder}")
    if len(missing) < len(cells):
        _say(console, f"{len(cells) - len(missing)} of them were done before")
    if "linear" in plan.kinds and plan.sizes[0] < plan.design.dim:
        _say(
            console,
            f"n = {plan.sizes[0]} is less than dim = {plan.design.dim}: many models fit such "
            "examples, of which least squares take that of least norm",
        )
    try:
        _do(plan, missing, ledger, console)
    except KeyboardInterrupt:
        done = len(ledger.kept())
        _say(
            console, f"stopped with {done} of {len(cells)} problems done: go on by the same command"
        )
        return 130
    _report(plan, ledger, console)
    return 0


def _do(plan: Plan, missing: Sequence[Key], ledger: Ledger, console: Console) -> None:
    """Do the problems one after the other: a bar in a terminal, a line each elsewhere."""
    from sim.study_rows import do_cell

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("problems", total=len(missing))
        for place, (kind, size, seed) in enumerate(missing, 1):
            bar.update(task, description=f"{kind}, n = {size}, seed {seed}")
            started_s = time.perf_counter()
            cell = do_cell(plan.design, kind, size, seed, plan.starts)
            seconds = time.perf_counter() - started_s
            ledger.add(cell, seconds)
            bar.advance(task)
            if not console.is_terminal:
                _say(console, f"{place} of {len(missing)}: {cell}: {seconds:.1f} s")


def _report(plan: Plan, ledger: Ledger, console: Console) -> None:
    from sim.study_report import Results, print_results, write_results

    kept = ledger.kept()
    done = [kept[key] for key in plan.problems()]
    seconds = sum(each.seconds for each in done)
    results = Results.of(plan.design, plan.starts, [each.cell for each in done], seconds)
    write_results(ledger.folder, results)
    print_results(results, console)
    _say(console, f"\n{seconds:.0f} s in all; results: {ledger.folder}/results.json, .csv, .png")


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    names = _names(text)
    if wrong := [name for name in names if not name.isdecimal() or int(name) < 1]:
        raise ConfigError(f"--examples {text}: {wrong[0]!r} is no whole number of 1 or more")
    return [int(name) for name in names]
