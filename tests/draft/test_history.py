"""Tests candidates from earlier completions: the suffix index, its limits, its file, and the tokens of a service."""

from __future__ import annotations

import hashlib
import json
import math
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from dynatree.client import Client, Completion
from dynatree.common.tree import ROOT
from dynatree.draft.growth.history_file import HistoryFile
from dynatree.draft.growth.suffix_indexes import SuffixIndexes
from dynatree.draft.policies import create_policy
from dynatree.draft.policies.growing_tree import GrowingTree, TrieNode
from dynatree.draft.policies.lookup import Lookup, NGramSettings
from dynatree.draft.policies.suffix_index import BLOCK, MATCH_TOKENS, Recalled, SuffixIndex
from dynatree.serving import healthcheck
from tests.support.growing import constant, edges, grow
from tests.support.model_zoo import VOCAB_SIZE, save_noisy_copy, save_random_model
from tests.support.processes import wait_until
from tests.support.services import Services, running_services

PLAIN = "autoregressive"
FEW = (100, 101, 102)


def index_of(*sequences: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    for sequence in sequences:
        index.add(sequence, 1000)
    return index


def held(histories: SuffixIndexes) -> list[tuple[str, list[list[int]]]]:
    """The principals, each with the kept parts of its sequences."""
    return [(principal, list(index)) for principal, index in histories]


def recalled(index: SuffixIndex, *context: int, depth: int = 9, count: int = 9, rate: float = 0.9) -> list[Recalled]:
    return index.recall(context, depth, count, VOCAB_SIZE, lambda match: rate)


def test_the_longest_match_decides_and_equals_are_counted() -> None:
    index = index_of([1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 7, 8], [2, 3, 4, 7, 9], [2, 3, 4, 5, 6, 9])
    assert recalled(index, 1, 2, 3, 4) == [(ROOT, 5, 1.0, 4), (0, 6, 1.0, 5)], "the end of a sequence is no token"
    assert recalled(index, 8, 2, 3, 4) == [
        (ROOT, 5, 0.5, 3),
        (ROOT, 7, 0.5, 3),
        (0, 6, 1.0, 4),
        (1, 9, 0.5, 4),
        (1, 8, 0.5, 4),
        (2, 9, 0.5, 5),
    ]
    assert recalled(index, 8, 2, 3, 4, depth=1, count=1) == [(ROOT, 5, 0.5, 3)], "the latest of equals"
    assert recalled(index, 3, 4) == recalled(index, 4, 2, 3) == [], "two tokens are too few, and three are new"
    ended = index_of([1, 2, 3, 4], [9, 2, 3, 4, 5])
    assert recalled(ended, 1, 2, 3, 4) == [(ROOT, 5, 1.0, 3)], "a longer match at the end of a sequence says nothing"


def test_a_match_is_told_apart_up_to_its_most_tokens() -> None:
    rnd = random.Random(1)
    end = [rnd.randrange(50) for _ in range(MATCH_TOKENS)]
    index = index_of([51, *end[1:], 60], [*end, 61], [51, *end, 62], [*end[8:], 63])
    assert {(token, match) for _, token, _, match in recalled(index, *end)} == {(61, MATCH_TOKENS), (62, MATCH_TOKENS)}


def test_tokens_that_the_target_does_not_have_are_not_recalled() -> None:
    index = index_of([1, 2, 3, VOCAB_SIZE, 4], [1, 2, 3, VOCAB_SIZE - 1, 4])
    assert recalled(index, 1, 2, 3) == [(ROOT, VOCAB_SIZE - 1, 0.5, 3), (0, 4, 1.0, 4)]


def test_a_chats_next_turn_is_not_kept_twice() -> None:
    index = SuffixIndex()
    for length in range(50, 501, 50):
        index.add(range(length), 1000)
    assert index.tokens <= 500 + 10 * 2 * BLOCK
    assert recalled(index, *range(240, 250), depth=3) == [(ROOT, 250, 1.0, 10), (0, 251, 1.0, 11), (1, 252, 1.0, 12)]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 100])
def test_a_sequence_that_is_repeated_is_kept_once(length: int) -> None:
    index = index_of(range(length))
    for _ in range(3):
        index.add(range(length), 1000)
    assert list(index) == [list(range(length))]
    index.add([*range(length - 1), 1000], 1000)
    assert [sequence[-1] for sequence in list(index)] == [length - 1, 1000]


def test_the_oldest_is_forgotten_first_and_by_the_principal_that_holds_the_most() -> None:
    histories = SuffixIndexes(1600)
    histories.add("few", range(5000, 5100))
    for number in range(40):
        histories.add("many", range(100 * number, 100 * number + 100))
        assert histories.tokens <= 1600
    assert histories.tokens > 1300
    many, few = histories.of("many"), histories.of("few")
    assert many is not None
    assert few is not None
    assert few.tokens == 101
    kept = [sequence[0] for sequence in list(many)]
    assert kept == list(range(kept[0], 4000, 100)), "the latest, in their order"
    assert not recalled(many, 5000, 5001, 5002), "another principal's"
    histories.add("many", range(10_000))
    assert list(many)[-1] == list(range(9201, 10_000)), "of a sequence beyond half of the limit, the end"
    assert histories.tokens <= 1600
    assert few.tokens == 101


def test_principals_are_limited_to_1024() -> None:
    histories = SuffixIndexes(100_000)
    others = [f"other {number}" for number in range(1022)]
    for name in ("one", "two", *others, "one", "three"):
        histories.add(name, range(20))
    assert [name for name, _ in histories] == [*others, "one", "three"]
    assert SuffixIndexes(0).of("one") is None


def test_a_draft_recalls_while_another_thread_adds() -> None:
    """So do a draft model and its replacement while the last requests of the old one run."""
    histories, interval = SuffixIndexes(2000), sys.getswitchinterval()
    histories.add("", range(100))

    def add() -> None:
        for number in range(2000):
            histories.add("", range(number, number + 100))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as executor:
            adding = executor.submit(add)
            for _ in range(5000):
                index = histories.of("")
                if index is not None:
                    recalled(index, 0, 1, 2, -7)
            adding.result()
    finally:
        sys.setswitchinterval(interval)


def lookup_of(index: SuffixIndex, context: Sequence[int], lookup: Lookup) -> dict[tuple[int, ...], float]:
    """The guesses' probabilities, by the tokens down to each."""
    tree = GrowingTree(TrieNode(context[-1]), context)
    lookup.add_to(tree, earlier=index)
    return {
        tuple(each.token for each in reversed(tree.path(node))): math.exp(tree.log_prob(node))
        for node in range(len(tree))
    }


def test_both_sources_share_a_token_and_a_contradiction_leaves_the_rest() -> None:
    settings = NGramSettings(shortest=2, longest=4, depth=2)
    context = (1, 2, 3, 4, 9, 9, 1, 2, 3)  # goes on with 4, after a match of 3
    same = lookup_of(index_of([8, 1, 2, 3, 4, 5]), context, Lookup(settings))
    assert same == pytest.approx({(4,): 2 / 3, (4, 9): 3 / 4, (4, 5): 1 / 4})
    other = lookup_of(index_of([9, 1, 2, 3, 5, 6]), context, Lookup(settings))
    assert other == pytest.approx({(5,): 3 / 4, (5, 6): 3 / 4, (4,): 1 / 4, (4, 9): 3 / 4})


def test_a_principals_next_session_begins_with_what_the_index_was_worth() -> None:
    """So a useless index, whose matches are long but wrong, costs the first completions little and later ones less."""
    index = index_of(*[[number, 1, 2, 3, 4, 5, 6, 50 + number, 0] for number in range(10, 20)])
    firsts = []
    for _ in range(3):
        context: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
        lookup = Lookup(NGramSettings(shortest=2, longest=8, depth=4))
        firsts.append(sum(prob for path, prob in lookup_of(index, context, lookup).items() if len(path) == 1))
        for wrong in range(8):
            context = (*context, 70 + wrong, 1, 2, 3, 4, 5, 6)
            lookup_of(index, context, lookup)
    assert firsts[0] == pytest.approx(5 / 6)
    assert firsts[0] / 1.9 > firsts[1] > 1.4 * firsts[2]
    assert index.hits == 0
    lookup.learn([60])
    assert index.hits == 1


@pytest.mark.parametrize(("policy", "uses"), [("throughput", True), ("hybrid", True), ("ngram", False)])
def test_which_policies_use_it(policy: str, uses: bool) -> None:
    context = (1, 2, 3)
    tree = GrowingTree(TrieNode(3), context, earlier=index_of([1, 2, 3, 4, 5, 6, 7]))
    created = create_policy(policy, {})
    created.start(tree)
    assert len(tree) == (4 if uses else 0)


def test_the_draft_model_reads_along_the_likeliest_guesses() -> None:
    tree = GrowingTree(TrieNode(3), (1, 2, 3), earlier=index_of([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert create_policy("hybrid", {}).start(tree) == [ROOT, 0, 1, 2, 3]
    grown, selected, _ = grow(create_policy("hybrid", {}), constant(0.5, 0.5), context=(1, 2, 3))
    assert (4,) not in edges(grown.freeze(selected)), "a tree without the index"


class Recording(list[str]):
    def warning(self, message: str, *values: object) -> None:
        self.append(message % values)


def test_a_file_keeps_what_was_held_and_only_this_user_reads_it(tmp_path: Path) -> None:
    histories, file = SuffixIndexes(1000), tmp_path / "history"
    histories.add("team-ä", [1, 2, 3, 4])
    histories.add("", [5, 6, 7, 8])
    histories.add("", [5, 6, 7, 9])
    HistoryFile(file, "tokenizer").save(histories)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["history"]
    loaded = SuffixIndexes(1000)
    HistoryFile(file, "tokenizer").load(loaded)
    assert (held(loaded), loaded.tokens) == (held(histories), 15)


def test_a_file_is_written_one_sequence_at_a_time(tmp_path: Path) -> None:
    """All sequences together would take gigabytes, and the service is soon killed."""
    histories, file = SuffixIndexes(1_000_000), HistoryFile(tmp_path / "history", "tokenizer")
    for number in range(20):
        histories.add("ab"[number % 2], range(1000 * number, 1000 * number + 10_000))
    tracemalloc.start()
    try:
        file.save(histories)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3e6
    loaded = SuffixIndexes(1_000_000)
    file.load(loaded)
    assert held(loaded) == held(histories)


def test_a_file_has_the_contents_that_older_versions_write(tmp_path: Path) -> None:
    histories, file = SuffixIndexes(1000), tmp_path / "history"
    for name in ("team-ä", "b"):
        histories.add(name, [1, 2, 3, 4])
        histories.add(name, [5, 6, 7, 8])
    for indexes, principals in (
        (SuffixIndexes(1000), []),
        (histories, [{"principal": name, "sequences": sequences} for name, sequences in held(histories)]),
    ):
        HistoryFile(file, "tokenizer").save(indexes)
        assert json.loads(file.read_bytes()) == json.loads(saved(principals))


def saved(principals: object, tokenizer: str = "tokenizer", version: int = 1) -> bytes:
    digest = hashlib.sha256(json.dumps(principals).encode()).hexdigest()
    head = {"format": f"dynatree history {version}", "tokenizer": tokenizer, "sha256": digest}
    return json.dumps({**head, "principals": principals}).encode()


GOOD = [{"principal": "a", "sequences": [[1234, 5678]]}]
WRONG = {
    "empty": b"",
    "binary": b"\xff\x00\x01",
    "cut": saved(GOOD)[:40],
    "deep": b"[" * 100_000,
    "a text": b"Once upon a time",
    "another token": saved(GOOD).replace(b"1234", b"1235"),
    "another format": saved(GOOD, version=2),
    "another tokenizer": saved(GOOD, tokenizer="other"),
    "no list": saved({}),
    "no principal": saved([{"sequences": [[1]]}]),
    "a name that no log line may have": saved([{"principal": "a\nb", "sequences": [[1]]}]),
    "no sequences": saved([{"principal": "a"}]),
    "a word": saved([{"principal": "a", "sequences": [[1, "2"]]}]),
    "a switch": saved([{"principal": "a", "sequences": [[1, True]]}]),
    "below": saved([{"principal": "a", "sequences": [[-1]]}]),
    "above": saved([{"principal": "a", "sequences": [[2147483648]]}]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_no_history_is_one_warning_and_stays(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history"
    path.write_bytes(WRONG[what])
    histories, file = SuffixIndexes(1000), HistoryFile(path, "tokenizer")
    file.load(histories)
    assert (histories.tokens, histories.of("a")) == (0, None)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the history {path} is neither used nor replaced: ")
    assert "\n" not in record.getMessage()
    histories.add("a", [1, 2, 3])
    file.save(histories)
    assert path.read_bytes() == WRONG[what]


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "missing" / "history"
    HistoryFile(path, "tokenizer").save(SuffixIndexes(10))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [f"the history {path} cannot be saved"]


SAVING = """
import os, signal, sys, time
from dynatree.cli.main import main
from dynatree.draft.growth.history_file import HistoryFile

save = HistoryFile.save

def disturbed(*given):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    save(*given)

HistoryFile.save = disturbed
sys.exit(main(sys.argv[1:]))
"""


def test_further_signals_do_not_interrupt_the_saving_of_a_history(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """`dynatree serve` and systemd send a second signal to a service that they have already asked to stop."""
    file, address = tmp_path / "history", f"unix:{tmp_path}/d.sock"
    with running_services(tmp_path, models[0], None) as services:
        options = ["--draft-model", "none", "--verify", services.verify_address, "--listen", address]
        command = [sys.executable, "-c", SAVING, "draft", *options, "--history-file", str(file)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: process.poll() is not None or healthcheck.failure(address, 5.0) is None)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("history")] == ["history"]


@pytest.fixture(scope="module", name="models")
def models_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("m")
    target = save_random_model(folder / "target", "llama", seed=1, num_hidden_layers=2)
    return target, save_noisy_copy(folder / "draft", target, seed=2)


@pytest.fixture(scope="module", name="histories")
def histories_fixture() -> SuffixIndexes:
    return SuffixIndexes(100_000)


@pytest.fixture(scope="module", name="services", params=[False, True], ids=["without a model", "with a model"])
def services_fixture(
    request: pytest.FixtureRequest,
    models: tuple[Path, Path],
    histories: SuffixIndexes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Services]:
    target, draft = models
    folder = tmp_path_factory.mktemp("s")
    with running_services(folder, target, draft if request.param else None, histories=histories) as services:
        yield services


def completed(client: Client, prompt: list[int], policy: str | None = None, **options: object) -> Completion:
    return client.generate(prompt, policy=policy, **{"max_new_tokens": 24, "ignore_eos": True, **options})  # type: ignore[arg-type]


PROMPT = [100, 101, 102, 103, 104]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.2, "seed": 3, "scheme": "independent"}],
    ids=["greedy", "sampled", "independent"],
)
def test_tokens_are_plain_decodings_with_hostile_contents(
    services: Services, histories: SuffixIndexes, options: dict[str, object]
) -> None:
    """The index holds the true continuation, half of it with wrong ends, and every continuation of a few tokens."""
    name = f"hostile-{options.get('scheme')}-{len(options)}-{services.draft is None}"
    bias = {"logit_bias": {token: 12.0 + token % 2 for token in FEW}}
    with Client(services.draft_address, principal=name) as client:
        for more in ({}, bias):
            plain = completed(client, PROMPT, PLAIN, **options, **more).token_ids
            for at in range(0, 24, 3):
                histories.add(name, [*PROMPT, *plain[:at], 2**31 - 1, VOCAB_SIZE, 5, 5, 5])
                histories.add(name, [*PROMPT, *plain[:at], *reversed(plain)])
            for tokens in product(FEW, repeat=6):
                histories.add(name, tokens)
            for policy in ("throughput",) if services.draft is None else ("throughput", "hybrid"):
                hits = histories.hits
                assert completed(client, PROMPT, policy, **options, **more).token_ids == plain
                assert histories.hits > hits


def test_only_the_principal_itself_gains(services: Services, histories: SuffixIndexes) -> None:
    def rounds(principal: str, **options: object) -> float:
        with Client(services.draft_address, principal=principal) as client:
            return completed(client, [*PROMPT, 9], "throughput", **options).stats.rounds

    mine, other = f"mine-{services.draft is None}", f"other-{services.draft is None}"
    first, again = rounds(mine), rounds(mine)
    assert again < first / 2
    assert rounds(other) > 2 * again


def test_a_trace_shows_nothing_of_a_principal_that_is_only_claimed(
    services: Services, histories: SuffixIndexes
) -> None:
    """Anybody may claim a name, and a trace shows the candidates."""
    secret = [11, 12, 13, 500, 501, 502]
    histories.add("claimed", secret)
    with Client(services.draft_address, principal="claimed") as client:
        stream = client.stream([11, 12, 13], max_new_tokens=4, policy="throughput", trace=True, ignore_eos=True)
        shown = {token for chunk in stream if chunk.trace for token in chunk.trace.token_ids}
    assert not shown & set(secret[3:])


def test_a_request_that_says_no_keeps_nothing_and_may_recall(services: Services, histories: SuffixIndexes) -> None:
    name = f"no-{services.draft is None}"
    with Client(services.draft_address, principal=name) as client:
        completed(client, PROMPT, store=False)
        stream = client.stream(PROMPT, max_new_tokens=100, ignore_eos=True, store=False)
        next(stream)
        stream.close()
        done = completed(client, PROMPT)
        kept = histories.of(name)
        assert kept is not None
        assert list(kept) == [[*PROMPT, *done.token_ids]]
        hits = histories.hits
        completed(client, PROMPT, "throughput", store=False)
        assert histories.hits > hits
        assert list(kept) == [[*PROMPT, *done.token_ids]]


def test_completions_that_are_cut_short_and_each_of_several_are_kept(
    services: Services, histories: SuffixIndexes
) -> None:
    name = f"several-{services.draft is None}"
    with Client(services.draft_address, principal=name) as client:
        first = client.generate(PROMPT, n=3, max_new_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
        kept = histories.of(name)
        assert kept is not None
        answers = [list(each.token_ids) for each in (first, *first.alternatives)]
        assert list(kept) == [[*PROMPT, *answer] for answer in answers]
        stream = client.stream(PROMPT[1:], n=64, max_new_tokens=150, policy=PLAIN, ignore_eos=True)
        token_ids = [token for _ in range(3) for token in next(stream).token_ids]
        stream.close()
    wait_until(lambda: len(list(kept)) > 3)
    assert list(kept)[3][: len(PROMPT) + 1] == [*PROMPT[1:], *token_ids[:2]]
