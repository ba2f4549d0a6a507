"""Tests `dynatree trace`: the traces that it refuses, and its page in a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from dynatree.cli.main import main
from tests.support.rounds_page import labels, move_to, texts

Round = dict[str, Any]

HOSTILE = '</script><img src="x" onerror="document.title = \'hit\'"><!--\u2028'


def a_round(number: int = 0, index: int = 0, **changes: object) -> Round:
    """Return a round with nodes 0 and 1 below the root, 2 and 3 below 0; 0 and 3 are accepted."""
    return {
        "index": index,
        "round": number,
        "base_length": 12 + 3 * number,
        "token_ids": [5, 6, 7, 8],
        "parents": [-1, -1, 0, 0],
        "probabilities": [0.5, 0.25, 0.5, 0.25],
        "texts": [" old", "\n", "s", " man"],
        "accepted_nodes": [0, 3],
        "committed_ids": [5, 8, 9],
        "committed_texts": [" old", " man", f" r{number}"],
        "parameters": {"base_depth": 5.0 + number, "tau_high": 0.9},
        "draft_seconds": 0.004,
        "verify_seconds": 0.02,
    } | changes


def empty_tree(number: int, **changes: object) -> Round:
    fields: Round = {"token_ids": [], "parents": [], "probabilities": [], "texts": [], "accepted_nodes": []}
    return a_round(number, **(fields | {"committed_ids": [9], "committed_texts": [f" r{number}"]} | changes))


TRACE = [
    a_round(0),
    empty_tree(1),
    # the end of sequence cut this round inside the path, so there is no choice of the target's own
    a_round(2, accepted_nodes=[1], committed_ids=[6], committed_texts=["\n"]),
]


def write(folder: Path, rounds: list[Round]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rounds))
    return file


def draw(folder: Path, rounds: list[Round]) -> Path:
    page = folder / "page.html"
    assert main(["trace", str(write(folder, rounds)), "--html", str(page)]) == 0
    return page


# Refused traces


def without(name: str) -> Round:
    return {key: value for key, value in a_round().items() if key != name}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON: "),
        pytest.param(b"[" * 100_000, "not JSON: ", id="deep"),
        (b"[1]", "not a JSON object"),
        (b'{"index": "\xff"}', "not UTF-8: invalid start byte at byte 11"),
        (a_round(index=float("nan")), "not JSON: NaN is not a JSON number"),
        *((without(name), f"{name} is missing") for name in a_round()),
        (a_round(index=-1), "index is not a whole number, 0 or more"),
        (a_round(round=True), "round is not a whole number, 0 or more"),
        (a_round(base_length=1.5), "base_length is not a whole number, 0 or more"),
        (a_round(token_ids=[5, 6, 7, -8]), "token_ids is not a list of whole numbers, 0 or more"),
        (a_round(token_ids=[5, 6, 7, 2**60]), "token_ids is not a list of whole numbers, 0 or more"),
        (a_round(parents="-1"), "parents is not a list of whole numbers"),
        (a_round(probabilities=[0.5, 0.25, 0.5, 1.5]), "probabilities is not a list of numbers from 0 to 1"),
        (a_round(texts=["a", "b", "c", None]), "texts is not a list of strings"),
        (a_round(committed_texts=[1, 2, 3]), "committed_texts is not a list of strings"),
        (a_round(parameters=[1]), "parameters is not an object of numbers"),
        (a_round(parameters={"a": 10**400}), "parameters is not an object of numbers"),
        (a_round(draft_seconds=-1), "draft_seconds is not a number, 0 or more"),
        (a_round(verify_seconds="1"), "verify_seconds is not a number, 0 or more"),
        (a_round(parents=[-1, -1, 0]), "lengths differ: 4 token_ids, 3 parents"),
        (a_round(probabilities=[0.5]), "lengths differ: 4 token_ids, 1 probabilities"),
        (a_round(texts=[]), "lengths differ: 4 token_ids, 0 texts"),
        (a_round(parents=[-1, 1, 0, 0]), "parents[1] is 1, expected -1 (the root) or an earlier node"),
        (a_round(parents=[-2, -1, 0, 0]), "parents[0] is -2, expected -1 (the root) or an earlier node"),
        (a_round(accepted_nodes=[0, 4]), "accepted_nodes has 4, out of range in a tree of 4 nodes"),
        (a_round(accepted_nodes=[0, 1]), "accepted_nodes is not a path from the root: node 1 is not a child of 0"),
        (a_round(committed_ids=[5, 8]), "lengths differ: 2 committed_ids, 3 committed_texts"),
        (
            a_round(accepted_nodes=[0]),
            "lengths differ: 1 accepted_nodes, 3 committed_ids; expected as many, or one more",
        ),
        (a_round(0), "round 0 of index 0 comes after round 0"),
    ],
)
def test_a_line_that_is_not_a_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes | Round, message: str
) -> None:
    file = write(tmp_path, [a_round(0)])
    with file.open("ab") as trace:
        trace.write(line if isinstance(line, bytes) else json.dumps(line).encode())
    assert main(["trace", str(file), "--html", str(tmp_path / "page.html")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"dynatree: error: {file}: line 2: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(content)
    assert main(["trace", str(file), "--html", str(tmp_path / "page.html")]) == 1
    reason = "a trace has one JSON object per round (a completion of one token has none)"
    assert capsys.readouterr().err == f"dynatree: error: {file} is empty: {reason}\n"


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = write(tmp_path, TRACE), tmp_path / "no" / "page.html"
    for arguments, message in [
        ([f"{file}x", "--html", str(page)], f"{file}x cannot be read: No such file or directory"),
        ([str(tmp_path), "--html", str(page)], f"{tmp_path} cannot be read: Is a directory"),
        ([str(file), "--html", str(page)], f"{page} cannot be written: No such file or directory"),
        ([str(file), "--html", str(tmp_path)], f"{tmp_path} cannot be written: Is a directory"),
        ([str(file), "--html", str(file)], f"--html is {file}, the trace itself; expected another file"),
    ]:
        assert main(["trace", *arguments]) == 1
        assert capsys.readouterr().err == f"dynatree: error: {message}\n"
    assert main(["trace", str(file)]) == 2
    assert "--html" in capsys.readouterr().err


def test_it_needs_the_standard_library_only() -> None:
    code = "import sys, dynatree.cli.trace; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_data_cannot_leave_its_element(tmp_path: Path) -> None:
    texts = [HOSTILE, "\ud800", "", "é"]
    file = write(tmp_path, [a_round(texts=texts)])
    file.write_text(file.read_text().replace("\\u00e9", "é").replace("\\u2028", "\u2028"), encoding="utf-8")
    assert main(["trace", str(file), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = re.search(r'<script id="trace" type="application/json">([^<]*)</script>', page)
    assert found
    assert found[1].isascii()
    assert json.loads(found[1])["rounds"][0]["texts"] == texts


# The page


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[[list[Round]], Page]]:
    """Open the page of a trace; it must load only itself, without errors."""
    page = browser.new_page(viewport={"width": 900, "height": 800})
    requests: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))

    def open_page(rounds: list[Round]) -> Page:
        page.goto(draw(tmp_path, rounds).as_uri())
        return page

    yield open_page
    assert (requests, problems) == ([(tmp_path / "page.html").as_uri()], [])
    page.close()


def marker_places(page: Page) -> list[str | None]:
    """Return the place of each chart's marker."""
    return [rule.get_attribute("x1") for rule in page.locator(".marker line").all()]


def captions(page: Page) -> list[str]:
    """Return each chart's caption: the round's value, and that of the last ten rounds."""
    series = page.locator("figcaption div").evaluate_all(
        "all => all.map(each => [...each.children].map(span => span.textContent.split(': ').at(-1)).join(', '))"
    )
    return list(series)


@pytest.mark.long
def test_a_round_is_drawn(show: Callable[[list[Round]], Page]) -> None:
    page = show(TRACE)
    assert page.title() == "trace.jsonl – DynaTree trace"
    assert texts(page, "#totals dd") == ["3", "5", "1.67", "37.5 %"]
    assert page.locator("#shown").text_content() == "round 0 (1 of 3)"
    assert page.locator("#facts").text_content() == (
        "4 nodes, depth 2 · 2 accepted · 3 committed · 12 tokens before · draft 4 ms · verify 20 ms"
    )
    assert labels(page, "root") == ["… •"]
    assert labels(page, "accepted") == ["␣old", "␣man"]
    assert labels(page, "drafted") == ["s", "↵"]
    assert labels(page, "bonus") == ["␣r0"]
    assert texts(page, "#tree .node.accepted > title") == [
        "“␣old” · token 5 · probability 0.5 · path 0.5 · accepted",
        "“␣man” · token 8 · probability 0.25 · path 0.125 · accepted",
    ]
    assert page.locator("#tree .edge").count() == 5
    assert texts(page, "#text mark") == [" old", " man", " r0"]
    assert texts(page, "#charts b") == ["Tokens per round", "Speed (tokens/s)", "Tree size (nodes)", "Acceptance (%)"]
    assert texts(page, "#controller-charts b") == ["Base depth D₀ (levels)", "Confidence threshold τₕ"]
    assert captions(page) == ["3, 3", "125", "4, 4", "50, 50", "5", "0.9"]
    assert not page.locator("#completion").is_visible()


@pytest.mark.long
def test_accepted_nodes_differ_in_more_than_colour(show: Callable[[list[Round]], Page]) -> None:
    page = show(TRACE)

    def style(selector: str, name: str) -> str:
        return str(
            page.locator(selector).first.evaluate("(each, name) => getComputedStyle(each).getPropertyValue(name)", name)
        )

    for part in ("box", "edge"):
        selector = "#tree .node.{} > .box" if part == "box" else "#tree .edge.{}"
        drafted, accepted = (style(selector.format(kind), "stroke-width") for kind in ("drafted", "accepted"))
        assert float(accepted.removesuffix("px")) >= 3 * float(drafted.removesuffix("px"))
        assert style(selector.format("bonus"), "stroke-dasharray") != "none"
    assert style("#tree .node.accepted > text", "font-weight") == "700"
    assert style("#tree .node.drafted > text", "font-weight") == "400"


@pytest.mark.long
def test_the_slider_changes_everything(show: Callable[[list[Round]], Page]) -> None:
    page = show(TRACE)
    places = [marker_places(page)]

    move_to(page, 1)
    places.append(marker_places(page))
    assert page.locator("#shown").text_content() == "round 1 (2 of 3)"
    assert labels(page, "root") == ["␣old man r0 •"]
    assert labels(page, "accepted") + labels(page, "drafted") == []
    assert labels(page, "bonus") == ["␣r1"]
    assert page.locator("#text").text_content() == "⟨prompt and first token: 12 tokens⟩ old man r0 r1"
    assert texts(page, "#text mark.bonus") == [" r1"]
    assert captions(page) == ["1, 2", "83.3", "0, 2", "–, 50", "6", "0.9"]

    page.locator("#slider").press("ArrowRight")
    places.append(marker_places(page))
    assert page.locator("#shown").text_content() == "round 2 (3 of 3)"
    assert page.locator("#slider").get_attribute("aria-valuetext") == "round 2 (3 of 3)"
    assert labels(page, "accepted") == ["↵"]
    assert labels(page, "drafted") == ["␣old", "s", "␣man"]
    assert labels(page, "bonus") == []
    assert page.locator("#text").text_content() == "⟨prompt and first token: 12 tokens⟩ old man r0 r1↵\n"
    assert texts(page, "#text mark.accepted") == ["↵\n"]
    assert captions(page) == ["1, 1.67", "69.4", "4, 2.67", "25, 37.5", "7", "0.9"]

    assert places == [["38"] * 6, ["165"] * 6, ["292"] * 6]
    page.locator("#slider").press("ArrowLeft")
    assert marker_places(page) == places[1]


@pytest.mark.long
def test_buttons_and_charts_move_too(show: Callable[[list[Round]], Page]) -> None:
    page = show(TRACE)
    previous, next_ = page.get_by_role("button", name="Previous round"), page.get_by_role("button", name="Next round")
    assert previous.is_disabled()
    next_.click()
    next_.click()
    assert page.locator("#slider").input_value() == "2"
    assert next_.is_disabled()
    previous.click()
    assert page.get_by_role("slider", name="Round").input_value() == "1"
    page.locator(".chart").first.click()  # in the middle, where the second of three rounds is
    assert page.locator("#slider").input_value() == "1"
    page.locator(".chart").nth(1).click(position={"x": 1, "y": 20})
    assert page.locator("#slider").input_value() == "0"


@pytest.mark.long
def test_the_tree_by_keyboard(show: Callable[[list[Round]], Page]) -> None:
    page = show(TRACE)
    detail = page.locator("#detail")
    page.locator("#tree .node.root").focus()
    assert detail.text_content() == "root: the last committed token"
    for key, token in [("ArrowRight", 5), ("ArrowRight", 7), ("ArrowUp", 7), ("ArrowLeft", 5), ("ArrowDown", 6)]:
        page.keyboard.press(key)
        assert f"token {token} ·" in (detail.text_content() or "")
    assert page.locator("#tree .node[tabindex='0']").count() == 1
    page.locator("#tree .node.bonus").hover()
    assert detail.text_content() == "“␣r0” · token 9 · the target's own token"
    assert page.locator("#slider").input_value() == "0"


@pytest.mark.long
def test_completions_are_chosen(show: Callable[[list[Round]], Page]) -> None:
    other = a_round(4, index=7, parameters={})
    page = show([TRACE[0], other, *TRACE[1:], empty_tree(5, index=7, parameters={"constructor": 1})])
    assert texts(page, "#totals dd")[:2] == ["5", "9"]
    assert texts(page, "#completion option") == ["0", "7"]
    move_to(page, 2)
    page.get_by_label("Completion").select_option("7")
    assert page.locator("#shown").text_content() == "round 4 (1 of 2)"
    assert "Completion 7: rounds 2 · tokens 4" in (page.locator("#completion-totals").text_content() or "")
    assert page.locator("#text").text_content() == "⟨24 earlier tokens⟩ old man r4"
    assert texts(page, "#controller-charts b") == ["constructor"]
    assert captions(page)[4:] == ["–"]
    page.locator("#controller summary").click()
    assert page.locator("#controller .chart").locator(".marker circle").is_hidden()


@pytest.mark.long
def test_texts_stay_texts(show: Callable[[list[Round]], Page]) -> None:
    hostile = a_round(
        texts=[HOSTILE] * 4,
        committed_texts=[HOSTILE] * 3,
        parameters={HOSTILE: 1, "__proto__": 2},
        probabilities=[0] * 4,
    )
    page = show([hostile, a_round(1)])
    move_to(page, 1)
    move_to(page, 0)
    page.locator("#tree .node.accepted").first.hover()
    assert page.locator("#detail").text_content() == (
        f"“{HOSTILE[:-1]}\\u{{2028}}” · token 5 · probability 0 · path 0 · accepted"
    )
    assert texts(page, "#text mark") == [HOSTILE] * 3
    assert {HOSTILE, "__proto__"} < set(texts(page, "#controller-charts b"))
    assert page.locator("img").count() == 0
    assert page.title() == "trace.jsonl – DynaTree trace"


@pytest.mark.long
def test_what_cannot_be_seen_is_shown(show: Callable[[list[Round]], Page]) -> None:
    page = show(
        [
            a_round(
                texts=["", "  \t\r", "\u202eabc\x00", "x" * 30],
                accepted_nodes=[],
                committed_ids=[9],
                committed_texts=[""],
            )
        ]
    )
    assert labels(page, "bonus") == ["⟨9⟩"]
    assert sorted(labels(page, "drafted")) == sorted(["⟨5⟩", "␣␣⇥\\u{d}", "\\u{202e}abc\\u{0}", "x" * 17 + "…"])


@pytest.mark.long
def test_the_largest_trace(show: Callable[[list[Round]], Page]) -> None:
    """The trace has a chain of 64 and 192 adjacent nodes, 1500 times; the tree scrolls, and the page does not."""
    size = 256
    fields: Round = {
        "token_ids": list(range(size)),
        "parents": [node - 1 if node < 64 else node % 64 for node in range(size)],
        "probabilities": [0.9] * size,
        "texts": [f" token {node}" for node in range(size)],
        "accepted_nodes": list(range(64)),
        "committed_ids": list(range(65)),
        "committed_texts": [f" token {node}" for node in range(65)],
    }
    page = show([a_round(number, **fields) for number in range(1500)])
    page.locator("#slider").press("End")
    assert page.locator("#shown").text_content() == "round 1499 (1500 of 1500)"
    assert page.locator("#tree .node").count() == 1 + size + 1
    panel = page.locator("#tree-panel")
    assert panel.evaluate(
        "panel => panel.scrollWidth > 4 * panel.clientWidth && panel.scrollHeight > panel.clientHeight"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 900
    heights = page.locator("#tree .node > .box").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().height)"
    )
    assert min(heights) >= 20
    assert page.locator("#tree .node.bonus").is_visible()
