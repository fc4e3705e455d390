"""How epsilon, M and beta change learning over the rounds: JSON and a picture.

Usage: bench_curves.py [RESULTS.json PICTURE.png]

Simulated peers of configs/fashion-mnist-permuted.toml in lockstep; accuracy is that of the mixture
on each peer's holdout, which is never trained on here (`final_full = 0`), mean over peers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from sim.records import Run

CONFIG = "configs/fashion-mnist-permuted.toml"
RESULTS = Path("configs/results/curves.json")
PICTURE = Path("configs/pictures/curves.png")
SEEDS = (1, 2, 3)
AT_ONCE = 2
COMMON = (
    "algorithm.final_full=0",
    "swarm.local_baseline=false",
    "partition.test_examples=20",
)
PANELS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "epsilon (probability of exploring)": {
        "0, the default": [],
        "0.1": ["algorithm.epsilon=0.1"],
        "0.3, the paper's": ["algorithm.epsilon=0.3"],
        "1": ["algorithm.epsilon=1.0"],
    },
    "M (neighbors sampled a round)": {
        "0, alone": ["algorithm.num_neighbors=0"],
        "1": ["algorithm.num_neighbors=1"],
        "3, the default": [],
        "6": ["algorithm.num_neighbors=6"],
        "15, everybody": ["algorithm.num_neighbors=15"],
    },
    "beta (share of the newest loss)": {
        "0.2": ["algorithm.beta=0.2"],
        "0.6, the default": [],
        "1": ["algorithm.beta=1.0"],
        "losses summed": ["algorithm.accumulate=true"],
    },
}

_INK, _FAINT = "#1c2b39", "#c9d1d9"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#7f6d5f", "#cc79a7")


def learn(changes: Sequence[str], seed: int) -> list[float]:
    """Return the accuracy after each round, mean over the peers, in percent."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "sim", "simulate", CONFIG, "--seed", str(seed)]
        command += ["--out", str(out)]
        for change in (*COMMON, *changes):
            command += ["--set", change]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        records = [peer.records for peer in Run.open(out).peers]
    return [
        100 * fmean(each.validation_accuracy for each in row) for row in zip(*records, strict=True)
    ]


def measure() -> dict[str, dict[str, list[float]]]:
    """Return the curve of each setting, by panel and label, mean over the seeds."""
    wanted = {tuple(changes) for panel in PANELS.values() for changes in panel.values()}
    jobs = [(changes, seed) for changes in sorted(wanted) for seed in SEEDS]
    with ThreadPoolExecutor(AT_ONCE) as pool:  # each waits for a process of its own
        found: dict[tuple[str, ...], list[list[float]]] = {changes: [] for changes in wanted}
        for (changes, seed), curve in zip(
            jobs, pool.map(lambda job: learn(*job), jobs), strict=True
        ):
            found[changes].append(curve)
            print(f"{', '.join(changes) or 'default'}, seed {seed}: {curve[-1]:.1f}", flush=True)
    return {
        title: {
            label: [round(fmean(values), 2) for values in zip(*found[tuple(changes)], strict=True)]
            for label, changes in panel.items()
        }
        for title, panel in PANELS.items()
    }


def draw(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    picture = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (title, curves) in zip(
        picture.subplots(1, len(panels), sharey=True), panels.items(), strict=True
    ):
        for color, (label, curve) in zip(_COLORS, curves.items(), strict=False):
            axes.plot(range(1, len(curve) + 1), curve, color=color, label=label, linewidth=1.6)
        axes.set_title(title, fontsize=10, color=_INK, loc="left")
        axes.set_xlabel("round", fontsize=9)
        axes.grid(color=_FAINT, linewidth=0.6)
        axes.legend(fontsize=8, frameon=False, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    picture.axes[0].set_ylabel("accuracy on holdouts, %", fontsize=9)
    picture.savefig(path, dpi=130)


def main(results: Path, picture: Path) -> None:
    panels = measure()
    results.write_text(json.dumps(panels, indent=1) + "\n")
    draw(panels, picture)
    for title, curves in panels.items():
        print(title)
        for label, curve in curves.items():
            after = ", ".join(f"{curve[n - 1]:.1f} after {n}" for n in (10, 30, len(curve)))
            print(f"  {label}: {after}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3] or (RESULTS, PICTURE)))
