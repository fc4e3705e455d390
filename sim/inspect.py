"""`coterie inspect`: who collaborates with whom in a run, and how that came about."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.errors import RunError
from sim.matrix import WeightMatrix, total_variation
from sim.picture import draw_picture
from sim.records import Run
from sim.report import picture_title
from sim.terminal import (
    clipped,
    draw_matrix,
    group_style,
    is_plain,
    new_table,
    percent,
    short_names,
    sparkline,
)

_MOST_STOPS = 5
"""Rounds at which each peer's strongest collaborator is shown."""

_MOST_SPARKS = 20
"""Rounds in the line over all rounds."""

_COLLABORATORS = 3
_LONGEST_NAME = 16


DESCRIPTION = """\
Show the weight matrix of a finished or a still running run, each peer's strongest collaborators,
and how the weights moved over the rounds.
"""
EPILOG = """\
examples:
  coterie inspect                                 the newest run
  coterie inspect runs/latest --round 10          as it was after round 10
  coterie inspect runs/latest --png weights.png --csv weights.csv
  coterie inspect state/alice                     one peer run by hand
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `coterie inspect` accepts."""
    parser.add_argument(
        "run_folder",
        metavar="RUN",
        nargs="?",
        default="latest",
        help="a run folder, its name in runs/, or the state folder of one peer (default: latest)",
    )
    parser.add_argument(
        "--round",
        dest="round_number",
        type=int,
        metavar="N",
        help="show the weights as of this round, counted from 0 (default: the newest)",
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="also write the weight matrix as CSV; - writes it to standard output and nothing else",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw it as a picture")


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Carry out `coterie inspect`; return the exit code.

    Args:
        arguments: As `add_arguments` declares them.
        console: Where to print; None stands for standard output.

    Raises:
        RunError: There is no such run or round, or a file can't be written.
    """
    console = console or Console()
    recorded = Run.open(arguments.run_folder)
    matrix = recorded.weight_matrix(arguments.round_number)
    if arguments.png is not None:
        draw_picture(matrix, arguments.png, picture_title(recorded, matrix))
    if arguments.csv == "-":
        matrix.write_csv(sys.stdout)
        return 0
    if arguments.csv is not None:
        _write_csv(matrix, Path(arguments.csv))
    _print_run(recorded, matrix, arguments.round_number, console)
    for written in filter(None, (arguments.csv, arguments.png)):
        console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _write_csv(matrix: WeightMatrix, path: Path) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            matrix.write_csv(file)
    except OSError as error:
        raise RunError(f"{path}: the matrix can't be written: {error.strerror}") from error


def _print_run(
    recorded: Run, matrix: WeightMatrix, round_number: int | None, console: Console
) -> None:
    console.print(picture_title(recorded, matrix), style="bold", markup=False, highlight=False)
    console.print(draw_matrix(matrix, console))
    for remark in _remarks(recorded, matrix):
        console.print(remark, markup=False, highlight=False, style="yellow")
    _headline("strongest collaborators, in percent of a peer's weight", console)
    console.print(_collaborator_table(matrix, console))
    rounds = [r for r in recorded.recorded_rounds() if round_number is None or r <= round_number]
    if len(rounds) > 1:
        arrow = _arrow(console)
        _headline(f"strongest collaborator by round; {arrow} what moved since the last", console)
        console.print(_movement_table(recorded, rounds, console))
        kind = "model" if recorded.label_groups is None else "label group"
        scale = ", from 0 (less than 10 %) to 9 (90 % and more)" if is_plain(console) else ""
        console.print(f"last column: weight on the own {kind} over all rounds{scale}")


def _headline(text: str, console: Console) -> None:
    console.print(f"\n{text}", style="bold", markup=False, highlight=False)


def _arrow(console: Console) -> str:
    return ">" if is_plain(console) else "→"


def _remarks(recorded: Run, matrix: WeightMatrix) -> list[str]:
    """Return what a reader of the matrix must know about what is not in it."""
    remarks = []
    silent = [name for name, r in zip(matrix.rows, matrix.rounds, strict=True) if r is None]
    if silent:
        remarks.append(f"no record by then: {', '.join(silent)}")
    if recorded.damaged_lines:
        remarks.append(f"{recorded.damaged_lines} damaged record lines were passed over")
    return remarks


def _collaborator_table(matrix: WeightMatrix, console: Console) -> Table:
    """Return a row per peer, in label group order: its weight on itself, its group, others."""
    table = new_table(console)
    table.add_column("peer", no_wrap=True, max_width=_LONGEST_NAME)
    for heading in ("round", "own", "group"):
        table.add_column(heading, justify="right")
    table.add_column("others", no_wrap=True)
    ordered = matrix.by_group()
    own, same_group = ordered.own_weight(), ordered.same_group_share()
    for row, name in enumerate(ordered.rows):
        others = Text("  ").join(
            Text(f"{other} {percent(weight)}", style=group_style(ordered.group(other)))
            for other, weight in ordered.strongest(row, _COLLABORATORS)
        )
        table.add_row(
            Text(name, style=group_style(ordered.group(name))),
            "-" if ordered.rounds[row] is None else str(ordered.rounds[row]),
            percent(own[row]),
            percent(same_group[row]),
            others,
        )
    return table


def _movement_table(recorded: Run, rounds: Sequence[int], console: Console) -> Table:
    """Return how the weights moved, a row per peer in label group order.

    At a few rounds, evenly spaced, it shows each peer's strongest collaborator with its weight
    and, after an arrow, the total variation since the round before; then the weight on the own
    label group (on the own model, where label groups aren't known) as one line over all rounds.
    """
    plain, arrow = is_plain(console), _arrow(console)
    short = short_names(recorded.names)
    num_sparks, num_stops = _room(console.width, short)
    stops = _evenly_spaced(rounds, num_stops)
    matrices = [recorded.weight_matrix(stop).by_group() for stop in stops]
    moved = [total_variation(a.values, b.values) for a, b in pairwise(matrices)]
    shares = _share_by_round(recorded, _evenly_spaced(rounds, num_sparks))
    table = new_table(console)
    table.add_column("peer", no_wrap=True, max_width=_LONGEST_NAME)
    for stop in stops:
        table.add_column(str(stop), no_wrap=True)
    table.add_column("own model" if recorded.label_groups is None else "own group", no_wrap=True)
    for row, name in enumerate(matrices[0].rows):
        cells = [_strongest(matrix, row, short) for matrix in matrices]
        for cell, since in zip(cells[1:], moved, strict=True):
            cell.append(f" {arrow}{percent(float(since[row]), 0)}", style="dim")
        label = Text(name, style=group_style(matrices[0].group(name)))
        table.add_row(label, *cells, sparkline(shares[row].tolist(), plain=plain))
    return table


def _room(width: int, short: Mapping[str, str]) -> tuple[int, int]:
    """Return how many sparks and how many stops fit beside the names."""
    num_sparks = _MOST_SPARKS if width >= 100 else _MOST_SPARKS // 2
    longest = min(max(map(len, short)), _LONGEST_NAME)
    stop_width = min(max(map(len, short.values())), _LONGEST_NAME) + len(" 100 >100") + 1
    num_stops = (width - longest - num_sparks - 2) // stop_width
    return num_sparks, min(max(num_stops, 2), _MOST_STOPS)


def _evenly_spaced(rounds: Sequence[int], count: int) -> list[int]:
    """Return so many of the rounds, or all, with the first and the last among them."""
    positions = np.linspace(0, len(rounds) - 1, min(count, len(rounds))).round().astype(int)
    return [rounds[position] for position in positions]


def _share_by_round(recorded: Run, rounds: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return what the last column draws, shape (num_peers, num_rounds), in label group order."""
    matrices = (recorded.weight_matrix(round_number).by_group() for round_number in rounds)
    if recorded.label_groups is None:
        return np.stack([matrix.own_weight() for matrix in matrices], axis=1)
    return np.stack([matrix.same_group_share() for matrix in matrices], axis=1)


def _strongest(matrix: WeightMatrix, row: int, short: Mapping[str, str]) -> Text:
    """Return the strongest collaborator with its weight; a dash where there is none."""
    for name, weight in matrix.strongest(row, 1):
        label = clipped(short.get(name, name), _LONGEST_NAME, plain=True)
        cell = Text().append(label, style=group_style(matrix.group(name)))
        return cell.append(f" {percent(weight, 0)}")
    return Text("-")
