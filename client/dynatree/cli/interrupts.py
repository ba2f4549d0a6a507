"""Signal handling of the command, from its first line on.

While a command is imported and while a service starts, only a half-written folder needs cleanup. So SIGINT and SIGTERM
end the process at once, with exit status 128 + the signal's number; an exception could surface anywhere in torch's
import. Commands that need other cleanup switch to the exception. Services install their own handlers when they are
ready.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """Make both signals end the process from now on; a signal that a background job ignores stays ignored."""
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)  # a parent command may have blocked them; see `blocked`


@contextmanager
def blocked() -> Iterator[None]:
    """Block both signals in child processes started within the context, until the child calls `end_at_once`.

    A signal before that would make Python print a traceback during its own startup.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_interrupts() -> None:
    """Make SIGINT raise `KeyboardInterrupt` from now on, if it would end the process at once."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def forget() -> None:
    """Let Python end with the command's own exit status after an interrupt that was caught.

    An interrupt in source that is being executed, as dataclasses and named tuples do on import, makes `python -m` end
    by SIGINT, whoever catches it, unless more source is executed later (`run_eval_code_obj` in its pythonrun.c).
    """
    exec("")


def finish() -> None:
    """Make signals end the process at once again, now that its work is done; only if this is the program."""
    if signal.getsignal(signal.SIGTERM) is _end:
        end_at_once()


def _end(number: int, _: FrameType | None) -> None:
    sys.stdout.flush()
    if (shutdown := sys.modules.get("dynatree.common.shutdown")) is not None:
        shutdown.remove_unfinished()
    os._exit(128 + number)
