"""`make bench`: run the benchmarks, print a table, write `bench.json`.

Usage: run.py [transport | swarm | scale | exploration | membership | knn | clustering]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import bench_clustering
import bench_exploration
import bench_knn
import bench_membership
import bench_scale
import bench_swarm
import bench_transport

SUITES = {
    "transport": bench_transport.rows,
    "swarm": bench_swarm.bench,
    "scale": bench_scale.bench,
    "exploration": bench_exploration.bench,
    "membership": bench_membership.bench,
    "knn": bench_knn.bench,
    "clustering": bench_clustering.bench,
}


def main(only: str | None) -> int:
    if only is not None and only not in SUITES:
        print(f"no benchmark is called {only!r}: known are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    rows: list[dict[str, object]] = []
    for name, suite in SUITES.items():
        if only in (None, name):
            print(f"measuring {name} ...", flush=True)
            rows += suite()
    table = Table("what", "value", "spread", "unit", "compared with", "command")
    for row in rows:
        low, high = row["spread"]  # type: ignore[misc]
        table.add_row(
            str(row["name"]),
            str(row["value"]),
            f"{low} to {high}",
            str(row["unit"]),
            str(row["compared_with"]),
            str(row["command"]),
        )
    Console(width=int(os.environ.get("COLUMNS", 140))).print(table)
    Path("bench.json").write_text(json.dumps(rows, indent=2) + "\n")
    print("wrote bench.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
