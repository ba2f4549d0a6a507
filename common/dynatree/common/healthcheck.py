"""Asks a service whether it serves: `python -m dynatree.common.healthcheck ADDR`.

Exit status 0 when it answers SERVING; otherwise 1, and one line on standard error that says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# The service is near; a proxy that the environment names for the way out is not for it.
_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)


def failure(
    address: str, timeout: float, service: str = "", credentials: grpc.ChannelCredentials | None = None
) -> str | None:
    """Why the server at `address` does not serve, in one line; None when it does.

    Args:
        address: `host:port` or `unix:PATH`.
        timeout: Seconds to wait at most.
        service: Whose health; "": the server's, "liveness": whether its process answers.
        credentials: Of a TLS connection; None: a plain one.
    """
    with (
        grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        if credentials is None
        else grpc.secure_channel(address, credentials, _CHANNEL_OPTIONS)
    ) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return f"it has no service named {service!r}"
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
    parser.add_argument("--service", default="", metavar="NAME", help="whose health; liveness: of the process alone")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="authorities of the server's certificate, PEM: TLS")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="certificate chain that is shown, PEM")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its private key, PEM")
    options = parser.parse_args(arguments)
    credentials = None
    if options.ca is not None:
        try:
            files = [each.read_bytes() if each else None for each in (options.ca, options.key, options.cert)]
        except OSError as error:
            parser.error(f"{error.filename}: {error.strerror}")
        credentials = grpc.ssl_channel_credentials(*files)
    reason = failure(options.address, options.timeout, options.service, credentials)
    if reason is not None:
        print(f"{options.address} does not serve: {reason}", file=sys.stderr)
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
