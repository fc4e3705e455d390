"""The options that all commands have in common that run a swarm from a config."""

from __future__ import annotations

import argparse
from pathlib import Path

from peer.cli import add_settings_argument


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--peers`, `--rounds`, `--seed`, `--out` and `--set`."""
    parser.add_argument("--peers", type=int, metavar="K", help="number of peers")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each peer")
    parser.add_argument("--seed", type=int, metavar="SEED", help="seed of data and sampling")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="the run folder (default: runs/TIME-NAME)"
    )
    add_settings_argument(parser)


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """Return what these options override, as `key=value`."""
    given = {key: getattr(arguments, key) for key in ("peers", "rounds", "seed")}
    return [
        *arguments.overrides,
        *(f"{key}={value}" for key, value in given.items() if value is not None),
    ]
