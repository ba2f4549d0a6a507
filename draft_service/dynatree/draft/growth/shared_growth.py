"""Growth of many sessions' trees at once: each draft forward pass reads one level of every growing tree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from dynatree.draft.growth.drafter import Drafter, Expansion, Growing, Spent
from dynatree.engine.model_thread import ModelThread

T = TypeVar("T")

PROMPT_TOKENS = 256  # upper bound on prompt tokens in a forward pass of several prompts
LEAST_PROMPT = 32  # unread tokens above which an expansion counts as a prompt, not as a remainder of recent rounds


@dataclass(eq=False)
class _Task:
    """The growth of one session: the expansion that it waits for, or its result or error."""

    begin: Callable[[], Growing[Any]]
    future: asyncio.Future[Any]
    growing: Growing[Any] | None = None
    wanted: Expansion | None = None
    result: Any = None
    error: Exception | None = None

    def advance(self, spent: Spent | None) -> None:
        """Run to the next expansion or to the end; `spent` is the time of the last expansion."""
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
        """Set the result or the error of the future, unless it is cancelled."""
        if self.future.cancelled():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class SharedGrowth:
    """Runs generators of expansions; in each step one forward pass reads the expansions that they wait for.

    All steps run on the model thread. A task that arrives between two steps joins the next step. A cancelled task takes
    part in no further step, so its session may then be closed on that thread at any time.
    """

    def __init__(self, drafter: Drafter, thread: ModelThread) -> None:
        self._drafter = drafter
        self._thread = thread
        self._tasks: list[_Task] = []
        self._stepping: asyncio.Task[None] | None = None

    def run(self, begin: Callable[[], Growing[T]]) -> asyncio.Future[T]:
        """Run a generator of expansions on the model thread, and return the future of its result."""
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
                task.future.cancel()  # no caller must wait for a loop that has ended
            self._tasks = []
            raise
        finally:
            self._stepping = None

    def _step(self, tasks: list[_Task]) -> None:
        """Advance the tasks to their next expansion or their end, with one forward pass for all of them."""
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
            for task in taken:  # each alone, so that only the faulty task fails
                self._step([task])
            return
        for task, each in zip(taken, spent, strict=True):
            task.advance(each)


def _taken(expansions: Mapping[_Task, Expansion]) -> list[_Task]:
    """Choose the tasks of a step: every level of a tree, and prompts up to `PROMPT_TOKENS`, but at least one prompt."""
    taken, prompt_tokens = [], 0
    for task, expansion in expansions.items():
        if expansion.unread > LEAST_PROMPT:
            if prompt_tokens and prompt_tokens + expansion.unread > PROMPT_TOKENS:
                continue
            prompt_tokens += expansion.unread
        taken.append(task)
    return taken


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future that no caller awaits any more, so that asyncio does not log it."""
    with suppress(asyncio.CancelledError):
        future.exception()
