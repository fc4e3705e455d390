import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sim.matrix import WeightMatrix, strongest_others, total_variation
from sim.terminal import draw_matrix, short_names, sparkline


def make_matrix(
    values: list[list[float]], groups: list[int] | None, names: list[str] | None = None
) -> WeightMatrix:
    names = names or [f"peer-{i:02d}" for i in range(len(values))]
    return WeightMatrix(
        rows=tuple(names[: len(values)]),
        columns=tuple(names),
        values=np.array(values, dtype=float),
        rounds=tuple(None if np.isnan(row[0]) else 0 for row in values),
        label_groups=None if groups is None else dict(zip(names, groups, strict=True)),
        descriptions={} if groups is None else {g: f"labels {g}" for g in groups},
    )


@st.composite
def matrices(draw: st.DrawFn) -> WeightMatrix:
    size = draw(st.integers(1, 12))
    groups = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.dirichlet(np.full(size, 0.3), size=size)
    values[draw(st.lists(st.integers(0, size - 1), max_size=2))] = np.nan
    return make_matrix(values.tolist(), groups)


def drawn(matrix: WeightMatrix, width: int, *, color: bool = False) -> list[str]:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
        _environ={},
    )
    with console.capture() as capture:
        console.print(draw_matrix(matrix, console))
    return capture.get().splitlines()


@given(matrices())
def test_ordering_by_group_moves_weights_along_with_their_peers(matrix: WeightMatrix) -> None:
    ordered = matrix.by_group()
    for i, row in enumerate(ordered.rows):
        for j, column in enumerate(ordered.columns):
            before = matrix.values[matrix.rows.index(row), matrix.columns.index(column)]
            assert np.array_equal(ordered.values[i, j], before, equal_nan=True)
    groups = [ordered.group(name) or 0 for name in ordered.rows]
    assert groups == sorted(groups)


@given(matrices())
def test_shares_of_the_own_group_are_shares_and_missing_without_a_record(
    matrix: WeightMatrix,
) -> None:
    missing = np.isnan(matrix.values).all(axis=1)
    share, own = matrix.same_group_share(), matrix.own_weight()
    assert np.array_equal(np.isnan(share), missing)
    assert (share[~missing] >= own[~missing] - 1e-12).all()
    assert (share[~missing] <= 1 + 1e-12).all()
    others = matrix.same_group_share_of_others()
    known = others[np.isfinite(others)]
    assert ((known >= 0) & (known <= 1)).all()


def test_the_share_of_others_leaves_the_own_model_out() -> None:
    matrix = make_matrix([[0.5, 0.3, 0.2], [0, 1, 0], [0.1, 0.2, 0.7]], groups=[0, 0, 1])
    assert matrix.same_group_share() == pytest.approx([0.8, 1.0, 0.7])
    shares = matrix.same_group_share_of_others()
    assert shares[0] == pytest.approx(0.6)
    assert np.isnan(shares[1:]).all(), "one gives nothing away, the other has nobody in its group"


def test_without_label_groups_no_share_is_made_up() -> None:
    matrix = make_matrix([[0.5, 0.5], [0.5, 0.5]], groups=None)
    assert np.isnan(matrix.same_group_share()).all()
    assert np.isnan(matrix.same_group_share_of_others()).all()


def test_the_strongest_others_come_in_order_and_without_oneself() -> None:
    weights = {"d": 0.1, "b": 0.1, "own": 0.5, "c": 0.3, "e": 0.0}
    assert strongest_others(weights, "own", 2) == [("c", 0.3), ("b", 0.1)]
    assert [name for name, _ in strongest_others(weights, "own", 9)] == ["c", "b", "d"]


def test_total_variation_is_the_weight_that_changed_hands() -> None:
    before = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    after = np.array([[0.5, 0.2, 0.3], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]])
    assert total_variation(before, after) == pytest.approx([0.3, 1.0, 0.0])


def test_csv_has_names_exact_numbers_and_empty_cells_where_nothing_is_recorded() -> None:
    file = io.StringIO()
    make_matrix([[0.1 + 0.2, 0.7], [np.nan, np.nan]], groups=[0, 1]).write_csv(file)
    assert file.getvalue() == ("peer,peer-00,peer-01\npeer-00,0.30000000000000004,0.7\npeer-01,,\n")


def test_the_drawing_is_ordered_and_marked_by_label_group() -> None:
    values = [[0.6, 0.0, 0.4], [0.0, 1.0, 0.0], [0.25, 0.004, 0.746]]
    assert drawn(make_matrix(values, groups=[0, 1, 0]), width=60) == [
        "          group 0   1  ",
        "           00  02   01 ",
        "-- group 0: labels 0 --",
        "| peer-00  60  40 |  . ",
        "| peer-02  25  75 |  . ",
        "-- group 1: labels 1 --",
        "| peer-01   .   . |100 ",
        "percent of each row's weight; . is less than 0.5",
    ]


def test_a_row_without_a_record_shows_dashes() -> None:
    lines = drawn(make_matrix([[1.0, 0.0], [np.nan, np.nan]], groups=[0, 0]), width=60)
    assert lines[-2] == "| peer-01   -   - "


def test_the_drawing_of_a_single_peer_and_of_one_without_groups() -> None:
    assert drawn(make_matrix([[1.0]], groups=[0]), width=60)[3] == "| peer-00 100 "
    lines = drawn(make_matrix([[0.6, 0.4]], None, ["bob", "alice"]), width=60)
    assert lines == [
        "      bob al~ ",
        "| bob  60  40 ",
        "percent of each row's weight; . is less than 0.5",
    ]


def test_many_peers_shrink_to_one_character_each_with_a_legend() -> None:
    size = 64
    values = np.where(np.arange(size) // 16 == np.arange(size)[:, None] // 16, 1 / 16, 0.0)
    lines = drawn(make_matrix(values.tolist(), [i // 16 for i in range(size)]), width=80)
    row = next(line for line in lines if line.startswith("| peer-20"))
    assert row.removeprefix("| peer-20 ") == "|".join([" " * 16, "@" * 16, " " * 16, " " * 16])
    assert lines[-1].startswith("weight from: . 0.1 %")
    assert max(map(len, lines)) <= 80


def test_a_middling_number_of_peers_gets_cells_of_three_or_two_characters() -> None:
    uniform = make_matrix([[1 / 20] * 20] * 20, [0] * 20)
    assert drawn(uniform, width=90)[3] == "| peer-00 " + "  5 " * 20
    assert drawn(uniform, width=89)[3] == "| peer-00 " + "  5" * 20
    assert drawn(uniform, width=69)[2] == "| peer-00 " + "@@" * 20
    assert drawn(uniform, width=49)[2] == "| peer-00 " + "@" * 20


def test_columns_that_do_not_fit_are_left_out_and_counted() -> None:
    size = 40
    values = np.eye(size) * 0.9
    values[:, 33] += 0.1
    lines = drawn(make_matrix(values.tolist(), None), width=30)
    assert lines[-1].startswith("20 columns of least weight are")
    assert lines[0] == "| peer-00 @" + " " * 18 + "-", "the own column, 18 more, and peer-33"


@given(matrices(), st.integers(16, 100), st.booleans())
def test_no_line_is_wider_than_the_console(matrix: WeightMatrix, width: int, color: bool) -> None:
    console = Console(width=width, force_terminal=color, file=io.StringIO(), _environ={})
    lines = console.render_lines(draw_matrix(matrix, console), pad=False)
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)


def test_without_a_terminal_everything_is_plain_ascii() -> None:
    lines = drawn(make_matrix([[0.6, 0.4], [0.3, 0.7]], groups=[0, 1]), width=60)
    assert "".join(lines).isascii()


def test_in_a_terminal_cells_are_colored_and_no_color_turns_that_off() -> None:
    matrix = make_matrix([[0.6, 0.4], [0.3, 0.7]], groups=[0, 1])
    assert "\x1b[" in "".join(drawn(matrix, width=60, color=True))
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"NO_COLOR": "1"})
    with console.capture() as capture:
        console.print(draw_matrix(matrix, console))
    assert "38;2" not in capture.get()
    assert "│" not in capture.get()


def test_names_lose_what_they_share_but_never_digits() -> None:
    assert short_names(["peer-00", "peer-07"]) == {"peer-00": "00", "peer-07": "07"}
    assert short_names(["alice", "bob"]) == {"alice": "alice", "bob": "bob"}
    assert short_names(["ann", "anna"]) == {"ann": "ann", "anna": "anna"}
    assert short_names(["alice"]) == {"alice": "alice"}


@pytest.mark.parametrize(
    ("plain", "expected"), [(True, "0 59"), (False, "▁ ▅█")], ids=["plain", "bars"]
)
def test_a_sparkline_has_a_step_for_each_share_and_a_gap_for_a_missing_one(
    plain: bool, expected: str
) -> None:
    assert sparkline([0.0, float("nan"), 0.5, 1.0], plain=plain) == expected
