"""Options that both services share, and their types; imports nothing slow."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dynatree.cli.arguments import device, not_negative, positive, threads
from dynatree.cli.parser import group
from dynatree.common.limits import (
    IDLE_SECONDS,
    MAX_FIXED_ROWS,
    MAX_QUEUED,
    MAX_SESSIONS,
    MAX_TREE_NODES,
    MOST_HISTORY_TOKENS,
    MOST_TREE_NODES,
)
from dynatree.engine.settings import DTYPES, WEIGHTS
from dynatree.serving.address import check_address, split_addresses


def seconds(text: str) -> float:
    """An argparse type: a finite, non-negative number of seconds, reduced to at most thirty years."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of seconds of at least 0")
    return min(number, 1e9)  # a deadline a few times as far overflows in gRPC, which takes it as passed


def some_seconds(text: str) -> float:
    """An argparse type: a number of seconds above 0, otherwise like `seconds`."""
    if (number := seconds(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text} is too short; expected more than 0 seconds")
    return number


def context(text: str) -> int:
    """An argparse type: a context length of at least 2 tokens, one for the prompt and one for the completion."""
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} tokens cannot hold a prompt and a completion; expected at least 2")
    return number


def fixed_rows(text: str) -> tuple[int, ...] | None:
    """An argparse type: comma-separated numbers of rows, `off` (none), or `auto` (None: the device's default)."""
    if text == "auto":
        return None
    if text == "off":
        return ()
    numbers = tuple(sorted({int(each) for each in text.split(",")}))
    if numbers[0] < 1 or numbers[-1] > MAX_FIXED_ROWS:
        raise argparse.ArgumentTypeError(
            f"{text} is out of range; expected numbers from 1 to {MAX_FIXED_ROWS}, auto or off"
        )
    return numbers


def tree_nodes(text: str) -> int:
    """An argparse type: the number of nodes of a tree."""
    number = positive(text)
    if number > MOST_TREE_NODES:
        raise argparse.ArgumentTypeError(f"{text} is too large; expected at most {MOST_TREE_NODES} nodes")
    return number


def history_tokens(text: str) -> int:
    """An argparse type: the number of tokens that histories may hold."""
    number = not_negative(text)
    if number > MOST_HISTORY_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} is too large; expected at most {MOST_HISTORY_TOKENS} tokens")
    return number


# argparse names the types in its messages.
context.__name__ = tree_nodes.__name__ = history_tokens.__name__ = positive.__name__
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
    """An argparse type: comma-separated addresses."""
    try:
        split_addresses(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def port_number(text: str) -> int:
    """An argparse type: a port number."""
    number = not_negative(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; expected 0 to 65535")
    return number


port_number.__name__ = positive.__name__


def metrics_address(text: str) -> str:
    """An argparse type: `host:port`."""
    if text.startswith("unix:"):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return network_address(text)


GROUPS = ("model", "memory", "batching", "network", "security", "operation")


class _Host(argparse.Action):
    """An action that replaces the host of `--listen`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Replace the host."""
        host = f"[{values}]" if ":" in values and not values.startswith("[") else values
        _listen(self, namespace, f"{host}:{namespace.listen.rpartition(':')[2]}")


class _Port(argparse.Action):
    """An action that replaces the port of `--listen`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Replace the port."""
        _listen(self, namespace, f"{namespace.listen.rpartition(':')[0]}:{values}")


class _Listen(argparse.Action):
    """An action that sets the whole address."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Set the address."""
        _listen(self, namespace, values)


def _listen(action: argparse.Action, namespace: argparse.Namespace, address: str) -> None:
    """Set the listening address.

    Raises:
        argparse.ArgumentError: `--listen` and its parts are mixed, or the address is invalid.
    """
    option = action.option_strings[0]
    before = getattr(namespace, "listen_by", option)
    if (before == "--listen") != (option == "--listen"):
        raise argparse.ArgumentError(action, f"not allowed with {before}")
    try:
        check_address(address)
    except ValueError as error:
        raise argparse.ArgumentError(action, str(error)) from None
    namespace.listen, namespace.listen_by = address, option


def add_listen_arguments(parser: argparse.ArgumentParser, default: str, *also: str, what: str) -> None:
    """Add the options for the listening address: `--listen`, with `also` as further names, `--host` and `--port`."""
    network = group(parser, "network")
    network.add_argument(
        "--listen",
        *also,
        dest="listen",
        action=_Listen,
        type=network_address,
        default=default,
        metavar="ADDR",
        help=f"{what} address: host:port or unix:PATH; port 0 takes a free port (default: %(default)s)",
    )
    host, _, port = default.rpartition(":")
    network.add_argument(
        "--host",
        dest="listen",
        action=_Host,
        default=argparse.SUPPRESS,
        metavar="HOST",
        help=f"host of --listen (default: {host})",
    )
    network.add_argument(
        "--port",
        dest="listen",
        action=_Port,
        default=argparse.SUPPRESS,
        type=port_number,
        metavar="PORT",
        help=f"port of --listen (default: {port})",
    )


def add_groups(parser: argparse.ArgumentParser, *others: str) -> None:
    """Create the groups of a service's options in their order; `others` come last."""
    for title in (*GROUPS, *others):
        group(parser, title)


def add_precision_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for a model's device and number formats."""
    model = group(parser, "model")
    model.add_argument(
        "--device",
        type=device,
        default="auto",
        help="torch device; auto is a GPU if there is one (default: auto). GPUs are experimental: not yet measured on "
        "a GPU",
    )
    model.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES],
        help="data type of the weights (default: auto, the checkpoint's)",
    )
    model.add_argument(
        "--weights",
        default="auto",
        choices=["auto", *WEIGHTS],
        help="round the weights of linear layers to 8 or 4 bits as they are loaded (default: auto, as the checkpoint "
        "has them)",
    )


def add_draft_weights(group: argparse._ActionsContainer) -> None:
    """Add the option for the draft model's weights to a command that runs both models."""
    group.add_argument(
        "--draft-weights", choices=["auto", *WEIGHTS], help="--weights of the draft model (default: --weights)"
    )


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for running a model: device, number formats, threads and fixed rows."""
    add_precision_arguments(parser)
    model = group(parser, "model")
    model.add_argument(
        "--threads",
        type=threads,
        metavar="N",
        help="CPU threads of the model (default: torch's choice; for a draft model, the fewest that are as fast)",
    )
    model.add_argument(
        "--fixed-rows",
        type=fixed_rows,
        default="auto",
        metavar="auto|off|N[,N]",
        help="numbers of rows to pad forward passes to; on a GPU they are captured as CUDA graphs, and a single number "
        "makes tokens independent of tree and batch (default: auto, one measured number on a GPU, off on a CPU)",
    )


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the context length, the KV cache and the prefix cache."""
    memory = group(parser, "memory")
    memory.add_argument(
        "--max-context",
        type=context,
        metavar="N",
        help="most tokens of a prompt and its completion together (default and maximum: the model's context length); "
        "beyond the draft service's limit, completions continue without drafting",
    )
    memory.add_argument(
        "--kv-tokens",
        type=positive,
        metavar="N",
        help="size of the KV cache of all sessions, in tokens (default: the most that they can need, as far as memory "
        "allows)",
    )
    memory.add_argument(
        "--prefix-cache",
        choices=["on", "off"],
        default="on",
        help="reuse the keys and values of common prompt prefixes, within each principal (default: on)",
    )


def add_batching_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of sessions, the queue and the size of trees."""
    batching = group(parser, "batching")
    batching.add_argument(
        "--max-sessions",
        type=positive,
        default=MAX_SESSIONS,
        metavar="N",
        help="most concurrent completions; further ones wait in the queue (default: %(default)s)",
    )
    batching.add_argument(
        "--queue",
        type=not_negative,
        default=MAX_QUEUED,
        metavar="N",
        help="most waiting completions; further ones are refused (default: %(default)s)",
    )
    batching.add_argument(
        "--max-tree-nodes",
        type=tree_nodes,
        default=MAX_TREE_NODES,
        metavar="N",
        help="most nodes of a tree; the smaller limit of the two services applies (default: %(default)s)",
    )


def add_operation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the log and the shutdown of a service."""
    operation = group(parser, "operation")
    operation.add_argument(
        "--grace",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="time for open calls to finish at shutdown (default: %(default)g)",
    )
    operation.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="format of the log lines on standard error (default: text)",
    )
    operation.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="lowest level that is logged (default: info)",
    )


def add_telemetry_arguments(parser: argparse.ArgumentParser, metrics: str) -> None:
    """Add the options for metrics and traces; `metrics` is the help of `--metrics`."""
    operation = group(parser, "operation")
    operation.add_argument("--metrics", type=metrics_address, metavar="HOST:PORT", help=metrics)
    operation.add_argument(
        "--traces",
        metavar="URL",
        help="OTLP/HTTP collector to send traces to, such as http://localhost:4318; needs the extra otel",
    )


def add_idle_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for the time that a session waits for a silent peer."""
    group(parser, "network").add_argument(
        "--idle-timeout",
        type=some_seconds,
        default=IDLE_SECONDS,
        metavar="SECONDS",
        help="how long a session waits for a peer that sends or reads nothing (default: %(default)g)",
    )


def add_service_arguments(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Add the options that both services share."""
    add_hardware_arguments(parser)
    add_memory_arguments(parser)
    add_batching_arguments(parser)
    add_listen_arguments(parser, f"localhost:{default_port}", what="gRPC")
    add_idle_argument(parser)
    add_operation_arguments(parser)
    add_telemetry_arguments(parser, "serve Prometheus metrics at /metrics on this address")
    add_security_arguments(parser)


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for TLS, tokens and reflection."""
    security = group(parser, "security")
    security.description = "replaced certificates, keys and tokens are reloaded"
    for option, text in (
        ("--tls-cert", "PEM file of the service's certificate chain; enables TLS"),
        ("--tls-key", "PEM file of the private key of --tls-cert"),
        ("--client-ca", "PEM file of the authorities that may sign clients' certificates, which are then required"),
        ("--token-file", "file of lines principal:token; calls must send one of the tokens"),
    ):
        security.add_argument(option, type=Path, metavar="FILE", help=text)
    security.add_argument(
        "--insecure",
        action="store_true",
        help="allow unencrypted connections with other machines, which otherwise require TLS",
    )
    security.add_argument(
        "--reflection",
        choices=["on", "off"],
        default="on",
        help="describe the services to any client over gRPC reflection, as grpcurl needs (default: on)",
    )
