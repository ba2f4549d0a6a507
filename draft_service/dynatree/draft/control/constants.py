"""The tuned constants of the policies and of their learning, each with its unit, neutral value and source."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

TUNED = "tuned; `dynatree bench replay --constants` says what each is worth"
GUARD = "a guard for loads that change, stalls, steep costs and hopeless drafts, which no recording holds"
FALLBACK = "a first guess, for a verify service that has measured no forward pass"
LEAST_PROB = 1e-3  # learnt rates stay this far from 0 and 1, so that log-probabilities and log-odds are finite
TABLE = "measured on the shipped pair, six texts; docs/reference/policies.md, N-grams"


def _constant(default: Any, what: str, unit: str, *, neutral: Any = None, source: str = TUNED) -> Any:
    """Define a constant as a field with metadata; `neutral` is the value that switches it off, None if none does."""
    return field(default=default, metadata={"what": what, "unit": unit, "neutral": neutral, "source": source})


@dataclass(frozen=True)
class ControlSettings:
    """The tuned constants; `dataclasses.replace` changes them, and `dataclasses.fields` lists them with their metadata.

    The `metadata` of a field has a description (`what`), its `unit`, its `neutral` value (None if there is none) and
    its `source`.
    """

    # Costs of rounds (round_costs.py, verify_cost.py, rolling_median.py)
    cost_window: int = _constant(16, "measurements of one kind that a median is taken over", "rounds", source=GUARD)
    cost_trials: int = _constant(2, "measurements of one kind that rule out a stall", "rounds", neutral=1, source=GUARD)
    fresh_rounds: int = _constant(
        64, "age above which a measurement is not compared with new ones", "rounds", neutral=math.inf, source=GUARD
    )
    contention_rounds: int = _constant(
        8,
        "rounds between two verifications, up to which the draft is blamed for the longer one",
        "rounds",
        neutral=math.inf,
        source=GUARD,
    )
    reset_ratio: float = _constant(
        0.6, "a measurement below this share of the median replaces all before it", "share", neutral=0.0, source=GUARD
    )
    stale_rounds: int = _constant(
        256,
        "age above which a tree size is tried again, and a plain step made",
        "rounds",
        neutral=math.inf,
        source=GUARD,
    )
    prior_plain_seconds: float = _constant(
        0.05, "plain step, where no forward was measured at start", "seconds", source=FALLBACK
    )
    prior_row_up: float = _constant(
        1 / 8,
        "cost of each row more than a tried tree has, where none was measured at start",
        "plain steps",
        source=FALLBACK,
    )
    prior_row_down: float = _constant(
        1 / 64,
        "saving of each row less than a tried tree has, where none was measured at start",
        "plain steps",
        source=FALLBACK,
    )
    prior_draft_seconds: float = _constant(0.002, "draft forward, where none was measured at start", "seconds")

    # Calibration of the draft's probabilities (calibration.py, track_record.py)
    calibration_edges: tuple[float, ...] = _constant(
        (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995),
        "inner edges of the calibration's bins",
        "probability",
    )
    calibration_fade: float = _constant(
        0.998, "weight of a bin's past at each node", "share a node", neutral=1.0, source=GUARD
    )
    prior_trials: float = _constant(8.0, "weight of the first value of a bin or an n-gram's rate", "nodes")
    prior_best_child: float = _constant(0.6, "expected value of a node's best child, before any", "node values")
    prior_children: float = _constant(0.7, "expected value of a node's children, before any", "node values")
    child_mass_step: float = _constant(0.1, "weight of a level in the expected child mass", "share", neutral=0.0)

    # The objective and the pause of `throughput` (policies/objective.py, policies/pause.py)
    rate_fade: float = _constant(
        0.9, "weight of the past at each round in the session's rate", "share a round", neutral=1.0, source=GUARD
    )
    row_price_step: float = _constant(
        0.5, "weight of one pass in the price of a row", "share a round", neutral=1.0, source=GUARD
    )
    offered_share: float = _constant(
        0.5,
        "value, in prices of a row, above which a node is offered to a shared pass",
        "row prices",
        neutral=1.0,
        source=GUARD,
    )
    foresight: tuple[int, ...] = _constant(
        (1, 2, 4, 8, 15), "numbers of further levels that are considered", "levels", neutral=(1,), source=GUARD
    )
    foresight_leaves: int = _constant(
        3, "likeliest leaves whose descendants are considered", "nodes", neutral=256, source=GUARD
    )
    max_pause: int = _constant(64, "longest pause of the draft", "rounds", neutral=1, source=GUARD)
    max_first_pause: int = _constant(8, "longest pause that a session begins with", "rounds", neutral=1, source=GUARD)
    first_pause_divisor: int = _constant(
        4, "a session begins with the last session's pause divided by this", "", neutral=math.inf, source=GUARD
    )
    trial_share: float = _constant(
        1 / 64, "time that trials of the draft may lose", "share of all time", neutral=math.inf, source=GUARD
    )
    reading_margin: float = _constant(
        2.0, "time that a draft which reads a prompt must save", "times that of reading", neutral=0.0, source=GUARD
    )
    usual_tokens: int = _constant(
        256,
        "expected length of a completion, until some have ended",
        "tokens",
        neutral=math.inf,
        source=GUARD,
    )

    # N-grams (policies/lookup.py)
    match_bins: tuple[int, ...] = _constant(
        (1, 2, 3, 4, 6, 9, 13, 17, 25, 33), "shortest match of each bin of rates", "tokens"
    )
    prior_others_rate: float = _constant(
        0.1, "first rate of the first token of a second continuation", "probability", source=TABLE
    )

    # N-grams judged by the draft model (policies/merged.py)
    expand_along: int = _constant(
        4, "tokens of a continuation that the first forward expands with the root", "tokens", neutral=0
    )
    usual_prob: float = _constant(
        0.4, "probability that the model gives a continuation's token as a rule", "probability", source=TABLE
    )
    model_weight: float = _constant(
        1.9, "weight of the model's log-odds in a continuation's", "", neutral=0.0, source=TABLE
    )


DEFAULT_CONTROL = ControlSettings()
