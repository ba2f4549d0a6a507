"""The file of `dynatree bench record`: written, read, refused, and the recordings of benchmarks/replay."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import EmbeddedServices

from dynatree import embedded
from dynatree.bench.methods import Method, parse_method
from dynatree.cli.main import main
from dynatree.client import Client
from dynatree.common.seeds import derived_seed
from dynatree.draft.policies import create_policy
from dynatree.replay import recording
from dynatree.replay.machines import load_machines
from dynatree.replay.recorder import Recorder
from dynatree.replay.recording import LOG_PROB_STEPS, RecordedRun, Recording
from dynatree.replay.runs import Settings, Task, groups, replay_group
from dynatree.replay.session import replay, sampling_of
from tests.support.recorded import DATA, TOY, hand_made


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "some.npz"
    runs = (hand_made(), RecordedRun(1, 3, 0.7, 5, (70_000, 2), (1, 2)))
    recording.save(Recording({"models": "toys"}, runs), file)
    read = recording.load(file)
    assert read.header == {"models": "toys", "version": 1}
    for old, new in zip(runs, read.runs, strict=True):
        assert replace(new, nodes=old.nodes) == old
        for before, after in zip(old.nodes, new.nodes, strict=True):
            assert (after.parent, after.token) == (before.parent, before.token)
            for was, is_ in zip(before.proposals, after.proposals, strict=True):
                assert is_.token == was.token
                assert is_.log_prob == pytest.approx(was.log_prob, abs=0.5 / LOG_PROB_STEPS)
        assert [new.child(*edge) for edge in [(0, 1), (2, 7), (2, 8)]] == [old.child(0, 1), old.child(2, 7), None]
    assert [sampling_of(run).seed for run in read.runs] == [0, 5]


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04 and no more"])
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other.npz"
    file.write_bytes(content)
    with pytest.raises(SystemExit, match=r"other\.npz is not a recording"):
        recording.load(file)
    with pytest.raises(SystemExit, match="cannot be read"):
        recording.load(tmp_path / "missing.npz")


TEXT = (
    "It was a dark and stormy night, and the captain had not come back to the house by the sea.\n\n"
    "My dear sister, I write to you in haste, for the ship is to sail in the morning, and I must go.\n\n"
)
POLICIES = ("fixed", "linear:depth=4")


def test_rounds_are_those_of_the_services(embedded_services: EmbeddedServices, tmp_path: Path) -> None:
    text, out = tmp_path / "story.txt", tmp_path / "story.npz"
    text.write_text(TEXT)
    sizes = ("--count", "1", "--prompt-tokens", "12", "--max-new-tokens", "32", "--threads", "1")
    arguments = ("--prompts", str(text), *sizes, "--temperature", "0", "--temperature", "0.7", "--out", str(out))
    assert main(["bench", "record", *arguments, "--seed", "3"]) == 0
    recorded = recording.load(out)
    assert [(run.temperature, run.seed) for run in recorded.runs] == [(0.0, None), (0.7, derived_seed(3, 0, 0))]
    with Client(embedded_services.draft_address) as client:
        for run in recorded.runs:
            for method in map(parse_method, POLICIES):
                live = client.generate(
                    run.prompt_ids,
                    max_new_tokens=32,
                    temperature=run.temperature,
                    seed=run.seed,
                    ignore_eos=True,
                    policy=method.policy,
                    policy_settings=dict(method.settings),
                )
                assert live.token_ids == run.completion
                done = replay(run, create_policy(method.policy or "", dict(method.settings)), TOY)
                stats = live.stats
                assert (done.rounds, done.nodes, done.accepted) == (stats.rounds, stats.draft_n, stats.draft_n_accepted)


def test_models_are_rounded_as_the_options_say(tmp_path: Path) -> None:
    text, out = tmp_path / "story.txt", tmp_path / "story.npz"
    text.write_text(TEXT)
    sizes = ("--count", "1", "--prompt-tokens", "12", "--max-new-tokens", "4", "--threads", "1", "--temperature", "0")
    weights = ("--weights", "int8", "--draft-weights", "int4")
    assert main(["bench", "record", "--prompts", str(text), *sizes, *weights, "--out", str(out)]) == 0
    models = recording.load(out).header["models"]
    assert "int8 weights" in models["target"]["numerics"]
    assert "int4 " in models["draft"]["numerics"]


def test_what_policies_ask_for_is_recorded() -> None:
    recorder = Recorder.load(str(embedded.target_path()), str(embedded.draft_path()), "cpu", "auto", least_prob=0.5)
    run = recorder.record(0, 0, tuple(range(40, 60)), 16, 0.0, 0)
    before = len(run.nodes)
    cheap = replace(TOY, verify=((1, 1.0), (64, 1.1)), draft=((1, 0.001),), level_seconds=0.0)
    task = Task(Method("throughput", "throughput"), cheap, *groups([run]), Settings())
    assert replay_group(task).stood_in
    recorder.complete([run], [cheap])
    assert len(run.nodes) > before
    assert replay_group(task).stood_in == 0.0


@pytest.fixture(scope="module")
def shipped() -> list[RecordedRun]:
    return [run for path in sorted(DATA.glob("*.npz")) for run in recording.load(path).runs]


def test_the_shipped_recordings_hold_what_the_controllers_ask_for(shipped: list[RecordedRun]) -> None:
    assert sorted({run.temperature for run in shipped}) == [0.0, 0.7, 1.0]
    for machine in load_machines(DATA / "costs.json")[:2]:
        for group in groups(shipped):
            for name in ("dynatree", "throughput"):
                stood_in = replay_group(Task(Method(name, name), machine, group, Settings())).stood_in
                assert stood_in is not None
                assert stood_in < 0.02


def test_the_shipped_data_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 2_000_000
