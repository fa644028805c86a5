"""The embedded store of a local graph: account keys, SAS files per identity, and publishing what is missing.

The launcher plays the parts that workload identities, role assignments and a release pipeline play on AKS.
What it published is remembered beside the store's data, so that a later start can plan at once; the
record only saves time: the weight service checks every digest against the store.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError, nearest
from components.common.messages.tenants import TenantsFile
from components.common.registry.approve import approve
from components.common.registry.config import ReleaseConfig, TrustConfig
from components.common.registry.layout import Layout
from components.common.registry.progress import Progress as Step
from components.common.registry.publish import publish_directory
from components.common.registry.release import resolve
from components.common.registry.signing import SigningKey
from components.common.storage.account import Account
from components.common.storage.azurite import ensure_key, log_records
from components.common.storage.config import AccountConfig, CredentialConfig
from components.common.storage.sas import Grant, Role, SasIssuer
from graphs.launch.runs import REPOSITORY, write_json
from graphs.launch.samples import SAMPLES
from graphs.launch.source import refuse_incomplete
from graphs.load import Graph
from graphs.site import EMBEDDED_ACCOUNTS, Release, Site
from graphs.spec import GraphSpec

Progress = Callable[[str], None]
AZURITE_DATABASES = ("__azurite_db_blob__.json", "__azurite_db_blob_extent__.json")
IDENTITIES: dict[str, dict[str, Role]] = {
    "weights": {
        "serving": "serving",
        "serving-weights-only": "serving",
        "publisher": "publisher",
        "approver": "approver",
    },
    "kv": {"serving": "kv"},
}
"""Account -> identity -> what its SAS allows. The file is credentials/<identity>.<account>.json in the run directory."""


def grants(graph: Graph, site: Site, ttl_s: float = 3600.0) -> list[Grant]:
    """The SAS file of every identity. Makes account keys where there are none, and their directories, for this user alone."""
    spec, out = graph.spec, []
    for folder in (site.state / "keys", site.run / "credentials"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    for role, account in EMBEDDED_ACCOUNTS.items():
        key = site.account_key(account)
        ensure_key(key)
        url = site.account_url(spec, role)
        for identity, right in IDENTITIES[role].items():
            path, container = site.credential(identity, role), spec.storage.weights.container
            out.append(Grant(path, url, key, right, ttl_s, container))
    return out


def prepare(graph: Graph, site: Site) -> SasIssuer:
    """Write a SAS file for every identity; renewed until closed."""
    return SasIssuer(grants(graph, site)).start()


def account(graph: Graph, site: Site, role: str, identity: str) -> AccountConfig:
    """An account as the launcher itself uses it, under one of the identities it issued."""
    return AccountConfig(
        url=site.account_url(graph.spec, role),
        credential=CredentialConfig(kind="sas_file", path=str(site.credential(identity, role))),
    )


def key_account(graph: Graph, site: Site, role: str) -> AccountConfig:
    """With the account key: for what no SAS may do (creating containers)."""
    return AccountConfig(
        url=site.account_url(graph.spec, role),
        credential=CredentialConfig(kind="key_file", path=str(site.account_key(EMBEDDED_ACCOUNTS[role]))),
    )


def record_path(site: Site) -> Path:
    return site.state / "azurite" / "dynamo-blob-releases.json"


def known_release(graph: Graph, site: Site) -> Release | None:
    """The release as an earlier start published it here; None when it must be looked up or published first.

    A directory that changed since then is not what was published under this version: that is refused, versions are immutable.
    """
    model = graph.spec.model
    if not model.version:
        return None
    entry = _records(site).get(f"{model.name}/{model.version}")
    if entry is None or not _settled(graph, site, entry):
        return None
    source = source_directory(graph) if model.source and not model.source.startswith("sample:") else None
    if source is not None and source.is_dir() and entry.get("fingerprint") not in ("", fingerprint(source)):
        raise DynamoBlobError(
            "RELEASE-SOURCE-CHANGED", f"{model.name} {model.version} was published from other files", where=graph.place("model", "source"),
            why=f"{source} changed since; a version never changes", do="give model.version a new value",
        )  # fmt: skip
    return Release(
        model.version,
        entry["manifest_digest"],
        entry["weights_digest"],
        tuple(entry.get("publisher_keys", ())),
        tuple(entry.get("approver_keys", ())),
    )


def _records(site: Site) -> dict[str, dict[str, Any]]:
    """What was published here, by MODEL/VERSION. A damaged record is no record."""
    try:
        found = json.loads(record_path(site).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    texts = ("manifest_digest", "weights_digest", "fingerprint")
    return {k: e for k, e in entries if isinstance(e, dict) and all(isinstance(e.get(t), str) for t in texts)}


def _settled(graph: Graph, site: Site, entry: dict[str, Any]) -> bool:
    """Has Azurite itself written down what was published? It does every 5 s; killed before that it has forgotten,
    and a start that trusts the record would be refused by the weight service for ever."""
    model, layout = graph.spec.model, Layout(graph.spec.storage.weights.container)
    names = [layout.signature(model.name, model.version)]
    if model.source and not foreign(graph.spec):
        names.append(layout.approval(model.name, model.version))
    folder = record_path(site).parent
    try:
        saved = min((folder / name).stat().st_mtime for name in AZURITE_DATABASES)
        text = (folder / AZURITE_DATABASES[0]).read_text()
    except (OSError, ValueError):
        return False
    return saved >= entry.get("published_at", 0) and all(f'"name":{json.dumps(n)}' in text for n in names)


def remember(graph: Graph, site: Site, release: Release) -> None:
    known = _records(site)
    source = source_directory(graph) if graph.spec.model.source else None
    known[f"{graph.spec.model.name}/{release.version}"] = {
        "manifest_digest": release.manifest_digest, "weights_digest": release.weights_digest,
        "publisher_keys": release.publisher_keys, "approver_keys": release.approver_keys,
        "fingerprint": fingerprint(source) if source and source.is_dir() else "", "published_at": time.time(),
    }  # fmt: skip
    write_json(record_path(site), known)


def fingerprint(directory: Path) -> str:
    """Changes when a file of the directory does, by name, size and time: reading every byte would cost the start seconds."""
    rows = [
        (str(p.relative_to(directory)), s.st_size, s.st_mtime_ns)
        for p in sorted(directory.rglob("*"))
        if p.is_file() and (s := p.stat())
    ]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def source_directory(graph: Graph) -> Path:
    """Directory of `model.source`. Raises RELEASE-SOURCE for a sample nobody knows."""
    source = graph.spec.model.source
    if not source.startswith("sample:"):
        return (Path(graph.document.name).parent / source).resolve()
    name = source.removeprefix("sample:")
    if name not in SAMPLES:
        raise DynamoBlobError(
            "RELEASE-SOURCE",
            f"there is no sample model '{name}'",
            where=graph.place("model", "source"),
            do=nearest(name, SAMPLES),
        )
    return REPOSITORY / ".state" / "models" / name


def materialise_source(graph: Graph, say: Progress) -> Path:
    """The model directory, a sample made if it is not there yet."""
    directory = source_directory(graph)
    if not (directory / "config.json").is_file() and graph.spec.model.source.startswith("sample:"):
        say(f"making the sample model {directory.name} (once, about 30 s)")
        import importlib

        module = importlib.import_module(SAMPLES[directory.name])
        if directory.name.startswith("tiny-"):
            module.build(directory.name.removeprefix("tiny-"), directory, directory.parent / "smollm2-135m-instruct")
        else:
            module.build(directory)
    if not (directory / "config.json").is_file():
        raise DynamoBlobError(
            "RELEASE-SOURCE", "the model directory holds no model", where=graph.place("model", "source"), why=f"no config.json in {directory}",
            do="give a directory with config.json, tokenizer and safetensors, or sample:NAME",
        )  # fmt: skip
    refuse_incomplete(directory, graph.place("model", "source"))
    return directory


def local_key(site: Site, who: str) -> SigningKey:
    """A signing key of this machine, made on first use. Publisher and approver differ."""
    path = site.state / "keys" / f"{who}.pem"
    if not path.exists():
        SigningKey.generate().write(path)
    return SigningKey.open(path)


def ensure_containers(graph: Graph, site: Site) -> None:
    """Every container the graph needs, made with the account keys: no identity of a component may make one. Blocking."""
    spec = graph.spec
    kv = {spec.storage.kv.container}
    if spec.components.frontend.tenants_file:
        tenants = TenantsFile.load(site.tenants_file(graph.document.name, spec.components.frontend.tenants_file))
        kv |= {c.container for c in tenants.classes.values() if c.container}
    wanted = {"weights": Layout(spec.storage.weights.container).containers, "kv": tuple(sorted(kv))}
    for role, names in wanted.items():
        with closing(Account(key_account(graph, site, role))) as owner:
            for name in names:
                owner.ensure_container(name)


def publish_missing(graph: Graph, site: Site, say: Progress, stopped: threading.Event) -> Release:
    """The release the graph names; published from `model.source`, and approved, when the embedded store lacks it. Blocking.

    Raises RELEASE-MISSING, RELEASE-SOURCE, LAUNCH-STOPPED once `stopped` is set, and what publishing, approving and
    resolving raise.
    """
    spec, model, version = graph.spec, graph.spec.model.name, graph.spec.model.version
    layout = Layout(spec.storage.weights.container)
    with (
        closing(Account(key_account(graph, site, "weights"))) as owner,
        closing(Account(key_account(graph, site, "kv"))) as kv,
    ):
        for name in layout.containers:
            owner.ensure_container(name)
        kv.ensure_container(spec.storage.kv.container)
    publisher, approver = local_key(site, "publisher"), local_key(site, "approver")
    with closing(Account(account(graph, site, "weights", "publisher"))) as store:
        there = not version or store.find(layout.container, layout.signature(model, version)) is not None
        if not there and not spec.model.source:
            raise DynamoBlobError(
                "RELEASE-MISSING", f"the embedded store has no {model} {version}", where=graph.place("model", "version"),
                do="publish it (`dynamo publish`), or name a `source` the graph may publish itself",
            )  # fmt: skip
        if not there:
            directory = materialise_source(graph, say)
            done = publish_directory(
                store,
                layout.container,
                directory,
                model,
                version,
                key=publisher,
                provenance=provenance(directory),
                progress=_percent(say, stopped),
            )
            say(f"published {model} {version}: {done.uploaded / 1e6:.0f} MB in {done.hash_s + done.upload_s:.1f} s")
    if spec.model.source and version and not foreign(spec):
        with closing(Account(account(graph, site, "weights", "approver"))) as store:
            if store.find(layout.approvals, layout.approval(model, version)) is None:
                approve(
                    store,
                    layout,
                    model,
                    version,
                    approver,
                    publisher_keys=(publisher.public,),
                    progress=_percent(say, stopped),
                )
                say(f"approved {model} {version} with this machine's approver key")
    trust = TrustConfig(require="approval", publisher_keys=(publisher.public,), approver_keys=(approver.public,))
    if spec.trust is not None and foreign(spec):
        trust = TrustConfig(
            require=spec.trust.require,
            publisher_keys=tuple(spec.trust.publisher_keys),
            approver_keys=tuple(spec.trust.approver_keys),
        )
    wanted = ReleaseConfig(
        model=model,
        version=version,
        channel=spec.model.channel,
        container=layout.container,
        manifest_digest=spec.model.manifest_digest,
    )
    with closing(Account(account(graph, site, "weights", "serving"))) as store:
        found = resolve(store, wanted, trust, record=False)
    release = Release(
        found.manifest.version, found.digest, found.manifest.weights_digest, trust.publisher_keys, trust.approver_keys
    )
    remember(graph, site, release)
    return release


def access_log(run_dir: Path | str) -> Path:
    return Path(run_dir) / "logs" / "azurite.access.jsonl"


def records(site: Site) -> int:
    """Requests the embedded store has answered so far in this run."""
    return sum(1 for _ in log_records(access_log(site.run)))


def sent_since(run_dir: Path | str, first: int, path_contains: str) -> int:
    """Body bytes of GETs that left the store after its first `first` requests."""
    later = islice(log_records(access_log(run_dir)), first, None)
    return sum(int(str(r["body"])) for r in later if r["method"] == "GET" and path_contains in str(r["path"]))


def foreign(spec: GraphSpec) -> bool:
    """Does the graph name its own trust, so that this machine's keys say nothing?"""
    return spec.trust is not None and spec.trust.require != "local"


def provenance(directory: Path) -> dict[str, Any]:
    """What provenance.json of the directory says; else what can be said honestly of a local directory."""
    try:
        found = json.loads((directory / "provenance.json").read_text())
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    if directory.name.startswith("tiny-"):
        return {"source": "tools/tiny_model.py", "license": "Apache-2.0 (tokenizer; the weights are random)"}
    return {
        "source": f"directory {directory.name}",
        "license": "not stated (published by `dynamo serve` from a local directory)",
    }


def _percent(say: Progress, stopped: threading.Event) -> Callable[[Step], None]:
    """Says every quarter. Ends the work (a thread cannot be cancelled) once `stopped` is set."""
    last: dict[str, int] = {}

    def report(step: Step) -> None:
        if stopped.is_set():
            raise DynamoBlobError("LAUNCH-STOPPED", "the graph is stopping", why=f"in the middle of: {step.phase}")
        quarter = 4 * step.done // max(1, step.total)
        if quarter > last.get(step.phase, -1):
            last[step.phase] = quarter
            say(f"{step.phase}: {step.done / 1e6:.0f} of {step.total / 1e6:.0f} MB, {step.rate / 1e6:.0f} MB/s")

    return report
