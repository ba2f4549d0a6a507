"""The live page: a prompt, and its completion as it comes, round by round. A gateway serves it at its root."""

from functools import cache
from importlib.resources import files

from dynatree.pages import Page, build_page

__all__ = ["live_page"]

# It talks to the server that it came from and to nobody else, and nobody may frame it. Its icon is in the page.
_ADMITS = "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@cache
def live_page() -> Page:
    """The page and its policy, which the server sends as the header Content-Security-Policy."""
    return build_page(
        files(__package__),
        "live.html",
        styles=["live.css"],
        scripts=["completion.js", "example.js", "live.js"],
        admits=_ADMITS,
    )
