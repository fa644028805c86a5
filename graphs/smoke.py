"""`dynamo serve GRAPH --smoke QUESTION`: ask once and prove every hop by the parts' own counters.

The loader's report counts verified bytes, the store's access log the bytes that left it, vLLM's metrics
the KV bytes that NIXL moved and the tokens each worker computed, Dynamo's answer the workers that
served, the router's decision the one it named. A proof that fails has its own code; the first one is
the exit error, all stand in the JSON under `failed`.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

from components.common.errors import DynamoBlobError
from graphs import output
from graphs.counters import Counters, counters, total, workers
from graphs.launch import store
from graphs.launch.http import ask
from graphs.launch.session import Session
from graphs.launch.table import phase_table
from graphs.load import Finding
from graphs.plan import Plan

ANSWER_DEADLINE_S, COUNTER_DEADLINE_S = 120.0, 10.0
HANDED_OVER_MOST = 1
"""Prompt tokens a decode worker computes itself after a good handover: the last one, whose logits it needs. Per
request: the gateway's canaries of one token finish between the two readings too."""


def smoke(session: Session, question: str, json_file: str | None) -> int:
    """Exit code: 0 when the answer came and every proof held."""
    result: dict[str, Any] = {}

    async def when_ready(session: Session) -> None:
        result.update(await _ask_and_prove(session, question))

    try:
        asyncio.run(session.run(when_ready))
    except DynamoBlobError as e:
        if not json_file:
            raise
        result.setdefault("failed", []).insert(0, e.as_json())
        result.setdefault("phases", session.supervisor.phases if session.supervisor else session.phases)
        result.setdefault("run_dir", str(session.supervisor.run_dir) if session.supervisor else "")
        output.write(json_file, result)
        raise
    if json_file:
        output.write(json_file, result)
    session.view.console.print(phase_table(result["phases"]))
    if json_file != "-":
        print(result["answer"], flush=True)
    failed = result["failed"]
    if failed:
        first = failed[0]
        raise DynamoBlobError(
            first["code"], first["what"], where=first["where"], why=first["why"], do=first["do"], failed=failed[1:]
        )
    return 0


async def _ask_and_prove(session: Session, question: str) -> dict[str, Any]:
    supervisor = session.supervisor
    assert supervisor is not None
    plan = supervisor.plan
    before = await _all_counters(plan)
    began = supervisor.elapsed()
    answer, record = await _question(plan, question)
    supervisor.phases.append(
        {"name": "first answer", "start_s": round(began, 3), "end_s": round(supervisor.elapsed(), 3), "start": 1}
    )
    pids = {name: child.pid for name, child in supervisor.children.items()}
    result: dict[str, Any] = {
        "answer": answer, "question": question, "graph": plan.graph, "engine": plan.engine_kind, "phases": supervisor.phases, "run_dir": plan.run_dir,
        "weights": weights_proof(plan, session.store_records), "kv": await _kv_proof(plan, before, pids), "router": router_proof(plan, record, await _instances(plan)),
    }  # fmt: skip
    result["failed"] = [f.as_json() for f in findings(plan, result)]
    return result


async def _question(plan: Plan, question: str) -> tuple[str, dict[str, Any]]:
    """The answer and the gateway's record of the request."""
    body = {
        "model": plan.served_model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0,
    }
    try:
        answer = await ask(
            f"{plan.endpoint}/v1/chat/completions", body, timeout_s=ANSWER_DEADLINE_S, headers={"x-request-id": "smoke"}
        )
        found = answer.json()
        if answer.status != 200:
            raise DynamoBlobError(
                "SMOKE-NO-ANSWER",
                "the graph refused the question",
                where=plan.endpoint,
                why=f"HTTP {answer.status}: {json.dumps(found)[:300]}",
            )
        text = str(found["choices"][0]["message"]["content"] or "")
    except (OSError, EOFError, TimeoutError, ValueError, KeyError, IndexError) as e:
        raise DynamoBlobError(
            "SMOKE-NO-ANSWER", "the question got no answer", where=plan.endpoint, why=f"{type(e).__name__}: {e}"
        ) from None
    record: dict[str, Any] = {}
    end = time.monotonic() + COUNTER_DEADLINE_S
    while time.monotonic() < end and not record:  # written when the response has been sent
        reply = await ask(f"{plan.endpoint}/debug/decisions/{answer.headers.get('x-request-id', 'smoke')}")
        record = reply.json() if reply.status == 200 else {}
        if not record:
            await asyncio.sleep(0.05)
    return text, record


# -- weights


def weights_proof(plan: Plan, first: int = 0) -> dict[str, Any]:
    """Every worker's loader report, and what the store says it sent after its first `first` requests (publishing reads too)."""
    reports = {}
    for p in workers(plan):
        path = Path((p.config or {}).get("weights", {}).get("report", ""))
        try:
            reports[p.name] = json.loads(path.read_text())
        except (OSError, ValueError):
            reports[p.name] = {}
    return {
        "manifest_bytes": max((r.get("manifest_bytes", 0) for r in reports.values()), default=0),
        "verified_bytes": min((r.get("verified_bytes", 0) for r in reports.values()), default=0),
        "store_bytes": store.sent_since(plan.run_dir, first, "/objects/")
        if any(s.embedded for s in plan.storage)
        else None,
        "workers": {
            n: {k: r.get(k) for k in ("manifest_bytes", "verified_bytes", "bytes_by_source", "seconds", "retries")}
            for n, r in reports.items()
        },
    }


# -- KV


async def _all_counters(plan: Plan) -> dict[str, Counters]:
    return {p.name: await counters(p) for p in workers(plan)}


async def _kv_proof(plan: Plan, before: dict[str, Counters], pids: dict[str, int | None]) -> dict[str, Any]:
    """Differences over the question. Counters follow the answer by an engine step: asked again until they settle."""
    end = time.monotonic() + COUNTER_DEADLINE_S
    while True:
        after = await _all_counters(plan)
        delta = {n: {k: v - before[n].get(k, 0.0) for k, v in c.items()} for n, c in after.items()}
        decode = [n for n in delta if not n.startswith("prefill")]
        finished = sum(total(delta[n], "vllm:request_success_total") for n in delta)
        moved = sum(total(delta[n], "vllm:nixl_bytes_transferred_sum") for n in delta)
        if (
            plan.engine_kind == "mock"
            or (finished >= len({x.split("-")[0] for x in delta}) and moved)
            or time.monotonic() > end
        ):
            break
        await asyncio.sleep(0.2)
    used = {role: _used(delta, role) for role in ("prefill", "decode", "aggregated")}
    return {
        "nixl_bytes": int(moved),
        "nixl_failed_transfers": int(sum(total(d, "vllm:nixl_num_failed_transfers_total") for d in delta.values())),
        "prefill_pid": pids.get(used["prefill"]), "decode_pid": pids.get(used["decode"] or used["aggregated"]),
        "prefill_worker": used["prefill"], "decode_worker": used["decode"] or used["aggregated"],
        "prefill_prefilled_tokens": int(sum(total(delta[n], "vllm:prompt_tokens_by_source_total", source="local_compute") for n in delta if n.startswith("prefill"))),
        "decode_prefilled_tokens": int(sum(total(delta[n], "vllm:prompt_tokens_by_source_total", source="local_compute") for n in decode)),
        "decode_requests": int(sum(total(delta[n], "vllm:request_success_total") for n in decode)),
        "decode_received_tokens": int(sum(total(delta[n], "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") for n in decode)),
    }  # fmt: skip


def _used(delta: dict[str, Counters], role: str) -> str:
    """The worker of a role that finished the request; with one worker there is no doubt."""
    names = [n for n in delta if n.startswith(f"{role}-")]
    busy = [n for n in names if total(delta[n], "vllm:request_success_total") > 0]
    return (busy or names or [""])[0]


# -- router


async def _instances(plan: Plan) -> dict[str, str]:
    """Dynamo instance id -> worker, as the workers themselves say in their logs."""
    out = {}
    for p in workers(plan):
        text = (Path(plan.run_dir) / "logs" / f"{p.name}.log").read_text(errors="replace")
        for found in re.findall(r"instance (\d+)", text):
            out[found] = p.name
    return out


def router_proof(plan: Plan, record: dict[str, Any], instances: dict[str, str]) -> dict[str, Any]:
    named, served_by = record.get("named"), record.get("served_prefill")
    return {
        "named": named, "served": served_by, "pin": record.get("pin"), "retried": record.get("retried"),
        "named_worker": instances.get(str(named), ""), "served_worker": instances.get(str(served_by), ""),
    }  # fmt: skip


# -- the verdict


def findings(plan: Plan, result: dict[str, Any]) -> list[Finding]:
    """Proofs that failed, the weightiest first."""
    out: list[Finding] = []
    weights, kv, router = result["weights"], result["kv"], result["router"]
    roles = {p.component for p in workers(plan)}
    routed = any(p.component == "router" for p in plan.processes)
    if not result["answer"].strip():
        out.append(Finding("SMOKE-EMPTY-ANSWER", "the answer is empty", plan.endpoint))
    if plan.engine_kind == "vllm":
        for name, r in weights["workers"].items():
            if not r["manifest_bytes"] or r["verified_bytes"] != r["manifest_bytes"]:
                out.append(
                    Finding(
                        "WEIGHTS-UNPROVEN",
                        f"{name} did not verify every byte of its weights",
                        name,
                        f"manifest {r['manifest_bytes']}, verified {r['verified_bytes']}",
                    )
                )
        streamed = max(
            (
                sum(v for k, v in (r["bytes_by_source"] or {}).items() if k != "local_small_files")
                for r in weights["workers"].values()
            ),
            default=0,
        )
        ours = not plan.release.get("loader")  # another loader reads a directory, which may be there from before
        if ours and weights["store_bytes"] is not None and not weights["store_bytes"] >= streamed > 0:
            out.append(
                Finding(
                    "WEIGHTS-STORE-UNPROVEN",
                    "the store did not send what a worker says it streamed",
                    "azurite",
                    f"sent {weights['store_bytes']}, streamed {streamed} of {weights['manifest_bytes']}",
                )
            )
    if {"prefill", "decode"} <= roles and plan.engine_kind == "vllm":
        if (
            kv["nixl_bytes"] <= 0
            or kv["nixl_failed_transfers"]
            or kv["decode_prefilled_tokens"] > HANDED_OVER_MOST * max(1, kv["decode_requests"])
        ):
            out.append(
                Finding(
                    "KV-HANDOVER-RECOMPUTED",
                    "the decode worker computed the prompt itself",
                    kv["decode_worker"],
                    f"NIXL moved {kv['nixl_bytes']} bytes, {kv['nixl_failed_transfers']} transfers failed, {kv['decode_prefilled_tokens']} prompt tokens of {kv['decode_requests']} requests were computed there",
                    "see the decode worker's log; nixl_backends, UCX_NET_DEVICES and the side-channel ports of both workers must fit",
                )
            )
        if not kv["prefill_pid"] or kv["prefill_pid"] == kv["decode_pid"]:
            out.append(
                Finding(
                    "SMOKE-ONE-PROCESS",
                    "prefill and decode did not run apart",
                    "",
                    f"pids {kv['prefill_pid']} and {kv['decode_pid']}",
                )
            )
    if routed and "prefill" in roles and (router["named"] is None or router["named"] != router["served"]):
        out.append(
            Finding(
                "ROUTER-NOT-HONOURED",
                "the worker that served is not the one the router named",
                "router-0",
                f"named {router['named']} ({router['named_worker']}), served {router['served']} ({router['served_worker']}), pin: {router['pin']}",
                "see the gateway's and the router's logs",
            )
        )
    return out
