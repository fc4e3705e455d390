"""Draw the study of one-shot clustered learning: error against examples, both on log scales."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import RunError
from sim.study_rows import Row
from sim.variants import (
    CLUSTERINGS,
    IFCA_NEAR,
    IFCA_RANDOM,
    INEXACT_STEPS,
    LOCAL,
    ORACLE,
    POOLED,
    REFINEMENTS,
    inexact,
    refined,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#1c2b39"
_FAINT = "#c9d1d9"
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a51a3")
"""Told apart by the color-blind, too (after Okabe and Ito)."""
_MARKERS = "osD^vPX"  # lines that lie on each other show by their markers' sizes
_BOUNDS = {LOCAL: (0, (1, 1)), ORACLE: (0, (5, 2)), POOLED: "solid"}
"""Drawn in every panel, without color."""

_PANELS = {
    "one round: what clusters": tuple(CLUSTERINGS),
    "more work: rough solves, rounds after it, IFCA": (
        *map(inexact, INEXACT_STEPS),
        *map(refined, REFINEMENTS),
        IFCA_RANDOM,
        IFCA_NEAR,
    ),
}


def draw_study(rows: Sequence[Row], path: Path) -> None:
    """Draw two panels for each kind of problem: the clusterings, and what costs more than a round.

    Args:
        rows: Of all variants, kind by kind.
        path: Where to; its suffix chooses the format among those of matplotlib.

    Raises:
        RunError: The picture can't be written there.
    """
    from matplotlib import figure  # noqa: PLC0415 - only a study's end needs it

    kinds = [(kind, list(group)) for kind, group in groupby(rows, lambda row: row.kind)]
    picture = figure.Figure(figsize=(12, 4.2 * len(kinds)), layout="constrained")
    panels = picture.subplots(len(kinds), len(_PANELS), squeeze=False, sharey="row")
    for (kind, found), line in zip(kinds, panels, strict=True):
        for axes, (title, names) in zip(line, _PANELS.items(), strict=True):
            _draw_panel(axes, found, names)
            if kind == kinds[0][0]:
                axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
            axes.set_title(f"{kind}: {title}", fontsize=10, color=_INK, loc="left")
        line[0].set_ylabel("normalized MSE", fontsize=8, color=_INK)
    for axes in panels[-1]:
        axes.set_xlabel("examples of each peer", fontsize=8, color=_INK)
    try:
        picture.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the picture can't be written: {error}") from error


def _draw_panel(axes: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    from matplotlib import ticker  # noqa: PLC0415 - as above

    axes.set_xscale("log")
    axes.set_yscale("log")
    for name, dashes in _BOUNDS.items():
        axes.plot(
            *_line(rows, name), color=_INK, linestyle=dashes, linewidth=1, label=name, zorder=3
        )
    for place, name in enumerate(names):
        axes.plot(
            *_line(rows, name),
            color=_COLORS[place],
            marker=_MARKERS[place],
            markersize=9 - place,
            markerfacecolor="none",
            linewidth=2.6 - 0.3 * place,
            label=name,
        )
    sizes = sorted({row.examples for row in rows})
    axes.xaxis.set_major_locator(ticker.FixedLocator(sizes))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_tick_params(labelleft=True)
    axes.grid(color=_FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _line(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    found = [row for row in rows if row.variant == name]
    return [row.examples for row in found], [row.error for row in found]
