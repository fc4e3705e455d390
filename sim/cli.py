"""The `coterie` command."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import peer
import protocol
from peer.cli import report_errors, set_up_logging
from protocol.errors import CoterieError

DESCRIPTION = """\
Coterie: personalized learning among peers, with no server. Each peer keeps its own model and data,
finds out whose models do well on its data, and learns with them.
"""
EPILOG = """\
examples:
  coterie swarm configs/digits.toml      eight peers on this machine learn handwriting
  coterie inspect runs/latest            who collaborates with whom
  coterie status runs/latest             how its peers are doing now
  coterie simulate configs/digits.toml   the same peers in one process, reproducibly
  coterie compare configs/compare-digits.toml
                                         FedeRiCo beside other methods
  coterie study odcl                     one round of clustering, where the truth is known
  coterie peer alice.toml                one peer, by hand
  coterie remember alice.toml new.npz    give it new examples while it runs

exit codes: 0 all went well, 1 unforeseen, 2 settings or usage, 3 data or model, 4 keys, 5 address
in use, 6 checkpoint, 7 swarm processes, 8 run folder, 9 protocol, 10 files and system limits,
130 what Ctrl-C stopped
"""

# A module is imported when its command is given: to import all of them takes a tenth of a second.
_COMMANDS = {
    "swarm": ("sim.swarm", "run many peers on this machine and report"),
    "simulate": ("sim.simulate", "run many peers in one process, reproducibly, and report"),
    "compare": ("sim.compare", "compare methods in several regimes, tuned alike"),
    "study": ("sim.study", "study an algorithm on problems of which the truth is known"),
    "peer": ("peer.cli", "run one peer in the foreground"),
    "inspect": ("sim.inspect", "show who collaborates with whom in a run"),
    "status": ("sim.status", "ask running peers how they are doing"),
    "remember": ("sim.remember", "give a peer new labelled examples of its own"),
    "keygen": ("sim.keygen", "make a peer's keys"),
}


def main() -> int:
    """Run the `coterie` command."""
    parser, arguments = _parse(sys.argv[1:])
    if arguments.command is None:
        parser.print_help()
        return 2
    set_up_logging()
    return report_errors(lambda: _run(arguments), debug=arguments.debug)


def _parse(argv: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="coterie",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in argv:
            module = _module(module_name)
            command.description, command.epilog = module.DESCRIPTION, module.EPILOG
            module.add_arguments(command)
    return parser, parser.parse_args(argv)


def _run(arguments: argparse.Namespace) -> int:
    _check_neighborhood()
    code: int = _module(_COMMANDS[arguments.command][0]).run(arguments)
    return code


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _version() -> str:
    try:
        return f"coterie {importlib.metadata.version('coterie')}"
    except importlib.metadata.PackageNotFoundError:
        return "coterie, not installed"


def _check_neighborhood() -> None:
    """Refuse to run when another distribution's `peer` or `protocol` shadows ours."""
    places = {Path(str(module.__file__)).parents[1] for module in (peer, protocol)}
    places.add(Path(__file__).parents[1])
    if len(places) > 1:
        raise CoterieError(
            "another package named peer or protocol is installed and shadows Coterie's: "
            f"{', '.join(sorted(map(str, places)))}; use an environment of its own"
        )
