"""What a session keeps of its steps and where they ran, how much time it has left, and bounds beside the figures."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MEASURED, NOT_MEASURED, FAILED = "measured", "not measured", "failed"
NO_GPU = "no GPU"
BUNDLE = "session.json"
OF_SERVICES = ("grpc_health", "grpc_reflection", "prometheus_client")
ROOT = Path(__file__).resolve().parents[2]

# Tokens a second of one session, T = 100, the 2.8B-shaped target in bfloat16. README.md beside this file expects less.
SPEEDS: Mapping[str, Mapping[str, float]] = {
    "H100": {"plain": 400.0, "default": 1000.0},
    "H200": {"plain": 540.0, "default": 1600.0},
}


class NotMeasuredError(Exception):
    """A step cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Bound:
    """What a figure is, beside the least and the most that it was expected to be; None where there is no such bound."""

    what: str
    measured: float
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        """Whether it is as expected; a number that is none is not."""
        above = self.least is None or self.measured >= self.least
        return above and (self.most is None or self.measured <= self.most) and self.measured == self.measured

    def __str__(self) -> str:
        sides = (("at least", self.least), ("at most", self.most))
        expected = " and ".join(f"{name} {shown(value)}" for name, value in sides if value is not None)
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.what}: {shown(self.measured)}{unit}, expected {expected}: {'met' if self.met else 'MISSED'}"


def shown(value: float) -> str:
    """Format a number for people: integers in full, others with at least three significant digits."""
    if isinstance(value, int) or (abs(value) < 1e15 and float(value).is_integer()):
        return str(int(value))
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def speed_bounds(device: str, what: str, measured: float) -> list[Bound]:
    """Return the lowest expected speed of `plain` or `default` decoding on this card; empty for unknown cards."""
    known = next((speeds for name, speeds in SPEEDS.items() if name in device), None)
    if known is None or what not in known:
        return []
    return [Bound(f"{what} decoding, one session", measured, "tokens/s", least=known[what])]


@dataclass(frozen=True)
class Measured:
    """What a step found: figures for JSON, and lines and bounds to print."""

    figures: Mapping[str, Any]
    says: Sequence[str] = ()
    bounds: Sequence[Bound] = ()


@dataclass(frozen=True)
class Step:
    """One measurement, which is kept as one record."""

    name: str  # of the record, with the part's number
    work: str  # `module:function`; the function takes a `Context` and returns what it `Measured`
    seconds: float  # that it takes at most, as expected of a GPU
    needs: tuple[str, ...] = ()  # steps whose figures it reads
    models: bool = False  # whether the pair must be loaded for it


@dataclass(frozen=True)
class Store:
    """The steps' records by name, all in the file `BUNDLE` of a folder, because a machine hands back few files."""

    folder: Path
    tiny: bool = False
    _clock: Callable[[], float] = field(default=time.time, repr=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def go_on_from(self, bundle: Path) -> None:
        """Take the records of another machine's bundle, unless there is one here.

        Raises:
            SystemExit: There is no such file.
        """
        if not bundle.is_file():
            raise SystemExit(f"{bundle} is not there; expected the {BUNDLE} of an earlier call")
        if not self._path.exists():
            _write(self._path, _read(bundle))

    def read(self, name: str) -> dict[str, Any] | None:
        """A step's record; None where there is none, or where it is of other sizes."""
        record = _read(self._path).get(name)
        fits = isinstance(record, dict) and "status" in record and record.get("tiny", False) == self.tiny
        return record if fits else None

    def figures(self, name: str) -> dict[str, Any]:
        """What a step has found.

        Raises:
            NotMeasuredError: It was not measured.
        """
        if (figures := self.measured(name)) is None:
            raise NotMeasuredError(f"it needs {name}, which was not measured")
        return figures

    def measured(self, name: str) -> dict[str, Any] | None:
        """The same; None where it was not measured."""
        record = self.read(name)
        return record["figures"] if record is not None and record["status"] == MEASURED else None

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a record: what was found, or why nothing was."""
        kept = {"step": name, "tiny": self.tiny, "at": self._clock(), **record}
        _write(self._path, dict(sorted({**_read(self._path), name: kept}.items())))

    def settled(self, name: str, since: float) -> bool:
        """Whether a step is not to be run: it was measured, or could not be, or has failed since then."""
        record = self.read(name)
        return record is not None and (record["status"] != FAILED or record["at"] >= since)

    @property
    def _path(self) -> Path:
        return self.folder / BUNDLE


def _read(path: Path) -> dict[str, Any]:
    """A file's object; an empty one where it holds none, so that its steps are run again."""
    try:
        record = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        record = None
    if isinstance(record, dict):
        return record
    print(f"{path.name} cannot be read, and counts for nothing")
    return {}


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """All of it or nothing: whoever is killed meanwhile leaves what there was."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def ending(records: Mapping[str, Mapping[str, Any] | None]) -> tuple[int, list[str]]:
    """Return a part's exit status by its steps' records, and its last lines: what is missing, and bounds missed.

    The status is 1 if a step failed, 3 if no call has run one, and 0 otherwise.
    """
    run = {name: record for name, record in records.items() if record is not None}
    left = [name for name in records if name not in run]
    lines = [f"{name}: {each['status']}: {each['reason']}" for name, each in run.items() if each["status"] != MEASURED]
    bounds = [each for record in run.values() for each in record.get("bounds", ())]
    missed = [each["says"] for each in bounds if not each["met"]]
    if bounds:
        lines += [f"{len(bounds) - len(missed)} of {len(bounds)} bounds met", *missed]
    if left:
        lines.append(f"left for another call: {', '.join(left)}")
    failed = any(record["status"] == FAILED for record in run.values())
    return 1 if failed else 3 if left else 0, lines


def to_record(measured: Measured) -> dict[str, Any]:
    """For `Store.write`."""
    bounds = [{"says": str(each), "met": each.met, **asdict(each)} for each in measured.bounds]
    return {"status": MEASURED, "figures": dict(measured.figures), "says": list(measured.says), "bounds": bounds}


def surroundings(device: str) -> dict[str, Any]:
    """For JSON; None where something is not known."""
    import torch  # not by whoever only asks for versions

    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"a CPU ({platform.machine()})",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
        "commit": commit(),
        "modified": bool(_output("git", "-C", str(ROOT), "status", "--porcelain")) if commit() else None,
    }


def commit() -> str | None:
    """The commit that is measured; None where neither the environment nor git knows."""
    return os.environ.get("DYNATREE_COMMIT") or _output("git", "-C", str(ROOT), "rev-parse", "HEAD")


def version_of(package: str) -> str | None:
    """A package's version; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def absent(modules: Sequence[str]) -> str:
    """The modules that are not installed, separated by commas."""

    def found(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:  # of the package around it
            return False

    return ", ".join(name for name in modules if not found(name))


def _output(*command: str) -> str | None:
    """What a command prints first; None where it is not installed, or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
