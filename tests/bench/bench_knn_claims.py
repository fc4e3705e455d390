"""What is claimed of kNN-Per's memory, measured on Fashion-MNIST: a table, JSON and a picture.

Usage: bench_knn_claims.py [RESULTS.json PICTURE.png]

Nothing is chosen by test examples: λ by each peer's holdout, everything else is as it comes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers_knn import (
    DEFAULT,
    FOLDS,
    PARTS,
    PER_STEP,
    Row,
    World,
    compare_newcomers,
    compare_settings,
    compare_sizes,
    compare_strategies,
    remember,
)

from peer.interpolation import LAMBDAS, KnnSettings

RESULTS = Path("configs/results/knn-study.json")
PICTURE = Path("configs/pictures/knn-study.png")
WORLD = World(peers=40, alpha=0.3, steps=100)
SEEDS = (1, 2)
ALPHAS = (0.1, 0.3, 1.0)
SIZES = (5, 10, 25, 50, 100, 250)
NEAREST = range(5, 15)
SIGMAS = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)
SPACINGS = (0.1, 1.0, 10.0)
START, HALF = 100, 25
STEPS = (0, 5, 10, 15, 20, 25, 26, 28, 30, 33, 36, 40, 45, 50)

_INK, _FAINT = "#1c2b39", "#c9d1d9"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#7f6d5f", "#cc79a7", "#e69f00", "#56b4e9")


def measure(seed: int) -> dict[str, Any]:
    """Return the answers to all questions under one seed."""
    world = replace(WORLD, seed=seed)
    seconds, began_s = {}, time.perf_counter()

    def timed(name: str, answer: Any) -> Any:
        nonlocal began_s
        now_s = time.perf_counter()
        seconds[name], began_s = round(now_s - began_s, 1), now_s
        print(f"seed {seed}, {name}: {seconds[name]} s", flush=True)
        return answer

    peers = timed("training", remember(world, 0))
    sigmas = [KnnSettings(sigma=each) for each in SIGMAS]
    spacings = [KnnSettings(sigma=each, sigma_unit="spacing") for each in SPACINGS]
    nearest = [KnnSettings(k_nearest=each) for each in NEAREST]
    return {
        "seed": seed,
        "sizes": timed("sizes", compare_sizes(peers, SIZES)),
        "nearest": timed("nearest", compare_settings(peers, nearest)),
        "sigma": timed("sigma", compare_settings(peers, sigmas + spacings)),
        "shift": timed("shift", compare_strategies(peers, start=START, half=HALF, steps=STEPS)),
        "alphas": timed(
            "alphas",
            [
                {
                    "alpha": alpha,
                    **compare_settings(remember(replace(world, alpha=alpha), 0), [DEFAULT])[0],
                }
                for alpha in ALPHAS
            ],
        ),
        "newcomers": timed(
            "newcomers", compare_newcomers([remember(world, fold) for fold in range(FOLDS)])
        ),
        "seconds": seconds,
    }


def averaged(answers: Sequence[Any]) -> Any:
    """Return the mean over seeds of numbers at the same place of nested answers."""
    first = answers[0]
    if isinstance(first, dict):
        return {key: averaged([each[key] for each in answers]) for key in first}
    if isinstance(first, list):
        return [averaged(each) for each in zip(*answers, strict=True)]
    return first if isinstance(first, str) else sum(answers) / len(answers)


def best_lam(row: Row) -> float:
    """Return the λ that does best on the holdouts when it is the same for all peers."""
    curve = row["holdout_by_lam"]
    return LAMBDAS[max(range(len(curve)), key=curve.__getitem__)]


def show(means: dict[str, Any], console: Console) -> None:
    """Print a table for each question."""

    def table(title: str, key: str, rows: Sequence[Row], name: Callable[[Row], str]) -> None:
        found = Table(key, "best λ", "mean λ", *PARTS, title=title, title_justify="left")
        for row in rows:
            accuracies = (f"{100 * row[part]:.1f}" for part in PARTS)
            found.add_row(name(row), f"{best_lam(row):g}", f"{row['mean_lam']:.2f}", *accuracies)
        console.print(found)

    table("local data", "entries", means["sizes"], lambda row: f"{row['entries']:g}")
    table("skew", "alpha", means["alphas"], lambda row: f"{row['alpha']:g}")
    table("nearest", "k", means["nearest"], lambda row: f"{row['k_nearest']:g}")
    table("scale", "sigma", means["sigma"], lambda row: f"{row['sigma']:g} {row['sigma_unit']}")
    newcomers = Table("who", *PARTS, title="newcomers", title_justify="left")
    for who, found in means["newcomers"].items():
        newcomers.add_row(who, *(f"{100 * found[part]:.1f}" for part in PARTS))
    console.print(newcomers)
    shift = Table("step", *list(means["shift"])[1:], title="shift", title_justify="left")
    for values in zip(*means["shift"].values(), strict=True):
        shift.add_row(f"{values[0]:g}", *(f"{100 * value:.1f}" for value in values[1:]))
    console.print(shift)


def draw(means: dict[str, Any], path: Path) -> None:
    """Draw the shift, and accuracy by λ for each size, by k and by sigma."""
    picture = Figure(figsize=(11, 7.5), layout="constrained")
    (shift, sizes), (nearest, sigma) = picture.subplots(2, 2)
    steps, *lines = means["shift"].items()
    for color, (name, values) in zip((_INK, *_COLORS), lines, strict=False):
        style = "dotted" if name == "model" else "solid"
        _line(shift, steps[1], values, f"{name} alone" if name == "model" else name, color, style)
    shift.axvline(HALF, color=_FAINT, zorder=0)
    _finish(shift, "data change half-way", f"steps of {PER_STEP} new examples")
    for color, row in zip(_COLORS, means["sizes"], strict=False):
        _line(sizes, LAMBDAS, row["holdout_by_lam"], f"{row['entries']:g} entries", color)
    _finish(sizes, "blend on the holdouts, by local data", "λ, the same for all peers")
    for axes, key, rows in (
        (nearest, "k_nearest", means["nearest"]),
        (sigma, "sigma", means["sigma"][: len(SIGMAS)]),
    ):
        for color, part in zip((_INK, *_COLORS), PARTS, strict=False):
            values = [row[part] for row in rows]
            style = "dotted" if part == "model" else "solid"
            _line(axes, [row[key] for row in rows], values, part, color, style)
    sigma.set_xscale("log")
    _finish(nearest, "how many speak", "k")
    _finish(sigma, "how far they are heard", "sigma, in units of distance")
    picture.savefig(path, dpi=130)


def _line(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[float],
    name: str,
    color: str,
    style: str = "solid",
) -> None:
    axes.plot(places, [100 * value for value in values], label=name, color=color, ls=style, lw=1.6)


def _finish(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, fontsize=10, color=_INK, loc="left")
    axes.set_xlabel(below, fontsize=8, color=_INK)
    axes.set_ylabel("accuracy, %", fontsize=8, color=_INK)
    axes.tick_params(labelsize=8, colors=_INK)
    axes.grid(color=_FAINT, lw=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)


def main(results: Path, picture: Path) -> None:
    torch.set_num_threads(1)
    answers = [measure(seed) for seed in SEEDS]
    means = averaged(answers)
    show(means, Console(width=100))
    setting = {"peers": WORLD.peers, "alpha": WORLD.alpha, "steps": WORLD.steps, "seeds": SEEDS}
    results.write_text(json.dumps({"setting": setting, "mean": means, "by_seed": answers}) + "\n")
    draw(means, picture)
    print(f"wrote {results} and {picture}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3] or (RESULTS, PICTURE)))
