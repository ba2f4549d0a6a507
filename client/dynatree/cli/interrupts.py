"""What an interrupt does to the command, from its first line on.

While a command is imported and while a service starts, there is nothing to put in order but a folder that is half
written: SIGINT and SIGTERM end the process, with 128 + the signal's number. An exception would come up anywhere in
torch's import. Commands that have something to put in order ask for the exception; services, once they are ready, for a
stop of their own.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """Let both signals end the process from now on. A shell's background job goes on ignoring interrupts."""
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)  # a command that starts this one holds them back until now


@contextmanager
def blocked() -> Iterator[None]:
    """Let children that are started meanwhile take both signals only once they heed them as `end_at_once` says.

    Until then Python would write a traceback in the midst of its own start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_interrupts() -> None:
    """Let an interrupt be a `KeyboardInterrupt` from now on, where it would end the process."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def finish() -> None:
    """Let signals end the process, which has nothing left to do, where this is the program."""
    if signal.getsignal(signal.SIGTERM) is _end:
        end_at_once()


def _end(number: int, _: FrameType | None) -> None:
    sys.stdout.flush()
    if (stopping := sys.modules.get("dynatree.common.stopping")) is not None:
        stopping.remove_unfinished()
    os._exit(128 + number)
