"""Hostile gRPC calls: random and huge messages, abandoned calls, and attempts to evade quotas."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dynatree.v1 import draft_pb2, tree_pb2, verify_pb2
from tests.campaigns.hostile_targets import GIVEN_UP_SECONDS, Answer, Kind, Target

GENERATE = "/dynatree.v1.DraftService/Generate"
VERIFY = "/dynatree.v1.VerifyService/Verify"
NUMBERS = (0, 1, 2, 5, 63, 64, 255, 256, 2047, 2048, 4096, 2**31 - 1, 2**32 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "Once upon a time", "\0", "\x1b[31m", "<|endoftext|>", "é" * 50, "../../etc/passwd", "%s%n", "\ud7ff")
LEAKS = ("/tmp", "/root", ".py", ".sock", "Traceback")
OURS = {  # codes that may answer a malformed message
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
QUOTA = 600  # tokens per minute of each principal of the quota draft
PREFILL = 250  # tokens
LONG_PREFILL = 550


def fill(message: Message, generator: random.Random, depth: int = 0) -> Message:
    """Set some fields of a message to random values, and return it."""
    for field in message.DESCRIPTOR.fields:
        if generator.random() < 0.5 + 0.1 * depth:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(message, field, generator, depth)
        elif field.is_repeated:
            values = [_value(field, generator) for _ in range(generator.choice((0, 1, 2, 5, 40)))]
            if field.message_type is None:
                getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            fill(getattr(message, field.name), generator, depth + 1)
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, _value(field, generator))
    return message


def _fill_map(message: Message, field: FieldDescriptor, generator: random.Random, depth: int) -> None:
    keys, values = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    for _ in range(generator.choice((0, 1, 3))):
        key = _value(keys, generator)
        if values.message_type is not None:
            fill(getattr(message, field.name)[key], generator, depth + 1)
        else:
            getattr(message, field.name)[key] = _value(values, generator)


def _value(field: FieldDescriptor, generator: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return generator.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return generator.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return generator.choice(FLOATS) if generator.random() < 0.5 else generator.random()
    if field.type == FieldDescriptor.TYPE_ENUM:
        return generator.choice((0, 1, 2, 3, 4, -1))
    number = generator.choice(NUMBERS) if generator.random() < 0.5 else generator.randrange(2048)
    if field.type == FieldDescriptor.TYPE_INT32:
        return generator.choice((-1, -2, number % 2**31))
    return number


def broken(data: bytes, generator: random.Random) -> bytes:
    """The bytes with some of them changed, inserted, cut off or repeated."""
    data = bytes(data)
    for _ in range(generator.choice((0, 0, 1, 1, 3))):
        place = generator.randrange(len(data) + 1)
        kind = generator.randrange(4)
        if kind == 0:
            data = data[:place]
        elif kind == 1:
            data = data[:place] + generator.randbytes(generator.choice((1, 2, 8))) + data[place:]
        elif kind == 2:
            data = data[:place] + generator.randbytes(1) + data[place + 1 :]
        else:
            data += data[place:]
    return data


def _messages(target: Target, generator: random.Random) -> tuple[str, list[bytes]]:
    """A method of the target, and random messages to send to it."""
    if target.name == "draft":
        request = draft_pb2.GenerateRequest()
        fill(request, generator)
        request.max_new_tokens = generator.choice((0, 1, 2, 3, 2**32 - 1))
        request.n = generator.choice((0, 1, 2, 65))
        return GENERATE, [broken(request.SerializeToString(), generator)]
    model = tree_pb2.ModelInfo.FromString(target.model)
    opening = verify_pb2.OpenSession(prompt_ids=[5, 6, 7], max_new_tokens=3, draft=model)
    if generator.random() < 0.3:
        fill(opening, generator)
    messages: list[Message] = [verify_pb2.VerifyRequest(open=opening)]
    for number in range(generator.randrange(3)):
        tree = tree_pb2.TokenTree(round=number, base_length=4 + number)
        if generator.random() < 0.7:
            fill(tree, generator)
        messages.append(verify_pb2.VerifyRequest(tree=tree))
    return VERIFY, [broken(each.SerializeToString(), generator) for each in messages]


def call(
    channel: grpc.Channel, method: str, messages: Sequence[bytes], metadata: Any, seconds: float, expected: set[Any]
) -> Answer:
    """Make a call that must end with one of the expected codes; any code but OK must come within a second."""
    began = time.monotonic()
    code, details = grpc.StatusCode.OK, ""
    try:
        for _ in channel.stream_stream(method)(iter(messages), timeout=seconds, metadata=metadata):
            began = time.monotonic()  # the opening may wait in the queue, later messages may not
    except grpc.RpcError as error:
        code, details = error.code(), error.details() or ""
    took = time.monotonic() - began
    wrong = ""
    if code not in expected:
        wrong = f"{code.name} after {took:.1f} s: {details[:200]} {[each[:100] for each in messages]}"
    elif any(leak in details for leak in LEAKS):
        wrong = f"its details tell too much: {details[:200]}"
    return Answer(code.name, took, wrong, must=code is not grpc.StatusCode.OK)


def random_messages(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Messages with random content, some of them broken."""
    with target.channel() as channel:
        for _ in range(10):
            method, messages = _messages(target, generator)
            yield call(channel, method, messages, target.metadata(), 30.0, OURS)


def strangers(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Calls without a token and with wrong tokens, if the target requires a token."""
    if not target.tokens:
        return
    expected = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    with target.channel() as channel:
        for metadata in ((), (("authorization", "Bearer wrong-0123456789abcdef"),), (("authorization", "x" * 9000),)):
            method, messages = _messages(target, generator)
            yield call(channel, method, messages, metadata, GIVEN_UP_SECONDS, expected)


@cache
def _huge(name: str, model: bytes) -> list[list[bytes]]:
    """Huge messages of calls that the target must refuse."""
    ids = [5] * (4 * 2**20 - 1000)  # one byte each
    if name == "draft":
        large = draft_pb2.GenerateRequest(max_new_tokens=1)
        large.token_ids.ids.extend(ids)
        text = draft_pb2.GenerateRequest(text=" the" * (2**20 - 100), max_new_tokens=1)
        many = draft_pb2.GenerateRequest(text="a", stop=["a"] * 10**6, max_new_tokens=1)
        return [[each.SerializeToString()] for each in (large, text, many)]
    draft = tree_pb2.ModelInfo.FromString(model)
    opening = verify_pb2.VerifyRequest(open=verify_pb2.OpenSession(prompt_ids=ids, max_new_tokens=1, draft=draft))
    tree = verify_pb2.VerifyRequest(tree=tree_pb2.TokenTree(token_ids=ids[:2_000_000], parents=ids[:2_000_000]))
    small = verify_pb2.VerifyRequest(open=verify_pb2.OpenSession(prompt_ids=[5], max_new_tokens=3, draft=draft))
    return [[opening.SerializeToString()], [small.SerializeToString(), tree.SerializeToString()]]


def huge_messages(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Messages with as many bytes as the limit allows, and with more."""
    refused, too_large = OURS - {grpc.StatusCode.OK}, {grpc.StatusCode.RESOURCE_EXHAUSTED}
    method = GENERATE if target.name == "draft" else VERIFY
    garbage = b"\x0a" + b"\xff" * 4_000_000
    metadata = target.metadata()
    with target.channel() as channel:
        for messages in (*_huge(target.name, target.model), [garbage]):
            yield call(channel, method, messages, metadata, GIVEN_UP_SECONDS, refused)
        yield call(channel, method, [garbage + garbage], metadata, GIVEN_UP_SECONDS, too_large)
        long = (*metadata, ("x-long", "a" * 30_000))
        yield call(channel, method, [b""], long, GIVEN_UP_SECONDS, too_large)


def left_calls(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Fifty concurrent calls, prefills among them, that are cancelled before any answer is read."""
    stops = [chr(97 + number % 26) * 64 + str(number) for number in range(16)]
    everything = draft_pb2.GenerateRequest(text="Once", n=64, log_probs=True, stop=stops, max_new_tokens=1000)
    prefill = draft_pb2.GenerateRequest(max_new_tokens=1)
    prefill.token_ids.ids.extend([generator.randrange(1000) for _ in range(PREFILL)])
    requests = [everything.SerializeToString(), prefill.SerializeToString()]
    with target.channel() as channel:
        made = [
            channel.unary_stream(GENERATE)(requests[number % 2], timeout=5.0, metadata=target.metadata())
            for number in range(50)
        ]
        over.wait(generator.uniform(0.05, 0.3))
        for each in made:
            each.cancel()
    yield from [Answer("cancelled", must=False)] * len(made)


def left_tokenizing(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Requests to tokenize long texts that are cancelled almost at once."""
    request = draft_pb2.TokenizeRequest(text="".join(generator.choices(" abcdefgh\n", k=20_000)))
    with target.channel() as channel:
        ask = channel.unary_unary("/dynatree.v1.DraftService/Tokenize")
        made = [ask.future(request.SerializeToString(), timeout=5.0, metadata=target.metadata()) for _ in range(20)]
        over.wait(0.02)
        for each in made:
            each.cancel()
    yield from [Answer("cancelled", must=False)] * len(made)


def evaded_by_resume(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Prefills of tokens in the resume field; at most one more may be admitted than the quota allows."""
    request = draft_pb2.GenerateRequest(max_new_tokens=PREFILL + 1, ignore_eos=True)
    request.token_ids.ids.append(5)
    request.resume.token_ids.extend([generator.randrange(1000) for _ in range(PREFILL)])
    metadata = _principal(target, generator, 0)
    with target.channel() as channel:
        admitted = [_admitted(channel, request, metadata) for _ in range(6)]
    yield _evasion("by resume", sum(admitted) * PREFILL)


def evaded_at_once(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Prompts that arrive at the same time."""
    request = draft_pb2.GenerateRequest(max_new_tokens=1)
    request.token_ids.ids.extend([generator.randrange(1000) for _ in range(PREFILL)])
    metadata = _principal(target, generator, 1)
    admitted: list[bool] = []
    with target.channel() as channel:
        threads = [
            threading.Thread(target=lambda: admitted.append(_admitted(channel, request, metadata))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    yield _evasion("at once", sum(admitted) * PREFILL)


def evaded_by_cancelling(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Prompts that are cancelled during their prefill, which must use up the quota all the same."""
    request = draft_pb2.GenerateRequest(max_new_tokens=1)
    metadata = _principal(target, generator, 2)
    with target.channel() as channel:
        for _ in range(8):
            del request.token_ids.ids[:]
            request.token_ids.ids.extend([generator.randrange(1000) for _ in range(LONG_PREFILL)])
            made = channel.unary_stream(GENERATE)(request.SerializeToString(), timeout=20.0, metadata=metadata)
            time.sleep(0.05)
            made.cancel()
        admitted = _admitted(channel, request, metadata)
    yield Answer("admitted" if admitted else "refused", 0.0, "it evades the quota by cancelling" * admitted, must=False)


def _principal(target: Target, generator: random.Random, kind: int) -> Any:
    """Metadata of a principal that has used nothing yet or, if tokens identify principals, of one of a few."""
    return target.metadata(f"evader-{3 * generator.randrange(10**6) + kind}")


def _admitted(channel: grpc.Channel, request: draft_pb2.GenerateRequest, metadata: Any) -> bool:
    try:
        for _ in channel.unary_stream(GENERATE)(request.SerializeToString(), timeout=60.0, metadata=metadata):
            pass
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        raise
    return True


def _evasion(how: str, tokens: int) -> Answer:
    wrong = f"{tokens} tokens {how}, of {QUOTA} a minute" if tokens > QUOTA + PREFILL else ""
    return Answer(f"{tokens} tokens", 0.0, wrong, must=False)


KINDS = (
    Kind("random messages", ("draft", "verify"), random_messages, 1.0),
    Kind("strangers", ("draft", "verify"), strangers, 3.0),
    Kind("huge messages", ("draft", "verify"), huge_messages, 6.0),
    Kind("cancelled calls", ("draft",), left_calls, 3.0),
    Kind("cancelled tokenizing", ("draft",), left_tokenizing, 3.0),
    Kind("quota evasion: resume", ("quota draft",), evaded_by_resume, 0.0),
    Kind("quota evasion: at once", ("quota draft",), evaded_at_once, 0.0),
    Kind("quota evasion: cancel", ("quota draft",), evaded_by_cancelling, 0.0),
)
