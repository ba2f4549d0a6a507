"""Health check of a service: `python -m dynatree.serving.healthcheck ADDR`.

The exit status is 0 if a gRPC service answers SERVING, or a gateway answers 200. Otherwise it is 1, and one line on
standard error gives the reason.
"""

from __future__ import annotations

import argparse
import ssl
import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

# The service is expected to be nearby, so a proxy set in the environment is not used.
_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)


def failure(
    address: str, timeout: float, service: str = "", credentials: grpc.ChannelCredentials | None = None
) -> str | None:
    """The reason why the server at `address` does not serve, in one line; None if it serves.

    Args:
        address: Address of the server, `host:port` or `unix:PATH`.
        timeout: Maximum seconds to wait.
        service: Service to check; "" means the server, "liveness" whether its process answers.
        credentials: Credentials of a TLS connection; None means a plain connection.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # not installed in a gateway's image

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
                return f"the server has no service named {service!r}"
            return f"{error.code().name}: {' '.join((error.details() or '').split())}"
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def http_failure(url: str, timeout: float, ca: Path | None = None) -> str | None:
    """The reason why the gateway at `url` does not serve, in one line; None if it serves.

    Args:
        url: URL of the gateway, `http://host:port` or `https://host:port`.
        timeout: Maximum seconds to wait for each network operation.
        ca: Certificate authorities of the gateway's certificate, PEM; None means those of the system.

    Raises:
        ValueError: `url` has no host, or an invalid port.
        OSError: `ca` cannot be read.
    """
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"{url} has no host")
    connection = (
        HTTPSConnection(parts.hostname, parts.port, timeout=timeout, context=ssl.create_default_context(cafile=ca))
        if parts.scheme == "https"
        else HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    )
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
    except (OSError, HTTPException) as error:
        return " ".join(str(error).split()) or type(error).__name__
    finally:
        connection.close()
    return None if answer.status == 200 else f"{answer.status} {answer.reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dynatree.serving.healthcheck", description="Check whether a service serves."
    )
    parser.add_argument(
        "address", metavar="ADDR", help="service at host:port or unix:PATH, or gateway at http[s]://host:port"
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="time limit (default: %(default)g)"
    )
    parser.add_argument(
        "--service", default="", metavar="NAME", help="gRPC service to check; liveness checks only the process"
    )
    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="PEM file of the authorities that may sign the server's certificate; enables TLS",
    )
    parser.add_argument(
        "--cert", type=Path, metavar="FILE", help="PEM file of the certificate chain to present to the server"
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="PEM file of the private key of --cert")
    options = parser.parse_args(arguments)
    reason = _http_reason(parser, options) if "://" in options.address else _grpc_reason(parser, options)
    if reason is not None:
        print(f"{options.address} does not serve: {reason}", file=sys.stderr)
    return 0 if reason is None else 1


def _http_reason(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str | None:
    if urlsplit(options.address).scheme not in ("http", "https"):
        parser.error(f"{options.address}: expected host:port, unix:PATH, http://host:port or https://host:port")
    if options.service or options.cert or options.key:
        parser.error("--service, --cert and --key apply only to gRPC")
    try:
        return http_failure(options.address, options.timeout, options.ca)
    except OSError as error:
        parser.error(f"{options.ca}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))


def _grpc_reason(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str | None:
    credentials = None
    if options.ca is not None:
        try:
            files = [each.read_bytes() if each else None for each in (options.ca, options.key, options.cert)]
        except OSError as error:
            parser.error(f"{error.filename}: {error.strerror}")
        credentials = grpc.ssl_channel_credentials(*files)
    return failure(options.address, options.timeout, options.service, credentials)


if __name__ == "__main__":
    sys.exit(main())
