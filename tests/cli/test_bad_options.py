"""Tests that invalid sampling options, policy settings and draft distributions are refused by name, value and range.

After each refusal the service still completes a request, so nothing leaks.
"""

import re
from itertools import combinations
from math import inf, nan

import grpc
import pytest

from dynatree.client import InvalidRequestError
from dynatree.draft.policies import policy_names
from dynatree.v1 import draft_pb2, draft_pb2_grpc, tree_pb2, verify_pb2
from tests.resilience.test_bad_input import (  # noqa: F401 - fixtures
    PROMPT,
    bystander_fixture,
    client_fixture,
    nothing_leaks,
    opening,
    refusal,
    services_fixture,
    stub_fixture,
)
from tests.support.model_zoo import VOCAB_SIZE
from tests.support.refusals import REQUEST, said

Options = tree_pb2.SamplingOptions
Code = grpc.StatusCode
RESIDUAL = {"temperature": 1.0, "seed": 1, "scheme": tree_pb2.SAMPLING_SCHEME_RESIDUAL}
SCHEMES = "expected one of 1 (gumbel), 2 (independent), 3 (residual)"
TAKE_DRAWS = "expected one of autoregressive, dynatree, dyspec, dyspec-threshold, fixed, linear, sequoia, specinfer"


@pytest.mark.parametrize("wire", ["draft", "verify"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 101}, "temperature is 101, expected a number in [0, 100]"),
        ({"min_p": -0.1}, "min_p is -0.1, expected a number in [0, 1]"),
        ({"min_p": 1.5}, "min_p is 1.5, expected a number in [0, 1]"),
        ({"min_p": nan}, "min_p is nan, expected a number in [0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a number in (0, 100]"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1, expected a number in (0, 100]"),
        ({"repetition_penalty": 101}, "repetition_penalty is 101, expected a number in (0, 100]"),
        ({"repetition_penalty": nan}, "repetition_penalty is nan, expected a number in (0, 100]"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5, expected a number in [-2, 2]"),
        ({"frequency_penalty": nan}, "frequency_penalty is nan, expected a number in [-2, 2]"),
        ({"presence_penalty": -2.5}, "presence_penalty is -2.5, expected a number in [-2, 2]"),
        ({"presence_penalty": inf}, "presence_penalty is inf, expected a number in [-2, 2]"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias names token 2048, the model's vocabulary is [0, 2048)"),
        ({"logit_bias": {2**32 - 1: 1.0}}, "logit_bias names token 4294967295, the model's vocabulary is [0, 2048)"),
        ({"logit_bias": {5: nan}}, "logit_bias[5] is nan, expected a number in [-1000, 1000]"),
        ({"logit_bias": {5: inf}}, "logit_bias[5] is inf, expected a number in [-1000, 1000]"),
        ({"logit_bias": {6: 1.0, 5: 2000.0}}, "logit_bias[5] is 2000, expected a number in [-1000, 1000]"),
        ({"logit_bias": {5: -2000.0}}, "logit_bias[5] is -2000, expected a number in [-1000, 1000]"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries, at most 1024 are accepted"),
        ({"scheme": 4}, f"scheme is 4, {SCHEMES}"),
        ({"scheme": -1}, f"scheme is -1, {SCHEMES}"),
    ],
)
def test_a_sampling_option_out_of_range(services, stub, wire, options, message):
    if wire == "verify":
        assert refusal(stub, opening(services, sampling=Options(**options))) == (Code.INVALID_ARGUMENT, message)
        return
    with grpc.insecure_channel(services.draft_address) as channel:
        request = draft_pb2.GenerateRequest(text="a", max_new_tokens=2, sampling=Options(**options))
        with pytest.raises(grpc.RpcError) as error:
            list(draft_pb2_grpc.DraftServiceStub(channel).Generate(request, timeout=20))
        assert (error.value.code(), said(error.value)) == (Code.INVALID_ARGUMENT, message)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 100.0])
@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 1.0},
        {"repetition_penalty": 100.0},
        {"repetition_penalty": 1e-30},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0},
        {"logit_bias": {0: -1000.0, VOCAB_SIZE - 1: 1000.0}},
        {"logit_bias": dict.fromkeys(range(1024), -1000.0)},
        {"top_k": 2**32 - 1, "top_p": 1.0, "seed": 2**64 - 1},
    ],
    ids=lambda options: "+".join(options),
)
def test_the_ends_of_the_ranges_are_served(client, options, temperature):
    options = {"max_new_tokens": 6, "temperature": temperature, "seed": 1, "ignore_eos": True, **options}
    completion = client.generate(PROMPT, policy="linear", **options)
    assert len(completion.token_ids) == 6
    assert completion.token_ids == client.generate(PROMPT, policy="autoregressive", **options).token_ids


@pytest.mark.parametrize("policy", ["hybrid", "ngram", "opt-tree", "throughput"])
def test_residual_sampling_refuses_policies_that_choose_by_the_token(client, policy):
    options = {"policy": policy, "scheme": "residual", "max_new_tokens": 3}
    with pytest.raises(
        InvalidRequestError, match=f"policy {policy} .* scheme residual .*; {TAKE_DRAWS}{REQUEST}$"
    ) as error:
        client.generate(PROMPT, temperature=0.5, **options)
    assert error.value.code == Code.INVALID_ARGUMENT
    assert len(client.generate(PROMPT, temperature=0.0, **options).token_ids) == 3, "greedy draws nothing"


def test_residual_sampling_without_a_policy_gets_one_that_can_draw(client):
    options = {"temperature": 0.5, "seed": 3, "scheme": "residual", "max_new_tokens": 20}
    unnamed = client.generate(PROMPT, **options)
    assert unnamed.token_ids == client.generate(PROMPT, policy="dyspec", **options).token_ids
    assert unnamed.stats.nodes_per_round > 20, "dyspec's trees"


@pytest.mark.parametrize("kinds", list(combinations(("number", "list", "word"), 2)))
def test_a_setting_of_two_kinds_is_refused(services, kinds):
    policy = draft_pb2.Policy(name="specinfer")
    if "number" in kinds:
        policy.settings["widths"] = 2
    if "list" in kinds:
        policy.list_settings["widths"].values.extend([1, 1])
    if "word" in kinds:
        policy.word_settings["widths"] = "wide"
    request = draft_pb2.GenerateRequest(token_ids=draft_pb2.TokenIds(ids=PROMPT), policy=policy)
    with grpc.insecure_channel(services.draft_address) as channel, pytest.raises(grpc.RpcError) as error:
        list(draft_pb2_grpc.DraftServiceStub(channel).Generate(request, timeout=20))
    assert error.value.code() == Code.INVALID_ARGUMENT
    assert said(error.value) == f"setting widths is given twice, as a {kinds[0]} and as a {kinds[1]}"


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("dyspec", {"max_nodes": 0}, "max_nodes is 0, expected a number in [1, 2048]"),
        ("dyspec", {"max_nodes": 2049}, "max_nodes is 2049, expected a number in [1, 2048]"),
        ("dyspec", {"max_depth": 65}, "max_depth is 65, expected a number in [1, 64]"),
        ("dyspec", {"breadth": 0}, "breadth is 0, expected a number in [1, 256]"),
        ("dyspec", {"candidates": 0}, "candidates is 0, expected a number in [1, 256]"),
        ("sequoia", {"candidates": 257}, "candidates is 257, expected a number in [1, 256]"),
        ("linear", {"draft_temperature": -0.6}, "draft_temperature is -0.6, expected a number in [0, 100]"),
        ("fixed", {"draft_temperature": inf}, "draft_temperature is inf, expected a number in [0, 100]"),
        ("specinfer", {"replacement": 2}, "replacement is 2, expected 0 (off) or 1 (on)"),
        ("dyspec", {"replacement": 1}, "has no setting replacement"),
        ("opt-tree", {"draft_temperature": 0.6}, "has no setting draft_temperature"),
        ("dyspec", {"threshold": 0.1}, "has no setting threshold; its settings: max_nodes, max_depth, breadth"),
        ("dyspec-threshold", {"threshold": 0}, "threshold is 0, expected a number in (0, 1]"),
        ("dyspec-threshold", {"threshold": 1.5}, "threshold is 1.5, expected a number in (0, 1]"),
        ("dyspec-threshold", {"threshold": nan}, "threshold is nan, expected a number in (0, 1]"),
        ("dyspec-threshold", {"breadth": 257}, "breadth is 257, expected a number in [1, 256]"),
        ("specinfer", {"widths": [0]}, "widths[0] is 0, expected a number in [1, 64]"),
        ("specinfer", {"widths": [1] * 15 + [65]}, "widths[15] is 65, expected a number in [1, 64]"),
        ("specinfer", {"widths": (1, -1)}, "widths[1] is -1, expected a number in [1, 64]"),
        ("specinfer", {"widths": [1, 1, 1.5]}, "widths[2] is 1.5, expected a whole number"),
        ("specinfer", {"widths": 0}, "widths[0] is 0, expected a number in [1, 64]"),
        ("specinfer", {"widths": []}, "widths has 0 numbers, expected 1 to 64"),
        ("specinfer", {"widths": [1] * 65}, "widths has 65 numbers, expected 1 to 64"),
        ("specinfer", {"widths": [1] * 100_000}, "widths has 100000 numbers, expected 1 to 64"),
        ("specinfer", {"k1": 1}, "has no setting k1; its settings: widths, max_nodes"),
        ("specinfer", {"max_nodes": [8]}, "max_nodes is a list, expected one number"),
        ("specinfer", {"max_nodes": 2049}, "max_nodes is 2049, expected a number in [1, 2048]"),
        ("sequoia", {"max_nodes": 2049}, "max_nodes is 2049, expected a number in [0, 2048]"),
        ("sequoia", {"rates": [0.25] * 8}, "rates sum to 2, expected at most 1"),
        ("sequoia", {"rates": [0.1] * 7 + [-0.1]}, "rates[7] is -0.1, expected a number in [0, 1]"),
        ("sequoia", {"rates": [nan]}, "rates[0] is nan, expected a number in [0, 1]"),
        ("sequoia", {"rates": []}, "rates has 0 numbers, expected 1 to 8"),
        ("sequoia", {"rates": [0.1] * 9}, "rates has 9 numbers, expected 1 to 8"),
        ("sequoia", {"max_depth": 33}, "max_depth is 33, expected a number in [1, 32]"),
        ("sequoia", {"p1": 0.1}, "has no setting p1; its settings: max_nodes, max_depth, rates"),
        ("opt-tree", {"width": 0}, "width is 0, expected a number in [1, 64]"),
        ("opt-tree", {"delta": 1.5}, "delta is 1.5, expected a number in [0, 1]"),
        ("opt-tree", {"delta": nan}, "delta is nan, expected a number in [0, 1]"),
        ("opt-tree", {"max_nodes": 2049}, "max_nodes is 2049, expected a number in [1, 2048]"),
        ("ngram", {"shortest": 5}, "shortest is 5 and longest is 4, expected shortest <= longest"),
        ("ngram", {"longest": 17}, "longest is 17, expected a number in [1, 16]"),
        ("ngram", {"shortest": 0}, "shortest is 0, expected a number in [1, 16]"),
        ("ngram", {"depth": 65}, "depth is 65, expected a number in [1, 64]"),
        ("ngram", {"branches": inf}, "branches is inf, expected a whole number"),
        ("hybrid", {"shortest": 5}, "shortest is 5 and longest is 4, expected shortest <= longest"),
        ("hybrid", {"ngram_depth": 65}, "ngram_depth is 65, expected a number in [1, 64]"),
        ("hybrid", {"max_nodes": 0}, "max_nodes is 0, expected a number in [1, 2048]"),
        ("throughput", {"branches": 17}, "branches is 17, expected a number in [1, 16]"),
        ("throughput", {"max_depth": 0}, "max_depth is 0, expected a number in [1, 64]"),
        ("throughput", {"breadth": 65}, "breadth is 65, expected a number in [0, 64]"),
        ("hybrid", {"breadth": 0}, "breadth is 0, expected a number in [1, 64]"),
        ("dynatree", {"dynamic_breadth": 2}, "dynamic_breadth is 2, expected 0 (off) or 1 (on)"),
        ("dynatree", {"history": 0.5}, "history is '0.5', expected one of 0, 1, released"),
        ("dynatree", {"dynamic_depth": nan}, "dynamic_depth is nan, expected 0 (off) or 1 (on)"),
        ("dynatree", {"dynamic_depth": "on"}, "dynamic_depth is 'on', expected a number"),
        ("dynatree", {"root": "Single"}, "root is 'Single', expected one of committed, single"),
        ("fixed", {"root": "x" * 10_000}, f"root is '{'x' * 39}, expected one of committed, single"),
        ("fixed", {"prune": ""}, "prune is '', expected one of remove, expand"),
        ("fixed", {"prune": 1}, "prune is '1', expected one of remove, expand"),
        ("fixed", {"prune": [1]}, "prune is a list, expected one of remove, expand"),
        ("specinfer", {"widths": "1"}, "widths is '1', expected a number"),
        ("medusa", {}, f"unknown policy 'medusa', expected one of {', '.join(policy_names())}"),
    ],
)
def test_policy_settings_out_of_range(client, policy, settings, message):
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as error:
        client.generate(PROMPT, policy=policy, policy_settings=settings)
    assert error.value.code == Code.INVALID_ARGUMENT


# The verify service's own wire


def drawn_tree(
    counts=(2, 1, 0), ids=(8, 10, 9), probs=(0.5, 0.5, 1.0), token_ids=(8, 9), parents=(-1, 0), draw_counts=(), draws=()
):
    """Return a tree with token 8 drawn below the root from {8, 10}, and 9 below it."""
    return verify_pb2.VerifyRequest(
        tree=tree_pb2.TokenTree(
            base_length=len(PROMPT) + 1,
            token_ids=token_ids,
            parents=parents,
            candidate_counts=counts,
            candidate_ids=ids,
            candidate_probs=probs,
            draw_counts=draw_counts,
            draws=draws,
        )
    )


NOT_RESIDUAL = "when, and only when, the session samples by SAMPLING_SCHEME_RESIDUAL"
NO_FIT = "do not fit together"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": (), "ids": (), "probs": ()}, NOT_RESIDUAL),
        ({"counts": (2, 1)}, "a tree of 2 nodes needs 0 or 3 candidate_counts, got 2"),
        ({"counts": (2, 1, 0, 0)}, f"4 candidate_counts for 2 nodes, 3 candidate_ids and 3 candidate_probs {NO_FIT}"),
        ({"counts": ()}, f"0 candidate_counts for 2 nodes, 3 candidate_ids and 3 candidate_probs {NO_FIT}"),
        ({"counts": (2, 2, 0)}, NO_FIT),
        ({"counts": (2, 0, 0)}, NO_FIT),
        ({"counts": (2**32 - 1, 1, 0)}, NO_FIT),
        ({"ids": (8, 10)}, "2 candidate_ids and 3 candidate_probs do not fit together"),
        ({"probs": (0.5, 0.5)}, "3 candidate_ids and 2 candidate_probs do not fit together"),
        ({"probs": ()}, NO_FIT),
        ({"ids": (8, VOCAB_SIZE, 9)}, "candidate_ids[1] is 2048, the model's vocabulary is [0, 2048)"),
        ({"ids": (8, 8, 9)}, "names a token twice; candidate_ids must differ"),
        ({"probs": (nan, 0.5, 1.0)}, "candidate_probs sum to nan, expected sum 1, each in (0, 1]"),
        ({"probs": (inf, 0.5, 1.0)}, "candidate_probs sum to inf"),
        ({"probs": (1.0, 0.0, 1.0)}, "candidate_probs sum to 1, expected sum 1, each in (0, 1]"),
        ({"probs": (1.5, -0.5, 1.0)}, "candidate_probs sum to 1, expected sum 1, each in (0, 1]"),
        ({"probs": (0.5, 0.49, 1.0)}, "candidate_probs sum to 0.99"),
        ({"probs": (0.5, 0.51, 1.0)}, "candidate_probs sum to 1.01"),
        ({"probs": (0.5, 0.5, 0.9)}, "candidate_probs sum to 0.9"),
        ({"ids": (11, 10, 9)}, "node 0 carries token 8, which its parent's candidate_ids lack"),
        ({"ids": (8, 9, 10)}, "node 1 carries token 9, which its parent's candidate_ids lack"),
        ({"counts": (2, 0, 1)}, "node 1 carries token 9, which its parent's candidate_ids lack"),
        ({"draws": (0,)}, f"0 draw_counts for 3 candidate_counts and 1 draws {NO_FIT}"),
        ({"draw_counts": (2, 1), "draws": (0, 0, 0)}, f"2 draw_counts for 3 candidate_counts and 3 draws {NO_FIT}"),
        ({"draw_counts": (2**32 - 1, 1, 0), "draws": (0, 0)}, NO_FIT),
        ({"draw_counts": (1, 1, 1), "draws": (0, 0, 0)}, "1 draws where candidate_counts names no candidate"),
        ({"draw_counts": (2, 1, 0), "draws": (1, 0, 0)}, "draws names child 1 after 0 children"),
        ({"draw_counts": (2, 1, 0), "draws": (0, 1, 0)}, "draws below node -1 name 2 children, the tree has 1"),
        ({"draw_counts": (65, 1, 0), "draws": (0,) * 66}, "has 65 draws, at most 64 are accepted"),
        (
            {"counts": (257, 1, 0), "ids": (*range(257), 9), "probs": (*[1 / 257] * 257, 1.0)},
            "257 candidate_ids and 257 candidate_probs, expected as many of each, 1 to 256",
        ),
    ],
)
def test_draft_distributions_that_cannot_be(services, stub, changes, message):
    code, details = refusal(stub, opening(services, sampling=Options(**RESIDUAL)), drawn_tree(**changes))
    assert code == Code.INVALID_ARGUMENT
    assert message in details


@pytest.mark.parametrize(
    "tree",
    [
        drawn_tree(),
        drawn_tree((256, 1, 0), (*range(256), 9), (*[1 / 256] * 256, 1.0)),
        drawn_tree(draw_counts=(64, 0, 0), draws=(0,) * 64),
        drawn_tree(draw_counts=(2, 1, 0), draws=(0, 0, 0)),
        drawn_tree((2, 1, 1), (8, 10, 9, 11), (0.5, 0.5, 1.0, 1.0)),
        drawn_tree((), (), (), (), ()),
        drawn_tree((0,), (), (), (), ()),
    ],
    ids=[
        "drawn",
        "256 candidates",
        "64 draws with replacement",
        "two draws and one",
        "candidates without a draw",
        "empty",
        "empty, none drawn",
    ],
)
def test_draft_distributions_that_can(services, stub, tree):
    """The same trees without their fault are accepted; only the next tree, for a round that is over, is refused."""
    code, details = refusal(stub, opening(services, sampling=Options(**RESIDUAL)), tree, tree)
    assert (code, details) == (Code.FAILED_PRECONDITION, "the tree is for round 0, expected round 1")


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0}, RESIDUAL | {"scheme": 2}, RESIDUAL | {"temperature": 0.0}],
    ids=["greedy", "gumbel", "independent", "residual, but greedy"],
)
def test_draft_distributions_where_nothing_is_drawn(services, stub, sampling):
    code, details = refusal(stub, opening(services, sampling=Options(**sampling)), drawn_tree())
    assert code == Code.INVALID_ARGUMENT
    assert NOT_RESIDUAL in details


def test_a_draft_distribution_with_an_empty_tree_where_nothing_is_drawn(services, stub):
    code, details = refusal(stub, opening(services), drawn_tree((1,), (8,), (1.0,), (), ()))
    assert code == Code.INVALID_ARGUMENT
    assert NOT_RESIDUAL in details


def test_a_stop_token_outside_the_vocabulary(services, stub):
    message = "stop_token_ids[1] is 2048, the model's vocabulary is [0, 2048)"
    assert refusal(stub, opening(services, stop_token_ids=[5, VOCAB_SIZE])) == (Code.INVALID_ARGUMENT, message)


def test_too_many_stop_tokens(services, stub):
    message = "1025 stop_token_ids, at most 1024 are accepted"
    assert refusal(stub, opening(services, stop_token_ids=[5] * 1025)) == (Code.INVALID_ARGUMENT, message)
