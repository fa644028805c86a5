"""Broken graphs and what `dynamo check` says of each: code, line, cause. Each case changes one thing of a sound graph."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from graphs.check import check_graph

SOUND = """\
graph: sound
model: {name: smollm2-135m-instruct, version: "1", source: sample:smollm2-135m-instruct}
storage:
  embedded: azurite
  weights: {container: weights}
  kv: {container: kv-default}
engine:
  profile: smollm2-135m-cpu
kv: {profile: smollm2-135m-cpu}
components:
  frontend: {listen: 127.0.0.1:8000, auth: none}
  router: {}
  weights: {cache_bytes: 2GiB}
  prefill: {replicas: 1}
  decode: {replicas: 1}
"""
GRAPHS = Path(__file__).resolve().parents[2] / "graphs"
D64 = "0123456789abcdef" * 4
FAKE_KEY = "A" * 86 + "=="
CLUSTER = "cluster: {images: {default: 'r.example/x@sha256:" + D64 + "'}}\n"


class Case(NamedTuple):
    name: str
    code: str
    old: str
    """Text of the sound graph that is replaced; empty = `new` is appended."""
    new: str
    at: str
    """Text in the line the finding must name; empty = any line."""
    says: str = ""
    """Text the finding must contain."""


CASES = [
    Case("not yaml", "GRAPH-YAML", "router: {}", "router: {", "prefill:"),
    Case("tab as indent", "GRAPH-YAML", "  router: {}", "\trouter: {}", "\trouter"),
    Case("key twice", "GRAPH-YAML", "  router: {}", "  router: {}\n  router: {block_size: 128}", "router: {block_size", "stands twice"),
    Case("alias", "GRAPH-YAML", "prefill: {replicas: 1}", "prefill: &w {replicas: 1}\n  aggregated: *w", "&w", "alias"),
    Case("a list", "GRAPH-INVALID", SOUND, "- graph\n", "- graph"),
    Case("unknown key", "GRAPH-UNKNOWN-KEY", "decode: {replicas: 1}", "decode: {replica: 1}", "replica: 1", "did you mean 'replicas'"),
    Case("unknown section", "GRAPH-UNKNOWN-KEY", "engine:", "engines: {}\nengine:", "engines", "did you mean 'engine'"),
    Case("wrong type", "GRAPH-WRONG-VALUE", "decode: {replicas: 1}", "decode: {replicas: one}", "one", "the string 'one'"),
    Case("number in quotes", "GRAPH-WRONG-VALUE", "decode: {replicas: 1}", 'decode: {replicas: "2"}', '"2"', "the string '2'"),
    Case("wrong size", "GRAPH-WRONG-VALUE", "2GiB", "2 gigs", "2 gigs", "not a size"),
    Case("port too high", "GRAPH-WRONG-VALUE", "127.0.0.1:8000", "127.0.0.1:99999", ":99999", "a port from 1 to 65535"),
    Case("port zero", "GRAPH-WRONG-VALUE", "127.0.0.1:8000", "127.0.0.1:0", "127.0.0.1:0", "a port from 1 to 65535"),
    Case("port alone", "GRAPH-WRONG-VALUE", "127.0.0.1:8000", "8000", "8000", "write host:port"),
    Case("wrong choice", "GRAPH-WRONG-VALUE", "embedded: azurite", "embedded: minio", "minio", "'azurite' or 'none'"),
    Case("missing key", "GRAPH-MISSING-KEY", "graph: sound\n", "", "", "'graph' is missing"),
    Case("env without string", "GRAPH-ENV-VALUE", "router: {}", "router: {env: {RUST_BACKTRACE: 1}}", "RUST_BACKTRACE", 'RUST_BACKTRACE: "1"'),
    Case("env name", "CHECK-ENV-NAME", "router: {}", 'router: {env: {"RUST-BACKTRACE ": "1"}}', "RUST-BACKTRACE", "component router"),
    Case("env of the plan", "CHECK-ENV-OWNED", "router: {}", "router: {env: {DYN_DISCOVERY_BACKEND: etcd}}", "DYN_DISCOVERY"),
    Case("account key", "GRAPH-SECRET", "kv: {container: kv-default}", "kv: {container: kv-default, url: " + FAKE_KEY + "}", "AAAA"),
    Case("SAS", "GRAPH-SECRET", "kv: {container: kv-default}", "kv: {container: kv-default, url: 'https://a.example/?sv=2026-01-01&sig=abcdefghijklmnopqrst'}", "sig="),
    Case("connection string in a comment", "GRAPH-SECRET", "engine:", "# SharedAccessSignature=sv=2026\nengine:", "# Shared"),
    Case("secret by name", "GRAPH-SECRET", "router: {}", "router: {env: {HF_API_KEY: abc}}", "HF_API_KEY"),
    Case("profile unknown", "PROFILE-UNKNOWN", "  profile: smollm2-135m-cpu", "  profile: smollm-135m-cpu", "smollm-135m", "smollm2-135m-cpu"),
    Case("engine setting unknown", "ENGINE-KEY-UNKNOWN", "decode: {replicas: 1}", "decode: {replicas: 1, engine: {blocksize: 64}}", "blocksize", "did you mean 'block_size'"),
    Case("engine setting wrong", "ENGINE-VALUE", "decode: {replicas: 1}", "decode: {replicas: 1, engine: {block_size: big}}", "big"),
    Case("block sizes differ", "CHECK-BLOCK-SIZE", "decode: {replicas: 1}", "decode: {replicas: 1, engine: {block_size: 64}}", "block_size: 64", "prefill 128, decode 64"),
    Case("dtypes differ", "CHECK-DTYPE", "decode: {replicas: 1}", "decode: {replicas: 1, engine: {dtype: float32}}", "float32", "prefill bfloat16, decode float32"),
    Case("lengths differ", "CHECK-MAX-LEN", "prefill: {replicas: 1}", "prefill: {replicas: 1, engine: {max_model_len: 2048}}", "2048"),
    Case("parallel sizes differ", "CHECK-PARALLEL", "decode: {replicas: 1}", "decode: {replicas: 1, engine: {tensor_parallel_size: 2}}", "tensor_parallel_size"),
    Case("KV dtypes differ", "CHECK-EXTRA-DIFFERS", "decode: {replicas: 1}", "decode: {replicas: 1, engine: {extra: {kv_cache_dtype: fp8}}}", "fp8", "extra.kv_cache_dtype"),
    Case("weights differ", "CHECK-WEIGHTS-DIFFER", "decode: {replicas: 1}", 'decode: {replicas: 1, version: "2"}', "version: \"2\"", "graph 1, decode 2"),
    Case("hash seeds differ", "CHECK-HASH-SEED", "decode: {replicas: 1}", 'decode: {replicas: 1, env: {PYTHONHASHSEED: "7"}}', "PYTHONHASHSEED"),
    Case("hash of the process", "CHECK-HASH-ALGORITHM", "  profile: smollm2-135m-cpu", "  profile: smollm2-135m-cpu\n  set: {extra: {prefix_caching_hash_algo: builtin}}", "builtin"),
    Case("no prefix cache", "CHECK-PREFIX-CACHE", "  profile: smollm2-135m-cpu", "  profile: smollm2-135m-cpu\n  set: {extra: {enable_prefix_caching: false}}", "enable_prefix"),
    Case("router counts other blocks", "CHECK-ROUTER-BLOCK-SIZE", "router: {}", "router: {block_size: 64}", "block_size: 64", "router 64, prefill 128"),
    Case("prefill alone", "CHECK-POOL-MISSING", "  decode: {replicas: 1}\n", "", "prefill:", "without decode"),
    Case("pools mixed", "CHECK-POOLS-MIXED", "decode: {replicas: 1}", "decode: {replicas: 1}\n  aggregated: {}", "aggregated"),
    Case("no replica", "CHECK-POOL-EMPTY", "decode: {replicas: 1}", "decode: {replicas: 0}", "replicas: 0"),
    Case("link to nobody", "CHECK-LINK-UNKNOWN", "", "links: [{from: prefill, to: decoder, kind: kv}]\n", "decoder"),
    Case("no worker", "GRAPH-NO-WORKER", "  prefill: {replicas: 1}\n  decode: {replicas: 1}\n", "", "components:"),
    Case("blocks misaligned", "CHECK-BLOCK-ALIGN", "  profile: smollm2-135m-cpu", "  profile: smollm2-135m-cpu\n  set: {block_size: 16}", "block_size: 16", "multiple of 32"),
    Case("longer than the model", "CHECK-MAX-LEN-MODEL", "  profile: smollm2-135m-cpu", "  profile: smollm2-135m-cpu\n  set: {max_model_len: 16384}", "16384", "8192"),
    Case("KV too small", "CHECK-KV-CAPACITY", "  profile: smollm2-135m-cpu", "  profile: smollm2-135m-cpu\n  set: {kv_cache_bytes: 67108864}", "67108864", "90 MiB"),
    Case("GPUs on a CPU profile", "CHECK-GPUS", "decode: {replicas: 1}", "decode: {replicas: 1, gpus: 1}", "gpus: 1"),
    Case("behind the plan", "CHECK-ENGINE-OWNED", "  profile: smollm2-135m-cpu", "  profile: smollm2-135m-cpu\n  set: {extra: {load_format: auto}}", "load_format"),
    Case("unverified loader", "CHECK-UNVERIFIED-LOADER", "  profile: smollm2-135m-cpu", "  profile: smollm2-135m-cpu\n  loader: auto", "loader: auto", "flipped bit"),
    Case("mock profile on a real engine", "CHECK-MOCK-PROFILE", "  profile: smollm2-135m-cpu", "  profile: mock", "profile: mock"),
    Case("tier setting unknown", "CHECK-KV-SETTING", "kv: {profile: smollm2-135m-cpu}", "kv: {profile: smollm2-135m-cpu, set: {dram_byte: 1}}", "dram_byte", "did you mean 'dram_bytes'"),
    Case("tier setting wrong", "CHECK-KV-SETTING", "kv: {profile: smollm2-135m-cpu}", "kv: {profile: smollm2-135m-cpu, set: {dram_bytes: much}}", "much"),
    Case("chunk too small", "CHECK-CHUNK-SIZE", "  profile: smollm2-135m-cpu", "  profile: smollm2-135m-cpu\n  set: {block_size: 32}", "kv: {profile", "720 KiB"),
    Case("staging too small", "CHECK-STAGING", "kv: {profile: smollm2-135m-cpu}", "kv: {profile: smollm2-135m-cpu, set: {staging_bytes: 4MiB}}", "4MiB", "2.812 MiB"),
    Case("DRAM tier below a prompt", "CHECK-DRAM-TIER", "kv: {profile: smollm2-135m-cpu}", "kv: {profile: smollm2-135m-cpu, set: {dram_bytes: 64MiB}}", "64MiB", "90 MiB"),
    Case("chunks differ", "CHECK-KV-CHUNKS-DIFFER", "decode: {replicas: 1}", "decode: {replicas: 1, kv: {profile: smollm2-135m-cpu, set: {blocks_per_chunk: 2}}}", "blocks_per_chunk"),
    Case("proof skipped", "CHECK-KV-UNSAFE", "kv: {profile: smollm2-135m-cpu}", "kv: {profile: smollm2-135m-cpu, set: {unsafe_skip_proof: true}}", "unsafe_skip_proof"),
    Case("keys without tenants", "CHECK-TENANTS-MISSING", "auth: none", "auth: keys", "auth: keys", "401"),
    Case("tenants file absent", "CHECK-TENANTS-FILE", "auth: none", "auth: keys, tenants_file: nowhere.yaml", "nowhere.yaml"),
    Case("no account", "CHECK-STORAGE-MISSING", "embedded: azurite", "embedded: none", "weights: {container"),
    Case("plain http", "CHECK-STORAGE-URL", "weights: {container: weights}", "weights: {container: weights, url: 'http://acct.blob.example.net'}", "http://acct"),
    Case("one container for both", "CHECK-STORAGE-SHARED", "  weights: {container: weights}\n  kv: {container: kv-default}", "  weights: {container: data, url: 'https://a.example.net'}\n  kv: {container: data, url: 'https://a.example.net'}", "kv: {container: data"),
    Case("local trust on a real account", "CHECK-TRUST", "weights: {container: weights}", "weights: {container: weights, url: 'https://acct.example.net'}", "storage:"),
    Case("approval without keys", "CHECK-TRUST-KEYS", "engine:", "trust: {require: approval, publisher_keys: [" + D64 + "]}\nengine:", "require: approval", "without approver keys"),
    Case("one key for both", "CHECK-TRUST-SAME-KEY", "engine:", f"trust: {{require: approval, publisher_keys: [{D64}], approver_keys: [{D64}]}}\nengine:", "approver_keys"),
    Case("no key at all", "CHECK-TRUST-KEY", "engine:", "trust: {require: signature, publisher_keys: [abc]}\nengine:", "abc"),
    Case("source without version", "CHECK-RELEASE-VERSION", 'version: "1", ', "", "source:"),
    Case("ports clash", "CHECK-PORT-CLASH", "127.0.0.1:8000", "127.0.0.1:8120", "127.0.0.1:8120", "prefill-0 and frontend-0"),
    Case("open to the network", "CHECK-AUTH-NONE", "127.0.0.1:8000", "0.0.0.0:8000", "auth: none"),
    Case("components open to the network", "CHECK-NOT-LOOPBACK", "", "network: {host: 0.0.0.0}\n", "host: 0.0.0.0"),
    Case("cluster discovery on a laptop", "CHECK-PLANE", "", "runtime: {discovery: kubernetes}\n", "kubernetes"),
    Case("killed before drained", "CHECK-DRAIN-GRACE", "decode: {replicas: 1}", "decode: {replicas: 1, drain_s: 60, grace_s: 30}", "grace_s: 30", "drain_s 60, grace_s 30"),
    Case("pods killed before drained", "CHECK-DRAIN-CLUSTER", "", CLUSTER.replace("cluster: {", "cluster: {termination_grace_s: 20, "), "termination_grace_s: 20", "drain_s 30"),
    Case("too many replicas", "CHECK-REPLICAS", "decode: {replicas: 1}", "decode: {replicas: 9}", "replicas: 9"),
    Case("memory of the node", "CHECK-NODE-MEMORY", "", "node: {memory: 4GiB}\n", "4GiB"),
    Case("GPUs of the node", "CHECK-NODE-GPUS", "decode: {replicas: 1}", "decode: {replicas: 2, gpus: 8}\nnode: {gpus: 8}", "node: {gpus", "needs 16"),
    Case("shared memory of the node", "CHECK-NODE-SHM", "", "node: {shm: 512MiB}\n", "512MiB"),
    Case("memory limit", "CHECK-MEMORY-LIMIT", "decode: {replicas: 1}", "decode: {replicas: 1, memory: 1GiB}", "memory: 1GiB"),
    Case("cache below the release", "CHECK-CACHE-BYTES", "2GiB", "64MiB", "64MiB"),
    Case("image by tag", "CHECK-IMAGE-UNPINNED", "", "cluster: {images: {prefill: 'r.example/worker:v1'}}\n", "worker:v1"),
    Case("cluster without accounts", "CHECK-CLUSTER-STORAGE", "", CLUSTER, "storage:"),
    Case("release by name in a cluster", "CHECK-RELEASE-UNPINNED", "", CLUSTER, "model:"),
    Case("SAS that begins with sig", "GRAPH-SECRET", "router: {}", 'router: {env: {X: "sig=abcdefghijklmnopqrstuvwxyz%3D&sp=r"}}', "sig="),
    Case("service bus key", "GRAPH-SECRET", "router: {}", 'router: {env: {X: "SharedAccessKey=abcd;Endpoint=sb://x"}}', "SharedAccessKey"),
    Case("account key without padding", "GRAPH-SECRET", "engine:", "# " + "aB3/" * 21 + "aB\nengine:", "# aB3"),
    *(
        Case(f"literal {name}", "GRAPH-SECRET", "router: {}", f"router: {{env: {{{name}: abc-def}}}}", name, f"components.router.env.{name}")
        for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASS", "DB_PASSWORD_1", "OPENAI_KEY", "MY_SECRET_KEY", "NGC_APIKEY")
    ),
    Case("huge number", "GRAPH-YAML", "decode: {replicas: 1}", "decode: {replicas: 0x" + "f" * 5000 + "}", "0xfff", "5002 characters"),
    Case("huge number in env", "GRAPH-YAML", "router: {}", "router: {env: {X: 0x" + "f" * 5000 + "}}", "0xfff", "5002 characters"),
    Case("huge memory", "GRAPH-WRONG-VALUE", "decode: {replicas: 1}", "decode: {memory: 999999999999999999999999T}", "999T", "1 EiB"),
    Case("infinite memory", "GRAPH-WRONG-VALUE", "decode: {replicas: 1}", "decode: {memory: " + "9" * 400 + ".0G}", "999", "1 EiB"),
    Case("whole number of memory", "GRAPH-WRONG-VALUE", "decode: {replicas: 1}", "decode: {memory: 0x" + "f" * 20 + "}", "0xfff"),
    Case("infinite time", "GRAPH-WRONG-VALUE", "engine:\n", "engine:\n  mock_token_ms: .inf\n", ".inf", "finite"),
    Case("infinite drain", "GRAPH-WRONG-VALUE", "decode: {replicas: 1}", "decode: {cpus: .inf}", ".inf", "finite"),
    Case("served name", "GRAPH-WRONG-VALUE", "model: {", 'model: {served_as: "mo ck\\n\\u202e", ', "served_as", "served_as"),
    Case("log level", "GRAPH-WRONG-VALUE", "engine:\n", 'runtime: {log: "warn\\nx"}\nengine:\n', "log:", "runtime.log"),
    Case("sample unknown", "RELEASE-SOURCE", "sample:smollm2", "sample:smolm2", "sample:", "did you mean 'smollm2-135m-instruct'"),
    Case("source not there", "RELEASE-SOURCE", "sample:smollm2-135m-instruct", "/nonexistent", "/nonexistent", "config.json"),
    Case("router without a value", "GRAPH-WRONG-VALUE", "router: {}", "router:", "router:", "leave the line out"),
    Case("no router replica", "CHECK-POOL-EMPTY", "router: {}", "router: {replicas: 0}", "replicas: 0", "without a hint"),
    Case("nested for ever", "GRAPH-YAML", "router: {}", "router: " + "{a: " * 2000 + "}" * 2000, "{a: ", "levels"),
    Case("fake engine in a cluster", "CHECK-MOCK-CLUSTER", "  profile: smollm2-135m-cpu", "  kind: mock\n  profile: smollm2-135m-cpu\n" + CLUSTER.rstrip(), "kind: mock"),
]  # fmt: skip


def broken(case: Case) -> str:
    assert case.old in SOUND, "the case changes text that is not there"
    return SOUND + case.new if not case.old else SOUND.replace(case.old, case.new, 1)


def test_the_sound_graph_has_no_finding(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(SOUND)
    assert check_graph(path) == []


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_broken_graph_is_named_by_code_line_and_cause(case: Case, tmp_path: Path) -> None:
    path, text = tmp_path / "graph.yaml", broken(case)
    path.write_text(text)
    found = [f for f in check_graph(path) if f.code == case.code]
    assert found, f"{case.code} is missing among {[(f.code, f.what) for f in check_graph(path)]}"
    place = f"{path}:"
    if case.at:
        lines = [n for n, line in enumerate(text.splitlines(), 1) if case.at in line]
        assert any(f.where.startswith(tuple(f"{place}{n}:" for n in lines)) for f in found), (
            f"{found[0].where}, wanted line {lines}"
        )
    words = " ".join(f"{f.what} {f.why} {f.do}" for f in found)
    assert case.says in words
    if not case.code.startswith("GRAPH-"):
        assert all(f.why and f.do for f in found), "a finding says why it would fail and how to fix it"


def test_a_section_can_be_left_out_by_set(tmp_path: Path) -> None:
    assert check_graph(GRAPHS / "mock.yaml", ["components.router=null"]) == check_graph(GRAPHS / "mock.yaml")
    assert [f.code for f in check_graph(GRAPHS / "mock.yaml", ["components.routr=null"])] == ["GRAPH-UNKNOWN-KEY"]


def test_salt_keys_that_cannot_be_used(tmp_path: Path) -> None:
    digest = "0" * 63
    (tmp_path / "short.salt").write_text("short")
    (tmp_path / "tenants.yaml").write_text(
        f"tenants: {{a: {{keys: ['{digest}1'], salt_key_file: none.salt}}, b: {{keys: ['{digest}2'], salt_key_file: short.salt}}}}\n"
        "classes: {s: {ttl_s: 60, max_ttl_s: 60, bytes: 1GiB}}\ndefault_class: s\n"
    )
    sets = ["components.frontend.auth=keys", f"components.frontend.tenants_file={tmp_path}/tenants.yaml"]
    found = [f for f in check_graph(GRAPHS / "mock.yaml", sets) if f.code == "CHECK-SALT-KEY"]
    assert [Path(f.where).name for f in found] == ["none.salt", "short.salt"] and all("503" in f.why for f in found)


def test_gpus_of_a_fake_engine() -> None:
    found = check_graph(GRAPHS / "mock.yaml", ["components.decode.gpus=8"])
    assert [(f.code, f.severity) for f in found] == [("CHECK-GPUS", "error")]


@pytest.mark.parametrize("item", ["components.decode.drain_s", "engine.mock_token_ms", "components.router.env.X"])
def test_a_huge_number_of_the_command_line_is_refused_there(item: str) -> None:
    found = check_graph(GRAPHS / "mock.yaml", [f"{item}=0x" + "f" * 5000])
    assert [f.code for f in found] == ["GRAPH-YAML"] and found[0].where.startswith(f"--set {item}:")


ORDINARY = (
    'TOKENIZERS_PARALLELISM: "false"', 'HF_HUB_DISABLE_IMPLICIT_TOKEN: "1"', "DB_PASSWORD_FILE: /run/secrets/db", "HF_TOKEN: /run/secrets/hf",
    "SECRET_NAME: vault", "AWS_ACCESS_KEY_ID_FILE: x", "PUBLIC_KEY: abcd", "CACHE_KEY: prefix", "BYPASS: everything", "COMPASS: north", "MONKEY: see",
    'MAX_TOKENS: "4096"', "X: design=abcdefghijklmnopqrstuvwxyz", "X: " + "a1/b" * 21 + "ab", "X: " + "0123456789abcdef" * 6, "X: SharedAccessKeys",
)  # fmt: skip


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_values_are_no_secrets(line: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(SOUND.replace("router: {}", f"router:\n    env:\n      {line}"))
    assert check_graph(path) == []


@pytest.mark.parametrize(
    "path", sorted([*GRAPHS.glob("*.yaml"), *(GRAPHS / "aks").glob("*.yaml")]), ids=lambda p: p.stem
)
def test_shipped_graphs_hold_no_secret(path: Path) -> None:
    assert [f for f in check_graph(path) if f.code == "GRAPH-SECRET"] == []


def test_a_finding_never_repeats_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(SOUND.replace("router: {}", "router: {env: {X: '" + FAKE_KEY + "'}}"))
    found = check_graph(path)
    assert [f.code for f in found] == ["GRAPH-SECRET"]
    assert FAKE_KEY not in str(found)


def test_every_finding_is_reported_not_only_the_first(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(
        SOUND.replace(
            "decode: {replicas: 1}", "decode: {replicas: 1, gpus: 1, engine: {block_size: 64, dtype: float32}}"
        )
    )
    assert {f.code for f in check_graph(path)} >= {"CHECK-BLOCK-SIZE", "CHECK-DTYPE", "CHECK-GPUS"}
