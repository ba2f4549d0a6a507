"""Tests the choice of the number of fixed rows: by costs, once, and kept in a file."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import threading
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynatree.common.errors import StartupError
from dynatree.engine.gpu import fixed_rows
from dynatree.engine.gpu.fixed_rows import gives_equal_bits, round_seconds, with_default_rows, with_fixed_rows
from dynatree.engine.gpu.kept_rows import KeptRows
from dynatree.engine.loading import load_engine
from dynatree.engine.numerics import numerics_of
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import save_random_model


@dataclass(frozen=True)
class Engine:
    """Stands for an engine."""

    most_rows: int | None = None
    batch_invariant: bool = False
    info: Any = field(default_factory=lambda: SimpleNamespace(name="m"))


class Gpu:
    """Stands for a GPU: the seconds of a round by its rows, and the numbers of rows that give equal bits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: dict[int, float] = {}
        self.equal: set[int] = set(fixed_rows.TARGET_ROWS)
        self.measured = 0
        self.freed = True  # whether no engine was left at the last measurement
        self._engines: list[weakref.ref[Engine]] = []
        monkeypatch.setattr(fixed_rows, "_runner", lambda *_, **__: SimpleNamespace(forwards=[]))
        monkeypatch.setattr(fixed_rows, "round_seconds", self._measure)
        monkeypatch.setattr(fixed_rows, "with_fixed_rows", self._fixed)

    def _measure(self, *_: Any) -> dict[int, float]:
        self.measured += 1
        self.freed = all(engine() is None for engine in self._engines)
        return {rows: self.seconds.get(rows, 1.0) for rows in fixed_rows.TARGET_ROWS}

    def _fixed(self, engine: Any, counts: tuple[int, ...], *_: Any) -> Any:
        fixed = replace(engine, most_rows=counts[0], batch_invariant=counts[0] in self.equal)
        self._engines.append(weakref.ref(fixed))
        return fixed


@pytest.fixture(name="gpu")
def gpu_fixture(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def chosen(kept: KeptRows | None = None) -> Any:
    return with_default_rows(Engine(), 4, 300, kept)  # type: ignore[arg-type]


def test_the_most_rows_that_cost_little_more_than_the_fewest_are_chosen(gpu: Gpu) -> None:
    gpu.seconds = {32: 3.0, 64: 3.2, 96: 3.5, 128: 3.7, 256: 5.0}
    assert chosen().most_rows == 96
    gpu.equal = {32, 64, 256}
    assert chosen().most_rows == 64
    gpu.equal = set()
    assert (chosen().most_rows, chosen().batch_invariant) == (96, False)


def test_the_choice_is_kept_and_costs_that_vary_do_not_change_it(gpu: Gpu, tmp_path: Path) -> None:
    kept = KeptRows(tmp_path / "new" / "rows.json", "an H100 and these weights")
    gpu.seconds = {128: 2.0, 256: 2.0}
    assert chosen(kept).most_rows == 96
    gpu.seconds = {}
    assert chosen(kept).most_rows == 96
    assert gpu.measured == 1
    assert chosen(replace(kept, key="an A100")).most_rows == 256
    assert json.loads(kept.path.read_text()) == {kept.key: 96, "an A100": 256}


def test_a_kept_number_that_fails_the_trial_is_chosen_anew(
    gpu: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptRows(tmp_path / "rows.json", "k")
    kept.write(128)
    gpu.equal = {32, 64}
    assert chosen(kept).most_rows == 64
    assert "128 rows" in caplog.text
    assert kept.read() == 64


def test_the_memory_of_a_kept_number_that_fails_is_free_for_the_choice(gpu: Gpu, tmp_path: Path) -> None:
    kept = KeptRows(tmp_path / "rows.json", "k")
    kept.write(128)
    gpu.equal = {32}
    chosen(kept)
    assert gpu.freed


def test_rows_without_equal_bits_are_not_kept(gpu: Gpu, tmp_path: Path) -> None:
    gpu.equal = set()
    kept = KeptRows(tmp_path / "rows.json", "k")
    chosen(kept)
    assert kept.read() is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"k": "64"}', '{"k": 0}', '{"k": 99999}', '{"k": null}'])
def test_a_file_without_a_number_is_as_none(gpu: Gpu, tmp_path: Path, text: str) -> None:
    kept = KeptRows(tmp_path / "rows.json", "k")
    kept.path.write_text(text)
    assert kept.read() is None
    assert chosen(kept).most_rows == 256
    assert kept.read() == 256


def test_a_file_that_cannot_be_written_is_said_with_the_remedy(
    gpu: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert chosen(KeptRows(tmp_path / "file" / "rows.json", "k")).most_rows == 256
    assert "--fixed-rows 256" in caplog.text


def test_a_file_system_without_locks_keeps_the_number_all_the_same(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", failing)
    kept = KeptRows(tmp_path / "rows.json", "k")
    assert chosen(kept).most_rows == kept.read() == 256
    assert "cannot be locked (No locks available)" in caplog.text


def test_an_error_of_the_choice_is_not_taken_for_one_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "rows.json", tmp_path / "file" / "rows.json"):
        with pytest.raises(OSError, match="no device") as raised, KeptRows(path, "k").alone():
            raise OSError("no device")
        assert raised.value.__context__ is None


def test_a_service_says_that_it_waits_for_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptRows(tmp_path / "rows.json", "k")
    entered = threading.Event()

    def enter() -> None:
        with kept.alone():
            entered.set()

    waiting = threading.Thread(target=enter)
    with caplog.at_level(logging.INFO):
        with kept.alone():
            waiting.start()
            assert not entered.wait(0.3)
        waiting.join(20)
    assert entered.is_set()
    assert caplog.text.count("waiting for another service") == 1


@pytest.mark.parametrize("ending", ["new", "lock"])
def test_a_file_may_have_any_ending(tmp_path: Path, ending: str) -> None:
    kept = KeptRows(tmp_path / f"rows.{ending}", "k")
    with kept.alone():
        kept.write(64)
        assert sorted(each.name for each in tmp_path.iterdir()) == [f"rows.{ending}", f"rows.{ending}.lock"]
    assert kept.read() == 64


# On a CPU


@pytest.fixture(scope="module", name="eager")
def eager_fixture(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models") / "target"
    save_random_model(folder, "gpt_neox", seed=1)
    return load_engine(ModelSettings(str(folder), sessions=2, fixed_rows=()))


def test_rounds_are_timed_in_turns_and_leave_no_slots(eager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_rows, "_WARM_UPS", 1)
    monkeypatch.setattr(fixed_rows, "_TIMES", 2)
    turns: list[int] = []
    forwards = [
        forward
        for count in (8, 16)
        for forward in with_fixed_rows(eager, (count,), 2, 600).runner.forwards  # type: ignore[attr-defined]
    ]
    for each in forwards:
        decide = each.decide

        def counted(decide: Any = decide, rows: int = each.sizes.rows) -> Any:
            turns.append(rows)
            return decide()

        monkeypatch.setattr(each, "decide", counted)
    seconds = round_seconds(forwards, eager)
    assert turns == [8, 16] * 3
    assert all(seconds[rows] > 0 for rows in (8, 16))
    assert eager.kv_cache.free_slots == eager.kv_cache.size

    def failing() -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(forwards[0], "decide", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        round_seconds(forwards, eager)
    assert eager.kv_cache.free_slots == eager.kv_cache.size


def test_a_file_is_refused_where_torch_finds_no_gpu(tmp_path: Path) -> None:
    save_random_model(tmp_path / "m", "llama", seed=1)
    with pytest.raises(StartupError, match="--fixed-rows-file keeps a number that is measured on a GPU only"):
        load_engine(ModelSettings(str(tmp_path / "m"), device="cpu", fixed_rows_file=tmp_path / "rows.json"))


def test_other_numbers_of_rows_are_other_numerics(eager: Any) -> None:
    names = {counts: numerics_of(with_fixed_rows(eager, counts, 2, 600)) for counts in ((16,), (8, 16), (4, 8, 16))}
    assert [name.split(", ")[-1] for name in names.values()] == ["16 rows", "8/16 rows", "4/8/16 rows"]
    assert "rows" not in numerics_of(eager)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_the_trial_sees_rows_that_differ_wherever_they_stand(
    eager: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group of rows of a forward pass, such as a tile of a matrix product, gives other bits than the others."""
    if not eager.batch_invariant:
        pytest.skip("this CPU has no kernels of the project's that give equal bits")
    harmed = {"first": range(12, 20), "middle": range(48, 52), "last": range(90, 96)}[place]
    run = eager.runner.run

    def by_row(segments: Any) -> Any:
        logits = run(segments)
        row = 0
        for segment, each in zip(segments, logits, strict=True):
            rows = torch.arange(row, row + len(each))
            each[(rows >= harmed.start) & (rows < harmed.stop)] += 1e-3
            row += len(segment.token_ids)
        return logits

    assert gives_equal_bits(eager, 96)
    monkeypatch.setattr(eager.runner, "run", by_row)
    assert not gives_equal_bits(eager, 96)
