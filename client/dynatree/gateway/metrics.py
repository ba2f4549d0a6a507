"""What the gateway counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynatree.common.metrics import LATENCY_BUCKETS


class GatewayMetrics:
    """Counts requests by route and status, and their time to the first byte and to the last."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"dynatree_gateway_{name}", text, ["route"], buckets=LATENCY_BUCKETS, registry=registry)

        self.open = Gauge("dynatree_gateway_num_requests_running", "Requests that are answered.", registry=registry)
        self._requests = Counter(
            "dynatree_gateway_requests", "Requests, by route and HTTP status.", ["route", "code"], registry=registry
        )
        self._first = histogram("time_to_first_byte_seconds", "From a request's head to its answer's first byte.")
        self._whole = histogram("e2e_request_latency_seconds", "From a request's head to its answer's last byte.")

    def answered(self, route: str, status: int, first_byte: float, seconds: float) -> None:
        """A request has ended; times are seconds from its head."""
        self._requests.labels(route, str(status)).inc()
        self._first.labels(route).observe(first_byte)
        self._whole.labels(route).observe(seconds)
