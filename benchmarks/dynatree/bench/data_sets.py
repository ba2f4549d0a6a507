"""Columns of Hugging Face data sets, from the hub or a local folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DataSet:
    """One split of a data set: its name as given, without the path if it is a local folder, and its rows."""

    name: str
    rows: Sequence[Mapping[str, Any]]


def load_data_set(source: str, split: str) -> DataSet:
    """Load a split of the data set `NAME` or `NAME:CONFIG`.

    Raises:
        SystemExit: The data set cannot be loaded.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise SystemExit(
            f"there is no file {source}; to look for a data set of this name install dynatree with its extra [bench]"
        ) from None
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt to reach the hub
    name, _, configuration = source.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the library, its readers and the hub client each raise their own types here
        reason = str(error).partition("\n")[0]
        raise SystemExit(f"there is no file {source}, and no data set of this name could be loaded: {reason}") from None
    local = Path(name)
    return DataSet(source.replace(name, local.resolve().name, 1) if local.is_dir() else source, rows)
