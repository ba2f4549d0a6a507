"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("TRITON_INTERPRET", "1")  # run kernels on the CPU; read when triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for the hub; read when transformers is imported
# transformers loads weights with four threads, which take longer than the reading of a small model's files
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

from dynatree import embedded
from dynatree.bench import command as bench
from dynatree.cli import service_pair
from dynatree.client import Client
from dynatree.draft.settings import DraftSettings
from dynatree.verify.settings import VerifySettings
from tests.support.processes import EmbeddedServices, service

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_SERVICES = "services"  # unit of the tests that use the session's services, or others in forked processes
_NAMES = (
    r"embedded_services|shared_pair|gateway_fixture|running_gateway|support\.forked|processes import service|fuzz_gguf"
)
_APART = "test_census.py"  # its tests take minutes and share nothing, so that any worker runs any of them


def pytest_configure(config: pytest.Config) -> None:
    """Use one thread: the models are too small for more, and threads of several workers would wait for each other."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # in the processes that run tests
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze the imported objects, so that garbage collections skip them, and let others collect rarely.

    With the interpreter's thresholds, a tenth of the tests' CPU time would go into collections.
    """
    gc.set_threshold(20_000, 20, 50)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Leave unused objects to the end of the process; otherwise extension modules would report leaks."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, and check that the scheduler knows which files use the session's services."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    for item in items:
        assert "embedded_services" not in getattr(item, "fixturenames", ()) or _uses_services(item.path), item.path


class Scheduling(LoadFileScheduling):
    """Keeps the tests of a file that share fixtures on one worker, and all files that use the session's services.

    Files that fork processes of their own go there too, because every worker that forks has to import torch once more.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file.endswith(_APART):
            return nodeid
        return _SERVICES if _uses_services(self.config.rootpath / file) else file


@cache
def _uses_services(file: Path) -> bool:
    """Whether a file names what needs the session's services or forks; the scheduling process collects no tests."""
    return re.search(_NAMES, file.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """Return the scheduler, whatever `--dist` says."""
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests recorded in any worker."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(str(value))


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Records without those that asyncio and gRPC log when calls of earlier tests are destroyed."""

    def ours(record: logging.LogRecord) -> bool:
        return record.name != "asyncio" and not record.getMessage().startswith("Exception not handled by ")

    caplog.handler.addFilter(ours)
    yield caplog
    caplog.handler.removeFilter(ours)


@pytest.fixture(scope="module", autouse=True)
def no_folders_left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Delete the folders of a file whose tests passed; those of all files together would fill a small disk."""
    failed, base = request.session.testsfailed, tmp_path_factory.getbasetemp()
    yield
    if request.session.testsfailed == failed:
        for folder in base.iterdir():
            if folder.name != _SERVICES:
                shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def embedded_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServices]:
    """Both services of the embedded pair, started by the command line: two processes with one thread each."""
    folder, options = tmp_path_factory.mktemp(_SERVICES, numbered=False), ("embedded", "--threads", "1")
    drafting = ("draft", "--history-tokens", "0", "--draft-model", *options)  # no test's completions help another's
    with (
        service(folder, "verify", "verify", "--target-model", *options) as (verify, first, _),
        service(folder, "draft", *drafting, "--verify", verify) as (draft, second, _),
    ):
        yield EmbeddedServices(draft, verify, second.pid, first.pid)


@pytest.fixture
def shared_pair(embedded_services: EmbeddedServices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands in this process use the session's services instead of starting a pair."""

    @contextmanager
    def shared(verify: VerifySettings, draft: DraftSettings) -> Iterator[service_pair.ServicePair]:
        assert (verify.model.model, draft.model.model) == (str(embedded.target_path()), str(embedded.draft_path()))
        with Client(embedded_services.draft_address) as client:
            yield service_pair.ServicePair(
                client,
                embedded_services.draft_process,
                embedded_services.verify_process,
                embedded_services.draft_address,
            )

    monkeypatch.setattr(service_pair, "service_pair", shared)
    monkeypatch.setattr(bench, "service_pair", shared)


@pytest.fixture(name="build", params=["kernels_avx2.so", "kernels_avx512.so", "kernels_avx512_bf16.so"])
def build_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test once with each build of the kernels that this CPU supports."""
    from dynatree.engine.cpu import native

    if "avx512" in request.param and request.param not in native.builds():
        pytest.skip("this CPU lacks its instructions")
    assert (native.FOLDER / request.param).exists(), "installed by `make`, which needs a C compiler"
    monkeypatch.setattr(native, "builds", lambda: [request.param])
    native.kernels.cache_clear()
    yield request.param
    native.kernels.cache_clear()


@pytest.fixture
def on_each_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], dict[str, Any]]]:
    """Run a function with each build of the kernels that this CPU runs; return the results by the builds' names."""
    from dynatree.engine.cpu import native

    def results(function: Callable[[], Any]) -> dict[str, Any]:
        found = {}
        for name in names:
            monkeypatch.setattr(native, "builds", lambda name=name: [name])
            native.kernels.cache_clear()
            assert native.kernels() is not None, f"{name} is installed by `make`, which needs a C compiler"
            found[name] = function()
        return found

    names = native.builds()
    yield results
    native.kernels.cache_clear()


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CPU without AMX; with AMX, oneDNN's linear layers are used in 16 bits."""
    import torch

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        pytest.skip("no chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"], headless=True)
        yield browser
        browser.close()
