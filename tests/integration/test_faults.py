"""Small versions of the faults that `make faults` lets happen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FAULTS = Path(__file__).parents[1] / "faults"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FAULTS))
    spec = importlib.util.spec_from_file_location("faults", FAULTS / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faults", module)
    spec.loader.exec_module(module)
    return module


def by_name(rows: list[dict[str, object]]) -> dict[object, dict[str, object]]:
    return {each["name"]: each for each in rows}


def test_peers_killed_and_started_again_make_no_survivor_wait(faults: ModuleType):
    rows = by_name(faults.churn(seconds=10.0, peers=4, pause_s=1.5))
    assert rows["churn: longest round of a survivor"]["holds"], rows


def test_peers_that_were_all_frozen_see_each_other_again(faults: ModuleType):
    (row,) = faults.freeze(seconds=3.0, peers=3)
    assert row["holds"], row


def test_a_flood_of_wrong_messages_is_cut_off_and_costs_no_memory(faults: ModuleType):
    rows = by_name(faults.flood(messages=100_000, seconds=3.0, times=1))
    assert rows["flood: counted as malformed"]["value"] >= 20
    assert rows["flood: messages from the allowed key, before it was cut off"]["value"] < 100_000
    assert rows["flood: refused connections"]["value"] > 10
    assert rows["flood: memory that the peer grew by"]["holds"], rows


@pytest.mark.parametrize("kind", ["nan", "nan-model", "stale"])
def test_poison_leaves_honest_models_finite(faults: ModuleType, kind: str):
    honest = faults._honest(kind, 2, 0)
    assert honest.broken == 0
    if kind != "nan-model":
        assert honest.refused > 0


def test_halves_that_could_not_reach_each_other_are_one_again(faults: ModuleType):
    for row in faults.partition(seconds=5.0, peers=4):
        assert row["holds"], row


def test_a_wall_clock_that_jumps_changes_nothing(faults: ModuleType):
    (row,) = faults.clock(peers=2)
    assert row["holds"], row
