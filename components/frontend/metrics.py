"""The gateway's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.requests = Counter(
            "dynamo_blob_gateway_requests", "Requests by end", ["endpoint", "tenant", "outcome"], registry=r
        )
        self.refused = Counter(
            "dynamo_blob_gateway_refused", "Requests the gateway answered itself", ["code"], registry=r
        )
        self.pins = Counter(
            "dynamo_blob_gateway_pins", "Requests by pin: pinned, late, none, no-router, unsure", ["pin"], registry=r
        )
        self.retries = Counter(
            "dynamo_blob_gateway_retries", "Second tries without a pin, before the first byte", registry=r
        )
        self.inflight = Gauge("dynamo_blob_gateway_inflight", "Requests in flight", registry=r)
        self.first_byte = Histogram(
            "dynamo_blob_gateway_first_byte_seconds",
            "From the request's last byte to the answer's first",
            registry=r,
            buckets=_SECONDS,
        )
        self.seconds = Histogram("dynamo_blob_gateway_request_seconds", "Whole requests", registry=r, buckets=_SECONDS)
        self.decide = Histogram(
            "dynamo_blob_gateway_decide_seconds", "Rendering, tokenising and asking the router", registry=r,
            buckets=(0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.05, 0.1),
        )  # fmt: skip
        self.unserved_pins = Counter(
            "dynamo_blob_gateway_pins_not_honoured",
            "Answers another prefill worker served than the pinned one",
            registry=r,
        )
        self.reloads = Gauge("dynamo_blob_gateway_tenants_reloads", "Reloads of the tenants file", registry=r)
        self.reload_errors = Gauge(
            "dynamo_blob_gateway_tenants_reload_errors", "Reloads of the tenants file that failed", registry=r
        )
        self.healthy = Gauge("dynamo_blob_gateway_healthy", "1 when a request would succeed", registry=r)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
