"""Statistics that the verify service reports about the pass that verified a tree."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PassStatistics:
    """Statistics of one pass: a target forward pass over trees and prompt pieces of one or more sessions.

    Attributes:
        sessions: Number of sessions in the pass.
        rows: Tokens of all sessions: roots, nodes and prompt tokens.
        row_price: Price of one more row, in expected tokens; a node worth less is not verified. 0 if the session was
            alone on the service.
        hold_seconds: Seconds that the pass was held back for trees about to arrive.
        open_sessions: Sessions open on the service, in this pass or not.
        kv_cache_usage: KV slots held by sessions / all KV slots of the service, at the end of the pass.
    """

    sessions: int = 1
    rows: int = 1
    row_price: float = 0.0
    hold_seconds: float = 0.0
    open_sessions: int = 1
    kv_cache_usage: float = 0.0


ALONE = PassStatistics()  # a pass over the root of one session
