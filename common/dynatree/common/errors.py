"""The domain errors of the services, each with the gRPC status code that a caller sees.

    ServiceError
    ├── InvalidArgumentError      the request is malformed            INVALID_ARGUMENT
    ├── OutOfRangeError           it is longer than can be            OUT_OF_RANGE
    │   └── ContextLengthError    than the target's context
    ├── FailedPreconditionError   the two sides disagree              FAILED_PRECONDITION
    ├── RoundInFlightError        two rounds at once on one session   ABORTED
    ├── UnauthenticatedError      nobody who is known                 UNAUTHENTICATED
    ├── ServiceBusyError          no room, or not in time             RESOURCE_EXHAUSTED
    │   └── QuotaError            the principal may have no more
    ├── IdleSessionError          the peer was silent for too long    ABORTED
    ├── DeadlineExceededError     the caller's deadline has passed    DEADLINE_EXCEEDED
    ├── PeerUnavailableError      the other service is out of reach   UNAVAILABLE
    ├── PeerFailedError           the other service failed            INTERNAL
    └── NotFiniteError            the target's numbers are not finite INTERNAL

    StartupError             a service cannot start; the command line prints it and exits
    DeviceFailedError        a service cannot go on; the command line exits, for a supervisor to start it anew

Messages say what was wrong and what was expected, and name no local paths.
"""

from __future__ import annotations


class ServiceError(Exception):
    """A request cannot be served; `code` names the gRPC status that the caller gets with the message."""

    code: str = "INTERNAL"


class InvalidArgumentError(ServiceError):
    """The request is malformed, whatever the state of the service."""

    code = "INVALID_ARGUMENT"


class OutOfRangeError(ServiceError):
    """Something in the request is longer than it can be."""

    code = "OUT_OF_RANGE"


class ContextLengthError(OutOfRangeError):
    """The prompt, or the prompt with its new tokens, does not fit the target's context.

    Attributes:
        context_length: The target's, in tokens.
        prompt_tokens: Tokens of the prompt, at least.
    """

    def __init__(self, message: str, *, context_length: int, prompt_tokens: int) -> None:
        super().__init__(message)
        self.context_length = context_length
        self.prompt_tokens = prompt_tokens


class FailedPreconditionError(ServiceError):
    """The two sides disagree on models or on the session's state; the message carries the expected value."""

    code = "FAILED_PRECONDITION"


class RoundInFlightError(ServiceError):
    """A second tree arrived before the first was answered."""

    code = "ABORTED"


class UnauthenticatedError(ServiceError):
    """The caller does not show who it is."""

    code = "UNAUTHENTICATED"


class ServiceBusyError(ServiceError):
    """There is no room, or not in time; the caller may try again after `retry_after` seconds, where that is known."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaError(ServiceBusyError):
    """The principal has used up what it may have, wherever there is room for others."""


class IdleSessionError(ServiceError):
    """The peer sent nothing for too long, and others may want its session."""

    code = "ABORTED"


class DeadlineExceededError(ServiceError):
    """The caller's deadline has passed."""

    code = "DEADLINE_EXCEEDED"


class PeerUnavailableError(ServiceError):
    """The other service cannot be reached, or went away."""

    code = "UNAVAILABLE"


class PeerFailedError(ServiceError):
    """The other service failed in a way that is not the caller's fault."""

    code = "INTERNAL"


class NotFiniteError(ServiceError):
    """The target computed NaN or infinity where it was to choose a token: none is chosen, rather than a wrong one."""

    code = "INTERNAL"

    def __init__(self) -> None:
        super().__init__("the target model's numbers are not finite (NaN or infinity), so that no token can be chosen")


class StartupError(Exception):
    """A service cannot start: a wrong model path, an unsupported architecture, a busy port, a mismatched peer."""


EX_SOFTWARE = 70  # of sysexits.h: how a process ends whose device has failed


class DeviceFailedError(Exception):
    """The device has failed in a way from which the process cannot recover."""
