"""The settings of a draft service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dynatree.common.limits import (
    HISTORY_TOKENS,
    IDLE_SECONDS,
    MAX_QUEUED,
    MAX_SESSIONS,
    MAX_TREE_NODES,
    RECORD_BYTES,
    RESUME_SECONDS,
)
from dynatree.draft.policies import Setting
from dynatree.engine.settings import ModelSettings
from dynatree.serving.admission import NO_QUOTA, Quota
from dynatree.serving.channel import ChannelSettings
from dynatree.serving.operation import OperationSettings


@dataclass(frozen=True)
class DefaultPolicy:
    """The policy of requests that name none."""

    name: str
    settings: dict[str, Setting]


@dataclass(frozen=True)
class DraftLimits:
    """Limits of completions.

    Attributes:
        sessions: Completions that run at once.
        queue: Requests that may wait.
        idle_seconds: Seconds that a completion waits for its client.
        prefix_cache: Whether the draft model reuses the KV cache of earlier sessions.
        resume_seconds: Seconds that a completion waits for a new verify service after losing its own.
        quota: The share of these limits that one principal may take.
        max_tree_nodes: Largest tree, in nodes.
        history_tokens: Tokens of finished completions that are kept for drafting.
    """

    sessions: int = MAX_SESSIONS
    queue: int = MAX_QUEUED
    idle_seconds: float = IDLE_SECONDS
    prefix_cache: bool = True
    resume_seconds: float = RESUME_SECONDS
    quota: Quota = NO_QUOTA
    max_tree_nodes: int = MAX_TREE_NODES
    history_tokens: int = HISTORY_TOKENS


@dataclass(frozen=True)
class VerifyServices:
    """The verify services and how to reach them.

    Attributes:
        addresses: Addresses, in the format of `Replicas`.
        channel: Channel settings.
        timeout: Seconds to wait at startup for the first verify service.
        ahead: Whether the draft model drafts ahead while they verify; None: see `Target.of`.
    """

    addresses: str
    channel: ChannelSettings
    timeout: float
    ahead: bool | None


@dataclass(frozen=True)
class RecordSettings:
    """The completions to record, and where; a request with `store` false is never recorded.

    Attributes:
        folder: The folder of the files.
        principals: The principals whose completions are recorded; None means all.
        prompts: Whether their prompts are recorded too.
        most_bytes: Upper bound on the bytes of the files.
    """

    folder: Path
    principals: frozenset[str] | None = None
    prompts: bool = False
    most_bytes: int = RECORD_BYTES


@dataclass(frozen=True)
class DraftSettings:
    """All settings of a draft service.

    Attributes:
        model: The draft model; None means that candidates are n-grams alone.
        verify: The verify services.
        policy: The policy of requests that name none.
        limits: The limits of completions.
        operation: Listening address, security and observability.
        copy: Whether the model is the target's own copy on the target's machine. Then it loads once the target serves,
            from the page cache and into memory that the target has left for it.
        history: File to which the finished completions are saved, and from which they are loaded; None: none.
        record: The completions to record; None records none.
        unused: Options of a draft model that variables gave without one. Deployments give both services the same ones.
    """

    model: ModelSettings | None
    verify: VerifyServices
    policy: DefaultPolicy
    limits: DraftLimits
    operation: OperationSettings
    copy: bool = False
    history: Path | None = None
    record: RecordSettings | None = None
    unused: tuple[str, ...] = ()
