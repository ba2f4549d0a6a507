"""The live page after a completion of the shipped pair: `python benchmarks/page_picture.py`; needs chromium.

The page runs its own example and measures plain decoding; docs/pictures/live-page.png shows it at a round whose tree
branches and of which many nodes were accepted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from operation import free_port
from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).parent.parent / "docs" / "pictures" / "live-page.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NODES = range(8, 16)  # of the tree that is shown: it fits its panel
START_SECONDS = 120.0
WAIT = 60_000.0  # milliseconds for a completion


def main() -> None:
    """Write the picture."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        for _ in range(2):  # the first one warms the pair up
            page.goto(url)
            complete(page)
        show_branching_round(page)
        page.screenshot(path=OUT, full_page=True)
        browser.close()


@contextmanager
def served() -> Iterator[str]:
    """The URL of `dynatree serve` with the shipped pair."""
    address = f"127.0.0.1:{free_port()}"
    options = ["--target-model", "embedded", "--draft-model", "embedded", "--listen", address]
    process = subprocess.Popen([sys.executable, "-m", "dynatree.cli.main", "serve", *options])
    try:
        until = time.monotonic() + START_SECONDS
        while not is_healthy(f"http://{address}"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("dynatree serve does not serve")
            time.sleep(0.5)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def is_healthy(url: str) -> bool:
    """Whether the gateway and the services behind it serve."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0):
            return True
    except OSError:
        return False


def complete(page: Page) -> None:
    """The example, then plain decoding of it."""
    for button in ("generate", "measure"):
        page.click(f"#{button}")
        page.wait_for_selector("#generate", state="visible", timeout=WAIT)


def show_branching_round(page: Page) -> None:
    """Move the slider to the round with most accepted nodes among those with a tree of fitting size that branches."""
    slider, best = page.locator("#slider"), (0, 0)
    for position in range(int(slider.get_attribute("max") or 0) + 1):
        move(page, position)
        accepted, drafted = page.locator("#tree .node.accepted").count(), page.locator("#tree .node.drafted").count()
        if drafted >= accepted and accepted + drafted in NODES:
            best = max(best, (accepted, position))
    move(page, best[1])


def move(page: Page, position: int) -> None:
    """Put the slider there."""
    page.locator("#slider").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')) }", position
    )


if __name__ == "__main__":
    main()
