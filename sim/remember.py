"""`coterie remember`: give a running peer new labelled examples of its own."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from peer.collection import load_own, read_new
from peer.config import PeerSettings, read_settings, resolve
from peer.inbox import put
from protocol.errors import ConfigError, DataError

DESCRIPTION = """\
Check files of new labelled examples and put them, all or none, into the folder that a peer watches
(personalization.watch). A running peer remembers them at once and trains on them from its next
round; one that isn't running does so when it is started. A file is an .npz with the arrays
train_inputs and train_labels, as the peer's own data could be.
"""
EPILOG = """\
examples:
  coterie remember alice.toml today.npz yesterday.npz
  coterie remember runs/latest/peers/peer-03 new.npz    a peer of a swarm, by its folder
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie remember`."""
    parser.add_argument(
        "peer", type=Path, metavar="PEER", help="the peer's TOML file, or its folder in a swarm"
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="an .npz file")


def run(arguments: argparse.Namespace) -> int:
    """Run `coterie remember`.

    Raises:
        ConfigError: The peer watches no folder, or is none.
        DataError: A file isn't for this peer; then none is put.
    """
    config = arguments.peer / "config.toml" if arguments.peer.is_dir() else arguments.peer
    settings = read_settings(config, PeerSettings)
    watch = settings.personalization.watch
    if not watch:
        raise ConfigError(
            f"{config}: {settings.name} watches no folder for new examples: set "
            'personalization.kind = "knn" and personalization.watch = "FOLDER"'
        )
    base = config.resolve().parent
    paths = [base, *(resolve(base, path) for path in settings.import_paths)]
    dataset = load_own(settings, base, paths)
    counts = {}
    for path in arguments.files:
        if path in counts:
            raise DataError(f"{path} is named twice: an example counts as often as it is given")
        examples = read_new(path, dataset.input_shape, dataset.num_classes, settings.pool)
        counts[path] = len(examples)
    console = Console()
    for path, count in counts.items():
        placed = put(path, resolve(base, watch))
        console.print(
            f"{settings.name}: {count} examples of {path}, as {placed.name}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return 0
