"""Lay out a run folder: each peer's slice, keys and config, so that peers need nothing else.

::

    RUN/settings.toml     the full settings: `coterie swarm RUN/settings.toml` does it again, and
                          `coterie simulate RUN/settings.toml` in one process
    RUN/swarm.json        names, rounds, seed, label groups; written last
    RUN/keys/             the allow-list, NAME.pub of every peer
    RUN/operator.key      may ask the peers for their status, as RUN/operators/ allows it
    RUN/neighbors.toml    endpoint of every peer, once all listen
    RUN/peers/NAME/       config.toml, secret.key, data.npz, then log.txt, ready.json,
                          record.jsonl, checkpoint.safetensors, result.json

The folder of a simulation has no keys, no endpoints, and of each peer only what it recorded.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli_w

from peer.config import resolve
from peer.files import replacing
from peer.record import write_json
from peer.sources import load_source, save_npz
from protocol.errors import ConfigError, RunError
from protocol.identity import generate_key_pair, write_key_pair
from sim.experiment import SwarmSettings
from sim.partition import Slice, partition

logger = logging.getLogger(__name__)

RUNS = Path("runs")
SETTINGS_FILE = "settings.toml"
SWARM_FILE = "swarm.json"
NEIGHBORS_FILE = "neighbors.toml"
KEYS = "keys"
OPERATORS = "operators"
OPERATOR_KEY = "operator.key"
"""In the run folder: the key that may ask its peers for their status."""


def make_run(settings: SwarmSettings, base: Path, out: Path | None) -> Path:
    """Load and partition the data and lay out a new run folder for real peers.

    Args:
        settings: The swarm's.
        base: The config file's folder, which relative paths start from.
        out: The folder to make; None makes one under `runs/` with the time and name.

    Returns:
        The run folder.

    Raises:
        ConfigError: Settings don't fit the data, the folder is taken, or the data are to change.
        DataError: The data can't be loaded.
    """
    slices = load_slices(settings, base)
    drifting = sum(part.later is not None for part in slices)
    if drifting:
        raise ConfigError(
            f"the data of {drifting} peers are to change half-way, and those of real peers don't: "
            "use coterie simulate, or set partition.drifting = 0"
        )
    folder = _new_folder(settings.name, out)
    settings = _rerunnable(settings, base)
    _write_settings(folder, settings)
    write_key_pair(generate_key_pair(), folder / OPERATOR_KEY, folder / OPERATORS / "operator.pub")
    for name, part in zip(peer_names(settings.peers), slices, strict=True):
        _lay_out_peer(folder, name, part, settings)
    _write_swarm(folder, settings, slices)
    return folder


def make_simulation_run(
    settings: SwarmSettings, base: Path, out: Path | None, slices: Sequence[Slice]
) -> Path:
    """Lay out a new run folder for simulated peers.

    Args:
        settings: The swarm's.
        base: The config file's folder, which relative paths start from.
        out: The folder to make; None makes one under `runs/` with the time and name.
        slices: What the peers have.

    Returns:
        The run folder.

    Raises:
        ConfigError: The folder is taken.
    """
    folder = _new_folder(settings.name, out)
    _write_settings(folder, _rerunnable(settings, base))
    for name in peer_names(settings.peers):
        (folder / "peers" / name).mkdir(parents=True)
    _write_swarm(folder, settings, slices)
    return folder


def load_slices(settings: SwarmSettings, base: Path) -> list[Slice]:
    """Load the data set and partition it among the peers.

    Raises:
        ConfigError: Settings don't fit the data.
        DataError: The data can't be loaded.
    """
    source = settings.data
    dataset = load_source(
        str(resolve(base, source)) if source.endswith(".npz") else source,
        folder=resolve(base, settings.data_folder) if settings.data_folder else None,
        download=settings.download,
        num_classes=settings.classes or None,
        pool=settings.pool,
        import_paths=import_paths(settings, base),
        as_stored=True,
    )
    rng = np.random.default_rng(settings.seed)
    return partition(dataset, settings.peers, settings.partition, rng)


def import_paths(settings: SwarmSettings, base: Path) -> list[Path]:
    """Return the folders to look in for the user's own modules."""
    return [base, *(resolve(base, path) for path in settings.import_paths)]


def peer_names(count: int) -> list[str]:
    """Return the peers' names, which sort as they are numbered."""
    digits = max(2, len(str(count - 1)))
    return [f"peer-{index:0{digits}d}" for index in range(count)]


def read_run_settings(folder: Path) -> Path:
    """Return the settings file of a run folder.

    Raises:
        RunError: It isn't a swarm's run folder.
    """
    path = folder / SETTINGS_FILE
    if not path.is_file() or not (folder / SWARM_FILE).is_file():
        raise RunError(f"{folder} is not the run folder of a swarm: it lacks {SETTINGS_FILE}")
    if not (folder / KEYS).is_dir():
        raise RunError(
            f"{folder} is the run folder of a simulation, which leaves no checkpoints: do it again "
            f"with coterie simulate {path}"
        )
    return path


def write_toml(path: Path, tree: Mapping[str, Any]) -> None:
    """Write a TOML file whole or not at all."""
    with replacing(path) as file:
        file.write(tomli_w.dumps(tree).encode())


def _lay_out_peer(folder: Path, name: str, part: Slice, settings: SwarmSettings) -> None:
    home = folder / "peers" / name
    home.mkdir(parents=True)
    save_npz(part.dataset, home / "data.npz")
    write_key_pair(generate_key_pair(), home / "secret.key", folder / KEYS / f"{name}.pub")
    processes = settings.swarm
    config = {
        "name": name,
        "data": "data.npz",
        "classes": part.dataset.num_classes,
        "model": settings.model,
        "model_seed": settings.model_seed,
        "seed": settings.seed,
        "rounds": settings.rounds,
        "import_paths": settings.import_paths,
        "state": ".",
        "checkpoint_every_s": processes.checkpoint_every_s,
        "local_baseline": processes.local_baseline,
        "network": {
            "federation": folder.name,
            "secret_key": "secret.key",
            "allow": f"../../{KEYS}",
            "operators": f"../../{OPERATORS}",
            "neighbors_file": f"../../{NEIGHBORS_FILE}",
            "membership": False,  # the launcher tells everybody of everybody
            "fetch_timeout_s": processes.fetch_timeout_s,
        },
        "algorithm": msgspec.to_builtins(settings.algorithm),
        "training": msgspec.to_builtins(settings.training),
    }
    if settings.personalization.kind != "none":
        config["personalization"] = _without_unset(msgspec.to_builtins(settings.personalization))
    write_toml(home / "config.toml", config)


def _write_settings(folder: Path, settings: SwarmSettings) -> None:
    write_toml(folder / SETTINGS_FILE, _without_unset(msgspec.to_builtins(settings)))


def _write_swarm(folder: Path, settings: SwarmSettings, slices: Sequence[Slice]) -> None:
    """Write who the peers are; of those whose data change, the groups that they end in."""
    descriptions = {part.group: part.description for part in slices}
    ends = [
        (part.group, part.description)
        if part.later_group is None
        else (part.later_group, descriptions.get(part.later_group, ""))
        for part in slices
    ]
    write_json(
        folder / SWARM_FILE,
        {
            "name": settings.name,
            "rounds": settings.rounds,
            "seed": settings.seed,
            "peers": peer_names(settings.peers),
            "label_groups": [group for group, _ in ends],
            "groups": [description for _, description in ends],
        },
    )


def _rerunnable(settings: SwarmSettings, base: Path) -> SwarmSettings:
    """Make relative paths absolute, so that the settings mean the same from the run folder."""
    return msgspec.structs.replace(
        settings,
        data=str(resolve(base, settings.data)) if settings.data.endswith(".npz") else settings.data,
        data_folder=str(resolve(base, settings.data_folder)) if settings.data_folder else "",
        import_paths=[str(path) for path in import_paths(settings, base)],
    )


def _without_unset(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out values that are None, which TOML can't say."""
    return {
        key: _without_unset(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }


def _new_folder(name: str, out: Path | None) -> Path:
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out} exists and is not an empty folder: choose another")
        out.mkdir(parents=True, exist_ok=True)
        return out.resolve()
    stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = (RUNS / f"{stamp}-{name}{suffix}").resolve()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{RUNS} holds a hundred runs of this second: give --out")


def point_latest_to(folder: Path) -> None:
    """Let `runs/latest` point to a run, when it lies in `runs/`."""
    if folder.parent != RUNS.resolve():
        return
    link = folder.parent / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    try:
        link.replace(folder.parent / "latest")
    except OSError as error:
        link.unlink()
        logger.warning("%s stays as it is: %s", folder.parent / "latest", error.strerror)
