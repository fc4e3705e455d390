"""The `coterie` command: what it loads before it does anything."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from sim.cli import main

sys.argv = ["coterie", "keygen", "--help"]
try:
    main()
finally:
    print(*(name for name in ("sim.keygen", "sim.compare", "torch") if name in sys.modules))
"""


def test_a_command_imports_neither_the_others_nor_torch():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "sim.keygen"
