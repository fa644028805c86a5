"""P1: what runs here is what the cluster is told to run.

A graph is launched; command lines and environments are read from /proc, files as the processes were given them. The same
graph is rendered, and the YAML parsed as kubectl parses it. Both are laid flat and compared field by field. Where they
differ, `EXPLAINED` says why and what the cluster's side must be: so a changed field is found there too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graphs.env import PASSED
from graphs.plan import Plan
from graphs.render import core
from graphs.render import pods as render_pods
from graphs.render.output import RENDERERS, manifests, to_yaml
from graphs.render.pods import CLUSTER_ENV
from graphs.render.site import RUN, STATE
from graphs.sockets import socket_directory
from tests.e2e.mockgraph import Served, serving
from tests.golden import rendering
from tests.golden.schemas import templates

pytestmark = pytest.mark.slow

GRAPH = rendering.ROOT / "graphs/mock.yaml"
SETS = ("components.decode.replicas=2", "components.decode.env={RUST_BACKTRACE: '1', ODD: '$(HOME) $$ é'}")
LOCAL_ONLY = {"azurite", "events"}  # the store and the event broker of one machine
Flat = dict[str, Any]


class Explained(NamedTuple):
    path: str
    cluster: str
    """Regular expression of the cluster's value, as JSON; "absent" = it has none."""
    why: str


_WORKER = r"(prefill|decode)"
_DYNAMO = r"(prefill|decode|router|dynamo-frontend)"
EXPLAINED = [
    Explained(r".*\.argv\.0", '"python3"', "the interpreter of this environment; the image's own"),
    Explained(r".*\.config\.discovery", '"kubernetes"', "files of one machine; the Kubernetes API"),
    Explained(r"dynamo-frontend\.argv\.--discovery-backend", '"kubernetes"', "the same"),
    Explained(rf"{_DYNAMO}\.env\.DYN_DISCOVERY_BACKEND", '"kubernetes"', "the same"),
    Explained(rf"{_DYNAMO}\.env\.DYN_FILE_KV", "absent", "the same"),
    Explained(rf"{_DYNAMO}\.env\.DYN_ZMQ_BROKER_URL", "absent", "the event broker of one machine; pod addresses"),
    Explained(r".*\.config\.namespace|dynamo-frontend\.argv\.--namespace", '"inference-mock"', "the operator names it"),
    Explained(
        rf"{_DYNAMO}\.env\.(DYN_SYSTEM_HOST|DYN_TCP_RPC_HOST|DYN_TCP_RESPONSE_STREAM_HOST|DYN_EVENT_PLANE_HOST)",
        r'"\$\(POD_IP\)"', "loopback; the pod's address",
    ),
    Explained(rf"{_WORKER}\.env\.VLLM_(HOST_IP|NIXL_SIDE_CHANNEL_HOST)", r'"\$\(POD_IP\)"', "the same"),
    Explained(rf"{_WORKER}\.env\.UCX_NET_DEVICES", "absent", "the loopback device; every device of the pod"),
    Explained(rf"{_WORKER}\.env\.CUDA_VISIBLE_DEVICES", "absent", "the launcher assigns GPUs; the device plugin"),
    Explained(rf"{_WORKER}\.env\.DYN_SYSTEM_PORT", '"9090"', "one machine shares its ports; every pod has its own"),
    Explained(rf"{_WORKER}\.env\.VLLM_NIXL_SIDE_CHANNEL_PORT", '"5600"', "the same"),
    Explained(rf"{_WORKER}\.config\.nixl_port", "5600", "the same"),
    Explained(rf"{_WORKER}\.config\.nixl_host", r'"0\.0\.0\.0"', "loopback; the pod's address"),
    Explained(r"dynamo-frontend\.argv\.--http-port", '"8001"', "ports, as above"),
    Explained(r"frontend\.config\.upstream", '"http://127.0.0.1:8001"', "the same: the frontend in its own pod"),
    Explained(r"frontend\.config\.listen", r'"0\.0\.0\.0:8000"', "ports, as above"),
    Explained(r"frontend\.config\.ops_listen", r'"0\.0\.0\.0:9090"', "/metrics on a port of its own, which the API's callers cannot reach"),
    Explained(r"frontend\.config\.router", '"http://mock-router-decide:8200"', "the router is asked over a socket; over HTTP"),
    Explained(r"router\.config\.listen", r'"0\.0\.0\.0:8200"', "the same"),
    Explained(r"router\.config\.http", r'"0\.0\.0\.0:9091"', "ports, as above"),
    Explained(r"frontend\.config\.auth", '"keys"', "nobody needs a key on loopback; a cluster's gateway always asks"),
    Explained(r"frontend\.config\.tenants_file", '"/etc/dynamo-blob/tenants/example.yaml"', "the same"),
    Explained(r".*\.account\.url", '"https://exampleweights.blob.core.windows.net"', "the embedded store; the cluster's account"),
    Explained(r".*\.credential\.kind", '"entra"', "SAS files of the embedded store; workload identity"),
    Explained(r".*\.credential\.chain", r'\["workload_identity"\]', "the same"),
    Explained(r".*\.credential\.path", '""', "the same"),
    Explained(rf"{_WORKER}\.config\.weights\.service|weights\.config\.listen", '"unix:<run>-node/weights.sock"', "the run's socket; the node's"),
    Explained(rf"{_WORKER}\.env\.VLLM_RPC_BASE_PATH", "absent", "the run's directory, which outlives a killed engine; a pod's own"),
    Explained(r".*\.weights\.sealed_uid", "64123", "this user's weight service; the one with a user of its own"),
    Explained(r"frontend\.config\.weights\.service", '""', "gateways stand where there may be no weight service"),
]  # fmt: skip


def environ_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode().rstrip("\0")
    return dict(x.split("=", 1) for x in text.split("\0"))


def argv_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")


def flat(value: Any, path: str) -> Flat:
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    return {path: value}


def words(argv: list[str], path: str) -> Flat:
    """Command line by position; a value of a flag by the flag's name."""
    return {
        f"{path}.{argv[i - 1]}" if i and argv[i - 1].startswith("--") else f"{path}.{i}": w for i, w in enumerate(argv)
    }


def normal(found: Flat, run: str, state: str) -> Flat:
    """Directories by what they are for; a replica's own name by its component's."""

    def text(value: Any, component: str) -> Any:
        if isinstance(value, str):
            value = re.sub(rf"(?<![\w-]){component}-0(?![\w-])", component, value)
            value = value.replace(
                str(socket_directory(Path(run))), f"{run}/s"
            )  # under /tmp when the run's path is long
            return value.replace(run, "<run>").replace(state, "<state>")
        return [text(v, component) for v in value] if isinstance(value, list) else value

    return {k: text(v, k.partition(".")[0]) for k, v in found.items()}


def running(served: Served) -> Flat:
    """Every field of what runs: /proc, and the files it was given."""
    out: Flat = {}
    pids = {p["name"]: p["pid"] for p in served.status()["processes"]}
    for process in served.plan.processes:
        c = process.component
        out[f"{c}.replicas"] = out.get(f"{c}.replicas", 0) + 1
        if process.replica or c in LOCAL_ONLY:
            continue
        argv = argv_of(pids[process.name])
        out |= words(argv, f"{c}.argv") | {f"{c}.cwd": str(Path(f"/proc/{pids[process.name]}/cwd").readlink())}
        out |= {f"{c}.env.{k}": v for k, v in environ_of(pids[process.name]).items() if k not in PASSED}
        if "--plan" in argv:
            out |= flat(json.loads(Path(argv[argv.index("--plan") + 1]).read_text()), f"{c}.config")
    out = {k: v for k, v in out.items() if k.partition(".")[0] not in LOCAL_ONLY}
    return normal(out, str(served.run_dir), str(served.state))


def rendered(items: list[dict[str, Any]]) -> Flat:
    """The same of the YAML: containers, replica counts, files of the ConfigMap that is mounted."""
    graph = next(i for i in items if i["kind"] == "DynamoGraphDeployment")
    pods = {p["metadata"]["labels"]["app.kubernetes.io/component"]: p for p in templates(graph)}
    replicas = {c["name"]: c["replicas"] for c in graph["spec"].get("components", [])}
    replicas |= {name: c["replicas"] for name, c in graph["spec"].get("services", {}).items()}
    for daemon in (i for i in items if i["kind"] == "DaemonSet"):
        template, name = daemon["spec"]["template"], daemon["metadata"]["labels"]["app.kubernetes.io/component"]
        pods[name], replicas[name] = template, 1
    files = {i["metadata"]["name"]: i["data"] for i in items if i["kind"] == "ConfigMap"}
    out: Flat = {}
    for name, pod in pods.items():
        spec = pod["spec"]
        volumes = {v["name"]: v for v in spec["volumes"]}
        for container in [c for c in spec.get("initContainers", []) if c["name"] != "node-dirs"] + spec["containers"]:
            c = name if container["name"] == "main" else container["name"]
            argv = [*container["command"], *container["args"]]
            out |= words(argv, f"{c}.argv") | {f"{c}.cwd": container["workingDir"], f"{c}.replicas": replicas[name]}
            for e in container["env"]:
                if e["name"] not in PASSED and e["name"] not in CLUSTER_ENV:
                    out[f"{c}.env.{e['name']}"] = e["value"].replace("$$", "$")  # as the kubelet expands it
            if "--plan" in argv:
                path = argv[argv.index("--plan") + 1]
                mount = next(m for m in container["volumeMounts"] if path.startswith(m["mountPath"] + "/"))
                data = files[volumes[mount["name"]]["configMap"]["name"]]
                out |= flat(json.loads(data.get(path.rpartition("/")[2], "null")), f"{c}.config")
    return normal(out, str(RUN), str(STATE))


def differences(real: Flat, cluster: Flat) -> list[tuple[str, Any, Any]]:
    absent = "absent"
    keys = sorted({*real, *cluster})
    return [(k, a, b) for k in keys if (a := real.get(k, absent)) != (b := cluster.get(k, absent))]


def unexplained(real: Flat, cluster: Flat) -> list[tuple[str, Any, Any]]:
    def explained(path: str, value: Any) -> bool:
        text = value if value == "absent" else json.dumps(value)
        return any(re.fullmatch(e.path, path) and re.fullmatch(e.cluster, text) for e in EXPLAINED)

    return [d for d in differences(real, cluster) if not explained(d[0], d[2])]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Flat, Plan, Path]]:
    """What runs; the plan of what runs; a cluster file that trusts the same keys."""
    with serving("mock", tmp_path_factory.mktemp("w") / "state", *SETS) as served:
        trust = next((p.config or {})["weights"]["trust"] for p in served.plan.processes if p.component == "weights")
        text = re.sub(r"trust:\n(  .*\n)+", f"trust: {json.dumps(trust)}\n", rendering.CLUSTER.read_text())
        cluster = tmp_path_factory.mktemp("c") / "cluster.yaml"
        cluster.write_text(text)
        yield running(served), served.plan, cluster


def objects(plan: Plan, cluster: Path, api: str = "v1beta1") -> list[dict[str, Any]]:
    """The same graph and release rendered, written as YAML and read back as another parser reads it."""
    digests = [f"model.{k}={plan.release[k]}" for k in ("manifest_digest", "weights_digest")]
    there = rendering.plan_of(GRAPH, *SETS, *digests, cluster=cluster)
    return rendering.documents(to_yaml(manifests(there, api, admit=False)))


@pytest.mark.parametrize("api", sorted(RENDERERS))
def test_every_field_is_equal_or_explained(worlds: tuple[Flat, Plan, Path], api: str) -> None:
    real, plan, cluster = worlds
    assert len(real) > 300
    left = unexplained(real, rendered(objects(plan, cluster, api)))
    assert not left, "\n".join(f"{k}\n    runs     {a!r}\n    rendered {b!r}" for k, a, b in left)


def test_every_explanation_is_needed(worlds: tuple[Flat, Plan, Path]) -> None:
    real, plan, cluster = worlds
    paths = [k for k, _, _ in differences(real, rendered(objects(plan, cluster)))]
    assert [e for e in EXPLAINED if not any(re.fullmatch(e.path, k) for k in paths)] == []


@pytest.mark.parametrize("api", sorted(RENDERERS))
def test_a_change_of_any_one_rendered_field_is_found(worlds: tuple[Flat, Plan, Path], api: str) -> None:
    """Negative control, exhaustive: each word, variable, count and configuration value in turn."""
    real, plan, cluster = worlds
    items = objects(plan, cluster, api)
    unfound, count = [], 0
    for what, change, undo in mutations(items):
        change()
        count += 1
        try:
            if not unexplained(real, rendered(items)):
                unfound.append(what)
        finally:
            undo()
    assert unexplained(real, rendered(items)) == [], "every change was undone"
    assert count > 300 and unfound == []


def test_a_renderer_that_changes_a_field_by_itself_is_found(
    worlds: tuple[Flat, Plan, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, plan, cluster = worlds
    container, files = render_pods._container, render_pods.config_files
    changes: list[tuple[str, Any]] = [
        ("_container", lambda *a: {**(c := container(*a)), "args": [*c["args"], "--verbose"]}),
        ("_container", lambda *a: {**(c := container(*a)), "env": [*c["env"], {"name": "DYN_LOG", "value": "debug"}]}),
        ("_container", lambda *a: {**(c := container(*a)), "env": [e for e in c["env"] if e["name"] != "PYTHONHASHSEED"]}),
        ("config_files", lambda p: {k: v.replace('"block_size": ', '"block_size": 1') for k, v in files(p).items()}),
    ]  # fmt: skip
    for name, changed in changes:
        with monkeypatch.context() as m:
            m.setattr(render_pods, name, changed)
            m.setattr(core, name, changed, raising=False)
            assert unexplained(real, rendered(objects(plan, cluster))) != []


Mutation = tuple[str, Callable[[], None], Callable[[], None]]


def mutations(items: list[dict[str, Any]]) -> Iterator[Mutation]:
    """One change at a time of everything that the two worlds share."""

    def at(holder: Any, key: Any, value: Any, what: str) -> Mutation:
        old = holder[key]
        return what, lambda: holder.__setitem__(key, value), lambda: holder.__setitem__(key, old)

    for item in items:
        if item["kind"] == "ConfigMap":
            for file, text in item["data"].items():
                for path, changed in altered(json.loads(text)):
                    yield at(item["data"], file, json.dumps(changed), f"{file}:{path}")
        for holder in containers(item):
            for key in ("command", "args"):
                for i, word in enumerate(holder.get(key, [])):
                    yield at(holder[key], i, word + "x", f"{holder.get('name')}.{key}[{i}]")
            if "workingDir" in holder:
                yield at(holder, "workingDir", "/tmp", "workingDir")
            if "replicas" in holder:
                yield at(holder, "replicas", holder["replicas"] + 1, "replicas")
            for env in (e for key in ("env", "envs") for e in holder.get(key, [])):
                if "value" in env and env["name"] not in PASSED:
                    yield at(env, "value", env["value"] + "x", env["name"])
                    yield at(env, "name", env["name"] + "_X", env["name"])


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Everything in an object that is a container, holds its environment or a number of replicas, but for the maker of node directories."""
    if isinstance(value, dict):
        if {"image", "envs", "replicas"} & set(value) and value.get("name") != "node-dirs":
            yield value
        for v in value.values():
            yield from containers(v)
    elif isinstance(value, list):
        for v in value:
            yield from containers(v)


def altered(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Copies of a JSON value, each with one leaf changed."""
    if isinstance(value, dict) and value:
        for k, v in value.items():
            for where, changed in altered(v, f"{path}.{k}"):
                yield where, {**value, k: changed}
    else:
        other = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value + 0.5, str: lambda: value + "x"}
        yield path, other.get(type(value), lambda: ["x"])()
