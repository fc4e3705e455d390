"""One comparison: its settings, the trials that it calls for, and the choice of what is tuned."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

from peer.algorithm import Count, Natural, Positive
from peer.config import DataSettings, Name, Seed
from peer.learner import TrainingSettings
from protocol.errors import ConfigError
from sim.cohort import Budget
from sim.methods import CHECKS, METHODS, find_method, function_of
from sim.partition_settings import PartitionSettings
from sim.regimes import REGIMES, SIZES, regime_settings

WITHOUT_LOCAL_STEPS = frozenset(
    {"local", "federico", "federico-thrifty", "federico-paper", "federico+knn"}
)
"""Methods that never exchange, or say themselves how often: that part of the grid is spared."""

ORACLES = frozenset({"oracle"})
"""Methods that see what no peer can know: they are shown apart, and never are the best."""

Option = bool | int | float | str
MethodName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]


class SizeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much data peers have; what sets them apart is the regime's."""

    min_examples: Natural = 0
    """Least number of training examples of a peer, as in a swarm's `[partition]`."""
    max_examples: Natural = 0
    """Greatest number of training examples of a peer; 0: all there are, in equal shares."""
    test_examples: Natural = 0
    """Greatest number of test examples of a peer; 0: all there are, in equal shares."""


class StepSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How all methods take their steps; the learning rate is tuned for each."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """As in a swarm's `[training]`."""
    batch_size: Count = 32
    """Examples in a batch; fewer when a peer has fewer."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Threads of torch's arithmetic in each process; more processes gain more than more threads."""
    device: str = "cpu"
    """Where torch computes: `cpu`, or `cuda` as in `torch.device`."""


class TuneSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The grid that each method is tuned over, for each regime apart."""

    learning_rate: tuple[Positive, ...] = (0.001, 0.003, 0.01)
    """Step sizes to try."""
    local_steps: tuple[Count, ...] = (1, 10)
    """Steps between two exchanges to try, where a method doesn't say itself how many."""
    seeds: tuple[Seed, ...] = (101,)
    """Seeds of the peers that are tuned on; none of them may be a reported one. More make the
    choice surer, and cost a run of the whole grid each."""
    peers: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """How many peers to tune on; 0: as many as are reported. Fewer cost less."""


class CompareSettings(DataSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one comparison of methods.

    Raises:
        ConfigError: A method, regime or option is unknown, or two settings exclude each other.
    """

    name: Name
    """Names the result folder, `runs/compare-NAME`."""
    peers: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    """K, the number of peers."""
    steps: Count
    """Optimizer steps that each peer's prediction may build on."""
    methods: tuple[str, ...]
    """What to compare, as named in `sim/methods.py` or in `[options]`; with `local`, peers below it
    are counted."""
    regimes: tuple[str, ...]
    """In which partitions, as named in `sim/regimes.py` or in `[regime]`."""
    seeds: tuple[Seed, ...] = (1, 2, 3)
    """Seeds of the reported trials. With one alone, what differs between seeds stays unknown."""
    partition: SizeSettings = SizeSettings()
    training: StepSettings = StepSettings()
    tune: TuneSettings = TuneSettings()
    regime: dict[Name, PartitionSettings] = msgspec.field(default_factory=dict)
    """Regimes of one's own: `[regime.NAME]` is a swarm's `[partition]`. Sizes that it leaves at 0
    are those of `[partition]`."""
    options: dict[MethodName, dict[str, Option]] = msgspec.field(default_factory=dict)
    """Keywords of a method: `[options.ditto]` with `lam = 0.1`, say. With `method = "ditto"`, too,
    the section's name is that of a variant, to be compared beside the method as it is."""

    def __post_init__(self) -> None:
        if self.seed:
            raise ConfigError(f"seed = {self.seed}: a comparison has several: set seeds = [...]")
        lists = ("methods", "regimes", "seeds")
        for key in lists:
            _check_list(key, getattr(self, key))
        for key in ("learning_rate", "local_steps", "seeds"):
            _check_list(f"tune.{key}", getattr(self.tune, key))
        if both := set(self.seeds) & set(self.tune.seeds):
            raise ConfigError(
                f"tune.seeds: {min(both)} is one of seeds, too: what is tuned on isn't reported"
            )
        if max(self.tune.local_steps) > self.steps:
            raise ConfigError(
                f"tune.local_steps: {max(self.tune.local_steps)} is more than steps = "
                f"{self.steps}: there would be no exchange"
            )
        for name in (*self.methods, *self.options):
            _check_options(name, *self.method_of(name), self.steps)
        for name in self.regime:
            if name in REGIMES:
                raise ConfigError(f"regime.{name}: there is a regime of this name: choose another")
        for name in self.regimes:
            self.partition_of(name)

    def method_of(self, name: str) -> tuple[str, dict[str, Option]]:
        """Return the method behind a name, itself or a variant's, and its options.

        Raises:
            ConfigError: There is no such method.
        """
        options = dict(self.options.get(name, {}))
        method = str(options.pop("method", name))
        find_method(method)
        if method != name and name in METHODS:
            raise ConfigError(f"options.{name}: a variant of {method} needs a name of its own")
        return method, options

    def partition_of(self, regime: str) -> PartitionSettings:
        """Return the partition of a regime.

        Raises:
            ConfigError: There is no such regime.
        """
        sizes = {size: getattr(self.partition, size) for size in SIZES}
        own = self.regime.get(regime)
        if own is None:
            return regime_settings(regime, PartitionSettings(kind="iid", **sizes))
        given = {size: getattr(own, size) or sizes[size] for size in SIZES}
        return msgspec.structs.replace(own, **given)

    def training_at(self, learning_rate: float) -> TrainingSettings:
        """Return a learner's settings."""
        return TrainingSettings(
            learning_rate=learning_rate, **msgspec.structs.asdict(self.training)
        )


class GridPoint(NamedTuple):
    """What is tuned.

    Attributes:
        learning_rate: Step size.
        local_steps: Steps between two exchanges; None where they mean nothing.
    """

    learning_rate: float
    local_steps: int | None


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one method.

    Attributes:
        regime: Which partition.
        method: Of which method.
        seed: Of the partition, the splits, the batches and the method's own draws.
        learning_rate: Step size.
        local_steps: Steps between two exchanges; None where they mean nothing.
        tuning: Whether peers are made of the data set's training part alone, and tested on
            examples of it that nobody trains on.
    """

    regime: str
    method: str
    seed: int
    learning_rate: float
    local_steps: int | None
    tuning: bool

    def __str__(self) -> str:
        steps = "" if self.local_steps is None else f", {self.local_steps} local steps"
        return (
            f"{self.method}, {self.regime}, seed {self.seed}, learning rate "
            f"{self.learning_rate}{steps}{', tuning' if self.tuning else ''}"
        )


Choices = Mapping[tuple[str, str], GridPoint]
"""The grid point chosen for a regime and method."""


def grid(settings: CompareSettings, method: str) -> list[GridPoint]:
    """Return the grid points that differ for a method, in the order of the settings."""
    steps: tuple[int | None, ...] = settings.tune.local_steps
    if settings.method_of(method)[0] in WITHOUT_LOCAL_STEPS:
        steps = (None,)
    return [GridPoint(*point) for point in itertools.product(settings.tune.learning_rate, steps)]


def tuning_trials(settings: CompareSettings) -> list[Trial]:
    """Return the trials to tune on; none for a grid of a single point."""
    return [
        Trial(regime=regime, method=method, seed=seed, tuning=True, **point._asdict())
        for regime, seed, method in itertools.product(
            settings.regimes, settings.tune.seeds, settings.methods
        )
        if len(points := grid(settings, method)) > 1
        for point in points
    ]


def reported_trials(settings: CompareSettings, choices: Choices) -> list[Trial]:
    """Return the trials to report: those of all methods that a grid point is chosen for."""
    return [
        Trial(regime=regime, method=method, seed=seed, tuning=False, **point._asdict())
        for regime, seed, method in itertools.product(
            settings.regimes, settings.seeds, settings.methods
        )
        if (point := choices.get((regime, method))) is not None
    ]


def count_trials(settings: CompareSettings) -> int:
    """Return the number of all trials, tuning included."""
    reported = len(settings.regimes) * len(settings.methods) * len(settings.seeds)
    return len(tuning_trials(settings)) + reported


def choose(settings: CompareSettings, scores: Mapping[Trial, float]) -> Choices:
    """Choose the grid point of the best mean validation accuracy, the first of equals.

    Args:
        settings: The comparison's.
        scores: Mean validation accuracy over the peers, by tuning trial. A grid point that lacks
            a trial is out of the running.

    Returns:
        The choices; a regime and method of which no grid point is whole has none.
    """
    choices: dict[tuple[str, str], GridPoint] = {}
    for regime, method in itertools.product(settings.regimes, settings.methods):
        points = grid(settings, method)
        if len(points) == 1:
            choices[regime, method] = points[0]
            continue
        best = -math.inf
        for point in points:
            trials = [
                Trial(regime=regime, method=method, seed=seed, tuning=True, **point._asdict())
                for seed in settings.tune.seeds
            ]
            if all(trial in scores for trial in trials):
                score = fmean(scores[trial] for trial in trials)
                if score > best:
                    choices[regime, method], best = point, score
    return choices


def _check_list(key: str, values: Sequence[object]) -> None:
    if not values:
        raise ConfigError(f"{key} is empty: name one at least")
    if twice := [value for value in values if values.count(value) > 1]:
        raise ConfigError(f"{key} names {twice[0]} more than once: once is enough")


def _check_options(name: str, method: str, options: Mapping[str, Option], steps: int) -> None:
    """Refuse what a method doesn't take: its options are its keywords with a plain default."""
    function, preset = function_of(method)
    parameters = inspect.signature(function).parameters
    hints = get_type_hints(function, include_extras=True)
    known = {
        key: parameter.default
        for key, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and isinstance(parameter.default, Option)
    }
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for key, value in options.items():
        if key not in known:
            if takes_any:
                continue
            close = difflib.get_close_matches(key, known, n=1)
            advice = (
                f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'none'}"
            )
            raise ConfigError(f"options.{name}: unknown option {key}; {advice}")
        try:
            msgspec.convert(value, hints[key])
        except msgspec.ValidationError as error:
            why = f"{str(error)[:1].lower()}{str(error)[1:]}"
            raise ConfigError(
                f"options.{name}.{key} = {value}: {why}; its default is {known[key]}"
            ) from error
    if function in CHECKS:
        try:
            CHECKS[function](Budget(steps=steps, local_steps=1), **preset, **options)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
