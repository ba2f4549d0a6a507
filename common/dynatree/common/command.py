"""What the commands `dynatree verify` and `dynatree draft` share: options, and running until a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from dynatree.common import embedded
from dynatree.common.engine.loading import DTYPES, ModelSettings
from dynatree.common.errors import StartupError
from dynatree.common.server import check_address

MAX_TREE_NODES = 256


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


positive.__name__ = "whole number"  # argparse names the type in its message


def seconds(text: str) -> float:
    """An argparse type: a finite number of seconds, not negative; thirty years at most."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return min(number, 1e9)  # in gRPC's arithmetic a deadline a few times as far has passed already


def network_address(text: str) -> str:
    """An argparse type: `host:port` or `unix:PATH`."""
    try:
        check_address(text)
    except StartupError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_service_arguments(parser: argparse.ArgumentParser, default_port: int) -> None:
    """The options that both services have."""
    parser.add_argument(
        "--listen",
        type=network_address,
        default=f"localhost:{default_port}",
        metavar="ADDR",
        help="host:port or unix:PATH; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="torch device, or auto for a GPU if any (default: auto)")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="default: the checkpoint's own")
    parser.add_argument("--threads", type=positive, help="CPU threads of the model (default: torch's choice)")
    parser.add_argument(
        "--static-shapes",
        action="store_true",
        help="pad forwards to a few sizes, and capture them as CUDA graphs on a GPU (on a CPU: slower)",
    )
    parser.add_argument(
        "--max-sessions", type=positive, default=4, help="completions at once; each has its own KV cache (default: 4)"
    )
    parser.add_argument(
        "--grace", type=seconds, default=10.0, metavar="SECONDS", help="time for open calls at shutdown (default: 10)"
    )


def model_settings(
    options: argparse.Namespace, model: str, embedded_path: Path, speculative_slots: int, **others: Any
) -> ModelSettings:
    """Settings from parsed options and `others`; the name "embedded" means the shipped model at `embedded_path`."""
    if options.threads:
        torch.set_num_threads(options.threads)
    return ModelSettings(
        model=str(embedded_path) if model == embedded.NAME else model,
        device=options.device,
        dtype=options.dtype,
        sessions=options.max_sessions,
        speculative_slots=speculative_slots,
        static_shapes=options.static_shapes,
        **others,
    )


def run_service(serve: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a service to its end; a failure to start is one line and exit status 1."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every try to reach the hub

    try:
        asyncio.run(serve())
    except StartupError as error:
        raise SystemExit(str(error)) from error
    return 0


def announce(text: str) -> None:
    """Tell whoever started the service where it is, on standard error."""
    print(text, file=sys.stderr, flush=True)
