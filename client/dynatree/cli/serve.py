"""`dynatree serve`: runs a verify service, a draft service and the gateway on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynatree.cli.arguments import device
from dynatree.cli.checks import check_serve
from dynatree.cli.draft import add_drafting_arguments, add_record_arguments, add_request_arguments
from dynatree.cli.gateway import add_http_arguments
from dynatree.cli.parser import group
from dynatree.cli.service_arguments import (
    add_batching_arguments,
    add_draft_weights,
    add_groups,
    add_hardware_arguments,
    add_idle_argument,
    add_memory_arguments,
    add_operation_arguments,
    add_telemetry_arguments,
    network_address,
)
from dynatree.cli.verify import add_batch_argument, add_placement_arguments
from dynatree.common.model_info import NO_MODEL
from dynatree.gateway.limits import Limits

if TYPE_CHECKING:
    from dynatree.cli.service_pair import ServicePair
    from dynatree.draft.settings import DraftSettings
    from dynatree.gateway.serve_gateway import GatewaySettings
    from dynatree.serving.operation import OperationSettings
    from dynatree.verify.settings import VerifySettings

log = logging.getLogger("dynatree serve")

EXAMPLE = "dynatree serve --target-model ~/models/llama-8b --draft-model ~/models/llama-1b --port 8000"
LOOK_SECONDS = 0.5  # between two checks that the services run
_CURL_PROMPT = "Once upon a time"
_CURL_CHAT = "What is a token tree?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree serve`."""
    add_groups(parser)
    model = group(parser, "model")
    model.add_argument(
        "--target-model",
        required=True,
        metavar="embedded|PATH|HUB_ID",
        help="large model, whose output is produced; embedded: the bundled one",
    )
    model.add_argument(
        "--draft-model",
        default=NO_MODEL,
        metavar="embedded|PATH|HUB_ID|self:int8|self:int4|none",
        help="small model, which drafts; self:int4, self:int8: the target's own copy, rounded; none: draft from "
        "n-grams of the text alone (default: none)",
    )
    add_hardware_arguments(parser)
    model.add_argument(
        "--draft-device", type=device, metavar="DEVICE", help="torch device of the draft model (default: --device)"
    )
    add_draft_weights(model)
    add_drafting_arguments(parser)
    add_memory_arguments(parser)
    add_placement_arguments(parser)
    add_batching_arguments(parser)
    add_batch_argument(parser)
    add_http_arguments(parser)
    group(parser, "network").add_argument(
        "--grpc",
        type=network_address,
        metavar="ADDR",
        help="additional gRPC address of the draft service, without TLS: host:port or unix:PATH (default: none)",
    )
    add_idle_argument(parser)
    add_request_arguments(parser)
    add_record_arguments(parser)
    group(parser, "security").add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file of lines principal:token; requests must send one of the tokens as their API key",
    )
    add_operation_arguments(parser)
    add_telemetry_arguments(
        parser,
        "serve Prometheus metrics of the draft service at /metrics on this address, and of the verify service on the "
        "next port; the gateway serves its own on the HTTP address",
    )


def pair_settings(target_model: str, draft_model: str, **options: Any) -> tuple[VerifySettings, DraftSettings]:
    """Return the settings of both services for these models, with the options of `dynatree serve` by their names."""
    from dynatree.cli.settings import serve_settings

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parsed = parser.parse_args(["--target-model", target_model, "--draft-model", draft_model])
    return serve_settings(argparse.Namespace(**vars(parsed) | options))


def run(options: argparse.Namespace) -> int:
    """Serve until a signal or until a service ends; return the exit status.

    Raises:
        SystemExit: A service did not start, or has ended.
        StartupError: The command line is wrong, as found before the models load.
    """
    verify, draft = check_serve(options)

    from dynatree.cli.service_pair import starting_pair
    from dynatree.common.logs import configure_logging
    from dynatree.gateway.serve_gateway import GatewaySettings
    from dynatree.serving.security import SecuritySettings

    configure_logging(options.log_format, options.log_level)
    security = SecuritySettings(options.tls_cert, options.tls_key, insecure=options.insecure)
    with starting_pair(verify, draft, shown=True) as pair:
        settings = GatewaySettings(
            pair.address,
            options.listen,
            security,
            {"timeout": options.timeout},
            options.cors,
            options.grace,
            options.served_model_name,
            options.api_key,
            options.allow_host,
            Limits(connections=options.max_connections),
        )
        return asyncio.run(_Serving(settings, draft.operation, pair).run())


class _Serving:
    """The gateway, which answers while the models still load, and the two services behind it.

    Args:
        settings: Settings of the gateway.
        draft: Operational settings of the draft service; its address is empty if it listens on a private socket.
        pair: The services, which may still be starting.
    """

    def __init__(self, settings: GatewaySettings, draft: OperationSettings, pair: ServicePair) -> None:
        self._settings = settings
        self._draft = draft
        self._pair = pair
        self._loading = True
        self._url = ""
        self._stopped_by: int | None = None  # a signal that arrived before the gateway handled signals

    async def run(self) -> int:
        """Serve until a signal; return the exit status.

        Raises:
            SystemExit: A service did not start, or has ended.
        """
        from dynatree.common.shutdown import on_hangup, on_shutdown

        # the gateway replaces the handlers of the first
        with on_shutdown(self._stop_later), on_hangup(self._reload):
            return await self._serve()

    async def _serve(self) -> int:
        from dynatree.gateway.serve_gateway import serve

        gateway = asyncio.ensure_future(serve(self._settings, self._opened, lambda: self._loading))
        watching = asyncio.ensure_future(self._watch())
        await asyncio.wait([gateway, watching], return_when=asyncio.FIRST_COMPLETED)
        if not gateway.done():  # a service has ended
            signal.raise_signal(signal.SIGTERM)  # stops the gateway in order: open requests receive their error
            await gateway
            raise SystemExit(await watching)
        watching.cancel()
        number = await gateway
        return 128 + number if self._loading and number else 0

    def _opened(self, url: str) -> None:
        self._url = url
        log.setLevel(self._draft.log_level.upper())
        log.info("HTTP is open on %s; the models are loading", url)
        if self._stopped_by is not None:
            signal.raise_signal(self._stopped_by)

    def _stop_later(self, number: int) -> None:
        self._stopped_by = number

    def _reload(self) -> None:
        """Have the draft service load its model again."""
        if self._loading:
            log.warning("SIGHUP is ignored while the models load")
        else:
            with suppress(ProcessLookupError):
                os.kill(self._pair.draft_process, signal.SIGHUP)

    async def _watch(self) -> str:
        """Announce when the services are ready; return the reason when one of them has ended."""
        from dynatree.common.logs import announce

        while True:
            if self._loading and self._url and await asyncio.to_thread(self._pair.serves):
                self._loading = False
                log.info("serving HTTP on %s", self._url)
                if self._draft.log_format == "text":
                    guarded = self._draft.security.tokens is not None  # the model is then told only to a known token
                    chats = not guarded and (await asyncio.to_thread(self._pair.client.model_info)).chat_template
                    tokens = guarded or self._settings.api_key is not None
                    announce(_welcome(self._url, self._draft.address, tokens=tokens, chats=chats))
            if ended := self._pair.ended():
                if self._pair.was_stopped(ended):  # Ctrl-C reaches the services too, and they may end first
                    await asyncio.sleep(self._draft.grace + LOOK_SECONDS)
                reason = await asyncio.to_thread(self._pair.reason, ended)
                return reason if self._loading else f"{reason}; all services were stopped"
            await asyncio.sleep(LOOK_SECONDS)


def _welcome(url: str, grpc: str, *, tokens: bool, chats: bool) -> str:
    """Return the message with the addresses, and with a command line to try them."""
    lines = ["", f"  HTTP   {url}/v1, and a live page at {url}/"]
    if grpc:
        lines.append(f"  gRPC   {grpc}")
    path = "/v1/chat/completions" if chats else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": _CURL_CHAT}]} if chats else {"prompt": _CURL_PROMPT}
    body = json.dumps({**prompt, "max_tokens": 32, "temperature": 0})
    words = ["curl", f"{url}{path}", "-H", "Content-Type: application/json", "-d", body]
    if url.startswith("unix:"):
        socket = url.removeprefix("unix:")
        lines = ["", f"  HTTP   unix:{socket}"]
        words[1:2] = ["--unix-socket", socket, f"http://localhost{path}"]
    if tokens:
        words += ["-H", "Authorization: Bearer TOKEN"]
    lines += [f"  Try    {shlex.join(words)}", "  Stop   Ctrl-C", ""]
    return "\n".join(lines)
