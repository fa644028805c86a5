"""How `publish` and `release` reach a registry: a real account, or the embedded store of this checkout."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from components.common.errors import DynamoBlobError
from components.common.registry.config import TrustConfig
from components.common.registry.layout import Layout
from components.common.registry.progress import Progress, Report
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account
from components.common.storage.azurite import AzuriteConfig, ensure_key, wait_ready
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.sas import Grant, Role, SasIssuer
from graphs.launch import runs
from graphs.load import Graph, read_graph
from graphs.site import EMBEDDED_ACCOUNTS, LOOPBACK, Site

KEY_ENV = "DYNAMO_BLOB_SIGNING_KEY"
MAX_PARALLEL = 256  # transfers at a time, 8 MiB each
_SCRATCH = "dynamo-blob-cli-"
_SAS_S = 900.0  # life of a call's own token, renewed while the call runs: a call that is killed leaves it in a file
OTHERS_S = 3600.0  # the longest that a call waits for others on the store it started: a publish of 100s of GB


@dataclass(frozen=True)
class Registry:
    """An opened registry. `local_keys` is the directory of this machine's signing keys, None for a real account."""

    account: Account
    layout: Layout
    graph: Graph | None
    local_keys: Path | None

    def key(self, who: str, file: str = "", *, required: bool = True) -> SigningKey | None:
        """Signing key of `who` (publisher, approver): --key, else $DYNAMO_BLOB_SIGNING_KEY, else this machine's own for the embedded store."""
        if file:
            return SigningKey.open(file)
        if os.environ.get(KEY_ENV):
            return SigningKey.open(env=KEY_ENV)
        if self.local_keys is not None:
            path = self.local_keys / f"{who}.pem"
            if not path.exists():
                SigningKey.generate().write(path)
            return SigningKey.open(path)
        return SigningKey.open(env=KEY_ENV) if required else None

    def trust(self, publishers: list[str], approvers: list[str], require: str = "approval") -> TrustConfig:
        """Keys from the command line, else from the graph, else this machine's."""
        spec = self.graph.spec.trust if self.graph else None
        known_p, known_a = (spec.publisher_keys, spec.approver_keys) if spec else ([], [])
        if self.local_keys is not None and not known_p and not known_a:
            known_p, known_a = self._public("publisher"), self._public("approver")
        wanted: Any = require
        return TrustConfig(
            require=wanted, publisher_keys=tuple(publishers or known_p), approver_keys=tuple(approvers or known_a)
        )

    def _public(self, who: str) -> list[str]:
        path = self.local_keys / f"{who}.pem" if self.local_keys else None
        return [SigningKey.open(path).public] if path and path.exists() else []


def add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which registry (default: the embedded store of --graph)")
    group.add_argument("--graph", default="", help="graph file whose storage is meant; default graphs/disagg.yaml")
    group.add_argument(
        "--state",
        type=Path,
        default=None,
        help="state directory of the embedded store (default .state of the checkout)",
    )
    group.add_argument(
        "--account", default="", metavar="URL", help="https://ACCOUNT.blob.core.windows.net instead of a graph"
    )
    group.add_argument("--container", default="", help="container of the registry (default: the graph's, or weights)")
    group.add_argument(
        "--sas-file", default="", metavar="FILE", help="SAS file for a real account; default: azure-identity"
    )
    group.add_argument("--client-id", default="", help="user-assigned identity for azure-identity")
    group.add_argument("--ca-bundle", default="", metavar="FILE", help="private CA of the endpoint")


def within(flag: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Raises CLI-ARGUMENT unless `value` of `flag` is between `low` and `high`; nan never is."""
    if not low <= value <= high:
        raise DynamoBlobError(
            "CLI-ARGUMENT",
            f"{flag} {value:g} cannot be",
            why=f"{low:g} to {high:g}{unit} can be",
            do="correct the value",
        )


@contextmanager
def open_registry(args: argparse.Namespace, role: Role) -> Iterator[Registry]:
    """The registry that `args` name, under the identity `role`. The embedded store is started for the call if no graph runs."""
    graph = None if args.account else read_graph(args.graph or str(runs.REPOSITORY / "graphs" / "disagg.yaml"), [])
    own = graph.spec.storage.weights if graph else None
    layout = Layout(args.container or (own.container if own else "weights"))
    url = args.account or (own.url if own else "")
    with ExitStack() as stack:
        if url:
            sas = args.sas_file or (own.sas_file if own else "")
            credential = (
                CredentialConfig(kind="sas_file", path=sas)
                if sas
                else CredentialConfig(kind="entra", client_id=args.client_id)
            )
            account = Account(AccountConfig(url=url, credential=credential, ca_bundle=args.ca_bundle))
            stack.callback(account.close)
            yield Registry(account, layout, graph, None)
            return
        assert graph is not None
        state = (args.state or runs.default_state()).absolute()
        account = stack.enter_context(_embedded(graph, state, layout, role))
        yield Registry(account, layout, graph, state / "keys")


@contextmanager
def _embedded(graph: Graph, state: Path, layout: Layout, role: Role) -> Iterator[Account]:
    site = Site(run=state / "runs" / "cli", state=state)
    for name in EMBEDDED_ACCOUNTS.values():
        ensure_key(site.account_key(name))
    key, port = site.account_key(EMBEDDED_ACCOUNTS["weights"]), site.port(graph.spec, "azurite")
    with ExitStack() as stack:
        _sweep_scratch()
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-")))
        held = _join_or_start(graph, site, scratch, port, stack)
        url = f"http://{LOOPBACK}:{held}/{EMBEDDED_ACCOUNTS['weights']}"
        owner = Account(AccountConfig(url=url, credential=CredentialConfig(kind="key_file", path=str(key))))
        for container in layout.containers:
            owner.ensure_container(container)
        owner.close()
        sas = scratch / f"{role}.json"
        stack.enter_context(SasIssuer([Grant(sas, url, key, role, ttl_s=_SAS_S, container=layout.container)]))
        account = Account(AccountConfig(url=url, credential=CredentialConfig(kind="sas_file", path=str(sas))))
        stack.callback(account.close)
        yield account


def _sweep_scratch() -> None:
    """Remove what calls that were killed left behind; the token in there ended by itself."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        pid = left.name.removeprefix(_SCRATCH).partition("-")[0]
        with suppress(OSError):
            info = left.lstat()
            old = time.time() - info.st_mtime > _SAS_S  # another container's process ids say nothing here
            if pid.isdigit() and old and info.st_uid == os.geteuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(left, ignore_errors=True)


def _join_or_start(graph: Graph, site: Site, scratch: Path, port: int, stack: ExitStack) -> int:
    """Port of the embedded store, which stays up until `stack` closes: that of a graph or of another call, else our own.

    Raises LAUNCH-STORE-BUSY when 60 s were not enough to do either.
    """
    end = time.monotonic() + 60
    while True:
        users = _users(site.state)
        try:
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)  # whoever started the store waits for us from here on
            held = served_port(site.state, port)
            if held is not None:
                stack.callback(users.close)
                return held
        except BlockingIOError:
            pass  # its owner is taking it down
        users.close()
        try:
            stack.enter_context(_azurite(graph, site, scratch))
            return port
        except DynamoBlobError as e:
            if e.code != "LAUNCH-STORE-BUSY" or time.monotonic() > end:
                raise
        time.sleep(0.05)


def _users(state: Path) -> IO[str]:
    """The file that calls of this command share a lock on while they use the embedded store; it names its owner's port."""
    state.mkdir(parents=True, exist_ok=True)
    return (state / "azurite.users").open("a+")


def _owner_port(state: Path) -> int:
    """Port of the call that started the store, 0 when none did."""
    with _users(state) as file:
        file.seek(0)
        text = file.read(16).strip()
    return int(text) if text.isdigit() and 0 < int(text) < 65536 else 0


def _until_unused(users: IO[str]) -> None:
    """Blocks while other calls use the store that this one started, `OTHERS_S` at most; then none can join any more."""
    end, told = time.monotonic() + OTHERS_S, False
    while True:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                print(f"it did not end within {OTHERS_S:g} s; its store goes now", file=sys.stderr, flush=True)
                return
        if not told:
            print(
                "another command still uses the store that this one started: waiting for it",
                file=sys.stderr,
                flush=True,
            )
            told = True
        time.sleep(0.1)


def served_port(state: Path, default: int, deadline_s: float = 30.0) -> int | None:
    """Port of the embedded store that somebody runs, None when nobody does.

    A graph's port is its own (--set network.base_port), so it is read from the run; a graph that is starting has its
    store in a moment. Another call of this command says its own, else it is `default`. Blocks until the port answers, the store is free
    again, or `deadline_s` have passed: then the caller learns from the port itself that nothing listens.
    """
    end, port = time.monotonic() + deadline_s, default
    while _serving(state):
        graphs = [r for r in runs.all_runs(state) if r.launcher_alive and not r.closed]
        found = [p for r in graphs for p in map(_blob_port, r.state.get("processes") or ()) if p]
        port = found[0] if found else _owner_port(state) or default
        if found or not graphs:
            try:
                socket.create_connection((LOOPBACK, port), 1).close()
                return port
            except OSError:
                pass
        if time.monotonic() > end:
            return port
        time.sleep(0.05)
    return None


def _blob_port(process: Any) -> int:
    """Port of an Azurite's line in state.json; 0 for any other line."""
    ports = process.get("ports") if isinstance(process, dict) and process.get("component") == "azurite" else None
    port = ports.get("blob") if isinstance(ports, dict) else None
    return port if isinstance(port, int) and 0 < port < 65536 else 0


def _serving(state: Path) -> bool:
    """Does a graph that runs hold the embedded store?"""
    try:
        runs.Lock(state / "azurite.lock").release()
        return False
    except DynamoBlobError as e:
        if e.code != "LAUNCH-STORE-BUSY":
            raise
        return True


@contextmanager
def _azurite(graph: Graph, site: Site, scratch: Path) -> Iterator[None]:
    lock = runs.Lock(site.state / "azurite.lock")
    config = AzuriteConfig(
        data_dir=str(site.state / "azurite"), port=site.port(graph.spec, "azurite"),
        accounts={name: str(site.account_key(name)) for name in EMBEDDED_ACCOUNTS.values()},
    )  # fmt: skip
    plan = scratch / "azurite.json"
    plan.write_text(config.model_dump_json())
    argv = [sys.executable, "-m", "components.common.storage.azurite", "--plan", str(plan)]
    process = subprocess.Popen(argv, cwd=runs.REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    users = _users(site.state)
    try:
        users.truncate(0)
        users.write(str(config.port))
        users.flush()
        wait_ready(config, process=process)
        try:
            yield
        except Exception:
            _until_unused(users)
            raise
        _until_unused(users)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        users.truncate(0)
        lock.release()
        users.close()


def bar(quiet: bool) -> Report | None:
    """A progress line on stderr; None (no reports) when quiet or not a terminal."""
    if quiet or not sys.stderr.isatty():
        return None
    last = [""]

    def report(p: Progress) -> None:
        part = p.done / p.total if p.total else 1.0
        text = f"{p.phase:<8}{'█' * int(30 * part):<30} {100 * part:3.0f} %  {p.done / 1e6:.0f}/{p.total / 1e6:.0f} MB  {p.rate / 1e6:.0f} MB/s"
        text += f"  ({p.skipped / 1e6:.0f} MB there already)" if p.skipped else ""
        end = "\n" if p.done >= p.total and p.phase != last[0] else ""
        last[0] = p.phase if end else last[0]
        print(f"\r\x1b[K{text}", end=end, file=sys.stderr, flush=True)

    return report


def emit(args: argparse.Namespace, value: Any, text: str) -> None:
    print(json.dumps(value, indent=1) if args.json else text, flush=True)


def size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def table(rows: list[list[str]]) -> str:
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
