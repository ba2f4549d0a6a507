"""Options that both services have, and their types; imports nothing that takes time."""

from __future__ import annotations

import argparse

from dynatree.cli.arguments import DTYPES, positive
from dynatree.common.address import check_address


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
    except ValueError as error:
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
