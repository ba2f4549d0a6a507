"""Well-behaved clients beside hostile traffic: their answers must be right, and nearly as fast as without it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPException

from dynatree.client import DynaTreeError
from tests.campaigns.hostile_site import Site

WAYS = ("gRPC", "gRPC, streamed", "HTTP", "HTTP, streamed")
PROMPTS = ("Once upon a time", "The sea", "It was a bright cold morning, and the captain")
OPTIONS = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 7})
TOKENS = 48  # new tokens of each completion
REQUESTS = tuple(itertools.product(PROMPTS, range(len(OPTIONS))))

Expected = dict[tuple[str, int], tuple[int, ...]]


def expected_of(site: Site) -> Expected:
    """The tokens of each request, from services without other load."""
    with site.client(0) as client:
        for first in range(5):  # prompts that together fill all slots of the KV caches
            client.generate([first + 5, *range(5, 1995)], max_new_tokens=1)
        return {
            (prompt, kind): client.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True, **OPTIONS[kind]).token_ids
            for prompt, kind in REQUESTS
        }


@dataclass
class GoodClient:
    """Completes one request after the other until `over` is set.

    Attributes:
        way: One of `WAYS`.
        done: Start and end time of each completion.
        wrong: Descriptions of wrong tokens and failures.
    """

    site: Site
    number: int
    expected: Expected
    over: threading.Event
    done: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def way(self) -> str:
        return WAYS[self.number % len(WAYS)]

    def run(self) -> None:
        """Make requests until `over` is set."""
        if "gRPC" in self.way:
            self._run_grpc()
        else:
            self._run_http()

    def speed(self, begin: float, end: float) -> float:
        """Tokens per second between two times."""
        tokens = 0.0
        for start, stop in self.done:
            tokens += TOKENS * max(0.0, min(stop, end) - max(start, begin)) / (stop - start)
        return tokens / (end - begin)

    def _requests(self) -> itertools.cycle[tuple[str, int]]:
        return itertools.cycle(REQUESTS[self.number % len(REQUESTS) :] + REQUESTS[: self.number % len(REQUESTS)])

    def _note(self, request: tuple[str, int], began: float, token_ids: tuple[int, ...]) -> None:
        self.done.append((began, time.monotonic()))
        if token_ids != self.expected[request]:
            self.wrong.append(f"{self.way}: {request}: other tokens: {token_ids}")

    def _run_grpc(self) -> None:
        with self.site.client(self.number) as client:
            for request in self._requests():
                if self.over.is_set():
                    return
                prompt, kind = request
                began = time.monotonic()
                try:
                    options = {"max_new_tokens": TOKENS, "ignore_eos": True, **OPTIONS[kind]}
                    if "streamed" in self.way:
                        token_ids = tuple(id for chunk in client.stream(prompt, **options) for id in chunk.token_ids)
                    else:
                        token_ids = client.generate(prompt, **options).token_ids
                except DynaTreeError as error:
                    self._failed(error)
                else:
                    self._note(request, began, token_ids)

    def _run_http(self) -> None:
        connection, headers = self.site.http(self.number)
        for request in self._requests():
            if self.over.is_set():
                break
            prompt, kind = request
            body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
            body |= {"user": f"good-{self.number}", "stream": "streamed" in self.way, **OPTIONS[kind]}
            began = time.monotonic()
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise HTTPException(f"{answer.status}: {answer.read()[:300].decode()}")
                if body["stream"]:
                    events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
                else:
                    events = [json.loads(answer.read())]
                choices = [choice for event in events for choice in event["choices"]]
                token_ids = tuple(token for choice in choices for token in choice.get("token_ids") or ())
            except (OSError, HTTPException, KeyError) as error:
                connection.close()
                self._failed(error)
            else:
                self._note(request, began, token_ids)
        connection.close()

    def _failed(self, error: Exception) -> None:
        self.wrong.append(f"{self.way}: {type(error).__name__}: {error}")
        self.over.wait(0.2)
