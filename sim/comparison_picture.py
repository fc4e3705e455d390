"""Draw where methods stand: accuracy by regime, and what it costs in traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import RunError
from sim.standings import Standing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#1c2b39"
_FAINT = "#c9d1d9"
_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f6d5f",
    "#6a51a3",
)
"""Told apart by the color-blind, too (after Okabe and Ito)."""
_MARKERS = "oDs^v"
"""The marker changes each time that the colors are used up."""


def draw_standings(
    regimes: Sequence[tuple[str, Sequence[Standing]]], path: Path, title: str
) -> None:
    """Draw a row for each regime: dots of mean and bottom decile, and accuracy against traffic.

    A method looks alike everywhere. One that receives nothing is a line across the traffic.

    Args:
        regimes: Each with its standings; nothing is drawn when there are none.
        path: Where to; its suffix chooses the format among those of matplotlib.
        title: Stands above it.

    Raises:
        RunError: The picture can't be written there.
    """
    if not regimes:
        return
    from matplotlib import figure  # noqa: PLC0415 - only a comparison's end needs it

    looks = _looks({each.method for _, found in regimes for each in found})
    heights = [0.9 + 0.26 * len(found) for _, found in regimes]
    picture = figure.Figure(figsize=(10, sum(heights) + 0.5), layout="constrained")
    rows = picture.subplots(len(regimes), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    picture.suptitle(title, fontsize=11, color=_INK, x=0.01, ha="left")
    for (regime, found), (left, right) in zip(regimes, rows, strict=True):
        _draw_dots(left, found, looks)
        left.set_title(regime, fontsize=10, color=_INK, loc="left")
        _draw_traffic(right, found, looks)
    rows[-1][0].set_xlabel(
        "accuracy, %: mean (full) with its deviation between seeds, bottom decile (hollow)",
        fontsize=8,
    )
    rows[-1][1].set_xlabel("MB received by a peer", fontsize=8)
    try:
        picture.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the picture can't be written: {error}") from error


_Looks = dict[str, tuple[str, str]]


def _looks(methods: Iterable[str]) -> _Looks:
    """Give each method a color and a marker."""
    return {
        name: (_COLORS[i % len(_COLORS)], _MARKERS[i // len(_COLORS) % len(_MARKERS)])
        for i, name in enumerate(sorted(methods))
    }


def _draw_dots(axes: Axes, found: Sequence[Standing], looks: _Looks) -> None:
    for row, standing in enumerate(found):
        color, marker = looks[standing.method]
        low, high = 100 * standing.bottom_decile, 100 * standing.mean
        axes.plot([low, high], [row, row], color=_FAINT, linewidth=1, zorder=1)
        axes.plot(low, row, marker, color=color, markerfacecolor="white", markersize=5)
        spread = None if standing.sd is None else 100 * standing.sd
        axes.errorbar(high, row, xerr=spread, fmt=marker, color=color, markersize=6, linewidth=3)
    axes.set_yticks(range(len(found)), [each.method for each in found], fontsize=8)
    for label, standing in zip(axes.get_yticklabels(), found, strict=True):
        label.set_color(looks[standing.method][0])
        label.set_fontstyle("normal" if standing.honest else "italic")
    axes.set_ylim(len(found) - 0.5, -0.5)
    _tidy(axes)


def _draw_traffic(axes: Axes, found: Sequence[Standing], looks: _Looks) -> None:
    """Draw mean accuracy over megabytes, on a logarithmic scale."""
    from matplotlib import ticker  # noqa: PLC0415 - as above

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    for standing in found:
        color, marker = looks[standing.method]
        high = 100 * standing.mean
        if standing.mb_received > 0:
            axes.plot(standing.mb_received, high, marker, color=color, markersize=6)
        else:
            axes.axhline(high, color=color, linestyle=":", linewidth=1.2)
    received = [each.mb_received for each in found if each.mb_received > 0] or [1.0]
    axes.set_xlim(min(received) / 1.6, max(received) * 1.6)
    axes.set_ylabel("mean accuracy, %", fontsize=8, color=_INK)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(axis="x", color=_FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
