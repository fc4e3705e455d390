"""`make faults`: let the faults happen, print what was seen beside its bounds, write `faults.json`.

Usage: run.py [partition | broker | clock | churn | freeze | flood | poison]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from faults import FAULTS


def main(only: str | None) -> int:
    if only is not None and only not in FAULTS:
        print(f"no fault is called {only!r}: known are {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    rows = []
    for name, fault in FAULTS.items():
        if only in (None, name):
            print(f"{name}: {(fault.__doc__ or '').splitlines()[0]}", flush=True)
            rows += fault()
    table = Table("what", "seen", "at most", "unit", "holds")
    for each in rows:
        bound = "" if each["at_most"] is None else str(each["at_most"])
        holds = "yes" if each["holds"] else "NO"
        table.add_row(each["name"], str(each["value"]), bound, each["unit"], holds if bound else "")
    Console(width=120).print(table)
    Path("faults.json").write_text(json.dumps(rows, indent=2) + "\n")
    print("wrote faults.json")
    return 0 if all(each["holds"] for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
