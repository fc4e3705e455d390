import argparse
import csv
import io
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import record_line, write_records, write_result, write_run, write_swarm

from protocol.errors import RunError
from sim import inspect


def inspected(*arguments: str | Path, width: int = 80) -> str:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    console = Console(file=io.StringIO(), width=width, _environ={})
    with console.capture() as capture:
        assert inspect.run(parser.parse_args(list(map(str, arguments))), console) == 0
    return capture.get()


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", [0, 0, 1, 1])
    return tmp_path / "run"


def test_it_prints_the_matrix_the_strongest_collaborators_and_how_weights_moved(
    finished: Path,
) -> None:
    lines = inspected(finished).splitlines()
    assert lines[0] == "digits: collaboration weights after round 9"
    assert "-- group 0: labels 0-4 ----" in lines
    assert "| peer-00  45  45 |  5   5 " in lines
    rows = [line.split() for line in lines if line.startswith("peer-00")]
    assert rows[0] == (
        ["peer-00", "9", "45.0", "90.0", "peer-01", "45.0", "peer-02", "5.0", "peer-03", "5.0"]
    )
    assert rows[1][:3] == ["peer-00", "01", "25"]
    assert rows[1][-4:-1] == ["01", "45", ">9"]
    assert rows[1][-1] == "5556677889"


def test_an_earlier_round_is_shown_as_it_was(finished: Path) -> None:
    output = inspected(finished, "--round", "0")
    assert "after round 0" in output
    assert "| peer-00  25  25 | 25  25" in output
    assert "by round" not in output, "nothing has moved yet"


def test_a_round_that_is_not_there_is_refused(finished: Path) -> None:
    with pytest.raises(RunError, match="round 10 is not recorded; there are rounds 0 to 9"):
        inspected(finished, "--round", "10")
    with pytest.raises(RunError, match="round -1 is not recorded"):
        inspected(finished, "--round", "-1")


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nowhere: no such run folder"):
        inspected(tmp_path / "nowhere")


def test_csv_goes_to_standard_output_alone(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspected(finished, "--csv", "-", "--round", "0") == ""
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["peer", "peer-00", "peer-01", "peer-02", "peer-03"]
    assert rows[4] == ["peer-03", "0.25", "0.25", "0.25", "0.25"]


def test_csv_and_picture_are_written_where_asked(finished: Path, tmp_path: Path) -> None:
    output = inspected(finished, "--csv", tmp_path / "w.csv", "--png", tmp_path / "w.png")
    assert (tmp_path / "w.csv").read_text().startswith("peer,peer-00,")
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {tmp_path / 'w.csv'}\nwrote {tmp_path / 'w.png'}\n" in output


def test_csv_that_cannot_be_written_says_so(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"w\.csv: the matrix can't be written"):
        inspected(finished, "--csv", tmp_path / "missing" / "w.csv")


def test_a_run_that_is_still_going_on_shows_what_there_is(tmp_path: Path) -> None:
    names = write_swarm(tmp_path, [0, 0, 0])
    weights = {names[0]: 0.6, names[1]: 0.4}
    write_records(tmp_path / "peers" / names[0], [record_line(r, weights) for r in range(3)])
    write_records(tmp_path / "peers" / names[1], [record_line(0, weights), '{"round": 1, "we'])
    output = inspected(tmp_path)
    assert "after rounds 0 to 2" in output
    assert "no record by then: peer-02" in output
    assert "damaged" not in output, "half a line is not damaged, it is not finished"
    assert "nan" not in output


def test_the_state_folder_of_one_peer_shows_its_own_row(tmp_path: Path) -> None:
    for round_number in range(3):
        weights = {"bob": 0.6, "alice": 0.3, "carol": 0.1}
        write_records(tmp_path, [record_line(round_number, weights)])
    write_result(tmp_path, "bob")
    output = inspected(tmp_path)
    assert "| bob  60  30  10" in output
    assert "weight on the own model over all rounds" in output
    assert "666" in output


def test_64_peers_fit_eighty_columns(tmp_path: Path) -> None:
    write_run(tmp_path, [i // 16 for i in range(64)], rounds=12)
    output = inspected(tmp_path)
    assert max(map(len, output.splitlines())) <= 80
    assert output.isascii()
    assert "~" not in output, "nothing had to be cut"


def test_a_single_peer_can_be_inspected(tmp_path: Path) -> None:
    write_run(tmp_path, [0], rounds=2)
    assert "| peer-00 100" in inspected(tmp_path)
