"""`coterie simulate`: many peers in one process, the same bits from the same seed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from peer.config import read_settings
from protocol.errors import SwarmError
from sim.experiment import SwarmSettings
from sim.options import add_run_arguments, overrides_of
from sim.simulate_settings import SimulateSettings

if TYPE_CHECKING:
    from sim.records import Run
    from sim.simulation import Simulation

DESCRIPTION = """\
Run all peers of a config in this one process: in the lockstep rounds of the paper, or each at its
own pace on a virtual clock, with delays, losses, slow peers, and peers that come and go. The same
seed gives the same bits, on any number of cores: records differ in time_s and seconds alone, and
not even there on the virtual clock. Ends with the report of a swarm.
"""
EPILOG = """\
examples:
  coterie simulate configs/digits.toml
  coterie simulate configs/digits.toml --peers 16 --rounds 200 --seed 1
  coterie simulate configs/digits.toml --set simulate.mode=asynchronous \\
      --set simulate.loss=0.1 --set simulate.slow.peer-03=20
  coterie simulate runs/latest/settings.toml      what the newest run did, once more
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie simulate`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, as of a swarm")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `coterie simulate`."""
    settings = read_settings(arguments.config, SwarmSettings, overrides_of(arguments))
    import torch

    from sim.plan import import_paths, load_slices, make_simulation_run, point_latest_to
    from sim.records import Run
    from sim.simulation import Simulation

    torch.set_num_threads(1)  # more threads would add up in another order
    base = arguments.config.resolve().parent
    slices = load_slices(settings, base)
    simulation = Simulation(settings, slices, import_paths(settings, base))
    folder = make_simulation_run(settings, base, arguments.out, slices)
    point_latest_to(folder)
    return _run(settings, simulation, Run.open(folder))


def _run(settings: SwarmSettings, simulation: Simulation, opened: Run) -> int:
    from sim.plan import SETTINGS_FILE
    from sim.report import print_report, write_report
    from sim.simulator import Simulator

    console = Console()
    for line in _headlines(settings, simulation, opened):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    began_s = time.monotonic()
    completed = Simulator(simulation, opened, console, settings.rounds).run()
    seconds = time.monotonic() - began_s
    opened.refresh()
    if any(peer.rounds_done for peer in opened.peers):
        print_report(opened, write_report(opened, seconds), console)
    elif completed:
        raise SwarmError("no peer finished a round: simulate.churn takes all of them away too soon")
    if not completed:
        console.print(
            f"stopped; do it again with: coterie simulate {opened.folder / SETTINGS_FILE}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 130
    if settings.simulate.mode == "asynchronous":
        console.print(f"{simulation.seconds:.1f} s on the virtual clock", highlight=False)
    return 0


def _headlines(settings: SwarmSettings, simulation: Simulation, opened: Run) -> list[str]:
    simulate = settings.simulate
    lines = [
        f"{settings.name}: {settings.peers} simulated peers, {settings.rounds} rounds, "
        f"{simulate.mode}, in {opened.folder}"
    ]
    unset = SimulateSettings(mode="lockstep")
    unused = [
        f"simulate.{key}"
        for key in SimulateSettings.__struct_fields__
        if getattr(simulate, key) != getattr(unset, key)
    ]
    if simulate.mode == "lockstep" and unused:
        lines.append(f'{", ".join(unused)}: of no use unless simulate.mode = "asynchronous"')
    if settings.personalization.watch:
        lines.append("personalization.watch: of no use in a simulation, whose data are all given")
    drifting = [peer.name for peer in simulation.peers.values() if peer.later is not None]
    if drifting:
        lines.append(f"the data of {', '.join(drifting)} change half-way")
    return lines
