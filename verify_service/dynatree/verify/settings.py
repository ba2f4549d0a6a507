"""The settings of a verify service."""

from __future__ import annotations

from dataclasses import dataclass

from dynatree.common.limits import IDLE_SECONDS, MAX_QUEUED, MAX_SESSIONS, MAX_TREE_NODES
from dynatree.engine.settings import ModelSettings
from dynatree.serving.operation import OperationSettings

AUTO_ROWS = 256  # default for the maximum rows of a pass


@dataclass(frozen=True)
class VerifyLimits:
    """Limits on sessions and their resources.

    Attributes:
        sessions: Maximum number of open sessions.
        queue: Maximum number of waiting requests for sessions.
        max_tree_nodes: Maximum number of nodes in a tree.
        batch_rows: Maximum rows of a pass.
        idle_seconds: Seconds that a session may wait for its peer.
        prefix_cache: Whether sessions may reuse the keys and values of ended sessions with a common prefix.
    """

    sessions: int = MAX_SESSIONS
    queue: int = MAX_QUEUED
    max_tree_nodes: int = MAX_TREE_NODES
    batch_rows: int = AUTO_ROWS
    idle_seconds: float = IDLE_SECONDS
    prefix_cache: bool = True


@dataclass(frozen=True)
class VerifySettings:
    """All settings of a verify service.

    Attributes:
        model: Settings of the target model.
        limits: Limits on sessions.
        operation: Operational settings: address, security, metrics, and traces.
    """

    model: ModelSettings
    limits: VerifyLimits
    operation: OperationSettings
