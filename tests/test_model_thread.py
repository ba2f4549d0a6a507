"""The one thread of a service's model work: everything that torch computes happens there."""

import asyncio
import threading

import pytest

from dynatree.common import embedded
from dynatree.common.channel import PLAIN
from dynatree.common.engine import ModelSettings
from dynatree.common.errors import StartupError
from dynatree.common.operation import OperationSettings
from dynatree.draft import serve_draft as draft
from dynatree.draft.service import DefaultPolicy
from dynatree.verify import serve_target as verify

SETTINGS = ModelSettings(str(embedded.draft_path()))


def serve_verify():
    return verify.serve(SETTINGS, verify.VerifyLimits(), OperationSettings("localhost:0", grace=0.0))


def serve_draft():
    services = draft.VerifyServices("localhost:1", PLAIN, timeout=1.0, ahead=None)
    operation = OperationSettings("localhost:0", grace=0.0)
    return draft.serve(SETTINGS, services, DefaultPolicy("linear", {}), draft.DraftLimits(), operation)


@pytest.mark.parametrize(
    ("command", "serve", "name"), [(verify, serve_verify, "verify-model"), (draft, serve_draft, "draft-model")]
)
def test_models_are_loaded_on_the_thread_that_runs_them(command, serve, name, monkeypatch):
    """A second thread that has run parallel code doubles the time of a small model's forward."""
    threads = []

    def load(settings):
        threads.append(threading.current_thread().name)
        raise StartupError("far enough")

    monkeypatch.setattr(command, "load_engine", load)
    with pytest.raises(StartupError, match="far enough"):
        asyncio.run(serve())
    assert [thread.startswith(name) for thread in threads] == [True]
