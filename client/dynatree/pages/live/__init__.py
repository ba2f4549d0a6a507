"""The live page, which the gateway serves at its root: it shows the completion of a prompt round by round."""

from functools import cache
from importlib.resources import files

from dynatree.pages import Page, build_page

__all__ = ["live_page"]

# The page may connect only to the server that sent it, and no other page may frame it. Its icon is a data: URL.
_ADMITS = "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@cache
def live_page() -> Page:
    """Build the page; the server must send its policy as the header Content-Security-Policy."""
    return build_page(
        files(__package__),
        "live.html",
        styles=["live.css"],
        scripts=["completion.js", "example.js", "live.js"],
        admits=_ADMITS,
    )
