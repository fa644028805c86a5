"""delete a tenant's KV from Blob and prove it

    dynamo purge --tenant acme                       everything; rotates the tenant's salt key, so HBM and DRAM are out of reach too
    dynamo purge --tenant acme --older-than 7d       only objects written longer ago; changes no key
    dynamo purge --unsalted                          what traffic without a tenant left
    dynamo purge --verify REPORT                     is it as it was signed, and by a key that is accepted (--accept HEX; default: this state's)
    dynamo purge --lifecycle                         print the Azure lifecycle policy that backs the sweeper up

Killed at any point, the same command goes on where it stopped. Exit 0 only when a fresh process has found nothing left;
the signed report is printed with --json, kept in Blob, and written to --report FILE. Takes the longest of the workers'
deadlines (about a minute): puts in flight must have landed before anything is claimed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError, nearest
from components.common.kv.classes import Classes
from components.common.kv.config import KvTiersConfig
from components.common.kv.keys import PUBLIC
from components.common.kv.purge import FORMAT, Purge, PurgeConfig, State
from components.common.kv.store import KvStore
from components.common.messages.announce import Announcement
from components.common.messages.tenants import TenantsFile
from components.common.registry.signing import SigningKey, verify
from components.common.storage.account import Account
from graphs.cli._announce import add_announce, tell
from graphs.cli._common import add_state, live
from graphs.launch import runs

_AGE = re.compile(r"^(\d+(?:\.\d+)?)(s|m|h|d|w)$")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def add(parser: argparse.ArgumentParser) -> None:
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--tenant", help="tenant's name, as in the tenants file")
    who.add_argument("--unsalted", action="store_true", help="KV of traffic without a tenant")
    who.add_argument(
        "--lifecycle", action="store_true", help="print the lifecycle policy for the KV account, purge nothing"
    )
    who.add_argument("--verify", type=Path, metavar="REPORT", help="check a report's signature, purge nothing")
    parser.add_argument(
        "--accept", action="append", default=[], metavar="HEX", help="public key that --verify accepts; may be repeated"
    )
    parser.add_argument("--older-than", default="", metavar="AGE", help="only objects written longer ago: 30m, 12h, 7d")
    parser.add_argument(
        "--plan", type=Path, default=None, help="plan.json of a run or cluster (default: the graph that runs here)"
    )
    parser.add_argument("--tenants", type=Path, default=None, help="tenants file (default: the plan's)")
    parser.add_argument(
        "--keep-key", action="store_true", help="do not rotate the salt key: HBM and DRAM are then not covered"
    )
    parser.add_argument(
        "--sign-key",
        type=Path,
        default=None,
        help="Ed25519 key for the report (default: one made in the state directory)",
    )
    parser.add_argument("--report", type=Path, default=None, help="also write the signed report here")
    add_announce(parser)
    add_state(parser)


def run(args: argparse.Namespace) -> int:
    if args.verify:
        return verified(args)
    if args.tenant is not None and not args.tenant.strip():  # an unset variable must not end in a signed report
        raise DynamoBlobError(
            "PURGE-NO-TENANT", "the tenant's name is empty", where="--tenant", do="name the tenant, or say --unsalted for traffic without one"
        )  # fmt: skip
    try:
        (args.tenant or "").encode()
    except UnicodeEncodeError:
        raise DynamoBlobError("PURGE-TENANT-UNKNOWN", "the tenant's name is no UTF-8", where="--tenant", do="name the tenant as the tenants file does") from None  # fmt: skip
    older = age(args.older_than) if args.older_than else 0.0
    if args.report:
        write_report(args.report, "", "")
    settings = kv_settings(args)
    path = args.tenants or (Path(settings[0].tenants_file) if settings[0].tenants_file else None)
    file = tenants_file(path) if path else None
    classes = Classes.of_file(file, settings[0].container) if file else Classes.single(settings[0].container)
    if args.lifecycle:
        print(json.dumps(classes.lifecycle(), indent=1))
        return 0
    if args.tenant and file is not None and args.tenant not in file.tenants:
        raise DynamoBlobError(
            "PURGE-TENANT-UNKNOWN", f"the tenants file has no tenant '{args.tenant}'", where=str(path), why=nearest(args.tenant, file.tenants),
            do="correct the name; for a tenant removed from the file, pass a --tenants file that still has it",
        )  # fmt: skip
    rotate = file is not None and args.tenant and not older and not args.keep_key
    first = settings[0]
    assert first.account is not None
    containers = sorted(set(classes.containers().values()))
    if not (first.container or containers):
        raise DynamoBlobError(
            "PURGE-NO-KV", "every class is ephemeral and the graph names no KV container", where=str(path), do="nothing to purge; check --tenants or --plan"
        )  # fmt: skip
    config = PurgeConfig(
        account=first.account, control=first.container or containers[0], containers=tuple(containers), tenant=args.tenant or "(unsalted)",
        tenant_hash=PUBLIC if args.unsalted else "", older_than_s=older,
        salt_key_file=str(file.salt_key_path(args.tenant)) if rotate and file else "",
        settle_s=max(s.epochs_stale_s + s.store_deadline_s for s in settings),
        directories=directories(args), directories_s=3 * max(s.epochs_refresh_s for s in settings),
    )  # fmt: skip
    account = Account(config.account)
    store = KvStore(account, config.control)
    try:
        report = Purge(config, store, signing_key(args), step=announcing(args, config, first.epochs_refresh_s)).run()
    finally:
        store.close()
        account.close()
    if args.report:
        write_report(args.report, json.dumps(report, indent=1) + "\n", report["id"])
    print(json.dumps(report) if args.json else summary(report))
    if args.tenant and file is None and not report["deleted"]:
        print(f"no object of a tenant '{args.tenant}' was there, and no tenants file says whether that is its name", file=sys.stderr)  # fmt: skip
    return 0


def tenants_file(path: Path) -> TenantsFile:
    """Raises what `TenantsFile.load` does; anyone's slip in the file must not keep a purge from being done."""
    try:
        return TenantsFile.load(path)
    except DynamoBlobError as e:
        e.do = f"{e.do}; or pass --tenants with a copy that is good".removeprefix("; ")
        raise


def verified(args: argparse.Namespace) -> int:
    """Raises PURGE-REPORT, REGISTRY-PURGE-UNKNOWN-KEY, REGISTRY-PURGE-BAD-SIGNATURE and their like."""
    try:
        report = json.loads(args.verify.read_text())
        if not isinstance(report, dict) or report.get("format") != FORMAT:
            raise ValueError(f"it does not say that it is {FORMAT}")
    except (OSError, ValueError, RecursionError) as e:
        raise DynamoBlobError("PURGE-REPORT", "this is no purge report", where=str(args.verify), why=str(e), do="name a file that --report wrote, or _control/purges/ID.report.json of the container") from None  # fmt: skip
    accepted = tuple(args.accept) or (signing_key(args).public,)
    key = verify(report, accepted, kind="PURGE", what="the purge report", where=str(args.verify))
    print(json.dumps({"id": report.get("id"), "key": key}) if args.json else f"{args.verify}: as signed by {key}")
    return 0


def write_report(path: Path, text: str, name: str) -> None:
    """Raises PURGE-REPORT; before a purge it is called with an empty text and writes nothing."""
    try:
        if text:
            path.write_text(text)
        elif not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
            raise PermissionError(13, "nothing can be written there")
    except OSError as e:
        raise DynamoBlobError(
            "PURGE-REPORT", "the report cannot be written" + (f"; the purge is done and proven, its report {name} is in Blob" if name else ""),
            where=str(path), why=e.strerror or str(e), do="name a file in a folder that can be written",
        ) from None  # fmt: skip


def age(text: str) -> float:
    """Seconds of "30m", "12h", "7d". Raises CLI-ARGUMENT."""
    found = _AGE.match(text)
    if not found or float(found[1]) <= 0:
        raise DynamoBlobError("CLI-ARGUMENT", f"'{text}' is no age", do="write 45s, 30m, 12h, 7d or 4w")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if seconds >= time.time():
        raise DynamoBlobError("CLI-ARGUMENT", f"nothing is {text[:20]} old", do="write 45s, 30m, 12h, 7d or 4w")
    return seconds


def kv_settings(args: argparse.Namespace) -> list[KvTiersConfig]:
    """Tier settings of every worker of the plan that has a Blob tier. Raises PURGE-NO-KV, PURGE-PLAN."""
    path = args.plan or live(args).path / "plan.json"
    try:
        plan: dict[str, Any] = json.loads(Path(path).read_text())
        raw = [kv["settings"] for p in plan["processes"] if (kv := (p.get("config") or {}).get("kv"))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise DynamoBlobError("PURGE-PLAN", "the plan cannot be read", where=str(path), why=f"{type(e).__name__}: {e}", do="pass --plan RUN/plan.json") from None  # fmt: skip
    found = [KvTiersConfig.parse(settings, where=f"{path}: kv") for settings in raw]
    found = [s for s in found if s.account is not None]
    if not found:
        raise DynamoBlobError(
            "PURGE-NO-KV",
            "no worker of this graph keeps KV in Blob",
            where=str(path),
            do="nothing to purge; check --graph or --plan",
        )
    return found


def directories(args: argparse.Namespace) -> tuple[str, ...]:
    """Workers of the plan (read by `kv_settings` before) with a directory tier."""
    plan = json.loads(Path(args.plan or live(args).path / "plan.json").read_text())
    kept = [
        p for p in plan["processes"] if (kv := (p.get("config") or {}).get("kv")) and kv["settings"].get("nvme_dir")
    ]
    return tuple(sorted(str(p.get("name", "?")) for p in kept))


def signing_key(args: argparse.Namespace) -> SigningKey:
    path = args.sign_key or (args.state or runs.default_state()).absolute() / "keys" / "purge.pem"
    if not args.sign_key and not path.exists():
        try:
            SigningKey.generate().write(path)
        except OSError as e:
            raise DynamoBlobError(
                "PURGE-KEY", "no key for the report can be made", where=str(path), why=e.strerror or str(e), do="pass --sign-key FILE"
            ) from None  # fmt: skip
    return SigningKey.open(path)


def announcing(args: argparse.Namespace, config: PurgeConfig, refresh_s: float) -> Any:
    """Progress, and one announcement as soon as the generation is raised: workers need not wait for their next look."""
    show = None if args.json else progress(config.settle_s)

    def step(phase: str, state: State) -> None:
        if show is not None:
            show(phase, state)
        if phase == "delete" and not config.older_than_s:
            item = Announcement(kind="purged", tenant=state.tenant, generation=state.generation)
            tell(args, item, f"workers look every {refresh_s:g} s")

    return step


def progress(settle_s: float) -> Any:
    words = {
        "resume": "going on with a purge that was interrupted", "raise": "raising the tenant's generation", "rotate": "rotating its salt key",
        "delete": "deleting", "settle": f"waiting for puts in flight (up to {settle_s:.0f} s)",
        "overdue": "waiting for puts that are past their deadline and still under way", "prove": "proving from a fresh process",
    }  # fmt: skip

    def step(phase: str, state: State) -> None:
        if phase in words:
            print(f"{time.strftime('%H:%M:%S')}  {words[phase]}", flush=True)
        elif phase == "deleted":
            print(
                f"{time.strftime('%H:%M:%S')}    {state.deleted} objects, {state.deleted_bytes / 1e6:.1f} MB",
                flush=True,
            )

    return step


def workers(found: dict[str, Any]) -> str:
    """What the workers said of their puts, in words."""
    text = f"{len(found['confirmed'])} confirmed that no older put of theirs is under way"
    if found["silent"]:
        names = ", ".join(sorted(found["silent"]))
        text += f"; silent, killed or cut off: {names} (what one still had under way can only land under the old generation: unreachable, swept)"
    return text


def summary(report: dict[str, Any]) -> str:
    until = report["recoverable"]["until"]
    kept = "not recoverable" if not until else "recoverable, no end known" if until < 0 else f"recoverable until {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(until))}"  # fmt: skip
    return "\n".join(
        (
            f"purged tenant {report['tenant']}: {report['deleted']} objects, {report['deleted_bytes'] / 1e6:.1f} MB, {report['late']} of them late puts",
            f"  proof       process {report['probe']['pid']} listed {', '.join(report['containers'])}: {report['probe']['old']} left, "
            f"{report['probe']['newer']} written since; asked for {report['probe']['asked']} deleted names: none there",
            f"  workers     {workers(report['workers'])}",
            f"  memory      {report['memory']}",
            f"  NVMe        {', '.join(report['directories']['workers']) or 'none'}: {report['directories']['says']}",
            f"  afterwards  {kept}: {report['recoverable']['why']}",
            f"  report      {report['id']}, signed by {report['key'][:16]}…",
        )
    )
