"""Putting the page together: template, style, script and data in one file."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files

from dynatree.cli.trace.rounds import Round


def build_page(name: str, rounds: Sequence[Round]) -> str:
    """The page of a trace called `name`.

    Its content security policy admits the page's own script, by its hash, and no request at all.
    """
    script = _read("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _read("page.html").replace("%HASH%", digest).replace("%STYLE%", _read("page.css"))
    return page.replace("%SCRIPT%", script).replace("%DATA%", _embeddable({"name": name, "rounds": rounds}))


def _embeddable(value: object) -> str:
    """JSON that is safe inside a script element: ASCII only, and no < that could begin a tag."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
