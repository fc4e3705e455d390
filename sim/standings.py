"""Say where each method of a comparison stands: means, spreads, costs, and what is a tie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from sim.comparison import (
    ORACLES,
    Choices,
    CompareSettings,
    Trial,
    reported_trials,
    tuning_trials,
)
from sim.report import bottom_decile
from sim.trial import TrialResult

MARGIN = 0.02
"""A peer counts as below Local when its accuracy is lower by more than this."""

_ROUNDING = 1e-9
"""Shares of a whole number of examples come out with an error in their last digits."""

CLEARLY = 2.0
"""Standard errors over the peers that a difference must exceed to be called clear."""

CONFIDENCE = 0.95
"""Of the paired t-test over the seeds."""

_FEWEST_SEEDS = 3
"""That bottom deciles are compared by."""

Verdict = Literal["best", "tie", "below", "above"]

Accuracies = npt.NDArray[np.float64]
"""Of each peer under each seed, shape (num_seeds, num_peers); NaN without test examples."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where one method stands in one regime: a row of `results.csv` and of `results.json`.

    Accuracies are shares from 0 to 1 of each peer's own test examples. Peers without any are left
    out. Values over all peers are plain means, unless said otherwise.

    Attributes:
        regime: Name of the regime.
        method: Name of the method.
        honest: False of an oracle, which sees what no peer can know.
        mean: Mean over the seeds of the mean accuracy over the peers.
        sd: Standard deviation of the latter between seeds; null with one seed, as all that follow.
        bottom_decile: Mean over the seeds of the accuracy of the ⌈n/10⌉-th worst of n peers.
        bottom_decile_sd: Its standard deviation.
        weighted_mean: As `mean`, each peer weighted by its number of training examples.
        below_local: Peers, counted over all seeds, whose accuracy is more than `MARGIN` below
            Local's; null when Local wasn't compared.
        tested: Peers with test examples, counted over all seeds.
        difference: Mean over peers and seeds of accuracy less that of the best honest method; null
            of the best itself.
        standard_error: Of that mean, from the same differences; null where there is only one.
        verdict: "best"; "below" or "above" it where the difference is clear, see
            `paired_difference`; else "tie".
        decile_verdict: The same of the bottom decile and the honest method that has the highest,
            by the t-test over the seeds alone, as there is one number a seed; null with fewer than
            three, too few for that.
        gradients: Gradients computed, mean over peers and seeds.
        mb_sent: Megabytes of models and gradients sent, mean over peers and seeds.
        mb_received: The same received.
        seconds: Wall clock of a trial's training, mean over the seeds, on the machine that
            ran the comparison, with others at work beside it.
        learning_rate: The one chosen.
        local_steps: Steps between two exchanges, as chosen; null where the method has its own.
        validation: Mean accuracy of that choice on the validation examples; null when there was
            nothing to choose.
        means: The mean accuracy under each seed.
        bottom_deciles: The bottom decile under each seed.
    """

    regime: str
    method: str
    honest: bool
    mean: float
    sd: float | None
    bottom_decile: float
    bottom_decile_sd: float | None
    weighted_mean: float
    below_local: int | None
    tested: int
    difference: float | None
    standard_error: float | None
    verdict: Verdict
    decile_verdict: Verdict | None
    gradients: float
    mb_sent: float
    mb_received: float
    seconds: float
    learning_rate: float
    local_steps: int | None
    validation: float | None
    means: list[float]
    bottom_deciles: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two methods differ, peer by peer.

    Attributes:
        mean: Over all peers and seeds.
        standard_error: Of that mean; None where there is only one peer under one seed.
        clear: Whether it is more than noise.
    """

    mean: float
    standard_error: float | None
    clear: bool


def paired_difference(ours: Accuracies, theirs: Accuracies) -> Difference:
    """Compare two methods by the differences of the same peers under the same seeds.

    Peers of one seed learn from one another, so that their differences aren't independent and the
    standard error is too small: hence a clear difference must exceed `CLEARLY` of them, and have
    the same sign under every seed or stand out from what it varies by between seeds. (The former
    alone would never call clear what has many seeds, one of them an exception.)
    """
    differences = ours - theirs
    known = differences[np.isfinite(differences)]
    mean = float(known.mean())
    if len(known) < 2:
        return Difference(mean=mean, standard_error=None, clear=False)
    error = float(known.std(ddof=1)) / math.sqrt(len(known))
    by_seed = [float(row[np.isfinite(row)].mean()) for row in differences]
    agree = all(value * mean > 0 for value in by_seed)
    clear = abs(mean) > CLEARLY * error and (agree or stands_out(by_seed))
    return Difference(mean=mean, standard_error=error, clear=clear)


def stands_out(differences: Sequence[float]) -> bool:
    """Return whether differences, one a seed, have another mean than 0: Student's paired t-test."""
    count = len(differences)
    if count < 2:
        return False
    largest = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    return abs(fmean(differences)) > largest * stdev(differences) / math.sqrt(count)


def standings(
    settings: CompareSettings, choices: Choices, results: Mapping[Trial, TrialResult]
) -> list[Standing]:
    """Return where the methods stand: regime by regime, the best first and oracles last.

    Args:
        settings: The comparison's.
        choices: The grid point of each method and regime.
        results: Of the trials; a method lacking one in a regime is left out there.
    """
    oracles = {name for name in settings.methods if settings.method_of(name)[0] in ORACLES}
    validation = _validation(settings, results)
    found: list[Standing] = []
    for regime in settings.regimes:
        whole: dict[str, list[TrialResult]] = {}
        for trial in reported_trials(settings, choices):
            if trial.regime == regime and trial in results:
                whole.setdefault(trial.method, []).append(results[trial])
        whole = {name: each for name, each in whole.items() if len(each) == len(settings.seeds)}
        found += _regime(whole, oracles, validation)
    return found


def _regime(
    results: Mapping[str, Sequence[TrialResult]],
    oracles: Set[str],
    validation: Mapping[Trial, float],
) -> list[Standing]:
    accuracies = {name: _accuracies(each) for name, each in results.items()}
    means = {name: float(np.nanmean(each, axis=1).mean()) for name, each in accuracies.items()}
    honest = [name for name in results if name not in oracles]
    best = max(honest or results, key=lambda name: means[name], default=None)
    deciles = {name: _deciles(each) for name, each in results.items()}
    highest = max(honest or results, key=lambda name: fmean(deciles[name]), default=None)
    order = sorted(results, key=lambda name: (name in oracles, -means[name]))
    return [
        _standing(
            results[name],
            accuracies[name],
            honest=name not in oracles,
            local=accuracies.get("local"),
            difference=None
            if best is None or name == best
            else paired_difference(accuracies[name], accuracies[best]),
            decile_verdict=_decile_verdict(deciles[name], deciles[highest or name]),
            validation=validation.get(results[name][0].trial),
        )
        for name in order
    ]


def _standing(
    results: Sequence[TrialResult],
    accuracies: Accuracies,
    *,
    honest: bool,
    local: Accuracies | None,
    difference: Difference | None,
    decile_verdict: Verdict | None,
    validation: float | None,
) -> Standing:
    trial = results[0].trial
    means = np.nanmean(accuracies, axis=1).tolist()
    deciles = _deciles(results)
    return Standing(
        regime=trial.regime,
        method=trial.method,
        honest=honest,
        mean=fmean(means),
        sd=_spread(means),
        bottom_decile=fmean(deciles),
        bottom_decile_sd=_spread(deciles),
        weighted_mean=fmean(_weighted_mean(result) for result in results),
        below_local=None if local is None else int((local - accuracies > MARGIN + _ROUNDING).sum()),
        tested=int(np.isfinite(accuracies).sum()),
        difference=difference.mean if difference else None,
        standard_error=difference.standard_error if difference else None,
        verdict=_verdict(difference),
        decile_verdict=decile_verdict,
        gradients=fmean(fmean(result.gradients) for result in results),
        mb_sent=fmean(fmean(result.bytes_sent) for result in results) / 1e6,
        mb_received=fmean(fmean(result.bytes_received) for result in results) / 1e6,
        seconds=fmean(result.seconds for result in results),
        learning_rate=trial.learning_rate,
        local_steps=trial.local_steps,
        validation=validation,
        means=means,
        bottom_deciles=deciles,
    )


def _verdict(difference: Difference | None) -> Verdict:
    if difference is None:
        return "best"
    if not difference.clear:
        return "tie"
    return "above" if difference.mean > 0 else "below"


def _decile_verdict(ours: Sequence[float], highest: Sequence[float]) -> Verdict | None:
    if len(ours) < _FEWEST_SEEDS:
        return None
    if ours is highest:
        return "best"
    differences = [one - other for one, other in zip(ours, highest, strict=True)]
    if not stands_out(differences):
        return "tie"
    return "above" if fmean(differences) > 0 else "below"


def _deciles(results: Sequence[TrialResult]) -> list[float]:
    return [bottom_decile(result.accuracy) or 0.0 for result in results]


def _accuracies(results: Sequence[TrialResult]) -> Accuracies:
    rows = [[math.nan if a is None else a for a in result.accuracy] for result in results]
    return np.array(rows, dtype=np.float64)


def _weighted_mean(result: TrialResult) -> float:
    known = [
        (value, size)
        for value, size in zip(result.accuracy, result.num_train, strict=True)
        if value is not None
    ]
    return sum(value * size for value, size in known) / sum(size for _, size in known)


def _spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; None of a single value."""
    return stdev(values) if len(values) > 1 else None


def _validation(
    settings: CompareSettings, results: Mapping[Trial, TrialResult]
) -> dict[Trial, float]:
    """Return the mean validation accuracy of each grid point, by its first reported trial."""
    scores: dict[Trial, list[float]] = {}
    for trial in tuning_trials(settings):
        if trial in results:
            key = msgspec.structs.replace(trial, seed=settings.seeds[0], tuning=False)
            scores.setdefault(key, []).append(results[trial].mean)
    return {trial: fmean(values) for trial, values in scores.items()}
