"""Which model is loaded, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dynatree.common.limits import MAX_SESSIONS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSettings:
    """Which model to load, and how.

    Attributes:
        model: A hub name or a local path.
        device: A torch device, or "auto" for the first GPU if any.
        dtype: A key of `DTYPES`, or "auto" for the checkpoint's own.
        sessions: Sequences that can be open at once.
        kv_tokens: Slots of the KV arena; None: what the sessions can need, as far as the memory goes.
        max_context: Longest sequence that is served, in tokens; None: the model's own.
        speculative_slots: KV slots of each session for tokens that are not committed.
        fixed_rows: Numbers of rows that forwards are padded to, and on a GPU captured for. One number makes tokens
            independent of the tree, the batch and its neighbours; none: rows as they come. None means the device's
            default: none on a CPU, and on a GPU the number that its costs suggest.
        measured_rows: Rows of the largest forward whose cost is measured; 0: none is.
        chooses_tokens: Whether the model is a target, whose generation_config is adopted or refused. A draft only
            guesses, so its generation_config does not matter.
        threads: Of the CPU; None: torch's choice.
        resident_layers: That stay in memory; the others are streamed. None: all, if they fit.
        layer_cache: The folder of layer caches; None: the user's.
        tensor_parallel: Devices over which every layer is cut.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    sessions: int = MAX_SESSIONS
    kv_tokens: int | None = None
    max_context: int | None = None
    speculative_slots: int = 256
    fixed_rows: tuple[int, ...] | None = None
    measured_rows: int = 0
    chooses_tokens: bool = True
    threads: int | None = None
    resident_layers: int | None = None
    layer_cache: Path | None = None
    tensor_parallel: int = 1
