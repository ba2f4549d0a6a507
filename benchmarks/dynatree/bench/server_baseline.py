"""Servers as baselines: llama.cpp's, or any server that completes token ids through OpenAI's `/v1/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import requests

from dynatree.bench.decoding import Arrival, Baseline, Output, Prompt

_SECONDS = 600.0  # longest wait for the first or the next bytes of an answer
_CONNECT_SECONDS = 10.0


def connect(label: str, url: str) -> Baseline:
    """Return a function that completes prompts greedily through the server at a URL, past the end of sequence.

    Raises:
        SystemExit: No server answers at the URL, or it is of neither kind.
    """
    root = url.rstrip("/").removesuffix("/v1")
    try:
        if requests.get(f"{root}/props", timeout=_CONNECT_SECONDS).ok:
            return _LlamaCpp(label, root)
        models = requests.get(f"{root}/v1/models", timeout=_CONNECT_SECONDS)
        if models.ok:
            return _OpenAI(label, root, models.json()["data"][0]["id"])
    except (requests.RequestException, ValueError, LookupError) as error:
        raise SystemExit(f"baseline {label}: {url} does not answer like a completions server: {error}") from None
    raise SystemExit(f"baseline {label}: {url} answers neither /props (llama.cpp) nor /v1/models (OpenAI)")


class _LlamaCpp:
    """llama.cpp's own `/completion`, which returns token ids; its prompt cache is switched off."""

    def __init__(self, label: str, root: str) -> None:
        self._label, self._url = label, f"{root}/completion"

    def __call__(self, prompt: Prompt, max_new_tokens: int) -> Output:
        body = {
            "prompt": list(prompt),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        token_ids: list[int] = []
        arrivals: list[Arrival] = []
        started = time.perf_counter()
        for event in _events(self._label, self._url, body):
            token_ids += event.get("tokens", ())
            if event.get("tokens"):
                arrivals.append((len(token_ids), time.perf_counter() - started))
        return Output(tuple(token_ids), tuple(arrivals), time.perf_counter() - started)


class _OpenAI:
    """`/v1/completions`; the token ids are known only if the server returns them, as vLLM does."""

    def __init__(self, label: str, root: str, model: str) -> None:
        self._label, self._url, self._model = label, f"{root}/v1/completions", model

    def __call__(self, prompt: Prompt, max_new_tokens: int) -> Output:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        token_ids: list[int] = []
        arrivals: list[Arrival] = []
        tokens, named = 0, True
        started = time.perf_counter()
        for event in _events(self._label, self._url, body):
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event.get("choices", ()):
                ids: Sequence[int] | None = choice.get("token_ids")
                named = named and (ids is not None or not choice.get("text"))
                token_ids += ids or ()
                if choice.get("text") or ids:
                    arrivals.append((len(token_ids) or len(arrivals) + 1, time.perf_counter() - started))
        seconds = time.perf_counter() - started
        if named:
            return Output(tuple(token_ids), tuple(arrivals), seconds)
        return Output(None, tuple(arrivals), seconds, count=tokens or len(arrivals))


def _events(label: str, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events.

    Raises:
        SystemExit: The server refuses or fails.
    """
    try:
        with requests.post(url, json=body, stream=True, timeout=(_CONNECT_SECONDS, _SECONDS)) as answer:
            if not answer.ok:
                raise SystemExit(f"baseline {label}: {url} answers {answer.status_code}: {answer.text[:200]}")
            for line in answer.iter_lines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))
    except (requests.RequestException, ValueError) as error:
        raise SystemExit(f"baseline {label}: {url} failed: {error}") from None
