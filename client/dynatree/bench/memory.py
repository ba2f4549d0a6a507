"""The peak resident memory of processes while something runs, by Linux's /proc."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_RESET_PEAK = "5"  # proc(5), clear_refs


@dataclass(frozen=True)
class PeakMemory:
    """Process ids by name; None for a process of another machine."""

    processes: Mapping[str, int | None]

    def reset(self) -> None:
        """From now on the peaks are of what follows."""
        for process in filter(None, self.processes.values()):
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text(_RESET_PEAK)

    def read(self) -> dict[str, int | None]:
        """Each process's peak resident size in bytes since `reset`; None where it is not known."""
        return {name: _peak(process) for name, process in self.processes.items()}


def _peak(process: int | None) -> int | None:
    if process is None:
        return None
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if kilobytes is None else 1024 * int(kilobytes)
