"""Tests the live page in a browser, on a gateway without models.

The tests that take a `page` and a `gateway` hold for any gateway: they compare with the same completion of the gateway.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect

from dynatree.pages.live import live_page
from tests.campaigns.fake_gateway import FakeGateway, serving
from tests.support.rounds_page import labels, move_to, texts

HOSTILE = ' <script>document.title = "hit"</script><img src=x onerror="document.title=\'hit\'">'
RIGHT_TO_LEFT = " \u202eabc \u05e9\u05dc\u05d5\u05dd"
LIMIT = 40


# The page's source


def test_its_policy_admits_its_own_style_and_script_and_no_other() -> None:
    html, policy = live_page().html, live_page().policy
    for tag, directive in [("style", "style-src"), ("script", "script-src")]:
        [content] = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        digest = b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"; {directive} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.search(r"%[A-Z]+%", html)


def test_no_markup_is_made_of_text() -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", live_page().html
    )


def test_it_needs_the_standard_library_only() -> None:
    code = "import sys, dynatree.pages.live; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# The page in a browser


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving(FakeGateway()) as gateway:
        yield gateway


@pytest.fixture
def page(browser: Browser, gateway: FakeGateway) -> Iterator[Page]:
    """The live page. It must contact only its server, and the console may show only refused requests."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    requests: list[str] = []
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if "Failed to load resource" not in message.text or not message.location["url"].startswith(gateway.url):
            problems.append(message.text)

    page.on("request", lambda request: requests.append(request.url))
    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(gateway.url)
    yield page
    assert problems == []
    assert all(url.startswith((f"{gateway.url}/", "data:")) for url in requests)
    page.close()


def generate(page: Page, prompt: str = "Call me", limit: int = LIMIT) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Max tokens").fill(str(limit))
    page.get_by_role("button", name="Generate").click()


def finish(page: Page) -> None:
    expect(page.get_by_role("button", name="Generate")).to_be_visible(timeout=60_000)


def wait_for_rounds(page: Page, last: int) -> None:
    """Wait until the slider reaches this round, below 10."""
    expect(page.locator("#slider")).to_have_attribute("max", re.compile(rf"^([{last}-9]|\d\d+)$"))


def status(page: Page) -> Locator:
    return page.locator("#status")


def completion(gateway: FakeGateway, prompt: str = "Call me", limit: int = LIMIT) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the rounds of the same completion, requested without a browser."""
    body = {"prompt": prompt, "max_tokens": limit, "temperature": 0, "seed": 1, "policy": "throughput"}
    options = {"model": model(gateway)["id"], "stream": True, "trace": True}
    data = json.dumps(body | options).encode()
    request = urllib.request.Request(f"{gateway.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices), [choice["trace"] for choice in choices if "trace" in choice]


def model(gateway: FakeGateway) -> dict[str, Any]:
    with urllib.request.urlopen(f"{gateway.url}/v1/models") as answer:
        [model] = json.load(answer)["data"]
    return dict(model)


@pytest.mark.long
def test_it_names_the_models_and_their_policies(page: Page, gateway: FakeGateway) -> None:
    pair = model(gateway)
    expect(page.locator("h1")).to_have_text(f"DynaTree {pair['id']}, drafted by {pair['draft_model']}")
    assert texts(page, "#policy option") == pair["policies"]


@pytest.mark.long
def test_a_completion_is_shown_with_its_rounds(page: Page, gateway: FakeGateway) -> None:
    generate(page)
    finish(page)
    text, rounds = completion(gateway)
    last = rounds[-1]
    assert page.locator("#text").text_content() == f"Call me{text}"
    assert page.locator("#shown").text_content() == f"round {last['round']} ({len(rounds)} of {len(rounds)})"
    assert texts(page, "#text mark.accepted") == last["committed_texts"][: len(last["accepted_nodes"])]
    assert page.locator("#tree .node.drafted, #tree .node.accepted").count() == len(last["token_ids"])
    assert page.locator("#tree .node.accepted").count() == len(last["accepted_nodes"])

    drafted = sum(len(each["token_ids"]) for each in rounds)
    accepted = sum(len(each["accepted_nodes"]) for each in rounds)
    committed = sum(len(each["committed_ids"]) for each in rounds)
    figures = dict(zip(texts(page, "#figures dt"), texts(page, "#figures dd"), strict=True))
    assert figures.pop("first token after").endswith(" ms")
    assert figures == {
        "tokens": str(committed + 1),
        "rounds": str(len(rounds)),
        "tokens per round": f"{committed / len(rounds):.2f}",
        "acceptance": f"{100 * accepted / drafted:.1f} %",
    }
    expect(page.locator("#shown-rate .rate")).to_have_text(re.compile(r"^\d+\.\d tokens/s$"))
    assert status(page).text_content() == (
        f"{committed + 1} tokens in {len(rounds)} rounds. It reached the limit of tokens."
    )
    assert texts(page, "#charts b") == ["Tokens per round", "Speed (tokens/s)", "Tree size (nodes)", "Acceptance (%)"]
    assert texts(page, "#controller-charts b") == ["Base depth D₀ (levels)"]
    expect(page.locator("#controller-charts")).to_be_hidden()


@pytest.mark.long
def test_it_begins_with_an_example_that_can_be_run(page: Page, gateway: FakeGateway) -> None:
    expect(page.locator("#lead")).to_contain_text("drafts a tree")
    expect(page.locator("#example-note")).to_be_visible()
    expect(page.locator("#tree .node.accepted").first).to_be_visible()
    expect(page.locator("#speed")).to_be_hidden()
    page.get_by_role("button", name="Generate").click()
    finish(page)
    example = page.get_by_label("Prompt").input_value()
    assert gateway.requests[0]["prompt"] == example != ""
    assert (page.locator("#text").text_content() or "").startswith(example + "".join(gateway.tokens[:9]))
    expect(page.locator("#lead")).to_be_hidden()
    expect(page.locator("#example-note")).to_be_hidden()
    expect(page.locator("#speed")).to_be_visible()


@pytest.mark.long
def test_the_example_is_back_where_nothing_came(page: Page, gateway: FakeGateway) -> None:
    gateway.refuse = (400, "no")
    generate(page)
    expect(page.get_by_role("alert")).to_have_text("no")
    expect(page.locator("#example-note")).to_be_visible()
    assert page.locator("#facts").text_content() != "waiting for the first round"


def send(page: Page, message: str) -> None:
    page.get_by_label("Message").fill(message)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)


@pytest.mark.long
def test_a_chat_has_turns_and_each_its_rounds(page: Page, gateway: FakeGateway) -> None:
    gateway.chat_template = True
    page.reload()
    page.get_by_label("Max tokens").fill("24")
    send(page, "")
    example = page.locator("#text .user").text_content()
    answer = "".join(gateway.tokens[:24])
    count = page.locator("#shown").text_content()
    gateway.tokens = gateway.tokens[::-1]
    second = "".join(gateway.tokens[:24])
    send(page, "And <b>then</b>?")

    said = [{"role": "user", "content": example}]
    said_next = [*said, {"role": "assistant", "content": answer}, {"role": "user", "content": "And <b>then</b>?"}]
    assert [request["messages"] for request in gateway.requests] == [said, said_next]
    assert not any("prompt" in request for request in gateway.requests)
    assert texts(page, "#text .user") == [example, "And <b>then</b>?"]
    assert texts(page, "#text .assistant") == [answer]
    shown = (page.locator("#text").text_content() or "").replace("↵\n", "\n")
    assert shown == f"{example}{answer}And <b>then</b>?{second}"
    assert page.get_by_label("Message").input_value() == ""

    page.get_by_label("Turn").select_option("1")
    assert page.locator("#text .assistant").count() == 0
    page.locator("#slider").press("End")
    assert page.locator("#shown").text_content() == count
    assert (page.locator("#text").text_content() or "").replace("↵\n", "\n") == f"{example}{answer}"
    page.get_by_role("button", name="Measure plain decoding").click()
    expect(page.locator("#comparison")).to_have_text(re.compile("speed of plain decoding"))
    assert gateway.requests[-1]["messages"] == said

    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#example-note")).to_be_visible()
    send(page, "Hello")
    assert gateway.requests[-1]["messages"] == [{"role": "user", "content": "Hello"}]


@pytest.mark.long
def test_an_answer_that_is_stopped_or_fails_is_a_turn_only_with_text(page: Page, gateway: FakeGateway) -> None:
    gateway.chat_template = True
    page.reload()
    gateway.refuse = (400, "no")
    send(page, "One")
    expect(page.get_by_role("alert")).to_have_text("no")
    assert page.get_by_label("Message").input_value() == "One"
    gateway.refuse, gateway.fail_after = None, 2
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_have_text("the verify service was lost")
    gateway.fail_after = None
    send(page, "Two")
    roles = [[message["role"] for message in request["messages"]] for request in gateway.requests]
    assert roles == [["user"], ["user"], ["user", "assistant", "user"]]
    assert texts(page, "#text .user") == ["One", "Two"]
    gateway.refuse = (400, "no")
    send(page, "Three")
    assert texts(page, "#text .user") == ["One", "Two"]
    assert texts(page, "#turn option") == ["1", "2"]
    assert page.get_by_label("Turn").input_value() == "1"
    assert page.locator("#tree .node.bonus").count() == 1


@pytest.mark.long
def test_the_turn_under_way_is_the_chosen_one(page: Page, gateway: FakeGateway) -> None:
    gateway.chat_template, gateway.delay, gateway.tokens = True, 0.1, [*gateway.tokens] * 10
    page.reload()
    page.get_by_label("Max tokens").fill(str(len(gateway.tokens)))
    for number in ("1", "2"):
        page.get_by_label("Message").fill(number)
        page.get_by_role("button", name="Send").click()
        wait_for_rounds(page, 2)
        assert page.locator("#turn option:checked").text_content() == number
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()


@pytest.mark.long
def test_the_tree_stays_until_the_next_one_begins(page: Page, gateway: FakeGateway) -> None:
    """Every frame from the second request on must show a whole tree."""
    gateway.delay = 0.1
    generate(page)
    finish(page)
    page.evaluate("""() => {
        globalThis.faintest = 1; globalThis.frames = 0; globalThis.fewest = 1e9
        requestAnimationFrame(function frame() {
            const nodes = [...document.querySelectorAll("#tree .node")]
            fewest = Math.min(fewest, nodes.length)
            faintest = Math.min(faintest, ...nodes.map((node) => Number(getComputedStyle(node).opacity)))
            frames += 1
            requestAnimationFrame(frame)
        })
    }""")
    generate(page)
    finish(page)
    assert page.evaluate("frames") > 20
    assert page.evaluate("fewest") > 1
    assert page.evaluate("faintest") >= 0.2


@pytest.mark.long
@pytest.mark.parametrize("width", [390, 1280])
def test_no_label_is_cut(browser: Browser, gateway: FakeGateway, width: int) -> None:
    """The test uses many numbers of labels, and a tree wider than its panel, whose columns are shown whole."""
    numbers = [0.0933, 0.0737, 0.00123456, -0.00123456, 1.23456e-7, 98765.4321, 1.23456e12, -1.23456e-9, 0, 1 / 3]
    made = gateway.completion

    def completion(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for event in made(request):
            for trace in (choice.get("trace") for choice in event.get("choices", ())):
                if trace:
                    trace["parameters"] = {
                        f"value_{each}": number * (1 + trace["round"]) for each, number in enumerate(numbers)
                    }
            yield event

    gateway.completion = completion  # type: ignore[method-assign]
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto(gateway.url)
    generate(page, limit=len(gateway.tokens))
    finish(page)
    page.locator("#controller summary").click()
    cut = page.locator(".chart").evaluate_all("""all => all.flatMap(chart => [...chart.querySelectorAll("text")].filter(
        text => { const {x, width} = text.getBBox(); return x < 0 || x + width > chart.viewBox.baseVal.width }
    ).map(text => text.textContent))""")
    assert cut == []
    assert page.locator(".chart").count() == 4 + len(numbers)
    for position in range(int(page.locator("#slider").get_attribute("max") or 0)):
        move_to(page, position)
        assert page.locator("#tree-panel").evaluate("""panel => {
            const {left, right} = panel.getBoundingClientRect()
            const cut = [...panel.querySelectorAll(".node > :is(.box, text)")].filter(each => {
                const box = each.getBoundingClientRect()
                return box.left < left && box.right > left
            })
            const ends = [...panel.querySelectorAll(".node.bonus > .box")]
            return cut.length === 0 && ends.every(each => each.getBoundingClientRect().right <= right)
        }""")
    page.close()


@pytest.mark.long
def test_a_telephone_shows_it_in_three_screens(browser: Browser, gateway: FakeGateway) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(gateway.url)
    generate(page, prompt="It was a bright cold morning, and the captain stood on deck and looked\nat the sea.")
    finish(page)
    page.get_by_role("button", name="Measure plain decoding").click()
    expect(page.locator("#comparison")).to_have_text(re.compile("speed of plain decoding"))
    prompt = page.get_by_label("Prompt")
    assert prompt.evaluate("box => box.scrollHeight <= box.clientHeight")  # all lines are visible
    assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 844
    page.close()


@pytest.mark.long
def test_tokens_are_marked_in_all_of_the_text(page: Page, gateway: FakeGateway) -> None:
    generate(page)
    finish(page)
    _, rounds = completion(gateway)
    by_kind = {"accepted": "", "bonus": gateway.tokens[0]}  # the first token is the target's own, in no round
    for each in rounds:
        count = len(each["accepted_nodes"])
        by_kind["accepted"] += "".join(each["committed_texts"][:count])
        by_kind["bonus"] += "".join(each["committed_texts"][count:])
    for kind, expected in by_kind.items():
        assert "".join(texts(page, f"#text .{kind}")).replace("↵\n", "\n") == expected


@pytest.mark.long
def test_the_history_by_slider_and_keyboard(page: Page, gateway: FakeGateway) -> None:
    generate(page)
    finish(page)
    _, rounds = completion(gateway)
    move_to(page, 1)
    assert page.locator("#shown").text_content() == f"round 1 (2 of {len(rounds)})"
    assert texts(page, "#text mark") == rounds[1]["committed_texts"]
    slider = page.get_by_role("slider", name="Round")
    slider.press("ArrowRight")
    assert texts(page, "#text mark") == rounds[2]["committed_texts"]
    assert page.locator("#tree .node.accepted").count() == len(rounds[2]["accepted_nodes"])
    slider.press("Home")
    assert slider.input_value() == "0"
    bounds = slider.bounding_box()
    assert bounds is not None
    page.mouse.click(bounds["x"] + bounds["width"] - 2, bounds["y"] + bounds["height"] / 2)
    assert slider.input_value() == str(len(rounds) - 1)


@pytest.mark.long
def test_a_reader_of_the_history_stays_there_while_rounds_come(page: Page, gateway: FakeGateway) -> None:
    gateway.delay = 0.1
    generate(page)
    wait_for_rounds(page, 3)
    move_to(page, 1)
    here = page.locator("#text").text_content()
    wait_for_rounds(page, 6)
    assert page.locator("#slider").input_value() == "1"
    assert page.locator("#text").text_content() == here
    page.locator("#slider").press("End")
    finish(page)
    assert page.locator("#slider").input_value() == page.locator("#slider").get_attribute("max")


@pytest.mark.long
def test_the_sliders_end_is_the_newest_round_though_more_came_since_it_was_drawn(
    page: Page, gateway: FakeGateway
) -> None:
    gateway.delay = 0.1
    generate(page, limit=200)
    wait_for_rounds(page, 3)
    move_to(page, 1)
    page.evaluate(
        "window.draw = window.requestAnimationFrame; window.requestAnimationFrame = (frame) => { window.held = frame }"
    )
    page.wait_for_timeout(500)
    page.locator("#slider").evaluate(
        "slider => { slider.value = slider.max; slider.dispatchEvent(new Event('input')) }"
    )
    page.evaluate("window.requestAnimationFrame = window.draw; window.requestAnimationFrame(window.held)")
    finish(page)
    assert page.locator("#slider").input_value() == page.locator("#slider").get_attribute("max")


@pytest.mark.long
def test_the_form_by_keyboard_alone(page: Page) -> None:
    prompt = page.get_by_label("Prompt")
    prompt.focus()
    page.keyboard.type("Call me")
    order = []
    for _ in range(5):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert order == ["policy", "temperature", "max-tokens", "seed", "generate"]
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    finish(page)
    expect(page.get_by_role("button", name="Generate")).to_be_focused()
    prompt.focus()
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(prompt).to_be_focused()
    finish(page)


@pytest.mark.long
def test_it_is_stopped(page: Page, gateway: FakeGateway) -> None:
    gateway.delay = 0.1
    generate(page, limit=1000)
    wait_for_rounds(page, 2)
    page.get_by_role("button", name="Stop").click()
    finish(page)
    assert status(page).text_content() == "Stopped."
    assert page.locator("#error").text_content() == ""
    text, _ = completion(gateway, limit=1000)
    shown = page.locator("#text").text_content() or ""
    assert f"Call me{text}".startswith(shown.replace("↵\n", "\n"))
    assert len(shown) < len(text)
    expect(page.get_by_role("button", name="Measure plain decoding")).to_be_disabled()
    assert gateway.abandoned == 1


@pytest.mark.long
def test_plain_decoding_beside_it(page: Page, gateway: FakeGateway) -> None:
    generate(page)
    finish(page)
    page.get_by_role("button", name="Measure plain decoding").click()
    finish(page)
    expect(page.locator("#comparison")).to_have_text(
        re.compile(r"^\d+\.\d\d × the speed of plain decoding, and the same text\.$")
    )
    widths = [page.locator(f"#{row} .bar").evaluate("bar => bar.clientWidth") for row in ("shown-rate", "plain-rate")]
    assert widths[0] > widths[1] > 0
    first, second = gateway.requests[-2:]
    assert second == first | {"policy": "autoregressive"}
    generate(page)
    finish(page)
    expect(page.get_by_role("button", name="Measure plain decoding")).to_be_enabled()


@pytest.mark.long
def test_the_text_of_plain_decoding_may_differ(page: Page, gateway: FakeGateway) -> None:
    generate(page, limit=10)
    finish(page)
    gateway.tokens = [*gateway.tokens[:5], " else", *gateway.tokens[6:]]
    page.get_by_role("button", name="Measure plain decoding").click()
    finish(page)
    parting = len("".join(gateway.tokens[:5])) + 1
    expect(page.locator("#comparison")).to_have_text(re.compile(rf"The texts part after {parting} characters\.$"))


@pytest.mark.long
def test_plain_decoding_itself_is_compared_with_nothing(page: Page) -> None:
    page.get_by_label("Policy").select_option("autoregressive")
    generate(page)
    finish(page)
    expect(page.locator("#plain-rate")).to_be_hidden()
    assert labels(page, "accepted") + labels(page, "drafted") == []
    assert page.locator("#facts").text_content() is not None


@pytest.mark.long
def test_refused_before_the_first_token(page: Page, gateway: FakeGateway) -> None:
    gateway.refuse = (400, "the prompt is too long <b>by far</b>")
    generate(page)
    expect(page.get_by_role("alert")).to_have_text("the prompt is too long <b>by far</b>")
    finish(page)
    gateway.refuse = None
    generate(page)
    finish(page)
    expect(page.get_by_role("alert")).to_have_text("")
    assert (status(page).text_content() or "").startswith(f"{LIMIT} tokens")


@pytest.mark.long
def test_an_error_in_the_middle_leaves_what_came(page: Page, gateway: FakeGateway) -> None:
    gateway.fail_after = 3
    generate(page)
    expect(page.get_by_role("alert")).to_have_text("the verify service was lost")
    finish(page)
    assert page.locator("#shown").text_content() == "round 2 (3 of 3)"
    assert (page.locator("#text").text_content() or "").startswith("Call me the keeper — that")


@pytest.mark.long
def test_a_server_that_does_not_answer(page: Page) -> None:
    page.route("**/v1/completions", lambda route: route.abort())
    generate(page)
    expect(page.get_by_role("alert")).to_have_text("the server cannot be reached")
    finish(page)


@pytest.mark.long
def test_a_key_is_asked_for_when_the_server_wants_one(page: Page, gateway: FakeGateway) -> None:
    expect(page.get_by_label("API key")).to_be_hidden()
    gateway.key = "secret"
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("an API key is needed")
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    page.get_by_label("Prompt").fill("Call me")
    key.fill("secret")
    key.press("Enter")
    expect(page.locator("h1")).to_contain_text("org/large")
    finish(page)
    expect(page.get_by_role("alert")).to_have_text("")
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@pytest.mark.long
def test_texts_stay_texts(page: Page, gateway: FakeGateway) -> None:
    gateway.tokens = [" Ishmael", *[HOSTILE, RIGHT_TO_LEFT, "\x00\x1b[31m", "\u2028", ""] * 4]
    generate(page, prompt=HOSTILE)
    finish(page)
    assert page.title() == "DynaTree"
    assert page.locator("img, body script:not([type=module])").count() == 0
    assert (page.locator("#text").text_content() or "").startswith(f"{HOSTILE} Ishmael{HOSTILE}")
    move_to(page, 0)
    assert "\\u{202e}abc" in labels(page, "accepted")[1]


def without_space(text: str) -> str:
    return text.lstrip(" ")


def half_characters(text: str) -> str:
    return "\N{REPLACEMENT CHARACTER}" if text in ("", "é") else text


@pytest.mark.long
@pytest.mark.parametrize("own_text", [without_space, half_characters])
def test_marks_follow_the_text_of_the_server(page: Page, gateway: FakeGateway, own_text: Callable[[str], str]) -> None:
    gateway.own_text = own_text
    gateway.tokens = [" one", " two", "", "é", " three", " caf", "", "é", " four"]
    generate(page)
    finish(page)
    assert page.locator("#text").text_content() == "Call me one twoé three café four"
    move_to(page, 0)
    assert "".join(texts(page, "#text mark")) == " twoé three"


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_any_width_and_scheme(browser: Browser, gateway: FakeGateway, width: int, scheme: Any) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page.goto(gateway.url)
    generate(page, prompt="Call me " + "x" * 300)
    finish(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    page.close()


@pytest.mark.long
def test_a_hundred_rounds_a_second_do_not_stall_the_page(page: Page, gateway: FakeGateway) -> None:
    """The time of the page's thread is CPU time, since other processes may use the CPU too."""
    gateway.delay = 0.01
    gateway.tokens = [f" w{number}" for number in range(1500)]
    browser_tools = page.context.new_cdp_session(page)
    browser_tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.evaluate(
        "globalThis.frames = 0; requestAnimationFrame(function frame() { frames += 1; requestAnimationFrame(frame) })"
    )

    def busy() -> tuple[float, int]:
        """The CPU seconds that the page's thread took so far, and the frames that it has drawn."""
        metrics = {each["name"]: each["value"] for each in browser_tools.send("Performance.getMetrics")["metrics"]}
        return metrics["TaskDuration"], page.evaluate("frames")

    generate(page, limit=1500)
    seconds, frames = busy()
    finish(page)
    all_seconds, all_frames = busy()
    assert int(page.locator("#slider").get_attribute("max") or 0) > 400
    assert 0 < all_seconds - seconds < 0.1 * (all_frames - frames)


@pytest.mark.long
def test_trees_grow_in_motion_only_for_those_who_like_it(page: Page, gateway: FakeGateway) -> None:
    gateway.delay, gateway.tokens = 0.1, [*gateway.tokens] * 10  # more rounds than pass before it is stopped
    for preference, moves in [("no-preference", True), ("reduce", False)]:
        page.emulate_media(reduced_motion=preference)  # type: ignore[arg-type]
        generate(page, limit=len(gateway.tokens))
        expect(status(page)).to_have_text("Generating …")
        wait_for_rounds(page, 2)
        assert page.locator("#tree.growing").count() == 1
        nodes = page.locator("#tree .node:not(.root)")
        names = nodes.evaluate_all("all => all.map(each => getComputedStyle(each).animationName)")
        assert (set(names) == {"grow"}) is moves
        page.get_by_role("button", name="Stop").click()
        finish(page)


@pytest.mark.long
def test_a_measurement_that_is_stopped_can_be_made_again(page: Page, gateway: FakeGateway) -> None:
    generate(page)
    finish(page)
    gateway.delay = 0.1
    measure = page.get_by_role("button", name="Measure plain decoding")
    measure.click()
    expect(page.locator("#plain-rate .rate")).to_have_text(re.compile(r"tokens/s$"))
    page.get_by_role("button", name="Stop").click()
    finish(page)
    expect(measure).to_be_enabled()
    assert page.locator("#comparison").text_content() == ""
    assert page.locator("#plain-rate .bar").evaluate("bar => bar.clientWidth") == 0


@pytest.mark.long
def test_a_tree_that_has_the_focus_stays(page: Page, gateway: FakeGateway) -> None:
    gateway.delay = 0.1
    generate(page)
    wait_for_rounds(page, 1)
    page.locator("#tree .node.root").focus()
    here = page.locator("#shown").text_content()
    page.keyboard.press("ArrowRight")
    wait_for_rounds(page, 9)
    assert (page.locator("#shown").text_content() or "").split(" (")[0] == (here or "").split(" (")[0]
    expect(page.locator("#tree .node:focus")).to_have_count(1)
    finish(page)
