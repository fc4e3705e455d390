"""Report the study of one-shot clustered learning: tables, claims, and JSON, CSV and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from peer.files import replacing
from protocol.errors import RunError
from sim.regression import Design
from sim.study_claims import Claim, claims
from sim.study_picture import draw_study
from sim.study_rows import Cell, Interval, Row, intervals, sum_up
from sim.terminal import new_table
from sim.variants import BUDGET, NEAR, ORACLE, POOLED


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """What `results.json` says.

    Attributes:
        design: What problems are like.
        seeds: How many there are of each kind and size.
        starts: How often those are repeated that draw where they start.
        seconds: What all problems took, one after the other.
        claims: What was to be shown, and whether it was seen.
        intervals: Recovery intervals of convex clustering.
        rows: Every variant, for each kind and size.
    """

    design: Design
    seeds: int
    starts: int
    seconds: float
    claims: list[Claim]
    intervals: list[Interval]
    rows: list[Row]

    @classmethod
    def of(cls, design: Design, starts: int, cells: Sequence[Cell], seconds: float) -> Results:
        """Sum up.

        Args:
            design: What problems are like.
            starts: How often those are repeated that draw where they start.
            cells: All seeds of a kind and size together, sizes ascending, kind by kind.
            seconds: What they took.
        """
        rows, opened = sum_up(cells), intervals(cells)
        return cls(
            design=design,
            seeds=len({cell.seed for cell in cells}),
            starts=starts,
            seconds=round(seconds, 1),
            claims=claims(rows, opened, design.peers),
            intervals=opened,
            rows=rows,
        )


def write_results(folder: Path, results: Results) -> None:
    """Write `results.json`, `.csv` and `.png` into a folder.

    Raises:
        RunError: One of them can't be written.
    """
    text = msgspec.json.format(msgspec.json.encode(results), indent=1)
    try:
        for name, content in (("json", text + b"\n"), ("csv", _csv(results.rows).encode())):
            with replacing(folder / f"results.{name}") as file:
                file.write(content)
    except OSError as error:
        raise RunError(f"{folder}: the results can't be written: {error}") from error
    draw_study(results.rows, folder / "results.png")


def print_results(results: Results, console: Console) -> None:
    """Print a table for each kind of problem, how to read them, and the claims."""
    design = results.design
    for kind, group in groupby(results.rows, lambda row: row.kind):
        title = (
            f"\n{kind} regression: {design.peers} peers, {design.clusters} clusters, "
            f"{design.dim} parameters; normalized MSE in thousandths"
        )
        console.print(title, style="bold", highlight=False, markup=False)
        console.print(_table(list(group), console))
    for line in _notes(results):
        console.print(line, highlight=False, markup=False)
    for kind, stated in groupby(results.claims, lambda claim: claim.kind):
        console.print(f"\nclaims, {kind}:", style="bold", highlight=False, markup=False)
        for claim in stated:
            verdict = "seen    " if claim.holds else "NOT SEEN"
            console.print(f"{verdict} {claim.text}: {claim.seen}", highlight=False, markup=False)


def _table(rows: Sequence[Row], console: Console) -> Table:
    table = new_table(console)
    table.padding = (0, 0, 0, 1)
    table.add_column("variant", overflow="fold")
    sizes = sorted({row.examples for row in rows})
    for heading in (*(f"n={size}" for size in sizes), "rounds", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    oracles = False
    for found in _by_variant(rows):
        last = found[-1]
        if last.variant in (ORACLE, POOLED) and not oracles:
            oracles = True
            table.add_section()
        table.add_row(
            last.variant,
            *map(_error, found),
            str(last.rounds),
            f"{last.moved_bytes:,}",
        )
    return table


def _by_variant(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for variant in dict.fromkeys(row.variant for row in rows):
        yield [row for row in rows if row.variant == variant]


def _error(row: Row) -> str:
    wrong = row.recovered is not None and row.recovered < 1
    return f"{1000 * row.error:.3g}{'*' if wrong else ''}"


def _notes(results: Results) -> list[str]:
    starts = f" and {results.starts} starts of what draws them" if results.starts > 1 else ""
    return [
        f"normalized MSE: mean over peers of |found - true|^2 / |true|^2, over {results.seeds} "
        f"seeds{starts}; *: not every run found the true clusters",
        "n: examples of each peer; rounds: exchanges; bytes: what a peer sends and receives, four "
        "a number, at the largest n, if one of the peers does what is done for all",
        f"IFCA: {BUDGET} rounds of one gradient; near starts lie {NEAR:g} of the least distance of "
        "two true models from the true ones",
        f"{ORACLE}; {POOLED}: told the true clusters, as no peer can be",
    ]


def _csv(rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Row.__struct_fields__)
    for row in rows:
        values = msgspec.structs.astuple(row)
        writer.writerow("" if value is None else value for value in values)
    return file.getvalue()
