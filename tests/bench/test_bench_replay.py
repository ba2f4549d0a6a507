"""Tests `dynatree bench record` and `bench replay` on hand-made rounds and on rounds of the services."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import EmbeddedServices

from dynatree import embedded
from dynatree.bench.methods import PLAIN, Method, parse_method, parse_methods
from dynatree.bench.record import save
from dynatree.bench.replay import constants, measured_machines, objectives, recording
from dynatree.bench.replay.machines import Machine, load_machines, seconds_on, to_json
from dynatree.bench.replay.many import simulate
from dynatree.bench.replay.recorder import Recorder
from dynatree.bench.replay.recording import LOG_PROB_STEPS, RecordedRun, Recording
from dynatree.bench.replay.replay_command import check_methods
from dynatree.bench.replay.runs import Group, Result, Settings, Task, groups, replay_all, replay_group
from dynatree.bench.replay.session import Replayed, replay, sampling_of
from dynatree.bench.replay.table_model import FIRST_TAIL_TOKEN, TableModel
from dynatree.cli.main import main
from dynatree.client import Client
from dynatree.common.seeds import derived_seed
from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy, policy_names
from dynatree.draft.policies.growing_tree import Proposal
from tests.support.bench_records import DRAFTED, STATISTICS, costs_report, detailed, new_report, new_run
from tests.support.paths import ROOT

DATA = ROOT / "benchmarks" / "replay"

TOY = Machine(
    name="toy",
    measured=True,
    sources={},
    verify=((1, 1.0), (4, 1.6)),
    draft=((1, 0.1), (2, 0.2)),
    round_seconds=0.5,
    level_seconds=0.01,
)


PLAINLY = Settings()
TOY_FIGURES = {"verify", "draft", "round_seconds", "level_seconds"}


def proposed(*tokens: int, prob: float = 0.5) -> tuple[Proposal, ...]:
    """Return proposals with probabilities 1/2, 1/4 and so on."""
    return tuple(Proposal(token, math.log(prob ** (rank + 1))) for rank, token in enumerate(tokens))


def hand_made() -> RecordedRun:
    """Return a prompt and six tokens; the draft's second guess of the third is right, and its first of the others."""
    run = RecordedRun(0, 0, 0.0, None, (9,), (1, 2, 3, 4, 5, 6))
    for node, tokens in enumerate([(1, 8), (2, 8), (7, 3), (4, 8), (5, 8), (6, 8)]):
        run.set_proposals(node, proposed(*tokens))
    run.add(2, 7, proposed(6, 4))
    return run


def test_a_chain_worked_out_by_hand() -> None:
    done = replay(hand_made(), create_policy("linear", {"depth": 2}), TOY)
    # the prefill, then the trees 2-7, of which 2 is right and 3 follows, and 4-5
    forwards, trees = 4 * (0.1 + 0.01), 2 * (1.4 + 0.5)
    promised = 2 * (1 / 2 + 1 / 4)
    seconds = pytest.approx(forwards + trees)
    assert done == Replayed(5, 2, 4, 3, seconds, expanded=5, stood_in=0, promised=pytest.approx(promised))


def test_oracles_know_what_comes() -> None:
    """The path oracle sends 2, 3, 4, 5 at once. By rank, 3 is fifth: so 2 goes alone, then 4 and 5, which is third."""
    level, round_ = 0.1 + TOY.level_seconds, TOY.round_seconds
    assert objectives.path_oracle(hand_made(), TOY) == pytest.approx(4 * level + seconds_on(TOY.verify, 5) + round_)
    trees = (level + seconds_on(TOY.verify, 2) + round_, 2 * level + seconds_on(TOY.verify, 4) + round_)
    assert objectives.size_oracle(hand_made(), TOY) == pytest.approx(sum(trees))


@pytest.mark.parametrize("machine", ["2.8b-avx512", "gpu-flat-expected"])
def test_no_objective_without_ngrams_is_faster_than_the_path_oracle(machine: str) -> None:
    (costs,) = (each for each in load_machines(DATA / "costs.json") if each.name == machine)
    run = recording.load(DATA / "books.npz").runs[0]
    short = replace(run, completion=run.completion[:40], nodes=list(run.nodes))
    (judged,) = objectives.study([("a book", short)], [costs])
    for each in judged:
        assert each.tokens == 39
        assert each.path_oracle <= each.size_oracle
        assert "n-grams" in each.rule or each.path_oracle <= each.seconds
    assert len(objectives.table(judged).rows) == len(judged) + 2


def test_plain_decoding_takes_a_round_a_token() -> None:
    done = replay(hand_made(), create_policy("autoregressive", {}), TOY)
    assert (done.tokens, done.rounds, done.nodes) == (5, 5, 0)
    assert done.seconds == pytest.approx(5 * TOY.plain_seconds) == pytest.approx(5 * 1.5)


def test_noise_changes_what_is_measured() -> None:
    done = replay(hand_made(), create_policy("autoregressive", {}), TOY, noise=lambda: 2.0)
    assert done.seconds == pytest.approx(2 * 5 * 1.5)


def test_a_wider_tree_finds_the_second_guess() -> None:
    done = replay(hand_made(), create_policy("fixed", {"depth": 4, "breadth": 2, "tau": 0}), TOY)
    assert (done.rounds, done.accepted) == (1, 4)


def test_what_was_not_recorded_is_stood_in_for_and_counted() -> None:
    run = hand_made()
    done = replay(run, create_policy("linear", {"depth": 4}), TOY)
    # prompt; 1, and below it 2, the recorded 2 7, and 2 7 6, which was not recorded; 3 and 4
    assert (done.expanded, done.stood_in) == (7, 1)
    run.add(6, 6, proposed(3, 4))
    assert replay(run, create_policy("linear", {"depth": 4}), TOY).stood_in == 0


def test_the_nearest_in_probability_stands_in() -> None:
    run = hand_made()
    run.add(1, 8, proposed(11))
    run.add(3, 8, proposed(12))
    run.nodes[1] = replace(run.nodes[1], proposals=(Proposal(2, math.log(0.05)), Proposal(8, math.log(0.9))))
    model = TableModel(run, TOY)
    drafter = Drafter(model, 16)
    session = drafter.open(run.prompt_ids, sampling_of(run), 0)
    drafter.commit(session, [1, 2, 3, 4, 5])
    policy = create_policy("fixed", {"depth": 2, "breadth": 2, "tau": 0})
    tree = drafter.grow(session, policy, 4, 16).tree
    assert model.stood_in == 2
    # 6 is as likely as 7 was (1/2), so it continues like 7; 8 is as likely as 8 was after 3 (1/4)
    assert tree.token_ids == (6, 8, 6, 4, 12, FIRST_TAIL_TOKEN)


def test_more_proposals_than_were_recorded_are_none_likelier() -> None:
    run = hand_made()
    drafter = Drafter(TableModel(run, TOY), 64)
    session = drafter.open(run.prompt_ids, sampling_of(run), 0)
    tree = drafter.grow(session, create_policy("fixed", {"depth": 1, "breadth": 5, "tau": 0}), 4, 64).tree
    assert tree.token_ids == (1, 8, FIRST_TAIL_TOKEN, FIRST_TAIL_TOKEN + 1, FIRST_TAIL_TOKEN + 2)
    assert [math.exp(log_prob) for log_prob in tree.log_probs] == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32])


def test_what_was_not_recorded_can_be_asked_for() -> None:
    run = hand_made()
    asked = []

    def ask(position: int, path: object) -> tuple[Proposal, ...]:
        asked.append((position, path))
        return proposed(3, 4)

    done = replay(run, create_policy("linear", {"depth": 4}), TOY, ask=ask)
    assert asked == [(1, [2, 7, 6])]
    assert done.stood_in == 0
    assert run.nodes[-1].proposals == proposed(3, 4)
    assert run.child(6, 6) == 7


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


def test_runs_of_one_temperature_and_length_belong_together() -> None:
    warm = replace(hand_made(), temperature=0.7)
    short = RecordedRun(0, 0, 0.0, None, (9,), (1, 2))
    assert [(group.name, len(group.runs)) for group in groups([warm, short, hand_made(), warm])] == [
        ((0.0, 2), 1),
        ((0.0, 6), 1),
        ((0.7, 6), 2),
    ]


def test_seconds_are_on_lines_between_the_points_and_on_by_the_mean_slope() -> None:
    curve = ((2, 1.0), (4, 2.0), (8, 2.5))
    assert [seconds_on(curve, rows) for rows in (1, 2, 3, 6, 8, 12)] == pytest.approx([1.0, 1.0, 1.5, 2.25, 2.5, 3.5])
    assert seconds_on(((3, 1.0),), 100) == 1.0


def test_policies_that_draw_otherwise_are_not_replayed() -> None:
    """A recording contains no draws, and the draft's proposals at only one temperature."""
    check_methods(parse_methods("dyspec:max_nodes=8/64"))
    for text in ("dyspec:draft_temperature=0.6", "specinfer:replacement=1"):
        with pytest.raises(SystemExit, match="a recording contains no draws"):
            check_methods(parse_methods(text))


def test_machines_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(to_json([TOY]))
    assert load_machines(file) == [TOY]
    for spoilt, message in [
        (file.read_text().replace('"version": 1', '"version": 2'), "has version 2"),
        (file.read_text().replace("[[1, 1.0], [4, 1.6]]", "[[4, 1.0], [1, 1.6]]"), "curve"),
        (file.read_text().replace("round_seconds", "rounds"), "is not a file of machines"),
        ("[", "is not a file of machines"),
    ]:
        file.write_text(spoilt)
        with pytest.raises(SystemExit, match=message):
            load_machines(file)


def test_a_machine_is_made_of_measurements(tmp_path: Path) -> None:
    """A plain round takes 190 ms, 20 of them in forward passes; a round of 10 nodes takes 475 ms, 50 of them there."""
    file, costs, compare = (tmp_path / name for name in ("machines.json", "costs-x.json", "compare.json"))
    file.write_text(to_json([TOY]))
    save(costs_report(), costs)
    runs = [new_run("autoregressive", statistics=detailed(STATISTICS, 0.1, []))]
    save(new_report("compare", [*runs, new_run("linear", statistics=detailed(DRAFTED, 0.1, []))]), compare)
    command = [str(file), "--name", "mine", "--costs", str(costs), "--compare", str(compare)]
    measured_machines.main(command)
    measured_machines.main(command)
    mine, toy = load_machines(file)
    assert (toy, mine.name, mine.measured) == (TOY, "mine", True)
    assert mine.verify == ((1, 0.009), (16, 0.0105), (256, 0.0345))
    assert mine.draft == ((1, 0.0091), (8, 0.0098))
    assert (mine.round_seconds, mine.level_seconds) == (0.17, 0.0255)
    assert "a processor, large, float32, commit 0123456" in mine.sources["verify"]


def test_the_shipped_machines() -> None:
    machines = load_machines(DATA / "costs.json")
    assert {machine.name for machine in machines if not machine.measured} == {"2.8b-h100-expected", "gpu-flat-expected"}
    assert all(machine.sources.keys() == TOY_FIGURES for machine in machines)


def test_noise_and_stalls_have_a_seed() -> None:
    def seconds(settings: Settings) -> float:
        (task,) = tasks((hand_made(),), "autoregressive", settings=settings)
        return replay_group(task).runs[0].seconds

    plain = 5 * TOY.plain_seconds
    assert seconds(PLAINLY) == pytest.approx(plain)
    assert seconds(Settings(noise=0.5, seed=1)) == seconds(Settings(noise=0.5, seed=1)) != pytest.approx(plain)
    assert seconds(Settings(noise=0.5, seed=1)) != seconds(Settings(noise=0.5, seed=2))
    assert seconds(Settings(stalls=0.999)) == pytest.approx(3 * plain)


def tasks(runs: tuple[RecordedRun, ...], *names: str, settings: Settings = PLAINLY) -> list[Task]:
    return [Task(Method(name, name), TOY, Group(0.0, 6, runs), settings) for name in names]


def test_results_do_not_depend_on_the_processes() -> None:
    every = tasks((hand_made(), hand_made()), *policy_names(), settings=Settings(noise=0.3, seed=7))
    alone, together = list(replay_all(every, 1)), list(replay_all(every, 2))
    assert [result.runs for result in alone] == [result.runs for result in together]
    assert [result.task.method.label for result in together] == list(policy_names())


def test_prompts_share_what_was_learnt_unless_each_is_fresh() -> None:
    runs = (hand_made(), hand_made())
    (shared,), (fresh,) = tasks(runs, "throughput"), tasks(runs, "throughput", settings=Settings(fresh=True))
    first, second = replay_group(fresh).runs
    assert first == second == replay_group(shared).runs[0]


def test_the_figures_of_a_result() -> None:
    (task,) = tasks((), "linear")
    runs = (Replayed(10, 5, 20, 5, 5.0, 12, 3), Replayed(10, 10, 0, 0, 30.0, 0, 0))
    result = Result(task, runs)
    assert result.speedups == pytest.approx([3.0, 0.5])
    assert result.speedup == pytest.approx(1.75)
    assert (result.tokens_per_round, result.nodes_per_round) == pytest.approx((20 / 15, 20 / 15))
    assert (result.acceptance, result.stood_in) == (0.25, 0.25)
    assert Result(task, runs[1:]).acceptance is None


def test_each_constant_is_varied_alone() -> None:
    default = ControlSettings()
    found = {(each.name, each.kind): each for each in constants.variants()}
    assert {
        key: found[key].value
        for key in [
            ("cost_window", "half"),
            ("cost_window", "double"),
            ("cost_trials", "neutral"),
            ("rate_fade", "half"),
            ("rate_fade", "double"),
            ("rate_fade", "neutral"),
            ("prior_children", "double"),
            ("prior_others_rate", "double"),
        ]
    } == {
        ("cost_window", "half"): 8,
        ("cost_window", "double"): 32,
        ("cost_trials", "neutral"): 1,
        ("rate_fade", "half"): pytest.approx(0.95),
        ("rate_fade", "double"): pytest.approx(0.8),
        ("rate_fade", "neutral"): 1.0,
        ("prior_children", "double"): 0.85,
        ("prior_others_rate", "double"): 0.2,
    }
    assert ("cost_trials", "half") not in found  # "half" is the neutral value
    assert found["foresight", "half"].value == (1, 4, 15)
    assert found["foresight", "double"].value == (1, 2, 3, 4, 6, 8, 11, 15)
    for variant in found.values():
        assert replace(variant.control, **{variant.name: getattr(default, variant.name)}) == default
        assert getattr(variant.control, variant.name) == variant.value


def test_what_a_constant_is_worth() -> None:
    names = ("cost_window", "cost_trials")
    chosen = [each for each in constants.variants() if each.name in names]
    changes = [constants.Change(each, (-0.1, 0.0), 0.0) for each in chosen]
    changes[0] = constants.Change(chosen[0], (0.1, 0.2), 0.0)
    assert [each.variant.kind for each in changes] == ["half", "double", "neutral", "double"]
    assert constants.worth(changes[:2]) == pytest.approx(0.05)
    table = constants.table(changes)
    assert [list(row) for row in table.rows] == [
        ["cost_window", "16", "+5.0 %", "+15.0 (+10.0 to +20.0)", "-5.0 (-10.0 to +0.0)", "-"],
        ["cost_trials", "2", "+5.0 %", "-", "-5.0 (-10.0 to +0.0)", "-5.0 (-10.0 to +0.0)"],
    ]


def test_changes_are_against_the_default_on_the_same_runs() -> None:
    every = tasks((hand_made(),), "throughput")
    found = list(constants.changes(every, lambda tasks: replay_all(tasks, 1)))
    assert [change.variant for change in found] == constants.variants()
    (before,) = replay_all(every, 1)
    for change in found:
        settings = Settings(control=change.variant.control)
        after = replay_group(replace(every[0], settings=settings))
        assert change.cells == pytest.approx((after.speedup / before.speedup - 1,))


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


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, machines, out = tmp_path / "some.npz", tmp_path / "costs.json", tmp_path / "out.json"
    recording.save(Recording({}, (hand_made(),)), recorded)
    machines.write_text(to_json([TOY, replace(TOY, name="guessed", measured=False)]))
    policies = ("--policy", "linear:depth=2/4", "--policy", "autoregressive")
    assert main(["bench", "replay", str(recorded), *policies, "--machine", "guessed", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "guessed (expected, not measured), temperature 0, 6 new tokens" in printed
    results = json.loads(out.read_text())["results"]
    assert [(each["label"], each["machine"]) for each in results] == [
        ("linear:depth=2", "guessed"),
        ("linear:depth=4", "guessed"),
        ("autoregressive", "guessed"),
    ]
    assert results[0]["rounds"] == [2]
    assert main(["bench", "replay", str(recorded), "--constants", "--machine", "toy"]) == 0
    assert "What the constants are worth" in capsys.readouterr().out


MISTAKES = [
    (("--machine", "none"), "has no machine none; it has toy"),
    (("--policy", "linear:width=2"), "policy linear has no setting width"),
    (("--temperature", "0.3"), "no recorded run has such a --temperature"),
    (("--machines", "missing.json"), "missing.json cannot be read"),
]


def test_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    recorded = tmp_path / "some.npz"
    recording.save(Recording({}, (hand_made(),)), recorded)
    (tmp_path / "costs.json").write_text(to_json([TOY]))
    code = (
        "import sys; sys.modules['torch'] = None; from dynatree.cli.main import main\n"
        f"for arguments in {[arguments for arguments, _ in MISTAKES]}:\n"
        f"    assert main(['bench', 'replay', {str(recorded)!r}, *arguments]) == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for line, (_, message) in zip(done.stderr.splitlines(), MISTAKES, strict=True):
        assert message in line


def test_many_clients_go_through_the_services_scheduler() -> None:
    run = hand_made()
    one, eight = (simulate([run], PLAIN, TOY, clients, completions=2) for clients in (1, 8))
    assert (one.tokens, eight.tokens) == (2 * len(run.completion), 16 * len(run.completion))
    assert one.rounds == one.passes
    assert eight.rounds / eight.passes > 2
    assert eight.rate > 2 * one.rate


def test_clients_at_once_are_told_of_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, out = tmp_path / "some.npz", tmp_path / "out.json"
    recording.save(Recording({}, (hand_made(),)), recorded)
    (tmp_path / "costs.json").write_text(to_json([TOY]))
    arguments = ["--clients", "1,3", "--policy", "linear:depth=2", "--out", str(out)]
    assert main(["bench", "replay", str(recorded), *arguments]) == 0
    assert "row price" in capsys.readouterr().out
    loads = json.loads(out.read_text())["results"]
    assert [(load["clients"], load["policy"]) for load in loads] == [
        (clients, policy) for clients in (1, 3) for policy in ("autoregressive", "linear:depth=2")
    ]


def test_a_missing_recording_is_what_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", str(tmp_path / "missing.npz")]) == 1
    assert "missing.npz" in capsys.readouterr().err
