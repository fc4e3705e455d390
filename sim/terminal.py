"""Draw the weight matrix and its companions in a terminal of any width, with or without color."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.box import SIMPLE_HEAD, Box
from rich.color import Color
from rich.console import Console, Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from sim.matrix import WeightMatrix

GROUP_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
SHADES = " .:-=+*#%@"
"""From no weight to the largest one, where no color can say it."""

_PALE, _STRONG = (38, 56, 84), (122, 196, 255)
"""Colors of the smallest and the largest weight; readable on light and on dark terminals."""

_LONGEST_NAME = 16
_VISIBLE = 0.005
"""Below half a percent a number would read 0; a dot says it more quietly."""

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BOX = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


def is_plain(console: Console) -> bool:
    """Say whether to keep to ASCII without color: no terminal, NO_COLOR, or no Unicode."""
    return (
        not console.is_terminal
        or console.no_color
        or not console.encoding.lower().startswith("utf")
    )


def new_table(console: Console) -> Table:
    """Return an empty table in the look that this console can show."""
    box = _PLAIN_BOX if is_plain(console) else SIMPLE_HEAD
    return Table(box=box, pad_edge=False, show_edge=False, header_style="bold")


def group_style(group: int | None) -> str:
    """Return the color that marks a label group everywhere."""
    return "dim" if group is None else GROUP_COLORS[group % len(GROUP_COLORS)]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return each name without the beginning that all share: "peer-07" among peers is "07".

    Digits are never cut, and names of which nothing would be left stay whole.
    """
    first, last = min(names), max(names)  # what these two share, all share
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    shared = len(first[:shared].rstrip("0123456789"))
    if shared == len(first):
        shared = 0
    return {name: name[shared:] for name in names}


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share from 0 to 1 in percent, and a dash for one that isn't known."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def clipped(name: str, width: int, *, plain: bool) -> str:
    """Cut a name that is too long, and show that it was cut."""
    return name if len(name) <= width else name[: width - 1] + ("~" if plain else "…")


def sparkline(shares: Sequence[float], *, plain: bool) -> str:
    """Draw shares from 0 to 1 as one bar each, or, plain, as tenths: 9 is 0.9 and more.

    A NaN leaves a gap.
    """
    steps = "0123456789" if plain else _BARS
    return "".join(
        " " if math.isnan(share) else steps[min(int(share * len(steps)), len(steps) - 1)]
        for share in shares
    )


def draw_matrix(matrix: WeightMatrix, console: Console) -> Group:
    """Draw a weight matrix, ordered and marked by label group, as wide as fits the console.

    A cell is four or three characters with the weight in percent; with many peers two or one
    whose color (plain: character) grows with the root of the weight, so that small weights show
    beside a large one. Columns that fit in no way are left out, those of least weight first, and a
    line says so. A row without a record shows dashes.
    """
    return Group(*_Drawing.plan(matrix, console).lines())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """A weight matrix in label group order, with what was decided about its drawing."""

    matrix: WeightMatrix
    columns: tuple[int, ...]  # positions that are drawn
    cell_width: int
    name_width: int
    largest: float
    plain: bool

    @classmethod
    def plan(cls, matrix: WeightMatrix, console: Console) -> _Drawing:
        matrix = matrix.by_group()
        name_width = min(max(map(len, matrix.rows)), _LONGEST_NAME)
        edges = len({matrix.group(name) for name in matrix.columns}) - 1
        room = max(console.width - (name_width + 3) - edges, 1)  # 3: the mark and two spaces
        cell_width = next((w for w in (4, 3, 2, 1) if w * len(matrix.columns) <= room), 1)
        totals = np.nansum(matrix.values, axis=0)
        heaviest = np.argsort(-totals, kind="stable")[:room]
        return cls(
            matrix=matrix,
            columns=tuple(sorted(heaviest.tolist())),
            cell_width=cell_width,
            name_width=name_width,
            largest=matrix.largest(),
            plain=is_plain(console),
        )

    @property
    def numbers(self) -> bool:
        """Whether a cell has room for its weight in percent."""
        return self.cell_width >= 3

    def lines(self) -> list[Text]:
        lines = self._heading()
        rows = range(len(self.matrix.rows))
        for group, members in groupby(rows, lambda row: self.matrix.group(self.matrix.rows[row])):
            if self.matrix.label_groups is not None:
                lines.append(self._group_line(group))
            lines.extend(self._row(row) for row in members)
        lines.extend(self._legend())
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return lines

    def _spans(self) -> list[tuple[int | None, list[int]]]:
        """Return the drawn columns by label group."""
        names = self.matrix.columns
        spans = groupby(self.columns, lambda column: self.matrix.group(names[column]))
        return [(group, list(columns)) for group, columns in spans]

    def _heading(self) -> list[Text]:
        groups, names = (Text(" " * (self.name_width + 3)) for _ in range(2))
        shortened = short_names(self.matrix.columns)
        for position, (group, columns) in enumerate(self._spans()):
            if position:
                groups.append(" ")
                names.append(" ")
            span = len(columns) * self.cell_width
            label = "?" if group is None else f"group {group}"
            if len(label) > span:
                label = label.removeprefix("group ")[:span]
            groups.append(label.center(span), style=group_style(group))
            for column in columns:
                name = clipped(shortened[self.matrix.columns[column]], 3, plain=self.plain)
                names.append(name.rjust(3).ljust(self.cell_width), style=group_style(group))
        lines = [groups] if self.matrix.label_groups is not None else []
        return [*lines, names] if self.numbers else lines

    def _group_line(self, group: int | None) -> Text:
        label = self.matrix.describe(group)
        if group in self.matrix.descriptions:
            label = f"group {group}: {label}"
        width = self.name_width + 3 + self.cell_width * len(self.columns) + len(self._spans()) - 1
        line = "-" if self.plain else "─"
        return Text(f"{line * 2} {label} ".ljust(width, line), style=group_style(group))

    def _row(self, row: int) -> Text:
        name = self.matrix.rows[row]
        group = self.matrix.group(name)
        line = Text()
        line.append("| " if self.plain else "▌ ", style=group_style(group))
        line.append(clipped(name, self.name_width, plain=self.plain).ljust(self.name_width + 1))
        for position, (_, columns) in enumerate(self._spans()):
            if position:
                line.append("|" if self.plain else "│", style="dim")
            for column in columns:
                line.append_text(self._cell(float(self.matrix.values[row, column])))
        return line

    def _cell(self, weight: float) -> Text:
        if math.isnan(weight):
            return Text("-".rjust(min(self.cell_width, 3)).ljust(self.cell_width), style="dim")
        if not self.numbers:
            shade = self._shade(weight)
            if self.plain:
                return Text(SHADES[shade] * self.cell_width)
            style = self._color(weight) if shade else Style(dim=True)
            return Text((" " if shade else "·").ljust(self.cell_width), style=style)
        if weight < _VISIBLE:
            dot = "." if self.plain else "·"
            return Text(dot.rjust(3).ljust(self.cell_width), style="dim")
        number = f"{100 * weight:3.0f}".ljust(self.cell_width)
        return Text(number, style="" if self.plain else self._color(weight))

    def _strength(self, weight: float) -> float:
        return math.sqrt(weight / self.largest) if self.largest else 0.0

    def _shade(self, weight: float) -> int:
        return min(int(self._strength(weight) * len(SHADES)), len(SHADES) - 1)

    def _color(self, weight: float) -> Style:
        strength = self._strength(weight)
        red, green, blue = (
            round(pale + (strong - pale) * strength)
            for pale, strong in zip(_PALE, _STRONG, strict=True)
        )
        ink = "black" if strength > 0.6 else "bright_white"
        return Style(color=ink, bgcolor=Color.from_rgb(red, green, blue).name)

    def _legend(self) -> list[Text]:
        dot = "." if self.plain else "·"
        if self.numbers:
            legend = Text(f"percent of each row's weight; {dot} is less than {percent(_VISIBLE)}")
        else:
            legend = Text("weight from: ")
            for shade in (1, 3, 5, 7, 9):
                weight = self.largest * (shade / len(SHADES)) ** 2
                swatch = SHADES[shade] if self.plain else "  "
                legend.append(swatch, style="" if self.plain else self._color(weight))
                legend.append(f" {percent(weight)} %  ")
        left_out = len(self.matrix.columns) - len(self.columns)
        missing = [Text(f"{left_out} columns of least weight are left out; --csv has all")]
        return [legend, *(missing if left_out else [])]
