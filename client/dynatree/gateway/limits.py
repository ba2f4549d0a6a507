"""How much the gateway takes from its clients at once, and how long it waits for them."""

from __future__ import annotations

import resource
from dataclasses import dataclass

MAX_CONNECTIONS = 512
SPARE_FILES = 64  # beside the connections with clients: to draft services, logs, certificates, the event loop's own
FEWEST_CONNECTIONS = 16
KEPT_FOR_HEALTH = 16  # connections, or a quarter of them all, that requests for work leave to /health and /metrics


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

    connections: int = MAX_CONNECTIONS
    handshake_seconds: float = 10.0
    head_seconds: float = 20.0
    idle_seconds: float = 75.0
    body_seconds: float = 30.0
    body_rate: int = 2**14
    rest_seconds: float = 10.0
    taking_seconds: float = 60.0
    taking_rate: int = 2**14
    closing_seconds: float = 5.0
    ahead_bytes: int = 2**16
    body_bytes: int = 4 * 2**20  # what a gRPC message of the services may have
    held_bytes: int = 192 * 2**20

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
