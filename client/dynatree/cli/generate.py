"""`dynatree generate`: completes one prompt, and prints streamed text or one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dynatree.cli.arguments import SCHEMES, Keyed, add_policy_settings
from dynatree.cli.connection import add_connection_arguments, connected
from dynatree.cli.interrupts import raise_interrupts
from dynatree.cli.terminal import print_utf8, visible

if TYPE_CHECKING:
    from dynatree.client import Chunk, CompletionStream, GenerateOptions

_STDIN = "-"

EXAMPLE = 'dynatree generate "The capital of France is" --max-new-tokens 16 --json'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree generate`."""
    parser.add_argument("prompt", metavar="PROMPT", help="prompt; - reads it from standard input, as UTF-8")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens to generate (default: until the end of sequence or the context limit)",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", default=0.0, help="temperature of sampling; 0 is greedy (default: 0)"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", default=0, help="sample from the K likeliest tokens (default: 0, all tokens)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens whose total probability is P (default: all tokens)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        default=0.0,
        help="sample from the tokens at least P times as likely as the likeliest one (default: %(default)g)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="above 1 makes earlier tokens less likely (default: the value in the target's generation_config)",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="F",
        default=0.0,
        help="subtract F from a token's logit for each time it occurs in the completion; -2 to 2 (default: 0)",
    )
    parser.add_argument(
        "--presence-penalty",
        type=float,
        metavar="F",
        default=0.0,
        help="subtract F from the logit of each token that occurs in the completion; -2 to 2 (default: 0)",
    )
    parser.add_argument(
        "--logit-bias",
        type=_bias,
        action=Keyed,
        default={},
        metavar="ID=VALUE",
        help="add VALUE to the logit of token ID; repeatable",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="seed that determines the tokens, except with --scheme residual (default: random)",
    )
    parser.add_argument(
        "--scheme",
        choices=SCHEMES,
        metavar="NAME",
        help="sampling scheme of draft and target: gumbel, independent or residual (default: gumbel)",
    )
    parser.add_argument(
        "--n",
        type=int,
        metavar="N",
        default=1,
        help="number of completions, each with its own seed derived from --seed (default: %(default)s)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="STR", help="end the completion before this string; repeatable"
    )
    constraint = parser.add_mutually_exclusive_group()
    constraint.add_argument(
        "--json-schema", metavar="FILE", help="complete with JSON that follows this file's JSON schema"
    )
    constraint.add_argument("--regex", metavar="RE", help="complete with a text that matches this regular expression")
    constraint.add_argument("--grammar", metavar="FILE", help="complete with a text of this file's Lark grammar")
    parser.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end the completion after this token; repeatable",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="continue past the end of sequence")
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="read special tokens in the prompt, such as <|endoftext|>, as tokens and not as text",
    )
    parser.add_argument("--policy", metavar="NAME", help="policy that grows the trees (default: the service's)")
    add_policy_settings(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object with statistics at the end")
    parser.add_argument(
        "--log-probs", action="store_true", help="with --json: also print the tokens' log-probabilities"
    )
    parser.add_argument(
        "--top-log-probs",
        type=int,
        metavar="K",
        default=0,
        help="with --json: also print the K likeliest tokens at each position; at most 20 (default: 0)",
    )
    parser.add_argument(
        "--prompt-log-probs",
        action="store_true",
        help="with --json: also print the log-probabilities of the prompt's tokens",
    )
    parser.add_argument(
        "--queue-position",
        action="store_true",
        help="while the request waits, print the number of requests ahead of it on standard error",
    )
    parser.add_argument("--trace", metavar="FILE", help="write each round to FILE as one line of JSON")
    add_connection_arguments(parser)
    parser.set_defaults(usage_error=parser.error)


def run(options: argparse.Namespace) -> int:
    """Complete the prompt; return the exit status.

    Raises:
        DynaTreeError: The request failed.
        SystemExit: The command line, the address, the standard input or the trace's file cannot be used.
    """
    for option in ("log_probs", "top_log_probs", "prompt_log_probs"):
        if getattr(options, option) and not options.json:
            options.usage_error(f"--{option.replace('_', '-')} needs --json")
    raise_interrupts()
    print_utf8()
    prompt = _read_stdin() if options.prompt == _STDIN else options.prompt
    with (
        connected(options) as client,
        _trace_file(options.trace) as write_trace,
        # Leaving the context on an interrupt cancels the request on the server.
        client.stream(prompt, **_request(options)) as stream,
    ):
        chunks = _each(stream, write_trace)
        if options.json:
            _print_json(stream, chunks)
        else:
            _print_text(stream, chunks, headings=options.n > 1)
    return 0


def _request(options: argparse.Namespace) -> GenerateOptions:
    from dynatree.client import GenerateOptions

    return GenerateOptions(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        logit_bias=options.logit_bias,
        seed=options.seed,
        scheme=options.scheme,
        n=options.n,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        special_tokens=options.special_tokens,
        log_probs=options.log_probs,
        top_log_probs=options.top_log_probs,
        prompt_log_probs=options.prompt_log_probs,
        json_schema=_text_of(options.json_schema),
        regex=options.regex,
        grammar=_text_of(options.grammar),
        trace=options.trace is not None,
        queue_position=options.queue_position,
        policy=options.policy,
        policy_settings=options.policy_settings,
    )


def _print_json(stream: CompletionStream, chunks: Iterable[Chunk]) -> None:
    from dynatree.client import DynaTreeError

    try:
        for _ in chunks:
            pass
    except DynaTreeError as error:
        if error.token_ids:  # print the partial completion
            failure = {"code": error.code.name, "message": str(error), "request_id": error.request_id}
            partial = {"text": error.text, "token_ids": error.token_ids, "error": failure}
            print(json.dumps(partial, ensure_ascii=False), flush=True)
        raise
    print(json.dumps(stream.completion.to_dict(), ensure_ascii=False))


def _print_text(stream: CompletionStream, chunks: Iterable[Chunk], *, headings: bool) -> None:
    index = -1  # of the completion being printed
    shown = visible if sys.stdout.isatty() else str  # a file or a pipe receives the text unchanged
    try:
        for chunk in chunks:
            if headings and chunk.index != index:
                print(("\n" if index >= 0 else "") + f"--- completion {chunk.index}")
                index = chunk.index
            print(shown(chunk.text), end="", flush=True)
    except BaseException:
        if stream.text:
            print(flush=True)  # the error, or the shell's prompt, starts on a new line
        raise
    print()


def _each(chunks: Iterable[Chunk], write_trace: Callable[[Chunk], None]) -> Iterator[Chunk]:
    for chunk in chunks:
        if chunk.queue_position is not None:
            print(f"requests ahead in the queue: {chunk.queue_position}", file=sys.stderr, flush=True)
            continue
        write_trace(chunk)
        yield chunk


@contextmanager
def _trace_file(path: str | None) -> Iterator[Callable[[Chunk], None]]:
    """Yield a function that writes a chunk's round, if it has one, as a line of the file; without a path, a no-op."""
    if path is None:
        yield lambda chunk: None
        return
    try:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - keeps the old content until the first chunk arrives
    except OSError as error:
        raise SystemExit(f"cannot write {path}: {error.strerror}") from None

    answered = False

    def write(chunk: Chunk) -> None:
        nonlocal answered
        if not answered:
            with suppress(OSError):  # a pipe or a device cannot be truncated
                file.truncate(0)
            answered = True
        if chunk.trace:
            line = json.dumps({"index": chunk.index, **chunk.trace.to_dict()}, ensure_ascii=False)
            try:
                print(line, file=file, flush=True)
            except OSError as error:
                raise SystemExit(f"cannot write {path}: {error.strerror}") from None

    try:
        yield write
    finally:
        # Every line has been flushed, so closing fails only after a write has failed.
        with suppress(OSError):
            file.close()


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


def _text_of(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"cannot read {path}: {error}") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE with a token id and a number") from None
