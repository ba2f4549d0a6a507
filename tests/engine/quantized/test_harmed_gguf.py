"""Tests what becomes of harmed GGUF files, which are loaded in forked processes."""

from tests.campaigns.fuzz_gguf import REFUSED, SERVED, outcomes
from tests.support.gguf_mutants import FAMILIES as HARMED
from tests.support.gguf_mutants import KINDS


def test_harmed_files_are_refused_in_a_line_or_served_as_transformers_reads_them():
    """The short form of `python -m tests.campaigns.fuzz_gguf`."""
    found = list(outcomes(first=0, count=len(HARMED) * len(KINDS)))
    assert [each for each in found if each.end not in (SERVED, REFUSED)] == []
    assert {each.end for each in found} == {SERVED, REFUSED}
    assert {each.kind for each in found} == set(KINDS)
