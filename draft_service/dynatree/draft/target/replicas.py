"""The verify services behind a draft service: discovery, health and choice."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from dynatree.common.errors import FailedPreconditionError, PeerUnavailableError, StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.draft.target.replica import Replica
from dynatree.draft.target.target import Target
from dynatree.draft.target.verify_client import VerifyClient
from dynatree.serving.address import DNS, split_addresses
from dynatree.serving.channel import Connector

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0  # interval between two DNS look-ups


class NothingReadyError(PeerUnavailableError):
    """No verify service is ready, so the request was not started."""


class Replicas:
    """Verify services, keyed by address; any of them may serve a session.

    A session goes to a ready service with the fewest sessions of this process (least request). gRPC's own `round_robin`
    cannot skip a hanging service before keepalive ends the connection, and cannot prefer an idle service.

    Args:
        addresses: `host:port`, `unix:PATH` or `dns:///name:port`, or several of them, comma-separated. All addresses of
            a DNS name are used, and the name is resolved again every few seconds.
        connector: Opens channels.
        build_target: Builds a `Target` from a target's model info.
    """

    def __init__(self, addresses: str, connector: Connector, build_target: Callable[[ModelInfo], Target]) -> None:
        self._addresses = split_addresses(addresses)
        self._described = addresses
        self._connector = connector
        self._build_target = build_target
        self._replicas: dict[str, Replica] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._last: Target | None = None
        self._follower: Callable[[bool], Awaitable[None]] | None = None
        self._telling: set[asyncio.Future[None]] = set()  # the event loop keeps only weak references

    @property
    def all(self) -> tuple[Replica, ...]:
        """All known services."""
        return tuple(self._replicas.values())

    @property
    def ready(self) -> bool:
        """Whether any service is ready."""
        return any(replica.ready for replica in self._replicas.values())

    @property
    def target(self) -> Target:
        """The target with the longest context among the ready services, or the last such target if none is ready."""
        targets = [replica.target for replica in self._replicas.values() if replica.ready and replica.target]
        self._last = max(targets, key=lambda target: target.info.context_length, default=self._last)
        assert self._last is not None, "start() waits for a target"
        return self._last

    async def start(self, timeout: float) -> None:
        """Resolve the addresses, and wait up to `timeout` seconds for the first ready service.

        Raises:
            StartupError: No service became ready in time, or all of them refused.
        """
        await self._resolve()
        self._resolving = asyncio.ensure_future(self._keep_resolving())
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while not self.ready:
            refusals = [replica.refusal for replica in self._replicas.values()]
            if refusals and all(refusals):
                raise StartupError(str(refusals[0]))
            if not await self.changed(until - loop.time()):
                causes = await asyncio.gather(*(replica.cause() for replica in self._replicas.values()))
                cause = next((f": {each}" for each in causes if each), "")
                raise StartupError(f"no verify service answered at {self._described} within {timeout:g} s{cause}")
        self._last = self.target

    async def close(self) -> None:
        """Stop watching the services, and close all channels."""
        tasks = [*self._watching.values(), *([self._resolving] if self._resolving else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self._replicas.values():
            await replica.close()

    def follow(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Call `tell` with `ready`, now and after each change of a service."""
        self._follower = tell
        self._notify()

    def rebuild_with(self, build_target: Callable[[ModelInfo], Target]) -> None:
        """Replace `build_target` and rebuild every target with it; measured costs are dropped."""
        self._build_target = build_target
        for replica in self._replicas.values():
            replica.rebuild_with(partial(self._target_for, replica.address))

    def choose(self, like: ModelInfo | None = None, avoid: Collection[Replica] = (), needed: int = 0) -> Replica | None:
        """Choose a ready service with the fewest sessions, the tokens of `like`, and a context of `needed` tokens.

        Returns:
            The service; None if none fits.
        """
        usable = [
            replica
            for replica in self._replicas.values()
            if replica.ready
            and replica not in avoid
            and replica.target is not None
            and (like is None or replica.target.info.same_tokens(like))
            and replica.target.info.context_length >= needed
        ]
        return min(usable, key=lambda replica: (replica.sessions, random.random()), default=None)

    def first(self, fingerprint: str = "", needed: int = 0) -> Replica:
        """Choose a service for a new request; a `fingerprint` must match that of the target.

        If no service has a long enough context, a service with a shorter one is chosen, and the request is then refused
        with the reason.

        Raises:
            NothingReadyError: No service is ready.
            FailedPreconditionError: No ready target has the fingerprint, or no target fits the draft model.
        """
        like = None
        if fingerprint:
            infos = [replica.target.info for replica in self.all if replica.ready and replica.target]
            like = next((info for info in infos if info.fingerprint == fingerprint), None)
            if infos and like is None:
                raise FailedPreconditionError(
                    f"the completion began on a target with fingerprint {fingerprint[:12]} and continues only there; "
                    f"the verify services that are ready have {infos[0]}, {infos[0].fingerprint[:12]}"
                )
        replica = self.choose(like, needed=needed) or self.choose(like)
        if replica is None:
            mismatches = [replica.mismatch for replica in self.all if replica.mismatch]
            if mismatches:
                raise FailedPreconditionError(mismatches[0])
            raise NothingReadyError("no verify service is ready")
        return replica

    async def changed(self, timeout: float) -> bool:
        """Wait until any service changes; return False if none does within `timeout` seconds."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait([waiting], timeout=max(timeout, 0.0))
            return waiting.done()
        finally:
            self._waiting.discard(waiting)

    def _target_for(self, address: str, info: ModelInfo) -> Target:
        """Build the `Target` of a service, and warn if it gives other tokens than another service's target.

        Raises:
            FailedPreconditionError: Its tokenizer is not the draft's; the message names another service's target.
        """
        others = [(each, each.target.info) for each in self.all if each.target and each.address != address]
        try:
            target = self._build_target(info)
        except FailedPreconditionError as error:
            fits = f"; {others[0][1].name}, the target of another verify service, has the right one" if others else ""
            raise FailedPreconditionError(f"{error}{fits}") from None
        for other, known in others:
            if other.ready and not known.same_tokens(info):
                log.warning(
                    "%s has %s, and %s has %s, which give different tokens; completions do not move between them",
                    *(address, info, other.address, known),
                )
                break
        return target

    def _notify(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        if self._follower is not None:
            telling = asyncio.ensure_future(self._follower(self.ready))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _keep_resolving(self) -> None:
        """Resolve DNS names again and again, and reconnect when certificates were replaced."""
        generation = self._connector.generation
        while True:
            await asyncio.sleep(RESOLVE_SECONDS)
            try:
                await self._resolve()
                current = self._connector.generation
                if current != generation:
                    for replica in self._replicas.values():
                        replica.reconnect()
                    generation = current
            except Exception:  # the next attempt may succeed, for example when threads can be started again
                log.exception("looking for verify services at %s failed", self._described)

    async def _resolve(self) -> None:
        """Resolve the addresses, add new services, and remove those that are lost and have no session."""
        found: dict[str, str | None] = {}  # name expected in the certificate, by address
        for address in self._addresses:
            if address.startswith(DNS):
                name = address.removeprefix(DNS).rpartition(":")[0]
                found |= dict.fromkeys(await _resolved(address), name)
            else:
                found[address] = None
        for address in [each for each in found if each not in self._replicas]:
            connect = partial(VerifyClient, address, self._connector, found[address])
            replica = Replica(address, connect, partial(self._target_for, address), self._notify)
            self._replicas[address] = replica
            self._watching[address] = asyncio.ensure_future(replica.watch())
        if not found:
            return  # if the name server is down, the services may still be up
        for address in [*(self._replicas.keys() - found.keys())]:
            replica = self._replicas[address]
            if not replica.ready and not replica.sessions:
                del self._replicas[address]
                task = self._watching.pop(address)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await replica.close()


async def _resolved(address: str) -> list[str]:
    """Resolve `dns:///name:port` to addresses; none if the name is unknown."""
    host, _, port = address.removeprefix(DNS).rpartition(":")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: it is not a host name
        log.warning("%s: %s", host, getattr(error, "strerror", None) or error)
        return []
    hosts = dict.fromkeys(str(info[4][0]) for info in infos)
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]
