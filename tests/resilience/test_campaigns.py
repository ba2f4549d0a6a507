"""The long campaigns in a short form, which shows that they run and that the services pass their other checks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

# Without checks of speed and of memory: seconds are too few for the first, and caches fill for minutes. Other load on
# the machine comes and goes too fast to be measured beside the attacks, so an answer may take long here.
CAMPAIGNS = {
    "hostile": ("--minutes=0.1", "--sites=tcp", "--speed=0", "--answer-seconds=30"),
    "quantised_matrix": ("--kinds", "int4", "Q4_K", "--prompts=2", "--tokens=12"),
    "soak": ("--minutes=0.4", "--clients=8", "--prompts=1", "--kill-every=8", "--growth=inf"),
}


@pytest.mark.early
@pytest.mark.long
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_in_its_short_form(name: str) -> None:
    command = [sys.executable, "-m", f"tests.campaigns.{name}", *CAMPAIGNS[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
