"""Messages that nobody should send: `python tests/hostile.py [--messages 100000]`.

Random messages of both services, whole and with bytes changed, cut off or repeated, go to the real services over real
sockets, beside a client that behaves. Prints the status codes, what was answered with the wrong one, and how fast that
client is, alone and beside them.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from faults import running_cluster
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dynatree.client import Client
from dynatree.v1 import draft_pb2, tree_pb2, verify_pb2

NUMBERS = (0, 1, 2, 5, 63, 64, 255, 256, 2047, 2048, 4096, 2**31 - 1, 2**32 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "Once upon a time", "\0", "\x1b[31m", "<|endoftext|>", "é" * 50, "../../etc/passwd", "%s%n", "\ud7ff")
OURS = {  # the codes with which a wrong message may be answered
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def fill(message: Message, generator: random.Random, depth: int = 0) -> Message:
    """A message with some of its fields set to something."""
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
    """The bytes with some of them changed, cut off, or repeated."""
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


def calls(generator: random.Random, model: tree_pb2.ModelInfo) -> Iterator[tuple[str, list[bytes]]]:
    """Methods and the messages to send to them, for ever."""
    while True:
        if generator.random() < 0.5:
            request = fill(draft_pb2.GenerateRequest(), generator)
            assert isinstance(request, draft_pb2.GenerateRequest)
            if generator.random() < 0.8:
                request.max_new_tokens = generator.choice((0, 1, 2, 3, 2**32 - 1))
                request.n = generator.choice((0, 1, 2, 65))
            yield "/dynatree.v1.DraftService/Generate", [broken(request.SerializeToString(), generator)]
            continue
        opening = verify_pb2.OpenSession(prompt_ids=[5, 6, 7], max_new_tokens=3, draft=model)
        if generator.random() < 0.3:
            fill(opening, generator)
        messages: list[Message] = [verify_pb2.VerifyRequest(open=opening)]
        for number in range(generator.randrange(3)):
            tree = tree_pb2.TokenTree(round=number, base_length=4 + number)
            if generator.random() < 0.7:
                fill(tree, generator)
            messages.append(verify_pb2.VerifyRequest(tree=tree))
        yield "/dynatree.v1.VerifyService/Verify", [broken(each.SerializeToString(), generator) for each in messages]


def main() -> int:
    """Send them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    codes: Counter[tuple[str, str]] = Counter()
    wrong: list[tuple[str, str, list[bytes]]] = []
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as cluster:
        verify, draft = cluster.verifies[0].address, cluster.drafts[0].address
        with grpc.insecure_channel(verify) as channel:
            ask = channel.unary_unary("/dynatree.v1.VerifyService/GetModelInfo")
            model = verify_pb2.VerifyServiceGetModelInfoResponse.FromString(ask(b"")).model
        client = Client(draft)
        alone = speed(client, 20)
        share = options.messages // options.threads

        def attack(seed: int) -> None:
            generator, sent = random.Random(seed), 0
            with grpc.insecure_channel(draft) as one, grpc.insecure_channel(verify) as other:
                for method, messages in calls(generator, model):
                    channel = one if "Draft" in method else other
                    call = channel.stream_stream(method)(iter(messages), timeout=5.0)
                    code, details = status(call)
                    codes[method.rpartition("/")[2], code.name] += 1
                    leaks = any(word in details for word in ("/tmp", "/root", ".py", ".sock", "Traceback"))
                    if code not in OURS or leaks:
                        wrong.append((f"{code.name}: {details}", method, messages))
                    sent += len(messages)
                    if sent >= share:
                        return

        threads = [threading.Thread(target=attack, args=(seed,)) for seed in range(options.threads)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        beside = []
        while any(thread.is_alive() for thread in threads):
            beside.append(speed(client, 3))
        seconds = time.monotonic() - started
        after = speed(client, 20)
        client.close()
        alive = [process.process is not None and process.process.poll() is None for process in cluster.verifies]
    for (method, code), count in sorted(codes.items()):
        print(f"{method} {code}: {count}")
    for said, method, messages in wrong[:10]:
        print(f"WRONG {method}: {said[:300]} {messages}")
    print(f"{options.messages} messages in {seconds:.0f} s, {len(wrong)} wrongly answered, all alive: {all(alive)}")
    print(f"tokens/s of a client that behaves: {alone:.0f} alone, {median(beside):.0f} beside them, {after:.0f} after")
    return 1 if wrong or not all(alive) else 0


def status(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def speed(client: Client, count: int) -> float:
    """Tokens a second of some completions."""
    rates = []
    for _ in range(count):
        started = time.monotonic()
        tokens = len(client.generate("Once upon a time", max_new_tokens=48, ignore_eos=True).token_ids)
        rates.append(tokens / (time.monotonic() - started))
    return median(rates)


if __name__ == "__main__":
    sys.exit(main())
