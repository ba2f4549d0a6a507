"""Metrics of the verify service: sessions, passes, and the KV cache."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynatree.common.pass_statistics import PassStatistics
from dynatree.serving.admission import Admission
from dynatree.serving.metrics import LATENCY_BUCKETS, ROW_BUCKETS, TOKEN_BUCKETS, gauge


class VerifyMetrics:
    """The service's metrics: counters change when a pass ends; gauges are read at scrape time."""

    def __init__(self, registry: CollectorRegistry, admission: Admission) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"dynatree_{name}", text, buckets=buckets, registry=registry)

        gauge(registry, "num_requests_running", "Open sessions.", lambda: admission.running)
        gauge(registry, "num_requests_waiting", "Sessions in the queue.", lambda: admission.waiting)
        gauge(
            registry,
            "kv_cache_usage_perc",
            "Share of KV slots that sessions hold, 0 to 1.",
            lambda: admission.usage,
        )
        self._last: PassStatistics | None = None
        gauge(registry, "row_price", "Value of a further row of the last pass, in tokens.", self._row_price)
        self._rows = histogram("pass_rows", "Rows of a pass: roots, nodes and prompt tokens.", ROW_BUCKETS)
        self._sessions = histogram("pass_sessions", "Sessions in a pass.", ROW_BUCKETS)
        self._seconds = histogram("pass_seconds", "Seconds of a pass's forward pass.", LATENCY_BUCKETS)
        self._hold = histogram(
            "pass_hold_seconds", "Seconds that a pass was delayed to wait for more trees.", TOKEN_BUCKETS
        )
        self._trimmed = Counter("dynatree_trimmed_nodes", "Nodes that were sent but not verified.", registry=registry)
        self._committed = Counter("dynatree_committed_tokens", "Tokens committed.", registry=registry)
        self._not_finite = Counter(
            "dynatree_not_finite_choices",
            "Tokens that were not chosen, because the target's logits were NaN or infinite.",
            registry=registry,
        )
        self._cached = Counter("dynatree_cached_prompt_tokens", "Prompt tokens that were cached.", registry=registry)

    def passed(self, pass_statistics: PassStatistics, seconds: float) -> None:
        """Record a pass; `seconds` is the time of its forward pass."""
        self._last = pass_statistics
        self._rows.observe(pass_statistics.rows)
        self._sessions.observe(pass_statistics.sessions)
        self._seconds.observe(seconds)
        self._hold.observe(pass_statistics.hold_seconds)

    def committed(self, tokens: int, trimmed: int) -> None:
        """Record a session's committed tokens and trimmed nodes in one pass."""
        self._committed.inc(tokens)
        self._trimmed.inc(trimmed)

    def cached(self, tokens: int) -> None:
        """Record the prompt tokens that a session found in the prefix cache."""
        self._cached.inc(tokens)

    def not_finite(self, choices: int) -> None:
        """Record choices that failed because the target's numbers were not finite."""
        self._not_finite.inc(choices)

    def _row_price(self) -> float:
        return self._last.row_price if self._last is not None else 0.0
