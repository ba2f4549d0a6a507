"""Asks a service whether it serves: `python -m dynatree.common.healthcheck ADDR`.

Exit status 0 when it answers SERVING; otherwise 1, and one line on standard error that says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# The service is near; a proxy that the environment names for the way out is not for it.
_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)


def failure(address: str, timeout: float) -> str | None:
    """Why the server at `address` does not serve, in one line; None when it does. Waits `timeout` seconds at most."""
    with grpc.insecure_channel(address, _CHANNEL_OPTIONS) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return f"{error.code().name}: {' '.join((error.details() or '').split())}"
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dynatree.common.healthcheck", description="Ask a service if it serves."
    )
    parser.add_argument("address", metavar="ADDR", help="host:port or unix:PATH")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="default: %(default)g")
    options = parser.parse_args(arguments)
    reason = failure(options.address, options.timeout)
    if reason is not None:
        print(f"{options.address} does not serve: {reason}", file=sys.stderr)
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
