"""Tests the presets of `dynatree bench paper`: each runs and is shown, beside the published values."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dynatree.bench.arguments import add_arguments
from dynatree.bench.methods import PLAIN
from dynatree.bench.paper.command import _is_twice, _options, _there
from dynatree.bench.paper.presets import DATA_SETS, PRESETS, VERSIONS, Experiment
from dynatree.bench.paper.published import BLOCKS, PUBLISHED
from dynatree.bench.paper.tables import AR, beside
from dynatree.bench.paper.trees import acceptance, blocks, by_value, prefix_blocks, random_blocks, reordered
from dynatree.bench.paper.views import VIEWS
from dynatree.bench.record import Report, Tree, save
from dynatree.bench.table import NONE
from dynatree.cli.main import main
from dynatree.draft.policies import registry
from dynatree.draft.policies.registry import create_policy
from tests.support.bench_records import DRAFTED, STATISTICS, detailed, new_report, new_run

EXPERIMENTS = list(dict.fromkeys(each for preset in PRESETS for each in preset.experiments))


def record(experiment: Experiment, prompts: int = 2) -> Report:
    """Return a record of `dynatree bench paper`: plain decoding takes 2 s or more, the n-th method 2 / (n + 1) s."""
    runs = [
        new_run(
            row.method.label,
            policy=row.method.policy,
            seconds=(2.0 + prompt) / (1 + number),
            prompt=prompt,
            temperature=experiment.temperature,
            statistics=STATISTICS if row == AR else detailed(DRAFTED, 0.1, [0.5]),
        )
        for prompt in range(prompts)
        for number, row in enumerate((AR, *experiment.rows))
    ]
    report = new_report("compare", runs)
    if experiment.trees:
        for run in report["runs"][1:]:
            run["trees"] = [Tree(parents=[-1, 0, -1], probabilities=[0.5, 0.25, 0.125], accepted=[0])]
    told = {"experiment": experiment.name, "data_set": experiment.data_set, "scaled": ["2 of 10 prompts"]}
    report["options"] |= {
        "paper": told,
        "max_new_tokens": experiment.new_tokens,
        "prompt_tokens": experiment.prompt_tokens,
    }
    return report


def test_names_are_of_one_thing_each() -> None:
    assert len({each.name for each in EXPERIMENTS}) == len(EXPERIMENTS)
    assert len({(each.version, each.item) for each in PRESETS}) == len(PRESETS)
    assert {each.version for each in PRESETS} == set(VERSIONS)


def test_an_experiment_states_every_setting() -> None:
    for experiment in EXPERIMENTS:
        labels = [row.method.label for row in experiment.rows]
        assert len({*labels, PLAIN.label}) == len(labels) + 1
        assert experiment.data_set in DATA_SETS
    for method in {row.method for experiment in EXPERIMENTS for row in experiment.rows}:
        assert method.policy is not None
        create_policy(method.policy, dict(method.settings))
        known = {field.name for field in fields(registry._REGISTRY[method.policy].settings)}
        measured = {"rates"} if method.policy == "sequoia" else set()
        assert {name for name, _ in method.settings} == known - measured


@pytest.mark.parametrize("name", VIEWS)
def test_a_preset_is_shown(name: str) -> None:
    preset = next(each for each in reversed(PRESETS) if each.name == name)
    tables, drawn = VIEWS[name](preset, {each: record(each) for each in preset.experiments})
    assert all(table.rows and table.title.startswith(f"{preset.item.capitalize()} of D") for table in tables)
    assert all("2 of 10 prompts" in table.title for table in tables) == bool(preset.experiments)
    assert bool(drawn) == preset.is_figure


@pytest.mark.parametrize("version", VERSIONS[1:])  # version 000 has the same presets as 001
def test_every_published_figure_is_shown(version: str) -> None:
    """No published value is lost because a row or column has another name here."""
    shown = {NONE, "0.0 %"}  # values that plain decoding does not have
    for preset in PRESETS:
        if preset.version == version and not preset.is_figure:
            tables, _ = VIEWS[preset.name](preset, {each: record(each) for each in preset.experiments})
            shown |= {cell for table in tables for row in table.rows for cell in row}
    of_version = [figures for (other, _), figures in PUBLISHED.items() if other == version]
    assert of_version
    for figures in of_version:
        assert {figure for columns in figures.values() for figure in columns.values()} <= shown


def test_figures_are_means_over_prompts_with_deviations() -> None:
    [preset] = [each for each in PRESETS if (each.version, each.item) == ("003", "table 1")]
    first = preset.experiments[0]
    [table] = beside(preset, {first: record(first)}, ("tokens/s", "speedup"))
    assert table.rows[0] == ["autoregressive", "8.3 ± 1.7", "133.4 ± 0.5", "1.00", "1.00"]  # 20 / 2 and 20 / 3
    assert table.rows[1] == ["linear (K = 8)", "16.7 ± 3.3", "196.1 ± 37.8", "2.00", "1.47"]
    assert "WikiText-2" in table.title
    assert "2 of 10 prompts" in table.title


def test_a_node_is_tried_where_its_parent_was_accepted_and_no_sibling_before_it() -> None:
    tree = Tree(parents=[-1, -1, -1, 1, 1, 0], probabilities=[0.6, 0.3, 0.1, 0.35, 0.05, 1.0], accepted=[1, 4])
    found = {(each.low, each.tried, each.accepted) for each in acceptance([tree, tree]) if each.tried}
    assert found == {(0.5, 2, 0), (0.2, 2, 2), (0.3, 2, 0), (0.0, 2, 2)}


def test_blocks_of_masks() -> None:
    chain = list(range(-1, 63))  # a chain of the root and 63 nodes makes four tiles, one of them above the diagonal
    assert blocks(chain, range(63 + 1)[:63]) == 3
    comb = [-1] * 63  # siblings see the root and themselves
    assert blocks(comb, range(63)) == 3
    assert prefix_blocks(64, 33) == 4
    forks = [*4 * [-1], *range(124)]  # four chains of 32, whose nodes alternate
    assert blocks(forks, range(128)) == 15  # every tile on and below the diagonal
    assert blocks(forks, reordered(forks)) == 1 + 2 + 3 + 3 + 3  # tiles by row: the root's, its own, the one before
    assert by_value(Tree(parents=[-1, -1, 0], probabilities=[0.6, 0.2, 0.5], accepted=[])) == [0, 2, 1]  # 1, 0.4, 0.6
    assert by_value(Tree(parents=[-1, -1, 0], probabilities=[0.3, 0.2, 0.5], accepted=[])) == [0, 1, 2]  # 1, 0.7, 0.3


def test_blocks_of_random_trees_are_the_papers() -> None:
    """Table 5 is reproduced within 3 %; the paper does not say how its random trees are made."""
    for rows in (256, 512):
        assert random_blocks(rows) == pytest.approx(tuple(map(float, BLOCKS[rows])), rel=0.03)


def test_what_was_kept_is_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [preset] = [each for each in PRESETS if (each.version, each.item) == ("003", "figure 4")]
    for experiment in preset.experiments:
        save(record(experiment), tmp_path / f"{experiment.name}.json.gz")
    drawn = tmp_path / "drawn"
    options = ["--version", "003", "--figure", "bars", "--from", str(tmp_path), "--plots", str(drawn)]
    assert main(["bench", "paper", *options]) == 0
    assert {path.suffix for path in drawn.iterdir()} == {".svg", ".png"}
    out = capsys.readouterr().out
    assert "Figure 4 of DynaTree 003" in out
    assert "194.9 ± 35.6" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--table", "9"], "no table 9 in 003; expected one of 1, 2, 3, 4, 5"),
        (["--version", "002", "--figure", "throughput"], "no figure throughput in 002; expected one of 3, 4"),
        (["--table", "1"], "expected --prompts"),
        (["--table", "1", "--prompts", "c5=no.txt"], "c5=no.txt: no data set c5; expected one of wikitext-2, pg-19"),
        (["--table", "1", "--from", "nowhere"], "nowhere has none of wikitext-2.json.gz, pg-19-deep.json.gz"),
    ],
)
def test_what_there_is_not(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", *options]) == 1
    assert said in capsys.readouterr().err


def test_records_are_shown_or_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", "--from", "a", "--out", "b"]) == 2
    assert "--out: not allowed with argument --from" in capsys.readouterr().err


def test_the_list_has_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", "--list"]) == 0
    out = capsys.readouterr().out
    for preset in PRESETS:
        assert f"--version {preset.version} --{preset.item} " in out


def test_what_is_cut_to_the_same_length_is_measured_once() -> None:
    """T = 300 to 1,000 equals Table 1's T if at most 300 tokens are generated, and Table 1's runs have all methods."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["paper", "--max-new-tokens", "300", "--prompts", "text.txt"])
    [preset] = [each for each in PRESETS if (each.version, each.item) == ("003", "figure 6")]
    plans = {each: _options(options, each, Path("text.txt"), 256) for each in preset.experiments}
    lengths = {each: plan.max_new_tokens for each, plan in plans.items()}
    kept = [(each.name, length) for each, length in lengths.items() if not _is_twice(each, lengths)]
    assert kept == [("wikitext-2-100", 100), ("wikitext-2-200", 200), ("wikitext-2", 300)]
    lengths[preset.experiments[-1]] = 1500  # as if an earlier run had saved it
    kept = [(each.name, length) for each, length in lengths.items() if not _is_twice(each, lengths)]
    assert kept[1:] == [("wikitext-2-200", 200), ("wikitext-2-300", 300), ("wikitext-2", 1500)]


def test_prompt_lengths_are_compared_at_one_length_of_the_output() -> None:
    [preset] = [each for each in PRESETS if (each.version, each.item) == ("003", "figure 9")]
    records = {each: record(each) for each in preset.experiments}
    main = preset.experiments[-1]
    for experiment, report in records.items():
        if experiment != main:
            report["options"]["max_new_tokens"] = 200
    headings = {heading for table in VIEWS[preset.name](preset, records)[0] for heading in table.frame}
    assert headings == {"method", *(f"prompt tokens {each}" for each in (50, 100, 200, 300, 400))}
    cut = {each: report for each, report in records.items() if each.prompt_tokens != main.prompt_tokens}
    assert VIEWS[preset.name](preset, cut)[0][0].frame.shape[1] == 5


def test_what_was_kept_is_not_measured_again(tmp_path: Path) -> None:
    def found(*more: str) -> bool:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        options = parser.parse_args(["paper", "--out", str(tmp_path), "--prompts", "text.txt", *more])
        return _there(_options(options, EXPERIMENTS[0], Path(options.prompts[-1]), 256)) is not None

    kept = record(EXPERIMENTS[0], prompts=10)
    kept["options"] |= {"warmup": 2, "seed": 0, "repetitions": 1}
    kept["options"]["paper"] |= {"models": ["embedded", "embedded"], "text": "text.txt"}
    kept["prompts"]["count"] = 10
    assert not found()
    save(kept, tmp_path / f"{EXPERIMENTS[0].name}.json.gz")
    assert found()
    assert found("--quick"), "it is larger"
    assert not found("--count", "12")
    assert not found("--prompt-tokens", "16")
    assert not found("--seed", "1")
    for other in (["--prompts", "other.txt"], ["--target-model", "elsewhere"]):
        with pytest.raises(SystemExit, match="of other models or another text"):
            found(*other)


@pytest.mark.long
def test_a_preset_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The harbour was quiet that morning, and the boats lay still. " * 60)
    options: list[Any] = ["--quick", "--count", "1", "--max-new-tokens", "8", "--prompt-tokens", "16"]
    out = tmp_path / "records"
    assert main(["bench", "paper", "--table", "1", "--prompts", str(text), *options, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "1 of 10 prompts, 8 of 1500 new tokens, 0 of 2 warm-ups, 16 of 200 prompt tokens" in shown
    assert main(["bench", "paper", "--table", "1", "--from", str(out)]) == 0
    assert capsys.readouterr().out == shown
