import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import record_line, write_records, write_result, write_run, write_swarm

from protocol.errors import RunError
from sim.records import PeerRecords, Run

WEIGHTS = {"peer-00": 0.75, "peer-01": 0.25}


def test_a_run_tells_its_name_rounds_seed_peers_and_label_groups(tmp_path: Path) -> None:
    names = write_run(tmp_path, [0, 0, 1], rounds=4)
    run = Run.open(tmp_path)
    assert (run.name, run.total_rounds, run.seed) == ("digits", 4, 7)
    assert run.names == tuple(names)
    assert run.label_groups == {"peer-00": 0, "peer-01": 0, "peer-02": 1}
    assert run.descriptions == {0: "labels 0-4", 1: "labels 5-9"}
    assert run.recorded_rounds() == [0, 1, 2, 3]


def test_a_record_is_read_whole(tmp_path: Path) -> None:
    write_records(tmp_path, [record_line(3, WEIGHTS, loss=None, validation_accuracy=None)])
    peer = PeerRecords("peer-00", tmp_path)
    assert peer.refresh()
    record = peer.latest
    assert record is not None
    assert (record.round_number, record.time_s, record.weights) == (3, 2.0, WEIGHTS)
    assert record.loss is None
    assert record.validation_accuracy is None
    assert record.bytes_sent == 4_000_000
    assert record.gradients == {"applied": 2, "stale": 1}


def test_a_half_written_last_line_waits_for_its_rest(tmp_path: Path) -> None:
    whole = record_line(1, WEIGHTS)
    write_records(tmp_path, [record_line(0, WEIGHTS), whole[:30]])
    peer = PeerRecords("peer-00", tmp_path)
    peer.refresh()
    assert peer.rounds == [0]
    assert not peer.refresh()
    write_records(tmp_path, [whole[30:]])
    assert peer.refresh()
    assert peer.rounds == [0, 1]
    assert peer.damaged_lines == 0


@given(
    rounds=st.lists(st.integers(0, 9), max_size=12),
    cuts=st.lists(st.integers(0, 5000), max_size=8),
)
def test_reading_while_the_file_grows_gives_what_reading_it_whole_gives(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[int], cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("peer")
    data = "".join(record_line(r, {"é": 1.0}, time_s=i) for i, r in enumerate(rounds)).encode()
    growing, whole = (PeerRecords("é", folder) for _ in range(2))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in pairwise(edges):
        with (folder / "record.jsonl").open("ab") as file:
            file.write(data[start:stop])
        growing.refresh()
    whole.refresh()
    assert growing.records == whole.records
    assert growing.rounds == [record.round_number for record in whole.records]
    assert all(a < b for a, b in pairwise(whole.rounds))


def test_after_a_restart_the_last_line_of_a_round_wins(tmp_path: Path) -> None:
    before = [record_line(r, WEIGHTS, loss=1.0) for r in range(5)]
    write_records(tmp_path, [*before, record_line(3, WEIGHTS, loss=2.0)])
    peer = PeerRecords("peer-00", tmp_path)
    peer.refresh()
    assert peer.rounds == [0, 1, 2, 3]
    assert [record.loss for record in peer.records] == [1.0, 1.0, 1.0, 2.0]


def test_a_line_damaged_by_a_crash_is_counted_and_passed_over(tmp_path: Path) -> None:
    glued = record_line(1, WEIGHTS)[:20] + record_line(2, WEIGHTS)
    write_records(tmp_path, [record_line(0, WEIGHTS), glued, record_line(3, WEIGHTS)])
    peer = PeerRecords("peer-00", tmp_path)
    peer.refresh()
    assert peer.rounds == [0, 3]
    assert peer.damaged_lines == 1


def test_numbers_that_are_not_finite_never_get_in(tmp_path: Path) -> None:
    write_records(tmp_path, [record_line(0, {"peer-00": float("nan")})])
    peer = PeerRecords("peer-00", tmp_path)
    peer.refresh()
    assert peer.records == []
    assert peer.damaged_lines == 1


def test_a_file_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    write_records(tmp_path, [record_line(r, WEIGHTS) for r in range(4)])
    peer = PeerRecords("peer-00", tmp_path)
    peer.refresh()
    (tmp_path / "record.jsonl").write_text(record_line(0, WEIGHTS))
    peer.refresh()
    assert peer.rounds == [0]


def test_only_the_newest_rounds_are_held_when_asked(tmp_path: Path) -> None:
    write_records(tmp_path, [record_line(r, WEIGHTS) for r in range(20)])
    peer = PeerRecords("peer-00", tmp_path, keep=3)
    peer.refresh()
    assert peer.rounds == [17, 18, 19]
    assert peer.rounds_done == 20


def test_a_peer_counts_with_its_newest_record_at_or_before_the_round(tmp_path: Path) -> None:
    names = write_swarm(tmp_path, [0, 0])
    for name, rounds in zip(names, ([0, 1, 2], [2]), strict=True):
        lines = [record_line(r, {names[0]: r / 10, names[1]: 1 - r / 10}) for r in rounds]
        write_records(tmp_path / "peers" / name, lines)
    run = Run.open(tmp_path)
    early = run.weight_matrix(1)
    assert early.rounds == (1, None)
    assert early.values[0].tolist() == [0.1, 0.9]
    assert np.isnan(early.values[1]).all()
    assert run.weight_matrix().rounds == (2, 2)


def test_a_peer_that_has_no_folder_yet_is_a_row_without_numbers(tmp_path: Path) -> None:
    names = write_swarm(tmp_path, [0, 1])
    write_records(tmp_path / "peers" / names[0], [record_line(0, WEIGHTS)])
    matrix = Run.open(tmp_path).weight_matrix()
    assert np.isnan(matrix.values[1]).all()
    assert matrix.values[0].tolist() == [0.75, 0.25]


def test_a_round_that_is_not_recorded_is_refused_with_those_that_are(tmp_path: Path) -> None:
    write_run(tmp_path, [0, 0], rounds=5)
    with pytest.raises(RunError, match="round 5 is not recorded; there are rounds 0 to 4"):
        Run.open(tmp_path).weight_matrix(5)


def test_a_swarm_that_is_still_starting_opens_but_has_no_matrix(tmp_path: Path) -> None:
    write_swarm(tmp_path, [0, 0])
    run = Run.open(tmp_path)
    with pytest.raises(RunError, match="no peer has recorded a round"):
        run.weight_matrix()
    write_records(tmp_path / "peers" / "peer-00", [record_line(0, WEIGHTS)])
    run.refresh()
    assert run.recorded_rounds() == [0]


def test_the_state_folder_of_one_peer_is_a_run_of_one_row(tmp_path: Path) -> None:
    write_records(tmp_path / "state", [record_line(0, {"bob": 0.6, "alice": 0.4})])
    write_result(tmp_path / "state", "bob")
    matrix = Run.open(tmp_path / "state").weight_matrix()
    assert matrix.rows == ("bob",)
    assert matrix.columns == ("bob", "alice")
    assert matrix.values.tolist() == [[0.6, 0.4]]
    assert matrix.label_groups is None


def test_a_state_folder_that_names_no_peer_goes_by_its_own_name(tmp_path: Path) -> None:
    write_records(tmp_path / "alice", [record_line(0, {"bob": 0.6, "alice": 0.4})])
    assert Run.open(tmp_path / "alice").names == ("alice",)


def test_latest_and_bare_names_are_looked_up_among_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "20260131-120000-digits", [0, 0])
    (tmp_path / "runs" / "latest").symlink_to("20260131-120000-digits")
    monkeypatch.chdir(tmp_path)
    for path in ("latest", "runs/latest", "20260131-120000-digits"):
        assert Run.open(path).folder == Path("runs/20260131-120000-digits")


def test_a_missing_run_is_refused_with_the_newest_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="digits: no such run folder; there is none in runs/"):
        Run.open("digits")
    write_run(tmp_path / "runs" / "20260131-120000-digits", [0, 0])
    with pytest.raises(RunError, match="the newest in runs/: 20260131-120000-digits"):
        Run.open("digits")


def test_a_folder_without_records_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="it is no run folder"):
        Run.open(tmp_path)
    (tmp_path / "record.jsonl").write_text("")
    with pytest.raises(RunError, match="is a file; name the run folder"):
        Run.open(tmp_path / "record.jsonl")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"label_groups": [0]}, "label_groups has 1 entries for 2 peers"),
        ({"peers": "all"}, "can't be read"),
    ],
)
def test_a_damaged_swarm_file_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    write_swarm(tmp_path, [0, 1])
    swarm = json.loads((tmp_path / "swarm.json").read_text())
    (tmp_path / "swarm.json").write_text(json.dumps(swarm | change))
    with pytest.raises(RunError, match=f"swarm.json: {complaint}"):
        Run.open(tmp_path)


def test_a_damaged_result_reads_as_not_finished(tmp_path: Path) -> None:
    write_run(tmp_path, [0])
    (tmp_path / "peers" / "peer-00" / "result.json").write_text('{"name": "peer')
    assert Run.open(tmp_path).peers[0].result() is None
