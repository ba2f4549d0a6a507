"""JSON of answers. A long one is made in pieces on a thread of its own, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

Json = dict[str, Any]
T = TypeVar("T")
PIECE_BYTES = 2**16  # that are handed to a connection at once
SLICE = 128  # items of a list that are encoded at once: for so long no other thread runs
LONG_BYTES = 2**18  # of an answer in memory; a longer one is encoded on the worker thread


@dataclass(frozen=True)
class Items:
    """A list that is made slice by slice, when it is encoded: as JSON it takes a part of the memory.

    Attributes:
        count: Of those that are made.
        make: Makes those of a slice.
        before: What stands before them, as JSON already.
    """

    count: int
    make: Callable[[slice], Sequence[Any]]
    before: Sequence[str] = ()

    def pieces(self) -> list[str]:
        """JSON of the items, without the brackets around them all."""
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
    """Do it on the thread for long JSON, one at a time."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def encoded(answer: Json, choices: Iterable[Json] = ()) -> list[bytes]:
    """An answer in pieces, whose `choices` are given one by one, since all of them at once would take much memory."""
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
    """The pieces, several together where they are short."""
    some: list[str] = []
    length = 0
    for piece in pieces:
        some.append(piece)
        length += len(piece)
        if length >= PIECE_BYTES:
            yield "".join(some).encode()
            some, length = [], 0
    yield "".join(some).encode()
