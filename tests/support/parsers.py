"""Every parser of external input, with valid input for each, for fuzzing by fuzz_parsers and test_parsers.

A parser returns, or raises one of the errors that its caller expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from starlette.requests import Request

from dynatree.common.errors import ServiceError, StartupError
from dynatree.common.wire import (
    commit_from_pb,
    model_info_from_pb,
    open_session_from_pb,
    sampling_from_pb,
    session_opened_from_pb,
    tree_from_pb,
)
from dynatree.draft.policies import create_policy
from dynatree.draft.wire import policy_settings_from_pb
from dynatree.engine.offload import layer_cache
from dynatree.gateway.bodies import read_body
from dynatree.gateway.errors import ApiError
from dynatree.gateway.limits import Limits
from dynatree.gateway.open_requests import OpenRequests
from dynatree.gateway.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from dynatree.replay import machines, recording
from dynatree.serving.address import check_address, split_addresses
from dynatree.serving.certificates import check_certificates
from dynatree.serving.tokens import TokenFile
from dynatree.v1 import draft_pb2, tree_pb2, verify_pb2

EXPECTED = (ServiceError, StartupError, ApiError, DecodeError, SystemExit)
_LOOP = asyncio.new_event_loop()
_FOLDER = tempfile.TemporaryDirectory(prefix="parsers-")  # deleted at exit


@dataclass(frozen=True)
class Parser:
    """A parser of external input.

    Attributes:
        read: Function that parses bytes.
        seeds: Valid inputs.
        words: Words that the parser knows, from which fuzzers make inputs.
    """

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    words: tuple[str, ...] = ()

    def __call__(self, data: bytes) -> None:
        """Parse bytes; an exception that is raised is a fault of the parser."""
        with contextlib.suppress(*EXPECTED):
            self.read(data)


def _generate(data: bytes) -> None:
    request = draft_pb2.GenerateRequest.FromString(data)
    sampling_from_pb(request.sampling, default_seed=0)
    create_policy(request.policy.name or "throughput", policy_settings_from_pb(request.policy), None)


def _verify(data: bytes) -> None:
    message = verify_pb2.VerifyRequest.FromString(data)
    tree_from_pb(message.tree, max_nodes=256, max_depth=64, vocab_size=50304)
    open_session_from_pb(message.open, default_seed=0)


def _answer(data: bytes) -> None:
    response = verify_pb2.VerifyResponse.FromString(data)
    session_opened_from_pb(response.opened)
    commit_from_pb(response.commit)
    model_info_from_pb(response.opened.target)


def _addresses(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        for address in split_addresses(data.decode(errors="replace")):
            check_address(address)


def _body(model: Any) -> Callable[[bytes], object]:
    def read(data: bytes) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        async def answered() -> Any:
            with OpenRequests(limits).opened(watches=False) as open_request:
                request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
                request.state.open_request = open_request
                return await read_body(request, model, limits)

        headers, limits = [(b"content-type", b"application/json")], Limits()
        body = _LOOP.run_until_complete(answered())
        for name in ("fields", "principal", "prompts", "chat", "text_or_chat"):
            getattr(body, name, None)
        with contextlib.suppress(AttributeError):
            body.options()

    return read


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def written(data: bytes) -> None:
        path = Path(_FOLDER.name) / name
        path.write_bytes(data)
        read(path)

    return written


def _tokens(path: Path) -> None:
    known = TokenFile(path)
    for shown in ("", "Bearer 0123456789abcdef", f"bearer {path.read_bytes()!r}"):
        known.principal(shown)


def _certificates(path: Path) -> None:
    for pair, authorities in (((path, path), None), (None, path)):
        with contextlib.suppress(OSError, ValueError):
            check_certificates(pair, authorities)


def _generate_seed() -> bytes:
    request = draft_pb2.GenerateRequest(text="Once", max_new_tokens=3, n=2, stop=["a"], top_log_probs=3)
    request.sampling.temperature, request.sampling.seed, request.sampling.logit_bias[5] = 0.8, 7, 1.0
    request.policy.name, request.policy.settings["depth"] = "linear", 8
    return request.SerializeToString()


def _verify_seed() -> bytes:
    message = verify_pb2.VerifyRequest()
    message.open.prompt_ids.extend([5, 6])
    message.open.sampling.temperature = 0.5
    message.open.draft.name = "a"
    tree = tree_pb2.TokenTree(round=1, base_length=3, token_ids=[1, 2, 3], parents=[-1] * 3, log_probs=[-1.0] * 3)
    tree.candidate_counts.extend([3, 0, 0, 0])
    tree.candidate_ids.extend([1, 2, 3])
    tree.candidate_probs.extend([0.5, 0.25, 0.25])
    return message.SerializeToString() + verify_pb2.VerifyRequest(tree=tree).SerializeToString()


def _answer_seed() -> bytes:
    commit = verify_pb2.Commit(next_round=1, base_length=3, token_ids=[5, 6], log_probs=[-1.0, -2.0], finish_reason=1)
    commit.top_log_probs.SetInParent()
    opened = verify_pb2.SessionOpened(max_tree_nodes=5, commit=commit)
    opened.target.name = "a"
    return verify_pb2.VerifyResponse(opened=opened).SerializeToString()


def _recording_seed() -> bytes:
    path = Path(_FOLDER.name) / "seed.npz"
    run = {"text": 0, "prompt": 0, "temperature": 0.0, "seed": None, "prompt_tokens": 1, "new_tokens": 2, "nodes": 2}
    header = {"version": 1, "models": {}, "git": "", "texts": [], "options": {}, "runs": [run]}
    np.savez_compressed(
        path,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        token_ids=np.array([9, 1, 2], np.uint16),
        parents=np.array([], np.uint32),
        tokens=np.array([], np.uint16),
        counts=np.array([1, 1], np.uint8),
        proposal_tokens=np.array([1, 2], np.uint16),
        proposal_log_probs=np.array([10, 20], np.uint16),
    )
    return path.read_bytes()


_ROWS = [{"size": 0, "pieces": [], "places": {"a": [0, "float32", [2, 3]]}, "sums": {"a": [1]}}]
_TABLE = {"layers": _ROWS, "sum": layer_cache._sum_of(_ROWS)}
_COMMON = (
    *("model", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "include_usage", "logit_bias"),
    *("user", "top_k", "min_p", "stop_token_ids", "policy", "policy_settings", "scheme", "response_format", "type"),
    *("max_tokens", "logprobs", "echo", "best_of", "metadata", "tools", "reasoning_effort"),
)
_CHAT = (*_COMMON, "messages", "role", "content", "name", "text", "top_logprobs", "continue_final_message")
_MACHINE = {"name": "a", "measured": True, "sources": {}, "verify": [[1, 1.0]], "draft": [[1, 0.1]]}
_MACHINES = {"version": 1, "machines": [_MACHINE | {"round_seconds": 0.5, "level_seconds": 0.01}]}

PARSERS: dict[str, Parser] = {
    "generate": Parser(_generate, (_generate_seed(),)),
    "verify": Parser(_verify, (_verify_seed(),)),
    "answer": Parser(_answer, (_answer_seed(),)),
    "addresses": Parser(_addresses, (b"localhost:50051,unix:/a,[::1]:5,dns:///a:1",)),
    "completion": Parser(
        _body(CompletionRequest),
        (b'{"prompt": [[1, 2], [3]], "max_tokens": 3, "logprobs": 2, "logit_bias": {"5": 1}, "stop": ["a"]}',),
        ("prompt", *_COMMON),
    ),
    "chat": Parser(
        _body(ChatRequest),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stream": true}',),
        _CHAT,
    ),
    "tokenize": Parser(_body(TokenizeRequest), (b'{"prompt": "a", "add_special_tokens": true}',), _CHAT),
    "detokenize": Parser(_body(DetokenizeRequest), (b'{"tokens": [1, 2]}',), ("tokens", "model")),
    "tokens": Parser(
        _file("tokens", _tokens), (b"# who\n\nalice:alice-0123456789abcdef\nbob: bob-0123456789abcdef\n",)
    ),
    "certificates": Parser(
        _file("certificate.pem", _certificates),
        (b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",),
    ),
    "layers": Parser(
        _file("layers.json", lambda path: layer_cache._read_table(path.parent)),
        (json.dumps(_TABLE).encode(),),
        ("layers", "size", "pieces", "places", "sums", "sum", "float32", "Tensor", "nn"),
    ),
    "recording": Parser(_file("recording.npz", recording.load), (_recording_seed(),)),
    "machines": Parser(
        _file("machines.json", machines.load_machines),
        (json.dumps(_MACHINES).encode(),),
        ("version", "machines", *_MACHINE, "round_seconds", "level_seconds"),
    ),
}
