"""Report a comparison: print its tables, and write them as CSV, JSON, Markdown and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peer.files import replacing
from protocol.errors import RunError
from sim.comparison import CompareSettings
from sim.comparison_picture import draw_standings
from sim.standings import CLEARLY, MARGIN, Standing
from sim.terminal import is_plain, new_table, percent

_HEADINGS = (
    "method",
    "mean",
    "bottom\ndecile",
    "below\nLocal",
    "to best",
    "grads",
    "MB in",
    "sec",
    "rate",
    "steps",
)
_SHORTEST_NAME = 8
"""Longer names of methods are folded where a terminal is too narrow."""

_STYLES = {"best": "bold green", "tie": "green", "above": "bold", "below": ""}

_TIE = {"best": "", "tie": " =", "above": "", "below": "", None: ""}


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """What `results.json` says.

    Attributes:
        settings: The comparison's, in full.
        partitions: The partition of each regime, in full.
        standings: See `Standing`: regime by regime, the best method first, oracles last.
        failed: What failed and why, a line each: such a method has no standing there.
        outdated: Trials that an earlier state of the code did, tuning included.
    """

    settings: CompareSettings
    partitions: dict[str, Any]
    standings: list[Standing]
    failed: list[str]
    outdated: int

    @classmethod
    def of(
        cls,
        settings: CompareSettings,
        standings: list[Standing],
        failed: Sequence[str],
        outdated: int = 0,
    ) -> Results:
        """Put together what there is to report."""
        return cls(
            settings=settings,
            partitions={
                name: msgspec.to_builtins(settings.partition_of(name)) for name in settings.regimes
            },
            standings=standings,
            failed=list(failed),
            outdated=outdated,
        )

    def by_regime(self) -> Iterator[tuple[str, list[Standing]]]:
        """Yield each regime that has a standing, with its standings."""
        for regime, found in groupby(self.standings, lambda standing: standing.regime):
            yield regime, list(found)


def write_results(folder: Path, results: Results) -> None:
    """Write `results.json`, `.csv`, `.md` and `.png` into a folder.

    Raises:
        RunError: One of them can't be written.
    """
    text = msgspec.json.format(msgspec.json.encode(results), indent=1)
    files = {
        "results.json": text.decode() + "\n",
        "results.csv": _csv(results),
        "results.md": _markdown(results),
    }
    try:
        for name, content in files.items():
            with replacing(folder / name) as file:
                file.write(content.encode())
    except OSError as error:
        raise RunError(f"{folder}: the results can't be written: {error}") from error
    draw_standings(list(results.by_regime()), folder / "results.png", results.settings.name)


def print_results(results: Results, console: Console) -> None:
    """Print a table for each regime, and how to read them; what failed was said when it did."""
    for regime, found in results.by_regime():
        console.print(f"\n{_title(results, regime)}", style="bold", highlight=False, markup=False)
        console.print(_table(found, console))
    for line in _notes(results):
        console.print(line, highlight=False, markup=False)


def _table(found: Sequence[Standing], console: Console) -> Table:
    plain = is_plain(console)
    table = new_table(console)
    table.padding = (0, 0, 0, 1)  # ten columns are to fit into 80 characters
    table.add_column(_HEADINGS[0], min_width=_SHORTEST_NAME, overflow="fold")
    for heading in _HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for place, standing in enumerate(found):
        if not standing.honest and place and found[place - 1].honest:
            table.add_section()
        cells = _cells(standing, "+-" if plain else "±")
        table.add_row(*(Text(cell, style=_STYLES[standing.verdict]) for cell in cells))
    return table


def _cells(standing: Standing, plus_minus: str) -> list[str]:
    """Return what a row says, headings as in `_HEADINGS`."""
    below = standing.below_local
    return [
        standing.method,
        _spread(standing.mean, standing.sd, plus_minus),
        f"{percent(standing.bottom_decile)}{_TIE[standing.decile_verdict]}",
        "-" if below is None else f"{below}/{standing.tested}",
        _to_the_best(standing),
        f"{standing.gradients:.0f}",
        f"{standing.mb_received:.2f}",
        f"{standing.seconds:.1f}",
        f"{standing.learning_rate:g}",
        "-" if standing.local_steps is None else str(standing.local_steps),
    ]


def _spread(value: float, deviation: float | None, plus_minus: str) -> str:
    spread = "" if deviation is None else f"{plus_minus}{percent(deviation)}"
    return f"{percent(value)}{spread}"


def _to_the_best(standing: Standing) -> str:
    if standing.difference is None:
        return "best"
    difference = f"{100 * standing.difference:+.1f}"
    return f"{difference}{_TIE[standing.verdict]}"


def _title(results: Results, regime: str) -> str:
    settings = results.settings
    return f"{settings.name}: {regime}, {settings.peers} peers, {settings.steps} steps each"


def _notes(results: Results) -> list[str]:
    settings = results.settings
    oracles = sorted({each.method for each in results.standings if not each.honest})
    seeds = "of one seed"
    if len(settings.seeds) > 1:
        seeds = f"mean over {len(settings.seeds)} seeds, with the standard deviation between them"
    notes = [
        f"mean, bottom decile: accuracy over the peers, in percent of each one's own test "
        f"examples; {seeds}",
        f"below Local: peers of all seeds more than {100 * MARGIN:.0f} points below local-only",
        f"to best: mean difference over the same peers and seeds to the best honest method; = is a "
        f"tie: not over {CLEARLY:.0f} standard errors, or neither of the same sign under every "
        "seed nor beyond what it varies by between them (t-test, 5 %); beside a bottom decile, "
        "with the highest, by that test alone, of three seeds or more",
        "grads, MB in: gradients computed and megabytes received by a peer; sec: seconds that a "
        "trial trained, with others beside it",
        "rate, steps: the learning rate and the local steps between exchanges, chosen for each "
        "method and regime on validation examples of peers that aren't reported; - is a pace of "
        "the method's own",
    ]
    if oracles:
        notes.append(f"{', '.join(oracles)}: no honest method, told what no peer can know")
    if results.outdated:
        notes.append(
            f"trials that were done by an earlier state of the code: {results.outdated}; remove "
            "their files to have them done again"
        )
    return notes


def _csv(results: Results) -> str:
    lists = ("means", "bottom_deciles")
    columns = [field for field in Standing.__struct_fields__ if field not in lists]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for standing in results.standings:
        values = (getattr(standing, column) for column in columns)
        writer.writerow("" if value is None else value for value in values)
    return file.getvalue()


def _markdown(results: Results) -> str:
    lines = [f"# {results.settings.name}"]
    for regime, found in results.by_regime():
        lines += ["", f"## {_title(results, regime)}", ""]
        lines.append(f"| {' | '.join(_HEADINGS)} |".replace("\n", " "))
        lines.append(f"|{'|'.join(['---', *['---:'] * (len(_HEADINGS) - 1)])}|")
        for standing in found:
            cells = _cells(standing, " ± ")
            decile = _spread(standing.bottom_decile, standing.bottom_decile_sd, " ± ")
            cells[2] = f"{decile}{_TIE[standing.decile_verdict]}"
            if standing.decile_verdict == "best":
                cells[2] = f"**{cells[2]}**"
            if standing.verdict == "best":
                cells[:2] = [f"**{cell}**" for cell in cells[:2]]
            if not standing.honest:
                cells[0] = f"*{cells[0]}*"
            lines.append(f"| {' | '.join(cells)} |")
    notes = [*_notes(results), *(f"failed: {line}" for line in results.failed)]
    lines += ["", *(f"- {note}" for note in notes), "", "![Results](results.png)"]
    return "\n".join(lines) + "\n"
