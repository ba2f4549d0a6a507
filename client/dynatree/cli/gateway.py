"""The command line of `dynatree gateway`; the server is imported after the arguments are checked."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from dynatree.cli.arguments import add_channel_arguments, positive
from dynatree.cli.checks import check_grpc
from dynatree.cli.parser import group
from dynatree.cli.service_arguments import (
    add_groups,
    add_listen_arguments,
    add_operation_arguments,
    network_addresses,
    some_seconds,
)
from dynatree.gateway.limits import MAX_HTTP_CONNECTIONS, Limits

EXAMPLE = "dynatree gateway --server gpu-host:50051 --ca ca.pem --port 8000"
_WAY = "connection to the draft service"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree gateway`."""
    add_groups(parser, _WAY)
    group(parser, "network").add_argument(
        "--server",
        type=network_addresses,
        default="localhost:50051",
        metavar="ADDR[,ADDR...]",
        help="draft service: host:port, unix:PATH or dns:///name:port; several are used in turn (default: %(default)s)",
    )
    channel = add_channel_arguments(parser, _WAY)
    channel.add_argument(
        "--no-resume",
        dest="resume",
        action="store_false",
        help="fail if the draft service is lost, instead of resuming on another one or when it is back",
    )
    add_http_arguments(parser)
    add_operation_arguments(parser)


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the HTTP server: address, model names, TLS, keys and origins."""
    add_listen_arguments(parser, "127.0.0.1:8000", "--http", what="HTTP")
    network = group(parser, "network")
    network.add_argument(
        "--timeout", type=some_seconds, metavar="SECONDS", help="time limit of a request (default: none)"
    )
    network.add_argument(
        "--served-model-name",
        type=_name,
        nargs="+",
        default=[],
        metavar="NAME",
        help="names of the model over HTTP; responses contain the first one (default: the model's own name)",
    )
    network.add_argument(
        "--max-connections",
        type=positive,
        default=MAX_HTTP_CONNECTIONS,
        metavar="N",
        help="most concurrent HTTP connections; beyond it, the connection idle for longest is closed "
        "(default: %(default)s, or fewer if the process may open fewer files)",
    )
    security = group(parser, "security")
    security.description = "security of HTTP; a replaced certificate is reloaded"
    security.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="PEM file of the gateway's certificate chain; enables HTTPS"
    )
    security.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM file of the private key of --tls-cert")
    security.add_argument(
        "--api-key",
        type=_key,
        metavar="KEY",
        help="bearer token that requests must send; the process list shows it, unlike the environment variable "
        "DYNATREE_API_KEY",
    )
    security.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow requests from web pages of this origin, such as https://example.org; '*' allows all; repeatable",
    )
    security.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="also accept this name in the Host header, for example behind a proxy; '*' accepts all; beyond loopback, "
        "all are accepted unless this is given; repeatable",
    )
    security.add_argument(
        "--insecure",
        action="store_true",
        help="allow unencrypted connections with other machines, which otherwise require TLS",
    )


def _name(text: str) -> str:
    """An argparse type: the name of a model."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; expected at least one character")
    return text


def _key(text: str) -> str:
    if not re.fullmatch(r"[!-~]{1,4096}", text):
        raise argparse.ArgumentTypeError(
            "the key is invalid; expected 1 to 4096 printable ASCII characters without spaces"
        )
    return text


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; return the exit status.

    Raises:
        StartupError: An address or a file cannot be used.
    """
    if options.ca is None:
        check_grpc(options.server, "a draft service")

    from dynatree.common.logs import announce_ready, configure_logging
    from dynatree.gateway.serve_gateway import GatewaySettings, serve
    from dynatree.serving.security import SecuritySettings

    configure_logging(options.log_format, options.log_level)
    names = ("ca", "cert", "key", "insecure", "resume", "timeout")
    settings = GatewaySettings(
        options.server,
        options.listen,
        SecuritySettings(options.tls_cert, options.tls_key, insecure=options.insecure),
        {name: getattr(options, name) for name in names},
        options.cors,
        options.grace,
        options.served_model_name,
        options.api_key,
        options.allow_host,
        Limits(connections=options.max_connections),
    )
    asyncio.run(serve(settings, lambda address: announce_ready("gateway", f"{options.server} as HTTP on {address}")))
    return 0
