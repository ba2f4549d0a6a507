"""What tests read from a page that shows rounds, in a browser, and what they do to it."""

from __future__ import annotations

from playwright.sync_api import Page


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).evaluate_all("all => all.map(each => each.textContent)")


def labels(page: Page, kind: str) -> list[str]:
    """Of the tree's nodes."""
    return texts(page, f"#tree .node.{kind} > text")


def move_to(page: Page, position: int) -> None:
    """Put the slider there."""
    page.locator("#slider").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')) }", position
    )
