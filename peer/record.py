"""Append what happened at a peer, one JSON line a round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from peer.events import RoundFinished
from peer.files import replacing
from protocol.messages import PeerId

RECORD_FILE = "record.jsonl"
RESULT_FILE = "result.json"
READY_FILE = "ready.json"
CHECKPOINT_FILE = "checkpoint.safetensors"
"""What a peer writes into its state folder, for those who read it."""

PHASES = ("fetch", "measure", "differentiate", "push", "step")
"""What a round's seconds are broken down into; `fetch` and `push` overlap with the others."""

WORK = ("measured", "differentiated")
"""What a round's work is counted in: forward passes over the holdout, and gradients."""


class Recorder:
    """Writes `record.jsonl`, each line whole and flushed.

    A line holds: `round`; `time_s`, the seconds that the peer has run so far; `loss`, the own
    model's loss average; `losses` and collaboration `weights` by peer name;
    `validation_accuracy` of the mixture on the measuring examples, by what its members predicted
    before these were trained on, null after a restart since then; `sampled`; `neighbors`, how many
    are reachable; `bytes_sent` and `bytes_received` so far; `seconds` by phase and in `total`;
    `work`, how many models were measured and differentiated; `gradients` of others,
    applied or refused by reason; `counters` of the transport since this process started, those that
    aren't zero (`protocol.transport.interface.Counters`). A round that went by a clustering has the
    digest of that as `clustering`, too, the same for all who found the same, and the name of who
    told of it, or its own, as `clustered_by`.

    With personalization, `memory` holds, as of the memory's last renewal: `round`, after how many
    rounds that was, and `tuned_round` the same of λ; `lam` and `sigma`; `num_entries` in the
    datastore of `num_offered` examples, and its `size_bytes`; `num_validation`, on how many
    examples λ was chosen, and the blend's `accuracy`, `model_accuracy` (the mixture's) and
    `memory_accuracy` on them; `seconds` that it took. From the round in which the holdout is
    trained on, λ and the accuracies stay as they were. Of a compressed memory, whose `sigma` is
    null, `exact_size_bytes`, `exact_accuracy` and `exact_memory_accuracy` say what the whole one
    would be.

    Args:
        path: The file; an existing one is appended to.
        names: The name of each peer by its id.
    """

    def __init__(self, path: Path, names: Mapping[PeerId, str]) -> None:
        self._names = names
        self._file: TextIO = path.open("a", encoding="utf-8")
        if self._file.tell() > 0 and not _ends_with_newline(path):
            self._file.write("\n")  # a line cut short by a kill stays alone

    def round_finished(
        self,
        finished: RoundFinished,
        *,
        own: PeerId,
        validation_accuracy: float | None,
        num_neighbors: int,
        totals: Mapping[str, float],
        counters: Mapping[str, int],
        seconds: Mapping[str, float],
        work: Mapping[str, int],
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the line of one round."""
        line: dict[str, Any] = {
            "round": finished.round_number,
            "time_s": round(totals["seconds"], 4),
            "loss": finished.loss_averages.get(own),
            "losses": self.named(finished.loss_averages),
            "weights": self.named(finished.collaboration_weights),
            "validation_accuracy": validation_accuracy,
            "sampled": [self.name_of(peer_id) for peer_id in finished.sampled],
            "neighbors": num_neighbors,
            "bytes_sent": totals["bytes_sent"],
            "bytes_received": totals["bytes_received"],
            "seconds": {phase: round(value, 5) for phase, value in seconds.items()},
            "work": dict(work),
            "gradients": dict(finished.verdicts),
            "counters": {name: value for name, value in counters.items() if value},
        }
        if finished.clustering:
            line["clustering"] = finished.clustering
            line["clustered_by"] = self.name_of(finished.clustered_by or own)
        if memory is not None:
            line["memory"] = dict(memory)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def name_of(self, peer_id: PeerId) -> str:
        """Return a peer's name, or its id when it has none."""
        return self._names.get(peer_id, peer_id)

    def named(self, values: Mapping[PeerId, float]) -> dict[str, float]:
        """Return values by name instead of by id, rounded to 6 digits."""
        return {self.name_of(peer_id): round(value, 6) for peer_id, value in values.items()}

    def close(self) -> None:
        """Close the file; a line that could not be written was reported when it was."""
        with suppress(OSError):
            self._file.close()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
