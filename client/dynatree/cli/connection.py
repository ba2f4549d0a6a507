"""The options of a command's connection to a draft service, and the client made from them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynatree.cli.arguments import add_channel_arguments
from dynatree.cli.probe import failure

if TYPE_CHECKING:
    from dynatree.client import Client


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the server's address, TLS, the token and the timeouts."""
    group = add_channel_arguments(parser, "connection")
    group.add_argument(
        "--server",
        metavar="ADDR[,ADDR...]",
        default="localhost:50051",
        help="draft service: host:port, unix:PATH or dns:///name:port; several are used in turn (default: %(default)s)",
    )
    group.add_argument(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        help="time to wait for a server that is starting (default: fail at once if no server listens)",
    )
    group.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="time limit of a request (default: none)")
    group.add_argument("--token-file", metavar="FILE", help="file with only the token to send, without its principal")
    group.add_argument(
        "--insecure", action="store_true", help="send the token to other machines even over an unencrypted connection"
    )
    group.add_argument(
        "--no-resume",
        dest="resume",
        action="store_false",
        help="fail if the server is lost, instead of resuming on another server or when it is back",
    )


def connected(options: argparse.Namespace) -> Client:
    """Return the client of the parsed options. Without `--wait`, fail at once if no server listens at the address.

    Raises:
        SystemExit: The address, a file or the server cannot be used.
    """
    settings = _settings(options)

    from dynatree.client import Client

    if options.wait is not None:
        settings["connect_timeout"] = options.wait
    try:
        client = Client(options.server, timeout=options.timeout, **settings)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    except OSError as error:
        raise SystemExit(f"cannot read {error.filename}: {error.strerror}") from None
    if options.wait is None and (reason := failure(options.server, plain=options.ca is None)):
        client.close()
        raise SystemExit(f"the server is unavailable: no draft service answers at {reason}")
    return client


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `dynatree.client.Client` except the timeouts.

    Raises:
        SystemExit: The token cannot be read.
    """
    token = None
    if options.token_file is not None:
        try:
            token = Path(options.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise SystemExit(f"cannot read {options.token_file}: {reason}") from None
        if len(token.split()) != 1:
            raise SystemExit(f"{options.token_file} must contain exactly one token and nothing else")
    names = ("ca", "cert", "key", "insecure", "resume")
    return {"token": token, **{name: getattr(options, name) for name in names}}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
