"""Tests many concurrent requests: each gets the tokens that it gets alone, in order, and leaves nothing behind."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from dynatree.client import Client, DynaTreeError, InvalidRequestError, ServerBusyError
from dynatree.common.limits import MAX_SESSIONS, MAX_TREE_NODES
from dynatree.common.wire import model_info_to_pb
from dynatree.draft import draft_server
from dynatree.draft.policies import policy_names, residual_policies
from dynatree.engine.shared_cores import SharedCores
from dynatree.serving.admission import Admission
from dynatree.v1 import verify_pb2, verify_pb2_grpc
from dynatree.verify import serve_verify
from tests.campaigns.recurrent_matrix import saved_pair
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

pytestmark = pytest.mark.early

# with a program, without, and with recurrent layers
FAMILIES = ("gpt_neox", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "qwen3_5_text")), "gpt2")
SESSIONS = 6


@pytest.fixture(scope="module", params=FAMILIES)
def services(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3_5_text":
        target, draft = saved_pair(request.param, folder)
    else:
        target = save_random_model(folder / "target", request.param, seed=3)
        draft = save_noisy_copy(folder / "draft", target, seed=4)
    with running_services(folder, target, draft, sessions=SESSIONS) as running:
        yield running


def mixed_requests(count):
    """Requests of every kind: policies, lengths, sampling schemes, stop tokens and n."""
    generator = random.Random(11)
    requests = []
    for number in range(count):
        options = {"max_new_tokens": generator.choice([3, 20, 40, 64]), "n": generator.choice([1, 1, 1, 3])}
        options["policy"] = policy_names()[number % len(policy_names())]
        if number % 3:
            options |= {"temperature": generator.choice([0.7, 1.0]), "seed": number, "top_k": 30}
            if options["policy"] in residual_policies() and number % 2:
                options["scheme"] = "residual"
        if number % 4 == 0:
            options |= {"stop": ["a", "on"], "stop_token_ids": [generator.randrange(2, 2048) for _ in range(40)]}
        if number % 5 == 0:
            options["repetition_penalty"] = 1.3
        prompt = generator.choices(range(2, 2048), k=generator.choice([1, 5, 30, 60]))
        requests.append((prompt, options | {"ignore_eos": number % 2 == 0}))
    return requests


def outcome(client, request):
    prompt, options = request
    completion = client.generate(prompt, **options)
    every = (completion, *completion.alternatives)
    return [(each.token_ids, each.text, each.finish_reason) for each in every]


@pytest.mark.long
@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.long)])  # the kinds repeat after 60
def test_each_gets_what_it_gets_alone(services, count):
    assert_each_gets_what_it_gets_alone(services, count)


@pytest.mark.long
def test_each_gets_what_it_gets_alone_in_fixed_rows(tmp_path):
    """Passes have 32 fixed rows and the device chooses the tokens, as on a GPU; a call reads several drafts' levels."""
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=3)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=4)
    with running_services(tmp_path, target, draft, sessions=SESSIONS, fixed_rows=(32,)) as running:
        assert_each_gets_what_it_gets_alone(running, 60)


def assert_each_gets_what_it_gets_alone(services, count):
    requests = mixed_requests(count)
    with Client(services.draft_address) as client:
        alone = [outcome(client, request) for request in requests]
        with ThreadPoolExecutor(32) as threads:
            together = list(threads.map(lambda request: outcome(client, request), requests))
        for request, expected, got in zip(requests, alone, together, strict=True):
            assert got == expected, request


def test_sessions_share_passes_and_say_so(services, monkeypatch):
    forward = services.target.forward
    # sessions that arrive while a pass runs are in the next one
    monkeypatch.setattr(services.target, "forward", lambda segments: time.sleep(0.02) or forward(segments))
    with Client(services.draft_address) as client, ThreadPoolExecutor(SESSIONS) as threads:
        request = ([5, 6, 7], {"max_new_tokens": 60, "ignore_eos": True})
        stats = list(threads.map(lambda _: client.generate(request[0], **request[1]).stats, range(SESSIONS)))
    assert max(each.sessions_per_pass for each in stats) > 1.5
    slots = 3 + 60 + MAX_TREE_NODES
    assert max(each.kv_cache_usage for each in stats) == pytest.approx(SESSIONS * slots / services.target.kv_cache.size)
    assert all(each.rows_per_pass >= each.sessions_per_pass for each in stats)


class Gate:
    """Blocks the target's forward passes while it is shut, and records the first token of every prompt that is read."""

    def __init__(self, target, monkeypatch):
        self.read = []
        self._open = threading.Event()
        self._open.set()
        self._forward = target.forward
        monkeypatch.setattr(target, "forward", self)

    def __call__(self, segments):
        assert self._open.wait(30)
        self.read += [segment.token_ids[0] for segment in segments if segment.start == 0]
        return self._forward(segments)

    @contextmanager
    def shut(self):
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


def test_no_forward_runs_for_what_was_cancelled_in_the_queue(services, monkeypatch):
    """Cancelled requests leave the queue at once, and the next one is served."""
    gate = Gate(services.target, monkeypatch)
    with Client(services.draft_address) as client:
        running = [client.stream([5], ignore_eos=True, queue_position=True) for _ in range(SESSIONS)]
        with gate.shut():
            queued = []
            for number in range(20):
                queued.append(client.stream([9, 9], queue_position=True))
                assert next(queued[-1]).queue_position == number
            for stream in queued:
                stream.close()
        for stream in running:
            next(stream)
            stream.close()
        assert len(client.generate([7, 7], max_new_tokens=2).token_ids) == 2
    assert 9 not in gate.read
    assert gate.read.count(7) == 1


def test_the_queue_is_served_in_order(tmp_path, monkeypatch):
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=3)
    with (
        running_services(tmp_path, target, target, sessions=1) as services,
        Client(services.draft_address) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        gate = Gate(services.target, monkeypatch)
        running = client.stream([5], ignore_eos=True, max_new_tokens=8)
        with gate.shut():
            queued = []
            for number in range(8):
                queued.append(client.stream([100 + number], max_new_tokens=4, queue_position=True))
                assert next(queued[-1]).queue_position == number
        list(threads.map(list, [running, *queued]))
    assert gate.read == [5, *range(100, 108)]


def test_of_many_calls_half_are_cancelled_and_nothing_of_them_remains(tmp_path, monkeypatch):
    """Of 200 calls, 60 are cancelled in the queue and 40 while streaming; the others are served in order."""
    admissions = []

    class Noted(Admission):
        def __init__(self, *args):
            super().__init__(*args)
            admissions.append(self)

    monkeypatch.setattr(serve_verify, "Admission", Noted)
    monkeypatch.setattr(draft_server, "Admission", Noted)
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=3)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=4)
    generator = random.Random(5)
    with (
        running_services(tmp_path, target, draft, sessions=MAX_SESSIONS, prefix_cache=False) as services,
        Client(services.draft_address) as client,
        ThreadPoolExecutor(100) as threads,
    ):
        gate = Gate(services.target, monkeypatch)
        waits = []

        def read(stream, leaves):
            for chunk in stream:
                if leaves and chunk.token_ids:
                    stream.close()
                    return None
            waits.append(stream.completion.stats.queue_seconds)
            return len(stream.completion.token_ids)

        for wave in range(2):
            prompts = range(100 + 100 * wave, 200 + 100 * wave)
            options = {"max_new_tokens": 12, "ignore_eos": True, "queue_position": True}
            gate.read.clear()
            with gate.shut():
                streams = {prompt: client.stream([prompt], **options) for prompt in prompts}
                queued = prompts[MAX_SESSIONS:]
                positions = [next(streams[prompt]).queue_position for prompt in queued]
                assert sorted(positions) == list(range(len(queued)))
                # concurrent calls are checked concurrently
                assert all(abs(position - place) < MAX_SESSIONS for place, position in enumerate(positions))
                left = set(generator.sample(queued, 30))
                for prompt in left:
                    streams[prompt].close()
            leaving = set(generator.sample(sorted(set(prompts) - left), 20))
            stayed = [prompt for prompt in prompts if prompt not in left]
            counts = list(threads.map(lambda prompt: read(streams[prompt], prompt in leaving), stayed))  # noqa: B023
            assert counts == [None if prompt in leaving else 12 for prompt in stayed]
            assert sorted(gate.read) == stayed, "each once, and none that left the queue"
            order = [stayed.index(prompt) for prompt in gate.read]
            # sessions that are admitted together open concurrently
            assert all(abs(place - read) < MAX_SESSIONS for read, place in enumerate(order))
        wait_until_idle(services)
        deadline = time.monotonic() + 5  # slots are released a moment before their ticket
        while any(each.running for each in admissions) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [(each.running, each.waiting, each.slots_held) for each in admissions] == [(0, 0, 0)] * 2
        chunks = list(client.stream([7, 7], max_new_tokens=2, queue_position=True))
        assert [chunk.queue_position for chunk in chunks] == [None] * len(chunks), "it does not wait"
    assert len(waits) == 100


def test_a_prompt_that_can_never_fit_is_refused_at_once_and_a_full_queue_says_when_to_come_back(tmp_path):
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=3)
    with (
        running_services(tmp_path, target, target, sessions=1, queue=1, prefix_cache=False) as services,
        Client(services.draft_address) as client,
    ):
        running = client.stream([5], ignore_eos=True)
        next(running)
        with pytest.raises(InvalidRequestError):
            client.generate([5] * 5000, max_new_tokens=2)
        waiting = client.stream([5], max_new_tokens=2, queue_position=True)
        next(waiting)
        with pytest.raises(ServerBusyError, match="1 requests are waiting") as busy:
            client.generate([5], max_new_tokens=2)
        assert busy.value.retry_after is not None
        running.close()
        assert sum(len(chunk.token_ids) for chunk in waiting) == 2
        deadline = time.monotonic() + 10
        while not services.idle:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture(name="impatient")
def impatient_fixture(tmp_path):
    """Services that wait half a second for a silent peer."""
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=3)
    with running_services(tmp_path, target, target, sessions=2, idle_seconds=0.5, prefix_cache=False) as services:
        yield services


def wait_until_idle(services):
    deadline = time.monotonic() + 20
    while not services.idle:
        assert time.monotonic() < deadline, "a session was not closed"
        time.sleep(0.01)


def test_a_session_whose_peer_sends_nothing_is_ended(impatient):
    opening = verify_pb2.OpenSession(
        prompt_ids=[5, 6], draft=model_info_to_pb(impatient.draft.info), max_new_tokens=50, ignore_eos=True
    )

    def requests():
        yield verify_pb2.VerifyRequest(open=opening)
        silent.wait(20)

    silent = threading.Event()
    with grpc.insecure_channel(impatient.verify_address) as channel:
        answers = verify_pb2_grpc.VerifyServiceStub(channel).Verify(requests())
        assert next(answers).HasField("opened")
        with pytest.raises(grpc.RpcError) as ended:
            next(answers)
        silent.set()
    assert ended.value.code() == grpc.StatusCode.ABORTED
    assert "idle" in ended.value.details()
    wait_until_idle(impatient)


def test_a_client_that_reads_nothing_loses_its_session_and_others_are_served(impatient):
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with Client(impatient.draft_address, channel_options=small_window) as client:
        streams = [client.stream([5, 6], policy="hybrid", trace=True, ignore_eos=True) for _ in range(2)]
        for stream in streams:
            next(stream)
        with Client(impatient.draft_address, timeout=20) as other:
            assert len(other.generate([5, 6], max_new_tokens=4, ignore_eos=True).token_ids) == 4
        wait_until_idle(impatient)
        for stream in streams:
            with pytest.raises(DynaTreeError):
                list(stream)


def test_services_are_considerate_while_two_completions_share_the_cores(tmp_path, monkeypatch):
    """Each service enters the context that `test_shared_cores.py` tests, and leaves it."""
    shared = {}

    class Counted(SharedCores):
        @contextmanager
        def shared(self):
            counts = shared.setdefault(type(self._consideration).__name__, [])
            try:
                with super().shared():
                    counts.append(self._sharing)
                    yield
            finally:
                counts.append(self._sharing)

    monkeypatch.setattr("dynatree.verify.service.SharedCores", Counted)
    monkeypatch.setattr("dynatree.draft.serve_draft.SharedCores", Counted)
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=1)
    with (
        running_services(tmp_path, target, target, sessions=2) as services,
        Client(services.draft_address) as client,
    ):
        first = client.stream([5], max_new_tokens=100, ignore_eos=True)
        next(first)
        client.generate([6], max_new_tokens=3, ignore_eos=True)
        assert [counts[:2] for counts in (shared["ShortWaits"], shared["HalfTheThreads"])] == [[1, 2]] * 2
        first.close()
    assert [counts[-1] for counts in shared.values()] == [0, 0]
