"""The number of slots of the KV cache: as requested, or the sessions' largest need, limited by free memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from dynatree.common.errors import StartupError

CPU_SHARE = 0.5  # share of the memory that is free after the weights are loaded; leaves room for other programs
GPU_SHARE = 0.85
_RUNNING = 1 << 28  # bytes of file pages in constant use: the interpreter and its libraries
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class KVBudget:
    """The needs of the sessions, from which the size of the KV cache follows.

    Attributes:
        sessions: Number of sessions that may be open at once.
        session_slots: Largest number of slots of one session: the context and its speculative slots.
        slot_bytes: Bytes of a slot.
        device: Device that holds the KV cache.
        copy_bytes: Bytes that the weights of the model's own copy will take on the device; 0 without a copy.
        session_bytes: Bytes that the recurrent layers keep of a session and of an entry of the prefix cache, of which
            there may be as many.
        pass_bytes: Bytes that they keep of the tokens of one forward pass.
        weight_bytes: Bytes of the model's weights on the device that are not loaded yet.
    """

    sessions: int
    session_slots: int
    slot_bytes: int
    device: torch.device
    copy_bytes: int = 0
    session_bytes: int = 0
    pass_bytes: int = 0
    weight_bytes: int = 0

    def slots(self, asked: int | None) -> int:
        """Return the KV cache's slots: `asked`, or if it is None, the sessions' largest need, limited by free memory.

        Raises:
            StartupError: The slots cannot hold one session of the whole context, or do not fit into the memory.
        """
        share, sessions, free = self._share, self.fitting_sessions, self._free
        if free is not None and self.session_bytes:
            free -= sessions * self.session_bytes + self.pass_bytes
        if asked is None:
            most = sessions * self.session_slots
            slots = most if free is None or not self.slot_bytes else min(most, int(share * free) // self.slot_bytes)
            if slots < self.session_slots:
                raise StartupError(
                    f"the KV cache of one session takes {_gib(self.session_slots * self.slot_bytes)} "
                    f"({self.session_slots} slots of {self.slot_bytes} bytes), but only "
                    f"{_gib(slots * self.slot_bytes)} of the free {_gib(free or 0)} may be used; lower --max-context"
                )
            return slots
        if asked < self.session_slots:
            raise StartupError(
                f"--kv-tokens is {asked}, but one session can need {self.session_slots} (the context and a tree); "
                f"expected at least {self.session_slots}, or a lower --max-context"
            )
        if free is not None and asked * self.slot_bytes > free:
            raise StartupError(
                f"--kv-tokens {asked} takes {_gib(asked * self.slot_bytes)} ({self.slot_bytes} bytes each), but only "
                f"{_gib(free)} are free; expected at most {free // self.slot_bytes}"
            )
        return asked

    @cached_property
    def fitting_sessions(self) -> int:
        """Number of sessions, at most `sessions`, of which the recurrent layers may keep as much as they need.

        Raises:
            StartupError: Not even one session's fits.
        """
        if self._free is None or not self.session_bytes:
            return self.sessions
        usable = int(self._share * self._free)
        most = (usable - self.pass_bytes) // self.session_bytes
        if most < 1:
            raise StartupError(
                f"the recurrent layers of one session and of its cached prefix take "
                f"{_gib(self.session_bytes + self.pass_bytes)}, but only {_gib(usable)} of the free "
                f"{_gib(self._free)} may be used; expected more memory, or --prefix-cache off"
            )
        return min(self.sessions, most)

    @cached_property
    def _free(self) -> int | None:
        """Free bytes of the device without those of a copy; None if unknown."""
        free = free_memory(self.device)
        if free is None:
            return None
        left = max(free - self.copy_bytes - self.weight_bytes, 0)
        return left // 2 if self.copy_bytes else left  # the copy has a KV cache as well

    @property
    def _share(self) -> float:
        return GPU_SHARE if self.device.type == "cuda" else CPU_SHARE


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of the device, or of this process's control group on a CPU; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [free for free in (_machine_free(), _group_free()) if free is not None]
    return min(known, default=None)


def _machine_free() -> int | None:
    """Return MemAvailable, Linux's estimate of the memory available without swapping, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kilobytes is None else 1024 * int(kilobytes)


def _group_free() -> int | None:
    """Return the bytes that a container may still use: its limit, less its usage without reclaimable file pages."""
    found = [_left(folder, names) for folder, names in _groups()]
    return min((free for free in found if free is not None), default=None)


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Control groups that may limit this process's memory, with the names of their files.

    Version 2 comes before version 1. Each version has this process's own group and the root group that a container
    sees. The names are the file of the limit, the file of the usage, and the prefix of sums over subgroups.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    own = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    second = ("memory.max", "memory.current", "")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    yield _CGROUP / own.get("", ""), second
    yield _CGROUP, second
    yield _CGROUP / "memory" / own.get("memory", ""), first
    yield _CGROUP / "memory", first


def _left(folder: Path, names: tuple[str, str, str]) -> int | None:
    limit_name, held_name, prefix = names
    try:
        limit = (folder / limit_name).read_text().strip()
        held = int((folder / held_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    inactive, active = (int(statistics.get(f"{prefix}{each}_file", 0)) for each in ("inactive", "active"))
    dropped = inactive + max(active - _RUNNING, 0)
    return None if limit == "max" else max(int(limit) - held + dropped, 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
