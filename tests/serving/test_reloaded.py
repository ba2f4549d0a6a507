"""Tests files that are replaced while a service runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dynatree.serving import files
from dynatree.serving.files import Reloaded


def test_what_makes_no_sense_is_said_once_and_the_last_that_did_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    path = tmp_path / "number"
    path.write_text("1")
    number = Reloaded([path], lambda: int(path.read_text()))

    def said() -> list[str]:
        levels = [record.levelname for record in caplog.records]
        caplog.clear()
        return levels

    path.write_text("none")
    assert [number.value for _ in range(5)] == [1] * 5
    assert said() == ["ERROR"]
    path.write_text("neither")
    assert [number.value, number.value] == [1, 1]
    assert said() == ["ERROR"]
    path.write_text("22")
    assert [number.value, number.value] == [22, 22]
    assert said() == ["INFO"]
    path.write_text("none")  # the same mistake again
    assert [number.value, number.value] == [22, 22]
    assert said() == ["ERROR"]
