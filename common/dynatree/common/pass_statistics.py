"""What the verify service tells of the pass that verified a tree."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PassStatistics:
    """One forward of the target over the trees, and pieces of prompts, of one or more sessions.

    Attributes:
        sessions: That shared it.
        rows: Tokens over all sessions: roots, nodes and prompt tokens.
        row_price: What one more row is worth, in tokens: a node less likely to be accepted is not verified. 0 where the
            session was alone on the service.
        hold_seconds: How long it was held back for trees about to come.
        open_sessions: That were open on the service, in this pass or not.
        kv_cache_usage: KV slots that sessions held / all slots of the service, when the pass had ended.
    """

    sessions: int = 1
    rows: int = 1
    row_price: float = 0.0
    hold_seconds: float = 0.0
    open_sessions: int = 1
    kv_cache_usage: float = 0.0


ALONE = PassStatistics()  # of one session that has nothing but a root in it
