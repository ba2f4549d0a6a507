"""The masks that a model requests from transformers: which tokens each position sees."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from dynatree.common.errors import StartupError
from dynatree.engine.kv.locality import GLOBAL, Locality

_RANDOM_ROWS = 8


def register(name: str) -> None:
    """Answer the requests of models whose attention implementation has this name with placeholders."""
    AttentionMaskInterface.register(name, _placeholder)


def _placeholder(*, mask_function: Callable[..., Tensor], device: torch.device, **_: Any) -> Tensor:
    """Return a placeholder mask that remembers the mask function of the model's request."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.shows = mask_function  # type: ignore[attr-defined]
    return mask


def locality_of(mask: Tensor, context_length: int) -> Locality:
    """Return the locality that a requested mask amounts to within the context.

    Args:
        mask: Placeholder that the model passes to its attention.
        context_length: Length of the longest served sequence, in tokens.

    Raises:
        StartupError: It is no placeholder, or the tokens that a position sees are neither all earlier ones, nor those
            of a sliding window, nor those of a chunk.
    """
    shows = getattr(mask, "shows", None)
    if shows is None:
        raise StartupError("its attention adds a mask of the model's own, which DynaTree does not compute")
    try:
        found = _found(_Pairs(shows), torch.arange(context_length, device=mask.device))
    except (IndexError, RuntimeError, TypeError):  # the mask depends on more than positions
        found = None
    if found is None:
        raise StartupError(
            f"its attention shows neither every earlier token within {context_length} tokens, nor a sliding window or "
            "a chunk of them"
        )
    return found


class _Pairs:
    """Says for pairs of a query's and a key's position whether the query sees the key."""

    def __init__(self, shows: Callable[..., Tensor]) -> None:
        self._shows = shows

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(queries.shape, keys.shape)  # type: ignore[no-untyped-call]
        first = queries.new_zeros(1)  # index in the batch, and of the head
        return self._shows(first, first, queries.expand(shape), keys.expand(shape)).expand(shape)


def _found(sees: _Pairs, positions: Tensor) -> Locality | None:
    """Return the locality of all `positions`, which are those of the context; None if it is of no known kind."""
    misses = ~sees(positions, positions[:1])
    if not misses.any():
        return GLOBAL if _agrees(sees, GLOBAL, positions) else None
    size = int(misses.int().argmax())  # the first position that does not see position 0
    return next(
        (each for each in (Locality(window=size), Locality(chunk=size)) if _agrees(sees, each, positions)), None
    )


def _agrees(sees: _Pairs, locality: Locality, positions: Tensor) -> bool:
    """Compare the bounds of the tokens that every position sees, and whole rows of the mask."""
    lowest = locality.lowest(positions)
    above = lowest > 0
    if not (sees(positions, lowest) & sees(positions, positions)).all():
        return False
    if sees(positions[above], lowest[above] - 1).any() or sees(positions[:-1], positions[1:]).any():
        return False
    return all(
        torch.equal(sees(positions[row], positions), (lowest[row] <= positions) & (positions <= row))
        for row in _rows(locality, len(positions))
    )


def _rows(locality: Locality, context_length: int) -> Iterator[int]:
    """Yield the positions whose rows are compared: around the locality's size, at the end, and random ones."""
    size = locality.window or locality.chunk or 1
    chooser = random.Random(0)
    yield from (row for row in (0, size - 1, size, 2 * size - 1, 2 * size) if row < context_length)
    yield from (context_length // 2, context_length - 1)
    yield from (chooser.randrange(context_length) for _ in range(_RANDOM_ROWS))
