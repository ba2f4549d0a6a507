"""Traces by OpenTelemetry (extra `otel`): one a request, from the client through draft and verify service.

The spans are our own: gRPC's auto-instrumentation breaks coroutine handlers (opentelemetry-python-contrib issue 3066).
Where traces are off, or the packages are not there, spans are `NOTHING` and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from dynatree.common.errors import StartupError

Metadata = tuple[tuple[str, str], ...]


class Span:
    """A part of a request's time; a context manager that ends it. This one is nothing."""

    def child(self, name: str, **attributes: Any) -> Span:
        """A part of this part, which begins now."""
        return self

    def note(self, **attributes: Any) -> None:
        """Say more of it."""

    @property
    def metadata(self) -> Metadata:
        """What tells the next service to which trace a call belongs."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; `error` ended what it stands for."""


NOTHING = Span()


class _Recorded(Span):
    """A span of OpenTelemetry's, and the context below it."""

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
    """Where spans go. This one drops them.

    Attributes:
        end: Sends what is left.
    """

    end: Callable[[], None] = staticmethod(lambda: None)

    def span(self, name: str, metadata: Iterable[tuple[str, Any]] | None, **attributes: Any) -> Span:
        """What a call with this metadata takes; part of the caller's trace, if it has one."""
        return NOTHING


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
    """Send spans to a collector over OTLP/HTTP, as those of `service`.

    Args:
        url: The collector's, for example `http://localhost:4318`.
        service: `dynatree-draft` or `dynatree-verify`.

    Raises:
        StartupError: The packages are not installed, or the URL is none.
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
    """Hand spans to a span processor of OpenTelemetry's."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(processor)
    return _Sent(provider.get_tracer("dynatree"), provider.shutdown)


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"dynatree.{name}": value for name, value in attributes.items() if value is not None}
