"""The gateway's metrics."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynatree.serving.metrics import LATENCY_BUCKETS

_REFUSED = 400  # the lowest status of an answer that is an error


@dataclass(frozen=True)
class Times:
    """Seconds from a request's head to the first and the last byte of its answer; None for a byte that was not sent."""

    first_byte: float | None = None
    last_byte: float | None = None


class GatewayMetrics:
    """Counts requests by route and status, and records the times of those that did not fail."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"dynatree_gateway_{name}", text, ["route"], buckets=LATENCY_BUCKETS, registry=registry)

        self.open = Gauge("dynatree_gateway_num_requests_running", "Open requests.", registry=registry)
        self._requests = Counter(
            "dynatree_gateway_requests", "Requests, by route and HTTP status.", ["route", "code"], registry=registry
        )
        self._first = histogram(
            "time_to_first_byte_seconds", "Seconds from a request's head to its answer's first byte."
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "Seconds from a request's head to its answer's last byte."
        )

    def answered(self, route: str, status: int, times: Times) -> None:
        """Record a request that has ended."""
        self._requests.labels(route, str(status)).inc()
        for histogram, seconds in ((self._first, times.first_byte), (self._whole, times.last_byte)):
            if seconds is not None and status < _REFUSED:
                histogram.labels(route).observe(seconds)
