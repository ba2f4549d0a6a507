"""The domain errors of the services, each with the gRPC status code that a caller sees.

    ServiceError
    ├── InvalidArgumentError      the request is malformed            INVALID_ARGUMENT
    │   └── GrammarError          its grammar cannot be followed
    ├── OutOfRangeError           the request is too long             OUT_OF_RANGE
    │   └── ContextLengthError    it exceeds the target's context
    ├── FailedPreconditionError   the two sides disagree              FAILED_PRECONDITION
    ├── RoundInFlightError        two rounds at once on one session   ABORTED
    ├── UnauthenticatedError      the caller is not known             UNAUTHENTICATED
    ├── ServiceBusyError          no capacity, or not in time         RESOURCE_EXHAUSTED
    │   └── QuotaError            the principal's quota is used up
    ├── IdleSessionError          the peer was silent for too long    ABORTED
    ├── DeadlineExceededError     the caller's deadline has passed    DEADLINE_EXCEEDED
    ├── PeerUnavailableError      the other service is out of reach   UNAVAILABLE
    ├── PeerFailedError           the other service failed            INTERNAL
    └── NotFiniteError            the target's numbers are not finite INTERNAL

    StartupError             a service cannot start; the command line prints the error and exits
    DeviceFailedError        a service cannot continue; the command line exits so that a supervisor restarts it

Messages state the fault and the expectation, and contain no local paths.
"""

from __future__ import annotations


class ServiceError(Exception):
    """A request cannot be served; `code` names the gRPC status that the caller receives with the message."""

    code: str = "INTERNAL"


class InvalidArgumentError(ServiceError):
    """The request is malformed, regardless of the service's state."""

    code = "INVALID_ARGUMENT"


class GrammarError(InvalidArgumentError):
    """The request's grammar is wrong, too complex or not supported, or no completion can follow it."""


class OutOfRangeError(ServiceError):
    """A part of the request exceeds its maximum length."""

    code = "OUT_OF_RANGE"


class ContextLengthError(OutOfRangeError):
    """The prompt, or the prompt with its new tokens, does not fit the target's context.

    Attributes:
        context_length: The target's context length in tokens.
        prompt_tokens: Number of prompt tokens; may be a lower bound.
    """

    def __init__(self, message: str, *, context_length: int, prompt_tokens: int) -> None:
        super().__init__(message)
        self.context_length = context_length
        self.prompt_tokens = prompt_tokens


class FailedPreconditionError(ServiceError):
    """The two sides disagree on models or on the session's state; the message carries the expected value."""

    code = "FAILED_PRECONDITION"


class RoundInFlightError(ServiceError):
    """A second tree arrived before the first one was answered."""

    code = "ABORTED"


class UnauthenticatedError(ServiceError):
    """The caller presents no valid credentials."""

    code = "UNAUTHENTICATED"


class ServiceBusyError(ServiceError):
    """No capacity is free, or none before the deadline; `retry_after` is the seconds until a retry, if known."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaError(ServiceBusyError):
    """The principal has used up its quota; other principals may still be served."""


class IdleSessionError(ServiceError):
    """The peer was silent for too long, so its session was ended to free the capacity."""

    code = "ABORTED"


class DeadlineExceededError(ServiceError):
    """The caller's deadline has passed."""

    code = "DEADLINE_EXCEEDED"


class PeerUnavailableError(ServiceError):
    """The other service cannot be reached, or the connection to it was lost."""

    code = "UNAVAILABLE"


class PeerFailedError(ServiceError):
    """The other service failed in a way that is not the caller's fault."""

    code = "INTERNAL"


class NotFiniteError(ServiceError):
    """The target computed NaN or infinity for a token's choice; the request fails instead of emitting a wrong token."""

    code = "INTERNAL"

    def __init__(self) -> None:
        super().__init__("the target model's numbers are not finite (NaN or infinity), so that no token can be chosen")


class StartupError(Exception):
    """A service cannot start: a wrong model path, an unsupported architecture, a busy port, a mismatched peer."""


EX_SOFTWARE = 70  # from sysexits.h: exit status of a process whose device has failed


class DeviceFailedError(RuntimeError):
    """The device has failed and this process cannot recover it: every later operation on it fails too."""
