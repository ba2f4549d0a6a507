"""What both services and their clients ask of gRPC."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
RETRY_AFTER = "retry-after-ms"  # trailing metadata of RESOURCE_EXHAUSTED
CONTEXT_LENGTH, PROMPT_TOKENS = "context-length", "prompt-tokens"  # trailing metadata where these do not fit those
PRINCIPAL = "dynatree-principal"  # metadata of a request: on whose behalf it is made
REQUEST_ID = "x-request-id"  # metadata of a request: its name in logs; trailing metadata of its error
MAX_METADATA_BYTES = 16 * 1024
CONNECTION_SECONDS = 3600  # after which a connection is made anew, so that load spreads over servers that came later
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers must not bind one port silently
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", 1024),  # of one connection
    ("grpc.max_connection_age_ms", CONNECTION_SECONDS * 1000),
    ("grpc.max_connection_age_grace_ms", CONNECTION_SECONDS * 1000),  # its streams may end meanwhile
    ("grpc.http2.max_ping_strikes", 2),  # a connection with more pings than allowed is closed
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),  # a peer that vanished without a word must not hold its session
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # of gRPC's own pings, behind which a keepalive ping waits
)
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),  # not below the server's min_ping_interval_without_data_ms
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a service that comes back is found within a second
    ("grpc.min_reconnect_backoff_ms", 3_000),  # the longest try at one connection; one that hangs accepts it silently
    ("grpc.enable_http_proxy", 0),  # the two services are neighbours, whatever the environment says of the web
)
