"""The router's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from components.common.messages.router import Decision
from router.bookings import Bookings

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """`audit` compares what the index promised with what the worker then had: an index that is silently
    wrong (events lost, salt dropped, block sizes unequal) shows as a growing mismatch, not as a slow day."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.decisions = Counter("dynamo_blob_router_decisions", "Decisions by outcome", ["outcome"], registry=r)
        self.seconds = Histogram(
            "dynamo_blob_router_decision_seconds",
            "Time to decide",
            registry=r,
            buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25),
        )
        self.chosen = Counter("dynamo_blob_router_chosen", "Decisions naming a prefill worker", ["worker"], registry=r)
        self.prompt_tokens = Counter("dynamo_blob_router_prompt_tokens", "Prompt tokens decided on", registry=r)
        self.bookings = Gauge("dynamo_blob_router_bookings", "Bookings in force", registry=r)
        self.booked_tokens = Gauge(
            "dynamo_blob_router_booked_tokens", "Prefill tokens booked on a worker", ["worker"], registry=r
        )
        self.expired = Gauge(
            "dynamo_blob_router_bookings_expired", "Bookings dropped by TTL since the start", registry=r
        )
        self.workers = Gauge("dynamo_blob_router_workers", "Prefill workers known", registry=r)
        self.audited = Counter(
            "dynamo_blob_router_audited",
            "Requests whose predicted hit was compared with the worker's own",
            ["worker"],
            registry=r,
        )
        self.mismatch = Counter(
            "dynamo_blob_router_mismatch_tokens",
            "Tokens by which prediction and worker differed",
            ["worker", "side"],
            registry=r,
        )
        self.mismatch_ratio = Gauge(
            "dynamo_blob_router_index_mismatch_ratio",
            "Recent share of requests whose predicted and served hit differ by more than a block",
            registry=r,
        )
        self._recent = 0.0

    def decision(self, d: Decision, tokens: int, seconds: float) -> None:
        self.decisions.labels("pinned" if d.prefill is not None else "none").inc()
        self.seconds.observe(seconds)
        self.prompt_tokens.inc(tokens)
        if d.prefill is not None:
            self.chosen.labels(str(d.prefill)).inc()

    def audit(self, worker: int, predicted: int, served: int, block_size: int) -> None:
        """Both in tokens. A block of difference is normal: the last block of a prompt is always computed."""
        label = str(worker)
        self.audited.labels(label).inc()
        if predicted > served:
            self.mismatch.labels(label, "missing").inc(predicted - served)
        elif served > predicted:
            self.mismatch.labels(label, "unexpected").inc(served - predicted)
        self._recent += (float(abs(predicted - served) > block_size) - self._recent) / 64
        self.mismatch_ratio.set(self._recent)

    def state(self, bookings: Bookings, workers: list[int]) -> None:
        self.bookings.set(len(bookings))
        self.expired.set(bookings.expired)
        self.workers.set(len(workers))
        self.booked_tokens.clear()
        for w in workers:
            self.booked_tokens.labels(str(w)).set(bookings.tokens(w))
        for family in (self.chosen, self.audited, self.mismatch):  # series of workers that are gone
            for labels in list(family._metrics):
                if int(labels[0]) not in workers:
                    family.remove(*labels)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
