"""etcd and nats-server on loopback, started, killed and restarted by tests. `tools/cluster_planes.sh` fetches what is missing."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.e2e.graph import ROOT

BIN = ROOT / ".state/planes/bin"


def binary(name: str) -> str:
    """Path of `name`; fetches it once. Fails, never skips: a plane that is not tested is not known to work."""
    for _ in range(2):
        found = shutil.which(name) or (str(BIN / name) if (BIN / name).exists() else "")
        if found:
            return found
        subprocess.run([str(ROOT / "tools/cluster_planes.sh")], check=True, timeout=240)
    raise AssertionError(f"{name} is not to be had")


class Plane:
    """One server on one port, with its data kept over restarts."""

    def __init__(self, argv: list[str], port: int, log: Path) -> None:
        self.argv, self.port, self.log = argv, port, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, deadline_s: float = 30.0) -> None:
        with socket.socket() as probe:  # another's server there would be taken for ours
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + deadline_s
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, f"{self.argv[0]} ended:\n{self.log.read_text()[-2000:]}"
                assert time.monotonic() < end, f"{self.argv[0]} does not listen"
                time.sleep(0.1)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


def etcd(port: int, directory: Path) -> Plane:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
    argv = [
        binary("etcd"), "--data-dir", str(directory / "etcd"), "--log-level", "warn",
        "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
        "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
    ]  # fmt: skip
    return Plane(argv, port, directory / "etcd.log")


def nats(port: int, directory: Path) -> Plane:
    return Plane([binary("nats-server"), "-a", "127.0.0.1", "-p", str(port)], port, directory / "nats.log")
