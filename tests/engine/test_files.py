"""Tests that a model's files are checked before anything is loaded, and refused for the right reason."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest

from dynatree.common.errors import StartupError
from dynatree.engine.model.files import check_model, described
from tests.support.model_zoo import save_random_model


@pytest.mark.parametrize("whole", [True, False], ids=["beside a model", "alone"])
def test_an_adapter_is_refused(tmp_path, whole):
    """With peft, transformers would apply it; without, it would leave it out without a word."""
    folder = tmp_path / "model"
    if whole:
        save_random_model(folder, "llama", seed=1)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(StartupError, match=r"model has an adapter \(adapter_config.json\), which"):
        check_model(str(folder))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("EntryNotFound", "model owner/name on the hub has no config.json; expected a whole checkpoint"),
        ("RepoNotFound", "the hub has no such model, or keeps it private"),
    ],
)
def test_a_model_without_a_configuration_is_told_from_one_that_is_not_there(monkeypatch, code, reason):
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub, "hf_hub_url", lambda name, file: f"{address}/{name}/resolve/main/{file}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        try:
            with pytest.raises(StartupError, match=reason):
                check_model("owner/name")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("cached", ["config.json", "an index", "an index and a file", "all"])
def test_a_download_that_was_interrupted_goes_on_at_the_next_start(monkeypatch, tmp_path, cached):
    """The description before it must not need the files that are missing."""
    revision = tmp_path / "models--owner--name" / "snapshots" / "0123"
    revision.mkdir(parents=True)
    refs = revision.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    (revision / "config.json").write_text("{}")
    if cached != "config.json":
        (revision / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one", "b": "two"}}')
    for name in {"an index and a file": ["one"], "all": ["one", "two"]}.get(cached, []):
        (revision / name).write_bytes(bytes(500))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    expected = "owner/name, 1 kB on the disk" if cached == "all" else "owner/name, from the hub"
    assert described("owner/name") == expected
