"""Tests the recording of completions: whose are kept, the bound, the files, and what a failing disk does."""

from __future__ import annotations

import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from dynatree.client import Client
from dynatree.common.errors import StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.draft.recording.line_files import FILES, PATTERN, LineFiles
from dynatree.draft.recording.recorder import MANIFEST, Recorder
from dynatree.draft.settings import RecordSettings
from dynatree.v1 import draft_pb2, draft_pb2_grpc
from tests.support.model_zoo import save_random_model
from tests.support.services import running_services

TARGET = ModelInfo("t", "LlamaForCausalLM", 7, 9, 64, "float32", "cpu", "abc", "1", "", 0)


def lines(folder: Path) -> list[bytes]:
    return [line for path in sorted(folder.glob(PATTERN)) for line in path.read_bytes().splitlines(keepends=True)]


def recorded(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in lines(folder)]


def test_whose_completions_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "texts"
    settings = RecordSettings(folder, frozenset({"anna", "ben"}), prompts=True)
    target = save_random_model(tmp_path / "target", "llama", seed=1)
    with running_services(tmp_path, target, None, record=settings) as services:
        expected = []
        for principal in ("anna", "carl", "ben", ""):
            with Client(services.draft_address, principal=principal) as client:
                client.generate(f"Never of {principal}", max_new_tokens=8, store=False)
                for prompt in ("Once upon a time", [5, 6, 7]):
                    done = client.generate(prompt, max_new_tokens=12, stop="e", n=2, temperature=1.0)
                    texts = [done.text, *(each.text for each in done.alternatives)]
                    told = prompt if isinstance(prompt, str) else client.detokenize(prompt)
                    expected += [{"text": told + text} for text in texts if text and principal in ("anna", "ben")]
    assert recorded(folder) == expected
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("characters", [0, 3])
def test_a_resumed_completion_is_recorded_behind_what_its_client_has(tmp_path: Path, characters: int) -> None:
    folder, target = tmp_path / "texts", save_random_model(tmp_path / "target", "llama", seed=1)
    with running_services(tmp_path, target, None, record=RecordSettings(folder, prompts=True)) as services:
        with Client(services.draft_address) as client:
            whole = client.generate("Once upon a time", max_new_tokens=12, ignore_eos=True)
        resume = draft_pb2.Resume(token_ids=whole.token_ids[:5], characters=characters)
        request = draft_pb2.GenerateRequest(text="Once upon a time", max_new_tokens=12, ignore_eos=True, resume=resume)
        with grpc.insecure_channel(services.draft_address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
            rest = "".join(each.text for each in stub.Generate(request))
    assert rest == whole.text[characters:]
    assert recorded(folder) == [{"text": "Once upon a time" + whole.text}] * 2


def test_without_being_asked_for_prompts_and_principals_every_text_alone_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder.open(RecordSettings(tmp_path), TARGET)
    assert recorder.wants("", TARGET)
    assert recorder.wants("anna", replace(TARGET, dtype="bfloat16", numerics="other kernels"))
    assert not recorder.wants("anna", replace(TARGET, name="another target that the verify service has now"))
    recorder.add("a\nb ☃", lambda: pytest.fail("the prompt is not read"))
    recorder.close()
    assert recorded(tmp_path) == [{"text": "a\nb ☃"}]


def test_the_oldest_file_makes_room(tmp_path: Path) -> None:
    bound = 100 * FILES
    files = LineFiles(tmp_path, bound)
    written = [b"%049d\n" % number for number in range(5 * FILES)]
    for line in written:
        files.append(line)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound
    files.append(b"x" * bound + b"\n")  # exceeds the bound by itself
    kept = lines(tmp_path)
    assert kept == written[-len(kept) :]
    assert len(kept) > len(written) // 3
    again = LineFiles(tmp_path, bound)  # another start goes on where the last one ended
    again.append(b"last\n")
    assert [*lines(tmp_path)][-2:] == [written[-1], b"last\n"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound


def test_a_line_that_a_crash_cut_short_is_removed_at_the_next_start(tmp_path: Path) -> None:
    files = LineFiles(tmp_path, 10**6)
    files.append(b"whole\n")
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b'{"text": "cut sh')
    LineFiles(tmp_path, 10**6).append(b"next\n")
    assert lines(tmp_path) == [b"whole\n", b"next\n"]


def test_a_full_disk_costs_one_warning_and_no_line_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder.open(RecordSettings(tmp_path), TARGET)
    recorder.add("before", str)
    recorder._thread.submit(int).result()  # wait for it
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, line: write(file, line[:9]))
        for _ in range(3):
            recorder.add("lost", str)
        recorder._thread.submit(int).result()
    recorder.add("after", str)
    recorder.close()
    assert recorded(tmp_path) == [{"text": "before"}, {"text": "after"}]
    (warning,) = caplog.messages
    assert warning == f"completions are not recorded to {tmp_path}: No space left on device"


def test_completions_that_come_faster_than_the_disk_takes_them_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder.open(RecordSettings(tmp_path), TARGET)
    free = threading.Event()
    recorder._thread.submit(free.wait)
    for number in range(300):
        recorder.add(str(number), str)
    free.set()
    recorder.close()
    assert recorded(tmp_path) == [{"text": str(number)} for number in range(256)]
    assert caplog.messages == [f"completions are not recorded to {tmp_path}: the disk is too slow"]


def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    settings = RecordSettings(tmp_path / "r")
    recorder = Recorder.open(settings, TARGET)
    with pytest.raises(StartupError, match="r, into which another service records"):
        Recorder.open(settings, TARGET)
    recorder.close()
    Recorder.open(settings, replace(TARGET, version="2", device="cuda:0")).close()
    with pytest.raises(StartupError, match=r"has completions of t; expected another folder for u$"):
        Recorder.open(settings, replace(TARGET, name="u"))
    with pytest.raises(StartupError, match="has completions of another model named t; expected"):
        Recorder.open(settings, replace(TARGET, parameters=8))
    (tmp_path / "r" / MANIFEST).write_text("{")
    with pytest.raises(StartupError, match=r"whose manifest\.json is damaged"):
        Recorder.open(settings, TARGET)
    with pytest.raises(StartupError, match="which has other files"):
        Recorder.open(RecordSettings(tmp_path), TARGET)
    with pytest.raises(StartupError, match="which cannot be used: Not a directory"):
        Recorder.open(RecordSettings(tmp_path / "r" / MANIFEST / "below"), TARGET)
