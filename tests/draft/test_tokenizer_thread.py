"""Tests the tokenizer's thread: the order of turns, refusals, and callers who stop waiting."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.common.errors import ServiceBusyError
from dynatree.draft.text.tokenizer_thread import TokenizerThread
from dynatree.serving.fair_queue import FairQueue


class SlowTokenizer:
    """A tokenizer whose calls end on demand; `begun` are those that have begun, in order."""

    def __init__(self, thread: TokenizerThread) -> None:
        self.begun: list[str] = []
        self._thread = thread
        self._goes_on = threading.Semaphore(0)

    def ask(self, principal: str, name: str, size: int = 1) -> asyncio.Task[str]:
        """Return a caller's task."""

        def call() -> str:
            self.begun.append(name)
            assert self._goes_on.acquire(timeout=20), "nobody let it end"
            return name

        return asyncio.ensure_future(self._thread.run(principal, size, call))

    async def end(self, *tasks: asyncio.Task[str]) -> None:
        """Let the calls of these tasks end, one after another."""
        for task in tasks:
            self._goes_on.release()
            await task

    def end_cancelled(self) -> None:
        """Let a call end whose caller has stopped waiting."""
        self._goes_on.release()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, 20)

    asyncio.run(bounded())


def test_whoever_is_cancelled_leaves_its_place_and_its_text() -> None:
    """Eight long texts have been abandoned before another caller comes."""

    async def scenario() -> None:
        tokenizer = SlowTokenizer(thread := TokenizerThread(most_bytes=100))
        texts = [tokenizer.ask("a", f"a{number}", size=12) for number in range(8)]
        await settle()
        for each in texts:
            each.cancel()
        await settle()
        assert thread._waiting._size == 0
        other = tokenizer.ask("b", "b")
        tokenizer.end_cancelled()  # the one that had begun
        await tokenizer.end(other)
        assert tokenizer.begun == ["a0", "b"]

    run(scenario())


def test_one_that_is_cancelled_as_its_turn_comes_hands_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        thread = TokenizerThread()
        tokenizer = SlowTokenizer(thread)
        first, second, third = (tokenizer.ask("a", name) for name in ("first", "second", "third"))
        await settle()
        give_turn = thread._next

        def give_turn_and_cancel() -> None:
            give_turn()
            second.cancel()

        monkeypatch.setattr(thread, "_next", give_turn_and_cancel)
        await tokenizer.end(first, third)
        assert tokenizer.begun == ["first", "third"]

    run(scenario())


def test_principals_take_turns() -> None:
    async def scenario() -> None:
        tokenizer = SlowTokenizer(TokenizerThread())
        names = ["a0", "a1", "a2", "a3", "b0", "c0", "b1"]
        tasks = {}
        for name in names:
            tasks[name] = tokenizer.ask(name[0], name)
            await settle()
        order = ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]
        await tokenizer.end(*(tasks[name] for name in order))
        assert tokenizer.begun == order

    run(scenario())


def test_bytes_that_wait_are_bounded_and_whoever_has_most_makes_room() -> None:
    async def scenario() -> None:
        tokenizer = SlowTokenizer(TokenizerThread())
        running = tokenizer.ask("a", "running", size=2**30)  # not in the queue
        await settle()
        kept = [tokenizer.ask("a", f"a{number}", size=2**24) for number in range(4)]
        await settle()
        with pytest.raises(ServiceBusyError, match="64 MiB are waiting") as refused:
            await tokenizer.ask("a", "more", size=1)
        assert refused.value.retry_after is not None
        other = tokenizer.ask("b", "b", size=2**24)
        with pytest.raises(ServiceBusyError, match="64 MiB are waiting"):
            await kept[3]
        await tokenizer.end(running, kept[0], other, *kept[1:3])

    run(scenario())


def test_what_a_call_raises_is_its_callers_alone() -> None:
    async def scenario() -> None:
        thread = TokenizerThread()
        with pytest.raises(ZeroDivisionError):
            await thread.run("a", 1, lambda: 1 // 0)
        assert await thread.run("a", 1, lambda: 7) == 7

    run(scenario())


def test_a_call_for_which_no_thread_can_be_started_lets_the_next_one_run() -> None:
    async def scenario() -> None:
        tokenizer = SlowTokenizer(thread := TokenizerThread())
        first, failing, last = (tokenizer.ask("a", name) for name in ("first", "failing", "last"))
        await settle()
        submit = thread._executor.submit

        def submit_later(*_: object) -> None:
            thread._executor.submit = submit  # type: ignore[method-assign]
            raise RuntimeError("can't start new thread")

        thread._executor.submit = submit_later  # type: ignore[method-assign, assignment]
        await tokenizer.end(first)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await failing
        await tokenizer.end(last)
        assert tokenizer.begun == ["first", "last"]

    run(scenario())


@dataclass(eq=False)
class Text:
    """A waiting caller."""

    principal: str
    size: int


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(
        st.one_of(st.tuples(st.sampled_from("abc"), st.integers(0, 15)), st.just("next"), st.integers(0, 9)),
        max_size=40,
    ),
)
def test_the_queue_is_bounded_and_fair(most: int, steps: list[tuple[str, int] | str | int]) -> None:
    """It covers sizes, displaced callers, first come first served within a principal, and turns between principals."""
    queue: FairQueue[Text] = FairQueue(most)
    waiting: list[Text] = []  # by arrival
    for step in steps:
        if isinstance(step, tuple):
            newcomer, held = Text(*step), Counter[str]()
            for text in waiting:
                held[text.principal] += text.size
            own = held[newcomer.principal] + newcomer.size
            displaced = queue.displaced_by(*step)
            if displaced is None:
                assert sum(held.values()) + newcomer.size > most
                kept = held.copy()
                for text in reversed(waiting):  # a principal's excess over this one's makes no room
                    if kept[text.principal] > own:
                        kept[text.principal] -= text.size
                assert sum(kept.values()) + newcomer.size > most
                continue
            assert not displaced or sum(held.values()) + newcomer.size > most
            for text in displaced:
                assert text.principal != newcomer.principal
                assert held[text.principal] > own
                assert held[text.principal] == max(held.values())
                held[text.principal] -= text.size
                assert text is [each for each in waiting if each.principal == text.principal][-1]
                waiting.remove(text)
                queue.remove(text)
            waiting.append(newcomer)
            queue.append(newcomer)
        elif step == "next" and waiting:
            order = list(queue)
            others = {text.principal for text in waiting}
            first = queue.first()
            assert first is not None
            assert first is order[0]
            assert first is next(text for text in waiting if text.principal == first.principal)
            queue.take(first)
            waiting.remove(first)
            assert list(queue) == order[1:], "nobody left, so the order stands"
            if len(others) > 1 and waiting:
                following = queue.first()
                assert following is not None
                assert following.principal != first.principal
        elif isinstance(step, int) and waiting:
            queue.remove(waiting.pop(step % len(waiting)))
        assert len(queue) == len(waiting) == len(list(queue))
        assert sum(text.size for text in waiting) <= most
