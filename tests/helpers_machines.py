"""Machines that share nothing but a cable: network namespaces with a pair of virtual cards."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAMES = ("alice", "bob")
V4 = {"alice": "10.77.0.1", "bob": "10.77.0.2"}
V6 = {"alice": "fd77::1", "bob": "fd77::2"}


def why_not() -> str:
    """Why machines can't be made here; empty when they can."""
    if shutil.which("ip") is None:
        return "the command ip (Debian's iproute2) isn't installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(
        ["ip", "netns", "add", f"coterie-probe-{os.getpid()}"], capture_output=True, check=False
    )
    if probe.returncode:
        return "this system allows no network namespaces"
    _run("ip", "netns", "del", f"coterie-probe-{os.getpid()}")
    return ""


class Machines:
    """Two machines, alice and bob, on one cable; each finds the other by name and by address."""

    def __init__(self) -> None:
        self.spaces = {name: f"coterie-{os.getpid()}-{name}" for name in NAMES}

    def command(self, name: str) -> list[str]:
        """What to put before a command so that it runs on this machine."""
        return ["ip", "netns", "exec", self.spaces[name]]

    def up(self) -> None:
        """Make both, and plug the cable in."""
        for space in self.spaces.values():
            _run("ip", "netns", "add", space)
            hosts = Path("/etc/netns") / space / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            known = {"localhost": "127.0.0.1", **{f"{each}.test": V4[each] for each in NAMES}}
            hosts.write_text("".join(f"{address} {host}\n" for host, address in known.items()))
            _run("ip", "-n", space, "link", "set", "lo", "up")
        one, two = self.spaces["alice"], self.spaces["bob"]
        _run("ip", "-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable",
             "netns", two)  # fmt: skip
        for name, space in self.spaces.items():
            _run("ip", "-n", space, "addr", "add", f"{V4[name]}/24", "dev", "cable")
            _run("ip", "-n", space, "addr", "add", f"{V6[name]}/64", "dev", "cable", "nodad")
            _run("ip", "-n", space, "link", "set", "cable", "up")

    def plug(self, name: str, *, into: bool) -> None:
        """Plug the cable of a machine in, or pull it out."""
        _run("ip", "-n", self.spaces[name], "link", "set", "cable", "up" if into else "down")
        if into:  # pulling it out took the IPv6 address away
            _run("ip", "-n", self.spaces[name], "addr", "replace", f"{V6[name]}/64", "dev", "cable",
                 "nodad")  # fmt: skip

    def slow(self, name: str, rate: str, queue: str) -> None:
        """Let a machine send no faster than a rate, such as 16mbit, over a queue such as 100ms."""
        _run("tc", "-n", self.spaces[name], "qdisc", "add", "dev", "cable", "root", "tbf", "rate",
             rate, "burst", "32kbit", "latency", queue)  # fmt: skip

    def down(self) -> None:
        """Leave nothing behind."""
        for space in self.spaces.values():
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", space)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Two machines for a while."""
    machines = Machines()
    try:
        machines.up()
        yield machines
    finally:
        machines.down()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
