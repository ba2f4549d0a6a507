"""What `dynatree verify` and `dynatree draft` share once their arguments are read: settings, running until a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dynatree.common import embedded
from dynatree.common.engine import ModelSettings
from dynatree.common.errors import StartupError


def model_settings(
    options: argparse.Namespace,
    model: str,
    embedded_path: Path,
    speculative_slots: int,
    measured_rows: int = 0,
    chooses_tokens: bool = True,
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
        static_shapes=options.static_shapes,
        measured_rows=measured_rows,
        chooses_tokens=chooses_tokens,
        threads=options.threads,
    )


def run_service(serve: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a service to its end; a failure to start is one line and exit status 1."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("dynatree").setLevel(logging.INFO)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_cancellation)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every try to reach the hub

    try:
        asyncio.run(serve())
    except StartupError as error:
        raise SystemExit(str(error)) from error
    return 0


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a log record is not of a call that a stop has cancelled, which gRPC now and then calls an error."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def announce(text: str) -> None:
    """Tell whoever started the service where it is, on standard error."""
    print(text, file=sys.stderr, flush=True)
