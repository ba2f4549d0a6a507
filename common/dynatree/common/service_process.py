"""What `dynatree verify` and `dynatree draft` share once their arguments are read: settings, running until a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dynatree.common import embedded
from dynatree.common.engine import ModelSettings
from dynatree.common.errors import EX_SOFTWARE, DeviceFailedError
from dynatree.common.logs import configure_logging

log = logging.getLogger(__name__)


def model_settings(
    options: argparse.Namespace,
    model: str,
    embedded_path: Path,
    speculative_slots: int,
    measured_rows: int = 0,
    chooses_tokens: bool = True,
    resident_layers: int | None = None,
    layer_cache: Path | None = None,
    tensor_parallel: int = 1,
) -> ModelSettings:
    """Settings from parsed options; the name "embedded" means the shipped model at `embedded_path`."""
    return ModelSettings(
        model=str(embedded_path) if model == embedded.NAME else model,
        device=options.device,
        dtype=options.dtype,
        sessions=options.max_sessions,
        kv_tokens=options.kv_tokens,
        max_context=options.max_context,
        speculative_slots=speculative_slots,
        fixed_rows=options.fixed_rows,
        measured_rows=measured_rows,
        chooses_tokens=chooses_tokens,
        threads=options.threads,
        resident_layers=resident_layers,
        layer_cache=layer_cache,
        tensor_parallel=tensor_parallel,
    )


def run_service(serve: Callable[[], Coroutine[Any, Any, None]], options: argparse.Namespace) -> int:
    """Run a service to its end.

    A device that has failed ends the process with status 70.
    """
    configure_logging(options.log_format, options.log_level)
    try:
        asyncio.run(serve())
    except DeviceFailedError as error:
        log.critical("%s", error)
        os._exit(EX_SOFTWARE)  # what is left of the device's threads may never end
    return 0
