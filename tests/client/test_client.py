"""Tests the results of calls to a scripted service in both clients, and the package's exports."""

import asyncio
import json
import subprocess
import sys
import threading
from dataclasses import fields

import grpc
import pytest

import dynatree.client
from dynatree.client import (
    AsyncClient,
    Chunk,
    Client,
    Completion,
    RoundPart,
    RoundTrace,
    ServerBusyError,
)
from dynatree.v1 import draft_pb2, tree_pb2
from tests.support.fake_draft_service import (  # noqa: F401 - fixtures
    Fail,
    FakeDraftService,
    client_fixture,
    generate_async,
    last,
    message,
    scored,
    service_fixture,
    traced,
)

# Three completions; the last message of the second has text, and the third has no text at all.
THREE = [
    message("Hé", 1),
    message("llo", 2),
    last(tree_pb2.FINISH_REASON_STOP),
    message("Goo", 3, index=1),
    draft_pb2.GenerateResponse(text="d", completion=last().completion, index=1),
    message("", 4, index=2),
    last(index=2),
]

# Completions


def test_generate_gathers_the_whole_stream(client: Client) -> None:
    completion = client.generate("Once")
    assert (completion.text, completion.token_ids) == ("Héllo", (1, 2, 3))
    assert (completion.finish_reason, completion.prompt_tokens) == ("length", 4)
    assert completion.stats.acceptance_by_depth == (0.5, 0.25)
    assert completion.stats.round_parts == {"wire": RoundPart(total_seconds=0.5, p50_seconds=0.25)}
    assert completion.stats.seed == 2**64 - 1


def test_both_clients_return_the_same(client: Client, service: FakeDraftService) -> None:
    assert generate_async(service) == client.generate("Once")


def test_a_completion_is_a_json_object(client: Client) -> None:
    completion = client.generate("Once").to_dict()
    assert json.loads(json.dumps(completion)) == completion
    assert list(completion) == ["text", "token_ids", "prompt_tokens", "finish_reason", "stats"]
    assert completion["stats"]["round_parts"] == {"wire": {"total_seconds": 0.5, "p50_seconds": 0.25}}


def test_every_statistic_of_the_protocol_is_there(client: Client) -> None:
    sent = last().completion.statistics
    stats = client.generate("Once").to_dict()["stats"]
    assert set(stats) == set(sent.DESCRIPTOR.fields_by_name)
    plain = set(stats) - {"round_parts", "acceptance_by_depth"}
    assert {name: stats[name] for name in plain} == {name: getattr(sent, name) for name in plain}


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_finish_reasons(client: Client, service: FakeDraftService, reason: str) -> None:
    service.script = [last(tree_pb2.FinishReason.Value(f"FINISH_REASON_{reason.upper()}"))]
    assert client.generate("Once").finish_reason == reason


def test_stream_yields_chunks_then_has_the_completion(client: Client) -> None:
    stream = client.stream("Once")
    with pytest.raises(RuntimeError, match="not been read to its end"):
        _ = stream.completion
    # The last message adds nothing, so it is no chunk.
    assert list(stream) == [Chunk("Hé", (1,)), Chunk("", (2,)), Chunk("llo", (3,))]
    assert stream.completion.text == stream.text == "Héllo"
    assert list(stream) == []


def test_async_stream_yields_chunks_then_has_the_completion(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            stream = client.stream("Once")
            assert [chunk.text async for chunk in stream] == ["Hé", "", "llo"]
            assert stream.completion.token_ids == stream.token_ids == (1, 2, 3)
            assert [chunk async for chunk in stream] == []

    asyncio.run(run())


def test_the_last_message_may_carry_text(client: Client, service: FakeDraftService) -> None:
    end = last()
    end.MergeFrom(message("!", 9))
    service.script = [end]
    stream = client.stream("Once")
    assert list(stream) == [Chunk("!", (9,))]
    assert stream.completion.text == "!"


def test_model_info(client: Client, service: FakeDraftService) -> None:
    async def run() -> dynatree.client.ServiceInfo:
        async with AsyncClient(service.address) as client:
            return await client.model_info()

    info = client.model_info()
    assert (info.draft.name, info.draft.parameters, info.target.vocab_size) == ("small", 7, 50_304)
    assert (info.policies, info.chat_template) == (("dynatree", "linear"), True)
    assert asyncio.run(run()) == info


def test_threads_share_a_client(client: Client) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(client.generate("Once").text)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["Héllo"] * 4


def test_tasks_share_a_client(service: FakeDraftService) -> None:
    async def run() -> list[Completion]:
        async with AsyncClient(service.address) as client:
            return await asyncio.gather(*(client.generate("Once") for _ in range(4)))

    assert [completion.text for completion in asyncio.run(run())] == ["Héllo"] * 4


def test_channel_options_take_precedence(service: FakeDraftService) -> None:
    service.script = [message("x" * 1000, 1), last()]
    options = [("grpc.max_receive_message_length", 500)]
    with Client(service.address, channel_options=options) as client, pytest.raises(ServerBusyError, match="larger"):
        client.generate("Once")


# Several completions


def test_generate_returns_the_first_with_its_alternatives(client: Client, service: FakeDraftService) -> None:
    service.script = list(THREE)
    completion = client.generate("Once", n=3)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("Héllo", (1, 2), "stop")
    assert [each.text for each in completion.alternatives] == ["Good", ""]
    assert [each.token_ids for each in completion.alternatives] == [(3,), (4,)]
    assert [each.finish_reason for each in completion.alternatives] == ["length", "length"]
    assert [each.index for each in (completion, *completion.alternatives)] == [0, 1, 2]
    assert not any(each.alternatives for each in completion.alternatives)
    assert generate_async(service, n=3) == completion


def test_one_completion_has_no_alternatives(client: Client) -> None:
    completion = client.generate("Once", n=1)
    assert (completion.index, completion.alternatives) == (0, ())


def test_a_stream_of_several_completions(client: Client, service: FakeDraftService) -> None:
    service.script = list(THREE)
    stream = client.stream("Once", n=3)
    assert [(chunk.index, chunk.text) for chunk in stream] == [(0, "Hé"), (0, "llo"), (1, "Goo"), (1, "d"), (2, "")]
    assert (stream.text, stream.token_ids) == ("HélloGood", (1, 2, 3, 4))
    assert stream.completion == client.generate("Once", n=3)


def test_an_async_stream_of_several_completions(client: Client, service: FakeDraftService) -> None:
    async def run() -> Completion:
        async with AsyncClient(service.address) as client:
            stream = client.stream("Once", n=3)
            assert [chunk.index async for chunk in stream] == [0, 0, 1, 1, 2]
            assert (stream.text, stream.token_ids) == ("HélloGood", (1, 2, 3, 4))
            return stream.completion

    service.script = list(THREE)
    assert asyncio.run(run()) == client.generate("Once", n=3)


def test_alternatives_are_part_of_the_json_object(client: Client, service: FakeDraftService) -> None:
    service.script = list(THREE)
    completion = client.generate("Once", n=3)
    printed = completion.to_dict()
    assert list(printed) == ["text", "token_ids", "prompt_tokens", "finish_reason", "stats", "alternatives"]
    assert printed["alternatives"] == [each.to_dict() for each in completion.alternatives]
    assert [each["text"] for each in printed["alternatives"]] == ["Good", ""]
    assert json.loads(json.dumps(printed)) == printed


# Log-probabilities and traces


def test_log_probs_follow_the_tokens(client: Client, service: FakeDraftService) -> None:
    service.script = [
        message("Hé", 1, 2, log_probs=[-0.5, -1.5]),
        message("llo", 3, log_probs=[-2.0]),
        last(),
        message("Good", 4, index=1, log_probs=[-0.25]),
        last(index=1),
    ]
    assert [chunk.log_probs for chunk in client.stream("Once", n=2, log_probs=True)] == [(-0.5, -1.5), (-2,), (-0.25,)]
    completion = client.generate("Once", n=2, log_probs=True)
    assert (completion.log_probs, completion.alternatives[0].log_probs) == ((-0.5, -1.5, -2.0), (-0.25,))
    assert completion.to_dict()["log_probs"] == [-0.5, -1.5, -2.0]
    assert completion.to_dict()["alternatives"][0]["log_probs"] == [-0.25]
    assert generate_async(service, n=2, log_probs=True) == completion


def test_the_likeliest_tokens_and_the_prompts_log_probs(client: Client, service: FakeDraftService) -> None:
    service.script = [*scored(), last(), message("Good", 4, index=1), last(index=1)]
    places = (((1, -0.5), (4, -1.0)), ((3, -1.0), (2, -1.5))), (((4, -0.5), (6, -1.0)),)
    prompts = ((8, -0.25), (5, -2.0)), ((6, -0.5), (8, -1.0))
    stream = client.stream("Once", n=2, top_log_probs=2, prompt_log_probs=True)
    assert (stream.prompt_ids, stream.prompt_log_probs, stream.prompt_top_log_probs) == ((), (), ())
    assert next(stream).top_log_probs == places[0]
    known = (7, 8, 9), (-0.25, -4.0), prompts
    assert (stream.prompt_ids, stream.prompt_log_probs, stream.prompt_top_log_probs) == known
    assert [chunk.top_log_probs for chunk in stream] == [places[1], ()]
    completion = stream.completion
    (other,) = completion.alternatives
    assert completion.top_log_probs == (*places[0], *places[1])
    assert (completion.prompt_ids, completion.prompt_log_probs, completion.prompt_top_log_probs) == known
    for each in (stream, completion):
        assert (each.prompt_text, each.prompt_text_offsets) == ("Oh, he", (0, 2, 3))
    assert (completion.text_offsets, other.text_offsets) == ((0, 1, 2), ())
    assert (other.prompt_ids, other.prompt_log_probs, other.prompt_top_log_probs) == ((7, 8, 9), (), ())
    assert generate_async(service, n=2, top_log_probs=2, prompt_log_probs=True) == completion
    as_json = json.loads(json.dumps(completion.to_dict()))
    assert as_json["top_log_probs"] == [[[1, -0.5], [4, -1.0]], [[3, -1.0], [2, -1.5]], [[4, -0.5], [6, -1.0]]]
    assert (as_json["prompt_ids"], as_json["prompt_log_probs"]) == ([7, 8, 9], [-0.25, -4.0])
    assert as_json["prompt_top_log_probs"] == [[[8, -0.25], [5, -2.0]], [[6, -0.5], [8, -1.0]]]


def test_what_came_of_the_prompt_is_kept_and_not_asked_for_again(client: Client, service: FakeDraftService) -> None:
    """The second server receives token ids, and its response contains nothing about the prompt."""
    service.script = [scored()[0], Fail(grpc.StatusCode.UNAVAILABLE)]
    stream = client.stream("Once", top_log_probs=2, prompt_log_probs=True, prompt_text=True)
    next(stream)
    service.script = [message("llo", 3), last()]
    service.script[0].started.CopyFrom(draft_pb2.Started(seed=0))
    assert [chunk.text for chunk in stream] == ["llo"]
    assert (stream.completion.prompt_ids, stream.completion.prompt_log_probs) == ((7, 8, 9), (-0.25, -4.0))
    first, second = service.requests
    assert stream.prompt_text == "Oh, he"
    assert (first.prompt_log_probs, first.prompt_text, first.top_log_probs) == (True, True, 2)
    assert (second.prompt_log_probs, second.prompt_text, second.top_log_probs) == (False, False, 2)
    assert list(second.token_ids.ids) == [7, 8, 9]


def test_a_prompt_of_token_ids_is_known(client: Client, service: FakeDraftService) -> None:
    stream = client.stream([5, 6])
    assert stream.prompt_ids == (5, 6)
    list(stream)
    assert stream.completion.prompt_ids == (5, 6)
    assert "prompt_ids" not in stream.completion.to_dict()


def test_without_asking_there_are_no_log_probs_and_no_traces(client: Client) -> None:
    assert {(chunk.log_probs, chunk.trace) for chunk in client.stream("Once")} == {((), None)}
    completion = client.generate("Once")
    assert (completion.log_probs, completion.trace) == ((), ())
    assert (completion.top_log_probs, completion.prompt_log_probs, completion.prompt_top_log_probs) == ((), (), ())
    assert not {key for key in completion.to_dict() if "log_probs" in key or key == "prompt_ids"}


def test_a_trace_is_a_chunk_of_its_own(client: Client, service: FakeDraftService) -> None:
    async def run() -> list[Chunk]:
        async with AsyncClient(service.address) as client:
            return [chunk async for chunk in client.stream("Once", n=2, trace=True)]

    service.script = [message("Hé", 1), traced(0), last(), traced(0, index=1), last(index=1)]
    chunks = list(client.stream("Once", n=2, trace=True))
    round_ = RoundTrace.from_pb(traced(0).trace)
    assert chunks == [Chunk("Hé", (1,)), Chunk("", (), trace=round_), Chunk("", (), index=1, trace=round_)]
    assert asyncio.run(run()) == chunks


def test_a_completion_has_its_own_rounds(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), traced(0), traced(1), last(), traced(0, index=1), last(index=1)]
    completion = client.generate("Once", n=2, trace=True)
    assert [round_.round for round_ in completion.trace] == [0, 1]
    assert [round_.round for round_ in completion.alternatives[0].trace] == [0]
    assert (completion.text, completion.token_ids) == ("Hé", (1,))
    assert "trace" not in completion.to_dict()
    assert generate_async(service, n=2, trace=True) == completion


def test_every_field_of_a_round_is_there() -> None:
    sent = traced(7).trace
    round_ = RoundTrace.from_pb(sent)
    names = [field.name for field in fields(RoundTrace)]
    assert names == list(sent.DESCRIPTOR.fields_by_name) == list(round_.to_dict())
    for name in names:
        value = getattr(sent, name)
        plain = value if isinstance(value, int | float) else dict(value) if name == "parameters" else list(value)
        assert round_.to_dict()[name] == plain
        assert getattr(round_, name) == (tuple(plain) if isinstance(plain, list) else plain)
    assert json.loads(json.dumps(round_.to_dict())) == round_.to_dict()
    assert list(round_.parameters) == sorted(sent.parameters)


# The package


def test_the_export_list_is_sorted_and_complete() -> None:
    names = dynatree.client.__all__
    assert names == sorted(names)
    public = {name for name, value in vars(dynatree.client).items() if not name.startswith("_")}
    assert public == set(names)


def test_importing_it_needs_no_model_packages() -> None:
    code = "import sys, dynatree.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "dynatree.common"} & set(loaded)
