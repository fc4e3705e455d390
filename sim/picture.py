"""Draw the weight matrix as a picture.

matplotlib is imported on the first use, and only through its object interface: a peer that never
draws doesn't load it, and no global state is touched.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import RunError
from sim.matrix import WeightMatrix
from sim.terminal import percent, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUMBERED = 20
"""Up to so many peers, each cell has room for its weight in percent."""

_VISIBLE = 0.005
"""A number that would read 0 is left out."""

_COLORS = "GnBu"
_INK = "#1c2b39"
_MISSING = "#dedede"
_WHITE_INK = 0.6
"""Cells beyond this part of the color scale carry white numbers."""


def draw_picture(matrix: WeightMatrix, path: Path, title: str) -> None:
    """Draw a weight matrix, ordered and marked by label group, as a picture.

    Colors follow the root of the weight, so that small weights show beside a large one. A row
    without a record is gray.

    Args:
        matrix: What to draw.
        path: Where to; its suffix chooses the format among those of matplotlib.
        title: Stands above it.

    Raises:
        RunError: The picture can't be written there, or not in that format.
    """
    from matplotlib import colors, figure  # noqa: PLC0415 - see the module's docstring

    matrix = matrix.by_group()
    height, width = matrix.values.shape
    cell_in = 0.4 if width <= _NUMBERED else 0.14
    size_in = (max(cell_in * width, 2.0), max(cell_in * height, 0.4))
    picture = figure.Figure(figsize=size_in)
    axes = picture.add_axes((0.0, 0.0, 1.0, 1.0), facecolor=_MISSING)
    norm = colors.PowerNorm(0.5, vmin=0.0, vmax=max(matrix.largest(), _VISIBLE))
    image = axes.imshow(matrix.values, cmap=_COLORS, norm=norm)
    _name_peers(axes, matrix, font_size=8 if width <= _NUMBERED else 6)
    _mark_groups(axes, matrix)
    if width <= _NUMBERED:
        _write_numbers(axes, matrix)
    bar_axes = picture.add_axes((0.0, -0.75 / size_in[1], 1.0, 0.1 / size_in[1]))
    bar = picture.colorbar(image, cax=bar_axes, orientation="horizontal")
    ticks = [t for t in (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if t <= matrix.largest()]
    bar.set_ticks([0.0, *ticks], labels=[percent(tick, 0) for tick in (0.0, *ticks)])
    bar.set_label("percent of the row's weight", fontsize=8, color=_INK)
    bar_axes.tick_params(labelsize=7, length=2, colors=_INK)
    axes.set_title(title, fontsize=10, color=_INK, loc="left", pad=8)
    try:
        picture.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.15)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the picture can't be written: {error}") from error


def _name_peers(axes: Axes, matrix: WeightMatrix, font_size: int) -> None:
    shortened = short_names(matrix.columns)
    columns = [shortened[name] for name in matrix.columns]
    axes.set_xticks(range(len(columns)), columns, fontsize=font_size)
    if max(map(len, columns)) > 3:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_yticks(range(len(matrix.rows)), matrix.rows, fontsize=font_size)
    axes.tick_params(length=0, colors=_INK)
    axes.set_xlabel("... on the model of", fontsize=8, color=_INK)
    axes.set_ylabel("the weight of ...", fontsize=8, color=_INK)
    for spine in axes.spines.values():
        spine.set_color(_INK)


def _mark_groups(axes: Axes, matrix: WeightMatrix) -> None:
    """Draw lines between label groups, and say at the right side what each stands for."""
    if matrix.label_groups is None:
        return
    for names, draw_line in ((matrix.rows, axes.axhline), (matrix.columns, axes.axvline)):
        for position, (before, after) in enumerate(pairwise(names)):
            if matrix.group(before) != matrix.group(after):
                draw_line(position + 0.5, color=_INK, linewidth=0.9)
    for group, members in groupby(range(len(matrix.rows)), lambda i: matrix.group(matrix.rows[i])):
        rows = list(members)
        axes.annotate(
            matrix.describe(group),
            (1.0, (rows[0] + rows[-1]) / 2),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_INK,
        )


def _write_numbers(axes: Axes, matrix: WeightMatrix) -> None:
    for row, weights in enumerate(matrix.values.tolist()):
        for column, weight in enumerate(weights):
            if weight >= _VISIBLE:  # NaN compares as False
                strong = weight > _WHITE_INK**2 * matrix.largest()
                axes.text(
                    column,
                    row,
                    percent(weight, 0),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if strong else _INK,
                )
