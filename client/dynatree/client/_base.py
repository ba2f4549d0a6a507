"""What both clients have in common: where the server is, how to reach it, how long to wait."""

import math
import re
import time
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypedDict

import grpc

from dynatree.client._errors import ServerUnavailableError, error_from_rpc
from dynatree.v1 import draft_pb2, draft_pb2_grpc

MODEL_INFO_REQUEST = draft_pb2.DraftServiceGetModelInfoRequest()

_ADDRESS = re.compile(r"unix:.+|(?!https?://).+:(\d{1,5})")
_LAST_PORT = 65535
_LONGEST_PRINCIPAL = 256  # characters; the server takes no more
_LONGEST = 1e9  # thirty years, in seconds: in gRPC's arithmetic a deadline a few times as far has passed already

# gRPC ignores a name that it does not know, so each of these is in grpc_types.h.
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A Generate that has reached the server must never run twice.
    ("grpc.enable_retries", 0),
    # One message is one round's tokens; the limit only bounds what a wrong server can make a client hold.
    ("grpc.max_receive_message_length", 16 * 2**20),
    # Finds a dead connection in the middle of a request. Not more often than the server's
    # grpc.http2.min_ping_interval_without_data_ms, or the server hangs up.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A server that is starting is found within about a second, not after gRPC's usual backoff of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The service is a neighbour; what the environment says of the web's proxies is not meant for it.
    ("grpc.enable_http_proxy", 0),
)


class ClientSettings(TypedDict, total=False):
    """The keyword arguments of both clients; every one may be left out.

    Attributes:
        timeout: the longest that a call may take, in seconds, from the call to its last token; each call may give its
            own. None (the default) is no limit.
        connect_timeout: the longest wait for the server, in seconds, at the first call; 10 by default. Later calls
            fail at once when the server is gone.
        principal: on whose behalf requests are made: a server serves principals in turn, and reuses cached prompts
            only for the principal that sent them. The empty string (the default) names nobody.
        credentials: for TLS, as from `grpc.ssl_channel_credentials`; None (the default) is a plain connection.
        channel_options: further gRPC channel options; they take precedence over this library's own.
    """

    timeout: float | None
    connect_timeout: float
    principal: str
    credentials: grpc.ChannelCredentials | None
    channel_options: Sequence[tuple[str, Any]]


class BaseClient:
    """The settings of a client, and how long it may wait."""

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        connect_timeout: float = 10.0,
        principal: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if not match or int(match[1] or 0) > _LAST_PORT:
            raise ValueError(f"an address is host:port or unix:PATH, not {address!r}")
        self._address = address
        self._timeout = None if timeout is None else _seconds("timeout", timeout)
        self._connect_timeout = _seconds("connect_timeout", connect_timeout)
        self._credentials = credentials
        _check_principal(principal)
        # metadata of every request
        self._metadata = (("dynatree-principal", principal),) if principal else ()
        # One value a name: which of two gRPC would take is not defined.
        self._channel_options = tuple((dict(_CHANNEL_OPTIONS) | dict(channel_options)).items())
        self._connected = False
        self._closed = False

    def _deadline(self, timeout: float | None) -> "Deadline":
        """When a call that starts now must be done; None is the client's own timeout."""
        if self._closed:
            raise RuntimeError("the client is closed")
        return Deadline(self._timeout if timeout is None else _seconds("timeout", timeout))

    def _connect_limit(self, deadline: "Deadline") -> float:
        """The longest wait for the server, in seconds, in a call with this deadline."""
        remaining = deadline.remaining()
        return self._connect_timeout if remaining is None else min(self._connect_timeout, remaining)

    def _check_answer(self, error: grpc.RpcError, limit: float) -> None:
        """Accept that the first question to the server failed, if the server answered: somebody serves there.

        Raises:
            ServerUnavailableError: nobody answered within `limit` seconds.
            RequestCancelledError: the client was closed.
        """
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no draft service answered at {self._address} within {limit:.2g} s"
            raise ServerUnavailableError(grpc.StatusCode.UNAVAILABLE, details) from None
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise error_from_rpc(error, self._address) from error


class Deadline:
    """When a call must be done; `seconds` from now, None for never."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Seconds left, 0 once it has passed; None for never."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())


def draft_stub(channel: grpc.Channel | grpc.aio.Channel) -> draft_pb2_grpc.DraftServiceStub:
    """The draft service's methods over either kind of channel."""
    return draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]


def _check_principal(principal: str) -> None:
    if not isinstance(principal, str):
        raise TypeError(f"principal must be a string, not {type(principal).__name__}")
    if not (principal.isascii() and principal.isprintable() and len(principal) <= _LONGEST_PRINCIPAL):
        raise ValueError(
            f"principal must be at most {_LONGEST_PRINCIPAL} printable ASCII characters, not {principal[:40]!r}"
        )


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
    return min(value, _LONGEST)
