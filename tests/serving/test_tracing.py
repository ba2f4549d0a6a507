"""Tests that each request has one trace, from the client through both services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dynatree.client import Client, DynaTreeError
from dynatree.common.errors import StartupError
from dynatree.serving.tracing import NO_SPAN, OFF, send_traces, traces_to
from tests.support.model_zoo import save_random_model
from tests.support.services import Services, running_services

EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", name="services")
def services_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("t")
    target = save_random_model(folder / "target", "llama", seed=1)
    draft = save_random_model(folder / "draft", "gpt_neox", seed=2)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(provider)  # set by the client, as a program would
    tracing = traces_to(SimpleSpanProcessor(EXPORTER), "dynatree-test")
    with running_services(folder, target, draft, tracing=tracing) as services:
        yield services


def spans_of(services: Services, **options: Any) -> list[ReadableSpan]:
    """Return the spans of one request."""
    EXPORTER.clear()
    with Client(services.draft_address) as client, suppress(DynaTreeError):
        client.generate(list(range(9, 20)), ignore_eos=True, **options)
    return list(EXPORTER.get_finished_spans())


def test_one_trace_through_all(services: Services) -> None:
    spans = spans_of(services, max_new_tokens=12, trace=True)
    [request] = [span for span in spans if span.name == "dynatree.request"]
    ours = [span for span in spans if span.context.trace_id == request.context.trace_id]
    by_id = {span.context.span_id: span for span in ours}
    above = {span.name: by_id[span.parent.span_id].name for span in ours if span.parent}
    assert above == {
        "generate": "dynatree.request",
        "queue": "generate",
        "completion": "generate",
        "open session": "completion",
        "round": "completion",
        "verify": "completion",
        "prefill": "verify",
    }
    rounds = [dict(span.attributes or {}) for span in ours if span.name == "round"]
    assert [each["dynatree.round"] for each in rounds] == list(range(len(rounds)))
    assert all(each["dynatree.accepted"] <= each["dynatree.nodes"] for each in rounds)
    assert not any(each["dynatree.resumed"] for each in rounds)
    [totals] = [dict(span.attributes or {}) for span in ours if span.name == "completion"]
    assert (totals["dynatree.rounds"], totals["dynatree.tokens"]) == (len(rounds), 12)
    assert totals["dynatree.accepted"] == sum(each["dynatree.accepted"] for each in rounds)
    assert totals["dynatree.index"] == 0


def test_rounds_are_spans_only_where_the_trace_is_wanted(services: Services) -> None:
    names = [span.name for span in spans_of(services, max_new_tokens=12)]
    assert "round" not in names
    assert len(names) == len(set(names)) == 7


def test_a_request_that_fails(services: Services) -> None:
    spans = {span.name: span for span in spans_of(services, max_new_tokens=10**6)}
    assert spans["dynatree.request"].status.status_code is trace.StatusCode.ERROR
    assert [event.name for event in spans["generate"].events] == ["exception"]


def test_without_traces_there_are_no_spans() -> None:
    with OFF.span("generate", (("traceparent", "00-1-2-01"),)) as span, span.child("round") as child:
        child.note(nodes=1)
    assert span is NO_SPAN
    assert child.metadata == ()


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError, match="extra otel"):
        send_traces("http://localhost:4318", "dynatree-test")


@pytest.mark.parametrize("url", ["notaurl", "localhost:4318", "ftp://localhost:4318", "http://", ""])
def test_a_collector_has_a_url(url: str) -> None:
    with pytest.raises(StartupError, match="the URL of a collector"):
        send_traces(url, "dynatree-test")
