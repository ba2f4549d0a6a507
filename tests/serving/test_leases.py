"""Tests that a closed stream frees its slots at once, so streams opened one after another are never refused."""

import pytest

from dynatree.client import Client
from tests.support.model_zoo import save_random_model
from tests.support.services import running_services

PROMPT = [5, 6, 7]
SESSIONS = 4


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", ["throughput", "linear", "autoregressive"])
def test_streams_opened_and_closed_in_a_row_are_never_refused(tmp_path, policy, count):
    target = save_random_model(tmp_path / "target", "gpt_neox", seed=1)
    with (
        running_services(tmp_path, target, target, sessions=SESSIONS) as services,
        Client(services.draft_address) as client,
    ):
        for _ in range(count):
            with client.stream(PROMPT, policy=policy, ignore_eos=True) as stream:
                next(stream)
