"""Spans of our own, sent over OTLP where the environment says so; nothing is imported or sent otherwise.

The usual variables rule: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT (or OTEL_EXPORTER_OTLP_ENDPOINT),
OTEL_EXPORTER_OTLP_[TRACES_]PROTOCOL (grpc, or http/protobuf), OTEL_EXPORTER_OTLP_[TRACES_]HEADERS, OTEL_TRACES_EXPORTER=none.

Contract: `record` never blocks and never raises: spans wait in a bounded queue for a thread, and are dropped when it is
full or the collector does not answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("dynamo_blob.telemetry")

QUEUE = 2048
BATCH = 256
EVERY_MS = 1000
EXPORT_S = 5


class Spans:
    """`record` puts a finished span into the trace of a request. Made by `open_spans`."""

    def __init__(self, service: str, exporter: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        self._exporter = exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter, QUEUE, EVERY_MS, BATCH, EXPORT_S * 1000))
        self._tracer = self._provider.get_tracer("dynamo_blob")

    def record(
        self, name: str, seconds: float, attributes: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """A span that ended now and took `seconds`; `headers`: the request's W3C trace headers (None = a trace of its own)."""
        try:
            end = time.time_ns()
            parent = self._propagator.extract(dict(headers)) if headers else None
            span = self._tracer.start_span(
                name, context=parent, attributes=dict(attributes), start_time=end - max(0, int(seconds * 1e9))
            )
            span.end(end)
        except Exception:  # a trace is worth less than the request it is about
            log.warning("a span is lost", exc_info=True)

    def close(self, seconds: float = 1.0) -> None:
        """Send what waits, for at most `seconds`; what a slow collector has not taken by then is lost. Ends the thread."""
        flush = threading.Thread(target=self._provider.force_flush, name="spans-flush", daemon=True)
        flush.start()
        flush.join(seconds)
        self._exporter.shutdown()  # first: the provider would wait for its retries
        threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True).start()


def open_spans(service: str, environ: Mapping[str, str] = os.environ) -> Spans | None:
    """None unless the environment names a collector, or when the exporter cannot be made (logged)."""
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    try:
        if protocol.startswith("http"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            return Spans(service, Http(timeout=EXPORT_S))
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Spans(service, Grpc(timeout=EXPORT_S))
    except Exception as e:
        log.warning("no spans are sent to %s: %s: %s", endpoint, type(e).__name__, e)
        return None
