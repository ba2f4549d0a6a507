"""gRPC options and metadata names of both services and their clients."""

import resource

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
RETRY_AFTER = "retry-after-ms"  # trailing metadata of RESOURCE_EXHAUSTED
# trailing metadata of RESOURCE_EXHAUSTED: QUOTA if the principal's quota is used up, wherever it asks; else QUEUE
REFUSED, QUOTA, QUEUE = "dynatree-refused", "quota", "queue"
GRAMMAR = "grammar"  # REFUSED of INVALID_ARGUMENT if the request's grammar is at fault
CONTEXT_LENGTH, PROMPT_TOKENS = "context-length", "prompt-tokens"  # trailing metadata if the context is exceeded
PRINCIPAL = "dynatree-principal"  # metadata of a request: its principal
REQUEST_ID = "x-request-id"  # metadata of a request: its name in logs; trailing metadata of its error
MAX_METADATA_BYTES = 16 * 1024
MAX_STREAMS = 1024  # concurrent calls per connection
MAX_CONNECTIONS = 1024  # per address; fewer if the process may open only few files
OWN_FILES = 128  # files reserved for the process's own use
HANDSHAKE_SECONDS = 10  # for the TLS handshake and the HTTP/2 settings
IDLE_CONNECTION_SECONDS = 300  # time without a call after which a connection is closed
CONNECTION_SECONDS = 3600  # maximum age of a connection, so that load spreads to servers added later
PING_SECONDS = 5  # minimum interval between a peer's pings
KEEPALIVE_SECONDS = 20  # silence after which a peer is pinged; not below PING_SECONDS
PONG_SECONDS = 10  # time to answer a ping
_NO_COMPRESSION = ("grpc.compression_enabled_algorithms_bitset", 1)  # a small message could expand to a huge one
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
    ("grpc.max_connection_age_grace_ms", CONNECTION_SECONDS * 1000),  # time for its calls to end
    ("grpc.http2.max_ping_strikes", 2),  # a connection with too many pings is closed
    ("grpc.http2.min_ping_interval_without_data_ms", PING_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),  # a peer that vanished must not hold its session
    ("grpc.keepalive_timeout_ms", PONG_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PONG_SECONDS * 1000),  # gRPC's own pings, which delay keepalive pings
)
CHANNEL_OPTIONS = (
    _NO_COMPRESSION,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PONG_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PONG_SECONDS * 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a service that returns is found within a second
    ("grpc.min_reconnect_backoff_ms", 3_000),  # timeout of a connection attempt; a hung service accepts without a reply
    ("grpc.enable_http_proxy", 0),  # the services are neighbours; ignore proxies set in the environment
)


def server_options() -> tuple[tuple[str, int], ...]:
    """The gRPC options of a server in this process."""
    return (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", _most_connections()))


def _most_connections() -> int:
    """Connection limit per address; `localhost` may be two addresses, and `OWN_FILES` files stay reserved."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(files - OWN_FILES, files // 2) // 2)
