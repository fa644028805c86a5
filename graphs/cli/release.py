"""list, prove, approve, promote, roll back, retire and archive releases

    dynamo release list [MODEL]                 dynamo release approve MODEL VERSION [--allow remote-code] [--scanner CMD]
    dynamo release show MODEL VERSION           dynamo release promote MODEL VERSION
    dynamo release diff MODEL OLD NEW           dynamo release rollback MODEL
    dynamo release verify MODEL [VERSION]       dynamo release retire MODEL VERSION
    dynamo release audit MODEL                  dynamo release collect [--delete]
    dynamo release archive MODEL VERSION URL    dynamo release keygen FILE
    dynamo release attach|attached|approve-attached MODEL VERSION ...   (compile caches and other artifacts)

Each acts under the identity it needs and no more. Signing keys: --key FILE or $DYNAMO_BLOB_SIGNING_KEY.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError, nearest
from components.common.messages.announce import Announcement
from components.common.registry import artifacts, audit
from components.common.registry.approve import DAYS, approve
from components.common.registry.archive import archive
from components.common.registry.checks import REMOTE_CODE
from components.common.registry.config import ReleaseConfig
from components.common.registry.layout import check_names
from components.common.registry.listing import diff, list_releases, show
from components.common.registry.promote import promote, rollback
from components.common.registry.release import resolve
from components.common.registry.retire import GRACE_S, collect, retire
from components.common.registry.signing import SigningKey
from components.common.registry.verify import verify_content
from components.common.storage.account import Account
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.sas import Role
from graphs.cli._announce import add_announce, tell
from graphs.cli._registry import MAX_PARALLEL, Registry, add_access, bar, emit, open_registry, size, table, within

Act = Callable[[argparse.Namespace, Registry], int]


def add(parser: argparse.ArgumentParser) -> None:
    sub = parser.add_subparsers(dest="act", required=True, metavar="ACT")

    def act(name: str, help_: str, role: Role, do: Act, *names: str) -> argparse.ArgumentParser:
        p = sub.add_parser(name, help=help_)
        for n in names:
            p.add_argument(n.strip("?"), nargs="?" if n.endswith("?") else None, default="")
        p.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        add_access(p)
        p.set_defaults(role=role, do=do)
        return p

    def signs(p: argparse.ArgumentParser) -> None:
        p.add_argument("--key", default="", metavar="FILE", help="the signer's Ed25519 key")

    def trusts(p: argparse.ArgumentParser) -> None:
        p.add_argument(
            "--publisher-key",
            action="append",
            default=[],
            metavar="HEX",
            help="accepted publisher; default: the graph's or this machine's",
        )
        p.add_argument(
            "--approver-key", action="append", default=[], metavar="HEX", help="accepted approver; default likewise"
        )

    act("list", "what there is", "reader", _list, "model?")
    act("show", "one release: files, signatures, checks", "reader", _show, "model", "version")
    act("diff", "what differs between two versions", "reader", _diff, "model", "old", "new")
    p = act("verify", "signatures, record, and every byte", "serving", _verify, "model", "version?")
    trusts(p)
    p.add_argument("--require", choices=("none", "signature", "approval"), default="approval")
    p.add_argument("--parallel", type=int, default=4)
    p = act("approve", "run the checks and sign their results", "approver", _approve, "model", "version")
    signs(p)
    trusts(p)
    p.add_argument("--allow", action="append", default=[], metavar="NAME", help="exception by name: remote-code")
    p.add_argument(
        "--scanner", default="", metavar="CMD", help="command that gets a directory with the files; exit 0 passes"
    )
    p.add_argument("--days", type=float, default=DAYS, help="validity of the approval")
    p = act("promote", "make a version current", "approver", _promote, "model", "version")
    signs(p)
    trusts(p)
    add_announce(p)
    p = act("rollback", "back to the previous version", "approver", _rollback, "model")
    signs(p)
    trusts(p)
    add_announce(p)
    signs(act("retire", "never serve a version again", "collector", _retire, "model", "version"))
    p = act("collect", "delete objects no release uses (dry run without --delete)", "collector", _collect)
    p.add_argument("--delete", action="store_true", help="really delete")
    p.add_argument("--grace-hours", type=float, default=GRACE_S / 3600, help="spare objects younger than this")
    p = act(
        "archive", "copy a release to another account on a cool tier", "publisher", _archive, "model", "version", "url"
    )
    signs(p)
    p.add_argument("--to-sas-file", default="", metavar="FILE", help="SAS file for the target; default: azure-identity")
    p.add_argument("--tier", choices=("Hot", "Cool", "Cold", "Archive"), default="Cool")
    act("audit", "who did what, the chain verified", "reader", _audit, "model")
    p = sub.add_parser("keygen", help="make a signing key")
    p.add_argument("file", type=Path)
    p.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    for name, role, do, help_ in (
        ("attach", "publisher", _attach, "attach a directory of artifacts to a release"),
        ("attached", "reader", _attached, "which artifacts fit"),
        ("approve-attached", "approver", _approve_attached, "vouch for attached artifacts"),
    ):
        p = act(name, help_, role, do, "model", "version", *(["directory"] if name == "attach" else []))  # type: ignore[arg-type]
        signs(p)
        trusts(p)
        for field in artifacts.SELECTOR:
            p.add_argument(f"--{field.replace('_', '-')}", required=True)


def run(args: argparse.Namespace) -> int:
    if args.act == "keygen":
        key = SigningKey.generate()
        key.write(args.file)
        emit(
            args,
            {"file": str(args.file), "public": key.public},
            f"private key in {args.file} (mode 0600)\npublic key  {key.public}",
        )
        return 0
    _check(args)
    with open_registry(args, args.role) as registry:
        return int(args.do(args, registry))


def _check(args: argparse.Namespace) -> None:
    """Refuses what no registry could answer, before one is asked. Raises CLI-ARGUMENT, REGISTRY-NAME."""
    given = vars(args)
    if given.get("model") or args.act not in ("list", "collect"):
        for version in ("version", "old", "new"):
            check_names(args.model, given.get(version, ""))
    within("--days", given.get("days", 1.0), 1e-5, 36500, " days")
    within("--grace-hours", given.get("grace_hours", 0.0), 0, 1e6, " hours")
    within("--parallel", given.get("parallel", 1), 1, MAX_PARALLEL)
    for name in given.get("allow", ()):
        if name != REMOTE_CODE:
            raise DynamoBlobError(
                "CLI-ARGUMENT", f"--allow {name}: there is no such exception", why=nearest(name, [REMOTE_CODE]), do=f"--allow {REMOTE_CODE}"
            )  # fmt: skip
    if args.act == "archive" and not re.fullmatch(r"https?://[^/?#@]+(/[^?#]*)?", args.url):
        raise DynamoBlobError(
            "CLI-ARGUMENT", f"'{ascii(args.url.partition('?')[0])[1:-1]}' is no account to archive to",
            why="the URL of a storage account, without a signature", do="write https://ACCOUNT.blob.core.windows.net, the SAS in --to-sas-file",
        )  # fmt: skip


def _list(args: argparse.Namespace, r: Registry) -> int:
    rows = list_releases(r.account, r.layout, args.model)
    text = [["MODEL", "VERSION", "STATE", "CHANNEL", "SIZE", "FILES", "MANIFEST", "PUBLISHED"]]
    text += [
        [
            x["model"],
            x["version"],
            x["state"],
            x["channel"],
            size(x["bytes"]),
            str(x["files"]),
            x["digest"][:16],
            x["published_at"],
        ]
        for x in rows
    ]
    emit(args, rows, table(text) if rows else "no releases" + (f" of {args.model}" if args.model else ""))
    return 0


def _show(args: argparse.Namespace, r: Registry) -> int:
    stored, approval = show(r.account, r.layout, args.model, args.version)
    m = stored.manifest
    value = {
        "model": m.model, "version": m.version, "manifest_digest": stored.digest, "weights_digest": m.weights_digest, "uri": stored.uri,
        "publisher": stored.signature.get("key", ""), "published_at": stored.signature.get("signed_at", ""), "provenance": m.provenance,
        "approval": approval, "files": [{"path": f.path, "size": f.size, "blake3": f.blake3, "sha256": f.sha256} for f in m.files],
        "tensors": len(m.tensors),
    }  # fmt: skip
    lines = [f"{m.model} {m.version}", f"  manifest   {stored.digest}", f"  weights    {m.weights_digest}"]
    lines += [f"  publisher  {value['publisher'] or '(unsigned)'}  {value['published_at']}"]
    lines += (
        [f"  approver   {approval['key']}  {approval['approved_at']} until {approval['expires_at']}"]
        if approval
        else ["  approver   (none)"]
    )
    lines += [f"  check      {c['name']:<15} {c['result']:<8} {c['detail']}" for c in approval.get("checks", [])]
    lines += [f"  {k:<10} {v}" for k, v in m.provenance.items()]
    lines += [f"  {size(f.size):>9}  {f.path}" for f in m.files]
    emit(args, value, "\n".join(lines))
    return 0


def _diff(args: argparse.Namespace, r: Registry) -> int:
    value = diff(r.account, r.layout, args.model, args.old, args.new)
    lines = [
        f"{args.model} {args.old} → {args.new}: {size(value['new_bytes'])} new"
        + (", same files" if value["same_weights"] else "")
    ]
    signs = {
        "added": "+",
        "removed": "-",
        "changed": "~",
        "tensors_added": "+ tensor",
        "tensors_removed": "- tensor",
        "tensors_reshaped": "~ tensor",
    }
    lines += [f"  {mark} {name}" for field, mark in signs.items() for name in value[field]]
    lines += [f"  ~ {k}: {a} → {b}" for k, (a, b) in value["provenance"].items()]
    emit(args, value, "\n".join(lines))
    return 0


def _verify(args: argparse.Namespace, r: Registry) -> int:
    config = ReleaseConfig(model=args.model, version=args.version, container=r.layout.container)
    found = resolve(r.account, config, r.trust(args.publisher_key, args.approver_key, args.require), record=False)
    done = verify_content(
        r.account, r.layout, found.manifest, progress=bar(args.json), parallel=args.parallel
    ).raise_first()
    value = {
        "model": args.model, "version": found.manifest.version, "manifest_digest": found.digest, "files": done.files, "bytes": done.bytes,
        "seconds": round(done.seconds, 3), "bytes_per_s": round(done.rate), "publisher": found.publisher, "approver": found.approver,
        "approved_at": found.approved_at, "require": args.require,
    }  # fmt: skip
    emit(
        args,
        value,
        f"{args.model} {found.manifest.version} is what was {'approved' if args.require == 'approval' else 'published'}: {done.files} files, {size(done.bytes)} in {done.seconds:.1f} s, {size(done.rate)}/s",
    )
    return 0


def _approve(args: argparse.Namespace, r: Registry) -> int:
    key = r.key("approver", args.key)
    assert key is not None
    trust = r.trust(args.publisher_key, args.approver_key)
    done = approve(
        r.account, r.layout, args.model, args.version, key, publisher_keys=trust.publisher_keys, approver_keys=trust.approver_keys,
        allow=tuple(args.allow), scanner=args.scanner, days=args.days, progress=bar(args.json),
    )  # fmt: skip
    lines = [f"approved {args.model} {args.version} until {done.document['expires_at']} with key {key.public}"]
    emit(args, done.document, "\n".join(lines + [f"  {c.name:<15} {c.result:<8} {c.detail}" for c in done.checks]))
    return 0


def _promote(args: argparse.Namespace, r: Registry) -> int:
    key = r.key("approver", args.key)
    trust = r.trust(args.publisher_key, args.approver_key)
    now = promote(r.account, r.layout, args.model, args.version, key, trust)
    return _channel(args, now.document)


def _rollback(args: argparse.Namespace, r: Registry) -> int:
    trust = r.trust(args.publisher_key, args.approver_key)
    known = trust if trust.publisher_keys and trust.approver_keys else None  # without keys at hand it must still work
    done = rollback(r.account, r.layout, args.model, r.key("approver", args.key), known)
    return _channel(args, done.document)


def _channel(args: argparse.Namespace, document: dict[str, Any]) -> int:
    item = Announcement(kind="promoted", model=args.model, version=document["current"])
    tell(args, item, "weight services read the channel when they start")
    emit(args, document, f"{args.model}: current {document['current']}, previous {document['previous'] or '(none)'}")
    return 0


def _retire(args: argparse.Namespace, r: Registry) -> int:
    retire(r.account, r.layout, args.model, args.version, r.key("approver", args.key))
    emit(
        args,
        {"model": args.model, "retired": args.version},
        f"{args.model} {args.version} is retired; `dynamo release collect` frees its objects",
    )
    return 0


def _collect(args: argparse.Namespace, r: Registry) -> int:
    done = collect(r.account, r.layout, dry_run=not args.delete, grace_s=args.grace_hours * 3600)
    verb = "deleted" if args.delete else "would delete"
    text = f"{verb} {len(done.objects)} objects, {size(done.bytes)}; {done.kept} in use, {done.young} too young"
    text += f", {done.spared} taken up again meanwhile" if done.spared else ""
    text += f"\ngave up unfinished: {', '.join(done.abandoned)}" if done.abandoned else ""
    emit(args, vars(done), text)
    return 0


def _archive(args: argparse.Namespace, r: Registry) -> int:
    credential = (
        CredentialConfig(kind="sas_file", path=args.to_sas_file)
        if args.to_sas_file
        else CredentialConfig(kind="entra", client_id=args.client_id)
    )
    target = Account(AccountConfig(url=args.url, credential=credential, ca_bundle=args.ca_bundle))
    try:
        key = r.key("publisher", args.key, required=False)
        done = archive(
            r.account, r.layout, args.model, args.version, target, tier=args.tier, key=key, progress=bar(args.json)
        )
    finally:
        target.close()
    emit(
        args,
        vars(done),
        f"archived {args.model} {args.version}: {size(done.copied)} copied, {size(done.skipped)} there already\n  {done.uri}",
    )
    return 0


def _audit(args: argparse.Namespace, r: Registry) -> int:
    records = audit.read(r.account, r.layout, args.model)
    if not records:
        raise DynamoBlobError(
            "REGISTRY-AUDIT-MISSING", f"there is no audit record of {args.model}", where=r.account.uri(r.layout.audit, f"audit/{args.model}/"),
            why="nothing was ever published here under this name, or the record was removed", do="`dynamo release list` shows the models there are",
        )  # fmt: skip
    rows = [["#", "AT", "ACTION", "PHASE", "VERSION", "MANIFEST", "IDENTITY", "KEY"]]
    rows += [[str(x.seq), x.at, x.action, x.phase, x.version, x.manifest[:16], x.identity, x.key[:16]] for x in records]
    emit(args, [vars(x) for x in records], table(rows) + f"\n{len(records)} records, the chain is whole")
    return 0


def _selector(args: argparse.Namespace) -> dict[str, str]:
    return {field: getattr(args, field) for field in artifacts.SELECTOR}


def _attach(args: argparse.Namespace, r: Registry) -> int:
    key = r.key("publisher", args.key)
    assert key is not None
    stored, _ = show(r.account, r.layout, args.model, args.version)
    name = artifacts.attach(
        r.account, r.layout, stored, Path(args.directory), _selector(args), key, progress=bar(args.json)
    )
    emit(args, {"name": name}, f"attached as {name}")
    return 0


def _attached(args: argparse.Namespace, r: Registry) -> int:
    stored, _ = show(r.account, r.layout, args.model, args.version)
    found = artifacts.find(r.account, r.layout, stored, _selector(args), r.trust(args.publisher_key, args.approver_key))
    text = f"none: {found.reason}" if found.reason else "\n".join(f"{size(f.size):>9}  {f.path}" for f in found.files)
    emit(args, {"files": [f.path for f in found.files], "reason": found.reason}, text)
    return 0 if found.files else 1


def _approve_attached(args: argparse.Namespace, r: Registry) -> int:
    key = r.key("approver", args.key)
    assert key is not None
    stored, _ = show(r.account, r.layout, args.model, args.version)
    artifacts.approve_artifacts(r.account, r.layout, stored, _selector(args), key)
    emit(args, {"approved": _selector(args)}, "approved")
    return 0
