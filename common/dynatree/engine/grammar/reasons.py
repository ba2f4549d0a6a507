"""Why llguidance refuses a grammar or cannot follow it, in terms of the request."""

from __future__ import annotations

import re

from llguidance import LLMatcher

LONGEST_REASON = 500  # characters
_LONGEST_LINE = 200  # characters of a line of it, which may quote a whole expression
_READ = 4000  # characters of a reason that are read

# An expression that is quoted before what is wrong with it; one that is a whole grammar of one rule has no other place.
_QUOTED = re.compile(r'\A(?:at 1\(8\): |((?:at )?\d+\(\d+\): ))invalid regex "[^"\\]*(?:\\.[^"\\]*)*" \(in regex\): ')

# Words of llguidance, and those that replace them, in this order
_WORDS = tuple(
    (re.compile(theirs, re.DOTALL), ours)
    for theirs, ours in (
        # the lines of the grammar, which for an expression is not the request's
        (r"\n +\d+ \| [^\n]*(\n +\d+ \| [^\n]*|\n[ …]*\^)*", ""),
        (r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: "),
        (r"regex parse error:\n {4}(.*?)\n[ …^]+\nerror: ", r"the pattern \1: "),
        (r"lookarounds not supported yet; \w+ in regex ", "look-around and word boundaries are not supported: "),
        (r"Unimplemented keys: \[(.*?)\]", r"these keywords are not supported: \1"),
        (
            r"oneOf constraints are not supported\.[^\n]*",
            "oneOf with alternatives that may overlap is not supported",
        ),
        (r"Resource ('.*?') is not present in a registry[^\n]*", r"$ref: \1 is in another document, which is not read"),
        (r"Pointer ('.*?') does not exist", r"$ref: \1 is not in the schema"),
        (r"(?=(integer interval|range) [\[(])", "minimum and maximum: "),
        (r"Expected f64 for", "expected a number for"),
        (r"Unsatisfiable schema: ", "no value follows the schema: "),
        (r"invalid multiple of", "multipleOf is not a number above 0 that can be followed"),
        (r"^no start rule found", "no rule is named start"),
    )
)


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher has failed, in at most `LONGEST_REASON` characters."""
    reason = _QUOTED.sub(r"\1", matcher.get_error().partition("\n<state>")[0])
    reason = _ends("\n".join(_ends(line, _LONGEST_LINE) for line in reason.split("\n")), _READ)
    for theirs, ours in _WORDS:
        reason = theirs.sub(ours, reason, count=1)
    return _ends(reason.strip(), LONGEST_REASON)


def _ends(text: str, most: int) -> str:
    """Return a text without its middle, where a reason quotes the request, if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"
