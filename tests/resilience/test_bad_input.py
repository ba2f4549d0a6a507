"""Tests that every malformed request gets its status code, and a message with the fault and the expected value.

After each refusal the service still completes a request, so nothing leaks. test_bad_options.py covers sampling options,
policy settings and draft distributions, with these fixtures.
"""

import asyncio
import itertools
import threading
import time

import grpc
import pytest

from dynatree.client import AsyncClient, Client, InvalidRequestError
from dynatree.common.errors import RoundInFlightError
from dynatree.common.wire import model_info_to_pb
from dynatree.draft.text.prompts import PromptEncoder
from dynatree.v1 import draft_pb2, draft_pb2_grpc, tree_pb2, verify_pb2, verify_pb2_grpc
from dynatree.verify import service as verify_service
from tests.support.model_zoo import CONTEXT, save_random_model
from tests.support.refusals import said
from tests.support.services import running_services

PROMPT = [5, 6, 7]
END = "<|endoftext|>"
MAX_NODES = 32
Code = grpc.StatusCode


@pytest.fixture(scope="module", name="services")
def services_fixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    target = save_random_model(folder / "target", "llama", seed=1)
    draft = save_random_model(folder / "draft", "gpt_neox", seed=2, max_position_embeddings=CONTEXT - 40)
    with running_services(folder, target, draft, sessions=2, max_tree_nodes=MAX_NODES, prefix_cache=False) as services:
        yield services


@pytest.fixture(name="stub")
def stub_fixture(services):
    with grpc.insecure_channel(services.verify_address) as channel:
        yield verify_pb2_grpc.VerifyServiceStub(channel)


@pytest.fixture(name="client")
def client_fixture(services):
    with Client(services.draft_address) as client:
        yield client


@pytest.fixture(scope="module", name="bystander")
def bystander_fixture(services):
    """A client that stays connected through all tests."""
    with Client(services.draft_address) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_leaks(services, bystander):
    """Check that every slot is free again on both sides soon after each test."""
    yield
    deadline = time.monotonic() + 60
    while not services.idle:
        assert time.monotonic() < deadline, "a session was not closed"
        time.sleep(0.01)
    assert len(bystander.generate(PROMPT, max_new_tokens=3).token_ids) == 3


def opening(services, **changes):
    fields = {"prompt_ids": PROMPT, "max_new_tokens": 20, "draft": model_info_to_pb(services.draft.info)} | changes
    return verify_pb2.VerifyRequest(open=verify_pb2.OpenSession(**fields))


def tree(token_ids=(8, 9), parents=(-1, 0), log_probs=(), round_=0, base_length=4):
    message = tree_pb2.TokenTree(
        round=round_, base_length=base_length, token_ids=token_ids, parents=parents, log_probs=log_probs
    )
    return verify_pb2.VerifyRequest(tree=message)


def refusal(stub, *requests):
    """Return the status with which the service ends a stream of these requests, each sent after the last response."""
    answered = threading.Semaphore(1)

    def send():
        for request in requests:
            assert answered.acquire(timeout=60)
            yield request

    call = stub.Verify(send(), timeout=60)
    try:
        for _ in call:
            answered.release()
    except grpc.RpcError as error:
        return error.code(), said(error)
    finally:
        answered.release()
    raise AssertionError("the service refused nothing")


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"prompt_ids": []}, Code.INVALID_ARGUMENT, "prompt_ids is empty"),
        (
            {"prompt_ids": [5, 2048]},
            Code.INVALID_ARGUMENT,
            r"prompt_ids[1] is 2048, the model's vocabulary is [0, 2048)",
        ),
        ({"prompt_ids": [5] * CONTEXT}, Code.OUT_OF_RANGE, f"({CONTEXT} in the prompt, 20 in"),
        ({"max_new_tokens": 0}, Code.INVALID_ARGUMENT, "max_new_tokens is 0, expected at least 1"),
        ({"max_new_tokens": CONTEXT}, Code.OUT_OF_RANGE, f"requested {CONTEXT + 3} tokens"),
        ({"sampling": tree_pb2.SamplingOptions(temperature=-1)}, Code.INVALID_ARGUMENT, "temperature is -1"),
        ({"sampling": tree_pb2.SamplingOptions(temperature=float("nan"))}, Code.INVALID_ARGUMENT, "temperature is nan"),
        ({"sampling": tree_pb2.SamplingOptions(top_p=0)}, Code.INVALID_ARGUMENT, "top_p is 0"),
        (
            {"draft": tree_pb2.ModelInfo(name="other", tokenizer_fingerprint="ab" * 32)},
            Code.FAILED_PRECONDITION,
            "other",
        ),
        ({"draft": None}, Code.FAILED_PRECONDITION, "(unnamed)"),
    ],
)
def test_a_session_that_cannot_be_opened(services, stub, changes, code, message):
    got, details = refusal(stub, opening(services, **changes))
    assert got == code
    assert message in details


def test_a_tokenizer_mismatch_names_both_models(services, stub):
    other = tree_pb2.ModelInfo(name="some-draft", tokenizer_fingerprint="cd" * 32)
    _, details = refusal(stub, opening(services, draft=other))
    assert "some-draft" in details
    assert services.target.info.name in details


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (tree(parents=(-1,)), Code.INVALID_ARGUMENT, "needs 2 parents, got 1"),
        (tree(parents=(-1, 1)), Code.INVALID_ARGUMENT, "parents[1] is 1"),
        (tree(parents=(-1, -2)), Code.INVALID_ARGUMENT, "parents[1] is -2"),
        (tree(token_ids=(8, 8), parents=(-1, -1)), Code.INVALID_ARGUMENT, "siblings must differ"),
        (tree(token_ids=(8, 2048)), Code.INVALID_ARGUMENT, "token_ids[1] is 2048"),
        (tree(log_probs=(-1.0,)), Code.INVALID_ARGUMENT, "0 or 2 log_probs"),
        (tree(log_probs=(-1.0, 0.1)), Code.INVALID_ARGUMENT, "log_probs[1] is 0.1"),
        (tree(log_probs=(-1.0, float("nan"))), Code.INVALID_ARGUMENT, "log_probs[1] is nan"),
        (tree(log_probs=(float("-inf"), 0.0)), Code.INVALID_ARGUMENT, "log_probs[0] is -inf"),
        (tree(range(40), [-1] * 40), Code.INVALID_ARGUMENT, f"at most {MAX_NODES} are accepted (max_tree_nodes)"),
        (tree(range(2, 22), range(-1, 19)), Code.INVALID_ARGUMENT, "20 levels deep, at most 19"),
        (verify_pb2.VerifyRequest(), Code.INVALID_ARGUMENT, "expected the field `tree`"),
        (tree(base_length=9), Code.FAILED_PRECONDITION, "base_length is 9, expected 4"),
        (tree(round_=1), Code.FAILED_PRECONDITION, "round 1, expected round 0"),
    ],
)
def test_a_tree_that_cannot_be_verified(services, stub, request_, code, message):
    got, details = refusal(stub, opening(services), request_)
    assert got == code
    assert message in details


def test_a_second_opening_is_refused(services, stub):
    assert refusal(stub, opening(services), opening(services))[0] == Code.INVALID_ARGUMENT


def test_a_stream_must_begin_with_an_opening(stub):
    code, details = refusal(stub, tree())
    assert code == Code.INVALID_ARGUMENT
    assert "the field `open`" in details


def test_a_stale_round_is_refused_with_the_expected_value(services, stub):
    code, details = refusal(stub, opening(services), tree((), (), base_length=4), tree((), (), base_length=5))
    assert code == Code.FAILED_PRECONDITION
    assert "round 0, expected round 1" in details


def test_a_finished_session_takes_no_more_trees(services, stub):
    code, details = refusal(stub, opening(services, max_new_tokens=1), tree())
    assert code == Code.FAILED_PRECONDITION
    assert "the session has finished" in details


def test_two_rounds_at_once_are_aborted(services, stub):
    empty = tree((), ())
    call = stub.Verify(iter([opening(services), *[empty] * 50]), timeout=60)
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    # the second tree is refused because the first is in flight, or because it has the first one's round
    assert error.value.code() in (Code.ABORTED, Code.FAILED_PRECONDITION)


def test_two_rounds_at_once_are_aborted_while_the_target_works(services, stub, monkeypatch):
    forward, refused = services.target.forward, threading.Event()

    def until_refused(segments):
        assert refused.wait(60)
        return forward(segments)

    def refusing(message):
        refused.set()
        return RoundInFlightError(message)

    opened = threading.Event()

    def send():
        yield opening(services)
        assert opened.wait(60)
        monkeypatch.setattr(services.target, "forward", until_refused)
        monkeypatch.setattr(verify_service, "RoundInFlightError", refusing)
        yield tree()
        yield tree()

    call = stub.Verify(send(), timeout=60)
    next(call)
    opened.set()
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    assert error.value.code() == Code.ABORTED
    assert "one round at a time" in error.value.details()


def test_a_message_beyond_the_limit_is_refused(services, stub):
    huge = tree_pb2.TokenTree(token_ids=[2047] * 3_000_000)
    code, _ = refusal(stub, opening(services), verify_pb2.VerifyRequest(tree=huge))
    assert code == Code.RESOURCE_EXHAUSTED


def test_more_sessions_than_there_are_wait_for_their_turn(services, client):
    streams = [client.stream(PROMPT, n=64) for _ in range(2)]  # for longer than the third takes to come
    for stream in streams:
        next(stream)
    with client.stream(PROMPT, max_new_tokens=3, queue_position=True) as waiting:
        assert next(waiting).queue_position == 0
        streams[0].close()
        assert sum(len(chunk.token_ids) for chunk in waiting) == 3
    streams[1].close()


@pytest.mark.parametrize(
    ("prompt", "options", "code", "message"),
    [
        ("", {}, Code.INVALID_ARGUMENT, "the prompt is empty"),
        ([], {}, Code.INVALID_ARGUMENT, "the prompt is empty"),
        ([2048], {}, Code.INVALID_ARGUMENT, r"token_ids\[0\] is 2048"),
        (PROMPT, {"max_new_tokens": 0}, Code.INVALID_ARGUMENT, "max_new_tokens is 0"),
        (PROMPT, {"max_new_tokens": CONTEXT}, Code.OUT_OF_RANGE, f"maximum context length is {CONTEXT} tokens"),
        ([5] * CONTEXT, {}, Code.OUT_OF_RANGE, f"{CONTEXT} in the prompt"),
        (PROMPT, {"temperature": -1.0}, Code.INVALID_ARGUMENT, "temperature is -1"),
        (PROMPT, {"top_p": 2.0}, Code.INVALID_ARGUMENT, "top_p is 2"),
        (PROMPT, {"policy": "medusa"}, Code.INVALID_ARGUMENT, "expected one of autoregressive, dynatree"),
        (PROMPT, {"policy": "linear", "policy_settings": {"depht": 3}}, Code.INVALID_ARGUMENT, "no setting depht"),
        (PROMPT, {"stop": [""]}, Code.INVALID_ARGUMENT, r"stop\[0\] has 0 characters"),
        (PROMPT, {"stop": ["x"] * 17}, Code.INVALID_ARGUMENT, "17 stop strings, at most 16"),
        (PROMPT, {"stop": ["x" * 1025]}, Code.INVALID_ARGUMENT, r"stop\[0\] has 1025 characters, expected 1 to 1024"),
        (PROMPT, {"stop_token_ids": [5] * 1025}, Code.INVALID_ARGUMENT, "1025 stop_token_ids, at most 1024"),
        (PROMPT, {"stop_token_ids": [5] * 1024, "stop": END}, Code.INVALID_ARGUMENT, "1025 stop_token_ids"),
    ],
)
def test_a_request_that_cannot_be_served(client, prompt, options, code, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        client.generate(prompt, **options)
    assert error.value.code == code


def test_past_the_drafts_context_rounds_become_plain_steps(client):
    completion = client.generate(PROMPT, policy="linear", policy_settings={"depth": 8}, ignore_eos=True)
    assert len(completion.token_ids) == CONTEXT - len(PROMPT)
    assert completion.finish_reason == "length"
    assert completion.token_ids == client.generate(PROMPT, policy="autoregressive", ignore_eos=True).token_ids


def test_an_internal_error_shows_an_id_and_no_detail(services, client, monkeypatch, caplog):
    def broken(segments):
        raise ValueError("a secret of /some/path")

    monkeypatch.setattr(services.target, "forward", broken)
    with pytest.raises(Exception, match="request") as error:
        client.generate(PROMPT, max_new_tokens=3)
    assert "secret" not in str(error.value)
    assert "a secret of /some/path" in caplog.text


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.long)])
def test_sessions_that_end_at_once_are_all_closed(services, count):
    """The draft cancels its stream as soon as the last commit arrives, whatever the verify service is doing."""
    for _ in range(count):
        with Client(services.draft_address) as client:
            assert len(client.generate(PROMPT, max_new_tokens=2).token_ids) == 2


def test_a_client_that_leaves_frees_both_sides(services, client):
    stream = client.stream(PROMPT, n=64)
    next(stream)
    assert not services.idle
    stream.close()  # nothing_leaks waits for the slots


def test_a_deadline_in_the_middle_frees_both_sides(services, client, monkeypatch):
    forward, passed, forwards = services.target.forward, threading.Event(), []

    def slower(segments):
        forwards.append(segments)
        assert len(forwards) < 4 or passed.wait(60)
        return forward(segments)

    monkeypatch.setattr(services.target, "forward", slower)
    for seconds in (1.5, 30.0):  # on a busy machine the first commit may take more than a second
        forwards.clear()
        passed.clear()
        with pytest.raises(Exception, match=r"(?i)deadline|time") as error:
            client.generate(PROMPT, timeout=seconds)
        passed.set()
        if error.value.token_ids:
            break
    assert len(error.value.token_ids) > 0


def test_padding_ids_are_never_proposed(tmp_path):
    """Models whose vocabularies are padded to different sizes work together, and padding is never drafted."""
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=1, vocab_size=2176)
    draft = save_random_model(tmp_path / "draft", "llama", seed=2, vocab_size=2304)
    with running_services(tmp_path, target, draft) as services, Client(services.draft_address) as client:
        bush = {"depth": 3, "breadth": 4, "tau": 0}
        completion = client.generate(PROMPT, max_new_tokens=60, policy="fixed", policy_settings=bush, ignore_eos=True)
        plain = client.generate(PROMPT, max_new_tokens=60, policy="autoregressive", ignore_eos=True)
        assert completion.token_ids == plain.token_ids
        assert completion.stats.draft_n > 0


def test_an_id_that_only_the_target_has_is_served(tmp_path):
    """The target may choose, and a prompt or a resume may contain, padding that a smaller draft has no embedding for.

    The draft's guesses after such an id do not matter: the tokens are the target's own.
    """
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=1, vocab_size=2304)
    draft = save_random_model(tmp_path / "draft", "llama", seed=2)
    options = [
        {"logit_bias": {2303: 1000.0}},
        {"temperature": 1.0, "seed": 3, "logit_bias": dict.fromkeys(range(2048, 2304), 3.0)},
        {"repetition_penalty": 1.3, "logit_bias": dict.fromkeys(range(2048, 2304), 10.0)},
    ]
    policies = ["linear", "dynatree", "hybrid", "ngram", "throughput"]
    with running_services(tmp_path, target, draft) as services, Client(services.draft_address) as client:
        for prompt, asked in itertools.product((PROMPT, [2303, 5, 2050, 2303, 5]), options):
            asked = {"max_new_tokens": 16, "ignore_eos": True, **asked}
            plain = client.generate(prompt, policy="autoregressive", **asked)
            assert max(plain.token_ids) >= 2048
            for policy in policies:
                assert client.generate(prompt, policy=policy, **asked).token_ids == plain.token_ids
                more = client.generate([*prompt, *plain.token_ids], max_new_tokens=3, policy=policy, ignore_eos=True)
                assert len(more.token_ids) == 3
        with grpc.insecure_channel(services.draft_address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            for policy in policies:
                going_on = draft_pb2.GenerateRequest(
                    token_ids=draft_pb2.TokenIds(ids=prompt),
                    max_new_tokens=16,
                    policy={"name": policy},
                    sampling={"logit_bias": {2303: 1000.0}},
                    resume={"token_ids": [2303] * 12},
                )
                assert [token for each in stub.Generate(going_on) for token in each.token_ids] == [2303] * 4
        with pytest.raises(InvalidRequestError, match=r"token_ids\[1\] is 2304, the model's vocabulary is \[0, 2304\)"):
            client.generate([5, 2304])


def test_a_tree_never_passes_what_the_verify_service_takes(tmp_path):
    """The draft cuts its trees to the session's limit."""
    target = save_random_model(tmp_path / "target", "llama", seed=1)
    bush = {"depth": 4, "breadth": 3, "tau": 0}
    with (
        running_services(tmp_path, target, target, max_tree_nodes=5) as services,
        Client(services.draft_address) as client,
    ):
        for policy, settings in (("fixed", bush), ("linear", {"depth": 8})):
            completion = client.generate(PROMPT, max_new_tokens=40, policy=policy, policy_settings=settings)
            assert completion.token_ids == client.generate(PROMPT, max_new_tokens=40, policy="autoregressive").token_ids
            assert 0 < completion.stats.nodes_per_round <= 5


def test_a_long_prompt_stalls_nobody_else(services, client, monkeypatch):
    """Tokenization runs off the event loop."""
    encode = PromptEncoder.text
    begun, others_served = threading.Event(), threading.Event()

    def slowly(encoder, text, **options):
        begun.set()
        assert others_served.wait(60)
        return encode(encoder, text, **options)

    monkeypatch.setattr(PromptEncoder, "text", slowly)
    other = threading.Thread(target=lambda: client.generate("some text", max_new_tokens=2))
    other.start()
    assert begun.wait(60)
    with Client(services.draft_address, timeout=60) as quick:
        quick.generate(PROMPT, max_new_tokens=2)
    assert other.is_alive(), "the other request was still being tokenized"
    others_served.set()
    other.join()


def test_an_async_stream_that_is_dropped_frees_both_sides(services):
    async def leave():
        async with AsyncClient(services.draft_address) as client:
            for _ in range(3):  # more than the number of sessions
                async for _ in client.stream(PROMPT, ignore_eos=True):
                    break
                while not services.idle:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 60))
