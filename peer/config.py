"""Frozen settings read from TOML; a wrong key or value is one error that names its path."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from peer.algorithm import PROFILES, AlgorithmSettings, Natural, Positive
from peer.interpolation import KnnSettings
from peer.learner import TrainingSettings
from protocol.discovery.mqtt import MqttSettings
from protocol.errors import ConfigError

Seed = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class DataSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where examples come from, and the model that learns from them."""

    data: str
    """`digits`, `fashion-mnist`, `cifar-10`, `cifar-100`, `shakespeare`, a `.npz` file, or your own
    `package.module:function`."""
    data_folder: str = ""
    """Where the files of a data set lie; empty looks in the usual places."""
    download: bool = False
    """Whether `fashion-mnist` may be downloaded from its official home when it isn't there."""
    pool: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    """Images are averaged over squares of this many pixels: 2 makes 28x28 into 14x14."""
    classes: Natural = 0
    """Number of classes in the whole federation; 0 takes the data set's."""
    model: str
    """`logistic`, `mlp`, `cnn`, `lstm`, or your own `package.module:function`."""
    model_seed: Seed = 0
    """Seed of the initial parameters, which must be the same at all peers of a federation."""
    seed: Seed = 0
    """Seed of everything else: who is sampled, the split, the batches."""
    import_paths: list[str] = []
    """Folders to look in for your own modules, beside the one of the config file."""


class NetworkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a peer is reached, and whom it knows."""

    listen: str = "tcp://127.0.0.1:0"
    """Where to listen; port 0 picks a free one, which the ready file tells."""
    advertise: str = ""
    """What to tell others instead of `listen`; needed with a wildcard address."""
    federation: str = "coterie"
    """Peers of another federation are refused."""
    secret_key: str
    """File with this peer's secret key, made by `coterie keygen`."""
    allow: str
    """Directory of the public keys (`NAME.pub`) of all peers that may talk to this one."""
    operators: str = ""
    """Directory of the public keys of those who may ask for this peer's status, and for nothing
    else; empty lets nobody."""
    neighbors: dict[str, str] = {}
    """Endpoint of each known peer by its name; `NAME.pub` must be in `allow`."""
    neighbors_file: str = ""
    """A TOML file of such lines, read again when it changes; waited for at start."""
    membership: bool = True
    """Whether to learn of other peers from peers: with one address known, all are found, at the
    price of a small message or two a second. False keeps to the neighbors of this config."""
    mqtt: MqttSettings = MqttSettings()
    """`[network.mqtt]`: a broker through which peers find each other; without a host, none."""
    fetch_timeout_s: Positive = 5.0
    """Longest wait for a model; a peer that hangs costs the others this once."""
    push_timeout_s: Positive = 10.0
    """Longest wait for a gradient to be taken."""


class PersonalizationSettings(KnnSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a peer's predictions are made its own by a memory of its examples (kNN-Per).

    Raises:
        ValueError: The grid can't be used, or settings exclude each other.
    """

    kind: Literal["none", "knn"] = "none"
    """`knn` blends what the mixture predicts with what the peer remembers of its own examples. A
    newcomer with `rounds = 1` and `algorithm.profile = "newcomer"` predicts within seconds, from
    the models of its best collaborators and its memory, without a step of training."""
    every: Annotated[int, msgspec.Meta(ge=1)] = 20
    """Rounds after which all is embedded anew and the interpolation weight chosen anew, as at the
    start, before the holdout is trained on, and at the end. Each time costs one forward pass over
    the examples kept, and one of each model of the mixture over the holdout."""
    embedding: Literal["own", "strongest"] = "own"
    """Whose model embeds: the peer's own, or the one of most weight in its mixture."""
    compress_kib: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Most KiB that the datastore's embeddings may take, what makes the search fast included: of
    more, prototypes that fit are learned and the embeddings dropped. What else it knows of an
    example, 24 bytes, stays. Prototypes are learned anew with each renewal and with each file of
    new examples, which takes about a second for 5000 examples. 0: never. Paper: a quarter."""
    watch: str = ""
    """Folder in which a running peer looks for new labelled examples: `.npz` files as in `data`,
    which are moved into its `taken` and are the peer's own from then on. Empty looks nowhere."""

    def __post_init__(self) -> None:
        KnnSettings.__post_init__(self)
        if self.watch and self.kind == "none":
            raise ValueError('watch takes examples into a memory: set kind = "knn", or no watch')
        if not math.isfinite(self.compress_kib):
            raise ValueError(
                f"compress_kib = {self.compress_kib}: it must be 0 or above, and finite"
            )


def check_personalization(
    personalization: PersonalizationSettings, algorithm: AlgorithmSettings, rounds: int = 0
) -> None:
    """Check that there are examples, never trained on, to choose the interpolation weight by.

    Args:
        personalization: The memory's settings.
        algorithm: The algorithm's.
        rounds: How many in all; 0 goes on for ever.

    Raises:
        ValueError: There will be none.
    """
    if personalization.kind == "none":
        return
    if algorithm.measure_on != "holdout" or not algorithm.holdout_fraction:
        raise ValueError(
            'personalization.kind = "knn" chooses its interpolation weight on a holdout: set '
            'algorithm.measure_on = "holdout" and algorithm.holdout_fraction above 0'
        )
    if algorithm.warm_start == "odcl" and rounds == 1:
        raise ValueError(
            'personalization.kind = "knn" chooses its interpolation weight on a holdout, which one '
            "shot trains on, too: set rounds to 2 or more"
        )
    if algorithm.final_full == 1.0:
        raise ValueError(
            'personalization.kind = "knn" chooses its interpolation weight before the holdout is '
            "trained on: set algorithm.final_full below 1"
        )


class PeerSettings(DataSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one peer needs to know.

    Raises:
        ValueError: Personalization has nothing to choose its interpolation weight by.
    """

    name: Name
    """What people call this peer."""
    labels: list[Natural] = []
    """Keep only examples with these labels; empty keeps all."""
    part: tuple[Natural, Natural] = (0, 1)
    """`[i, n]` keeps the i-th of n interleaved parts."""
    rounds: Natural = 0
    """Rounds to do in all; 0 goes on for ever."""
    min_round_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Shortest time for a round; 0 learns as fast as it can."""
    state: str = ""
    """Folder for checkpoint, records and result; empty means `state/NAME` beside the config."""
    checkpoint_every_s: Positive = 1.0
    """Shortest time between checkpoints, and so about as much as a kill can cost; more where saving
    a large model would take over a hundredth of the time. There is always one at the end."""
    local_baseline: bool = False
    """Whether to train local-only too at the end, for comparison."""
    network: NetworkSettings
    algorithm: AlgorithmSettings = AlgorithmSettings()
    training: TrainingSettings = TrainingSettings()
    personalization: PersonalizationSettings = PersonalizationSettings()

    def __post_init__(self) -> None:
        check_personalization(self.personalization, self.algorithm, self.rounds)


SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)


def read_settings(
    path: Path, settings_type: type[SettingsT], overrides: Sequence[str] = ()
) -> SettingsT:
    """Read settings from a TOML file, `section.key=value` overrides last.

    Raises:
        ConfigError: The file isn't there or isn't TOML, a key is unknown, or a value impossible.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} isn't there: give the path of a config file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _override(tree, override)
    return build_settings(tree, settings_type, str(path))


def build_settings(tree: dict[str, Any], settings_type: type[SettingsT], where: str) -> SettingsT:
    """Turn a tree of plain values into settings, presets of the profile filled in.

    Raises:
        ConfigError: A key is unknown, missing, or its value impossible.
    """
    _check_keys(tree, settings_type, where, "")
    _check_finite(tree, where)
    section = tree.get("algorithm")
    if isinstance(section, dict):
        preset = PROFILES.get(str(section.get("profile", "default")), {})
        tree = {**tree, "algorithm": {**preset, **section}}
    try:
        return msgspec.convert(tree, settings_type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_readable(str(error))}") from error


def resolve(base: Path, path: str) -> Path:
    """Return a path of a config file, relative to that file's folder.

    Raises:
        ConfigError: It can't be a path.
    """
    try:
        return (base / Path(path).expanduser()).resolve()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{path!r} is no path: {error}") from error


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not last:
        raise ConfigError(f"--set {override}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
    tree[last] = value


def _check_keys(tree: Mapping[str, Any], struct: type[msgspec.Struct], where: str, at: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            advice = f"did you mean {at}{close[0]}?" if close else f"known are {', '.join(fields)}"
            raise ConfigError(f"{where}: unknown setting {at}{key}; {advice}")
        inner = fields[key]
        sections, of = {f"{at}{key}": value}, inner
        if get_origin(inner) is dict and isinstance(value, dict):  # sections of any name
            of = get_args(inner)[1]
            sections = {f"{at}{key}.{name}": section for name, section in value.items()}
        if isinstance(of, type) and issubclass(of, msgspec.Struct):
            for name, section in sections.items():
                if not isinstance(section, dict):
                    raise ConfigError(f"{where}: {name} is a section: write [{name}]")
                _check_keys(section, of, where, f"{name}.")
        elif get_origin(inner) is Literal and value not in (words := get_args(inner)):
            known = ", ".join(f'"{word}"' for word in words)
            raise ConfigError(f"{where}: {at}{key} = {value!r}: write one of {known}")


def _check_finite(value: object, where: str, at: str = "") -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {at} = {value}: write a finite number")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_finite(inner, where, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list):
        for inner in value:
            _check_finite(inner, where, at)


def _readable(message: str) -> str:
    """`Expected X - at `$.a.b`` as `a.b: expected X`."""
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    text = text[:1].lower() + text[1:]
    return f"{path}: {text}" if path else text
