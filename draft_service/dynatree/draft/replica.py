"""One verify service of several: whether it serves, the target that it has, and what its rounds take."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from statistics import median

from dynatree.common.channel import Metadata
from dynatree.common.errors import FailedPreconditionError, PeerUnavailableError
from dynatree.common.model_info import ModelInfo
from dynatree.draft.target import Target
from dynatree.draft.verify_client import VerifyClient, VerifySession

log = logging.getLogger(__name__)

ASKING_SECONDS = 10.0  # for the model of a service that says that it serves
RETRY_SECONDS = 0.2  # until a service that was lost is asked again
USUAL_ROUNDS = 32  # that tell what a round takes


class Replica:
    """One verify service. `watch` follows its health; `ready` is what came of it.

    Args:
        address: For the log.
        connect: Opens a channel to it.
        draft_for: What the draft model makes of a target.
        changed: Called whenever `ready` may have changed.

    Attributes:
        target: The target, as it was told last; None before.
        sessions: Of this process that are open there.
        refusal: Why it cannot be used; None where it can, or where nobody answers.
        mismatch: That, where its target does not fit the draft model.
    """

    def __init__(
        self,
        address: str,
        connect: Callable[[], VerifyClient],
        draft_for: Callable[[ModelInfo], Target],
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        self.target: Target | None = None
        self.sessions = 0
        self.refusal: str | None = None
        self.mismatch: str | None = None
        self._connect = connect
        self._client = connect()
        self._draft_for = draft_for
        self._changed = changed
        self._serving = False
        self._known = False  # whether it has ever served
        self._renewed = False  # whether the channel is another one, so that its health is followed anew
        self._following: asyncio.Future[None] | None = None
        self._draining = False  # it has said itself that it takes no more
        self._rounds: deque[float] = deque(maxlen=USUAL_ROUNDS)

    @property
    def ready(self) -> bool:
        """Whether sessions may be opened there."""
        return self._serving and self.target is not None

    @property
    def round_seconds(self) -> float:
        """What a round took lately, the median; 0 where there was none."""
        return median(self._rounds) if self._rounds else 0.0

    def observe(self, seconds: float) -> None:
        """Take in what a round took."""
        self._rounds.append(seconds)

    async def watch(self) -> None:
        """Follow the service's health until the task is cancelled."""
        while True:
            self._following = asyncio.ensure_future(self._follow())
            try:
                await asyncio.wait([self._following])
            finally:
                self._following.cancel()
                # its end is awaited before the channel is closed, and its error is seen
                await asyncio.gather(self._following, return_exceptions=True)
            error = None if self._following.cancelled() else self._following.exception()
            if error is not None and not isinstance(error, PeerUnavailableError):
                log.error("watching the verify service at %s failed", self.address, exc_info=error)
            if self._renewed:
                self._renewed = False
                continue
            self.mismatch = None
            self._set_serving(False)
            await asyncio.sleep(RETRY_SECONDS)

    def doubt(self) -> None:
        """It did not answer in time: not ready until it answers anew."""
        self._set_serving(False)
        if self._following is not None:
            self._following.cancel()

    def reconnect(self) -> None:
        """Open a new channel, with other certificates; sessions that are open keep theirs."""
        self._client = self._connect()
        self._renewed = True
        if self._following is not None:
            self._following.cancel()

    async def answers(self, timeout: float) -> bool:
        """Whether it answers a question about its health within `timeout` seconds; one that drains need not.

        It takes no new connection by then, and serves the sessions that it has.
        """
        return await self._client.answers(timeout) or self._draining

    async def cause(self) -> str:
        """Why there is no connection; "" where that is not known."""
        return await self._client.cause()

    def session(self, timeout: float | None, metadata: Metadata = ()) -> VerifySession:
        """A stream for one session, which the caller ends."""
        return self._client.session(timeout, metadata)

    def adopt(self, info: ModelInfo) -> Target:
        """The target from now on; what rounds cost is forgotten where it gives other tokens.

        Raises:
            FailedPreconditionError: Its tokenizer is not the draft's.
        """
        known = self.target
        if known is not None and known.info.same_tokens(info):
            self.target = replace(known, info=info)
        else:
            self.target = self._draft_for(info)
            if known is not None:
                log.warning("the verify service at %s now has %s (%s)", self.address, info.name, info.dtype)
        return self.target

    def draft_with(self, draft_for: Callable[[ModelInfo], Target]) -> None:
        """Draft for its target by this from now on; what rounds cost is forgotten."""
        self._draft_for = draft_for
        if self.target is not None:
            self.target = draft_for(self.target.info)

    async def close(self) -> None:
        """Close the channel, and whatever runs on it."""
        await self._client.close()

    async def _follow(self) -> None:
        """Follow its health until it is lost."""
        async with aclosing(self._client.serving()) as answers:
            # after a change of certificates nobody may answer
            silent = asyncio.get_running_loop().call_later(ASKING_SECONDS, self._set_serving, False)
            try:
                async for serving in answers:
                    silent.cancel()
                    self._draining = not serving
                    if serving:
                        await self._ask()
                    self._set_serving(serving and self.refusal is None)
                    while serving and self.refusal is not None and self.mismatch is None:
                        await asyncio.sleep(RETRY_SECONDS)  # a token may be known by then
                        await self._ask()
                        self._set_serving(self.refusal is None)
            finally:
                silent.cancel()

    async def _ask(self) -> None:
        """Ask which target it has."""
        before, self.refusal, self.mismatch = self.refusal, None, None
        try:
            info = await self._client.model_info(ASKING_SECONDS)
        except FailedPreconditionError as error:
            self.refusal = str(error)
        else:
            try:
                self.adopt(info)
            except FailedPreconditionError as error:
                self.refusal = self.mismatch = str(error)
        if self.refusal not in (None, before):
            log.warning("%s", self.refusal)

    def _set_serving(self, serving: bool) -> None:
        if serving != self._serving and self._known:
            level, what = (logging.INFO, "serves again") if serving else (logging.WARNING, "does not serve")
            log.log(level, "the verify service at %s %s", self.address, what)
        self._serving = serving
        self._known = self._known or serving
        self._changed()
