"""What both services and their clients ask of gRPC."""

import resource

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
RETRY_AFTER = "retry-after-ms"  # trailing metadata of RESOURCE_EXHAUSTED
# trailing metadata likewise: QUOTA where the principal may have no more, wherever it asks, else QUEUE
REFUSED, QUOTA, QUEUE = "dynatree-refused", "quota", "queue"
CONTEXT_LENGTH, PROMPT_TOKENS = "context-length", "prompt-tokens"  # trailing metadata where these do not fit those
PRINCIPAL = "dynatree-principal"  # metadata of a request: on whose behalf it is made
REQUEST_ID = "x-request-id"  # metadata of a request: its name in logs; trailing metadata of its error
MAX_METADATA_BYTES = 16 * 1024
MAX_STREAMS = 1024  # calls of one connection
MAX_CONNECTIONS = 1024  # at one address, fewer where the process may not open as many files
OWN_FILES = 128  # of the process, which no connection takes
HANDSHAKE_SECONDS = 10  # for TLS and HTTP/2's settings
IDLE_CONNECTION_SECONDS = 300  # without a call
CONNECTION_SECONDS = 3600  # after which a connection is made anew, so that load spreads over servers that came later
PING_SECONDS = 5  # between two pings of a peer
KEEPALIVE_SECONDS = 20  # of a peer's silence, after which it is pinged; not below PING_SECONDS
PONG_SECONDS = 10  # for its answer
_NO_COMPRESSION = ("grpc.compression_enabled_algorithms_bitset", 1)  # a small message may stand for a huge one
SERVER_OPTIONS = (
    _NO_COMPRESSION,
    ("grpc.so_reuseport", 0),  # two servers must not bind one port silently
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    ("grpc.max_connection_idle_ms", IDLE_CONNECTION_SECONDS * 1000),
    ("grpc.max_connection_age_ms", CONNECTION_SECONDS * 1000),
    ("grpc.max_connection_age_grace_ms", CONNECTION_SECONDS * 1000),  # its streams may end meanwhile
    ("grpc.http2.max_ping_strikes", 2),  # a connection with more pings than allowed is closed
    ("grpc.http2.min_ping_interval_without_data_ms", PING_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),  # a peer that vanished must not hold its session
    ("grpc.keepalive_timeout_ms", PONG_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PONG_SECONDS * 1000),  # of gRPC's own pings, behind which a keepalive ping waits
)
CHANNEL_OPTIONS = (
    _NO_COMPRESSION,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PONG_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PONG_SECONDS * 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a service that comes back is found within a second
    ("grpc.min_reconnect_backoff_ms", 3_000),  # the longest try at one connection; one that hangs accepts it silently
    ("grpc.enable_http_proxy", 0),  # the two services are neighbours, whatever the environment says of the web
)


def server_options() -> tuple[tuple[str, int], ...]:
    """The options of a server of this process."""
    return (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", _most_connections()))


def _most_connections() -> int:
    """At one address, of which `localhost` may be two: the process keeps files for its own work, whatever connects."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(files - OWN_FILES, files // 2) // 2)
