"""`dynatree chat`: a conversation in the terminal, or with the lines of a pipe as the user's turns."""

from __future__ import annotations

import argparse
import io
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dynatree.cli.connection import add_connection_arguments, connected
from dynatree.cli.interrupts import raise_interrupts
from dynatree.cli.terminal import print_utf8, visible

if TYPE_CHECKING:
    from dynatree.client import Client, Message

EXAMPLE = 'dynatree chat --server localhost:50051 --system "Answer in one sentence."'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree chat`."""
    parser.add_argument("--system", metavar="TEXT", help="system message that begins the conversation")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: until the model ends it)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", default=0.0, help="temperature of sampling; 0 is greedy (default: 0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens whose total probability is P (default: all tokens)",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="seed that determines the answers (default: random)")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_variables,
        metavar="JSON",
        help="further variables of the chat template, as in '{\"enable_thinking\": false}'",
    )
    add_connection_arguments(parser)


def _variables(text: str) -> dict[str, Any]:
    """An argparse type: an object in JSON."""
    try:
        variables = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return variables


def run(options: argparse.Namespace) -> int:
    """Hold the conversation until the end of the input.

    At a terminal, an interrupt ends the answer but not the conversation, which keeps the part received.

    Raises:
        DynaTreeError: A request failed. At a terminal, the error is printed and the conversation continues.
        SystemExit: The address or the model cannot be used.
    """
    raise_interrupts()
    print_utf8()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    with connected(options) as client:
        info = client.model_info()
        if not info.chat_template:
            raise SystemExit(
                f"model {info.target.name} has no chat template; use `dynatree generate` to complete a text"
            )
        messages: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
        if not sys.stdin.isatty():
            for line in sys.stdin:
                if line.strip():
                    _turn(client, messages, line.rstrip("\n"), options)
            return 0
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` line editing and a history
        print(f"{info.target.name}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
        _converse(client, messages, options)
    return 0


def _converse(client: Client, messages: list[Message], options: argparse.Namespace) -> None:
    """Take turns at a terminal until the end of the input."""
    from dynatree.client import DynaTreeError

    while True:
        try:
            line = input("> ")
            if line.strip():
                _turn(client, messages, line, options)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except DynaTreeError as error:
            print(f"dynatree: error: {error}", file=sys.stderr)


def _turn(client: Client, messages: list[Message], said: str, options: argparse.Namespace) -> None:
    """Stream the answer to one user message to standard output; add both to the conversation unless it fails."""
    asked: list[Message] = [*messages, {"role": "user", "content": said}]
    names = ("max_new_tokens", "temperature", "top_p", "seed", "chat_template_kwargs")
    shown = visible if sys.stdout.isatty() else str
    with client.stream(asked, **{name: getattr(options, name) for name in names}) as stream:
        try:
            for chunk in stream:
                print(shown(chunk.text), end="", flush=True)
        except KeyboardInterrupt:
            messages[:] = [*asked, {"role": "assistant", "content": stream.text}]
            raise
        except BaseException:
            if stream.text:
                print(flush=True)  # the error starts on a new line
            raise
        print(flush=True)
        messages[:] = [*asked, {"role": "assistant", "content": stream.text}]
