"""`coterie status`: how running peers are doing, asked as an operator."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from peer.record import READY_FILE
from protocol.errors import ConfigError, PeerUnreachable, ProtocolError, RunError
from protocol.identity import KeyPair, read_key_pair, read_public_key
from protocol.messages import PeerId
from protocol.status import PeerStatus
from protocol.transport.inquiry import ask_status
from protocol.transport.interface import Address
from protocol.transport.sockets import Context, make_context
from sim.matrix import WeightMatrix
from sim.plan import OPERATOR_KEY
from sim.records import Run
from sim.report_table import clustering_remark
from sim.terminal import draw_matrix, new_table

DESCRIPTION = """\
Ask a running peer for its round, the peers that it knows, its collaboration weights and its
counters, and why it refuses whom. With --crawl, ask the peers that it knows as well, and show the
weight matrix as it is now. Whoever asks needs a key that lies in the peer's `network.operators`
folder; the peers of a swarm answer to the operator.key of their run folder.
"""
EPILOG = """\
examples:
  coterie status runs/latest                      all peers of a running swarm
  coterie status state/alice --key ops.key        a peer on this machine, by its state folder
  coterie status tcp://10.0.0.5:7001 --peer alice.pub --key ops.key --crawl
"""
_AT_ONCE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `coterie status`."""
    parser.add_argument(
        "target",
        metavar="ENDPOINT",
        help="tcp://HOST:PORT, or the folder of a running swarm or peer on this machine",
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="the operator's secret key")
    parser.add_argument(
        "--peer", type=Path, metavar="FILE", help="with tcp://: the public key of the peer there"
    )
    parser.add_argument("--crawl", action="store_true", help="ask all members, too")
    parser.add_argument("--json", action="store_true", help="print what came, as JSON")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="wait so long (default: 5)"
    )


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Run `coterie status`.

    Raises:
        ConfigError: The target can't be asked as given.
        IdentityError: A key can't be used.
        ProtocolError: The peer is unreachable or refuses.
        RunError: Nothing runs there.
    """
    console = console or Console()
    addresses, key_path, is_swarm = _targets(arguments)
    if arguments.timeout <= 0:
        raise ConfigError(f"--timeout {arguments.timeout:g} must be more than 0")
    if key_path is None:
        raise ConfigError(
            "--key FILE is missing: the secret key of an operator, whose .pub file lies in the "
            "peer's network.operators folder"
        )
    pair = read_key_pair(key_path)
    crawl = arguments.crawl or is_swarm
    answers = asyncio.run(_ask_all(pair, addresses, arguments.timeout, crawl=crawl))
    statuses = {key: found for key, found in answers.items() if isinstance(found, PeerStatus)}
    errors = [error for error in answers.values() if isinstance(error, ProtocolError)]
    if not statuses:
        if len(errors) > 1:
            raise PeerUnreachable(f"none of {len(errors)} peers answered; the first: {errors[0]}")
        raise errors[0]
    if arguments.json:
        print(json.dumps([msgspec.to_builtins(status) for status in statuses.values()]))  # noqa: T201
        return 0
    if crawl:
        _print_matrix(statuses, console)
    else:
        _print_peer(next(iter(statuses.values())), console)
    for error in errors:
        console.print(f"no answer: {error}", style="yellow", markup=False, highlight=False)
    return 0


def _targets(arguments: argparse.Namespace) -> tuple[list[Address], Path | None, bool]:
    """Return whom to ask, with which key, and whether they are a whole swarm."""
    target: str = arguments.target
    if target.startswith("tcp://"):
        if arguments.peer is None:
            raise ConfigError(
                f"--peer FILE is missing: the public key of the peer at {target}, so that nobody "
                "else can answer in its place"
            )
        key = read_public_key(arguments.peer)
        return (
            [Address(name=arguments.peer.stem, endpoint=target, public_key=key)],
            (arguments.key),
            False,
        )
    folder = Path(target)
    if (folder / READY_FILE).exists():
        return [_address(folder)], arguments.key, False
    recorded = Run.open(target)
    homes = [recorded.folder / "peers" / name for name in recorded.names]
    ready = [home for home in homes if (home / READY_FILE).exists()]
    key_path = arguments.key or recorded.folder / OPERATOR_KEY
    if not ready:
        raise RunError(f"{recorded.folder}: no peer has been ready: is it a swarm that runs?")
    return [_address(home) for home in ready], key_path, True


def _address(home: Path) -> Address:
    path = home / READY_FILE
    try:
        facts: Mapping[str, Any] = json.loads(path.read_text())
        return Address(
            name=facts["name"], endpoint=facts["endpoint"], public_key=facts["public_key"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} can't be read ({error}): start the peer again") from error


async def _ask_all(
    pair: KeyPair, addresses: Sequence[Address], timeout_s: float, *, crawl: bool
) -> dict[str, PeerStatus | ProtocolError]:
    """Ask peers, and with `crawl` the members that they name, each once; by public key."""
    context = make_context()
    answers: dict[str, PeerStatus | ProtocolError] = {}
    at_once = asyncio.Semaphore(_AT_ONCE)
    try:
        waiting = {address.public_key: address for address in addresses}
        while waiting:
            asked = [
                _ask(context, pair, address, timeout_s, at_once) for address in waiting.values()
            ]
            found = dict(zip(waiting, await asyncio.gather(*asked), strict=True))
            answers |= found
            members = [
                Address(name=member.name, endpoint=member.endpoint, public_key=member.public_key)
                for status in found.values()
                if crawl and isinstance(status, PeerStatus)
                for member in status.members
            ]
            waiting = {each.public_key: each for each in members if each.public_key not in answers}
    finally:
        context.destroy(linger=0)
    return answers


async def _ask(
    context: Context,
    pair: KeyPair,
    address: Address,
    timeout_s: float,
    at_once: asyncio.Semaphore,
) -> PeerStatus | ProtocolError:
    async with at_once:
        try:
            return await ask_status(context, pair, address, timeout_s)
        except ProtocolError as error:
            return error


def _print_peer(status: PeerStatus, console: Console) -> None:
    rounds = f" of {status.rounds}" if status.rounds else ""
    loss = "unknown" if status.loss is None else f"{status.loss:.3f}"
    console.print(
        f"{status.name} at {status.endpoint}, federation {status.federation}: "
        f"round {status.round_number}{rounds}, loss {loss}, up {status.running_s:.0f} s, "
        f"start {status.incarnation + 1}",
        style="bold",
        markup=False,
        highlight=False,
    )
    weights = dict(status.weights)
    table = new_table(console)
    for heading in ("member", "state", "weight", "endpoint", "why"):
        table.add_column(heading)
    table.add_row("itself", "", _percent(weights.get(status.peer_id)), status.endpoint, "")
    for member in status.members:
        weight = _percent(weights.get(member.peer_id))
        table.add_row(member.name, member.state, weight, member.endpoint, member.reason)
    console.print(table)
    for refused in status.refused_keys:
        console.print(
            f"refused at the door {refused.times} times: key {refused.public_key}, which is not in "
            "the allow-list",
            style="yellow",
            markup=False,
            highlight=False,
        )
    console.print(_counters([status], console))


def _percent(weight: float | None) -> str:
    return "" if weight is None else f"{100 * weight:.0f} %"


def _counters(statuses: Sequence[PeerStatus], console: Console) -> Table:
    """A table of counters that aren't zero, summed over peers."""
    total: dict[str, int] = {}
    for status in statuses:
        for name, value in status.counters:
            total[name] = total.get(name, 0) + value
    table = new_table(console)
    table.add_column("counter")
    table.add_column("since the start", justify="right")
    for name, value in total.items():
        if value:
            table.add_row(name.replace("_", " "), f"{value:,}")
    return table


def _print_matrix(answers: Mapping[str, PeerStatus], console: Console) -> None:
    statuses = sorted(answers.values(), key=lambda status: status.name)
    names: dict[PeerId, str] = {status.peer_id: status.name for status in statuses}
    for status in statuses:
        for member in status.members:
            names.setdefault(member.peer_id, member.name)
    asked = {status.peer_id for status in statuses}
    ids = [
        *(status.peer_id for status in statuses),
        *sorted(set(names) - asked, key=names.__getitem__),
    ]
    values = np.zeros((len(statuses), len(ids)))
    for row, status in enumerate(statuses):
        if not status.weights:
            values[row] = np.nan
        for peer_id, weight in status.weights:
            if peer_id in names:
                values[row, ids.index(peer_id)] = weight
    matrix = WeightMatrix(
        rows=tuple(status.name for status in statuses),
        columns=tuple(names[peer_id] for peer_id in ids),
        values=values,
        rounds=tuple(status.round_number for status in statuses),
        label_groups=None,
        descriptions={},
    )
    console.print(f"{len(statuses)} peers answered", style="bold", highlight=False)
    console.print(draw_matrix(matrix, console))
    table = new_table(console)
    for heading in ("peer", "round", "loss", "members", "of them unreachable", "up"):
        table.add_column(heading)
    for status in statuses:
        down = [member.name for member in status.members if member.reason]
        table.add_row(
            status.name,
            str(status.round_number),
            "" if status.loss is None else f"{status.loss:.3f}",
            str(status.num_members),
            ", ".join(down[:5]) + (" ..." if len(down) > 5 else ""),
            f"{status.running_s:.0f} s",
        )
    console.print(table)
    if any(each.clustering for each in statuses):
        digests = {
            f"{each.name} ({each.peer_id[:8]})": each.clustering or None for each in statuses
        }
        console.print(clustering_remark(digests), highlight=False, markup=False)
    console.print(_counters(statuses, console))
