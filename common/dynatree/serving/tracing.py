"""OpenTelemetry traces (extra `otel`): one trace per request, from the client through draft and verify service.

Spans are created here, since gRPC's auto-instrumentation breaks coroutine handlers (opentelemetry-python-contrib issue
3066). If traces are off, spans are `NO_SPAN` and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from dynatree.common.errors import StartupError

Metadata = tuple[tuple[str, str], ...]


class Span:
    """A span of a request's time; a context manager that ends it on exit. This base class records nothing."""

    def child(self, name: str, **attributes: Any) -> Span:
        """A child span, which begins now."""
        return self

    def note(self, **attributes: Any) -> None:
        """Add attributes to the span."""

    @property
    def metadata(self) -> Metadata:
        """Call metadata that passes the trace on to the next service."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the span; `error` is the exception that ended its work, if any."""


NO_SPAN = Span()


class _Recorded(Span):
    """An OpenTelemetry span, with the context for its children."""

    def __init__(self, tracer: Any, name: str, parent: Any, attributes: dict[str, Any]) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._span = tracer.start_span(name, context=parent, attributes=_named(attributes))
        self._context = trace.set_span_in_context(self._span, parent)

    def child(self, name: str, **attributes: Any) -> Span:
        return _Recorded(self._tracer, name, self._context, attributes)

    def note(self, **attributes: Any) -> None:
        self._span.set_attributes(_named(attributes))

    @property
    def metadata(self) -> Metadata:
        from opentelemetry import propagate

        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=self._context)
        return tuple(carrier.items())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._span.record_exception(error)
        self._span.end()


class Tracing:
    """Destination of spans. This base class drops them.

    Attributes:
        end: Function that sends the remaining spans and stops.
    """

    end: Callable[[], None] = staticmethod(lambda: None)

    def span(self, name: str, metadata: Iterable[tuple[str, Any]] | None, **attributes: Any) -> Span:
        """The span of a call with this metadata; it joins the caller's trace, if there is one."""
        return NO_SPAN


OFF = Tracing()


class _Sent(Tracing):
    def __init__(self, tracer: Any, end: Callable[[], None]) -> None:
        self._tracer = tracer
        self.end = end

    def span(self, name: str, metadata: Iterable[tuple[str, Any]] | None, **attributes: Any) -> Span:
        from opentelemetry import propagate

        carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
        return _Recorded(self._tracer, name, propagate.extract(carrier), attributes)


def send_traces(url: str, service: str) -> Tracing:
    """Send the spans of `service` to a collector over OTLP/HTTP.

    Args:
        url: URL of the collector, for example `http://localhost:4318`.
        service: Name of the service: `dynatree-draft` or `dynatree-verify`.

    Raises:
        StartupError: The packages are not installed, or the URL is invalid.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartupError(f"--traces is {url!r}, expected the URL of a collector, such as http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartupError(f"--traces needs the extra otel, which is not installed: {error.name}") from None
    return traces_to(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")), service)


def traces_to(processor: Any, service: str) -> Tracing:
    """Return a `Tracing` that sends the spans of `service` to an OpenTelemetry span processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(processor)
    return _Sent(provider.get_tracer("dynatree"), provider.shutdown)


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"dynatree.{name}": value for name, value in attributes.items() if value is not None}
