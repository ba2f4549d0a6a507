"""Preparation of the file of a Unix socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dynatree.common.errors import StartupError


def prepare_socket(path: Path) -> None:
    """Create a missing folder, private to this user, and refuse a socket on which another server answers.

    Raises:
        StartupError: The folder cannot be created, or another server answers.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot listen on unix:{path}: {error.strerror}") from error
    if not os.path.lexists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # left behind by a stopped server; gRPC replaces it
    raise StartupError(f"cannot listen on unix:{path}: another server listens there")
