"""Hostile HTTP traffic for the gateway and for the metrics ports of the services."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from dynatree.common.grammar import GrammarKind
from tests.campaigns.hostile_targets import (
    BODY_SECONDS,
    GIVEN_UP_SECONDS,
    HEAD_SECONDS,
    SCRAPE_SECONDS,
    Answer,
    Attack,
    Kind,
    Target,
    exchange,
    hold,
    opened,
    silent,
)
from tests.support.costly_grammars import COSTLY

MOST_BYTES = 4 * 2**20 - 200  # size of a body just below the limit
CONTEXT = 2040  # tokens of a prompt just below the embedded pair's context length
JSON_SECONDS = 0.5  # time between two bodies
GRAMMAR_SECONDS = 30.0  # in which a costly grammar is refused or followed beside other load; alone, it takes 2 s
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def head(target: Target, path: str, length: int | None, *, key: bool = True, method: str = "POST") -> bytes:
    """The head of a request; if the length is None, its body comes in chunks."""
    shown = "".join(f"{name}: {value}\r\n" for name, value in target.metadata() if key and name == "authorization")
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    kind = "Content-Type: application/json\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{shown}{kind}{size}\r\n\r\n".encode()


def ask(target: Target, data: bytes, expected: range = range(400, 500), seconds: float = GIVEN_UP_SECONDS) -> Answer:
    """Send a request that a gateway must answer in time with an expected status; a metrics port may use any."""
    if target.name != "gateway":
        expected = range(200, 600)
    began = time.monotonic()
    with target.connect(protocol="http/1.1") as connection:
        read, answered = exchange(connection, data, lambda heard: b"\r\n" in heard, seconds)
    took = time.monotonic() - began
    status = read[9:12].decode(errors="replace") if read.startswith(b"HTTP/1.") else ""
    if not answered:
        return Answer("no answer", took, f"no answer in {took:.1f} s")
    wrong = "" if not status or int(status) in expected else f"it is answered with {status}"
    return Answer(status or "closed", took, wrong)


def dripping_head(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Connections that send the head of a request byte by byte."""
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 500
    connections = list(opened(target, 20, protocol="http/1.1"))
    return hold(connections, HEAD_SECONDS, lambda place: request[place : place + 1], _status)


def dripping_body(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Requests with a known key that send their body byte by byte."""
    start = head(target, COMPLETIONS, 10_000)
    return hold(list(opened(target, 20, start, protocol="http/1.1")), BODY_SECONDS, lambda _: b" ", _status)


def _status(heard: bytes) -> str:
    return heard[9:12].decode(errors="replace") if b"\r\n" in heard else ""


def huge_body(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Bodies beyond the limit: one with a length in its head, and one in chunks."""
    yield ask(target, head(target, COMPLETIONS, 2**30) + b"[" * 1000)
    chunk = f"{2**20:x}\r\n".encode() + b" " * 2**20 + b"\r\n"
    yield ask(target, head(target, COMPLETIONS, None) + chunk * 6)


def malformed_http(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Requests that are not valid HTTP."""
    whole = head(target, COMPLETIONS, 20) + b'{"prompt": [1, 2]}  '
    place = generator.randrange(len(whole))
    for data in (
        generator.randbytes(2000) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 20_000,
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        head(target, COMPLETIONS, None) + b"zz\r\n",
        head(target, COMPLETIONS, 5) + generator.randbytes(5),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        yield ask(target, data)
    broken = whole[:place] + generator.randbytes(1) + whole[place + 1 :]
    with target.connect(protocol="http/1.1") as connection:  # it may still be valid
        exchange(connection, broken, lambda heard: b"\r\n" in heard, 1.0)
    yield Answer("sent", must=False)


def _filled(start: str, item: Callable[[int], str], end: str) -> bytes:
    """A body of almost `MOST_BYTES` bytes, filled with as many items as fit."""
    items, size = [], len(start) + len(end)
    while size < MOST_BYTES:
        items.append(item(len(items)))
        size += len(items[-1].encode()) + 1
    return (start + ",".join(items[:-1]) + end).encode()


_CHAT = '{"messages": [{"role": "user", "content": '
# The path and the body of each request; every request must be refused.
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "unknown names": (COMPLETIONS, partial(_filled, '{"prompt": "a", ', lambda n: f'"{n}": 1', "}")),
    "unknown names of a message": (CHAT, partial(_filled, _CHAT + '"a", ', lambda n: f'"{n}": 1', "}]}")),
    "parts": (CHAT, partial(_filled, _CHAT + "[", lambda _: '{"type": "text", "text": ""}', "]}]}")),
    "parts of many messages": (
        CHAT,
        partial(
            _filled,
            '{"messages": [',
            lambda _: '{"role": "user", "content": [' + ",".join(['{"type": "text", "text": ""}'] * 300) + "]}",
            "]}",
        ),
    ),
    "labels": (CHAT, partial(_filled, _CHAT + '"a"}], "metadata": {', lambda n: f'"{n}": "a"', "}}")),
    "fields without effect": (COMPLETIONS, partial(_filled, '{"prompt": "a", "tools": [', lambda _: "{}", "]}")),
    "messages": (CHAT, partial(_filled, '{"messages": [', lambda _: '{"role": "user", "content": ""}', "]}")),
    "wrong messages": (CHAT, partial(_filled, '{"messages": [', lambda _: "{}", "]}")),
    "prompts": (COMPLETIONS, partial(_filled, '{"prompt": [', lambda _: '"a"', "]}")),
    "ids": (COMPLETIONS, partial(_filled, '{"prompt": [', lambda _: "7", "]}")),
    "wrong ids": (COMPLETIONS, partial(_filled, '{"prompt": [', lambda _: "-1", "]}")),
    "text": (COMPLETIONS, partial(_filled, '{"prompt": "', lambda _: " the" * 1000, '"}')),
    "escapes": (COMPLETIONS, partial(_filled, '{"prompt": "', lambda _: "\\u0041" * 1000, '"}')),
    "depth": (COMPLETIONS, lambda: b'{"prompt": ' + b"[" * (MOST_BYTES - 20)),
    "digits": (COMPLETIONS, lambda: b'{"prompt": "a", "seed": ' + b"9" * (MOST_BYTES - 30) + b"}"),
    "biases": (COMPLETIONS, partial(_filled, '{"prompt": "a", "logit_bias": {', lambda n: f'"{n}": 1', "}}")),
    "stops": (COMPLETIONS, partial(_filled, '{"prompt": "a", "stop": [', lambda _: '"a"', "]}")),
    "settings": (COMPLETIONS, partial(_filled, '{"prompt": "a", "policy_settings": {', lambda n: f'"{n}": 1', "}}")),
    "nulls": (COMPLETIONS, partial(_filled, '{"prompt": null, ', lambda n: f'"{n}": null', "}")),
    "detokenized ids": ("/detokenize", partial(_filled, '{"tokens": [', lambda _: "7", "]}")),
    "schemas": (
        COMPLETIONS,
        partial(
            _filled,
            '{"prompt": "a", "structured_outputs": {"json": {"anyOf": [',
            lambda n: f'{{"const": {n}}}',
            "]}}}",
        ),
    ),
    "choices": (
        COMPLETIONS,
        partial(_filled, '{"prompt": "a", "structured_outputs": {"choice": [', lambda n: f'"{n}"', "]}}"),
    ),
    "tools": (
        CHAT,
        partial(
            _filled,
            _CHAT + '"a"}], "tools": [',
            lambda n: f'{{"type": "function", "function": {{"name": "f{n}"}}}}',
            "]}",
        ),
    ),
    "tokenized text": ("/tokenize", partial(_filled, '{"prompt": "', lambda _: " the" * 1000, '"}')),
}


@cache
def body(name: str) -> tuple[str, bytes]:
    """A path, and the body to send to it."""
    path, made = BODIES[name]
    return path, made()


def adversarial_json(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Bodies of the largest size in shapes that are expensive to parse, half of them with a known key."""
    for name in itertools.cycle(BODIES):
        path, data = body(name)
        yield ask(target, head(target, path, len(data), key=generator.random() < 0.5) + data)
        if over.wait(JSON_SECONDS):
            return


def huge_answer(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Small requests for answers of many megabytes."""
    prompt = [7] * CONTEXT
    scores = {"echo": True, "logprobs": 20, "max_tokens": 0}
    for asked in (
        {"prompt": prompt, "n": 64, **scores},
        {"prompt": [prompt] * 128, "n": 1, **scores},
        {"prompt": [prompt] * 128, "n": 64, **scores, "stream": True},
        {"prompt": "a", "n": 64, "max_tokens": 1900, "logprobs": 20, "ignore_eos": True, "temperature": 1.5},
    ):
        data = json.dumps(asked).encode()
        yield ask(target, head(target, COMPLETIONS, len(data)) + data)


def costly_grammars(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Grammars that are costly to compile or to follow; each is refused or followed in bounded time."""
    names = {GrammarKind.JSON_SCHEMA: "json", GrammarKind.REGEX: "regex", GrammarKind.LARK: "grammar"}
    costly = list(COSTLY.values())
    while not over.wait(JSON_SECONDS):
        grammar = generator.choice(costly)
        text = grammar.text if grammar.kind is GrammarKind.JSON_SCHEMA else json.dumps(grammar.text)
        fields = f'{{"prompt": "a", "max_tokens": 4, "structured_outputs": {{"{names[grammar.kind]}": {text}}}}}'
        data = fields.encode()
        answer = ask(target, head(target, COMPLETIONS, len(data)) + data, range(200, 500), GRAMMAR_SECONDS)
        yield replace(answer, must=False)


def dripping_scrape(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Scrapes that send their heads byte by byte."""
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 500
    connections = list(opened(target, 30, protocol="http/1.1"))
    return hold(connections, SCRAPE_SECONDS, lambda place: request[place : place + 1], _status)


def unread(count: int) -> Attack:
    """Make an attack of `count` pipelined requests for a large page, whose answers are never read."""

    def attack(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
        request = head(target, "/openapi.json", 0, method="GET")
        with target.connect(protocol="http/1.1") as connection:
            connection.settimeout(0.5)
            with suppress(OSError):
                connection.sendall(request * count)
            over.wait(3.0)
        yield Answer("sent", must=False)

    return attack


PORTS = ("draft metrics", "verify metrics")
KINDS = (
    Kind("silent connections", ("gateway",), silent(400, HEAD_SECONDS), 5.0),
    Kind("silent connections", PORTS, silent(30, SCRAPE_SECONDS), 10.0),
    Kind("dripping heads", ("gateway",), dripping_head, 10.0),
    Kind("dripping bodies", ("gateway",), dripping_body, 10.0),
    Kind("dripping scrapes", PORTS, dripping_scrape, 10.0),
    Kind("huge bodies", ("gateway",), huge_body, 2.0),
    Kind("malformed HTTP", ("gateway", *PORTS), malformed_http, 3.0),
    Kind("adversarial JSON", ("gateway",), adversarial_json, 0.0),
    Kind("huge answers", ("gateway",), huge_answer, 5.0),
    Kind("costly grammars", ("gateway",), costly_grammars, 0.0),
    Kind("unread answers", ("gateway",), unread(2000), 5.0),
)
