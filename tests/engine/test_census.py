"""Tests that every family is served with the right tokens or refused, as docs/reference/families.md says."""

import re
from dataclasses import replace

import pytest
import transformers

from tests.cli.test_reference import codes, rows_of
from tests.support.census import DTYPES, PAGE, Row, outcomes, row_of, shown, table
from tests.support.door import Served
from tests.support.families import FAMILIES
from tests.support.kernel_builds import CAN_COMPILE

SHOWN = shown()


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_with_the_right_tokens_or_refused(tmp_path, family):
    for dtype, found in outcomes(family, tmp_path / "model"):
        assert found.wrong == 0, f"{dtype}: {found.wrong} of {found.compared} tokens are wrong"
        assert found.compared > 20 if found.refusal is None else len(found.refusal.splitlines()) == 1, dtype
        expected, row = SHOWN[family], row_of(found)
        if dtype != DTYPES[0] or not CAN_COMPILE:  # on some CPUs there are programs for float32 only, or none
            expected, row = replace(expected, native=False), replace(row, native=False)
        assert row == expected, f"{dtype}: {found.refusal}"


def test_the_page_has_every_family_of_its_transformers():
    (version,) = re.findall(r"transformers (\d+\.\d+)", PAGE.read_text())
    missing = set(FAMILIES) - set(SHOWN)
    assert not missing, "run `python -m tests.campaigns.census --write`"
    assert set(SHOWN) == set(FAMILIES) or not transformers.__version__.startswith(f"{version}.")


def test_the_page_has_the_form_of_the_census():
    assert table(SHOWN) in PAGE.read_text()


def test_families_that_models_md_names_are_served_as_it_says():
    named = rows_of("reference/models.md", "family (`model_type`)", "native program")
    rows = {family: native for families, native in named for family in codes(families)}
    assert len(rows) > 50
    for family, native in rows.items():
        assert SHOWN[family] == Row("", native == "yes"), family


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ("model m cannot be served exactly: bert-x has linear_attention layers", "… has linear_attention layers"),
        ("model m cannot be served: its forward pass failed: 3 and 4 differ", "its forward pass failed: …"),
        (
            "model m cannot be served exactly: it attends more than once in layer 0",
            "it attends more than once in layer N",
        ),
    ],
)
def test_a_reason_is_cut_to_its_kind(refusal, reason):
    assert row_of(Served(refusal)).reason == reason
