"""Opens a completion on the current target of a verify service, and charges its prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from dynatree.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    PeerFailedError,
    PeerUnavailableError,
    ServiceBusyError,
)
from dynatree.draft.completion.generation import Backend, Generation, GenerationRequest
from dynatree.draft.target.remote_session import TargetChangedError
from dynatree.draft.target.target import Target
from dynatree.serving.token_quota import Charge

TARGET_CHANGES = 5  # attempts to open one session while verify services change their targets
# Errors of an opening whose prefill no verify service began, or whose verify service was lost: nothing is charged.
NOT_BEGUN = (
    InvalidArgumentError,
    OutOfRangeError,
    FailedPreconditionError,
    ServiceBusyError,
    PeerUnavailableError,
    TargetChangedError,
)


@asynccontextmanager
async def open_generation(
    backend: Backend,
    new_request: Callable[[Target], GenerationRequest],
    fingerprint: str,
    least_context: int,
    timeout: float | None,
    charge: Charge,
) -> AsyncIterator[Generation]:
    """Open a completion, with a request built for the current target of its verify service.

    Args:
        backend: The draft model and the verify services.
        new_request: Builds the request for a target.
        fingerprint: Fingerprint of the target that the client requires; "" for any.
        least_context: Preferred context length of a target, in tokens.
        timeout: Seconds until the client's deadline; None: no deadline.
        charge: The prompt is charged to it.

    Raises:
        FailedPreconditionError: No ready verify service has the fingerprint.
        ServiceError: No verify service is ready, or the verify services failed or refused.
    """
    for _ in range(TARGET_CHANGES):
        replica = backend.replicas.first(fingerprint, least_context)
        assert replica.target is not None
        async with AsyncExitStack() as stack:
            request = new_request(replica.target)
            opening = Generation.open(request, backend, replica, timeout)
            try:
                with _prefill(charge, len(request.begun_ids)):
                    generation = await stack.enter_async_context(opening)
            except TargetChangedError:
                continue
            yield generation
            return
    raise PeerFailedError("the verify service keeps changing its target")


@contextmanager
def _prefill(charge: Charge, tokens: int) -> Iterator[None]:
    """Charge a prompt if its prefill begins inside the context, even if it is then cancelled or fails."""
    begun = True
    try:
        yield
    except NOT_BEGUN:
        begun = False
        raise
    finally:
        if begun:
            charge.use(tokens)
