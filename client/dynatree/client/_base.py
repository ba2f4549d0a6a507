"""What both clients have in common: where the server is, how to reach it, how long to wait."""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from numbers import Real
from os import PathLike
from random import randrange
from typing import Any, Literal, TypedDict

import grpc

from dynatree.client._attempts import Attempts
from dynatree.client._errors import ServerUnavailableError, error_from_rpc
from dynatree.client._security import check_local, tls_credentials, token_metadata
from dynatree.client._tracing import Metadata
from dynatree.v1 import draft_pb2, draft_pb2_grpc

ASKING_WHY = 0.5  # seconds, for the reason why there is no connection
MODEL_INFO_REQUEST = draft_pb2.DraftServiceGetModelInfoRequest()
VOCABULARY_REQUEST = draft_pb2.GetVocabularyRequest()
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse: the field `status` with SERVING

_ADDRESS = re.compile(r"unix:.+|(?:dns:///)?(?!\w+://)[^,/]+:(\d{1,5})")
_LAST_PORT = 65535
_BEHIND_A_NAME = 3  # servers that are tried, of those that one name stands for
# Those servers take turns, and one that does not serve is left out.
_BALANCED = json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})
_LONGEST_PRINCIPAL = 256  # characters; the server takes no more
_ASKING_ONE = 0.5  # seconds for one of several servers to answer, before the next is asked
_LONGEST = 1e9  # thirty years, in seconds: in gRPC's arithmetic a deadline a few times as far has passed already

# gRPC ignores a name that it does not know, so each of these is in grpc_types.h.
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A Generate that was received in part is resumed, not repeated.
    ("grpc.enable_retries", 0),
    # One message is one round's tokens; the limit only bounds what a wrong server can make a client hold.
    ("grpc.max_receive_message_length", 16 * 2**20),
    # Finds a dead connection in the middle of a request. Not more often than the server's
    # grpc.http2.min_ping_interval_without_data_ms, or the server hangs up.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of gRPC's own pings, behind which a keepalive ping waits
    ("grpc.keepalive_permit_without_calls", 0),
    # A server that is starting is found within about a second, not after gRPC's usual backoff of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The longest try at one connection: a process that hangs still accepts them, and says nothing. 20 s without it.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # The service is a neighbour; what the environment says of the web's proxies is not meant for it.
    ("grpc.enable_http_proxy", 0),
)


class ClientSettings(TypedDict, total=False):
    """The keyword arguments of both clients; every one may be left out.

    Attributes:
        timeout: the longest that a call may take, in seconds, from the call to its last token; each call may give its
            own. None (the default) is no limit.
        connect_timeout: the longest wait for a server, in seconds, of a call that has received nothing; 10 by default.
        resume: whether a request that was received in part goes on elsewhere when its server is lost, and one of which
            nothing was received is sent anew; True by default.
        resume_timeout: the longest that a request which was received in part may be without a server, in seconds; 30
            by default.
        principal: on whose behalf requests are made: a server serves principals in turn, and reuses cached prompts
            only for the principal that sent them. The empty string (the default) names nobody.
        token: shown to the server with every call; None (the default) shows none. Over a plain connection to another
            machine it is refused, unless `insecure` is True.
        ca: a file with the authorities of the server's certificate, PEM; True for those that gRPC comes with. None (the
            default) is a plain connection.
        cert: a file with the certificate chain that is shown to the server, PEM; `key` is its private key's.
        key: see `cert`.
        insecure: whether a token may be shown over a plain connection; False by default.
        credentials: for TLS in other ways, as from `grpc.ssl_channel_credentials`; instead of `ca`, `cert` and `key`.
        channel_options: further gRPC channel options; they take precedence over this library's own.
    """

    timeout: float | None
    connect_timeout: float
    resume: bool
    resume_timeout: float
    principal: str
    token: str | None
    ca: str | PathLike[str] | Literal[True] | None
    cert: str | PathLike[str] | None
    key: str | PathLike[str] | None
    insecure: bool
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
        resume: bool = True,
        resume_timeout: float = 30.0,
        principal: str = "",
        token: str | None = None,
        ca: str | PathLike[str] | Literal[True] | None = None,
        cert: str | PathLike[str] | None = None,
        key: str | PathLike[str] | None = None,
        insecure: bool = False,
        credentials: grpc.ChannelCredentials | None = None,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._address = address
        self._addresses = _split(address)
        self._timeout = None if timeout is None else _seconds("timeout", timeout)
        self._connect_timeout = _seconds("connect_timeout", connect_timeout)
        if not isinstance(resume, bool):
            raise TypeError(f"resume must be a bool, not {type(resume).__name__}")
        self._resume = resume
        self._resume_timeout = _seconds("resume_timeout", resume_timeout)
        self._credentials = credentials if credentials is not None else tls_credentials(ca, cert, key)
        _check_principal(principal)
        # metadata of every request
        self._metadata: tuple[tuple[str, str], ...] = (("dynatree-principal", principal),) if principal else ()
        if token is not None:
            if self._credentials is None and not insecure:
                check_local(self._addresses)
            self._metadata += (token_metadata(token),)
        self._plain = self._credentials is None and not insecure
        self._channel_options = dict(channel_options)
        self._turns = count(randrange(len(self._addresses)))
        self._connected = False
        self._closed = False

    def _options(self, address: str) -> tuple[tuple[str, Any], ...]:
        """The options of a channel. One value a name: which of two gRPC would take is not defined."""
        balanced = {"grpc.service_config": _BALANCED} if address.startswith("dns:///") else {}
        return tuple((dict(_CHANNEL_OPTIONS) | balanced | self._channel_options).items())

    def _with(self, metadata: Metadata) -> Metadata:
        """The metadata of a call that has some of its own, which takes the place of the client's.

        Raises:
            ValueError: it would show a token over a plain connection to another machine.
        """
        if not metadata:
            return self._metadata
        own = {key for key, _ in metadata}
        if self._plain and "authorization" in own:
            check_local(self._addresses)
        return (*((key, value) for key, value in self._metadata if key not in own), *metadata)

    def _next_server(self) -> int:
        """The server of the next attempt; servers take turns."""
        return next(self._turns) % len(self._addresses)

    def _attempts(self) -> Attempts:
        """The attempts at one request."""
        several = [_BEHIND_A_NAME if address.startswith("dns:///") else 1 for address in self._addresses]
        if not self._resume:
            return Attempts(1, connect_seconds=-1.0, resume_seconds=-1.0)
        return Attempts(sum(several), self._connect_timeout, self._resume_timeout)

    def _deadline(self, timeout: float | None) -> "Deadline":
        """When a call that starts now must be done; None is the client's own timeout."""
        if self._closed:
            raise RuntimeError("the client is closed")
        return Deadline(self._timeout if timeout is None else _seconds("timeout", timeout))

    def _connect_wait(self, deadline: "Deadline", servers: int) -> "ConnectWait":
        """The wait for one of so many servers, in a call that has just got this deadline."""
        return ConnectWait(self._connect_timeout, deadline, servers)

    def _check_answer(self, error: grpc.RpcError, limit: float, cause: str = "") -> None:
        """Accept that the first question to the server failed, if the server answered: somebody serves there.

        Args:
            error: how it failed.
            limit: seconds that the caller allowed.
            cause: why no connection came about, where that is known.

        Raises:
            ServerUnavailableError: nobody answered within `limit` seconds.
            RequestCancelledError: the client was closed.
        """
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no draft service answered at {self._address} within {limit:g} s{cause and f': {cause}'}"
            raise ServerUnavailableError(grpc.StatusCode.UNAVAILABLE, details) from None
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise error_from_rpc(error, self._address) from error


class Deadline:
    """When a call must be done; `seconds` from now, None for never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._at = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Seconds left, 0 once it has passed; None for never."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())


class ConnectWait:
    """The wait for the first server that answers: which is asked next, and for how long.

    `limit` is the number of seconds that the caller set, which errors name: the client's `connect_timeout`, or the
    call's timeout where that is shorter.
    """

    def __init__(self, connect_timeout: float, deadline: Deadline, servers: int) -> None:
        remaining = deadline.remaining()
        self.limit = connect_timeout if deadline.seconds is None else min(connect_timeout, deadline.seconds)
        self._servers = servers
        self._until = time.monotonic() + (connect_timeout if remaining is None else min(connect_timeout, remaining))

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for server in cycle(range(self._servers)):
            left = max(0.0, self._until - time.monotonic())
            yield server, left if self._servers == 1 else min(left, _ASKING_ONE)

    def goes_on_after(self, error: grpc.RpcError) -> bool:
        """Whether the next server is asked, after one that did not answer."""
        silent = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        return self._servers > 1 and silent and time.monotonic() < self._until


def cause_of(error: grpc.RpcError) -> str:
    """Why there is no connection, such as a certificate that is not trusted; "" where gRPC does not say."""
    _, found, last = (error.details() or "").partition("last error: ")
    return last.removeprefix("UNKNOWN: ").removeprefix("UNAVAILABLE: ") if found else ""


def is_serving(answer: bytes) -> bool:
    """Whether the answer to a health check says that the server takes requests."""
    return answer == _SERVING


def draft_stub(channel: grpc.Channel | grpc.aio.Channel) -> draft_pb2_grpc.DraftServiceStub:
    """The draft service's methods over either kind of channel."""
    return draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]


def _split(address: str) -> list[str]:
    """The addresses in a comma-separated list.

    Raises:
        ValueError: one of them is none.
    """
    addresses = [each.strip() for each in address.split(",")] if isinstance(address, str) else []
    for each in addresses or [address]:
        match = _ADDRESS.fullmatch(each) if isinstance(each, str) else None
        if not match or int(match[1] or 0) > _LAST_PORT:
            raise ValueError(f"an address is host:port, unix:PATH or dns:///name:port, not {each!r}")
    return addresses


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
