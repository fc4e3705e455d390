"""Run folders as real peers write them, made up for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def record_line(round_number: int, weights: Mapping[str, float], **others: Any) -> str:
    """Return one line of a record, line feed included."""
    line: dict[str, Any] = {
        "round": round_number,
        "time_s": 0.5 * (round_number + 1),
        "loss": 2.0 / (round_number + 1),
        "losses": dict.fromkeys(weights, 1.0),
        "weights": dict(weights),
        "validation_accuracy": min(0.5 + 0.05 * round_number, 0.95),
        "sampled": [],
        "neighbors": len(weights) - 1,
        "bytes_sent": 1_000_000 * (round_number + 1),
        "bytes_received": 2_000_000 * (round_number + 1),
        "seconds": {"fetch": 0.1, "measure": 0.1, "total": 0.5},
        "gradients": {"applied": 2, "stale": 1},
    }
    return json.dumps(line | others) + "\n"


def grouped_weights(names: Sequence[str], groups: Sequence[int], own: str, share: float) -> dict[
    str, float
]:  # fmt: skip
    """Return weights of which `share` is spread evenly over the own group, own model included."""
    group = groups[names.index(own)]
    inside = [name for name, other in zip(names, groups, strict=True) if other == group]
    outside = [name for name in names if name not in inside]
    if not outside:
        share = 1.0
    weights = dict.fromkeys(inside, share / len(inside))
    return weights | dict.fromkeys(outside, (1 - share) / max(len(outside), 1))


def write_swarm(folder: Path, groups: Sequence[int], rounds: int = 10) -> list[str]:
    """Write `swarm.json` for one peer per entry of `groups`; return the peers' names."""
    names = [f"peer-{i:02d}" for i in range(len(groups))]
    folder.mkdir(parents=True, exist_ok=True)
    swarm = {
        "name": "digits",
        "rounds": rounds,
        "seed": 7,
        "peers": names,
        "label_groups": list(groups),
        "groups": [f"labels {5 * g}-{5 * g + 4}" for g in groups],
    }
    (folder / "swarm.json").write_text(json.dumps(swarm))
    return names


def write_records(folder: Path, lines: Sequence[str]) -> None:
    """Append lines to a peer's record."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "record.jsonl").open("a") as file:
        file.writelines(lines)


def write_result(folder: Path, name: str, **others: Any) -> None:
    """Write what a peer scored."""
    result: dict[str, Any] = {
        "name": name,
        "rounds": 10,
        "num_test": 50,
        "num_train": 200,
        "accuracy": 0.9,
        "own_accuracy": 0.85,
        "local_accuracy": 0.8,
        "weights": {name: 1.0},
        "bytes_sent": 11_000_000,
        "bytes_received": 12_000_000,
        "seconds": 5.5,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result | others))


def write_run(folder: Path, groups: Sequence[int], rounds: int = 10) -> list[str]:
    """Write a finished run whose weights move from even to 90 % inside the own label group."""
    names = write_swarm(folder, groups, rounds)
    for name in names:
        size = groups.count(groups[names.index(name)]) / len(names)
        shares = [size + (0.9 - size) * r / max(rounds - 1, 1) for r in range(rounds)]
        write_records(
            folder / "peers" / name,
            [
                record_line(r, grouped_weights(names, groups, name, share))
                for r, share in enumerate(shares)
            ],
        )
        write_result(folder / "peers" / name, name)
    return names
