"""The trace of a request whose verify service is killed, as a picture: `python benchmarks/trace_picture.py`.

Real processes send their spans to a collector in this one; docs/pictures/trace.svg shows them over time.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from operation import collector, service

from dynatree.bench import plots
from dynatree.client import Client

OUT = Path(__file__).parent.parent / "docs" / "pictures" / "trace.svg"
PROMPT = "It was a bright cold morning, and the captain"
KILLED_AFTER = 3  # chunks
COLOURS = {"dynatree-client": plots.RULE, "dynatree-draft": plots.GREEN, "dynatree-verify": plots.BLUE}


@dataclass(frozen=True)
class Shown:
    """A span: milliseconds from the request's begin."""

    service: str
    name: str
    depth: int
    begin: float
    end: float


def main() -> None:
    """Kill a verify service under a request, and draw its trace."""
    received: list[bytes] = []
    with collector(received) as url:
        provider = TracerProvider(resource=Resource.create({"service.name": "dynatree-client"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{url}/v1/traces")))
        trace.set_tracer_provider(provider)
        run(url)
        provider.shutdown()
    plots.save(draw(spans(received)), OUT)


def run(url: str) -> None:
    """The request; both verify services are ready, and the one that has it dies."""
    with tempfile.TemporaryDirectory() as name:
        folder, verify = Path(name), ["verify", "--target-model", "embedded", "--traces", url, "--threads", "1"]
        with service(verify, folder) as one, service(verify, folder) as other:
            addresses = f"{one.address},{other.address}"
            draft = ["draft", "--draft-model", "embedded", "--verify", addresses, "--traces", url, "--threads", "1"]
            with service(draft, folder) as drafting, Client(drafting.address) as client:
                client.generate(PROMPT, max_new_tokens=16, ignore_eos=True)  # caches
                client.generate(PROMPT, max_new_tokens=16, ignore_eos=True)
                with client.stream(PROMPT, max_new_tokens=14, ignore_eos=True, trace=True) as stream:
                    for _ in itertools.islice(stream, KILLED_AFTER):
                        pass
                    one.process.kill()
                    for _ in stream:
                        pass
                    assert stream.completion.stats.resumes == 1, "the other one had the session; run it again"


def spans(received: list[bytes]) -> list[Shown]:
    """Those of the last request, as they began."""
    every = [
        (next(each.value.string_value for each in resource.resource.attributes if each.key == "service.name"), span)
        for message in received
        for resource in ExportTraceServiceRequest.FromString(message).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    request = max(
        (span for _, span in every if span.name == "dynatree.request"), key=lambda span: span.end_time_unix_nano
    )
    ours = [(of, span) for of, span in every if span.trace_id == request.trace_id]
    by_id = {span.span_id: span for _, span in ours}

    def depth(span: object) -> int:
        above = by_id.get(span.parent_span_id)  # type: ignore[attr-defined]
        return 0 if above is None else 1 + depth(above)

    zero = request.start_time_unix_nano
    shown = [
        Shown(
            of, span.name, depth(span), (span.start_time_unix_nano - zero) / 1e6, (span.end_time_unix_nano - zero) / 1e6
        )
        for of, span in ours
    ]
    return sorted(shown, key=lambda span: (span.begin, span.depth))


def draw(shown: list[Shown]) -> Figure:
    """A row for each span, over time."""
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 0.8 + 0.2 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        for row, span in enumerate(shown):
            axes.barh(row, max(span.end - span.begin, 0.3), left=span.begin, color=COLOURS[span.service], height=0.7)
            axes.annotate(
                span.name, (span.end, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7
            )
        handles = [matplotlib.patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
        axes.legend(handles=handles, loc="lower left")
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.set_title("A request whose verify service was killed, and that resumed on another", loc="left")
    return figure


if __name__ == "__main__":
    main()
