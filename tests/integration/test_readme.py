"""What the README shows works as it is shown."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from helpers_processes import COTERIE, ENVIRONMENT

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code(kind: str, first_line: str) -> str:
    blocks = re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(first_line)]
    return block


def test_your_own_model_and_data_work_as_in_the_readme(tmp_path):
    module, config = code("python", "# moons.py"), code("toml", "# moons.toml")
    assert len((module + config).splitlines()) < 40
    (tmp_path / "moons.py").write_text(module)
    (tmp_path / "moons.toml").write_text(config)
    result = subprocess.run(
        [*COTERIE, "swarm", "moons.toml", "--out", "run"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["mean"] > 0.75  # two noisy moons: about 0.89; guessing gets 0.5
    assert summary["same_group_weight"] > 0.8


def test_the_config_of_one_peer_by_hand_is_the_file_we_ship():
    shown = code("toml", 'name = "alice"')
    shipped = (ROOT / "configs" / "alice.toml").read_text()
    strip = re.compile(r"\s*#.*")
    assert [strip.sub("", line) for line in shown.splitlines()] == [
        strip.sub("", line) for line in shipped.splitlines() if not line.startswith("#")
    ]


def test_every_file_the_readme_names_is_there():
    for path in re.findall(r"`((?:configs|peer|protocol|sim|tests)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).exists(), path
