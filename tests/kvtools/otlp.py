"""A collector of traces: takes OTLP over HTTP on loopback and keeps the spans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    def __init__(self, port: int) -> None:
        self.env = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{port}/v1/traces",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        }
        self.spans: list[dict[str, Any]] = []

    def add(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}
                    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
                    self.spans.append(
                        {"name": span.name, "trace": span.trace_id.hex(), "parent": span.parent_span_id.hex(), "seconds": seconds, **values}
                    )  # fmt: skip


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.add(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
