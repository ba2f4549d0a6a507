"""Prometheus metrics of the draft service: vLLM's metric names, with the prefix `dynatree_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynatree.draft.completion.generation import Completed
from dynatree.draft.growth.suffix_indexes import SuffixIndexes
from dynatree.draft.target.replicas import Replicas
from dynatree.serving.admission import Admission
from dynatree.serving.metrics import LATENCY_BUCKETS, ROW_BUCKETS, TOKEN_BUCKETS, counted, gauge


class DraftMetrics:
    """Counters change when a completion ends; gauges are read at scrape time."""

    def __init__(
        self, registry: CollectorRegistry, admission: Admission, replicas: Replicas, histories: SuffixIndexes
    ) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dynatree_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
            return Histogram(f"dynatree_{name}", text, buckets=buckets, registry=registry)

        gauge(registry, "num_requests_running", "Requests that hold a session.", lambda: admission.running)
        gauge(registry, "num_requests_waiting", "Requests in the queue.", lambda: admission.waiting)
        gauge(
            registry,
            "kv_cache_usage_perc",
            "Share of KV slots that sessions hold, 0 to 1.",
            lambda: admission.usage,
        )
        gauge(registry, "verify_replicas", "Known verify services.", lambda: len(replicas.all))
        gauge(
            registry,
            "verify_replicas_ready",
            "Verify services that serve.",
            lambda: sum(replica.ready for replica in replicas.all),
        )
        gauge(registry, "history_tokens", "Tokens of finished completions that are kept.", lambda: histories.tokens)
        counted(
            registry, "history_hits", "Committed tokens that finished completions foretold.", lambda: histories.hits
        )
        self._success = counter("request_success", "Completions, by finish reason.", "finished_reason")
        self._failure = counter("request_failure", "Failed requests, by gRPC status code.", "code")
        self._prompt = counter("prompt_tokens", "Prompt tokens of completions.")
        self._cached = counter("cached_prompt_tokens", "Prompt tokens that the target had cached.")
        self._generated = counter("generation_tokens", "New tokens of completions.")
        self._rounds = counter("spec_decode_num_drafts", "Trees sent.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Nodes drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Nodes accepted.")
        self._trimmed = counter("spec_decode_num_trimmed_tokens", "Drafted nodes that were not verified.")
        self._positions = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted nodes, by depth - 1.", "position"
        )
        self._reached = counter(
            "spec_decode_num_drafts_per_pos", "Trees that reached a depth, by depth - 1.", "position"
        )
        self._parts = counter("round_seconds", "Seconds of rounds, by part.", "part")
        self._first = histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.")
        self._each = histogram(
            "inter_token_latency_seconds", "Mean seconds of a completion's tokens after the first.", TOKEN_BUCKETS
        )
        self._whole = histogram("e2e_request_latency_seconds", "Seconds from arrival to the last token.")
        self._queue = histogram("request_queue_time_seconds", "Seconds of waiting for a session.")
        self._nodes = histogram("nodes_per_round", "Mean nodes of a completion's trees.", ROW_BUCKETS)
        self._resumes = counter("resumes", "Sessions that were resumed at another verify service.")
        self._resume_seconds = histogram(
            "resume_seconds", "Seconds from losses to the next token, summed over a completion."
        )
        self._reloads = counter("draft_reloads", "Reloads of the draft model, by outcome.", "outcome")

    def completed(self, completion: Completed) -> None:
        """Count a completion that has ended."""
        statistics = completion.statistics
        reason = completion.finish_reason.value if completion.finish_reason else "unknown"
        self._success.labels(reason).inc()
        self._prompt.inc(completion.prompt_tokens)
        self._cached.inc(statistics.cached_tokens)
        self._generated.inc(statistics.generated_tokens)
        self._rounds.inc(statistics.rounds)
        self._drafted.inc(statistics.draft_n)
        self._accepted.inc(statistics.draft_n_accepted)
        self._trimmed.inc(statistics.trimmed_n)
        for position, (reached, survived) in enumerate(statistics.rounds_by_depth):
            self._reached.labels(position).inc(reached)
            self._positions.labels(position).inc(survived)
        for part, seconds in (
            ("draft", statistics.draft_seconds),
            ("wire", statistics.wire_seconds),
            ("verify", statistics.verify_seconds),
        ):
            self._parts.labels(part).inc(max(seconds, 0.0))
        self._first.observe(statistics.time_to_first_token_seconds)
        if statistics.generated_tokens > 1:
            self._each.observe(statistics.time_per_output_token_seconds)
        self._whole.observe(statistics.total_seconds)
        self._queue.observe(statistics.queue_seconds)
        if statistics.rounds:
            self._nodes.observe(statistics.nodes_per_round)
        if statistics.resumes:
            self._resumes.inc(statistics.resumes)
            self._resume_seconds.observe(statistics.resume_seconds)

    def failed(self, code: str) -> None:
        """Count a request that ended with an error."""
        self._failure.labels(code).inc()

    def reloaded(self, outcome: str) -> None:
        """Count a reload of the draft model that was "taken" or "refused"."""
        self._reloads.labels(outcome).inc()
