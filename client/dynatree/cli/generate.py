"""`dynatree generate`: complete one prompt, as text while it is made or as one JSON object."""

import argparse
import io
import json
import math
import sys

from dynatree.client import Client, GenerateOptions

_STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input, as UTF-8")
    parser.add_argument(
        "--server", metavar="ADDR", default="localhost:50051", help="host:port or unix:PATH (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="default: until the end of sequence or the context limit"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", default=0.0, help="divides the logits; 0, the default, is greedy"
    )
    parser.add_argument("--top-k", type=int, metavar="K", default=0, help="keep the K likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens of total probability P")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same tokens; default: random")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="STR", help="end before this string; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of the sequence")
    parser.add_argument("--policy", metavar="NAME", help="how trees are grown; default: the service's")
    parser.add_argument(
        "--set",
        dest="policy_settings",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the policy, such as depth=8; may be repeated",
    )
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="give up after; default: never")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with statistics, at the end")


def run(options: argparse.Namespace) -> int:
    """Complete the prompt; the exit status.

    Raises:
        DynaTreeError: the request failed.
        SystemExit: the address, or the standard input, cannot be used.
    """
    _print_utf8()
    prompt = _read_stdin() if options.prompt == _STDIN else options.prompt
    with _client(options) as client:
        if options.json:
            print(json.dumps(client.generate(prompt, **_request(options)).to_dict(), ensure_ascii=False))
        else:
            _print_stream(client, prompt, _request(options))
    return 0


def _client(options: argparse.Namespace) -> Client:
    try:
        return Client(options.server, timeout=options.timeout)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def _request(options: argparse.Namespace) -> GenerateOptions:
    return GenerateOptions(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        policy=options.policy,
        policy_settings=dict(options.policy_settings),
    )


def _print_stream(client: Client, prompt: str, request: GenerateOptions) -> None:
    # Leaving the context on an interrupt cancels the request on the server.
    with client.stream(prompt, **request) as stream:
        try:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        except BaseException:
            if stream.text:
                print(flush=True)  # what comes next, an error or a shell's prompt, starts on its own line
            raise
    print()


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


def _print_utf8() -> None:
    """Print UTF-8 whatever the locale is: a model may answer with any character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        name = ""
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a number")
    return name, number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
