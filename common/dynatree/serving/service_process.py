"""The process of a service: its event loop and exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from dynatree.common.errors import EX_SOFTWARE, DeviceFailedError

log = logging.getLogger(__name__)


def run_service(serving: Coroutine[Any, Any, None], calls_left: Callable[[], bool] = lambda: False) -> int:
    """Run a service to its end; its exit status.

    If the device has failed, the process exits with status 70. If `calls_left` says that threads still run calls whose
    results nobody needs, the process exits with status 0 at once, since Python would wait for the threads.
    """
    try:
        asyncio.run(serving)
    except DeviceFailedError as error:
        log.critical("%s", error)
        os._exit(EX_SOFTWARE)  # without waiting for threads of the device, which may never end
    if calls_left():
        sys.stdout.flush()
        logging.shutdown()  # flushes the log
        os._exit(0)
    return 0
