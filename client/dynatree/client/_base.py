"""The common part of both clients: addresses, channel options, credentials and timeouts."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from numbers import Real
from os import PathLike
from random import randrange
from typing import Any, Literal, TypedDict

import grpc

from dynatree.client._attempts import Attempts
from dynatree.client._errors import (
    RequestCancelledError,
    ServerUnavailableError,
    code_of,
    error_from_rpc,
    is_quota,
    retry_after,
)
from dynatree.client._security import check_local, tls_credentials, token_metadata
from dynatree.client._tracing import Metadata
from dynatree.v1 import draft_pb2, draft_pb2_grpc

ASKING_WHY = 0.5  # seconds to find out why there is no connection
MODEL_INFO_REQUEST = draft_pb2.DraftServiceGetModelInfoRequest()
VOCABULARY_REQUEST = draft_pb2.GetVocabularyRequest()
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse: the field `status` with SERVING

_ADDRESS = re.compile(r"unix:.+|(?:dns:///)?(?!\w+://)[^,/]+:(\d{1,5})")
_LAST_PORT = 65535
_BEHIND_A_NAME = 3  # servers that are tried for one DNS name
# The servers of a DNS name take turns, and those that fail the health check are left out.
_BALANCED = json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})
_LONGEST_PRINCIPAL = 256  # characters; the server refuses longer names
_ASKING_ONE = 0.5  # seconds to wait for one of several servers before the next is asked
_LONGEST = 1e9  # seconds, thirty years: a deadline a few times as far overflows in gRPC, which takes it as passed

# gRPC ignores unknown names silently; each of these is defined in grpc_types.h.
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # The client resumes a partly received Generate itself; gRPC would repeat it.
    ("grpc.enable_retries", 0),
    # A message holds the tokens of one round; the limit only protects the client's memory from a faulty server.
    ("grpc.max_receive_message_length", 16 * 2**20),
    # Keepalive pings detect a dead connection during a request. The interval must not be shorter than the server's
    # grpc.http2.min_ping_interval_without_data_ms, or the server closes the connection.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of gRPC's own pings, which delay keepalive pings
    ("grpc.keepalive_permit_without_calls", 0),
    # A server that starts is found within about a second; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, the timeout of one connection attempt, by default 20 s. A hanging process still accepts
    # connections, but never answers.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # The services are on the local network; the environment's web proxies are not meant for them.
    ("grpc.enable_http_proxy", 0),
)


class ClientSettings(TypedDict, total=False):
    """The keyword arguments of both clients; all are optional.

    Attributes:
        timeout: the longest that a call may take until its last token, in seconds. Each call may override it. None (the
            default) means no limit.
        connect_timeout: the longest that a call which has received nothing waits for a server, in seconds; 10 by
            default.
        resume: whether to continue a request on another server when its server is lost: after the tokens received so
            far, or from the start if there are none. True by default.
        resume_timeout: the longest that a partly received request waits for a server after losing its own, in seconds;
            30 by default.
        principal: the name of the client or user that makes the requests. A server serves principals in turn, and
            reuses cached prompts only for the principal that sent them. The empty string (the default) names none.
        token: the bearer token sent with every call; None (the default) sends none. A token for a plain connection to
            another machine is refused unless `insecure` is True.
        ca: a PEM file with the certificate authorities that the server's certificate is checked against; True for the
            authorities included in gRPC. None (the default) means a plain connection.
        cert: a PEM file with the client's certificate chain, for mutual TLS; requires `key`.
        key: a PEM file with the private key of `cert`.
        insecure: whether a token may be sent over a plain connection to another machine; False by default.
        credentials: other TLS credentials, for example from `grpc.ssl_channel_credentials`; they replace `ca`, `cert`
            and `key`.
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
    """The settings of a client, and the logic that both clients share."""

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
        # The metadata of every request.
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
        """Return the options of a channel, each name once: gRPC does not define which of two values it would take."""
        balanced = {"grpc.service_config": _BALANCED} if address.startswith("dns:///") else {}
        return tuple((dict(_CHANNEL_OPTIONS) | balanced | self._channel_options).items())

    def _with(self, metadata: Metadata) -> Metadata:
        """Return the metadata of a call: its own, and the client's pairs whose keys are not among them.

        Raises:
            ValueError: the call would send a token over a plain connection to another machine.
        """
        if not metadata:
            return self._metadata
        own = {key for key, _ in metadata}
        if self._plain and "authorization" in own:
            check_local(self._addresses)
        return (*((key, value) for key, value in self._metadata if key not in own), *metadata)

    def _servers_in_turn(self) -> Iterator[int]:
        """Yield the indices of the servers for the attempts of one call. Each call begins at the next server."""
        return (turn % len(self._addresses) for turn in count(next(self._turns)))

    def _attempts(self, left: Callable[[], float | None]) -> Attempts:
        """Return the retry state of a new request; `left` returns the seconds until its deadline."""
        if not self._resume:
            return Attempts(1, connect_seconds=-1.0, resume_seconds=-1.0)
        return Attempts(self._tries(), self._connect_timeout, self._resume_timeout, left)

    def _attempts_at_question(self, deadline: "Deadline") -> Attempts:
        """Return the retry state of a new call with a single answer; it is also retried if `resume` is False."""
        return Attempts(self._tries(), self._connect_timeout, -1.0, deadline.remaining)

    def _tries(self) -> int:
        return sum(_BEHIND_A_NAME if address.startswith("dns:///") else 1 for address in self._addresses)

    def _pause(self, attempts: Attempts, error: grpc.RpcError) -> float:
        """Return the seconds until a call's next attempt.

        Raises:
            DynaTreeError: `error` ends the call.
        """
        pause = attempts.after(code_of(error), retry_after(error), quota=is_quota(error))
        if pause is None:
            raise error_from_rpc(error, self._address) from error
        return pause

    def _check_open(self) -> None:
        """Check that the client was not closed while a call waited for its next attempt.

        Raises:
            RequestCancelledError: It was.
        """
        if self._closed:
            raise RequestCancelledError(grpc.StatusCode.CANCELLED, "the client was closed")

    def _deadline(self, timeout: float | None) -> "Deadline":
        """Return the deadline of a call that starts now; a `timeout` of None means the client's."""
        if self._closed:
            raise RuntimeError("the client is closed")
        return Deadline(self._timeout if timeout is None else _seconds("timeout", timeout))

    def _connect_wait(self, deadline: "Deadline", servers: int) -> "ConnectWait":
        """Return the wait for the first server, in a call with this deadline."""
        return ConnectWait(self._connect_timeout, deadline, servers)

    def _check_answer(self, error: grpc.RpcError, limit: float, cause: str = "") -> None:
        """Ignore the failure of the first call if a server answered it, since a server is then reachable.

        Args:
            error: the failure.
            limit: the caller's time limit, in seconds, which the error names.
            cause: the reason why there is no connection, if it is known.

        Raises:
            ServerUnavailableError: no server answered within `limit` seconds.
            RequestCancelledError: the client was closed.
        """
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no draft service answered at {self._address} within {limit:g} s{cause and f': {cause}'}"
            raise ServerUnavailableError(grpc.StatusCode.UNAVAILABLE, details) from None
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            raise error_from_rpc(error, self._address) from error


class Deadline:
    """The deadline of a call, `seconds` from now; None means no deadline."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._at = None if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float | None:
        """Seconds left, 0 once the deadline has passed; None without a deadline."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())


class ConnectWait:
    """The wait for the first server that answers: yields the server to ask next, and the seconds to wait for it.

    `limit` is the time limit in seconds that errors name: the client's `connect_timeout`, or the call's timeout if that
    is shorter.
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
        """Whether to ask the next server after the failure of this one."""
        silent = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        return self._servers > 1 and silent and time.monotonic() < self._until


def cause_of(error: grpc.RpcError) -> str:
    """Return why there is no connection, for example an untrusted certificate; "" if gRPC does not say."""
    _, found, last = (error.details() or "").partition("last error: ")
    return last.removeprefix("UNKNOWN: ").removeprefix("UNAVAILABLE: ") if found else ""


def is_serving(answer: bytes) -> bool:
    """Whether the answer to a health check says that the server accepts requests."""
    return answer == _SERVING


def draft_stub(channel: grpc.Channel | grpc.aio.Channel) -> draft_pb2_grpc.DraftServiceStub:
    """Return a stub of the draft service on either kind of channel."""
    return draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]


def _split(address: str) -> list[str]:
    """Split a comma-separated list of addresses.

    Raises:
        ValueError: an element is not an address.
    """
    addresses = [each.strip() for each in address.split(",")] if isinstance(address, str) else []
    for each in addresses or [address]:
        match = _ADDRESS.fullmatch(each) if isinstance(each, str) else None
        if not match or int(match[1] or 0) > _LAST_PORT:
            raise ValueError(f"{each!r} is not an address; expected host:port, unix:PATH or dns:///name:port")
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
