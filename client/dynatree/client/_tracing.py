"""A span for each request, if the program uses OpenTelemetry."""

import sys
from typing import Any

Metadata = tuple[tuple[str, str], ...]


class RequestSpan:
    """The span of one request, from its start to its end; does nothing unless the program has imported OpenTelemetry.

    Attributes:
        metadata: gRPC metadata with the trace context, by which the server's spans join the same trace.
    """

    def __init__(self) -> None:
        self.metadata: Metadata = ()
        self._span: Any = None
        if "opentelemetry" in sys.modules:
            from opentelemetry import propagate, trace

            self._span = trace.get_tracer("dynatree.client").start_span("dynatree.request", kind=trace.SpanKind.CLIENT)
            carrier: dict[str, str] = {}
            propagate.inject(carrier, trace.set_span_in_context(self._span))
            self.metadata = tuple(carrier.items())

    def resumed(self, code: str) -> None:
        """Record that the request is sent again after an attempt that failed with `code`."""
        if self._span is not None:
            self._span.add_event("dynatree.resumed", {"dynatree.code": code})

    def end(self, tokens: int, error: str = "") -> None:
        """End the span; a non-empty `error` marks it as failed."""
        if self._span is None or not self._span.is_recording():
            return
        self._span.set_attribute("dynatree.generated_tokens", tokens)
        if error:
            from opentelemetry import trace

            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()
