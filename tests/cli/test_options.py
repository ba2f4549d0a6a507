"""Tests the options of a request: n, stop tokens, log-probabilities and the trace; and its statistics."""

import random
import re
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynatree.client import Client, InvalidRequestError
from dynatree.common.seeds import completion_seed
from dynatree.draft.policies import DEFAULT_POLICY, policy_names, residual_policies
from tests.support.model_zoo import VOCAB_SIZE, save_noisy_copy, save_random_model
from tests.support.services import running_services
from tests.support.steady_times import steady_times

PROMPT = random.Random(0).choices(range(2, VOCAB_SIZE), k=7)
CHAIN = {"policy": "linear", "policy_settings": {"depth": 6}}
BUSH = {"policy": "fixed", "policy_settings": {"depth": 3, "breadth": 4, "tau": 0}}
PLAIN = {"policy": "autoregressive"}
EOS = 0
# four likely tokens: every policy drafts some of them correctly and none all
FEW = {"logit_bias": {token: 12.0 + token % 2 for token in range(100, 104)}}


@dataclass(eq=False)
class Pair:
    client: Client
    model: object  # the target, run by transformers alone
    tokenizer: object

    def generate(self, **options):
        return self.client.generate(PROMPT, **{"max_new_tokens": 24, "temperature": 0.8, "seed": 3, **options})

    def log_probs(self, token_ids):
        """Return each token's log-probability after the prompt and the tokens before it, from one forward pass."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


@pytest.fixture(scope="module", autouse=True)
def _steady_times():
    with steady_times():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    target = save_random_model(folder / "target", "gpt2", seed=1, num_hidden_layers=2)
    draft = save_noisy_copy(folder / "draft", target, seed=2)
    with running_services(folder, target, draft) as services, Client(services.draft_address) as client:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        yield Pair(client, model, AutoTokenizer.from_pretrained(target))


# n


@pytest.mark.parametrize("scheme", ["gumbel", "independent", "residual"])
def test_completion_i_is_that_of_its_own_seed(pair, scheme):
    seed = 2**64 - 2
    options = {"scheme": scheme, "log_probs": True, "max_new_tokens": 12, **BUSH}
    first = pair.generate(n=3, seed=seed, trace=True, **options)
    completions = (first, *first.alternatives)
    assert [completion.index for completion in completions] == [0, 1, 2]
    for index, completion in enumerate(completions):
        alone = pair.generate(seed=completion_seed(seed, index), **options)
        assert completion.token_ids == alone.token_ids
        assert completion.text == alone.text
        assert completion.log_probs == alone.log_probs
        assert completion.stats.seed == alone.stats.seed == completion_seed(seed, index)
        assert completion.stats.draft_n == alone.stats.draft_n
        check_trace(pair, completion)
    assert len({completion.token_ids for completion in completions}) == 3


@pytest.mark.parametrize(
    ("policy", "settings", "repeats"),
    [
        *((name, {}, True) for name in residual_policies()),
        *((name, {"calibrated": 1}, False) for name in ("dynatree", "dyspec", "dyspec-threshold", "fixed")),
        ("dynatree", {"history": "released"}, False),
        ("sequoia", {"max_nodes": 0}, False),
    ],
)
def test_a_residual_sample_repeats_unless_its_trees_learn_from_other_requests(pair, policy, settings, repeats):
    """The service may have learnt from the noise of a request, so the same seed must then give other noise."""
    options = {"scheme": "residual", "seed": 3, "policy": policy, "policy_settings": settings, "max_new_tokens": 12}
    one, other = (pair.generate(temperature=1.0, **options) for _ in range(2))
    assert (one.token_ids == other.token_ids) == repeats
    assert one.stats.seed == other.stats.seed == 3


@pytest.mark.parametrize("options", [{"scheme": "residual", "temperature": 1.0}, {"temperature": 0.0}])
def test_a_tree_of_draws_has_the_services_limit(pair, options):
    settings = {"max_nodes": 2048, "draft_temperature": 1.0, "max_depth": 32}
    done = pair.generate(policy="sequoia", policy_settings=settings, max_new_tokens=20, **options)
    assert len(done.token_ids) == 20


def test_without_a_seed_the_first_completions_seed_makes_the_others(pair):
    one, other = (pair.generate(n=2, seed=None, max_new_tokens=4) for _ in range(2))
    other_seed = one.alternatives[0].stats.seed
    assert other_seed == completion_seed(one.stats.seed, 1)
    assert one.stats.seed != other.stats.seed
    assert pair.generate(seed=other_seed, max_new_tokens=4).token_ids == one.alternatives[0].token_ids


def test_completions_come_one_after_the_other(pair):
    options = {"max_new_tokens": 8, "temperature": 0.8, "seed": 3, "n": 3}
    indices = [chunk.index for chunk in pair.client.stream(PROMPT, **options)]
    assert indices == sorted(indices)
    assert set(indices) == {0, 1, 2}


def test_greedy_completions_are_all_the_same(pair):
    completion = pair.generate(temperature=0.0, n=2, **CHAIN)
    assert completion.token_ids == completion.alternatives[0].token_ids
    assert completion.stats.seed == completion.alternatives[0].stats.seed == 0


def test_one_is_the_least_and_64_the_most(pair):
    assert pair.generate(n=1, max_new_tokens=1).alternatives == ()
    assert len(pair.generate(n=64, max_new_tokens=1).alternatives) == 63
    for n in (0, 65, 2**32 - 1):
        with pytest.raises(InvalidRequestError, match=rf"n is {n}, expected a number in \[1, 64\]"):
            pair.generate(n=n)


# Stop tokens


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("policy", [PLAIN, CHAIN, BUSH], ids=lambda policy: policy["policy"])
def test_a_stop_token_ends_the_completion_and_is_its_last(pair, policy, ignore_eos):
    inside = False
    for seed in range(2):
        options = {"seed": seed, "ignore_eos": ignore_eos, "trace": True, **policy}
        full = pair.generate(**options).token_ids
        for place in (0, 5, 11):
            stops = [full[place], full[20]]
            end = min(full.index(token) for token in stops) + 1
            completion = pair.generate(stop_token_ids=stops, **options)
            assert completion.token_ids == full[:end]
            assert completion.finish_reason == "stop"
            assert len(completion.log_probs) == 0
            check_trace(pair, completion)
            inside |= ends_inside_a_path(completion)
    assert inside == (policy is not PLAIN)


def ends_inside_a_path(completion):
    """Whether the last token was an accepted node, so that the target's own choice after the path was discarded."""
    last = completion.trace[-1:]
    return any(0 < len(round_.committed_ids) == len(round_.accepted_nodes) for round_ in last)


def test_the_end_of_sequence_may_be_a_stop_token(pair):
    options = {"logit_bias": {EOS: 6.0}, "ignore_eos": True, **CHAIN}
    full = pair.generate(**options).token_ids
    end = full.index(EOS) + 1
    assert 1 < end < len(full)
    assert pair.generate(stop_token_ids=[EOS], **options).token_ids == full[:end]


def test_a_stop_token_outside_the_vocabulary_is_refused(pair):
    message = r"stop_token_ids\[1\] is 2048, the model's vocabulary is \[0, 2048\)"
    with pytest.raises(InvalidRequestError, match=message):
        pair.generate(stop_token_ids=[5, VOCAB_SIZE])


# Log-probabilities


@pytest.mark.parametrize("policy", [PLAIN, CHAIN, BUSH], ids=lambda policy: policy["policy"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {9: 1.5}},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.05},
        {"scheme": "independent", **FEW},
        {"scheme": "residual", "repetition_penalty": 1.3, **FEW},
    ],
    ids=["greedy", "greedy, penalty", "truncated", "independent", "residual"],
)
def test_log_probs_are_the_targets_own_before_any_option(pair, policy, options):
    completion = pair.generate(log_probs=True, **policy, **options)
    assert len(completion.token_ids) == 24
    assert completion.log_probs == pytest.approx(pair.log_probs(completion.token_ids), abs=1e-4)
    assert (completion.stats.draft_n_accepted > 0) == (policy is not PLAIN)


def test_a_stop_string_inside_a_round_cuts_log_probs_with_the_tokens(pair):
    inside = 0
    for seed in range(8):
        options = {"seed": seed, "log_probs": True, "trace": True, **CHAIN}
        full = pair.generate(**options)
        stop = re.search("[A-Za-z]{3,}", full.text[len(full.text) // 3 :]).group()
        end = next(n for n in range(1, 25) if stop in pair.tokenizer.decode(full.token_ids[:n]))
        completion = pair.generate(stop=stop, **options)
        assert completion.token_ids == full.token_ids[:end]
        assert completion.text == full.text[: full.text.index(stop)]
        assert completion.finish_reason == "stop"
        assert completion.log_probs == pytest.approx(pair.log_probs(completion.token_ids), abs=1e-4)
        stats = completion.stats
        assert stats.generated_tokens == end
        assert stats.tokens_per_round * stats.rounds == pytest.approx(end - 1), "what was cut off counts nowhere"
        assert stats.draft_n_accepted <= end - 1
        committed = 1 + sum(len(round_.committed_ids) for round_ in completion.trace)
        assert committed - end < len(completion.trace[-1].committed_ids), "no round follows the one that was cut"
        inside += committed > end
    assert inside > 2


def test_an_end_of_sequence_inside_a_round_cuts_log_probs_with_the_tokens(pair):
    inside = 0
    for seed in range(8):
        options = {"seed": seed, "log_probs": True, "trace": True, "logit_bias": {EOS: 6.0}, **CHAIN}
        full = pair.generate(ignore_eos=True, **options)
        assert len(full.token_ids) == 24
        completion = pair.generate(**options)
        end = (*full.token_ids, EOS).index(EOS) + 1
        assert completion.token_ids == full.token_ids[:end]
        assert completion.finish_reason == ("stop" if end <= 24 else "length")
        assert completion.log_probs == pytest.approx(pair.log_probs(completion.token_ids), abs=1e-4)
        inside += completion.finish_reason == "stop" and ends_inside_a_path(completion)
    assert inside > 2


# The trace


def check_trace(pair, completion):
    """Check that rounds are consecutive, that each path lies in its tree, and that the rounds form the completion."""
    committed = list(completion.token_ids[:1])  # from the prefill
    for number, round_ in enumerate(completion.trace):
        assert round_.round == number
        assert round_.base_length == completion.prompt_tokens + len(committed)
        nodes = len(round_.token_ids)
        assert len(round_.parents) == len(round_.probabilities) == nodes
        assert all(-1 <= parent < node for node, parent in enumerate(round_.parents))
        assert all(0.0 <= probability <= 1.0 for probability in round_.probabilities)
        assert [round_.parents[node] for node in round_.accepted_nodes] == [-1, *round_.accepted_nodes][:-1]
        path = tuple(round_.token_ids[node] for node in round_.accepted_nodes)
        assert round_.committed_ids[: len(path)] == path
        last = number == len(completion.trace) - 1
        assert len(round_.committed_ids) == len(path) + 1 or (last and len(round_.committed_ids) == len(path) > 0)
        for token_ids, texts in ((round_.token_ids, round_.texts), (round_.committed_ids, round_.committed_texts)):
            assert list(texts) == [pair.tokenizer.decode([token]) for token in token_ids]
        assert round_.draft_seconds > 0.0
        assert round_.verify_seconds > 0.0
        committed += round_.committed_ids
    assert tuple(committed) == completion.token_ids
    assert len(completion.trace) == completion.stats.rounds


@pytest.fixture(scope="module", params=[*policy_names(), "dyspec, residual", "dynatree, greedy"])
def traced(pair, request):
    """A completion with its trace, for each policy."""
    policy, *kind = request.param.split(", ")
    options = {"residual": {"scheme": "residual"}, "greedy": {"temperature": 0.0}}[kind[0]] if kind else {}
    settings = {"shortest": 1} if policy in ("ngram", "hybrid", "throughput") else {}
    options = {"policy": policy, "policy_settings": settings, "max_new_tokens": 30, **FEW, **options}
    return policy, pair.generate(trace=True, **options), pair.generate(**options)


def test_the_rounds_make_the_completion(pair, traced):
    policy, completion, untraced = traced
    assert len(completion.trace) > 2
    check_trace(pair, completion)
    assert (completion.stats.draft_n_accepted > 0) == (policy != "autoregressive")
    assert untraced.token_ids == completion.token_ids
    assert untraced.trace == ()


def test_the_statistics_are_those_of_the_rounds(traced):
    _, completion, _ = traced
    stats, trace = completion.stats, completion.trace
    drafted = sum(len(round_.token_ids) for round_ in trace)
    accepted = sum(len(round_.accepted_nodes) for round_ in trace)
    committed = sum(len(round_.committed_ids) for round_ in trace)
    depths = [depth(round_) for round_ in trace]
    assert (stats.generated_tokens, stats.rounds) == (len(completion.token_ids), len(trace))
    assert (stats.draft_n, stats.draft_n_accepted) == (drafted, accepted)
    assert stats.acceptance_rate == pytest.approx(accepted / drafted if drafted else 0.0)
    assert stats.tokens_per_round == pytest.approx(committed / len(trace))
    assert stats.mean_path_length == pytest.approx(accepted / len(trace))
    assert stats.nodes_per_round == pytest.approx(drafted / len(trace))
    assert stats.committed_per_level == pytest.approx(committed / sum(depths) if drafted else 0.0)
    assert stats.acceptance_by_depth == pytest.approx(
        [
            sum(len(round_.accepted_nodes) >= level for round_ in trace) / sum(reached >= level for reached in depths)
            for level in range(1, max(depths) + 1)
        ]
    )


def depth(round_):
    """Return the depth of a round's tree."""
    depths = {-1: 0}
    for node, parent in enumerate(round_.parents):
        depths[node] = depths[parent] + 1
    return max(depths.values())


def test_the_times_of_a_completion_are_those_of_its_rounds(traced):
    _, completion, _ = traced
    stats = completion.stats
    assert min(stats.draft_seconds, stats.wire_seconds, stats.verify_seconds) > 0.0
    assert stats.draft_seconds + stats.wire_seconds + stats.verify_seconds <= stats.total_seconds
    assert stats.draft_seconds == pytest.approx(sum(round_.draft_seconds for round_ in completion.trace))


def test_a_rounds_verify_seconds_are_the_verify_services_alone(pair):
    completion = pair.generate(trace=True, **CHAIN)
    verifying = sum(round_.verify_seconds for round_ in completion.trace)
    assert verifying == pytest.approx(completion.stats.verify_seconds)


def test_a_rounds_trace_follows_its_tokens(pair):
    tokens = rounds = 0
    options = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3, "trace": True, **CHAIN}
    for chunk in pair.client.stream(PROMPT, **options):
        tokens += len(chunk.token_ids)
        if chunk.trace:
            assert chunk.token_ids == ()
            assert len(PROMPT) + tokens == chunk.trace.base_length + len(chunk.trace.committed_ids)
            rounds += 1
    assert tokens == 24
    assert rounds > 2


@pytest.mark.parametrize("over_nodes", [0, 1])
def test_dynatrees_parameters_follow_the_acceptance_of_each_round(pair, over_nodes):
    """DynaTree section 3.3, for both readings of acceptance: the parameters follow from all rounds so far."""
    settings = {"acceptance_over_nodes": over_nodes}
    completion = pair.generate(trace=True, policy="dynatree", policy_settings=settings, max_new_tokens=90, **FEW)
    base_depth, tau_high, shares = 5.0, 0.9, []
    for round_ in completion.trace:
        if round_.token_ids:
            shares.append(len(round_.accepted_nodes) / (len(round_.token_ids) if over_nodes else depth(round_)))
            error = sum(shares[-10:]) / len(shares[-10:]) - 0.7
            base_depth = min(max(base_depth + 0.5 * error, 1.0), 7.0)
            tau_high = min(max(tau_high - 0.05 * error, 0.0), 1.0)
        assert round_.parameters == pytest.approx({"base_depth": base_depth, "tau_high": tau_high, "rho_deep": 0.5})
    assert len({tuple(round_.parameters.values()) for round_ in completion.trace}) > 10


@pytest.mark.parametrize("policy", ["dynatree", "fixed"])
def test_trees_as_listed_hang_below_one_guess_and_leave_the_tokens(pair, policy):
    settings = {"root": "single", "prune": "expand"}
    options = {"policy": policy, "policy_settings": settings, "trace": True, **FEW}
    completion = pair.generate(**options, temperature=0)
    assert completion.token_ids == pair.generate(**PLAIN, **FEW, temperature=0).token_ids
    assert all(round_.parents.count(-1) == 1 for round_ in completion.trace[:-1])
    assert completion.stats.nodes_per_round > 5


def test_the_released_history_of_dynatree_goes_on_from_completion_to_completion(pair):
    """No completion reaches an acceptance of 1, so the service makes the trees of the sixth completion shallower."""
    settings = {"history": "released", "target_acceptance": 1, "window": 6}
    options = {"trace": True, "policy": "dynatree", "policy_settings": settings, "max_new_tokens": 4, **FEW}
    depths = [[each.parameters["base_depth"] for each in pair.generate(**options).trace] for _ in range(7)]
    assert [set(each) for each in depths] == [{5.0}] * 5 + [{4.0}, {3.0}]


@pytest.mark.parametrize("policy", [PLAIN, CHAIN, BUSH], ids=lambda policy: policy["policy"])
def test_policies_that_learn_nothing_have_no_parameters(pair, policy):
    assert all(round_.parameters == {} for round_ in pair.generate(trace=True, **policy).trace)


# The service


def test_the_service_lists_every_policy_with_its_default_first(pair):
    policies = pair.client.model_info().policies
    assert policies[0] == DEFAULT_POLICY
    assert tuple(sorted(policies)) == policy_names()
