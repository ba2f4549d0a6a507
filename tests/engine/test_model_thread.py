"""Tests the thread of a service that runs all of torch's computations."""

import asyncio
import threading

import pytest

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.draft import serve_draft as draft
from dynatree.draft.settings import DefaultPolicy, DraftLimits, DraftSettings, VerifyServices
from dynatree.engine.settings import ModelSettings
from dynatree.serving.channel import PLAIN
from dynatree.serving.operation import OperationSettings
from dynatree.verify import serve_verify as verify
from dynatree.verify.settings import VerifyLimits, VerifySettings

MODEL = ModelSettings(str(embedded.draft_path()))
OPERATION = OperationSettings("localhost:0", grace=0.0)


def serve_verify():
    return verify.serve(VerifySettings(MODEL, VerifyLimits(), OPERATION))


def serve_draft():
    services = VerifyServices("localhost:1", PLAIN, timeout=1.0, ahead=None)
    return draft.serve(DraftSettings(MODEL, services, DefaultPolicy("linear", {}), DraftLimits(), OPERATION))


@pytest.mark.parametrize(
    ("command", "serve", "name"), [(verify, serve_verify, "verify-model"), (draft, serve_draft, "draft-model")]
)
def test_models_are_loaded_on_the_thread_that_runs_them(command, serve, name, monkeypatch):
    """A second thread that has run parallel code doubles the time of a small model's forward pass."""
    threads = []

    def load(settings):
        threads.append(threading.current_thread().name)
        raise StartupError("far enough")

    monkeypatch.setattr(command, "load_engine", load)
    with pytest.raises(StartupError, match="far enough"):
        asyncio.run(serve())
    assert [thread.startswith(name) for thread in threads] == [True]
