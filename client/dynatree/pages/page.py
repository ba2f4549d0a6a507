"""Builds a page from its template, the shared styles and scripts, and its own."""

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
# The parts are joined into one script with one scope; a part comes after the parts that it uses when it loads.
_SCRIPTS = ("elements.js", "words.js", "tree.js", "text.js", "charts.js", "rounds.js")


@dataclass(frozen=True, slots=True)
class Page:
    """A web page.

    Attributes:
        html: The whole page, to be sent or written as UTF-8.
        policy: The page's Content-Security-Policy. It allows the page's own style and script by their hashes, and the
            further sources given to `build_page`.
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
    """Build a page from a template, with its own styles and scripts after the shared ones.

    Args:
        folder: Folder of the template, the styles and the scripts.
        template: File name of an HTML template with the placeholders %STYLE% and %SCRIPT%, and optionally %CONTROLS%
            and %ROUNDS% (the view of rounds), %POLICY% (for a page that is opened from disk) and %DATA%.
        styles: File names of the page's own styles.
        scripts: File names of the page's own scripts.
        admits: Further directives of the policy, each with a leading semicolon.
        data: Text that replaces %DATA%; it must be safe in that place, see `embeddable`.
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
    """Encode a value as JSON that is safe inside a script element: ASCII only, without any < that could begin a tag."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _joined(parts: Sequence[Traversable]) -> str:
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
