import io
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import grouped_weights, record_line, write_records, write_swarm

from sim.progress import SwarmProgress
from sim.records import Run


class Swarm:
    """A made-up swarm of two label groups whose peers record rounds when told to."""

    def __init__(self, folder: Path, size: int, *, terminal: bool, height: int = 40) -> None:
        self.folder = folder
        self.groups = [i % 2 for i in range(size)]
        self.names = write_swarm(folder, self.groups, rounds=20)
        self.states = dict.fromkeys(self.names, "running")
        self.time_s = 0.0
        self.output = io.StringIO()
        self.console = Console(
            file=self.output, width=100, height=height, force_terminal=terminal,
            color_system=None, _environ={},
        )  # fmt: skip
        self.progress = SwarmProgress(
            Run.open(folder), self.console, total_rounds=20, clock=lambda: self.time_s
        )

    def record(self, round_number: int, *names: str, **others: object) -> None:
        for name in names or self.names:
            weights = grouped_weights(self.names, self.groups, name, 0.8)
            line = record_line(round_number, weights, **others)
            write_records(self.folder / "peers" / name, [line])

    def shown(self) -> str:
        """Return what was printed since the last call."""
        text = self.output.getvalue()
        self.output.seek(0)
        self.output.truncate()
        return text


@pytest.fixture
def plain(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path, 4, terminal=False)


def test_without_a_terminal_a_line_comes_for_every_tenth_of_the_rounds(plain: Swarm) -> None:
    with plain.progress as progress:
        for round_number in range(20):
            plain.time_s += 1.0
            plain.record(round_number)
            progress.update(plain.states)
            progress.update(plain.states)
    lines = plain.shown().splitlines()
    assert len(lines) == 10
    assert lines[0] == (
        "[   2.0 s] round 2 of 20 (slowest 2), validation accuracy 55.0 %, 4 running"
    )
    assert lines[-1].startswith("[  20.0 s] round 20 of 20")


def test_slow_rounds_are_told_of_every_fifteen_seconds_but_only_when_something_is_new(
    plain: Swarm,
) -> None:
    with plain.progress as progress:
        plain.record(0)
        progress.update(plain.states)
        assert plain.shown() == ""
        plain.time_s = 15.0
        progress.update(plain.states)
        assert "round 1 of 20" in plain.shown()
        plain.time_s = 60.0
        progress.update(plain.states)
        assert plain.shown() == ""


def test_a_peer_that_goes_down_and_comes_back_is_told_of_at_once(plain: Swarm) -> None:
    with plain.progress as progress:
        progress.update(plain.states)
        progress.update(plain.states | {"peer-02": "down"})
        assert plain.shown() == "[   0.0 s] peer-02 is down\n"
        progress.update(plain.states)
        assert plain.shown() == "[   0.0 s] peer-02 is running\n"


def test_a_peer_that_is_down_does_not_hold_the_slowest_round_back(plain: Swarm) -> None:
    with plain.progress as progress:
        progress.update(plain.states)
        for round_number in range(4):
            plain.record(round_number, *plain.names[1:])
        progress.update(plain.states | {"peer-00": "down"})
        assert "round 4 of 20 (slowest 4)" in plain.shown()


def test_what_was_not_said_yet_is_said_at_the_end(plain: Swarm) -> None:
    with plain.progress as progress:
        progress.update(plain.states)
        plain.record(0)
        progress.update(plain.states)
        assert plain.shown() == ""
    assert plain.shown().startswith("[   0.0 s] round 1 of 20")


def test_plain_lines_are_plain_ascii(plain: Swarm) -> None:
    with plain.progress as progress:
        plain.record(5)
        progress.update(plain.states)
    assert plain.shown().isascii()


def test_the_live_table_has_a_row_for_each_peer(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 4, terminal=True)
    with swarm.progress as progress:
        swarm.record(0)
        swarm.record(1, "peer-00", "peer-01", validation_accuracy=None, loss=None)
        states = {"peer-00": "running", "peer-02": "finished", "peer-03": "down"}
        progress.update(states)
        lines = swarm.shown().splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("peer-")}
    assert rows["peer-00"] == (
        ["peer-00", "2/20", "-", "-", "02", "40", "01", "10", "03", "10", "2.0", "MB/s", "running"]
    )
    assert rows["peer-01"][-1] == "starting"
    assert rows["peer-02"] == (
        ["peer-02", "1/20", "2.000", "50.0", "00", "40", "01", "10", "03", "10", "-", "finished"]
    )
    assert rows["peer-03"][-2:] == ["-", "down"]


def test_the_headline_tells_the_time_spent_and_left(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 2, terminal=True)
    with swarm.progress as progress:
        swarm.time_s = 30.0  # starting up doesn't count for the pace
        swarm.record(0)
        progress.update(swarm.states)
        assert "left" not in swarm.shown()
        swarm.time_s = 40.0
        swarm.record(1)
        swarm.record(2, "peer-00")
        swarm.record(2, "peer-01")
        progress.update(swarm.states)
        assert "0:40  about 1:25 left" in swarm.shown()


def test_more_peers_than_lines_are_condensed(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 64, terminal=True, height=24)
    with swarm.progress as progress:
        swarm.record(0)
        progress.update(swarm.states | {"peer-60": "down"})
        lines = swarm.shown().splitlines()
    assert sum(line.startswith("peer-") for line in lines) == 17
    assert any(line.startswith("and 47 more: 1 down, 46 running") for line in lines)
    assert len(lines) < 24


def test_traffic_after_a_restart_is_that_since_the_restart(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 2, terminal=True)
    with swarm.progress as progress:
        swarm.record(5, time_s=900.0, bytes_sent=10**9)
        swarm.record(6, time_s=1.0, bytes_sent=0)
        swarm.record(7, time_s=3.0, bytes_sent=5000)
        progress.update(swarm.states)
        assert "2 kB/s" in swarm.shown()


def test_the_table_is_drawn_twice_a_second_at_most_and_without_news_for_its_clock(
    tmp_path: Path,
) -> None:
    swarm = Swarm(tmp_path, 2, terminal=True)
    with swarm.progress as progress:
        progress.update(swarm.states)
        swarm.shown()
        swarm.record(0)
        swarm.time_s = 0.25
        progress.update(swarm.states)
        assert swarm.shown() == ""
        swarm.time_s = 0.5
        progress.update(swarm.states)
        assert "1/20" in swarm.shown()
        swarm.time_s = 1.25
        progress.update(swarm.states)
        assert swarm.shown() == ""
        swarm.time_s = 1.5
        progress.update(swarm.states)
        assert "0:01" in swarm.shown()


def test_a_run_without_end_shows_rounds_without_a_total(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 2, terminal=True)
    endless = SwarmProgress(Run.open(tmp_path), swarm.console, None, clock=lambda: swarm.time_s)
    with endless as progress:
        swarm.record(0)
        progress.update(swarm.states)
        assert "1/-" in swarm.shown()


def test_the_last_table_stays_in_view_only_after_an_error(tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    swarm = Swarm(tmp_path, 2, terminal=True)
    erase_line = "\x1b[2K"
    with swarm.progress as progress:
        progress.update(swarm.states)
        swarm.shown()
    assert swarm.shown().rstrip().endswith(erase_line)
    again = SwarmProgress(Run.open(tmp_path), swarm.console, 20, clock=lambda: 0.0)
    with pytest.raises(Broken), again as progress:
        progress.update(swarm.states)
        raise Broken
    assert not swarm.shown().rstrip().endswith(erase_line)
