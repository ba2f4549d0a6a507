"""A cache of a checkpoint's layers as files in the layout of the CPU's kernels, written once.

A folder holds one checkpoint in one dtype and layout. Its table, `layers.json`, is written last. A folder without a
table is unfinished and is written again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynatree.common.errors import StartupError
from dynatree.common.shutdown import unfinished
from dynatree.engine.model.weight_files import WeightFiles
from dynatree.engine.offload.layer_file import LayerFile, Place, named, remedy, write_layer

log = logging.getLogger(__name__)

_TABLE = "layers.json"
_FORMAT = 4  # version of the table and the files, which is part of the folder's name
_ROOT = 0  # user id of root
_SPARE = 1 << 28  # bytes that must stay free on the disk

Build = Callable[[int], tuple[dict[str, Tensor], dict[str, list[Any]]]]


@dataclass(frozen=True)
class CachedLayer:
    """One layer's file, and the sums of its weights for the model's fingerprint."""

    file: LayerFile
    sums: dict[str, list[Any]]


def default_folder() -> Path:
    """Return the default folder of caches, below XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynatree" / "layers"


def cached_layers(root: Path, files: WeightFiles, layout: str, layers: int, build: Build) -> list[CachedLayer]:
    """Return the cached files of a model's layers; write them first if they do not exist.

    Args:
        root: Folder of all caches.
        files: Files of the model's weights.
        layout: Name of the tensors' layout.
        layers: Number of layers.
        build: Returns the tensors of a layer in that layout, and the sums for the fingerprint, of the layer's number.

    Raises:
        StartupError: The disk is full or fails, or the table of a cache cannot be read.
    """
    name = hashlib.sha256(f"{_FORMAT} {layout} {files.identity()}".encode()).hexdigest()[:16]
    folder = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        for each in (root, folder):
            _check_owner(each)
        if not (folder / _TABLE).exists():  # a finished cache needs no lock: its disk may be read-only
            with _alone(folder):
                if not (folder / _TABLE).exists():
                    with unfinished(folder):
                        return _write(folder, files.name, layers, build)
        return _read_table(folder)
    except OSError as error:
        raise StartupError(
            f"the layer cache at {root} cannot be written or read: {error.strerror or error}; expected a folder that "
            f"can be written, by --layer-cache"
        ) from error


def _check_owner(folder: Path) -> None:
    """Refuse a folder where another user could place weights, or links to files that would be overwritten.

    Raises:
        StartupError: The folder belongs to another user, who is not root.
    """
    if folder.exists() and folder.stat().st_uid not in (_ROOT, os.geteuid()):
        raise StartupError(
            f"the layer cache's folder {folder.name} belongs to another user; expected one of this service's user or "
            f"of root, by --layer-cache"
        )


def _write(folder: Path, model: str, layers: int, build: Build) -> list[CachedLayer]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        written = [_write_layer(folder, layer, layers, model, build) for layer in range(layers)]
        _write_table(folder, [_row(each) for each in written])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return written


def _write_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the table, and sync it and its folders to the disk."""
    unfinished = folder / f"{_TABLE}.new"
    with unfinished.open("w") as file:
        json.dump({"layers": rows, "sum": _sum_of(rows)}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / _TABLE)
    for each in (folder, folder.parent):
        descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # some file systems cannot sync folders
            os.fsync(descriptor)
        os.close(descriptor)


def _sum_of(rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _write_layer(folder: Path, layer: int, layers: int, model: str, build: Build) -> CachedLayer:
    tensors, sums = build(layer)
    if layer == 0:
        size = layers * sum(tensor.nbytes for tensor in tensors.values())
        _check_room(folder, size)
        log.info("%s: writing the layer cache %s, %.2f GB, once", model, folder, size / 1e9)
    return CachedLayer(write_layer(folder / f"layer-{layer:03}.bin", tensors), sums)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE:
        raise StartupError(
            f"the layer cache needs {(needed + _SPARE) / 1e9:.2f} GB, of which {_SPARE / 1e9:.2f} GB stay free, but "
            f"its disk has {free / 1e9:.2f} GB left; expected another --layer-cache, or --resident-layers all"
        )


def _row(each: CachedLayer) -> dict[str, Any]:
    places = {
        name: [place.offset, str(place.dtype).removeprefix("torch."), list(place.shape)]
        for name, place in each.file.places.items()
    }
    return {"size": each.file.size, "pieces": each.file.sums, "places": places, "sums": each.sums}


def _read_table(folder: Path) -> list[CachedLayer]:
    try:
        table = json.loads((folder / _TABLE).read_text())
        rows = table["layers"]
        if table["sum"] != _sum_of(rows):
            raise ValueError("it differs from the table that was written")
        cached = []
        for layer, row in enumerate(rows):
            places = {
                name: Place(offset, getattr(torch, dtype), tuple(shape))
                for name, (offset, dtype, shape) in row["places"].items()
            }
            path = folder / f"layer-{layer:03}.bin"
            cached.append(CachedLayer(LayerFile(path, row["size"], tuple(row["pieces"]), places), row["sums"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StartupError(f"the table of the layer cache cannot be read; {remedy(folder / _TABLE)}") from error
    for each in cached:
        size = each.file.path.stat().st_size if each.file.path.exists() else 0
        if size != each.file.size:
            raise StartupError(
                f"{named(each.file.path)} has {size} bytes, expected {each.file.size}; {remedy(each.file.path)}"
            )
    return cached


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of this cache; another service waits for it, and then finds the cache written."""
    path = folder.with_suffix(".lock")
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another service, which writes the layer cache %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
