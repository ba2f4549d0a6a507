"""History of the policy `dynatree`: drafting parameters follow recent acceptance (DynaTree section 3.3)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Steering:
    """The adapted parameters: base depth D_0, high-confidence threshold tau_h and deep-expansion threshold rho_deep."""

    base_depth: float
    tau_high: float
    rho_deep: float


class ProportionalHistory:
    """Proportional control within a completion, after each of its rounds (versions 001 and 003, section 3.3):

        D_0   <- clip(D_0   + eta_D (mean(a) - a*), 1, D_max - 1)
        tau_h <- clip(tau_h - eta_h (mean(a) - a*), 0, 1)

    mean(a) is the mean of a_r over the last W rounds that drafted anything. The papers call a_r in [0, 1] the fraction
    of drafted tokens that was committed, and leave open which tokens count as drafted:

        a_r = accepted nodes / depth of the tree         the share of the longest path that a round could commit
        a_r = accepted nodes / nodes of the tree         the share of all nodes

    The first reading is our default. Only one path of a tree can be accepted, so a tree with two children per node
    commits at most half of its nodes and cannot come near the authors' a* of 0.7: under the second reading D_0 only
    falls and tau_h only rises.

    The formula allows tau_h to fall to 0, although the papers assume tau_l < tau_h. We follow the formula: if tau_h is
    at or below tau_l, the first case of B(u) that holds applies, and no node has B_mid children.
    """

    def __init__(
        self, steering: Steering, *, max_depth: int, window: int, target: float, depth_step: float, tau_step: float
    ) -> None:
        self.steering = steering
        self._max_depth = max_depth
        self._target = target
        self._depth_step = depth_step
        self._tau_step = tau_step
        self._acceptance: deque[float] = deque(maxlen=window)

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in one round, a_r = accepted / drafted, and adjust; ignore a round that drafted nothing."""
        if drafted == 0:
            return
        self._acceptance.append(accepted / drafted)
        error = sum(self._acceptance) / len(self._acceptance) - self._target
        self.steering = replace(
            self.steering,
            base_depth=_clip(self.steering.base_depth + self._depth_step * error, 1.0, self._max_depth - 1.0),
            tau_high=_clip(self.steering.tau_high - self._tau_step * error, 0.0, 1.0),
        )


class ReleasedHistory:
    """The rule of the authors' public repository: steps outside a dead band, after each completion.

        mean(a) > a* + 0.1:   D_0 + 1, at most D_max - 1   tau_h - step, at least 0.5   rho_deep - step, at least 0.3
        mean(a) < a* - 0.1:   D_0 - 1, at least 2          tau_h + step, at most 0.95   rho_deep + step, at most 0.8

    mean(a) is the mean over the last W completions, whatever their prompts; nothing changes before 5 completions. The
    acceptance of a completion is (tokens committed by its rounds) / (rounds * (D_0 + 2)), with the configured D_0: u0,
    D_0 levels below u0 and the bonus token. (cny123222/DynaTree, commit ec83bab,
    spec_decode/core/tree_speculative_generator_adaptive.py and tree_speculative_generator.py.)
    """

    BAND = 0.1
    LEAST_COMPLETIONS = 5

    def __init__(self, steering: Steering, *, max_depth: int, window: int, target: float, step: float) -> None:
        self.steering = steering
        self._most_committed = steering.base_depth + 2.0
        self._max_depth = max_depth
        self._target = target
        self._step = step
        self._acceptance: deque[float] = deque(maxlen=window)

    def observe(self, rounds: int, committed: int) -> None:
        """Take in one completion, and adjust; ignore a completion without rounds."""
        if rounds == 0:
            return
        self._acceptance.append(committed / (rounds * self._most_committed))
        if len(self._acceptance) < self.LEAST_COMPLETIONS:
            return
        error = sum(self._acceptance) / len(self._acceptance) - self._target
        now = self.steering
        if error > self.BAND:
            self.steering = Steering(
                min(now.base_depth + 1.0, self._max_depth - 1.0),
                max(now.tau_high - self._step, 0.5),
                max(now.rho_deep - self._step, 0.3),
            )
        elif error < -self.BAND:
            self.steering = Steering(
                max(now.base_depth - 1.0, 2.0),
                min(now.tau_high + self._step, 0.95),
                min(now.rho_deep + self._step, 0.8),
            )


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
