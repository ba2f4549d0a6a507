"""Tests the baselines of `dynatree bench`: transformers' generate(), its arrival times, and its rows in the tables."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import EmbeddedServices

from dynatree import embedded
from dynatree.bench.baselines import LocalModel, load_baselines
from dynatree.bench.decoding import Baseline
from dynatree.bench.memory import PeakMemory
from dynatree.bench.methods import ASSISTED, BASELINES
from dynatree.bench.record import load
from dynatree.cli.main import main
from dynatree.client import Client, ServiceInfo

PROMPT = "It was a dark and stormy night, and the captain"
TOKENS = 60
LABELS = [method.label for method in BASELINES.values()]


@pytest.fixture(scope="module")
def info(embedded_services: EmbeddedServices) -> ServiceInfo:
    with Client(embedded_services.draft_address) as client:
        return client.model_info()


@pytest.fixture(scope="module")
def baselines(info: ServiceInfo) -> Mapping[str, Baseline]:
    target = LocalModel(str(embedded.target_path()), info.target)
    draft = LocalModel(str(embedded.draft_path()), info.draft)
    return load_baselines(list(BASELINES.values()), target, draft).decoders


@pytest.fixture(scope="module")
def prompt(embedded_services: EmbeddedServices) -> tuple[int, ...]:
    """Return tokens that the target likes to continue with, and repeats."""
    with Client(embedded_services.draft_address) as client:
        return client.generate(PROMPT, max_new_tokens=20, ignore_eos=True).token_ids


@pytest.mark.parametrize("label", LABELS)
def test_all_tokens_arrive(
    label: str, baselines: Mapping[str, Baseline], prompt: tuple[int, ...], embedded_services: EmbeddedServices
) -> None:
    output = baselines[label](prompt, TOKENS)
    with Client(embedded_services.draft_address) as client:
        plain = client.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True, policy="autoregressive")
    assert output.token_ids == plain.token_ids
    tokens, seconds = zip(*output.arrivals, strict=True)
    assert tokens[-1] == TOKENS
    assert list(tokens) == sorted(set(tokens))
    assert list(seconds) == sorted(seconds)
    assert 0 < seconds[-1] <= output.seconds
    # drafting brings several tokens at a time, plain decoding one
    assert (len(tokens) == TOKENS) is (label == "transformers")
    assert (output.statistics, output.trace) == (None, ())


@pytest.mark.parametrize("label", LABELS)
def test_one_token(label: str, baselines: Mapping[str, Baseline], prompt: tuple[int, ...]) -> None:
    output = baselines[label](prompt, 1)
    assert (len(output.token_ids), [tokens for tokens, _ in output.arrivals]) == (1, [1])


def test_the_end_of_sequence_is_ignored(
    baselines: Mapping[str, Baseline], prompt: tuple[int, ...], info: ServiceInfo, tmp_path: Path
) -> None:
    """Like the services, a baseline does not end at the end of sequence, and does not exclude it from sampling."""
    expected = baselines["transformers"](prompt, 12).token_ids
    for name, path in (("target", embedded.target_path()), ("draft", embedded.draft_path())):
        shutil.copytree(path, tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text(json.dumps({"eos_token_id": expected[5]}))
    ending = load_baselines(
        list(BASELINES.values()),
        LocalModel(str(tmp_path / "target"), info.target),
        LocalModel(str(tmp_path / "draft"), info.draft),
    ).decoders
    assert {label: baseline(prompt, 12).token_ids for label, baseline in ending.items()} == dict.fromkeys(
        LABELS, expected
    )


def test_no_model_is_loaded_without_need(info: ServiceInfo, baselines: Mapping[str, Baseline]) -> None:
    nowhere = LocalModel("/no/such/model", info.draft)
    load_baselines([BASELINES["transformers"]], LocalModel(str(embedded.target_path()), info.target), nowhere)
    with pytest.raises(SystemExit, match="model embedded-draft could not be loaded for a baseline"):
        load_baselines([ASSISTED], LocalModel(str(embedded.target_path()), info.target), nowhere)


def test_assisted_decoding_needs_the_targets_tokenizer(info: ServiceInfo) -> None:
    target = LocalModel(str(embedded.target_path()), replace(info.target, tokenizer_fingerprint="another"))
    with pytest.raises(SystemExit, match="assisted needs a draft with the target's tokenizer"):
        load_baselines([ASSISTED], target, LocalModel(str(embedded.draft_path()), info.draft))


@pytest.mark.long
def test_baselines_beside_policies(embedded_services: EmbeddedServices, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(PROMPT + ", as he had been told, came back. " * 20)
    out = tmp_path / "out.json"
    options = ["--count", "2", "--prompt-tokens", "12", "--max-new-tokens", "16", "--repetitions", "2"]
    options += ["--baseline", "all", "--draft-model", "embedded", "--policy", "linear", "--out", str(out)]
    server = ["--server", embedded_services.draft_address, "--prompts", str(tmp_path / "story.txt")]
    assert main(["bench", "compare", *server, *options]) == 0
    report = load(out)
    plain, others = 2 * ["autoregressive"], [*LABELS, *("linear", "linear")]  # two temperatures; baselines have one
    rows = [[*plain, *others[turn:], *others[:turn]] for turn in range(4)]
    assert [run["label"] for run in report["runs"]] == [label for row in rows for label in row]
    for run in report["runs"]:
        if run["label"] in LABELS:
            assert (run["policy"], run["settings"], run["statistics"], run["temperature"]) == (None, {}, None, 0)
            assert (run["equal"], run["agrees"], run["tokens"]) == (True, 16, 16)
            assert run["peak_memory"] is not None
            assert (run["peak_memory"]["client"] or 0) > 50e6


def test_the_peak_memory_of_a_process() -> None:
    """The process holds 200 MB, frees them, and then holds 100 MB."""
    steps = "held = b'x' * 200_000_000; del held", "held = b'x' * 100_000_000; del held", "pass"
    code = f"for step in {steps!r}:\n    exec(step)\n    print('done', flush=True)\n    input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    memory = PeakMemory({"child": child.pid, "elsewhere": None})
    peaks = []
    with child:
        for _ in steps:
            assert child.stdout.readline() == "done\n"
            peaks.append(memory.read()["child"])
            assert memory.read()["elsewhere"] is None
            memory.reset()
            child.stdin.write("\n")
            child.stdin.flush()
    large, middle, small = (peak or 0 for peak in peaks)
    assert large > 200e6
    assert 100e6 < middle < 200e6
    assert 0 < small < 100e6
    assert memory.read()["child"] is None
