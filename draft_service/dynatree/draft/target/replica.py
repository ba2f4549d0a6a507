"""One verify service of several: its health, its target, and the time of its rounds."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from statistics import median

from dynatree.common.errors import FailedPreconditionError, PeerUnavailableError
from dynatree.common.model_info import ModelInfo
from dynatree.draft.target.target import Target
from dynatree.draft.target.verify_client import VerifyClient, VerifyStream
from dynatree.serving.channel import Metadata

log = logging.getLogger(__name__)

ASKING_SECONDS = 10.0  # timeout of the model query to a serving service
CHECK_SECONDS = 2.0  # timeout of the health check after the health stream ended
RETRY_SECONDS = 0.2  # delay before a lost or refusing service is queried again
USUAL_ROUNDS = 32  # rounds over which the median round time is taken


class Replica:
    """One verify service. `watch` follows its health, and `ready` is the result.

    Args:
        address: Address for the log.
        connect: Opens a channel to the service.
        build_target: Builds a `Target` from a target's model info.
        changed: Called whenever `ready` may have changed.

    Attributes:
        target: The last known target; None before the first.
        sessions: Number of this process's sessions on the service.
        refusal: Why the service cannot be used; None if it can be used or does not answer.
        mismatch: The refusal, if the reason is a target that does not fit the draft model; else None.
    """

    def __init__(
        self,
        address: str,
        connect: Callable[[], VerifyClient],
        build_target: Callable[[ModelInfo], Target],
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        self.target: Target | None = None
        self.sessions = 0
        self.refusal: str | None = None
        self.mismatch: str | None = None
        self._connect = connect
        self._client = connect()
        self._build_target = build_target
        self._changed = changed
        self._serving = False
        self._known = False  # whether it has ever served
        self._renewed = False  # whether the channel was replaced, so that `watch` must start on the new one
        self._following: asyncio.Future[None] | None = None
        self._draining = False  # whether the service has announced that it takes no new sessions
        self._rounds: deque[float] = deque(maxlen=USUAL_ROUNDS)

    @property
    def ready(self) -> bool:
        """Whether sessions may be opened on the service."""
        return self._serving and self.target is not None

    @property
    def round_seconds(self) -> float:
        """Usual seconds of a round: the median of recent ones, at least a forward pass as announced; 0 if unknown."""
        announced = self.target.info.forward_costs[:1] if self.target else ()
        passes = [each.seconds for each in announced]
        return max([*passes, median(self._rounds)] if self._rounds else passes, default=0.0)

    def observe(self, seconds: float) -> None:
        """Take in the seconds of a round."""
        self._rounds.append(seconds)

    async def watch(self) -> None:
        """Follow the service's health until the task is cancelled."""
        while True:
            self._following = asyncio.ensure_future(self._follow())
            try:
                await asyncio.wait([self._following])
            finally:
                self._following.cancel()
                # wait for its end before the channel is closed, and retrieve its error
                await asyncio.gather(self._following, return_exceptions=True)
            error = None if self._following.cancelled() else self._following.exception()
            if error is not None and not isinstance(error, PeerUnavailableError):
                log.error("watching the verify service at %s failed", self.address, exc_info=error)
            if self._renewed:
                self._renewed = False
                continue
            if not (self._serving and await self._client.answers(CHECK_SECONDS)):  # else a connection was too old
                self.mismatch = None
                self._set_serving(False)
            await asyncio.sleep(RETRY_SECONDS)

    def doubt(self) -> None:
        """Mark the service as not ready, after a late answer, until its health is known again."""
        self._set_serving(False)
        if self._following is not None:
            self._following.cancel()

    def reconnect(self) -> None:
        """Open a new channel, with the new certificates; open sessions keep the old channel."""
        self._client = self._connect()
        self._renewed = True
        if self._following is not None:
            self._following.cancel()

    async def answers(self, timeout: float) -> bool:
        """Whether the service answers a health check within `timeout` seconds, or is draining.

        A draining service takes no new connection but still serves its sessions.
        """
        return await self._client.answers(timeout) or self._draining

    async def cause(self) -> str:
        """Return why there is no connection; "" if that is not known."""
        return await self._client.cause()

    async def tokenizer_files(self, timeout: float) -> dict[str, bytes]:
        """Return the contents of the files of the target's tokenizer, by name.

        Raises:
            PeerUnavailableError: The service is out of reach.
            FailedPreconditionError: The service is too old to send them, or refuses to.
        """
        return await self._client.tokenizer_files(timeout)

    def stream(self, timeout: float | None, metadata: Metadata = ()) -> VerifyStream:
        """Open a stream for one session; the caller ends it."""
        return self._client.stream(timeout, metadata)

    def adopt(self, info: ModelInfo) -> Target:
        """Set the target and return it; measured costs are dropped if the new target gives other tokens.

        Raises:
            FailedPreconditionError: The target's tokenizer is not the draft's.
        """
        known = self.target
        if known is not None and known.info.same_tokens(info):
            self.target = replace(known, info=info)
        else:
            self.target = self._build_target(info)
            if known is not None:
                log.warning("the verify service at %s now has %s (%s)", self.address, info.name, info.dtype)
        return self.target

    def rebuild_with(self, build_target: Callable[[ModelInfo], Target]) -> None:
        """Replace `build_target` and rebuild the target with it; measured costs are dropped."""
        self._build_target = build_target
        if self.target is not None:
            self.target = build_target(self.target.info)

    async def close(self) -> None:
        """Close the channel and all calls on it."""
        await self._client.close()

    async def _follow(self) -> None:
        """Follow the health of the service until the service is lost."""
        async with aclosing(self._client.serving()) as answers:
            # after a change of certificates the service may never answer
            silent = asyncio.get_running_loop().call_later(ASKING_SECONDS, self._set_serving, False)
            try:
                async for serving in answers:
                    silent.cancel()
                    self._draining = not serving
                    if serving:
                        await self._ask()
                    self._set_serving(serving and self.refusal is None)
                    while serving and self.refusal is not None and self.mismatch is None:
                        await asyncio.sleep(RETRY_SECONDS)  # the service may accept the token by then
                        await self._ask()
                        self._set_serving(self.refusal is None)
            finally:
                silent.cancel()

    async def _ask(self) -> None:
        """Ask the service for its target."""
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
            level = logging.INFO if serving or self._draining else logging.WARNING
            log.log(level, "the verify service at %s %s", self.address, "serves again" if serving else "does not serve")
        self._serving = serving
        self._known = self._known or serving
        self._changed()
