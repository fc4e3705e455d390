"""`coterie keygen`: make a peer's keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from protocol.errors import ConfigError
from protocol.identity import generate_key_pair, write_key_pair

DESCRIPTION = """\
Make a key pair: NAME.key, the secret key, readable by you alone, and NAME.pub, the public key,
which everybody who should let this peer in puts into their allow-list folder.
"""
EPILOG = """\
examples:
  coterie keygen keys/alice        writes keys/alice.key and keys/alice.pub
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie keygen`."""
    parser.add_argument("name", type=Path, metavar="NAME", help="path and name of the peer")


def run(arguments: argparse.Namespace) -> int:
    """Run `coterie keygen`."""
    pair = generate_key_pair()
    stem: Path = arguments.name
    if not stem.name:
        raise ConfigError(f"{str(stem)!r} names no peer: give a path such as keys/alice")
    secret, public = stem.with_name(f"{stem.name}.key"), stem.with_name(f"{stem.name}.pub")
    write_key_pair(pair, secret, public)
    print(f"{secret}: keep it secret\n{public}: give it to your peers\npeer id {pair.peer_id}")  # noqa: T201
    return 0
