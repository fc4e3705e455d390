"""Settings: every wrong key or value is one line that names its path."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.config import PeerSettings, build_settings, read_settings, resolve
from protocol.errors import ConfigError
from sim.comparison import CompareSettings
from sim.experiment import SwarmSettings

MINIMAL = {"name": "x", "data": "digits", "model": "mlp", "peers": 2, "rounds": 1}
CONFIGS = sorted(Path(__file__).parents[2].glob("configs/**/*.toml"))


def swarm(**changes) -> SwarmSettings:
    return build_settings({**MINIMAL, **changes}, SwarmSettings, "test.toml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_that_we_ship_is_valid(path):
    text = path.read_text()
    kind = SwarmSettings if "\npeers = " in text else PeerSettings
    assert read_settings(path, CompareSettings if "\nmethods = " in text else kind).name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peeers": 3}, "unknown setting peeers; did you mean peers?"),
        ({"algorithm": {"epsilom": 1}}, "algorithm.epsilom; did you mean algorithm.epsilon?"),
        ({"algorithm": {"profile": "deafult"}}, "algorithm.profile = 'deafult': write one of"),
        ({"algorithm": {"epsilon": 2.0}}, "algorithm.epsilon"),
        ({"algorithm": {"temperature": 0.0}}, "algorithm.temperature"),
        ({"algorithm": {"profile": "fast"}}, "algorithm.profile"),
        ({"algorithm": 3}, r"algorithm is a section: write \[algorithm\]"),
        ({"peers": "eight"}, "peers: expected `int`, got `str`"),
        ({"peers": 0}, "peers"),
        ({"rounds": 0}, "rounds"),
        ({"name": "../x"}, "name"),
        ({"partition": {"kind": "sorted"}}, "partition.kind"),
        ({"training": {"batch_size": 0}}, "training.batch_size"),
        ({"swarm": {"start": "threads"}}, "swarm.start"),
        ({"algorithm": {"alarm": float("inf")}}, "algorithm.alarm = inf: write a finite number"),
        ({"training": {"learning_rate": float("nan")}}, "learning_rate = nan: write a finite"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_path(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        swarm(**changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("test.toml: ")


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="missing required field `peers`"):
        build_settings({"name": "x", "data": "d", "model": "m", "rounds": 1}, SwarmSettings, "t")


def test_a_profile_presets_what_is_not_given():
    paper = swarm(algorithm={"profile": "paper", "temperature": 0.5}).algorithm
    assert (paper.loss, paper.measure_on, paper.anchor, paper.defended) == (
        "sum",
        "train",
        False,
        False,
    )
    assert paper.temperature == 0.5
    assert swarm().algorithm.anchor


def test_settings_survive_being_written_and_read_again():
    paper = swarm(algorithm={"profile": "paper"})
    assert build_settings(msgspec.to_builtins(paper), SwarmSettings, "t") == paper


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[tune]\nlearning_rate = [0.1, inf]", "tune.learning_rate = inf: write a finite number"),
        ("[options.ditto]\nlam = nan", "options.ditto.lam = nan: write a finite number"),
        ('[regime.mine]\nkind = "sorted"', "regime.mine.kind = 'sorted': write one of"),
        ("[regime.mine]\nsize = 3", "unknown setting regime.mine.size; "),
        ("[regime]\nmine = 3", r"regime.mine is a section: write \[regime.mine\]"),
    ],
)
def test_what_is_wrong_in_a_section_of_any_name_is_named(tmp_path, section, message):
    path = tmp_path / "x.toml"
    path.write_text(
        'name="x"\ndata="digits"\nmodel="mlp"\npeers=2\nsteps=20\nmethods=["local"]\n'
        f'regimes=["rotated"]\n{section}\n'
    )
    with pytest.raises(ConfigError, match=message):
        read_settings(path, CompareSettings)


@pytest.mark.parametrize(
    ("text", "message"),
    [("name = ", "is not TOML"), ("\xff\xfe", "can't be read")],
)
def test_a_file_that_is_not_toml_is_named(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        read_settings(path, PeerSettings)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match="isn't there"):
        read_settings(tmp_path / "none.toml", PeerSettings)
    with pytest.raises(ConfigError, match="can't be read"):
        read_settings(tmp_path, PeerSettings)


def test_overrides_take_toml_values_and_bare_words(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('name="x"\ndata="digits"\nmodel="mlp"\npeers=2\nrounds=1\n')
    overrides = ["algorithm.epsilon=0.5", "model=cnn", "algorithm.defended=false", "peers=4"]
    settings = read_settings(path, SwarmSettings, overrides)
    assert (settings.algorithm.epsilon, settings.model) == (0.5, "cnn")
    assert (settings.algorithm.defended, settings.peers) == (False, 4)


@pytest.mark.parametrize("override", ["epsilon", "=3", "peers.x=1"])
def test_a_malformed_override_is_named(tmp_path, override):
    path = tmp_path / "x.toml"
    path.write_text('name="x"\ndata="digits"\nmodel="mlp"\npeers=2\nrounds=1\n')
    with pytest.raises(ConfigError, match="--set"):
        read_settings(path, SwarmSettings, [override])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["algorithm", "peers", "data", "epsilon", "x"]), inner
            )
        ),
        max_leaves=8,
    )
)
def test_whatever_a_config_holds_nothing_but_a_config_error_comes_of_it(value):
    tree = {**MINIMAL, **(value if isinstance(value, dict) else {"peers": value})}
    try:
        build_settings(tree, SwarmSettings, "t")
    except ConfigError as error:
        assert str(error)


def test_paths_are_relative_to_the_config(tmp_path):
    assert resolve(tmp_path, "keys/a.key") == (tmp_path / "keys" / "a.key").resolve()
    assert resolve(tmp_path, "/abs") == Path("/abs")
