"""Save and restore a peer: one safetensors file, written whole or not at all.

Tensors are named `own/NAME`, `optimizer/NAME/MOMENT` and `models/PEER_ID/NAME`; `shown/NAME`, where
others are shown another model than the own one; and where there is a memory `memory/store/NAME` and
`memory/model/NAME`. The file's metadata holds the rest as JSON under `coterie`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors

from peer.acquaintances import KeptModel
from peer.exploration import ExplorerState
from peer.memory import SavedMemory
from peer.snapshot import PeerSnapshot
from protocol.errors import CheckpointError
from protocol.groups import Groups
from protocol.messages import ModelSnapshot, PeerId, Version
from protocol.tensors import Array, Layout, Tensors

logger = logging.getLogger(__name__)

FORMAT = 2
_Entries = dict[str, dict[str, Any]]
_DTYPE_NAMES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "i8": "int8",
    "u8": "uint8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}
_MEMORY_DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a peer needs to go on as if it had not stopped.

    Attributes:
        core: The algorithm's state between two rounds, the own model in it.
        optimizer: The optimizer's arrays, f32.
        totals: What the peer spent so far: `bytes_sent`, `bytes_received` and `seconds`.
        memory: Its memory, where it has one.
    """

    core: PeerSnapshot
    optimizer: Mapping[str, npt.NDArray[np.float32]]
    totals: Mapping[str, float]
    memory: SavedMemory | None = None


def save_checkpoint(path: Path, checkpoint: Checkpoint, task: str) -> None:
    """Write a checkpoint beside the old one, then take its place; that one stays as the one before.

    Raises:
        CheckpointError: The file can't be written.
    """
    core = checkpoint.core
    arrays = _arrays("own", core.model.tensors)
    if core.shown is not None:
        arrays |= _arrays("shown", core.shown)
    for peer_id, kept in core.kept.items():
        arrays |= _arrays(f"models/{peer_id}", kept.snapshot.tensors)
    for key, array in checkpoint.optimizer.items():
        arrays[f"optimizer/{key}"] = ("float32", np.asarray(array, order="C"))
    metadata = {
        "format": FORMAT,
        "layout": core.model.tensors.layout.fingerprint(task),
        "round_number": core.round_number,
        "version": core.model.version,
        "loss_averages": dict(core.loss_averages),
        "measured_at": dict(core.measured_at),
        "kept": {
            peer_id: [kept.snapshot.version, kept.snapshot.friends, kept.loss, kept.fetched_round]
            for peer_id, kept in core.kept.items()
        },
        "explorer": msgspec.to_builtins(core.explorer, order="sorted"),
        "rng_state": core.rng_state,
        "shows_other": core.shown is not None,
        "groups": None if core.groups is None else core.groups.labels,
        "measuring_until": core.measuring_until,
        "trained_from": core.trained_from,
        "totals": dict(checkpoint.totals),
    }
    if (memory := checkpoint.memory) is not None:
        arrays |= _memory_arrays(memory)
        metadata["memory"] = dict(memory.state)
    partial = path.with_name(path.name + ".partial")
    try:
        safetensors.serialize_file(_specs_of(arrays), partial, {"coterie": json.dumps(metadata)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            path.replace(_before(path))
        partial.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error


def load_newest(path: Path, layout: Layout, task: str) -> Checkpoint | None:
    """Read the newest checkpoint that can be used; one that can't is moved aside and named.

    Returns:
        The checkpoint, or None where none was ever written.

    Raises:
        CheckpointError: None of those that are there can be used; they stay where they are.
    """
    fault: CheckpointError | None = None
    for candidate in (path, _before(path)):
        if not candidate.exists():
            continue
        try:
            checkpoint = load_checkpoint(candidate, layout, task)
        except CheckpointError as error:
            fault = fault or error
            continue
        if fault is not None:
            damaged = path.with_name(f"{path.name}.damaged")
            path.replace(damaged)
            logger.warning("%s: it is now %s, and the checkpoint before it is used", fault, damaged)
        return checkpoint
    if fault is not None:
        raise fault
    return None


def load_checkpoint(path: Path, layout: Layout, task: str) -> Checkpoint:
    """Read a checkpoint of a model with this layout and task.

    Raises:
        CheckpointError: It is missing, damaged, of another model or of another format.
    """
    try:
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        metadata = json.loads(header["__metadata__"]["coterie"])
        entries: _Entries = dict(safetensors.deserialize(raw))  # type: ignore[no-untyped-call]
        if metadata["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {metadata['format']}, not {FORMAT}")
        if metadata["layout"] != layout.fingerprint(task):
            raise CheckpointError(
                f"{path} is of another model: move it away to begin anew, or restore the settings "
                "it was made with"
            )
        return _checkpoint_of(metadata, entries, layout)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path} can't be used ({type(error).__name__}: {error}): move it away to begin anew"
        ) from error


def _before(path: Path) -> Path:
    return path.with_name(f"{path.name}.before")


def _checkpoint_of(metadata: dict[str, Any], entries: _Entries, layout: Layout) -> Checkpoint:
    kept = {
        PeerId(peer_id): KeptModel(
            ModelSnapshot(
                version=Version(*version),
                tensors=_tensors(f"models/{peer_id}", entries, layout),
                friends=tuple(friends),
            ),
            loss,
            fetched_round,
        )
        for peer_id, (version, friends, loss, fetched_round) in metadata["kept"].items()
    }
    core = PeerSnapshot(
        round_number=metadata["round_number"],
        model=ModelSnapshot(
            version=Version(*metadata["version"]), tensors=_tensors("own", entries, layout)
        ),
        loss_averages={PeerId(key): value for key, value in metadata["loss_averages"].items()},
        measured_at={PeerId(key): value for key, value in metadata["measured_at"].items()},
        kept=kept,
        explorer=msgspec.convert(metadata["explorer"], ExplorerState),
        rng_state=metadata["rng_state"],
        shown=_tensors("shown", entries, layout) if metadata.get("shows_other") else None,
        groups=Groups.of(metadata["groups"]) if metadata.get("groups") else None,
        measuring_until=metadata.get("measuring_until", 0),
        trained_from=metadata.get("trained_from"),
    )
    prefix = "optimizer/"
    optimizer = {
        key.removeprefix(prefix): np.frombuffer(entry["data"], "<f4").reshape(entry["shape"])
        for key, entry in entries.items()
        if key.startswith(prefix)
    }
    memory = _memory_of(metadata["memory"], entries, layout) if "memory" in metadata else None
    return Checkpoint(core, optimizer, metadata["totals"], memory)


def _memory_arrays(memory: SavedMemory) -> dict[str, tuple[str, Array]]:
    arrays = {
        f"memory/store/{name}": (array.dtype.name, np.asarray(array, order="C"))
        for name, array in memory.arrays.items()
    }
    return arrays | (_arrays("memory/model", memory.model) if memory.model is not None else {})


def _memory_of(state: dict[str, Any], entries: _Entries, layout: Layout) -> SavedMemory:
    """Return what there is of a memory; whether it can be used, the memory itself judges."""
    prefix = "memory/store/"
    arrays = {
        key.removeprefix(prefix): np.frombuffer(
            entry["data"], _MEMORY_DTYPES[entry["dtype"]]
        ).reshape(entry["shape"])
        for key, entry in entries.items()
        if key.startswith(prefix) and entry["dtype"] in _MEMORY_DTYPES
    }
    try:
        model = _tensors("memory/model", entries, layout)
    except (KeyError, ValueError):
        model = None
    return SavedMemory(arrays=arrays, model=model, state=state)


def _specs_of(arrays: Mapping[str, tuple[str, Array]]) -> dict[str, safetensors.TensorSpec]:
    """Describe contiguous arrays, which must stay alive until they are written."""
    return {
        name: safetensors.TensorSpec(
            dtype=dtype, shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, (dtype, array) in arrays.items()
    }


def _arrays(prefix: str, tensors: Tensors) -> dict[str, tuple[str, Array]]:
    return {
        f"{prefix}/{spec.name}": (_DTYPE_NAMES[spec.dtype], tensors[spec.name])
        for spec in tensors.layout.specs
    }


def _tensors(prefix: str, entries: _Entries, layout: Layout) -> Tensors:
    tensors = Tensors.zeros(layout)
    for name, target in tensors.items():
        source = np.frombuffer(entries[f"{prefix}/{name}"]["data"], target.dtype)
        target[...] = source.reshape(target.shape)
    return tensors
