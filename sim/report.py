"""Report a run: what its peers scored, `summary.json`, and the tables and files that go with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from protocol.errors import RunError
from sim.matrix import WeightMatrix
from sim.picture import draw_picture
from sim.records import PeerResult, Run
from sim.report_table import clustering_remark, compression_remark, peer_table
from sim.terminal import draw_matrix, percent

_CLEARLY = 2.0
"""Standard errors that a difference must exceed to be called clear."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `summary.json` says: its keys, and the only place that explains them.

    Accuracies are shares from 0 to 1, measured on each peer's own test examples. A peer without
    test examples has none, and a peer that did not finish has no result: both read null and are
    left out of means and deciles, which are null themselves when nobody is left. No number is ever
    NaN.

    Attributes:
        name: Of the run.
        seed: Of the run; null when unknown.
        peers: Names; the order of `label_groups` and of the rows and columns of `weights`.
        rounds: How many were asked for; null for a run without end.
        rounds_done: By peer, how many rounds it has recorded.
        seconds: Wall clock of the whole run; as far as the records tell where nobody measured it.
        num_train: By peer, local training examples, the holdout included.
        num_test: By peer, test examples.
        accuracy: By peer, of the mixture prediction.
        own_accuracy: By peer, of its own model alone.
        local_accuracy: By peer, of local-only; null where it wasn't computed.
        personalized: Whether peers blend the mixture with a memory of their examples; if not, the
            eleven below are null.
        memory_accuracy: By peer, of its memory alone.
        blend_accuracy: By peer, of memory and mixture, blended.
        lam: By peer, interpolation weight λ of the blend: 0 is the mixture alone, 1 the memory.
        memory_bytes: By peer, what its memory takes; null where no memory is compressed, as the
            next three.
        exact_memory_bytes: By peer, what it would take if it weren't.
        holdout_memory_accuracy: By peer, of its memory alone, where λ was chosen.
        exact_holdout_memory_accuracy: By peer, the same if it weren't compressed.
        memory_mean: Plain mean of `memory_accuracy`, as of `accuracy`.
        blend_mean: The same of `blend_accuracy`.
        weighted_blend_mean: As `weighted_mean`, of `blend_accuracy`.
        blend_bottom_decile: As `bottom_decile`, of `blend_accuracy`.
        mean: Plain mean of `accuracy` over the peers that have one.
        own_mean: The same of `own_accuracy`.
        local_mean: The same of `local_accuracy`.
        weighted_mean: Mean of `accuracy`, each peer weighted by its `num_train`, as the FedeRiCo
            paper averages.
        weighted_local_mean: The same of `local_accuracy`.
        bottom_decile: `accuracy` of the ⌈n/10⌉-th worst of the n peers that have one.
        local_bottom_decile: The same of `local_accuracy`.
        below_local: Peers whose predictions, blended where they are, are clearly below local-only,
            see `clearly_below`.
        unfinished: Peers without a result.
        untested: Peers with a result, but without test examples.
        clusterings: By peer, the digest of the clustering that it went by, the same for all who
            found the same; null for a peer that clustered nothing, and in place of all where nobody
            did.
        clustered_by: By peer, who told it of that: itself where it clustered.
        bytes_sent: By peer, over the whole run.
        bytes_received: By peer, over the whole run.
        weights: The final weight matrix, one row per peer; null for a peer without a record.
        label_groups: The label group of each peer; null when unknown.
        groups: What each peer's label group stands for; null when unknown.
        same_group_weight: Mean over peers of the weight on peers of the own label group, the own
            model included.
        same_group_weight_of_others: Mean over peers of the share, within the weight given to
            *other* peers, that goes to the own label group; peers that have nobody there, or that
            give nothing away, don't count.
    """

    name: str
    seed: int | None
    peers: list[str]
    rounds: int | None
    rounds_done: dict[str, int]
    seconds: float
    num_train: dict[str, int | None]
    num_test: dict[str, int | None]
    accuracy: dict[str, float | None]
    own_accuracy: dict[str, float | None]
    local_accuracy: dict[str, float | None]
    personalized: bool = False
    memory_accuracy: dict[str, float | None] | None = None
    blend_accuracy: dict[str, float | None] | None = None
    lam: dict[str, float | None] | None = None
    memory_bytes: dict[str, int | None] | None = None
    exact_memory_bytes: dict[str, int | None] | None = None
    holdout_memory_accuracy: dict[str, float | None] | None = None
    exact_holdout_memory_accuracy: dict[str, float | None] | None = None
    memory_mean: float | None = None
    blend_mean: float | None = None
    weighted_blend_mean: float | None = None
    blend_bottom_decile: float | None = None
    mean: float | None
    own_mean: float | None
    local_mean: float | None
    weighted_mean: float | None
    weighted_local_mean: float | None
    bottom_decile: float | None
    local_bottom_decile: float | None
    below_local: list[str]
    unfinished: list[str]
    untested: list[str]
    clusterings: dict[str, str | None] | None = None
    clustered_by: dict[str, str | None] | None = None
    bytes_sent: dict[str, int]
    bytes_received: dict[str, int]
    weights: list[list[float] | None]
    label_groups: list[int] | None
    groups: list[str] | None
    same_group_weight: float | None
    same_group_weight_of_others: float | None


def clearly_below(accuracy: float, baseline: float, num_test: int) -> bool:
    """Say whether an accuracy lies below a baseline by more than chance explains.

    It does when the difference exceeds two standard errors of a difference of two binomial shares,
    with one success and one failure added to each so that a handful of examples can't pass for
    certainty (Agresti and Caffo, 2000). Both were measured on the same examples, which the standard
    error ignores for want of the single predictions: it is too wide rather than too narrow.

    Args:
        accuracy: Share of the test examples, 0 to 1.
        baseline: The same of what it is compared with.
        num_test: How many test examples both were measured on.
    """
    below, above = ((share * num_test + 1) / (num_test + 2) for share in (accuracy, baseline))
    variance = (below * (1 - below) + above * (1 - above)) / (num_test + 2)
    return above - below > _CLEARLY * math.sqrt(variance)


def bottom_decile(accuracies: Iterable[float | None]) -> float | None:
    """Return the accuracy of the ⌈n/10⌉-th worst of n peers; None when there is none."""
    known = sorted(value for value in accuracies if value is not None)
    return known[math.ceil(len(known) / 10) - 1] if known else None


def mean(
    values: Mapping[str, float | None], sizes: Mapping[str, int | None] | None = None
) -> float | None:
    """Return the mean of the known values, plain or weighted by sizes; None when there is none."""
    known = {name: value for name, value in values.items() if value is not None}
    shares = {name: 1 if sizes is None else sizes[name] or 0 for name in known}
    total = sum(shares.values())
    return sum(value * shares[name] for name, value in known.items()) / total if total else None


def summarize(run: Run, seconds: float | None = None) -> Summary:
    """Summarize a run from its records and results, as far as they go.

    Args:
        run: The run; what its peers wrote since is read first.
        seconds: Wall clock of the whole run, where the caller measured it.

    Raises:
        RunError: No peer has recorded a round.
    """
    run.refresh()
    results = {peer.name: peer.result() for peer in run.peers}
    if seconds is None:
        times = [peer.latest.time_s for peer in run.peers if peer.latest]
        times += [result.seconds for result in results.values() if result]
        seconds = max(times, default=0.0)
    return _summary(run, run.weight_matrix(), results, seconds)


_Results = Mapping[str, PeerResult | None]


def _summary(run: Run, matrix: WeightMatrix, results: _Results, seconds: float) -> Summary:
    accuracy, own_accuracy, local_accuracy = (
        _accuracies(results, key) for key in ("accuracy", "own_accuracy", "local_accuracy")
    )
    num_train, num_test = (_counts(results, key) for key in ("num_train", "num_test"))
    groups = run.label_groups
    return Summary(
        name=run.name,
        seed=run.seed,
        peers=list(run.names),
        rounds=run.total_rounds,
        rounds_done={peer.name: peer.rounds_done for peer in run.peers},
        seconds=seconds,
        num_train=num_train,
        num_test=num_test,
        accuracy=accuracy,
        own_accuracy=own_accuracy,
        local_accuracy=local_accuracy,
        **_personal(run, results),
        mean=mean(accuracy),
        own_mean=mean(own_accuracy),
        local_mean=mean(local_accuracy),
        weighted_mean=mean(accuracy, num_train),
        weighted_local_mean=mean(local_accuracy, num_train),
        bottom_decile=bottom_decile(accuracy.values()),
        local_bottom_decile=bottom_decile(local_accuracy.values()),
        below_local=[name for name, result in results.items() if _is_below_local(result)],
        unfinished=[name for name, result in results.items() if result is None],
        untested=[name for name, count in num_test.items() if count == 0],
        **_clusterings(run),
        bytes_sent=_traffic(run, results, "bytes_sent"),
        bytes_received=_traffic(run, results, "bytes_received"),
        weights=_rows(matrix),
        label_groups=None if groups is None else list(groups.values()),
        groups=None if groups is None else [matrix.describe(g) for g in groups.values()],
        same_group_weight=_known_mean(matrix.same_group_share()),
        same_group_weight_of_others=_known_mean(matrix.same_group_share_of_others()),
    )


def _clusterings(run: Run) -> dict[str, Any]:
    """Return what the summary says of clusterings, if there were any."""
    found = {peer.name: peer.clustering for peer in run.peers}
    if not any(digest for digest, _ in found.values()):
        return {}
    return {
        "clusterings": {name: digest for name, (digest, _) in found.items()},
        "clustered_by": {name: teller for name, (_, teller) in found.items()},
    }


def _personal(run: Run, results: _Results) -> dict[str, Any]:
    """Return what the summary says of memories, if there are any."""
    if not any(peer.latest is not None and peer.latest.memory for peer in run.peers):
        return {}
    memory, blend = (_accuracies(results, key) for key in ("memory_accuracy", "blend_accuracy"))
    return {
        "personalized": True,
        "memory_accuracy": memory,
        "blend_accuracy": blend,
        "lam": {name: result.lam if result else None for name, result in results.items()},
        "memory_mean": mean(memory),
        "blend_mean": mean(blend),
        "weighted_blend_mean": mean(blend, _counts(results, "num_train")),
        "blend_bottom_decile": bottom_decile(blend.values()),
        **_compressed(results),
    }


def _compressed(results: _Results) -> dict[str, Any]:
    """Return what the summary says of compressed memories, if there are any."""
    if not any(result and result.memory_bytes is not None for result in results.values()):
        return {}
    keys = ("memory_bytes", "holdout_memory_accuracy")
    return {
        key: {name: getattr(result, key, None) for name, result in results.items()}
        for key in (*keys, *(f"exact_{key}" for key in keys))
    }


def _accuracies(results: _Results, key: str) -> dict[str, float | None]:
    """Return one kind of accuracy by peer; None without a result or without test examples."""
    return {
        name: getattr(result, key) if result and result.num_test else None
        for name, result in results.items()
    }


def _counts(results: _Results, key: str) -> dict[str, int | None]:
    return {
        name: getattr(result, key) if result is not None else None
        for name, result in results.items()
    }


def _traffic(run: Run, results: _Results, key: str) -> dict[str, int]:
    """Return bytes by peer: of its result, else of its newest record, else none."""
    return {
        peer.name: getattr(results[peer.name] or peer.latest, key, 0)  # 0: neither is there
        for peer in run.peers
    }


def _is_below_local(result: PeerResult | None) -> bool:
    if result is None or result.local_accuracy is None:
        return False
    predicted = result.accuracy if result.blend_accuracy is None else result.blend_accuracy
    if predicted is None:
        return False
    return clearly_below(predicted, result.local_accuracy, result.num_test)


def _rows(matrix: WeightMatrix) -> list[list[float] | None]:
    """Return the weights among the run's own peers, null for a row without a record."""
    rows = matrix.values[:, : len(matrix.rows)].tolist()
    return [None if math.isnan(row[0]) else row for row in rows]


def _known_mean(values: npt.NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None


def write_report(run: Run, seconds: float | None = None) -> Summary:
    """Write `summary.json`, `weights.csv` and `weights.png` into the run folder.

    Args:
        run: The run; what its peers wrote since is read first.
        seconds: Wall clock of the whole run, where the caller measured it.

    Returns:
        What `summary.json` says.

    Raises:
        RunError: No peer has recorded a round, or a file can't be written.
    """
    summary = summarize(run, seconds)
    matrix = run.weight_matrix()
    try:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        (run.folder / "summary.json").write_bytes(text + b"\n")
        with (run.folder / "weights.csv").open("w", newline="", encoding="utf-8") as file:
            matrix.write_csv(file)
    except OSError as error:
        raise RunError(f"{run.folder}: the report can't be written: {error}") from error
    draw_picture(matrix, run.folder / "weights.png", picture_title(run, matrix))
    return summary


def picture_title(run: Run, matrix: WeightMatrix) -> str:
    """Return the heading of a weight matrix: the run, and how far its peers had come."""
    done = [round_number for round_number in matrix.rounds if round_number is not None]
    first, last = min(done), max(done)
    rounds = f"round {last}" if first == last else f"rounds {first} to {last}"
    return f"{run.name}: collaboration weights after {rounds}"


def print_report(run: Run, summary: Summary, console: Console) -> None:
    """Print what a run came to: a table of its peers, its weight matrix, where all of it lies."""
    console.print(peer_table(run, summary, console))
    for line in _remarks(run, summary):
        console.print(line, highlight=False, markup=False)
    matrix = run.weight_matrix()
    console.print(f"\n{picture_title(run, matrix)}", style="bold", highlight=False, markup=False)
    console.print(draw_matrix(matrix, console))
    console.print(f"\nrun folder: {run.folder}", highlight=False, markup=False, soft_wrap=True)


def _remarks(run: Run, summary: Summary) -> list[str]:
    what = (
        "mixture, memory, both blended with weight lam on the memory, own model"
        if summary.personalized
        else "mixture, own model"
    )
    predicted = "blend" if summary.personalized else "mixture"
    remarks = [
        f"accuracy in percent of each peer's own test examples, by {what} and "
        f"local-only; gain is {predicted} over local-only; weighted is by training examples"
    ]
    if summary.below_local:
        remarks.append(
            f"below local-only: by more than {_CLEARLY:.0f} standard errors of the difference"
        )
    if (saved := compression_remark(summary)) is not None:
        remarks.append(saved)
    if summary.unfinished or summary.untested:
        remarks.append("peers without a result or without test data are in no mean")
    if summary.same_group_weight is not None:
        remarks.append(
            f"weight on peers of the own label group: {percent(summary.same_group_weight)} % "
            f"(of what goes to others: {percent(summary.same_group_weight_of_others)} %)"
        )
    if summary.clusterings is not None:
        remarks.append(clustering_remark(summary.clusterings, summary.clustered_by))
    if run.damaged_lines:
        remarks.append(f"{run.damaged_lines} damaged record lines were passed over")
    return remarks
