"""The draft model's track record over the sessions of a draft service."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable

from dynatree.draft.control.calibration import Calibration
from dynatree.draft.control.constants import DEFAULT_CONTROL, ControlSettings
from dynatree.draft.control.history import ReleasedHistory

MAX_HISTORIES = 64  # bounded because requests choose the settings, and each choice has its own history


class TrackRecord:
    """The draft model's track record: every session adds to it, and the next session begins with it.

    Attributes:
        calibration: Calibration over the nodes of all sessions, under greedy decoding and sampling with noise.
        residual_calibration: The same under residual sampling, whose nodes are draws.
        child_mass: The fraction of an expanded node's value that its best child has, and all its children together.
        pause: Length of the last pause of the draft model in any session, in rounds.
        trial_debt: Seconds that trials of the draft model have lost, and that are not made up for.
    """

    def __init__(self, control: ControlSettings = DEFAULT_CONTROL) -> None:
        self.calibration = Calibration(control=control)
        self.residual_calibration = Calibration(control=control)
        self.child_mass = (control.prior_best_child, control.prior_children)
        self.pause = 1
        self.trial_debt = 0.0
        self._lengths = deque([control.usual_tokens] * control.cost_trials, control.cost_window)
        self._histories: dict[Hashable, ReleasedHistory] = {}  # least recently used first

    @property
    def usual_tokens(self) -> float:
        """Expected length of a completion that may be longer, in tokens: the median of the last `cost_window` ones."""
        return statistics.median_low(self._lengths)

    def completed(self, tokens: int) -> None:
        """Take in the length of a completion, unless an infinite prior says that none is learnt."""
        if math.isfinite(self._lengths[0]):
            self._lengths.append(tokens)

    def history(self, settings: Hashable, begin: Callable[[], ReleasedHistory]) -> ReleasedHistory:
        """Return the history of completions with these settings, created by `begin` at the first use.

        Only the `MAX_HISTORIES` most recently used histories are kept.
        """
        self._histories[settings] = history = self._histories.pop(settings, None) or begin()
        if len(self._histories) > MAX_HISTORIES:
            del self._histories[next(iter(self._histories))]
        return history
