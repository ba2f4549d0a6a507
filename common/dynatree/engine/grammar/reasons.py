"""Why llguidance refuses a grammar or cannot follow it, in terms of the request."""

from __future__ import annotations

import re

from llguidance import LLMatcher

LONGEST_REASON = 500  # characters
_READ = 4000  # characters of a reason that are read

# Words of llguidance, and those that replace them, in this order
_WORDS = tuple(
    (re.compile(theirs, re.DOTALL), ours)
    for theirs, ours in (
        (r"\n<state>.*", ""),
        # the lines of the grammar, which for an expression is not the request's
        (r"\n +\d+ \| [^\n]*(\n +\d+ \| [^\n]*|\n *\^)*", ""),
        (r'^at 1\(8\): invalid regex ".*?" \(in regex\): ', ""),  # an expression is a grammar of one rule
        (r'invalid regex ".*?" \(in regex\): ', ""),
        (r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: "),
        (r"regex parse error:\n {4}(.*?)\n *\^+\nerror: ", r"the pattern \1: "),
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
    reason = matcher.get_error()[:_READ]
    for theirs, ours in _WORDS:
        reason = theirs.sub(ours, reason, count=1)
    return reason.strip()[:LONGEST_REASON]
