"""`dynatree serve`: a verify service, a draft service and the gateway on this machine, by one command."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynatree.cli.arguments import DTYPES, device
from dynatree.cli.checks import check_serve
from dynatree.cli.draft import add_default_policy_arguments
from dynatree.cli.gateway import add_http_arguments
from dynatree.cli.service_arguments import (
    add_capacity_arguments,
    add_context_argument,
    add_tree_argument,
    network_address,
)
from dynatree.cli.verify import add_placement_arguments
from dynatree.common.limits import ALL_LAYERS

if TYPE_CHECKING:
    from dynatree.cli.service_pair import ServicePair

START_SECONDS = 3600.0  # for both models to load; a target that is streamed is first written to the layer cache
LOOK_SECONDS = 0.5  # between two looks whether the services run
_CURL_PROMPT = "Once upon a time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatree serve`."""
    for role, what in (("target", "large model, whose text is produced"), ("draft", "small model, which only guesses")):
        parser.add_argument(
            f"--{role}-model", required=True, metavar="embedded|PATH|HUB_ID", help=f"the {what}; embedded: shipped"
        )
    parser.add_argument(
        "--grpc",
        type=network_address,
        metavar="ADDR",
        help="where the draft service is served too, without TLS: host:port or unix:PATH (default: nowhere)",
    )
    parser.add_argument(
        "--device",
        type=device,
        default="auto",
        help="torch device of both models, or auto for a GPU if any (default: auto)",
    )
    parser.add_argument(
        "--draft-device", type=device, metavar="DEVICE", help="of the draft model, where it has one of its own"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", *DTYPES], help="of the weights (default: the checkpoints' own)"
    )
    add_default_policy_arguments(parser)
    add_capacity_arguments(parser)
    add_context_argument(parser)
    add_tree_argument(parser)
    add_placement_arguments(parser)
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="lines principal:token; a request must show one of the tokens as its API key",
    )
    add_http_arguments(parser)
    parser.set_defaults(fixed_rows=None)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal, or until a service ends.

    Raises:
        SystemExit: A service did not start, or ended.
        StartupError: The command line is wrong in a way that needs no model to tell.
    """
    check_serve(options)

    from dynatree.cli.service_pair import Arrangement, service_pair
    from dynatree.common.logs import announce, configure_logging
    from dynatree.common.security import SecuritySettings
    from dynatree.gateway.serve_gateway import GatewaySettings, serve

    configure_logging(options.log_format)
    arrangement = Arrangement(options.grpc, _verify_options(options), _draft_options(options), shown=True)
    security = SecuritySettings(options.tls_cert, options.tls_key, insecure=options.insecure)
    with service_pair(options.target_model, options.draft_model, _options(options), START_SECONDS, arrangement) as pair:
        settings = GatewaySettings(
            pair.address,
            options.listen,
            security,
            {"timeout": options.timeout},
            options.cors,
            options.grace,
            options.served_model_name,
            options.api_key,
        )
        serving = serve(settings, lambda url: announce(_welcome(url, pair, options)))
        ended = asyncio.run(_until_one_ends(serving, pair))
    if ended:
        raise SystemExit(f"the {ended} service has ended; everything was stopped")
    return 0


async def _until_one_ends(serving: Coroutine[Any, Any, None], pair: ServicePair) -> str:
    """The name of the service that has ended before the gateway did; "" where none has."""
    gateway = asyncio.ensure_future(serving)
    while not gateway.done():
        await asyncio.wait([gateway], timeout=LOOK_SECONDS)
        if not gateway.done() and (ended := pair.ended()):
            signal.raise_signal(signal.SIGTERM)  # as if somebody stopped it: open requests are told
            await gateway
            return ended
    await gateway
    return ""


def _options(options: argparse.Namespace) -> list[str]:
    """What both services are told."""
    told = ["--max-sessions", str(options.max_sessions), "--queue", str(options.queue)]
    told += ["--dtype", options.dtype, "--device", options.device, "--log-format", options.log_format]
    told += ["--grace", str(options.grace), "--max-tree-nodes", str(options.max_tree_nodes)]
    return told if options.max_context is None else [*told, "--max-context", str(options.max_context)]


def _verify_options(options: argparse.Namespace) -> list[str]:
    """What the verify service is told besides."""
    layers = {None: "auto", ALL_LAYERS: "all"}.get(options.resident_layers, str(options.resident_layers))
    told = ["--resident-layers", layers, "--tensor-parallel", str(options.tensor_parallel)]
    return told if options.layer_cache is None else [*told, "--layer-cache", str(options.layer_cache)]


def _draft_options(options: argparse.Namespace) -> list[str]:
    """What the draft service is told besides."""
    told = ["--policy", options.policy]
    for name, value in options.policy_settings.items():
        values = value if isinstance(value, tuple) else (value,)
        told += ["--set", f"{name}={','.join(map(str, values))}"]
    if options.draft_device is not None:
        told += ["--device", options.draft_device]
    if options.token_file is not None:
        told += ["--token-file", str(options.token_file)]
    return [*told, "--insecure"] if options.insecure else told


def _welcome(url: str, pair: ServicePair, options: argparse.Namespace) -> str:
    """Where everything is, and a command line to try it with."""
    lines = ["", f"  HTTP   {url}/v1, and a live page at {url}/"]
    if options.grpc is not None:
        lines.append(f"  gRPC   {options.grpc}")
    body = json.dumps({"prompt": _CURL_PROMPT, "max_tokens": 32, "temperature": 0})
    words = ["curl", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        lines = ["", f"  HTTP   unix:{path}"]
        words[1:2] = ["--unix-socket", path, "http://localhost/v1/completions"]
    if options.token_file is not None or options.api_key is not None:
        words += ["-H", "Authorization: Bearer TOKEN"]
    lines += [f"  Try    {shlex.join(words)}", "  Stop   Ctrl-C", ""]
    return "\n".join(lines)
