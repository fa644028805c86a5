"""Plan -> pods: processes collapsed to one template a component, containers with every field the plan states."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any
from urllib.parse import urlsplit

from components.common.errors import DynamoBlobError
from graphs.plan import Plan, Probe, Process, Volume
from graphs.render import base
from graphs.render.base import Manifest, Pod
from graphs.render.site import POD_IP, SHARED_GID, TENANTS, WEIGHTS_UID, WORKER_UID

MIB = 2**20

CLUSTER_ENV = {
    "POD_IP": "status.podIP", "POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid",
}  # fmt: skip
"""Variables a cluster adds to every container: the pod's address, and what Dynamo's Kubernetes discovery reads."""

SERVICE_ACCOUNT = {"serving": "serving", "serving-weights-only": "weights", "none": "runtime"}
RANK = ("none", "serving-weights-only", "serving")


def pods(plan: Plan) -> list[Pod]:
    """Every pod of the graph, frontends first. Raises RENDER-REPLICAS-DIFFER, RENDER-COMPONENT."""
    found = collapse(plan)
    cluster = plan.cluster or {}
    sidecar = cluster.get("cache_mode") == "sidecar"
    out: list[Pod] = []
    if "frontend" not in found:
        raise DynamoBlobError(
            "RENDER-COMPONENT", "the graph has no gateway", where="components.frontend.replicas",
            why="nothing would answer", do="give it one replica at least",
        )  # fmt: skip
    else:
        gateway, count = found.pop("frontend")
        behind = found.pop("dynamo-frontend", None)
        if behind is None:
            raise DynamoBlobError(
                "RENDER-COMPONENT", "a gateway has no Dynamo frontend behind it", where="components.dynamo_frontend.replicas",
                do="give it one replica at least; every gateway pod holds one",
            )  # fmt: skip
        out.append(_pod(plan, "frontend", "frontend", count, gateway, (behind[0],)))
    weights = found.pop("weights", None)
    for component, (process, count) in found.items():
        if component in ("router", "sweeper"):
            out.append(_pod(plan, component, "worker", count, process))
        elif component in base.WORKERS:
            kind = "worker" if component == "aggregated" else component
            beside = (weights[0],) if weights and sidecar else ()
            out.append(_pod(plan, component, kind, count, process, beside))
        else:
            raise DynamoBlobError(
                "RENDER-COMPONENT", f"'{component}' is not for a cluster", where=plan.source, why="it belongs to one machine"
            )  # fmt: skip
    if weights and not sidecar:
        out.append(_pod(plan, "weights", "node", 1, weights[0]))
    return out


def collapse(plan: Plan) -> dict[str, tuple[Process, int]]:
    """Component -> (template, replicas). Replicas must be equal but for their number."""
    found: dict[str, tuple[Process, int]] = {}
    for process in plan.processes:
        template = _template(process)
        if process.component not in found:
            found[process.component] = (template, 1)
            continue
        first, count = found[process.component]
        if first != template:
            a, b = first.model_dump(mode="json"), template.model_dump(mode="json")
            differ = [k for k in a if a[k] != b[k]]
            raise DynamoBlobError(
                "RENDER-REPLICAS-DIFFER", f"the replicas of {process.component} are not equal", where=plan.source,
                why=f"{process.name} differs in {', '.join(differ)}", do="one template serves all replicas of a component in a cluster",
            )  # fmt: skip
        found[process.component] = (first, count + 1)
    return found


def _template(process: Process) -> Process:
    own = re.compile(rf"(?<![\w-]){re.escape(process.name)}(?![\w-])")

    def bare(value: Any) -> Any:
        if isinstance(value, str):
            return own.sub(process.component, value)
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items()}
        return [bare(v) for v in value] if isinstance(value, list) else value

    return Process.parse({**bare(process.model_dump(mode="json")), "replica": 0})


def config_map_name(plan: Plan) -> str:
    """Named by content: pods of an old template keep the files they were started with."""
    return f"{plan.graph}-plans-{plan_digest(plan)[:10]}"


def config_files(plan: Plan) -> dict[str, str]:
    """File name -> text of every configuration the plan's processes read."""
    return {
        process.config_path.rpartition("/")[2]: json.dumps(process.config, indent=1) + "\n"
        for process, _ in collapse(plan).values()
        if process.config is not None
    }


def plan_digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(config_files(plan), sort_keys=True).encode()).hexdigest()


def image(plan: Plan, component: str) -> str:
    images: dict[str, str] = (plan.cluster or {}).get("images", {})
    found = images.get(component) or images.get("default", "")
    if not re.search(r"@sha256:[0-9a-f]{64}$", found):
        raise DynamoBlobError(
            "RENDER-IMAGE-UNPINNED", f"the image of {component} is not pinned by digest", where=f"cluster.images.{component}",
            why=f"found '{found}'" if found else "there is none", do="write registry/name@sha256:<64 hex digits>",
        )  # fmt: skip
    return found


def service_account(plan: Plan, identity: str) -> str:
    short = SERVICE_ACCOUNT.get(identity)
    if short is None:
        raise DynamoBlobError(
            "RENDER-IDENTITY", f"a process of the graph runs as {identity}", where=plan.source,
            why="publishing and issuing identities never serve", do="publish from a pipeline of its own",
        )  # fmt: skip
    own: dict[str, Any] = (plan.cluster or {}).get("identities", {}).get(short, {})
    return str(own.get("service_account") or f"{plan.graph}-{short}")


def _pod(plan: Plan, name: str, kind: Any, replicas: int, main: Process, sidecars: tuple[Process, ...] = ()) -> Pod:
    everyone = (main, *sidecars)
    strongest = max((p.identity for p in everyone), key=lambda x: RANK.index(x) if x in RANK else len(RANK))
    account = service_account(plan, strongest)
    identity = {"azure.workload.identity/use": "true"} if strongest != "none" else {}
    annotations = {
        f"{base.PREFIX}/plan-digest": plan_digest(plan), f"{base.PREFIX}/model": plan.served_model,
        f"{base.PREFIX}/manifest-digest": plan.release["manifest_digest"], f"{base.PREFIX}/trust": plan.release["trust"],
    }  # fmt: skip
    return Pod(
        name=name, kind=kind, replicas=replicas, main=main, sidecars=sidecars, service_account=account,
        labels={**base.labels(plan, name), **identity}, annotations=annotations,
        spec=_pod_spec(plan, kind, main, sidecars, account), shm_bytes=main.shm_bytes,
    )  # fmt: skip


def _pod_spec(plan: Plan, kind: str, main: Process, sidecars: tuple[Process, ...], account: str) -> Manifest:
    cluster, everyone = plan.cluster or {}, (main, *sidecars)
    grace = max(cluster["termination_grace_s"], *(p.grace_s for p in everyone)) + sum(p.drain_s for p in sidecars)
    on_node = [v for p in everyone for v in p.volumes if v.node] if kind == "node" else []
    first = [_node_dirs(plan, on_node)] if on_node else []
    beside = [{**_container(plan, p, p.component), "restartPolicy": "Always"} for p in sidecars]
    for c in beside:
        c.pop("livenessProbe", None), c.pop("readinessProbe", None), c.pop("startupProbe", None)
    needs_gpu = main.gpus > 0
    spec: Manifest = {
        "serviceAccountName": account,
        "terminationGracePeriodSeconds": math.ceil(grace),
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": WEIGHTS_UID if kind == "node" else WORKER_UID, "runAsGroup": SHARED_GID,
            "fsGroup": SHARED_GID, "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    if cluster.get("node_selector") and (kind == "node" or main.component in base.WORKERS):
        spec["nodeSelector"] = dict(sorted(cluster["node_selector"].items()))
    if needs_gpu or (kind == "node" and any(p.gpus for p in plan.processes)):
        spec["tolerations"] = [{"key": cluster["gpu_resource"], "operator": "Exists", "effect": "NoSchedule"}]
    if first or beside:
        spec["initContainers"] = first + beside
    spec["containers"] = [_container(plan, main, "main")]
    spec["volumes"] = _volumes(plan, everyone)
    return spec


def _node_dirs(plan: Plan, volumes: list[Volume]) -> Manifest:
    """hostPath directories belong to root when the kubelet makes them; the service is not root."""
    owner = str(WEIGHTS_UID), "-g", str(SHARED_GID), "-m", "0755"
    return {
        "name": "node-dirs",
        "image": image(plan, "weights"),
        "command": ["install", "-d", "-o", *owner, *(v.path for v in volumes)],
        "securityContext": {
            "runAsNonRoot": False, "runAsUser": 0, "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        },
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "32Mi"}},
        "volumeMounts": [{"name": v.name, "mountPath": v.path} for v in volumes],
    }  # fmt: skip


def _container(plan: Plan, p: Process, name: str) -> Manifest:
    env: list[Manifest] = [
        {"name": k, "valueFrom": {"fieldRef": {"fieldPath": path}}} for k, path in CLUSTER_ENV.items() if k not in p.env
    ]
    env.append({"name": "HOME", "value": p.cwd})  # the image's own home is not writable
    env += [{"name": k, "value": literal(v)} for k, v in p.env.items() if k != "HOME"]
    capabilities: Manifest = {"drop": ["ALL"]}
    if p.gpus and (plan.cluster or {}).get("extra_resources"):
        capabilities["add"] = ["IPC_LOCK"]  # RDMA pins memory
    own_user = {"runAsUser": WEIGHTS_UID} if p.component == "weights" else {}
    container: Manifest = {
        "name": name, "image": image(plan, p.component), "command": list(p.argv[:3]), "args": [literal(a) for a in p.argv[3:]],
        "workingDir": p.cwd, "env": env,
        "ports": [{"name": port.name, "containerPort": port.number, "protocol": "TCP"} for port in _ports(p)],
        "resources": resources(plan, p), **_probes(p),
        "securityContext": {**own_user, "allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": [{k: v for k, v in m.items() if v is not False} for m in _mounts(plan, p)],
    }  # fmt: skip
    return {k: v for k, v in container.items() if v not in ([], {})}


def literal(text: str) -> str:
    """`text` as the kubelet must be told it: it expands $(NAME) and halves $$, which no launcher does. Our own $(POD_IP) stays."""
    return re.sub(r"\$(?=[$(])", "$$", text).replace(f"${POD_IP}", POD_IP) if "$" in text else text


def _ports(p: Process) -> list[Any]:
    return [x for x in p.ports if x.host not in ("127.0.0.1", "localhost")]


def resources(plan: Plan, p: Process) -> Manifest:
    """Requests equal limits for memory: a node that is overcommitted loses a worker, not a little speed."""
    cluster = plan.cluster or {}
    load = int(((p.config or {}).get("weights") or {}).get("budget_bytes", 0)) if p.component in base.WORKERS else 0
    limits: Manifest = {}
    requests: Manifest = {"cpu": f"{math.ceil(p.cpus * 1000)}m"} if p.cpus else {}
    if p.memory_bytes:
        memory = f"{math.ceil((p.memory_bytes + load) / MIB)}Mi"
        limits["memory"] = requests["memory"] = memory
    if p.gpus:
        for name, count in {
            cluster["gpu_resource"]: p.gpus,
            **dict(sorted(cluster["extra_resources"].items())),
        }.items():
            limits[name] = requests[name] = str(count)
    return {k: v for k, v in (("requests", requests), ("limits", limits)) if v}


def _probes(p: Process) -> Manifest:
    """Readiness is the plan's own probe; alive = it answers at all. A start may take the plan's whole deadline."""
    if p.probe is None:
        return {}
    ready, alive = _actions(p, p.probe)
    if ready is None:
        return {}
    timeout = math.ceil(p.probe.timeout_s)
    period = max(10, timeout)
    return {
        "startupProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": math.ceil(p.probe.deadline_s / 10)},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {**ready, "periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": 3},
    }  # fmt: skip


def _actions(p: Process, probe: Probe) -> tuple[Manifest | None, Manifest]:
    if probe.http:
        url = urlsplit(probe.http)
        ready = {"httpGet": {"path": url.path, "port": url.port}}
        live = p.component in (*base.WORKERS, "frontend", "sweeper")  # the router has no /live
        return ready, {"httpGet": {"path": "/live", "port": url.port}} if live else {"tcpSocket": {"port": url.port}}
    if probe.unix_http:
        socket, _, path = probe.unix_http.removeprefix("unix:").rpartition(":")
        ask = {"exec": {"command": ["curl", "-sf", "-m", "2", "--unix-socket", socket, f"http://weights{path}"]}}
        alive = {
            "exec": {
                "command": [
                    "curl",
                    "-s",
                    "-m",
                    "2",
                    "-o",
                    "/dev/null",
                    "--unix-socket",
                    socket,
                    f"http://weights{path}",
                ]
            }
        }
        return ask, alive
    raise DynamoBlobError("RENDER-PROBE", f"the probe of {p.name} has no cluster form", where=p.name, why=repr(probe))


def _run_dirs(plan: Plan, p: Process) -> dict[str, str]:
    """Volume name -> path of the directories below the run directory that a process writes."""
    mine = {"sockets": f"{plan.run_dir}/s", "reports": f"{plan.run_dir}/reports"}
    return {**{k: v for k, v in mine.items() if v in plan.dirs}, f"cwd-{p.component}": p.cwd}


def _tenants(p: Process) -> bool:
    config = p.config or {}
    return bool(config.get("tenants_file") or ((config.get("kv") or {}).get("settings") or {}).get("tenants_file"))


def _tenants_secret(plan: Plan, p: Process) -> Manifest:
    """The gateway sees salt keys; a worker only the file that names tenants and classes."""
    secret: Manifest = {"secretName": f"{plan.graph}-tenants", "defaultMode": 0o440}
    if p.component != "frontend":
        config = p.config or {}
        name = (config.get("tenants_file") or config["kv"]["settings"]["tenants_file"]).rpartition("/")[2]
        secret["items"] = [{"key": name, "path": name}]
    return secret


def _mounts(plan: Plan, p: Process) -> list[Manifest]:
    out: list[Manifest] = [{"name": name, "mountPath": path} for name, path in _run_dirs(plan, p).items()]
    if p.config_path:
        out.append({"name": "plans", "mountPath": p.config_path.rpartition("/")[0], "readOnly": True})
    out += [{"name": v.name, "mountPath": v.path, "readOnly": v.read_only} for v in p.volumes]
    if _tenants(p):
        out.append({"name": "tenants", "mountPath": str(TENANTS), "readOnly": True})
    return out


def _volumes(plan: Plan, everyone: tuple[Process, ...]) -> list[Manifest]:
    cluster = plan.cluster or {}
    out: dict[str, Manifest] = {}
    for p in everyone:
        for name in _run_dirs(plan, p):
            out[name] = {"name": name, "emptyDir": {}}
        if p.config_path:
            out["plans"] = {"name": "plans", "configMap": {"name": config_map_name(plan)}}
        for v in p.volumes:
            out[v.name] = _volume(v, cluster["cache_mode"] == "hostpath")
        if _tenants(p):
            out["tenants"] = {"name": "tenants", "secret": _tenants_secret(plan, p)}
    return list(out.values())


def _volume(v: Volume, host_path: bool) -> Manifest:
    if v.node and host_path:
        return {"name": v.name, "hostPath": {"path": v.host_path or v.path, "type": "DirectoryOrCreate"}}
    directory: Manifest = {"medium": "Memory"} if v.kind == "tmpfs" else {}
    if v.bytes:
        directory["sizeLimit"] = f"{math.ceil(v.bytes / MIB)}Mi"
    return {"name": v.name, "emptyDir": directory}
