"""publish a model directory, or a model that is in Blob already, as a release

    dynamo publish DIR MODEL VERSION --provenance source=https://example.org/model --provenance license=apache-2.0
    dynamo publish az://container/prefix MODEL VERSION

Objects are content-addressed: what another version has already is not sent again, and an interrupted
publish goes on where it stopped. The signing key is read from --key FILE or $DYNAMO_BLOB_SIGNING_KEY,
for the embedded store from .state/keys (made on first use).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError
from components.common.registry.layout import check_names
from components.common.registry.publish import adopt, publish_directory
from graphs.cli._registry import MAX_PARALLEL, add_access, bar, emit, open_registry, size, within
from graphs.launch.source import refuse_incomplete


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="model directory, or az://container/prefix of the same account")
    parser.add_argument("model", help="name in the registry")
    parser.add_argument("version", help="new version; versions are never changed or reused")
    parser.add_argument("--key", default="", metavar="FILE", help="the publisher's Ed25519 key")
    parser.add_argument(
        "--unsigned", action="store_true", help="sign nothing: only `trust.require: none` serves such a release"
    )
    parser.add_argument(
        "--provenance",
        action="append",
        default=[],
        metavar="KEY=VALUE|FILE",
        help="source, license, remote_code=true, …; or a JSON file",
    )
    parser.add_argument("--parallel", type=int, default=4, help="transfers at a time (memory: 8 MiB each)")
    add_access(parser)


def run(args: argparse.Namespace) -> int:
    within("--parallel", args.parallel, 1, MAX_PARALLEL)
    check_names(args.model, args.version)
    facts = provenance(args.source, args.provenance)
    if not args.source.startswith("az://"):
        refuse_incomplete(Path(args.source))
    with open_registry(args, "publisher") as registry:
        key = None if args.unsigned else registry.key("publisher", args.key)
        options: dict[str, Any] = {
            "key": key,
            "provenance": facts,
            "progress": bar(args.json),
            "parallel": args.parallel,
        }
        if args.source.startswith("az://"):
            done = adopt(registry.account, registry.layout.container, args.source, args.model, args.version, **options)
        else:
            done = publish_directory(
                registry.account, registry.layout.container, Path(args.source), args.model, args.version, **options
            )
    value = {
        "model": args.model, "version": args.version, "manifest_digest": done.digest, "weights_digest": done.manifest.weights_digest,
        "uri": done.uri, "publisher": key.public if key else "", "files": len(done.manifest.files), "uploaded_bytes": done.uploaded,
        "skipped_bytes": done.skipped, "hash_s": round(done.hash_s, 3), "upload_s": round(done.upload_s, 3), "resumed": done.resumed,
    }  # fmt: skip
    rate = f" at {size(done.uploaded / done.upload_s)}/s" if done.upload_s and done.uploaded else ""
    emit(
        args, value,
        f"published {args.model} {args.version}: {size(done.uploaded)} sent{rate}, {size(done.skipped)} there already\n"
        f"  manifest  {done.digest}\n  weights   {done.manifest.weights_digest}\n  publisher {key.public if key else '(unsigned)'}",
    )  # fmt: skip
    return 0


def provenance(source: str, given: list[str]) -> dict[str, Any]:
    """Facts from the directory's provenance.json, then files, then KEY=VALUE; later ones win."""
    facts: dict[str, Any] = {}
    inside = Path(source) / "provenance.json"
    files = [inside] if not source.startswith("az://") and inside.is_file() else []
    for file in [*files, *(Path(g) for g in given if "=" not in g)]:
        try:
            found = json.loads(file.read_text())
            facts |= dict(found)
        except (OSError, ValueError, TypeError) as e:
            raise DynamoBlobError(
                "PUBLISH-PROVENANCE",
                "the provenance file cannot be read",
                where=str(file),
                why=str(e),
                do="give a JSON object",
            ) from None
    for item in given:
        if "=" in item:
            name, _, text = item.partition("=")
            facts[name] = {"true": True, "false": False}.get(text, text)
    return facts
