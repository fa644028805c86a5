"""Case 48 (dynamo#395): the deployment lacked the configuration that `serve` had used.

One graph, one compiler, two sites: every field of every process is equal in both plans but for a short list, and
each entry says why a cluster differs. What the renderer then writes is the plan, field by field (tests/unit/render).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphs.compile import compile_plan
from graphs.load import read_graph
from graphs.plan import Plan
from graphs.plandiff import Change, diff
from graphs.site import Release, Site
from tests.golden import rendering

EXPLAINED = {
    r"processes\.(azurite|events)-0": "the store and the event broker of one machine; a cluster has Blob, and pod addresses",
    r"order": "the same two processes",
    r"storage|.*\.account\.(url|credential\..*)|.*\.secrets": "SAS files of the embedded store; workload identity in a cluster",
    r".*\.(after|talks_to)": "the embedded store is waited for and talked to",
    r".*\.(root|model_path|cache_dir|tenants_file|volumes)|dirs": "directories of a machine; of a pod",
    r".*\.weights\.service|.*weights-0\.(config\.listen|sockets|probe\.unix_http)": "the run's socket; the node's",
    r".*\.(ports|probe\.http|config\.(http|listen|ops_listen|upstream|nixl_host|nixl_port))": "one machine shares its ports and binds loopback; every pod has its own",
    r".*router-0\.sockets|.*frontend-0\.config\.router": "the router is asked over a socket; over HTTP",
    r".*\.env\.(DYN_SYSTEM_PORT|VLLM_NIXL_SIDE_CHANNEL_PORT)": "ports, as above",
    r".*\.env\.(DYN_SYSTEM_HOST|DYN_TCP_RPC_HOST|DYN_TCP_RESPONSE_STREAM_HOST|DYN_EVENT_PLANE_HOST|VLLM_HOST_IP|VLLM_NIXL_SIDE_CHANNEL_HOST|UCX_NET_DEVICES)": "loopback; the pod's address",
    r"namespace|.*\.config\.namespace": "the operator names it {namespace}-{deployment}",
    r"discovery|.*\.(config\.discovery|env\.DYN_DISCOVERY_BACKEND|env\.DYN_FILE_KV|inotify)": "files; the Kubernetes API",
    r".*\.env\.DYN_ZMQ_BROKER_URL": "the broker of one machine",
    r".*dynamo-frontend-0\.argv\.--(discovery-backend|http-port|namespace)": "as above",
    r".*\.env\.CUDA_VISIBLE_DEVICES": "the launcher assigns GPUs; the device plugin",
    r".*\.env\.LD_PRELOAD": "OpenMP of this environment; the image's own",
    r".*\.env\.VLLM_RPC_BASE_PATH": "the run's directory, which outlives a killed engine; a pod's own",
    r".*\.weights\.sealed_uid": "this user's; the weight service's",
    r"cluster": "what the graph itself leaves to a cluster",
}  # fmt: skip
"""Path of a field -> why the two worlds differ in it."""

RELEASE = Release("1", "a" * 64, "b" * 64, approver_keys=("3" * 64,))
SETS = ("kv.profile=smollm2-135m-cpu",)


def local(graph: Path, *sets: str) -> Plan:
    site = Site(run=Path("/state/runs/x"), state=Path("/state"), release=RELEASE, python="python3")
    return compile_plan(read_graph(str(graph), [*rendering.LOCAL, *sets]), site)


def word_by_word(changes: list[Change]) -> list[Change]:
    """Command lines of equal length as one change a word, named by the flag before it."""
    out = []
    for c in changes:
        if c.path.endswith(".argv") and c.old and c.new and len(c.old) == len(c.new):
            pairs = enumerate(zip(c.old, c.new, strict=True))
            out += [Change(f"{c.path}.{c.old[i - 1]}", a, b) for i, (a, b) in pairs if a != b]
        else:
            out.append(c)
    return out


def unexplained(changes: list[Change]) -> list[Change]:
    return [c for c in word_by_word(changes) if not any(re.fullmatch(p, c.path) for p in EXPLAINED)]


@pytest.mark.parametrize("name", ["disagg", "disagg-2p2d", "aggregated"])
def test_local_plan_and_cluster_plan_are_equal_but_for_what_is_explained(name: str) -> None:
    graph = rendering.ROOT / f"graphs/{name}.yaml"
    assert unexplained(diff(local(graph, *SETS), rendering.plan_of(graph, *SETS))) == []


def test_every_explanation_is_needed() -> None:
    graph = rendering.ROOT / "graphs/disagg.yaml"
    paths = [c.path for c in word_by_word(diff(local(graph, *SETS), rendering.plan_of(graph, *SETS)))]
    assert [p for p in EXPLAINED if not any(re.fullmatch(p, path) for path in paths)] == []


@pytest.mark.parametrize(
    "change",
    [
        "components.decode.engine={block_size: 64}", "components.router.host_hit_weight=0.5", "components.prefill.drain_s=77",
        "components.decode.env={DYN_LOG: debug}", "runtime.migration_limit=1", "runtime.hash_seed='7'", "kv.set={verify_puts: 1.0}",
        "components.frontend.max_concurrent=7", "components.weights.cache_bytes=3GiB", "components.decode.replicas=2",
    ],
)  # fmt: skip
def test_a_setting_that_reaches_one_world_only_is_found(change: str) -> None:
    """Negative control: `serve` with it, the cluster without it."""
    graph = rendering.ROOT / "graphs/disagg.yaml"
    assert unexplained(diff(local(graph, *SETS, change), rendering.plan_of(graph, *SETS))) != []
