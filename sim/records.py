"""Read run folders: what the peers recorded, also while they are still writing it.

::

    runs/20260131-120000-digits/
        settings.toml               the full settings of the run
        swarm.json                  name, rounds, seed, peers, label_groups, groups
        peers/peer-00/record.jsonl  one JSON object a line and round
        peers/peer-00/result.json   what the peer scored, once it has finished
        weights.csv, weights.png, summary.json

The state folder of a single daemon, which holds a `record.jsonl` itself, is a run of one peer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np

from peer.record import READY_FILE, RECORD_FILE, RESULT_FILE
from protocol.errors import RunError
from sim.matrix import WeightMatrix

RUNS_FOLDER = Path("runs")
_RECENT_RUNS = 3
"""How many runs an error suggests."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Decoded = TypeVar("_Decoded", bound=msgspec.Struct)


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer's memory was like when it was last renewed; see `peer.record.Recorder`.

    Attributes:
        renewed_at: After how many rounds that was.
        lam: Interpolation weight λ.
        num_entries: Examples in the datastore.
        size_bytes: Memory that they take.
        accuracy: Of the blend on the holdout, 0 to 1, when λ was last chosen; None before.
        model_accuracy: Of the mixture there.
        memory_accuracy: Of the memory alone there.
        exact_size_bytes: Memory that they would take if the memory weren't compressed; None where
            it isn't, as the next two.
        exact_accuracy: Of the blend with such a memory on the holdout.
        exact_memory_accuracy: Of that memory alone there.
    """

    renewed_at: int = msgspec.field(name="round")
    lam: _Share
    num_entries: _Count = 0
    size_bytes: _Count = 0
    accuracy: float | None = None
    model_accuracy: float | None = None
    memory_accuracy: float | None = None
    exact_size_bytes: _Count | None = None
    exact_accuracy: float | None = None
    exact_memory_accuracy: float | None = None


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer recorded at the end of one round.

    Attributes:
        round_number: Counted from 0; `round` in the file.
        time_s: Seconds that the peer had run, over all its starts.
        loss: The loss average of its own model; None before it was measured.
        losses: Loss averages by the name of the peer whose model was measured.
        weights: Collaboration weights by peer name, itself included; they sum to 1.
        validation_accuracy: Of the mixture on the holdout, 0 to 1, by what its members predicted
            before that was trained on; None when unknown.
        sampled: The neighbors sampled this round.
        neighbors: How many neighbors it knew.
        bytes_sent: Over all its starts.
        bytes_received: Over all its starts.
        seconds: By phase of the round; `total` is all of it.
        gradients: How many were applied, and how many refused by reason.
        clustering: Digest of the clustering that the round went by; empty where there was none.
        clustered_by: Who told of it, the peer itself where it clustered.
        memory: Of its examples; None without personalization.
    """

    round_number: _Count = msgspec.field(name="round")
    weights: dict[str, _Share]
    time_s: float = 0.0
    loss: float | None = None
    losses: dict[str, float | None] = {}
    validation_accuracy: float | None = None
    sampled: list[str] = []
    neighbors: int = 0
    bytes_sent: _Count = 0
    bytes_received: _Count = 0
    seconds: dict[str, float] = {}
    gradients: dict[str, int] = {}
    clustering: str = ""
    clustered_by: str = ""
    memory: MemoryRecord | None = None


class PeerResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer that has finished scored; accuracies are None without test data.

    Attributes:
        name: The peer.
        rounds: How many it ran.
        num_test: Test examples; none means no accuracy.
        num_train: Local training examples, the holdout included.
        accuracy: Of the mixture prediction on the test examples, 0 to 1.
        own_accuracy: Of its own model alone.
        local_accuracy: Of local-only, as far as it was computed.
        memory_accuracy: Of its memory alone; None without personalization, as the next two.
        blend_accuracy: Of memory and mixture, blended.
        lam: Interpolation weight λ of that blend.
        memory_bytes: What its memory takes; None where that isn't compressed, as the next three.
        exact_memory_bytes: What it would take if it weren't.
        holdout_memory_accuracy: Of its memory alone, where λ was chosen.
        exact_holdout_memory_accuracy: The same if it weren't compressed.
        weights: Final collaboration weights by peer name.
        bytes_sent: Over the whole run.
        bytes_received: Over the whole run.
        seconds: From start to finish.
    """

    name: str
    rounds: _Count = 0
    num_test: _Count = 0
    num_train: _Count = 0
    accuracy: float | None = None
    own_accuracy: float | None = None
    local_accuracy: float | None = None
    memory_accuracy: float | None = None
    blend_accuracy: float | None = None
    lam: float | None = None
    memory_bytes: _Count | None = None
    exact_memory_bytes: _Count | None = None
    holdout_memory_accuracy: float | None = None
    exact_holdout_memory_accuracy: float | None = None
    weights: dict[str, float] = {}
    bytes_sent: _Count = 0
    bytes_received: _Count = 0
    seconds: float = 0.0


class _Swarm(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    peers: list[str]
    rounds: int | None = None
    seed: int | None = None
    label_groups: list[int] | None = None
    groups: list[str] | None = None


class _Named(msgspec.Struct, frozen=True):
    name: str


class PeerRecords:
    """The rounds one peer recorded, read as its file grows.

    A line is taken once its line feed is there, so a half-written last line waits for its rest. A
    line that a crash left damaged is counted in `damaged_lines` and passed over. A peer that was
    restarted from a checkpoint repeats rounds: a line replaces those of its own and later rounds.
    `rounds` and `records` go together, in order; `named` has all peers that any weights name.

    Args:
        name: The peer.
        folder: Its state folder, which may not exist yet.
        keep: How many of the newest rounds to hold in memory; None holds all.
    """

    def __init__(self, name: str, folder: Path, keep: int | None = None) -> None:
        self.name = name
        self.folder = folder
        self.rounds: list[int] = []
        self.records: list[RoundRecord] = []
        self.named: set[str] = set()
        self.damaged_lines = 0
        self._keep = keep
        self._offset = 0

    def refresh(self) -> bool:
        """Read what was appended since the last call; say whether there was anything."""
        lines = self._appended_lines()
        for line in lines:
            try:
                record = msgspec.json.decode(line, type=RoundRecord)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.damaged_lines += 1
                continue
            repeated = bisect_left(self.rounds, record.round_number)
            self.rounds[repeated:] = [record.round_number]
            self.records[repeated:] = [record]
            self.named.update(record.weights)
        if self._keep is not None:
            del self.rounds[: -self._keep], self.records[: -self._keep]
        return bool(lines)

    def _appended_lines(self) -> list[bytes]:
        path = self.folder / RECORD_FILE
        try:
            size_bytes = path.stat().st_size
            if size_bytes == self._offset:
                return []
            if size_bytes < self._offset:  # begun anew: what was read is gone
                self._offset = 0
                self.rounds.clear()
                self.records.clear()
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{path}: can't be read ({error.strerror})") from error
        complete, line_feed, _ = data.rpartition(b"\n")
        self._offset += len(complete) + len(line_feed)
        return [line for line in complete.split(b"\n") if line.strip()]

    @property
    def latest(self) -> RoundRecord | None:
        """The newest record; None when there is none."""
        return self.records[-1] if self.records else None

    @property
    def rounds_done(self) -> int:
        """How many rounds the peer has finished."""
        return self.rounds[-1] + 1 if self.rounds else 0

    @property
    def clustering(self) -> tuple[str, str] | tuple[None, None]:
        """The digest of the newest clustering that the peer went by, and who told of it."""
        for each in reversed(self.records):
            if each.clustering:
                return each.clustering, each.clustered_by or self.name
        return None, None

    def at(self, round_number: int | None) -> RoundRecord | None:
        """Return the newest record at or before a round (None: of all); None when there is none."""
        if round_number is None:
            return self.latest
        position = bisect_right(self.rounds, round_number)
        return self.records[position - 1] if position else None

    def result(self) -> PeerResult | None:
        """Return what the peer scored; None while it hasn't finished, or its file is damaged."""
        return _read(self.folder / RESULT_FILE, PeerResult)


class Run:
    """A run folder, finished or still growing.

    Attributes:
        folder: Where it lies.
        name: As its settings name it.
        total_rounds: How many rounds were asked for; None when unknown or without end.
        seed: Of the run; None when unknown.
        peers: The records of each peer.
        label_groups: The label group of each peer, by name; None when unknown.
        descriptions: What each label group stands for, by its number.
    """

    def __init__(self, folder: Path, swarm: _Swarm, peer_folders: Sequence[Path]) -> None:
        self.folder = folder
        self.name = swarm.name
        self.total_rounds = swarm.rounds
        self.seed = swarm.seed
        self.peers = tuple(map(PeerRecords, swarm.peers, peer_folders))
        self.label_groups: dict[str, int] | None = None
        self.descriptions: dict[int, str] = {}
        if swarm.label_groups is not None:
            self.label_groups = dict(zip(swarm.peers, swarm.label_groups, strict=True))
            for group, description in zip(swarm.label_groups, swarm.groups or (), strict=False):
                self.descriptions.setdefault(group, description)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run folder and read what is there.

        Args:
            path: The folder, or its name inside `runs/`; "latest" is the newest run.

        Raises:
            RunError: There is no such folder, or it is no run folder.
        """
        folder = _find(Path(path))
        if (folder / "swarm.json").exists():
            run = cls._open_swarm(folder)
        elif (folder / RECORD_FILE).exists():
            name = _daemon_name(folder)
            run = cls(folder, _Swarm(name=name, peers=[name]), [folder])
        else:
            raise RunError(
                f"{folder}: holds neither swarm.json nor record.jsonl, so it is no run folder; "
                "name one that `coterie swarm` made, or the state folder of a peer that has "
                "finished a round"
            )
        run.refresh()
        return run

    @classmethod
    def _open_swarm(cls, folder: Path) -> Run:
        path = folder / "swarm.json"
        try:
            swarm = msgspec.json.decode(path.read_bytes(), type=_Swarm)
        except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
            raise RunError(f"{path}: can't be read ({error}); start the run again") from error
        if not swarm.peers:
            raise RunError(f"{path}: names no peers; start the run again")
        for key, values in (("label_groups", swarm.label_groups), ("groups", swarm.groups)):
            if values is not None and len(values) != len(swarm.peers):
                raise RunError(
                    f"{path}: {key} has {len(values)} entries for {len(swarm.peers)} peers; "
                    "there must be one for each"
                )
        return cls(folder, swarm, [folder / "peers" / name for name in swarm.peers])

    def refresh(self) -> None:
        """Read what the peers recorded since the last call."""
        for peer in self.peers:
            peer.refresh()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the peers."""
        return tuple(peer.name for peer in self.peers)

    @property
    def damaged_lines(self) -> int:
        """How many lines were passed over because they can't be read."""
        return sum(peer.damaged_lines for peer in self.peers)

    def recorded_rounds(self) -> list[int]:
        """Return the rounds that at least one peer has recorded, in order.

        Raises:
            RunError: There is none yet.
        """
        rounds = sorted(set().union(*(peer.rounds for peer in self.peers)))
        if not rounds:
            raise RunError(
                f"{self.folder}: no peer has recorded a round; if the run is still starting, try "
                "again in a moment, else its log.txt files say what went wrong"
            )
        return rounds

    def weight_matrix(self, round_number: int | None = None) -> WeightMatrix:
        """Return the weights of all peers, each as of its newest record at or before a round.

        Args:
            round_number: The round; None for the newest of each peer.

        Raises:
            RunError: Nothing is recorded, or the round lies outside what is.
        """
        rounds = self.recorded_rounds()
        if round_number is not None and not rounds[0] <= round_number <= rounds[-1]:
            raise RunError(
                f"{self.folder}: round {round_number} is not recorded; there are rounds "
                f"{rounds[0]} to {rounds[-1]}"
            )
        records = [peer.at(round_number) for peer in self.peers]
        columns = self._columns()
        values = np.full((len(self.peers), len(columns)), np.nan)
        for row, record in enumerate(records):
            if record is not None:
                values[row] = [record.weights.get(name, 0.0) for name in columns]
        return WeightMatrix(
            rows=self.names,
            columns=columns,
            values=values,
            rounds=tuple(None if record is None else record.round_number for record in records),
            label_groups=self.label_groups,
            descriptions=self.descriptions,
        )

    def _columns(self) -> tuple[str, ...]:
        """Return the run's own peers, then those that only their weights name."""
        named = set().union(*(peer.named for peer in self.peers))
        return (*self.names, *sorted(named.difference(self.names)))


def _find(path: Path) -> Path:
    candidates = [path] if path.is_absolute() else [path, RUNS_FOLDER / path]
    for folder in candidates:
        if folder.is_dir():
            found = folder.resolve()  # the run that "latest" stands for at this moment
            here = Path.cwd()
            return found.relative_to(here) if found.is_relative_to(here) else found
    if path.exists():
        raise RunError(f"{path}: is a file; name the run folder that holds it")
    recent = sorted((f.name for f in RUNS_FOLDER.glob("*-*") if f.is_dir()), reverse=True)
    known = (
        f"the newest in {RUNS_FOLDER}/: {', '.join(recent[:_RECENT_RUNS])}"
        if recent
        else (f"there is none in {RUNS_FOLDER}/ either; `coterie swarm` makes one")
    )
    raise RunError(f"{path}: no such run folder; {known}")


def _daemon_name(folder: Path) -> str:
    """Return the name of the peer whose state folder this is; the folder's own as a last resort."""
    for facts in (RESULT_FILE, READY_FILE):
        named = _read(folder / facts, _Named)
        if named is not None:
            return named.name
    return folder.name


def _read(path: Path, kind: type[_Decoded]) -> _Decoded | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, FileNotFoundError):
        return None
    except OSError as error:
        raise RunError(f"{path}: can't be read ({error.strerror})") from error
