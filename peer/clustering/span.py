"""Models as the points that are clustered: one row each, in no more dimensions than they span."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from peer.clustering.interface import Points, on_one_thread
from protocol.errors import ConfigError, ModelError
from protocol.messages import PeerId
from protocol.tensors import Array

Model = Mapping[str, Array]
"""The parameters by name, floating-point; no buffers, and bf16 as f32."""

_BLOCK = 1 << 14  # parameters of each model in memory as f64 at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models that can be clustered, as points.

    Attributes:
        peer_ids: Whose rows they are, sorted.
        points: The parameters, flattened by sorted name; or, if there are more of them than other
            models, coordinates in the models' span, with one model as the origin: distances are
            those of the parameters, to rounding. Shape (num_models, dim or num_models - 1).
        left_out: Who has a parameter that is not finite, sorted.
    """

    peer_ids: tuple[PeerId, ...]
    points: Points
    left_out: tuple[PeerId, ...]


def gather(models: Mapping[PeerId, Model], names: Collection[str] | None = None) -> Models:
    """Turn models into points.

    Memory beyond the models is about 1 MB for each, however large they are.

    Args:
        models: Of one layout, by owner.
        names: The parameters that count, as of the last layer; all if None.

    Raises:
        ConfigError: There are no parameters by these names, or none at all.
        ModelError: A model doesn't fit the first one, or none is finite.
    """
    if not models:
        raise ModelError("there are no models to cluster")
    everyone = sorted(models)
    chosen = _chosen(models[everyone[0]], names)
    for peer_id in everyone:
        _check_layout(peer_id, models[peer_id], everyone[0], models[everyone[0]], chosen)
    largest = np.array([_largest(models[peer_id], chosen) for peer_id in everyone])
    fit = np.flatnonzero(np.isfinite(largest))
    if not len(fit):
        raise ModelError(f"none of the {len(models)} models is finite: nothing to cluster")
    peer_ids = tuple(everyone[number] for number in fit)
    dim = sum(models[peer_ids[0]][name].size for name in chosen)
    blocks = _blocks([models[peer_id] for peer_id in peer_ids], chosen)
    # Neither a huge model nor a tiny one: differences from it keep their digits.
    middle = int(np.argsort(largest[fit], kind="stable")[(len(fit) - 1) // 2])
    points = np.hstack(list(blocks)) if dim < len(fit) else project(blocks, middle)
    left_out = tuple(peer_id for peer_id in everyone if peer_id not in set(peer_ids))
    return Models(peer_ids=peer_ids, points=points, left_out=left_out)


def project(blocks: Iterable[Points], origin: int) -> Points:
    """Return coordinates of rows in their span, given in blocks of columns.

    The triangle R of a QR decomposition, made block by block, of the differences D from the
    origin: D = QR with orthonormal columns of Q, so the columns of R are as far apart as those of
    D, each to its own rounding. R's diagonal is made positive, so that the axes are the same
    everywhere; and equal rows stay equal to the bit.

    Args:
        blocks: At least one, each of shape (num_rows, any).
        origin: Whose row becomes 0.

    Returns:
        Shape (num_rows, num_rows - 1); (1, 1) for one row.
    """
    triangle: Points | None = None
    digests: list[hashlib.blake2b] = []
    with on_one_thread():
        for block in blocks:
            digests = digests or [hashlib.blake2b() for _ in block]
            for digest, row in zip(digests, block, strict=True):
                digest.update(row.tobytes())
            moved = np.delete(block - block[origin], origin, axis=0).T
            stacked = moved if triangle is None else np.vstack((triangle, moved))
            triangle = np.asarray(np.linalg.qr(stacked, mode="r"), np.float64)
    rows = [digest.digest() for digest in digests]
    points = np.zeros((len(rows), max(1, len(rows) - 1)))
    if triangle is not None and triangle.size:
        signs = np.where(np.diagonal(triangle) < 0, -1.0, 1.0)
        others = np.arange(len(rows)) != origin
        points[others, : len(triangle)] = (signs[:, np.newaxis] * triangle).T
    originals = [origin if row == rows[origin] else rows.index(row) for row in rows]
    return points[originals]


def _chosen(model: Model, names: Collection[str] | None) -> list[str]:
    if names is not None and (missing := set(names) - model.keys()):
        raise ConfigError(
            f"the model has no parameter {min(missing)!r}: it has {', '.join(sorted(model))}"
        )
    chosen = [name for name in sorted(model if names is None else set(names)) if model[name].size]
    if not chosen:
        raise ConfigError(
            "a model with no parameters can't be clustered"
            if not model
            else "none of the parameters to cluster by has a number in it: name others"
        )
    return chosen


def _check_layout(
    peer_id: PeerId, model: Model, first_id: PeerId, first: Model, chosen: list[str]
) -> None:
    for name in chosen:
        if name not in model or model[name].shape != first[name].shape:
            had = f"of shape {model[name].shape}" if name in model else "missing"
            raise ModelError(
                f"the model of {peer_id} doesn't fit that of {first_id}: {name} is {had}, there it "
                f"is of shape {first[name].shape}"
            )
        if model[name].dtype.kind != "f":
            raise ModelError(
                f"{name} of {peer_id} is {model[name].dtype}, no floating-point numbers: leave "
                "buffers out, and give bf16 as f32"
            )


def _largest(model: Model, names: list[str]) -> float:
    """Return the largest magnitude; NaN if there is one."""
    return float(np.max([np.abs(model[name]).max() for name in names]))


def _blocks(models: list[Model], names: list[str]) -> Iterator[Points]:
    """Yield columns of the flattened models, as f64. Shape (num_models, up to two blocks)."""
    pending: list[Points] = []
    for name in names:
        flat = [model[name].reshape(-1) for model in models]
        for start in range(0, len(flat[0]), _BLOCK):
            parts = [parameters[start : start + _BLOCK].astype(np.float64) for parameters in flat]
            pending.append(np.stack(parts) + 0.0)  # -0.0 becomes 0.0, to have its bits
            if sum(part.shape[1] for part in pending) >= _BLOCK:
                yield np.hstack(pending)
                pending = []
    if pending:
        yield np.hstack(pending)
