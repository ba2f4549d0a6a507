"""Options that both services have, and their types; imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynatree.cli.arguments import DTYPES, device, not_negative, positive, threads
from dynatree.common.address import check_address, split_addresses
from dynatree.common.limits import (
    IDLE_SECONDS,
    MAX_FIXED_ROWS,
    MAX_QUEUED,
    MAX_SESSIONS,
    MAX_TREE_NODES,
    MOST_TREE_NODES,
)


def seconds(text: str) -> float:
    """An argparse type: a finite number of seconds, not negative; thirty years at most."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return min(number, 1e9)  # in gRPC's arithmetic a deadline a few times as far has passed already


def some_seconds(text: str) -> float:
    """An argparse type: as `seconds`, but more than 0."""
    if (number := seconds(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no time at all")
    return number


def context(text: str) -> int:
    """An argparse type: tokens that hold a prompt and a completion, at least one of each."""
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} tokens hold no prompt and completion; expected at least 2")
    return number


def fixed_rows(text: str) -> tuple[int, ...] | None:
    """An argparse type: numbers of rows, comma-separated; `off` for none, `auto` (None) for the device's default."""
    if text == "auto":
        return None
    if text == "off":
        return ()
    numbers = tuple(sorted({int(each) for each in text.split(",")}))
    if numbers[0] < 1 or numbers[-1] > MAX_FIXED_ROWS:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 1 to {MAX_FIXED_ROWS}, auto or off")
    return numbers


def tree_nodes(text: str) -> int:
    """An argparse type: nodes of a tree."""
    number = positive(text)
    if number > MOST_TREE_NODES:
        raise argparse.ArgumentTypeError(f"{text}: at most {MOST_TREE_NODES} nodes can be served")
    return number


# argparse names the types in its messages
context.__name__ = tree_nodes.__name__ = positive.__name__
fixed_rows.__name__ = f"{positive.__name__}s"
seconds.__name__ = some_seconds.__name__ = "number of seconds"


def network_address(text: str) -> str:
    """An argparse type: `host:port` or `unix:PATH`."""
    try:
        check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def network_addresses(text: str) -> str:
    """An argparse type: addresses, comma-separated."""
    try:
        split_addresses(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def metrics_address(text: str) -> str:
    """An argparse type: `host:port`."""
    if text.startswith("unix:"):
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return network_address(text)


def add_capacity_arguments(parser: argparse.ArgumentParser) -> None:
    """How many completions a service runs, and how many wait."""
    parser.add_argument(
        "--max-sessions",
        type=positive,
        default=MAX_SESSIONS,
        metavar="N",
        help="completions at once; more wait in the queue (default: %(default)s)",
    )
    parser.add_argument(
        "--queue",
        type=not_negative,
        default=MAX_QUEUED,
        metavar="N",
        help="completions that may wait; one more is refused (default: %(default)s)",
    )


def add_context_argument(parser: argparse.ArgumentParser) -> None:
    """The longest sequence."""
    parser.add_argument(
        "--max-context",
        type=context,
        metavar="N",
        help="longest prompt and completion together, in tokens (default, and at most: the model's own); beyond the "
        "draft service's, completions go on to the verify service's without drafting",
    )


def add_tree_argument(parser: argparse.ArgumentParser) -> None:
    """The largest tree."""
    parser.add_argument(
        "--max-tree-nodes",
        type=tree_nodes,
        default=MAX_TREE_NODES,
        metavar="N",
        help="of the largest tree; the lower of both services' numbers counts (default: %(default)s)",
    )


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """How a process that serves writes its log, and how it ends."""
    parser.add_argument(
        "--grace", type=seconds, default=10.0, metavar="SECONDS", help="time for open calls at shutdown (default: 10)"
    )
    parser.add_argument(
        "--log-format", choices=["text", "json"], default="text", help="of the lines on standard error (default: text)"
    )


def add_service_arguments(parser: argparse.ArgumentParser, default_port: int) -> None:
    """The options that both services have."""
    parser.add_argument(
        "--listen",
        type=network_address,
        default=f"localhost:{default_port}",
        metavar="ADDR",
        help="host:port or unix:PATH; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--device", type=device, default="auto", help="torch device, or auto for a GPU if any (default: auto)"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", *DTYPES], help="of the weights (default: the checkpoint's own)"
    )
    parser.add_argument(
        "--threads",
        type=threads,
        metavar="N",
        help="CPU threads of the model (default: torch's choice, of a draft the fewest that are as fast)",
    )
    add_tree_argument(parser)
    parser.add_argument(
        "--fixed-rows",
        type=fixed_rows,
        default="auto",
        metavar="auto|off|N[,N]",
        help="pad forwards to so many rows, and capture them as CUDA graphs on a GPU; one number makes a "
        "GPU's tokens independent of tree and batch (default: auto, on a GPU one number by its costs, on a CPU off)",
    )
    add_capacity_arguments(parser)
    parser.add_argument(
        "--kv-tokens",
        type=positive,
        metavar="N",
        help="tokens whose keys and values are kept, over all sessions (default: what the sessions can need, as far "
        "as the memory goes)",
    )
    add_context_argument(parser)
    parser.add_argument(
        "--idle-timeout",
        type=some_seconds,
        default=IDLE_SECONDS,
        metavar="SECONDS",
        help="how long a session may wait for a peer that sends or reads nothing (default: %(default)g)",
    )
    parser.add_argument(
        "--prefix-cache",
        choices=["on", "off"],
        default="on",
        help="reuse the keys and values of prompts that begin alike, of one principal (default: on)",
    )
    add_process_arguments(parser)
    parser.add_argument(
        "--metrics", type=metrics_address, metavar="HOST:PORT", help="answer GET /metrics there, for Prometheus"
    )
    parser.add_argument(
        "--traces", metavar="URL", help="send traces there over OTLP/HTTP, such as http://localhost:4318 (extra otel)"
    )
    add_security_arguments(parser)


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    """Who may call a service, and over what."""
    group = parser.add_argument_group("security", "certificates, keys and tokens are read anew when they are replaced")
    for option, text in (
        ("--tls-cert", "certificate chain of the service, PEM: connections are encrypted"),
        ("--tls-key", "its private key, PEM"),
        ("--client-ca", "authorities whose client certificates are demanded, PEM"),
        ("--token-file", "lines principal:token; a call must show one of the tokens"),
    ):
        group.add_argument(option, type=Path, metavar="FILE", help=text)
    group.add_argument(
        "--insecure",
        action="store_true",
        help="plain connections with other machines too; without it they need TLS",
    )
    group.add_argument(
        "--reflection",
        choices=["on", "off"],
        default="on",
        help="describe the services to whoever asks, as grpcurl does (default: on)",
    )
