"""Graph -> plan. Pure: the same graph, release and site give the same plan, byte for byte."""

from __future__ import annotations

from typing import Any, Literal

from components.common.engine.config import KvConfig, WorkerConfig
from components.common.errors import DynamoBlobError
from components.common.loading.config import ReleaseConfig, TrustConfig, WeightsConfig
from components.common.messages.weights import HANDOVER_SUFFIX
from components.common.storage.azurite import AzuriteConfig
from components.frontend.config import GatewayConfig
from components.weights.config import WeightServiceConfig
from graphs import env as environment
from graphs.launch.broker import BrokerConfig
from graphs.load import Graph
from graphs.plan import Link, Plan, Port, Probe, Process, StorageUse, Volume
from graphs.pools import Worker, host_tier_bytes, size_or_as_it_is, workers_of
from graphs.site import EMBEDDED_ACCOUNTS, LOOPBACK, Site
from graphs.spec import ComponentSpec
from graphs.sweeping import sweeper
from router.config import RouterConfig

MODULE = {"prefill": "components.prefill", "decode": "components.decode", "aggregated": "components.decode"}
DYNAMO_COMPONENT = {"prefill": "prefill", "decode": "backend", "aggregated": "backend"}
INOTIFY_FRONTEND, INOTIFY_ROUTER = 18, 17  # instances taken with file discovery


def compile_plan(graph: Graph, site: Site) -> Plan:
    """Everything that runs. Raises a coded error where the graph cannot be planned at all; `dynamo check` says more."""
    return _Compiler(graph, site).plan()


class _Compiler:
    def __init__(self, graph: Graph, site: Site) -> None:
        self.graph, self.spec, self.site = graph, graph.spec, site
        self.workers = workers_of(graph)
        if not self.workers:
            raise DynamoBlobError(
                "GRAPH-NO-WORKER", "the graph has no worker", where=graph.place("components"),
                do="add prefill and decode, or aggregated",
            )  # fmt: skip
        self.env = environment.Environment(self.spec, site)
        self.first = self.workers[-1]

    def plan(self) -> Plan:
        spec, site, c = self.spec, self.site, self.spec.components
        processes: list[Process] = []
        if site.embedded(spec):
            processes.append(self.azurite())
        if broker := site.event_broker(spec):
            processes.append(self.events(*broker))
        processes += [self.weights(i) for i in range(c.weights.replicas)]
        gpu = 0
        for worker in self.workers:  # slow importers first: they wait for the weight service themselves
            for i in range(worker.spec.replicas):
                processes.append(self.worker(worker, i, gpu))
                gpu += worker.spec.gpus
        if c.router is not None:
            processes += [self.router(i) for i in range(c.router.replicas)]
        if any(w.kv is not None and w.spec.replicas for w in self.workers):
            processes += [sweeper(self, i) for i in range(c.sweeper.replicas)]
        processes += [self.dynamo_frontend(i) for i in range(c.dynamo_frontend.replicas)]
        processes += [self.gateway(i) for i in range(c.frontend.replicas)]
        dirs = [
            site.run,
            site.sockets,
            site.run / "logs",
            site.run / "plans",
            site.run / "reports",
            site.run / "credentials",
            site.weights_root,
        ]
        if site.discovery(spec) == "file":
            dirs.append(site.run / "discovery")
        volumes = {v.path for p in processes for v in p.volumes}
        return Plan(
            graph=spec.graph, source=graph_name(self.graph), run_dir=str(site.run), served_model=spec.served_model,
            release={
                "model": spec.model.name, "version": self.version(), "channel": "" if spec.model.version else spec.model.channel,
                "manifest_digest": self.manifest_digest(), "weights_digest": self.weights_digest(), "trust": self.trust().require,
                **({"loader": spec.engine.loader} if spec.engine.loader != "dynamo_blob" else {}),
            },
            endpoint=f"http://{c.frontend.listen}", processes=tuple(processes), namespace=site.namespace(spec),
            engine_kind=spec.engine.kind, links=self.links(), storage=self.storage(),
            dirs=tuple(dict.fromkeys([*map(str, dirs), *(p.cwd for p in processes), *sorted(volumes)])), shm_dir=str(site.shm),
            cluster=cluster.model_dump(mode="json") if (cluster := site.cluster_of(spec)) else None,
            discovery=site.discovery(spec), event_plane=spec.runtime.event_plane,
        )  # fmt: skip

    # -- what several processes share

    def version(self) -> str:
        return self.spec.model.version or self.site.release.version

    def manifest_digest(self) -> str:
        return self.spec.model.manifest_digest or self.site.release.manifest_digest

    def weights_digest(self) -> str:
        return self.spec.model.weights_digest or self.site.release.weights_digest

    def trust(self) -> TrustConfig:
        trust, release = self.site.trust(self.spec), self.site.release
        require = trust.require if trust else ("local" if self.site.embedded(self.spec) else "approval")
        if require == "local":  # keys that `serve` made on this machine; without them digests alone prove the bytes
            known: Literal["approval", "signature", "none"] = (
                "approval" if release.approver_keys else "signature" if release.publisher_keys else "none"
            )
            return TrustConfig(
                require=known,
                publisher_keys=release.publisher_keys,
                approver_keys=release.approver_keys,
            )
        assert trust is not None or require == "approval"
        return TrustConfig(
            require=require,
            publisher_keys=tuple(trust.publisher_keys if trust else ()),
            approver_keys=tuple(trust.approver_keys if trust else ()),
        )

    def weights_config(
        self, identity: str, version: str = "", service: str = "", report: str = "", cache_dir: str = ""
    ) -> WeightsConfig:
        spec, other = self.spec, bool(version) and version != self.version()
        return WeightsConfig(
            release=ReleaseConfig(
                model=spec.model.name, version=version or self.version(), channel=spec.model.channel,
                container=spec.storage.weights.container, manifest_digest="" if other else self.manifest_digest(),
            ),
            account=self.site.account(spec, "weights", identity), trust=self.trust(), root=str(self.site.weights_root), service=service,
            # Workers start beside the store and the weight service: the wait covers their start.
            service_deadline_s=60.0, on_outage=spec.components.weights.on_outage, loader=spec.engine.loader,
            allow_unverified=spec.engine.allow_unverified, budget_bytes=spec.components.weights.budget_bytes, report=report,
            sealed_uid=self.site.weights_uid(spec), cache_dir=cache_dir,  # read by itself only when neither service nor store answers
        )  # fmt: skip

    def storage(self) -> tuple[StorageUse, ...]:
        s = self.spec.storage
        return tuple(
            StorageUse(
                role=role,
                url=self.site.account_url(self.spec, role),
                container=own.container,
                embedded=self.site.embedded(self.spec) and not own.url,
            )
            for role, own in (("weights", s.weights), ("kv", s.kv))
        )

    def links(self) -> tuple[Link, ...]:
        if self.spec.links:
            return tuple(Link(source=x.source, to=x.to, kind=x.kind) for x in self.spec.links)
        roles = [w.role for w in self.workers]
        out = [("frontend", r, "requests") for r in roles]
        if self.spec.components.router is not None:
            out.append(("frontend", "router", "decisions"))
        if {"prefill", "decode"} <= set(roles):
            out.append(("prefill", "decode", "kv"))
        out += [(r, "weights", "weights") for r in roles]
        return tuple(Link(source=a, to=b, kind=k) for a, b, k in out)

    def process(self, component: str, replica: int, spec: ComponentSpec, argv: list[str], **fields: Any) -> Process:
        """A `Process` with everything that follows from its component and replica."""
        name = f"{component}-{replica}"
        config = fields.pop("config", None)
        path = str(self.site.run / "plans" / f"{name}.json") if config is not None else ""
        if config is not None:
            argv = [*argv, "--plan", path]
            config = config.model_dump(mode="json")
        env = {**fields.pop("env"), **spec.env}
        return Process(
            name=name, component=component, replica=replica, argv=tuple(argv), env=dict(sorted(env.items())),
            cwd=str(self.site.run / "cwd" / name), config=config, config_path=path, drain_s=spec.drain_s,
            grace_s=spec.grace_s or spec.drain_s + 30.0, restarts=spec.restarts, frozen_s=spec.frozen_s, cpus=spec.cpus,
            memory_bytes=spec.memory or fields.pop("memory_bytes", 0), **{k: v for k, v in fields.items() if k != "memory_bytes"},
        )  # fmt: skip

    # -- the components

    def azurite(self) -> Process:
        port, data = self.site.port(self.spec, "azurite"), self.site.state / "azurite"
        config = AzuriteConfig(
            data_dir=str(data), port=port, accounts={name: str(self.site.account_key(name)) for name in EMBEDDED_ACCOUNTS.values()},
            access_log=str(self.site.run / "logs" / "azurite.access.jsonl"),
        )  # fmt: skip
        return self.process(
            "azurite", 0, ComponentSpec(drain_s=5.0), [self.site.python, "-m", "components.common.storage.azurite"], config=config, env=self.env.python(),
            ports=(Port(name="blob", number=port, purpose=f"Blob API of {', '.join(EMBEDDED_ACCOUNTS.values())}"),),
            probe=Probe(answers=f"http://{LOOPBACK}:{port}/", deadline_s=60), identity="issuer", secrets=tuple(config.accounts.values()),
            memory_bytes=400 << 20, volumes=(Volume(name="store", path=str(data)),),
        )  # fmt: skip

    def events(self, publishers: str, subscribers: str) -> Process:
        config = BrokerConfig(publishers=publishers, subscribers=subscribers)
        ports = [(n, int(a.rpartition(":")[2])) for n, a in (("publishers", publishers), ("subscribers", subscribers))]
        return self.process(
            "events", 0, ComponentSpec(drain_s=2.0), [self.site.python, "-m", "graphs.launch.broker"], config=config, env=self.env.python(),
            ports=tuple(Port(name=n, number=p, purpose="Dynamo's KV and load events") for n, p in ports),
            probe=Probe(zmtp=f"{LOOPBACK}:{ports[1][1]}", deadline_s=30), memory_bytes=64 << 20,
        )  # fmt: skip

    def weights(self, i: int) -> Process:
        spec, site = self.spec.components.weights, self.site
        listen, cache = site.weights_listen(self.spec, i), site.cache_dir(self.spec, i)
        config = WeightServiceConfig(
            name=f"weights-{i}", listen=listen, weights=self.weights_config("serving-weights-only"),
            cache_dir=cache, cache_bytes=spec.cache_bytes,
            peers=site.weights_peers(self.spec, i),
            announce=self.env.announce(),
        )  # fmt: skip
        return self.process(
            "weights", i, spec, [site.python, "-m", "components.weights"], config=config, env=self.env.python(),
            sockets=(path := listen.removeprefix("unix:"), path + HANDOVER_SUFFIX), probe=Probe(unix_http=f"{listen}:/health", deadline_s=120),
            after=("azurite-0",) if self.site.embedded(self.spec) else (), identity="serving-weights-only",
            secrets=self.credentials("serving-weights-only", "weights"), talks_to=("azurite",) if self.site.embedded(self.spec) else (),
            volumes=(*self.cache_volume(i, read_only=False), *site.node_volumes(self.spec, "weights", i)),
            memory_bytes=(256 << 20) + spec.cache_bytes,
        )  # fmt: skip

    def cache_volume(self, i: int, read_only: bool) -> tuple[Volume, ...]:
        path, size = self.site.cache_dir(self.spec, i), self.spec.components.weights.cache_bytes
        cache = Volume(
            name="cache", path=path, kind="tmpfs", bytes=size, shared=True, read_only=read_only, node=True,
            host_path=self.site.cache_host_path(self.spec),
        )  # fmt: skip
        return (cache,) if path else ()

    def credentials(self, identity: str, *roles: str) -> tuple[str, ...]:
        return tuple(
            a.credential.path for r in roles if (a := self.site.account(self.spec, r, identity)).credential.path
        )

    def worker(self, worker: Worker, i: int, first_gpu: int) -> Process:
        spec, site, role = worker.spec, self.site, worker.role
        name, port, nixl = f"{role}-{i}", site.port(self.spec, role, i), site.port(self.spec, f"nixl-{role}", i)
        service, cached = site.weights_service(self.spec, role, i), i % max(1, self.spec.components.weights.replicas)
        report = str(site.run / "reports" / f"{name}.weights.json")
        identity = "serving" if worker.kv else "serving-weights-only"
        config = WorkerConfig(
            name=name, role=role, served_model=self.spec.served_model, namespace=site.namespace(self.spec), component=DYNAMO_COMPONENT[role],
            discovery=site.discovery(self.spec), request_plane=self.spec.runtime.request_plane, event_plane=self.spec.runtime.event_plane,
            announce=self.env.announce(), run_dir=str(site.sockets), engine=worker.args, weights=self.weights_config(identity, spec.version, service, report, site.cache_dir(self.spec, cached)),
            kv=KvConfig(settings=self.kv_settings(worker, identity, name)) if worker.kv is not None else None, engine_kind=self.spec.engine.kind,
            mock_token_ms=self.spec.engine.mock_token_ms, nixl_host=site.bind(self.spec), nixl_port=nixl,
            nixl_backends=tuple(spec.nixl_backends), drain_s=spec.drain_s,
        )  # fmt: skip
        ports = [
            Port(
                name="system",
                number=port,
                host=site.bind(self.spec),
                purpose="/health, /metrics, metadata for the frontend",
            )
        ]
        env = {
            **self.env.dynamo(),
            **self.env.worker(worker.profile.platform, worker.args, nixl, site.gpu_env(first_gpu, spec.gpus)),
            "DYN_SYSTEM_PORT": str(port),
        }
        if role != "aggregated" and self.spec.engine.kind == "vllm":
            ports.append(
                Port(name="nixl", number=nixl, host=site.bind(self.spec), purpose="NIXL side channel (handshakes)")
            )
        facts = worker.profile.model
        on_host = worker.profile.platform == "cpu"
        resident = (
            worker.profile.host_bytes
            + (facts.weights_bytes + worker.args.kv_cache_bytes if on_host else 0)
            + host_tier_bytes(worker.kv)
        )
        return self.process(
            role, i, spec, [site.python, "-m", MODULE[role]], config=config, env=env, ports=tuple(ports),
            sockets=(str(site.sockets / f"{name}.kv"), str(site.sockets / f"{name}.kv.relay")),
            probe=Probe(http=f"http://{site.bind(self.spec)}:{port}/health", deadline_s=worker.profile.ready_deadline_s),
            identity=identity, secrets=self.credentials(identity, "weights", *(["kv"] if worker.kv else [])), gpus=spec.gpus,
            talks_to=tuple(x for x in ("weights", "prefill" if role == "decode" else "", "azurite") if x),
            volumes=(
                Volume(name="releases", path=str(site.weights_root), shared=True), *self.cache_volume(cached, read_only=True),
                *site.node_volumes(self.spec, role, i),
            ), memory_bytes=resident,
            shm_bytes=spec.shm or worker.profile.shm_bytes + host_tier_bytes(worker.kv),
        )  # fmt: skip

    def kv_settings(self, worker: Worker, identity: str, name: str) -> dict[str, Any]:
        """The profile's settings with what only the graph knows: account, container, tenants, digest, status file."""
        own = {
            "account": self.site.account(self.spec, "kv", identity).model_dump(mode="json"), "container": self.spec.storage.kv.container,
            "tenants_file": self.site.tenants_file(self.graph.document.name, self.spec.components.frontend.tenants_file),
            "weights_digest": self.weights_digest(), "status_file": str(self.site.run / "reports" / f"{name}.kv.json"),
            "announce": self.env.announce(),
        }  # fmt: skip
        found = {**own, **{k: size_or_as_it_is(v) if k.endswith("_bytes") else v for k, v in (worker.kv or {}).items()}}
        if isinstance(policy := found.get("policy"), dict) and policy:  # `status --explain` reads it
            found["policy"] = {"status_file": str(self.site.run / "reports" / f"{name}.cost.json"), **policy}
        return found

    def router(self, i: int) -> Process:
        spec, site = self.spec.components.router, self.site
        assert spec is not None
        port, host, listen = site.port(self.spec, "router", i), site.bind(self.spec), site.router_listen(self.spec, i)
        roles = {w.role for w in self.workers}
        config = RouterConfig(
            name=f"router-{i}", namespace=site.namespace(self.spec), discovery=site.discovery(self.spec),
            request_plane=self.spec.runtime.request_plane, event_plane=self.spec.runtime.event_plane,
            prefill_component="prefill" if "prefill" in roles else "", block_size=spec.block_size or self.first.args.block_size,
            listen=listen, http=f"{host}:{port}", host_hit_weight=spec.host_hit_weight, blob_hit_weight=spec.blob_hit_weight,
            announce=self.env.announce(),
        )  # fmt: skip
        return self.process(
            "router", i, spec, [site.python, "-m", "router"], config=config, env=self.env.dynamo(),
            ports=(Port(name="http", number=port, host=host, purpose="/health, /metrics"), *tcp_port("decide", listen, "decisions")), sockets=(listen.removeprefix("unix:"),) if listen.startswith("unix:") else (),
            probe=Probe(http=f"http://{host}:{port}/health", deadline_s=self.slowest_s() + 30), inotify=self.inotify(INOTIFY_ROUTER), memory_bytes=200 << 20,
            talks_to=tuple(w.role for w in self.workers),
        )  # fmt: skip

    def slowest_s(self) -> float:
        return max(w.profile.ready_deadline_s for w in self.workers)

    def inotify(self, instances: int) -> int:
        return instances if self.site.discovery(self.spec) == "file" else 0

    def dynamo_frontend(self, i: int) -> Process:
        port, runtime = self.site.port(self.spec, "dynamo-frontend", i), self.spec.runtime
        argv = [
            self.site.python, "-m", "dynamo.frontend", "--discovery-backend", self.site.discovery(self.spec), "--request-plane", runtime.request_plane,
            "--event-plane", runtime.event_plane, "--http-host", LOOPBACK, "--http-port", str(port), "--router-mode", "kv",
            "--migration-limit", str(runtime.migration_limit), "--namespace", self.site.namespace(self.spec),
            "--kv-cache-block-size", str(self.first.args.block_size),
        ]  # fmt: skip
        return self.process(
            "dynamo-frontend", i, self.spec.components.dynamo_frontend, argv, env=self.env.dynamo(),
            ports=(Port(name="http", number=port, purpose="OpenAI API behind the gateway, loopback only"),),
            probe=Probe(http=f"http://{LOOPBACK}:{port}/live", deadline_s=60), inotify=self.inotify(INOTIFY_FRONTEND), memory_bytes=300 << 20,
            talks_to=tuple(w.role for w in self.workers),
        )  # fmt: skip

    def gateway(self, i: int) -> Process:
        spec, site = self.spec.components.frontend, self.site
        host, port = site.gateway_listen(self.spec, i)
        router, service = self.spec.components.router, site.weights_service(self.spec, "frontend", i)
        upstreams = site.upstreams(self.spec, i)
        config = GatewayConfig(
            name=f"frontend-{i}", listen=f"{host}:{port}", ops_listen=site.gateway_ops_listen(self.spec),
            upstream=upstreams[0], more_upstreams=tuple(upstreams[1:]),
            served_model=self.spec.served_model, engine_kind=self.spec.engine.kind, model_path=str(site.weights_root / (self.weights_digest() or "unresolved")),
            weights=self.weights_config("serving-weights-only", "", service),
            max_model_len=min(w.args.max_model_len for w in self.workers), block_size=self.first.args.block_size,
            router=site.router_address(self.spec, i),
            router_deadline_ms=router.decide_deadline_ms if router else 50.0, auth=spec.auth,
            tenants_file=site.tenants_file(self.graph.document.name, spec.tenants_file), max_body_bytes=spec.max_body, max_concurrent=spec.max_concurrent, drain_s=spec.drain_s,
            announce=self.env.announce(),
        )  # fmt: skip
        local = host in ("127.0.0.1", "localhost", "::1", "[::1]")
        probe_host = LOOPBACK if host in ("0.0.0.0", "") else host
        return self.process(
            "frontend", i, spec, [site.python, "-m", "components.frontend"], config=config, env=self.env.python(),
            ports=(
                Port(name="http", number=port, host=host or "0.0.0.0", purpose="the OpenAI API" + ("" if local else " (not loopback)")),
                *tcp_port("ops", site.gateway_ops_listen(self.spec), "/metrics, /debug"),
            ),
            probe=Probe(http=f"http://{probe_host}:{port}/health", deadline_s=self.slowest_s() + 60, timeout_s=30),
            identity="serving-weights-only", secrets=self.credentials("serving-weights-only", "weights"),
            volumes=(Volume(name="releases", path=str(site.weights_root), shared=True),),
            memory_bytes=250 << 20, talks_to=("dynamo-frontend", "weights", *(("router",) if router else ()), *(("azurite",) if self.site.embedded(self.spec) else ())),
        )  # fmt: skip


def graph_name(graph: Graph) -> str:
    return graph.document.name


def tcp_port(name: str, address: str, purpose: str) -> tuple[Port, ...]:
    """The port of a host:port address; nothing for a Unix socket or an empty one."""
    if not address or address.startswith("unix:"):
        return ()
    host, _, number = address.rpartition(":")
    return (Port(name=name, number=int(number), host=host, purpose=purpose),)
