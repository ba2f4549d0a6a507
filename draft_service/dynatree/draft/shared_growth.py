"""Growing the trees of many sessions at once: one draft forward a level over all that grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from dynatree.common.model_thread import ModelThread
from dynatree.draft.drafter import Drafter, Expansion, Growing, Spent

T = TypeVar("T")

PROMPT_TOKENS = 256  # of prompts in a forward at most
LEAST_PROMPT = 32  # unread tokens; fewer are what a session has not read of its last rounds


@dataclass(eq=False)
class _Task:
    """What one session grows: the expansion that it waits for, or how it ended."""

    begin: Callable[[], Growing[Any]]
    future: asyncio.Future[Any]
    growing: Growing[Any] | None = None
    wanted: Expansion | None = None
    result: Any = None
    error: Exception | None = None

    def advance(self, spent: Spent | None) -> None:
        """Go on to the next expansion, or to the end; `spent` is what the last expansion took."""
        self.wanted = None
        try:
            if spent is None:
                self.growing = self.begin()
                self.wanted = next(self.growing)
            else:
                assert self.growing is not None, "a task begins before it goes on"
                self.wanted = self.growing.send(spent)
        except StopIteration as end:
            self.result = end.value
        except Exception as error:
            self.error = error

    def settle(self) -> None:
        """Hand on how it ended, unless nobody waits any more."""
        if self.future.cancelled():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class SharedGrowth:
    """Runs whatever asks for expansions; in each step one forward reads what all of them wait for.

    Everything runs on the model thread, a step at a time. Who comes between two steps joins the next one. What is
    cancelled takes part in no further step, so its session may be closed on the thread at any time after.
    """

    def __init__(self, drafter: Drafter, thread: ModelThread) -> None:
        self._drafter = drafter
        self._thread = thread
        self._tasks: list[_Task] = []
        self._stepping: asyncio.Task[None] | None = None

    def run(self, begin: Callable[[], Growing[T]]) -> asyncio.Future[T]:
        """Begin on the model thread, and go on to the end; the future of what is returned or raised."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._tasks.append(_Task(begin, future))
        if self._stepping is None:
            self._stepping = asyncio.ensure_future(self._run())
        return future

    async def _run(self) -> None:
        tasks: list[_Task] = []
        try:
            while self._tasks:
                tasks, self._tasks = self._tasks, []
                await self._thread.run(self._step, tasks)
                for task in tasks:
                    if task.wanted is None:
                        task.settle()
                self._tasks[:0] = [task for task in tasks if task.wanted is not None]
        except BaseException:
            for task in (*tasks, *self._tasks):
                task.future.cancel()  # nobody must wait for a loop that has ended
            self._tasks = []
            raise
        finally:
            self._stepping = None

    def _step(self, tasks: list[_Task]) -> None:
        """Advance every task to its next expansion or its end, with one forward over what they wait for."""
        for task in tasks:
            if task.future.cancelled():
                task.wanted = None
            elif task.growing is None:
                task.advance(None)
        expansions = {task: task.wanted for task in tasks if task.wanted is not None}
        taken = _taken(expansions)
        if not taken:
            return
        try:
            spent = self._drafter.expand_all([expansions[task] for task in taken])
        except Exception as error:
            if len(taken) == 1:
                taken[0].wanted, taken[0].error = None, error
                return
            for task in taken:  # each by itself, so that only the one at fault fails
                self._step([task])
            return
        for task, each in zip(taken, spent, strict=True):
            task.advance(each)


def _taken(expansions: Mapping[_Task, Expansion]) -> list[_Task]:
    """Whose turn it is: every level of a tree, and as much of prompts as does not hold those up, one at least."""
    taken, prompt_tokens = [], 0
    for task, expansion in expansions.items():
        if expansion.unread > LEAST_PROMPT:
            if prompt_tokens and prompt_tokens + expansion.unread > PROMPT_TOKENS:
                continue
            prompt_tokens += expansion.unread
        taken.append(task)
    return taken


def _retrieve(future: asyncio.Future[Any]) -> None:
    """A failure that nobody waits for any more need not be logged by asyncio."""
    with suppress(asyncio.CancelledError):
        future.exception()
