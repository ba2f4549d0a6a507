"""A request as a span of the program's own traces, where it makes some with OpenTelemetry."""

import sys
from typing import Any

Metadata = tuple[tuple[str, str], ...]


class RequestSpan:
    """From a request to its end; nothing where the program has not imported OpenTelemetry.

    Attributes:
        metadata: What tells the server to which trace the request belongs.
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
        """The request goes on elsewhere, after an attempt that ended with `code`."""
        if self._span is not None:
            self._span.add_event("dynatree.resumed", {"dynatree.code": code})

    def end(self, tokens: int, error: str = "") -> None:
        """It is over; with an error, unless that is empty."""
        if self._span is None or not self._span.is_recording():
            return
        self._span.set_attribute("dynatree.generated_tokens", tokens)
        if error:
            from opentelemetry import trace

            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()
