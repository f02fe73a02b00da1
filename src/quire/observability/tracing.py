"""Traces of requests for OpenTelemetry: one span for each, under the trace that its sender began.

The packages come with the extra `otel` and are imported when an endpoint is given.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from quire.errors import InvalidParameter

SPAN_NAME = "llm_request"
HEADERS = ("traceparent", "tracestate")
"""The headers of W3C's trace context."""

_EXPORT_S = 5
_FLUSH_MS = 3000


class RequestSpan:
    """The span of one request. `traceparent` identifies it to services that continue the trace."""

    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        flags = int(context.trace_flags)
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def end(self, attributes: Mapping[str, object], failure: str | None = None) -> None:
        """End the span; `failure` is the error's text if the request failed."""
        self._span.set_attributes(dict(attributes))
        if failure is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


class RequestTracer:
    """Begins spans and sends them with `exporter` in the background; `model_name` is on each."""

    def __init__(self, exporter: Any, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from quire.release import __version__  # reads the package's metadata: 10 ms

        resource = Resource.create({"service.name": "quire", "service.version": __version__})
        # `close` does it, within a bound
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._kind = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def begin(
        self, headers: Mapping[str, str] | None, arrival_time: float, attributes: Mapping[str, Any]
    ) -> RequestSpan:
        """A request that came at `arrival_time` (wall clock, seconds), with these headers."""
        # names of HTTP headers have no case (RFC 9110, 5.1), and the propagator looks for small
        # letters
        given = {name.lower(): value for name, value in (headers or {}).items()}
        named = {"gen_ai.response.model": self._model_name, **attributes}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(given),
            kind=self._kind,
            attributes={name: value for name, value in named.items() if value is not None},
            # a span must not begin after its end, whatever the sender's clock says
            start_time=int(min(arrival_time, time.time()) * 1e9),
        )
        return RequestSpan(span)

    def close(self) -> None:
        """Send the spans that are left, for a few seconds at most."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def exporter_to(endpoint: str) -> Any:
    """The exporter of spans to an OTLP endpoint: over HTTP where it has a path
    (`http://host:4318/v1/traces`), else over gRPC (`http://host:4317`, `grpc://host:4317`).

    Raises InvalidParameter for an invalid address, and where the packages are missing.
    """
    name = "otlp_traces_endpoint"
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.netloc:
        allowed = "it must be http(s)://host:port/v1/traces, or http(s) or grpc(s)://host:port"
        raise InvalidParameter(name, endpoint, allowed)
    try:
        if parts.path.strip("/"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter

        is_open = parts.scheme in ("http", "grpc")
        return trace_exporter.OTLPSpanExporter(parts.netloc, insecure=is_open, timeout=_EXPORT_S)
    except ImportError:
        hint = "Install quire[otel]."
        allowed = "the OpenTelemetry packages are missing"
        raise InvalidParameter(name, endpoint, allowed, hint) from None
