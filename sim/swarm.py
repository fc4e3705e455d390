"""`coterie swarm`: many real peers on one machine, from one config to one report."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from rich.console import Console

from peer.config import read_settings
from protocol.errors import ConfigError
from sim.experiment import SwarmSettings
from sim.options import add_run_arguments, overrides_of

DESCRIPTION = """\
Start one process for each peer of a config, each with its own slice of the data; show their
progress; end with the accuracy of every peer, the weight matrix and a run folder.
"""
EPILOG = """\
examples:
  coterie swarm configs/digits.toml
  coterie swarm configs/digits.toml --peers 16 --rounds 200 --seed 1
  coterie swarm configs/digits.toml --set partition.kind=rotated --set algorithm.profile=paper
  coterie swarm --resume runs/latest              go on with a stopped run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie swarm`."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="a TOML file")
    add_run_arguments(parser)
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with a stopped run from its checkpoints"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `coterie swarm`."""
    from sim.plan import make_run, read_run_settings

    if (arguments.config is None) == (arguments.resume is None):
        raise ConfigError("give either a CONFIG or --resume RUN; see coterie swarm --help")
    if arguments.resume is None:
        settings = read_settings(arguments.config, SwarmSettings, overrides_of(arguments))
        folder = make_run(settings, arguments.config.resolve().parent, arguments.out)
    else:
        if overrides_of(arguments) or arguments.out:
            raise ConfigError("--resume goes on with the run's own settings: give no others")
        folder = arguments.resume.resolve()
        settings = read_settings(read_run_settings(folder), SwarmSettings)
    return _run(folder, settings, debug=arguments.debug, resumed=arguments.resume is not None)


def _run(folder: Path, settings: SwarmSettings, *, debug: bool, resumed: bool) -> int:
    from sim.launcher import Launcher
    from sim.plan import point_latest_to
    from sim.records import Run
    from sim.report import print_report, write_report

    console = Console()
    opened = Run.open(folder)
    console.print(f"{settings.name}: {settings.peers} peers, {settings.rounds} rounds, in {folder}")
    launcher = Launcher(opened, settings, console, debug=debug)
    for number in (signal.SIGTERM, signal.SIGHUP):  # stop as by Ctrl-C, the terminal put right
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, signal.default_int_handler)
    seconds, code = None, 0
    try:
        seconds = launcher.run(on_ready=lambda: point_latest_to(folder))
    except KeyboardInterrupt:
        code = 130
    opened.refresh()
    if code == 0 or any(peer.rounds_done for peer in opened.peers):
        # A resumed run took longer than what was seen of it now: the records know.
        summary = write_report(opened, None if resumed else seconds)
        print_report(opened, summary, console)
    if code:
        anew = launcher.without_checkpoint()
        console.print(
            f"stopped; go on with: coterie swarm --resume {folder}"
            + (f" ({', '.join(anew)} left no checkpoint)" if anew else "")
        )
    return code
