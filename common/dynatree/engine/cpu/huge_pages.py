"""Requests huge pages for weights, checks the result, and logs it.

A core's TLB holds a few thousand pages of 4 KiB; weights in pages of 2 MiB are read up to a fifth faster. The kernel
may silently refuse huge pages if memory is fragmented or full of cached files. So memory in small pages is moved
(MADV_COLLAPSE, Linux 6.1), and the share of huge pages is logged at startup.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20  # bytes, on x86 and on most ARM machines
_ADVISE_HUGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE and MADV_COLLAPSE of madvise(2)
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ENOUGH = 0.9  # share of the bytes that huge pages can hold
_WORTH_A_WORD = 1 << 28  # bytes of weights below which nothing is logged: small models stay in caches or gain little


def use_huge_pages(weights: Iterable[Tensor], name: str) -> float | None:
    """Move weights into huge pages and log the share that was moved.

    Args:
        weights: Tensors in this process's memory.
        name: Name of the model, for the log.

    Returns:
        The share of the bytes in huge pages, relative to the bytes that fit into them; None if it is unknown.
    """
    if platform.system() != "Linux":
        return None
    spans = sorted({span for span in map(_whole_pages, weights) if span[0] < span[1]})
    size = sum(stop - start for start, stop in spans)
    if not size:
        return None
    refusal = 0
    for start, stop in spans:
        refusal = _madvise(start, stop, _ADVISE_HUGE) or _madvise(start, stop, _COLLAPSE) or refusal
    huge = _huge_bytes(spans)
    if huge is None:
        return None
    share = min(1.0, huge / size)
    if size < _WORTH_A_WORD:
        return share
    if share >= _ENOUGH:
        log.info("%s: %.0f %% of the weights lie in huge pages", name, 100 * share)
    else:
        log.warning(
            "%s: only %.0f %% of the weights lie in huge pages, so steps are up to a fifth slower; %s",
            name,
            100 * share,
            _remedy(refusal),
        )
    return share


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """Return the start address of the first huge page within a tensor, and the end address of the last one."""
    start = tensor.data_ptr()
    return -(-start // HUGE_PAGE) * HUGE_PAGE, (start + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE


def _madvise(start: int, stop: int, advice: int) -> int:
    """Call madvise(2) and return 0, or the errno of its failure."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice) == 0:
        return 0
    return ctypes.get_errno()


def _huge_bytes(spans: list[tuple[int, int]]) -> int | None:
    """Return the bytes of huge pages in the mappings that hold the spans; None if the kernel does not report them."""
    huge, holds, told = 0, False, False
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                head = line.split(" ", 1)[0]
                if "-" in head and not head.endswith(":"):
                    first, last = (int(each, 16) for each in head.split("-"))
                    holds = any(first < stop and start < last for start, stop in spans)
                elif head == "AnonHugePages:":
                    told = True
                    huge += 1024 * int(line.split()[1]) if holds else 0
    except OSError:
        return None
    return huge if told else None


def _remedy(refusal: int) -> str:
    try:
        enabled = _ENABLED.read_text()
    except OSError:
        return "this kernel has none"
    if "[never]" in enabled:
        return f"allow them: echo madvise > {_ENABLED}"
    reason = f" ({errno.errorcode.get(refusal, refusal)})" if refusal else ""
    return (
        f"the kernel found no free ones{reason}: empty the page cache and put memory together "
        f"(echo 1 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory), then start again"
    )
