"""The peak resident memory of processes while something runs, from Linux's /proc."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_RESET_PEAK = "5"  # proc(5), clear_refs


@dataclass(frozen=True)
class PeakMemory:
    """Measures the peak memory of processes, given by name and id; the id is None for a process of another machine."""

    processes: Mapping[str, int | None]

    def reset(self) -> None:
        """Reset the peaks, so that `read` reports those since this call."""
        for process in filter(None, self.processes.values()):
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text(_RESET_PEAK)

    def read(self) -> dict[str, int | None]:
        """Each process's peak resident size in bytes since `reset`; None if not known."""
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
