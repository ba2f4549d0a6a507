"""Encodes answers as JSON: long answers in pieces on a worker thread, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

Json = dict[str, Any]
T = TypeVar("T")
PIECE_BYTES = 2**16  # handed to a connection at once
SLICE = 128  # items of a list that are encoded in one call, during which no other thread runs
LONG_BYTES = 2**18  # of an answer in memory; a longer answer is encoded on the worker thread


@dataclass(frozen=True)
class Items:
    """A list whose items are made slice by slice when it is encoded, since JSON takes less memory than the items.

    Attributes:
        count: Number of items to make.
        make: Makes the items of a slice.
        before: Items in front of them that are JSON already.
    """

    count: int
    make: Callable[[slice], Sequence[Any]]
    before: Sequence[str] = ()

    def pieces(self) -> list[str]:
        """Encode the items, without the brackets of the list."""
        slices = (slice(start, start + SLICE) for start in range(0, self.count, SLICE))
        return [*self.before, *(encode(self.make(each))[1:-1] for each in slices)]


def _made(value: Any) -> Any:
    if isinstance(value, Items) and not value.before:
        return value.make(slice(value.count))
    raise TypeError(f"{type(value).__name__} is not JSON")


encode: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_made
).encode
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="json")


async def aside(work: Callable[[], T]) -> T:
    """Run `work` on the worker thread, which does one piece of work at a time."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def encoded(answer: Json, choices: Iterable[Json] = ()) -> list[bytes]:
    """Encode an answer in pieces; its `choices` are made one by one, since all at once would take much memory."""
    return list(_gathered(_with_choices(answer, choices)))


def _with_choices(answer: Json, choices: Iterable[Json]) -> Iterator[str]:
    lead = "{"
    for name, value in answer.items():
        yield f"{lead}{encode(name)}:"
        lead = ","
        if name != "choices":
            yield from _pieces(value)
            continue
        yield "["
        for place, choice in enumerate(choices):
            yield "," if place else ""
            yield from _pieces(choice)
        yield "]"
    yield "}"


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        lead = "{"
        for name, each in value.items():
            yield f"{lead}{encode(name)}:"
            yield from _pieces(each)
            lead = ","
        yield "}"
    elif isinstance(value, Items):
        yield "["
        for place, piece in enumerate(value.pieces()):
            yield f",{piece}" if place else piece
        yield "]"
    elif isinstance(value, list) and len(value) > SLICE:
        yield from _pieces(Items(len(value), value.__getitem__))
    else:
        yield encode(value)


def _gathered(pieces: Iterable[str]) -> Iterator[bytes]:
    """Join short pieces into pieces of about `PIECE_BYTES`."""
    some: list[str] = []
    length = 0
    for piece in pieces:
        some.append(piece)
        length += len(piece)
        if length >= PIECE_BYTES:
            yield "".join(some).encode()
            some, length = [], 0
    yield "".join(some).encode()
