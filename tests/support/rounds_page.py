"""Read and operate a page that shows rounds, in a browser."""

from __future__ import annotations

from playwright.sync_api import Page


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).evaluate_all("all => all.map(each => each.textContent)")


def labels(page: Page, kind: str) -> list[str]:
    """Labels of the tree's nodes of one kind."""
    return texts(page, f"#tree .node.{kind} > text")


def move_to(page: Page, position: int) -> None:
    """Move the slider to a position."""
    page.locator("#slider").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')) }", position
    )
