"""How much the gateway takes from its clients at once, and how long it waits for them."""

from __future__ import annotations

import resource
from dataclasses import dataclass

MAX_HTTP_CONNECTIONS = 512
SPARE_FILES = 64  # beside the connections with clients: to draft services, logs, certificates, the event loop's own
FEWEST_CONNECTIONS = 16
KEPT_FOR_HEALTH = 16  # connections, or a quarter of them all, that requests for work leave to /health and /metrics
TLS_SECONDS = 10.0
HEAD_SECONDS = 20.0
KEEP_ALIVE_SECONDS = 75.0
BODY_SECONDS = 30.0
BODY_RATE = 2**14
REST_SECONDS = 10.0
TAKING_SECONDS = 60.0
TAKING_RATE = 2**14
CLOSING_SECONDS = 5.0
MAX_AHEAD_BYTES = 2**16
MAX_BODY_BYTES = 4 * 2**20  # what a gRPC message of the services may have
MAX_HELD_BYTES = 192 * 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of connections and requests. A connection past one of the times is closed.

    Attributes:
        connections: At once, those among them whose TLS handshake goes on.
        handshake_seconds: For TLS.
        head_seconds: From a connection's beginning, or from the first byte of a later request, to a whole head.
        idle_seconds: Between an answer and the next request.
        body_seconds: For a body, and another second for every `body_rate` bytes of it that came.
        body_rate: Bytes a second.
        rest_seconds: For the rest of a body whose request has been answered.
        taking_seconds: For a client to take what is written to it, and another second for every `taking_rate` bytes.
        taking_rate: Bytes a second.
        closing_seconds: For a client to let a connection be closed.
        ahead_bytes: Of further requests on a connection whose last one is still in work.
        body_bytes: Of one body.
        held_bytes: Of all requests' bodies and answers at once, as they are in memory.
    """

    connections: int = MAX_HTTP_CONNECTIONS
    handshake_seconds: float = TLS_SECONDS
    head_seconds: float = HEAD_SECONDS
    idle_seconds: float = KEEP_ALIVE_SECONDS
    body_seconds: float = BODY_SECONDS
    body_rate: int = BODY_RATE
    rest_seconds: float = REST_SECONDS
    taking_seconds: float = TAKING_SECONDS
    taking_rate: int = TAKING_RATE
    closing_seconds: float = CLOSING_SECONDS
    ahead_bytes: int = MAX_AHEAD_BYTES
    body_bytes: int = MAX_BODY_BYTES
    held_bytes: int = MAX_HELD_BYTES

    @property
    def most_connections(self) -> int:
        """As many as the process may have open files for."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return self.connections
        return max(min(self.connections, files - SPARE_FILES), FEWEST_CONNECTIONS)

    @property
    def most_requests(self) -> int:
        """That are in work at once; the connections beyond are left to those who ask for the gateway's health."""
        connections = self.most_connections
        return connections - min(KEPT_FOR_HEALTH, connections // 4)
