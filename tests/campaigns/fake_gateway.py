"""A gateway without models that serves the live page and completions with made-up rounds over real HTTP.

`python -m tests.campaigns.fake_gateway` serves it on port 8000, to view the page.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from dynatree.pages.live import live_page

Event = dict[str, Any]

TEXT = """ the keeper — that is how the whole island knows me — since nobody here can remember when the lamp was lit by
another. I climb the stairs at dusk, all two hundred and eleven of them; I trim the wick, I wind the clock, I write down
the wind. Whenever a sail stands out beyond the reef; whenever it is a grey, sleepless morning and the gulls sit on the
rail, I put the kettle on, and wait to hear which of the boats has come home, and how heavy she lies in the water."""

ACCEPTED = (3, 1, 4, 0, 2, 4, 3)  # accepted nodes of each round, repeated
ASIDE = (" the", " a", " of", "\n", " and")  # tokens of the draft's wrong guesses


@dataclass
class FakeGateway:
    """The behaviour of the server; a test may change it between two requests.

    Attributes:
        tokens: Texts of a completion's tokens, as in the completion.
        own_text: Function from a token's text to the text that a trace shows for the token alone.
        delay: Seconds before each round; plain decoding takes as long for each token.
        key: API key that a caller must send; None requires none.
        chat_template: Whether the model has a chat template.
        refuse: Status and message that every completion gets instead of an answer.
        fail_after: Number of rounds after which the stream reports a failure.
        url: URL of the server.
        requests: Bodies of the completion requests received.
        abandoned: Number of streams that their client closed.
    """

    tokens: Sequence[str] = tuple(re.findall(r"\s*\S+", TEXT))
    own_text: Callable[[str], str] = str
    delay: float = 0.02
    key: str | None = None
    chat_template: bool = False
    refuse: tuple[int, str] | None = None
    fail_after: int | None = None
    url: str = ""
    requests: list[Event] = field(default_factory=list)
    abandoned: int = 0

    def models(self) -> Event:
        """The answer of `/v1/models`, which lists a single pair."""
        model = {"id": "org/large", "object": "model", "created": 0, "owned_by": "dynatree", "max_model_len": 2048}
        policies = ["throughput", "autoregressive", "dynatree"]
        model |= {"draft_model": "org/small", "policies": policies, "chat_template": self.chat_template}
        return {"object": "list", "data": [model]}

    def chat(self, request: Event) -> Iterator[Event]:
        """The events of a chat answer: a completion's events in the chat format."""
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        for event in self.completion(request):
            for choice in event.get("choices", ()):
                choice["delta"] = {"content": choice.pop("text")}
            yield event

    def completion(self, request: Event) -> Iterator[Event]:
        """The events of a completion."""
        tokens = self.tokens[: request["max_tokens"]]
        plain = request["policy"] == "autoregressive"
        yield _chunk(text=tokens[0])
        done, number = 1, 0
        while done < len(tokens):
            time.sleep(self.delay)
            if number == self.fail_after:
                yield _error("the verify service was lost", "server_error")
                return
            round_ = _round(number, tokens[done:], 0 if plain else ACCEPTED[number % len(ACCEPTED)], plain, done)
            yield _chunk(text="".join(round_["committed_texts"]))
            yield _chunk(
                trace=round_ | {"committed_texts": [self.own_text(text) for text in round_["committed_texts"]]}
            )
            done += len(round_["committed_ids"])
            number += 1
        yield _chunk(finish_reason="length")
        figures = {"rounds": number}
        usage = {"prompt_tokens": 5, "completion_tokens": len(tokens), "total_tokens": 5 + len(tokens)}
        yield {"choices": [], "usage": usage | {"speculative_decoding": figures}}


def _chunk(text: str = "", finish_reason: str | None = None, **more: object) -> Event:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "org/large", "choices": [choice | more]}


def _error(message: str, kind: str) -> Event:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _round(number: int, tokens: Sequence[str], accepted: int, plain: bool, done: int) -> Event:
    """A chain of four with one wrong sibling at each depth; the target accepts the first `accepted` of the chain."""
    accepted = min(accepted, len(tokens))
    committed = tokens[: accepted + 1]
    texts: list[str] = []
    parents: list[int] = []
    for depth in range(0 if plain else 4):
        parent = 2 * (depth - 1) if depth > 0 else -1
        texts += [tokens[depth] if depth < accepted else " whale", ASIDE[(number + depth) % len(ASIDE)]]
        parents += [parent, parent]
    return {
        "index": 0,
        "round": number,
        "base_length": 5 + done,
        "token_ids": [len(text) for text in texts],
        "parents": parents,
        "probabilities": [0.8, 0.1] * (len(texts) // 2),
        "texts": texts,
        "accepted_nodes": [2 * depth for depth in range(accepted)],
        "committed_ids": [len(text) for text in committed],
        "committed_texts": list(committed),
        "parameters": {} if plain else {"base_depth": 4.0 + accepted / 4},
        "draft_seconds": 0.004,
        "verify_seconds": 0.012,
    }


@contextmanager
def serving(gateway: FakeGateway, port: int = 0) -> Iterator[FakeGateway]:
    """Serve the gateway within a context."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            if self.path == "/":
                page = live_page()
                self._answer(200, page.html, "text/html; charset=utf-8", page.policy)
            elif self.path == "/v1/models" and self._may():
                self._answer(200, json.dumps(gateway.models()))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._may():
                return
            gateway.requests.append(request)
            answer = gateway.chat if self.path == "/v1/chat/completions" else gateway.completion
            if gateway.refuse is not None:
                status, message = gateway.refuse
                self._answer(status, json.dumps(_error(message, "invalid_request_error")))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for event in answer(request):
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")
            except ConnectionError:
                gateway.abandoned += 1

        def _may(self) -> bool:
            if gateway.key is None or self.headers["Authorization"] == f"Bearer {gateway.key}":
                return True
            self._answer(401, json.dumps(_error("an API key is needed", "invalid_request_error")))
            return False

        def _answer(self, status: int, body: str, kind: str = "application/json", policy: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body.encode())))
            if policy:
                self.send_header("Content-Security-Policy", policy)
            self.end_headers()
            self.wfile.write(body.encode())

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        gateway.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield gateway
        server.shutdown()


if __name__ == "__main__":
    with serving(FakeGateway(delay=0.1), port=8000) as gateway:
        print(gateway.url)
        while True:
            time.sleep(1)
