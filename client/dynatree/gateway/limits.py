"""The gateway's limits: connections, memory, and the time that it waits for its clients."""

from __future__ import annotations

import resource
from dataclasses import dataclass

MAX_HTTP_CONNECTIONS = 512
SPARE_FILES = 64  # file descriptors for other uses: draft services, logs, certificates, the event loop
FEWEST_CONNECTIONS = 16
KEPT_FOR_HEALTH = 16  # connections reserved for /health and /metrics; at most a quarter of all
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
MAX_BODY_BYTES = 4 * 2**20  # the services' limit of a gRPC message
MAX_HELD_BYTES = 192 * 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of connections and requests. A connection that exceeds a time limit is closed.

    Attributes:
        connections: Open connections, including those in their TLS handshake.
        handshake_seconds: Time for the TLS handshake.
        head_seconds: Time from the opening of a connection, or from the first byte of a later request, to a whole head.
        idle_seconds: Time between an answer and the next request.
        body_seconds: Time for a body, plus one second for every `body_rate` bytes received.
        body_rate: Bytes per second.
        rest_seconds: Time for the rest of a body whose request has been answered.
        taking_seconds: Time for a client to read a full write buffer, plus one second for every `taking_rate` bytes.
        taking_rate: Bytes per second.
        closing_seconds: Time for a closing connection to end.
        ahead_bytes: Bytes that a client may pipeline while its last request is still in work.
        body_bytes: Bytes of one body.
        held_bytes: Bytes of memory for the bodies and answers of all open requests.
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
        """`connections`, or fewer if the process's limit of open files does not allow as many."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return self.connections
        return max(min(self.connections, files - SPARE_FILES), FEWEST_CONNECTIONS)

    @property
    def most_requests(self) -> int:
        """Upper bound on requests in work; the other connections are reserved for /health and /metrics."""
        connections = self.most_connections
        return connections - min(KEPT_FOR_HEALTH, connections // 4)
