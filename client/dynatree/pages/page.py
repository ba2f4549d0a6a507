"""Putting a page together: its template, and the shared parts before its own style and script."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

_SHARED = files(__package__) / "shared"
_STYLES = ("page.css", "rounds.css")
# One script in the end, whose parts see each other's names: what a part uses at once stands before it.
_SCRIPTS = ("elements.js", "words.js", "tree.js", "text.js", "charts.js", "rounds.js")


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        html: the whole page, to be sent or written as UTF-8.
        policy: its Content-Security-Policy. It admits the page's own style and script, by their hashes, and what
            `build_page` was told to admit.
    """

    html: str
    policy: str


def build_page(
    folder: Traversable,
    template: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    admits: str = "",
    data: str = "",
) -> Page:
    """The page of a template, with the styles and scripts of its folder behind the shared ones.

    Args:
        folder: where the template, the styles and the scripts lie.
        template: HTML that names %STYLE%, %SCRIPT% and what else it wants: %CONTROLS% and %ROUNDS%, the view of rounds;
            %POLICY%, for a page that no server sends; %DATA%.
        styles: the page's own.
        scripts: the page's own.
        admits: more directives of the policy, each begun by a semicolon.
        data: what %DATA% stands for, safe in its place.
    """
    style = _joined([*(_SHARED / name for name in _STYLES), *(folder / name for name in styles)])
    script = _joined([*(_SHARED / name for name in _SCRIPTS), *(folder / name for name in scripts)])
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}{admits}"
    parts = {
        "STYLE": style,
        "SCRIPT": script,
        "CONTROLS": _joined([_SHARED / "controls.html"]),
        "ROUNDS": _joined([_SHARED / "rounds.html"]),
        "POLICY": policy,
        "DATA": data,
    }
    return Page(re.sub("%([A-Z]+)%", lambda name: parts[name[1]], _joined([folder / template])), policy)


def embeddable(value: object) -> str:
    """JSON that is safe inside a script element: ASCII only, and no < that could begin a tag."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _joined(parts: Sequence[Traversable]) -> str:
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
