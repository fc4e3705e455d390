"""The study of one-shot clustered learning: variants, sums over seeds, claims, and the report."""

from __future__ import annotations

import csv
import io
import json
from functools import cache

import msgspec
import numpy as np
import pytest
from rich.console import Console

from protocol.errors import ConfigError, CoterieError, RunError
from sim import study_ledger
from sim.regression import Design
from sim.study_claims import claims
from sim.study_ledger import Plan, open_ledger
from sim.study_report import Results, print_results, write_results
from sim.study_rows import Cell, Interval, do_cell, intervals, sum_up
from sim.variants import (
    BUDGET,
    CONVEX,
    IFCA_NEAR,
    IFCA_RANDOM,
    LINKAGE,
    LOCAL,
    NAMES,
    NEAR,
    ODCL,
    ORACLE,
    POOLED,
    RANDOM_KMEANS,
    Attempt,
    attempt_all,
    draw_near_start,
    inexact,
    refined,
    train_ifca,
)

SMALL = Design(peers=12, clusters=3, dim=4)
MODEL_BYTES = 4 * 4
STARTS = 2


def problem(num_examples=40, seed=0, design=SMALL, kind="linear"):
    return design.draw(kind, num_examples, np.random.default_rng(seed))


@cache
def attempts(num_examples=40, design=SMALL, kind="linear"):
    drawn = problem(num_examples, design=design, kind=kind)
    return {a.variant: a for a in attempt_all(drawn, STARTS, np.random.default_rng(9))}


@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_every_variant_is_tried_in_the_order_of_the_names_and_again_alike(kind):
    found = attempts(kind=kind)
    assert tuple(found) == NAMES
    assert found == attempts.__wrapped__(kind=kind)
    assert all(np.isfinite(each.errors).all() and min(each.errors) > 0 for each in found.values())


def test_who_finds_the_true_clusters_has_the_error_of_the_averaging_oracle():
    found = attempts()
    for name in (ODCL, LINKAGE, CONVEX, "ODCL-GC"):
        assert all(found[name].recovered)
        assert found[name].errors == pytest.approx(
            [found[ORACLE].errors[0]] * len(found[name].errors)
        )
    assert found[ORACLE].errors[0] < found[LOCAL].errors[0] / 2


def test_long_descents_end_where_exact_solves_do():
    found = attempts(400)
    assert found[inexact(BUDGET)].errors == pytest.approx(found[ODCL].errors, rel=1e-6)
    assert found[refined(20)].errors == pytest.approx(found[POOLED].errors, rel=1e-6)
    assert found[IFCA_NEAR].errors == pytest.approx(found[POOLED].errors * STARTS, rel=1e-6)


def test_what_draws_has_an_error_for_each_start_and_what_does_not_has_one():
    found = attempts()
    several = {name for name, each in found.items() if len(each.errors) == STARTS}
    drawing = {RANDOM_KMEANS, ODCL, "ODCL-GC", inexact(10), inexact(100), IFCA_RANDOM, IFCA_NEAR}
    assert several == drawing
    assert all(len(found[name].errors) == 1 for name in NAMES if name not in drawing)


def test_rounds_and_bytes_are_those_of_models_and_gradients_that_travel():
    found = attempts()

    def costs(name: str) -> tuple[int, int, int, int]:
        each = found[name]
        return each.rounds, each.gradients, each.sent_bytes, each.received_bytes

    assert costs(LOCAL) == (0, 0, 0, 0)
    assert costs(ODCL) == costs(ORACLE) == (1, 0, MODEL_BYTES, MODEL_BYTES)
    assert costs(inexact(10)) == (1, 10, MODEL_BYTES, MODEL_BYTES)
    assert costs(refined(5)) == (6, 5, 6 * MODEL_BYTES, 6 * MODEL_BYTES)
    sent, received = BUDGET * MODEL_BYTES, (BUDGET + 1) * 3 * MODEL_BYTES
    assert costs(IFCA_RANDOM) == (BUDGET, BUDGET, sent, received)
    assert costs(POOLED) == (1, 0, 40 * 5 * 4, MODEL_BYTES)


def test_alone_in_its_cluster_a_peer_is_its_own_oracle():
    found = attempts(design=Design(peers=5, clusters=5, dim=4))
    for name in (ORACLE, POOLED, ODCL):
        assert found[name].errors[0] == pytest.approx(found[LOCAL].errors[0])


def test_clusters_of_unequal_size_are_averaged_and_pooled():
    found = attempts(100, Design(peers=11, clusters=3, dim=4))
    assert found[ODCL].errors[0] == pytest.approx(found[ORACLE].errors[0])
    assert found[refined(20)].errors[0] == pytest.approx(found[POOLED].errors[0], rel=1e-6)


def test_near_starts_are_as_near_as_said():
    drawn = problem()
    start = draw_near_start(drawn, np.random.default_rng(3))
    gaps = np.linalg.norm(drawn.parameters[:, np.newaxis] - drawn.parameters, axis=2)
    least = gaps[np.triu_indices(3, 1)].min()
    far = np.linalg.norm(start - drawn.parameters, axis=1)
    np.testing.assert_allclose(far, NEAR * least)


def test_a_model_that_no_peer_chooses_stays_where_ifca_put_it():
    drawn = problem()
    hopeless = np.full((1, 4), 1e3)
    models, choices = train_ifca(
        drawn.examples, np.concatenate([drawn.parameters, hopeless]), rounds=30
    )
    np.testing.assert_array_equal(models[3:], hopeless)
    np.testing.assert_array_equal(choices, drawn.truth)


def attempt(variant: str, errors: tuple[float, ...], recovered: tuple[bool, ...] = ()) -> Attempt:
    return Attempt(
        variant=variant,
        errors=errors,
        recovered=recovered,
        rounds=1,
        sent_bytes=8,
        received_bytes=8,
    )


def made_up(seed: int, scale: float) -> Cell:
    told = [(ORACLE, 1.0), (POOLED, 0.5)]
    tried = [
        attempt(ODCL, (scale, 3 * scale), (True, False)),
        *(attempt(name, (scale * error,), (True,)) for name, error in told),
        attempt(LOCAL, (8 * scale,)),
    ]
    return Cell(kind="linear", examples=10, seed=seed, attempts=tuple(tried), low=seed, high=1.5)


def test_rows_are_means_over_starts_and_seeds_and_ratios_of_them():
    cells = [made_up(1, 1.0), made_up(2, 3.0)]
    rows = {row.variant: row for row in sum_up(cells)}
    row = rows[ODCL]
    assert (row.error, row.to_averaging, row.to_pooled) == (4.0, 2.0, 4.0)
    assert (row.start_factor, row.recovered, row.runs) == (3.0, 0.5, 4)
    assert row.moved_bytes == 16
    assert rows[LOCAL].to_averaging == 8.0
    assert rows[LOCAL].recovered is None and rows[LOCAL].start_factor is None
    expected = Interval(kind="linear", examples=10, low=1.5, high=1.5, open=1, seeds=2)
    assert intervals(cells) == [expected]


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return [
        do_cell(SMALL, kind, examples, seed, 2)
        for kind, seeds in (("linear", (1, 2)), ("logistic", (1,)))
        for examples in (3, 40)
        for seed in seeds
    ]


def test_each_kind_has_each_claim_and_verdicts_follow_the_rows(cells):
    rows, opened = sum_up(cells), intervals(cells)
    stated = claims(rows, opened, SMALL.peers)
    assert [claim.kind for claim in stated] == ["linear"] * 7 + ["logistic"] * 7
    assert len({claim.text for claim in stated}) == 7
    equal = [
        msgspec.structs.replace(row, to_averaging=1.0, to_pooled=1.02, start_factor=1.0)
        for row in rows
    ]
    held = {claim.text: claim.holds for claim in claims(equal, opened, SMALL.peers)}
    assert [text for text, holds in held.items() if not holds] == [
        "random K-means and IFCA from random starts depend on their start"
    ]
    worse = [
        msgspec.structs.replace(row, to_averaging=1.03, to_pooled=1.03, start_factor=2.0)
        for row in rows
    ]
    held = {claim.text: claim.holds for claim in claims(worse, opened, SMALL.peers)}
    assert sum(held.values()) == 2  # the start decides, and the bytes


def test_convex_clustering_is_given_the_n_from_which_it_stays_good(cells):
    linear = [cell for cell in cells if cell.kind == "linear"]
    rows, opened = sum_up(linear), intervals(linear)

    def told(*factors: float) -> str:
        left = iter(factors)
        changed = [
            msgspec.structs.replace(row, to_averaging=next(left)) if row.variant == CONVEX else row
            for row in rows
        ]
        return next(c.seen for c in claims(changed, opened, 12) if c.text.startswith(CONVEX))

    assert told(1.0, 1.0).startswith("from n = 3 on")
    assert told(1.5, 1.0).startswith("from n = 40 on")
    assert told(1.0, 1.5).startswith("at none of these n")


def test_one_start_can_show_no_dependence_on_it():
    alone = [do_cell(SMALL, "linear", 20, 1, 1)]
    stated = claims(sum_up(alone), intervals(alone), SMALL.peers)
    seen = [claim.seen for claim in stated if "start" in claim.text]
    assert seen == ["one start only"] * 2


def test_the_report_has_a_table_for_each_kind_the_claims_and_files(cells, tmp_path):
    results = Results.of(SMALL, 2, cells, 12.34)
    text = io.StringIO()
    print_results(results, Console(file=text, width=80))
    shown = text.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    for name in NAMES:
        assert sum(line.startswith(name) for line in shown.splitlines()) >= 2
    assert "claims, linear" in shown and "claims, logistic" in shown
    write_results(tmp_path, results)
    told = json.loads((tmp_path / "results.json").read_text())
    assert len(told["rows"]) == 2 * 2 * len(NAMES) and told["seconds"] == 12.3
    assert msgspec.convert(told, Results) == results
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["variant"] for line in lines[: len(NAMES)]] == list(NAMES)
    assert float(lines[0]["error"]) == results.rows[0].error
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_results_that_cannot_be_written_are_said_so(cells, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="the results can't be written"):
        write_results(tmp_path / "file" / "in", Results.of(SMALL, 2, cells, 1.0))


def plan(**changes) -> Plan:
    whole = {"design": SMALL, "starts": 2, "kinds": ("linear",), "sizes": (3, 40), "seeds": 2}
    return Plan(**(whole | changes))


def test_a_ledger_keeps_problems_and_is_gone_on_with(cells, tmp_path):
    folder = tmp_path / "study"
    with open_ledger(folder, plan()) as ledger:
        assert ledger.read(plan().problems()) == list(plan().problems())
        ledger.add(cells[0], 1.5)
        with pytest.raises(CoterieError, match="in use by another coterie study"):
            open_ledger(folder, plan()).__enter__()
    more = plan(kinds=("logistic", "linear"), seeds=1)
    with open_ledger(folder, more) as ledger:
        missing = ledger.read(more.problems())
        assert missing == [("logistic", 3, 1), ("logistic", 40, 1), ("linear", 40, 1)]
        assert ledger.kept()["linear", 3, 1].cell == cells[0]


def test_problems_of_other_code_and_damaged_ones_are_done_again(cells, tmp_path, monkeypatch):
    with open_ledger(tmp_path, plan()) as ledger:
        ledger.add(cells[0], 1.5)
        ledger.add(cells[1], 1.5)
    (tmp_path / "problems" / "linear-n3-seed1.json").write_text("{")
    with open_ledger(tmp_path, plan()) as ledger:
        assert ledger.read([("linear", 3, 1), ("linear", 3, 2)]) == [("linear", 3, 1)]
    monkeypatch.setattr(study_ledger, "code_digest", lambda: "other")
    with open_ledger(tmp_path, plan()) as ledger:
        assert len(ledger.read(plan().problems())) == 4


def test_a_folder_of_something_else_is_refused(tmp_path):
    with open_ledger(tmp_path / "study", plan()):
        pass
    with (
        pytest.raises(ConfigError, match=r"other problems \(peers = 12.*; here peers = 13"),
        open_ledger(tmp_path / "study", plan(design=Design(peers=13, clusters=3, dim=4))),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="not the folder of a study"),
        open_ledger(tmp_path, plan()),
    ):
        pass
    (tmp_path / "study" / "study.json").write_text("{")
    with pytest.raises(RunError, match="damaged"), open_ledger(tmp_path / "study", plan()):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder"), open_ledger(tmp_path / "file", plan()):
        pass


def test_plans_without_a_problem_are_refused():
    with pytest.raises(ConfigError, match="at least one problem"):
        plan(kinds=())
    for name in ("seeds", "starts"):
        with pytest.raises(ConfigError, match=f"{name} = 0"):
            plan(**{name: 0})
