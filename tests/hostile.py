"""Messages that nobody should send: `python tests/hostile.py [--messages 100000] [--seconds 60]`.

Three attacks go to the real services over real sockets, one after the other, beside a client that behaves: random
messages of both services, whole and with bytes changed, cut off or repeated; HTTP/2 frames (hostile_frames.py); and
requests that are as large, as many or as slow as they may be. Prints the status codes, what was answered with the wrong
one, and how fast that client is, alone and beside them. The attackers are processes of the lowest priority: what is
measured is what the services do, not what the attackers take from the processor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import hostile_frames
from faults import running_cluster
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dynatree.client import Client
from dynatree.v1 import draft_pb2, tree_pb2, verify_pb2

NUMBERS = (0, 1, 2, 5, 63, 64, 255, 256, 2047, 2048, 4096, 2**31 - 1, 2**32 - 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "Once upon a time", "\0", "\x1b[31m", "<|endoftext|>", "é" * 50, "../../etc/passwd", "%s%n", "\ud7ff")
QUOTAS = ("--principal-sessions", "2", "--principal-queue", "4")
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


def attack_with_messages(share: int, rate: float, seed: int, draft: str, verify: str, model: bytes, told: Any) -> None:
    """Send so many messages."""
    os.nice(19)
    generator, sent, started = random.Random(seed), 0, time.monotonic()
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    with grpc.insecure_channel(draft) as one, grpc.insecure_channel(verify) as other:
        for method, messages in calls(generator, tree_pb2.ModelInfo.FromString(model)):
            channel = one if "Draft" in method else other
            _call(channel, method, messages, 5.0, codes, wrong)
            sent += len(messages)
            if sent >= share:
                break
            if rate:
                time.sleep(max(0.0, started + sent / rate - time.monotonic()))
    told.put((sent, codes, wrong))


def attack_with_frames(
    seconds: float, rate: float, seed: int, draft: str, verify: str, model: bytes, told: Any
) -> None:
    """Send frames for so long."""
    os.nice(19)
    generator, until = random.Random(seed), time.monotonic() + seconds
    codes: Counter[str] = Counter()
    sent = 0
    while time.monotonic() < until:
        attack = generator.choice(hostile_frames.ATTACKS)
        if rate:
            time.sleep(1.0 / rate)
        try:
            sent += attack(generator.choice((draft, verify)).removeprefix("unix:"), generator)
            codes[f"{attack.__name__} connections"] += 1
        except OSError as error:
            codes[f"{attack.__name__} {type(error).__name__}"] += 1
    told.put((sent, codes, []))


def attack_with_bombs(seconds: float, rate: float, seed: int, draft: str, verify: str, model: bytes, told: Any) -> None:
    """Ask for much for so long."""
    os.nice(19)
    generator, until = random.Random(seed), time.monotonic() + seconds
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    many = tree_pb2.ModelInfo.FromString(model)
    ids = [5] * (4 * 1024 * 1024 - 1000)  # a byte each
    large = draft_pb2.GenerateRequest(max_new_tokens=1)
    large.token_ids.ids.extend(ids)
    opening = verify_pb2.VerifyRequest(open=verify_pb2.OpenSession(prompt_ids=ids, max_new_tokens=1, draft=many))
    tree = verify_pb2.VerifyRequest(tree=tree_pb2.TokenTree(token_ids=ids[:2_000_000], parents=ids[:2_000_000]))
    small = verify_pb2.VerifyRequest(open=verify_pb2.OpenSession(prompt_ids=[5], max_new_tokens=3, draft=many))
    stops = [chr(97 + number % 26) * 64 + str(number) for number in range(16)]
    everything = draft_pb2.GenerateRequest(text="Once", n=64, log_probs=True, stop=stops, max_new_tokens=1000)
    bombs: list[tuple[str, list[bytes], float]] = [
        ("/dynatree.v1.DraftService/Generate", [large.SerializeToString()], 5.0),
        ("/dynatree.v1.VerifyService/Verify", [opening.SerializeToString()], 5.0),
        ("/dynatree.v1.VerifyService/Verify", [small.SerializeToString(), tree.SerializeToString()], 5.0),
        ("/dynatree.v1.DraftService/Generate", [everything.SerializeToString()], 0.3),
        ("/dynatree.v1.DraftService/Generate", [b"\x0a" + b"\xff" * 4_000_000], 5.0),
    ]
    sent = 0
    with grpc.insecure_channel(draft) as one, grpc.insecure_channel(verify) as other:
        while time.monotonic() < until:
            if rate:
                time.sleep(1.0 / rate)
            if generator.random() < 0.2:  # many calls at once, of which nobody reads anything
                flood = [
                    one.unary_stream("/dynatree.v1.DraftService/Generate")(everything.SerializeToString(), timeout=0.3)
                    for _ in range(100)
                ]
                time.sleep(0.3)
                for call in flood:
                    call.cancel()
                codes["flood calls"] += len(flood)
                sent += len(flood)
                continue
            method, messages, timeout = generator.choice(bombs)
            _call(one if "Draft" in method else other, method, messages, timeout, codes, wrong)
            sent += len(messages)
    told.put((sent, codes, wrong))


def _call(
    channel: grpc.Channel, method: str, messages: list[bytes], timeout: float, codes: Counter[str], wrong: list[str]
) -> None:
    code, details = status(channel.stream_stream(method)(iter(messages), timeout=timeout))
    codes[f"{method.rpartition('/')[2]} {code.name}"] += 1
    leaks = any(word in details for word in ("/tmp", "/root", ".py", ".sock", "Traceback"))
    if code not in OURS or leaks:
        wrong.append(f"{method}: {code.name}: {details[:300]} {[each[:200] for each in messages]}")


def main() -> int:
    """Run the attacks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of frames, and of large requests")
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.0, help="messages, or attacks, a second of each; 0: any")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder), draft_arguments=QUOTAS) as cluster:
        verify, draft = cluster.verifies[0].address, cluster.drafts[0].address
        with grpc.insecure_channel(verify) as channel:
            ask = channel.unary_unary("/dynatree.v1.VerifyService/GetModelInfo")
            model = verify_pb2.VerifyServiceGetModelInfoResponse.FromString(ask(b"")).model.SerializeToString()
        for attack, share in (
            (attack_with_messages, options.messages // options.attackers),
            (attack_with_frames, options.seconds),
            (attack_with_bombs, options.seconds),
        ):
            with Client(draft, principal="good") as client:
                failed |= run(attack, share, options.rate, options.attackers, (draft, verify, model), client)
            for process in (*cluster.verifies, *cluster.drafts):
                if process.process is None or process.process.poll() is not None:
                    print(f"{process.name} has ended: {process.log.read_text()[-1000:]}")
                    failed = True
    return 1 if failed else 0


def run(attack: Any, share: float, rate: float, attackers: int, where: tuple[str, str, bytes], client: Client) -> bool:
    """One attack, and what came of it; whether something was answered wrongly."""
    spawn = multiprocessing.get_context("spawn")
    told = spawn.Queue()
    alone = speed(client, 20)
    processes = [spawn.Process(target=attack, args=(share, rate, seed, *where, told)) for seed in range(attackers)]
    started = time.monotonic()
    for process in processes:
        process.start()
    beside, results = [], []
    while len(results) < attackers and all(not process.exitcode for process in processes):
        beside.append(speed(client, 3))
        while not told.empty():
            results.append(told.get())
    seconds = time.monotonic() - started
    for process in processes:
        process.join()
    after = speed(client, 20)
    codes: Counter[str] = sum((each for _, each, _ in results), Counter())
    wrong = [text for *_, texts in results for text in texts]
    print(f"== {attack.__name__}: {sum(sent for sent, *_ in results)} sent in {seconds:.0f} s")
    for code, count in sorted(codes.items()):
        print(f"   {code}: {count}")
    for text in wrong[:10]:
        print(f"   WRONG {text}")
    print(f"   {len(wrong)} wrongly answered, {attackers - len(results)} attackers failed")
    print(
        f"   tokens/s of a client that behaves: {alone:.0f} before, {median(beside):.0f} beside them "
        f"({median(beside) / alone:.2f}), {after:.0f} after",
        flush=True,
    )
    return bool(wrong) or len(results) < attackers


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
