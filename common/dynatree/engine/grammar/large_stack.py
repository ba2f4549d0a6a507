"""Runs work that may recurse deeply in native code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_STACK = 2**29  # bytes of addresses, of which only those in use take memory
_starting = threading.Lock()


def on_large_stack(work: Callable[[], T]) -> T:
    """Run work in a new thread, whose stack suffices for any grammar of `MAX_GRAMMAR_BYTES`, and return its result.

    The compiler of llguidance follows references recursively. An overflow of the stack would end the process.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _starting:  # the size applies to all threads that start meanwhile
        usual = threading.stack_size(_STACK)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return outcome.result()
