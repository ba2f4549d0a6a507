"""Tests `dynatree rank`: the order of the drafts, the recommendation, and drafts that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import EmbeddedServices

from dynatree.bench.figures import frame, recommended
from dynatree.bench.methods import PLAIN
from dynatree.bench.printing import print_report
from dynatree.bench.rank import command
from dynatree.bench.record import Report, load
from dynatree.cli.main import main
from dynatree.cli.service_pair import ServicePair
from dynatree.client import Client
from dynatree.draft.settings import DraftSettings
from dynatree.verify.settings import VerifySettings
from tests.support.bench_records import DRAFTED, new_report, new_run
from tests.support.gguf_files import save_gguf

TINY = ("--prompt-tokens", "12", "--max-new-tokens", "8", "--threads", "1")
TEXT = "It was a dark and stormy night, and the captain had not come back to the house by the sea.\n\n" * 4
COPIES = ("--draft-model", "self:int8", "--draft-model", "self:int4")


def ranked(prompts: int = 1, **seconds: float) -> Report:
    """A report by the seconds of plain decoding and of each draft; those of `other` vary."""
    runs = [
        new_run(
            label,
            each * (0.5 if label == "other" and prompt % 3 == 0 else 1.0),
            prompt=prompt,
            policy="throughput",
            statistics=DRAFTED,
            peak_memory={"verify": 1, label: 7_000_000},
        )
        for label, each in seconds.items()
        for prompt in range(prompts)
    ]
    report = new_report("rank", runs)
    drafts = [{"draft": label, "refusal": None} for label in seconds if label != PLAIN.label]
    report["options"]["drafts"] = [*drafts, {"draft": "odd", "refusal": "it has no bytes"}]
    return report


@pytest.mark.parametrize(
    ("seconds", "best", "words", "slower"),
    [
        (
            {"slow": 4.0, "fast": 0.5, "none": 1.0},
            "fast",
            "use fast: 4.00 x plain decoding, where none gives 2.00 x",
            "slow",
        ),
        ({"slow": 1.5, "none": 1.0, "odd one": 3.0}, "none", "use none: no draft model pays", "slow, odd one"),
        ({"slow": 4.0, "none": 2.5}, "none", "use none: no draft model pays", "slow"),
        ({"fast": 0.5, "none": 1.0}, "fast", "use fast: 4.00 x plain decoding", None),
    ],
)
def test_the_fastest_draft_is_recommended_if_it_pays_and_slow_ones_are_named(
    seconds: dict[str, float], best: str, words: str, slower: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ranked(autoregressive=2.0, **seconds)
    assert recommended(frame(report)) == best
    print_report(report)
    out = capsys.readouterr().out
    assert words in out
    named = f"\nslower than none: {slower}{'; `dynatree distill` makes drafts' if best == 'none' else ''}"
    assert (named in out) == (slower is not None)
    assert f"use {best}: " in out
    assert out.count("\nuse ") == 1
    assert "use none" not in out or best == "none"
    assert "odd is not ranked: it has no bytes" in out
    order = sorted({"(plain decoding)": 2.0, **seconds}.items(), key=lambda item: item[1])
    places = [out.index(f"\n{label} ") for label, _ in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("prompts", "other", "doubt"),
    [
        (8, {}, ""),
        (3, {}, "3 prompts leave this uncertain; measure more prompts"),
        (9, {"other": 1.2}, "9 prompts leave this uncertain: other may be as fast; measure more prompts"),
    ],
)
def test_a_recommendation_that_more_prompts_may_change_says_so(
    prompts: int, other: dict[str, float], doubt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(ranked(prompts, autoregressive=2.0, fast=1.0, none=1.8, **other))
    (line, *after) = capsys.readouterr().out.partition("\nuse fast: ")[2].splitlines()[0:2]
    assert line.startswith("2.00")
    assert [each for each in after if "prompts" in each] == [doubt] * bool(doubt)


@pytest.fixture(name="book")
def book_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


def test_drafts_take_turns_and_those_that_do_not_start_have_a_reason(
    embedded_services: EmbeddedServices,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The session's services stand for all that the command would start; the target has no room for a copy."""

    @contextmanager
    def service_pair(verify: VerifySettings, draft: DraftSettings) -> Iterator[ServicePair]:
        assert (draft.model, draft.limits.history_tokens) == (None, 0)
        if verify.model.copy:
            raise SystemExit(f"the {verify.model.copy.weights} copy does not fit")
        address = embedded_services.draft_address
        with Client(address) as client:
            processes = embedded_services.draft_process, embedded_services.verify_process
            yield ServicePair(client, *processes, address)

    @contextmanager
    def further_draft(pair: ServicePair, draft: DraftSettings) -> Iterator[ServicePair]:
        assert draft.model is not None
        assert not draft.copy
        yield pair

    monkeypatch.setattr(command, "service_pair", service_pair)
    monkeypatch.setattr(command, "further_draft", further_draft)
    out = tmp_path / "out.json"
    line = ["rank", "--target-model", "embedded", "--draft-model", "embedded", *COPIES, "--draft-model", "./nowhere"]
    assert main([*line, "--prompts", str(book), "--count", "2", *TINY, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    report = load(out)
    assert [run["label"] for run in report["runs"]] == [
        PLAIN.label,
        "embedded",
        "none",
        PLAIN.label,
        "none",
        "embedded",
    ]
    assert all(run["equal"] for run in report["runs"])
    assert all((run["peak_memory"] or {})["embedded"] for run in report["runs"])
    assert {each["draft"]: each["refusal"] for each in report["options"]["drafts"]} == {
        "embedded": None,
        "self:int8": "the int8 copy does not fit",
        "self:int4": "the int4 copy does not fit",
        "./nowhere": "there is no model at ./nowhere: no such folder or file",
        "none": None,
    }
    assert f"\nuse {report['options']['recommended']}: " in printed
    assert "equal to plain decoding: all of 6 outputs" in printed
    assert main(["bench", "show", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_a_copy_that_does_not_exist_is_refused_before_anything_starts(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "service_pair", lambda *_: pytest.fail("a service starts"))
    line = ["rank", "--target-model", "embedded", "--draft-model", "embedded", "--draft-model", "self:int3"]
    assert main([*line, "--prompts", str(book)]) != 0
    assert "self:int3 names no copy of the target; expected self:int8 or self:int4" in capsys.readouterr().err


def test_a_target_that_cannot_be_served_as_asked_is_one_line(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1)
    line = ["rank", "--target-model", str(target), "--draft-model", "embedded", "--weights", "int8"]
    assert main([*line, "--prompts", str(book), "--count", "2", *TINY]) == 1
    assert "model model.gguf is a GGUF file, which has its own precision" in capsys.readouterr().err


@pytest.mark.long
def test_one_target_serves_all_drafts(book: Path, tmp_path: Path) -> None:
    """With processes: a draft model, both copies, and a draft whose files are harmed."""
    harmed = tmp_path / "harmed"
    harmed.mkdir()
    (harmed / "config.json").write_text('{"model_type": "llama"}')
    (harmed / "model.safetensors").write_bytes(bytes(8))
    out = tmp_path / "out.json"
    line = ["rank", "--target-model", "embedded", "--draft-model", "embedded", *COPIES, "--draft-model", str(harmed)]
    assert main([*line, "--prompts", str(book), "--count", "2", *TINY, "--out", str(out)]) == 0
    report = load(out)
    assert len(report["runs"]) == 2 * 5
    assert all(run["equal"] for run in report["runs"])
    refusals = {each["draft"]: each["refusal"] for each in report["options"]["drafts"]}
    assert [draft for draft, refusal in refusals.items() if refusal] == [str(harmed)]
