import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_folders import record_line, write_records, write_result, write_run, write_swarm

from protocol.errors import RunError
from sim.picture import draw_picture
from sim.records import Run
from sim.report import (
    bottom_decile,
    clearly_below,
    mean,
    print_report,
    summarize,
    write_report,
)

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
SHARES = st.floats(0, 1, allow_nan=False)


def printed(run: Run, width: int = 90) -> str:
    console = Console(file=io.StringIO(), width=width, _environ={})
    with console.capture() as capture:
        print_report(run, summarize(run), console)
    return capture.get()


def test_the_report_writes_a_summary_a_table_and_a_picture(tmp_path: Path) -> None:
    names = write_run(tmp_path, [0, 0, 1, 1])
    summary = write_report(Run.open(tmp_path), seconds=42.5)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["seconds"] == summary.seconds == 42.5
    assert written["peers"] == names
    assert written["rounds"] == 10
    assert written["rounds_done"] == dict.fromkeys(names, 10)
    assert written["label_groups"] == [0, 0, 1, 1]
    assert written["groups"] == ["labels 0-4"] * 2 + ["labels 5-9"] * 2
    assert written["accuracy"] == dict.fromkeys(names, 0.9)
    assert (written["mean"], written["own_mean"], written["local_mean"]) == (0.9, 0.85, 0.8)
    assert written["bottom_decile"] == 0.9
    assert written["bytes_sent"] == dict.fromkeys(names, 11_000_000)
    assert written["same_group_weight"] == pytest.approx(0.9)
    assert written["same_group_weight_of_others"] == pytest.approx(0.45 / 0.55)
    assert [sum(row) for row in written["weights"]] == pytest.approx([1.0] * 4)
    with (tmp_path / "weights.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["peer", *names]
    assert [[float(cell) for cell in row[1:]] for row in rows[1:]] == written["weights"]
    assert (tmp_path / "weights.png").read_bytes().startswith(PNG_MAGIC)


def test_peers_without_test_data_or_without_a_result_are_in_no_mean(tmp_path: Path) -> None:
    names = write_run(tmp_path, [0, 0, 0])
    write_result(
        tmp_path / "peers" / names[0],
        names[0],
        num_test=0,
        accuracy=None,
        own_accuracy=None,
        local_accuracy=None,
    )
    (tmp_path / "peers" / names[1] / "result.json").unlink()
    summary = summarize(Run.open(tmp_path))
    assert (summary.untested, summary.unfinished) == ([names[0]], [names[1]])
    assert summary.accuracy == {names[0]: None, names[1]: None, names[2]: 0.9}
    assert summary.mean == summary.weighted_mean == summary.bottom_decile == 0.9
    assert summary.bytes_sent[names[1]] == 10_000_000, "of its newest record"
    output = printed(Run.open(tmp_path))
    assert "no test data" in output
    assert "not finished" in output


def clustered_run(folder: Path, digests: list[str], teller: str = "") -> Run:
    names = write_swarm(folder, [0] * len(digests), rounds=2)
    for name, digest in zip(names, digests, strict=True):
        said = {"clustering": digest, "clustered_by": teller or name} if digest else {}
        lines = [record_line(0, {name: 1.0}, **said), record_line(1, {name: 1.0})]
        write_records(folder / "peers" / name, lines)
        write_result(folder / "peers" / name, name)
    return Run.open(folder)


def test_the_report_says_whether_all_peers_found_the_same_clustering(tmp_path: Path) -> None:
    same = clustered_run(tmp_path / "same", ["0123456789abcdef"] * 3)
    assert "all 3 peers found the same clustering (digest 0123456789abcdef)" in printed(same, 120)
    digests = ["fedcba9876543210", "0123456789abcdef", "0123456789abcdef", ""]
    other = clustered_run(tmp_path / "other", digests)
    assert (
        "2 of 4 peers found one clustering (digest 0123456789abcdef); found another: peer-00; "
        "clustered nothing: peer-03"
    ) in " ".join(printed(other, 200).split())
    write_report(other)
    written = json.loads((tmp_path / "other" / "summary.json").read_text())
    assert list(written["clusterings"].values()) == [digest or None for digest in digests]


def test_the_report_says_who_told_the_others_of_its_clustering(tmp_path: Path) -> None:
    told = clustered_run(tmp_path, ["0123456789abcdef"] * 3, teller="peer-01")
    assert (
        "all 3 peers found the same clustering (digest 0123456789abcdef); peer-01 told 2 of them"
    ) in " ".join(printed(told, 200).split())
    assert summarize(told).clustered_by == dict.fromkeys(told.names, "peer-01")


def test_a_run_that_clustered_nothing_says_nothing_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, [0, 0])
    assert summarize(Run.open(tmp_path)).clusterings is None
    assert "clustering" not in printed(Run.open(tmp_path))


def test_no_number_of_a_summary_is_ever_nan(tmp_path: Path) -> None:
    names = write_swarm(tmp_path, [0, 1, 1])
    write_records(tmp_path / "peers" / names[0], [record_line(0, {names[0]: 1.0}, loss=None)])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in summary.json")

    write_report(Run.open(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary["weights"] == [[1.0, 0.0, 0.0], None, None]
    assert summary["mean"] is summary["bottom_decile"] is None
    assert summary["same_group_weight"] == 1.0
    assert summary["same_group_weight_of_others"] is None
    assert summary["rounds_done"] == {names[0]: 1, names[1]: 0, names[2]: 0}
    assert summary["seconds"] == 0.5


def test_a_run_without_a_record_has_no_report(tmp_path: Path) -> None:
    write_swarm(tmp_path, [0, 0])
    with pytest.raises(RunError, match="no peer has recorded a round"):
        write_report(Run.open(tmp_path))


def test_a_single_peer_is_reported_too(tmp_path: Path) -> None:
    write_run(tmp_path, [0])
    summary = write_report(Run.open(tmp_path))
    assert summary.weights == [[1.0]]
    assert summary.same_group_weight == 1.0
    assert summary.same_group_weight_of_others is None
    assert "| peer-00 100" in printed(Run.open(tmp_path))


def test_the_printed_report_has_a_line_per_peer_the_means_and_the_matrix(tmp_path: Path) -> None:
    names = write_run(tmp_path, [0, 1, 0])
    write_result(tmp_path / "peers" / names[1], names[1], accuracy=0.5)
    output = printed(Run.open(tmp_path))
    lines = {line.split("  ")[0]: line.split() for line in output.splitlines() if line}
    assert lines["peer-00"] == ["peer-00", "50", "90.0", "85.0", "80.0", "+10.0", "11.0"]
    assert lines["peer-01"][1:7] == ["50", "50.0", "85.0", "80.0", "-30.0", "11.0"]
    assert lines["peer-01"][7:] == ["below", "local-only"]
    assert lines["mean"] == ["mean", "76.7", "85.0", "80.0", "-3.3"]
    assert lines["bottom decile"] == ["bottom", "decile", "50.0", "-", "80.0", "-30.0"]
    assert output.index("peer-02") < output.index("peer-01"), "in label group order"
    assert "weight on peers of the own label group: 90.0 %" in output
    assert "digits: collaboration weights after round 9" in output
    assert "-- group 1: labels 5-9 " in output
    assert output.rstrip().endswith(f"run folder: {tmp_path}")
    assert output.isascii()


def test_damaged_lines_are_mentioned(tmp_path: Path) -> None:
    write_run(tmp_path, [0])
    write_records(tmp_path / "peers" / "peer-00", ["{\n"])
    assert "1 damaged record lines were passed over" in printed(Run.open(tmp_path))


@given(SHARES, SHARES, st.integers(1, 10_000))
def test_nobody_is_clearly_below_what_it_reaches(a: float, b: float, num_test: int) -> None:
    assert not clearly_below(max(a, b), min(a, b), num_test)


def test_a_few_examples_never_make_a_difference_clear_but_many_do() -> None:
    assert not clearly_below(0.0, 1.0, num_test=1)
    assert not clearly_below(0.80, 0.85, num_test=100)
    assert clearly_below(0.80, 0.85, num_test=1000)


@given(st.lists(st.none() | SHARES, max_size=70))
def test_the_bottom_decile_has_a_tenth_of_the_peers_at_or_below_it(
    accuracies: list[float | None],
) -> None:
    known = [a for a in accuracies if a is not None]
    value = bottom_decile(accuracies)
    if value is None:
        assert not known
        return
    assert sum(a < value for a in known) < len(known) / 10 <= sum(a <= value for a in known)


def test_a_weighted_mean_counts_peers_by_their_examples() -> None:
    values = {"a": 0.5, "b": 1.0, "c": None}
    assert mean(values) == 0.75
    assert mean(values, {"a": 30, "b": 10, "c": 99}) == 0.625
    assert mean({"c": None}) is None
    assert math.isclose(mean(dict.fromkeys("abc", 0.1)) or 0, 0.1)


@pytest.mark.parametrize("size", [1, 8, 64])
def test_pictures_are_drawn_of_any_number_of_peers(tmp_path: Path, size: int) -> None:
    write_run(tmp_path, [i % min(size, 4) for i in range(size)], rounds=1)
    draw_picture(Run.open(tmp_path).weight_matrix(), tmp_path / "w.png", "title")
    assert (tmp_path / "w.png").read_bytes().startswith(PNG_MAGIC)


def test_a_picture_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, [0, 1])
    matrix = Run.open(tmp_path).weight_matrix()
    with pytest.raises(RunError, match=r"w\.png: the picture can't be written"):
        draw_picture(matrix, tmp_path / "missing" / "w.png", "title")
    with pytest.raises(RunError, match=r"w\.nonsense: the picture can't be written"):
        draw_picture(matrix, tmp_path / "w.nonsense", "title")


def test_matplotlib_is_not_loaded_before_a_picture_is_drawn() -> None:
    code = (
        "import sys, sim.report, sim.inspect, sim.progress; sys.exit('matplotlib' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
