"""What the verify service counts: sessions, passes, and the KV cache."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynatree.common.admission import Admission
from dynatree.common.metrics import LATENCY_BUCKETS, ROW_BUCKETS, TOKEN_BUCKETS, gauge
from dynatree.common.pass_statistics import PassStatistics


class VerifyMetrics:
    """Counts passes when they end; what goes on is asked for when it is scraped."""

    def __init__(self, registry: CollectorRegistry, admission: Admission) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"dynatree_{name}", text, buckets=buckets, registry=registry)

        gauge(registry, "num_requests_running", "Sessions that are open.", lambda: admission.running)
        gauge(registry, "num_requests_waiting", "Sessions in the queue.", lambda: admission.waiting)
        gauge(
            registry,
            "kv_cache_usage_perc",
            "Share of KV slots that sessions hold, 0 to 1.",
            lambda: admission.usage,
        )
        self._last: PassStatistics | None = None
        gauge(registry, "row_price", "Tokens that a further row of the last pass is worth.", self._row_price)
        self._rows = histogram("pass_rows", "Rows of a pass: roots, nodes and prompt tokens.", ROW_BUCKETS)
        self._sessions = histogram("pass_sessions", "Sessions in a pass.", ROW_BUCKETS)
        self._seconds = histogram("pass_seconds", "The forward of a pass.", LATENCY_BUCKETS)
        self._hold = histogram("pass_hold_seconds", "How long a pass was held back for more trees.", TOKEN_BUCKETS)
        self._trimmed = Counter("dynatree_trimmed_nodes", "Nodes that were sent, but not verified.", registry=registry)
        self._committed = Counter("dynatree_committed_tokens", "Tokens committed.", registry=registry)
        self._not_finite = Counter(
            "dynatree_not_finite_choices",
            "Tokens that were not chosen, since the target's numbers were NaN or infinite.",
            registry=registry,
        )
        self._cached = Counter("dynatree_cached_prompt_tokens", "Prompt tokens that were cached.", registry=registry)

    def passed(self, shared: PassStatistics, seconds: float) -> None:
        """Count a pass."""
        self._last = shared
        self._rows.observe(shared.rows)
        self._sessions.observe(shared.sessions)
        self._seconds.observe(seconds)
        self._hold.observe(shared.hold_seconds)

    def committed(self, tokens: int, trimmed: int) -> None:
        """Count what a pass came to for one session."""
        self._committed.inc(tokens)
        self._trimmed.inc(trimmed)

    def cached(self, tokens: int) -> None:
        """Count what a session found in the prefix cache."""
        self._cached.inc(tokens)

    def not_finite(self, choices: int) -> None:
        """Count tokens that could not be chosen."""
        self._not_finite.inc(choices)

    def _row_price(self) -> float:
        return self._last.row_price if self._last is not None else 0.0
