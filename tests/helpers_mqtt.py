"""A Mosquitto of one's own, on free ports, as `configs/mosquitto` has it."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[1] / "configs" / "mosquitto"
MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
DEADLINE_S = 10.0

needs_mosquitto = pytest.mark.skipif(
    MOSQUITTO is None or not shutil.which("openssl") or not shutil.which("mosquitto_passwd"),
    reason="needs the broker: apt-get install mosquitto openssl",
)


class Mosquitto:
    """A broker in a folder, its certificate made out to `localhost` alone.

    There is a listener with TLS, as in the shipped configuration, and one without on loopback.

    Args:
        folder: For its files.
        passwords: By user name.
        federations: What the access rules know; none does without rules.
    """

    def __init__(
        self, folder: Path, passwords: Mapping[str, str], federations: tuple[str, ...]
    ) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.port, self.plain_port = 0, 0
        self._with_rules = bool(federations)
        make_certificates(folder)
        rules = (CONFIGS / "acl").read_text()
        (folder / "acl").write_text(
            "".join(rules.replace("/coterie/", f"/{each}/") for each in federations)
        )
        (folder / "acl").chmod(0o600)
        self.set_passwords(passwords)

    @cached_property
    def ca_file(self) -> str:
        return str(self.folder / "ca.pem")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def set_passwords(self, passwords: Mapping[str, str]) -> None:
        """Write the password file; a running broker reads it again."""
        file = self.folder / "passwords"
        file.write_text("".join(f"{user}:{text}\n" for user, text in passwords.items()))
        file.chmod(0o600)
        if passwords:
            subprocess.run(["mosquitto_passwd", "-U", file], check=True, timeout=DEADLINE_S)
        if self.process is not None:
            self.process.send_signal(signal.SIGHUP)

    def start(self) -> None:
        """Start it on the ports that it had before, else on free ones."""
        first = self.process is None
        for _ in range(20):
            if first:
                self.port, self.plain_port = random.sample(range(20_000, 32_000), 2)
            if self._started():
                return
        raise AssertionError(f"the broker doesn't start: {self.log}")

    def _started(self) -> bool:
        conf = (CONFIGS / "mosquitto.conf").read_text()
        conf = conf.replace("/etc/mosquitto/coterie", str(self.folder))
        conf = conf.replace("listener 8883", f"listener {self.port} 127.0.0.1")
        if not self._with_rules:
            conf = conf.replace("\nacl_file", "\n# acl_file")
        conf += f"\nuser root\nlistener {self.plain_port} 127.0.0.1\n"
        (self.folder / "mosquitto.conf").write_text(conf)
        assert MOSQUITTO is not None
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [MOSQUITTO, "-c", self.folder / "mosquitto.conf"], stdout=log, stderr=log
            )
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if all(listens(port) for port in (self.port, self.plain_port)):
                return True
            time.sleep(0.01)
        return False

    def kill(self) -> None:
        """End it as a power cut would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def pause(self, paused: bool) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_certificates(folder: Path) -> None:
    """Make an authority and a broker's certificate by the commands of the shipped configuration."""
    script = "\n".join(
        line.removeprefix("#   ")
        for line in (CONFIGS / "mosquitto.conf").read_text().splitlines()
        if line.startswith("#   ")
    )
    start, end = script.index("openssl"), script.index("mosquitto_passwd")
    commands = script[start:end].replace("broker.example", "localhost")
    commands = commands.replace("rsa:3072", "ec -pkeyopt ec_paramgen_curve:prime256v1")
    subprocess.run(
        ["sh", "-ec", commands], cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S
    )
