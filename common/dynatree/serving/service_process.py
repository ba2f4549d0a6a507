"""The process of a service: its event loop and exit status."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any

from dynatree.common.errors import EX_SOFTWARE, DeviceFailedError

log = logging.getLogger(__name__)


def run_service(serving: Coroutine[Any, Any, None]) -> int:
    """Run a service to its end; its exit status.

    If the device has failed, the process exits with status 70.
    """
    try:
        asyncio.run(serving)
    except DeviceFailedError as error:
        log.critical("%s", error)
        os._exit(EX_SOFTWARE)  # without waiting for threads of the device, which may never end
    return 0
