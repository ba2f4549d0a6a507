"""DynaTree's confidence-aware adaptive tree (DynaTree section 3.3, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MOST_TREE_NODES
from dynatree.draft.control.history import ProportionalHistory, ReleasedHistory, Steering
from dynatree.draft.control.track_record import TrackRecord
from dynatree.draft.policies.base import DrawingSettings, Outcome, Policy, check_range
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.policies.level_growth import Prune, Root, grow_level


class History(StrEnum):
    """The rule that adapts the parameters: none, the papers' rule per round, or the released rule per completion."""

    OFF = "0"
    ON = "1"
    RELEASED = "released"


@dataclass(frozen=True)
class DynaTreeSettings(DrawingSettings):
    """The papers' parameters. docs/reference/provenance.md says where each default comes from.

    The papers leave the steps eta_D and eta_h open. At zero acceptance our defaults move D_0 by 0.35 and tau_h by 0.035
    per round: a window of ten such rounds moves D_0 over more than half of its range, and no single round moves it by a
    whole level. Under the `released` history, `tau_step` is the step of tau_h and rho_deep, and `depth_step` is not
    used.

    `root` single and `prune` expand make the tree of Algorithm 1. The defaults make the tree that the text of section
    3.3 describes: it is rooted at the prefix, and nodes that tau prunes are not in it.

    Each component can be switched off (section 4.5): without `dynamic_breadth` every node gets `breadth_mid` children,
    without `dynamic_depth` every node above depth D_0 is expanded, and without `history` nothing is adapted. With
    `acceptance_over_nodes` history reads acceptance as a share of all nodes, not of the tree's depth
    (`ProportionalHistory` explains why that is not the default). With `calibrated` every c(u) and p(u) is calibrated.
    """

    tau_high: float = 0.9
    tau_low: float = 0.4
    breadth_min: int = 1
    breadth_mid: int = 2
    breadth_max: int = 3
    base_depth: int = 5
    max_depth: int = 8
    rho_stop: float = 0.1
    rho_deep: float = 0.5
    tau: float = 0.05
    max_nodes: int = 256
    window: int = 10
    target_acceptance: float = 0.7
    depth_step: float = 0.5
    tau_step: float = 0.05
    root: Root = Root.COMMITTED
    prune: Prune = Prune.REMOVE
    dynamic_breadth: bool = True
    dynamic_depth: bool = True
    history: History = History.ON
    acceptance_over_nodes: bool = False
    calibrated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau_high", "tau_low", "rho_stop", "rho_deep", "target_acceptance"):
            check_range(name, getattr(self, name), 0.0, 1.0, open_low=True)
        check_range("tau", self.tau, 0.0, 1.0)
        check_range("breadth_min", self.breadth_min, 1, 64)
        check_range("breadth_max", self.breadth_max, 1, 64)
        check_range("base_depth", self.base_depth, 1, 64)
        check_range("max_depth", self.max_depth, 2, 64)
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)
        check_range("window", self.window, 1, 10_000)
        check_range("depth_step", self.depth_step, 0.0, 64.0)
        check_range("tau_step", self.tau_step, 0.0, 1.0)
        _check_order("tau_low", self.tau_low, "tau_high", self.tau_high)
        _check_order("rho_stop", self.rho_stop, "rho_deep", self.rho_deep)
        _check_order("base_depth", self.base_depth, "max_depth", self.max_depth)
        if not self.breadth_min <= self.breadth_mid <= self.breadth_max:
            raise InvalidArgumentError(
                f"breadth_min {self.breadth_min}, breadth_mid {self.breadth_mid}, breadth_max {self.breadth_max}: "
                "expected breadth_min <= breadth_mid <= breadth_max"
            )


class DynaTree(Policy):
    """Dynamic breadth from local confidence, dynamic depth from path probability, both steered by history:

        B(u) = B_min  if c(u) >= tau_h,   B_mid  if tau_l <= c(u) < tau_h,   B_max  if c(u) < tau_l
        u is expanded iff d(u) < D_max and p(u) >= rho_stop and (d(u) < D_0 or p(u) > rho_deep)
        u is pruned iff p(u) < tau

    c(u) is the highest next-token probability after u, p(u) the path probability of u, d(u) its depth below the root.
    All sessions of the service with the same settings share the state of the `released` history.
    """

    supports_residual = True

    def __init__(self, settings: DynaTreeSettings, track_record: TrackRecord) -> None:
        self.breadth = settings.breadth_max
        self._settings = settings
        self._log_tau = math.log(settings.tau) if settings.tau > 0 else -math.inf
        self._log_stop = math.log(settings.rho_stop)
        self.steering = Steering(settings.base_depth, settings.tau_high, settings.rho_deep)
        self._history = ProportionalHistory(
            self.steering,
            max_depth=settings.max_depth,
            window=settings.window,
            target=settings.target_acceptance,
            depth_step=settings.depth_step,
            tau_step=settings.tau_step,
        )
        self._released: ReleasedHistory | None = None
        self._rounds = self._committed = 0
        self.learns_from_others = settings.history is History.RELEASED
        if settings.history is History.RELEASED:
            self._released = track_record.history(settings, self._begin_released)
            self.steering = self._released.steering

    def _begin_released(self) -> ReleasedHistory:
        return ReleasedHistory(
            self.steering,
            max_depth=self._settings.max_depth,
            window=self._settings.window,
            target=self._settings.target_acceptance,
            step=self._settings.tau_step,
        )

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Grow one level, breadth first."""
        return grow_level(
            tree,
            level,
            max_nodes=self._settings.max_nodes,
            children_of=lambda node: self._children_of(tree, node),
            keeps=lambda path_log_prob: path_log_prob >= self._log_tau,
            expands=lambda node, depth: self._expands(tree.path_log_prob(node), depth),
            root=self._settings.root,
            prune=self._settings.prune,
        )

    def observe(self, outcome: Outcome) -> None:
        """Adapt the parameters to the round, if the history is the papers' rule."""
        self._rounds += 1
        self._committed += len(outcome.accepted) + (outcome.next_token is not None)
        if self._settings.history is History.ON:
            drafted = len(outcome.tree) if self._settings.acceptance_over_nodes else outcome.tree.depth
            self._history.observe(drafted, len(outcome.accepted))
            self.steering = self._history.steering

    def end(self) -> None:
        """Update the released history, for the completions that begin after this one."""
        if self._released is not None:
            self._released.observe(self._rounds, self._committed)

    def parameters(self) -> dict[str, float]:
        """The current D_0, tau_h and rho_deep."""
        return asdict(self.steering)

    def _children_of(self, tree: GrowingTree, node: int) -> int:
        """B(u): fewer children where the draft is more confident."""
        if not self._settings.dynamic_breadth:
            return self._settings.breadth_mid
        confidence = tree.confidence(node)
        if confidence >= self.steering.tau_high:
            return self._settings.breadth_min
        if confidence >= self._settings.tau_low:
            return self._settings.breadth_mid
        return self._settings.breadth_max

    def _expands(self, path: float, depth: int) -> bool:
        """Whether d(u) < D_max, p(u) >= rho_stop, and d(u) < D_0 or p(u) > rho_deep; `path` is log p(u)."""
        if not self._settings.dynamic_depth:
            return depth < self.steering.base_depth
        if depth >= self._settings.max_depth or path < self._log_stop:
            return False
        return depth < self.steering.base_depth or path > math.log(self.steering.rho_deep)


def _check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if not low < high:
        raise InvalidArgumentError(
            f"{low_name} is {low:g} and {high_name} is {high:g}, expected {low_name} < {high_name}"
        )
