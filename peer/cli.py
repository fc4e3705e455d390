"""`coterie peer`: arguments to settings to one running peer; errors to exit codes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from peer.config import PeerSettings, read_settings
from protocol.errors import CoterieError

DESCRIPTION = """\
Run one peer in the foreground: it owns a model and its data, learns from the neighbors in its
config, and lets them learn from it. Ctrl-C once stops it, with a goodbye to the others and a
checkpoint; started again, it goes on from there.
"""
EPILOG = """\
examples:
  coterie keygen keys/alice                       make alice's keys, once
  coterie peer alice.toml                         run for as long as the config says
  coterie peer alice.toml --rounds 200            stop after round 200
  coterie peer alice.toml --set algorithm.epsilon=0.5 --set training.learning_rate=0.003
  coterie peer dave.toml --rounds 1 --set algorithm.profile=newcomer --set personalization.kind=knn
                                                  a newcomer that doesn't train: it takes the models
                                                  of its best collaborators, remembers, predicts
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie peer`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the peer's TOML file")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds to do in all, 0 for ever (default: config)"
    )
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="write the connection facts here as JSON"
    )
    add_settings_argument(parser)
    parser.add_argument(
        "--keep-serving", action="store_true", help="serve on after the last round, until Ctrl-C"
    )
    parser.add_argument("--lifeline", type=int, metavar="FD", help=argparse.SUPPRESS)


def add_settings_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, which every command with a config file has."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override any setting of the config; may be given often",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `coterie peer`."""
    overrides = [*arguments.overrides]
    if arguments.rounds is not None:
        overrides.append(f"rounds={arguments.rounds}")
    settings = read_settings(arguments.config, PeerSettings, overrides)
    from peer.process import RunOptions, run_peer  # torch takes seconds: not before it is needed

    options = RunOptions(
        ready_file=arguments.ready_file,
        lifeline=arguments.lifeline,
        keep_serving=arguments.keep_serving,
    )
    run_peer(settings, arguments.config.resolve().parent, options)
    return 0


def set_up_logging() -> None:
    """Send the log to standard error, one line an event."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
    )


FILE_ERROR = 10
"""Exit code for files and system limits: no permission, no space, too many open files."""


def report_errors(command: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command; print an error that a user can act on as one line, and return its exit code.

    Args:
        command: Returns the exit code when all went well.
        debug: Whether to let errors through, with their traceback.
    """
    try:
        return command()
    except CoterieError as error:
        if debug:
            raise
        print(f"coterie: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        return 130
    except BrokenPipeError:  # the reader of our output is gone
        sys.stderr.close()
        return 141
    except OSError as error:
        if debug:
            raise
        place = f"{error.filename}: " if error.filename else ""
        print(f"coterie: {place}{error.strerror or error}", file=sys.stderr)  # noqa: T201
        return FILE_ERROR


def main() -> int:
    """Run `python -m peer`."""
    parser = argparse.ArgumentParser(
        prog="python -m peer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    add_arguments(parser)
    arguments = parser.parse_args()
    set_up_logging()
    return report_errors(lambda: run(arguments), debug=arguments.debug)
