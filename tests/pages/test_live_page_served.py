"""Tests the live page in a browser, on a real gateway: it shows the completion that the gRPC client gets."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from dynatree import embedded
from dynatree.client import Client, Completion
from tests.pages.test_live_page import LIMIT, finish, generate, send
from tests.pages.test_live_page import page as page  # a fixture
from tests.support.gateways import Gateway, running_gateway
from tests.support.paths import ROOT
from tests.support.processes import EmbeddedServices
from tests.support.rounds_page import texts
from tests.support.services import running_services

PROMPT = "It was a dark night, and the “old” house"
PICTURES = ROOT / "build" / "pictures"


@pytest.fixture(scope="module")
def gateway(embedded_services: EmbeddedServices) -> Iterator[Gateway]:
    with running_gateway(embedded_services.draft_address) as gateway:
        yield gateway


@pytest.fixture(scope="module", name="expected")
def expected_fixture(embedded_services: EmbeddedServices) -> Completion:
    with Client(embedded_services.draft_address) as client:
        return client.generate(PROMPT, max_new_tokens=LIMIT, trace=True)


@pytest.mark.long
def test_a_real_completion_round_by_round(page: Page, expected: Completion) -> None:
    generate(page, PROMPT)
    finish(page)

    text = (page.locator("#text").text_content() or "").replace("↵", "")  # line feeds of rounds are shown as symbols
    assert text == PROMPT + expected.text
    figures = dict(zip(texts(page, "#figures dt"), texts(page, "#figures dd"), strict=True))
    assert figures["tokens"] == str(LIMIT)
    count = int(figures["rounds"])
    assert page.locator("#slider").get_attribute("max") == str(count - 1)

    slider = page.locator("#slider")
    slider.press("Home")
    expect(page.locator("#shown")).to_have_text(f"round 0 (1 of {count})")
    slider.press("ArrowRight")
    expect(page.locator("#shown")).to_have_text(f"round 1 (2 of {count})")
    nodes = page.locator("#tree .node.drafted, #tree .node.accepted").count()
    accepted = page.locator("#tree .node.accepted").count()
    assert nodes >= accepted
    marked = texts(page, "#text mark.accepted")
    assert len(marked) == accepted
    assert "".join(marked) in expected.text


@pytest.mark.long
def test_plain_decoding_gives_the_same_text(page: Page) -> None:
    generate(page, PROMPT)
    finish(page)
    page.get_by_role("button", name="Measure").click()
    expect(page.get_by_text(re.compile("the same text"))).to_be_visible(timeout=60_000)


TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"


@pytest.fixture(name="chat_draft")
def chat_draft_fixture(tmp_path: Path) -> Iterator[str]:
    """The draft service of the bundled pair with a chat template."""
    for name, path in (("target", embedded.target_path()), ("draft", embedded.draft_path())):
        shutil.copytree(path, tmp_path / name)
        config = tmp_path / name / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    with running_services(tmp_path, tmp_path / "target", tmp_path / "draft") as services:
        yield services.draft_address


@pytest.mark.long
def test_a_real_chat_in_two_turns(browser: Browser, chat_draft: str) -> None:
    said: list[dict[str, str]] = []
    with running_gateway(chat_draft) as gateway, Client(chat_draft) as client:
        page = browser.new_page()
        page.goto(gateway.url)
        page.get_by_label("Max tokens").fill(str(LIMIT))
        for message in ("Who was the captain?", "And then?"):
            send(page, message)
            said.append({"role": "user", "content": message})
            answer = client.generate(said, max_new_tokens=LIMIT).text
            said.append({"role": "assistant", "content": answer})
            text = (page.locator("#text").text_content() or "").replace("↵", "")
            assert text == "".join(each["content"] for each in said)
        assert int(page.locator("#slider").get_attribute("max") or 0) > 0
        page.close()


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pictures(browser: Browser, gateway: Gateway, width: int, scheme: str) -> None:
    """Save pictures to look at in build/pictures."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(gateway.url)
    generate(page, PROMPT, 120)
    finish(page)
    page.get_by_role("button", name="Measure").click()
    expect(page.get_by_text(re.compile("the same text"))).to_be_visible(timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"live-{width}-{scheme}.png", full_page=True)
    page.close()
