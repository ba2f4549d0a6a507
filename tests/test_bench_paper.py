"""The presets of `dynatree bench paper`: each can be run, each is shown, and the papers' figures stand beside it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from bench_records import DRAFTED, STATISTICS, new_report, new_run

from dynatree.bench.methods import PLAIN
from dynatree.bench.paper.presets import DATA_SETS, PRESETS, VERSIONS, Experiment
from dynatree.bench.paper.published import PUBLISHED
from dynatree.bench.paper.tables import AR, beside
from dynatree.bench.paper.views import VIEWS
from dynatree.bench.record import Report, save
from dynatree.bench.table import NONE
from dynatree.cli.main import main
from dynatree.draft.policies import registry
from dynatree.draft.policies.registry import create_policy

EXPERIMENTS = list(dict.fromkeys(each for preset in PRESETS for each in preset.experiments))


def record(experiment: Experiment, prompts: int = 2) -> Report:
    """As `dynatree bench paper` keeps it: plain decoding takes 2 seconds and more, the n-th method 2 / (n + 1)."""
    runs = [
        new_run(
            row.method.label,
            policy=row.method.policy,
            seconds=(2.0 + prompt) / (1 + number),
            prompt=prompt,
            temperature=experiment.temperature,
            statistics=STATISTICS if row == AR else DRAFTED,
        )
        for prompt in range(prompts)
        for number, row in enumerate((AR, *experiment.rows))
    ]
    report = new_report("compare", runs)
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
    assert all("2 of 10 prompts" in f"{table.title} {table.rows} {table.notes}" for table in tables)
    assert bool(drawn) == preset.is_figure


@pytest.mark.parametrize("version", VERSIONS)
def test_every_published_figure_is_shown(version: str) -> None:
    """None is lost because a row or a column is called otherwise here."""
    shown = {NONE, "0.0 %"}  # what plain decoding has not
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


def test_what_was_kept_is_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [preset] = [each for each in PRESETS if (each.version, each.item) == ("003", "figure 4")]
    for experiment in preset.experiments:
        save(record(experiment), tmp_path / f"{experiment.name}.json.gz")
    drawn = tmp_path / "drawn"
    options = ["--version", "003", "--figure", "bars", "--from", str(tmp_path), "--out", str(drawn)]
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
        (["--table", "1", "--from", "nowhere"], "nowhere has none of wikitext-2.json.gz, pg-19-deep.json.gz"),
    ],
)
def test_what_there_is_not(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", *options]) == 1
    assert said in capsys.readouterr().err


def test_the_list_has_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", "--list"]) == 0
    out = capsys.readouterr().out
    for preset in PRESETS:
        assert f"--version {preset.version} --{preset.item} " in out


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
