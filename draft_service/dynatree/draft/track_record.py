"""What the sessions of a draft service have found its draft model to be worth."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from dynatree.draft.calibration import Calibration
from dynatree.draft.control import DEFAULT_CONTROL, ControlSettings
from dynatree.draft.history import ReleasedHistory

MAX_HISTORIES = 64  # requests choose the settings, each of which has one


class TrackRecord:
    """The draft model's track record; every session adds to it, and the next one begins with it.

    Attributes:
        calibration: Of the nodes of all sessions, under greedy decoding and sampling with noise.
        residual_calibration: The same under residual sampling, whose nodes are draws.
        child_mass: The values of the best child of an expanded node, and of all its children, as shares of its own.
        pause: Rounds that a session last left the draft model out for.
    """

    def __init__(self, control: ControlSettings = DEFAULT_CONTROL) -> None:
        self.calibration = Calibration(control=control)
        self.residual_calibration = Calibration(control=control)
        self.child_mass = (control.prior_best_child, control.prior_children)
        self.pause = 1
        self._histories: dict[Hashable, ReleasedHistory] = {}  # the last used comes last

    def history(self, settings: Hashable, begin: Callable[[], ReleasedHistory]) -> ReleasedHistory:
        """The history of the completions with these settings, made by `begin` where there is none yet.

        Those of the `MAX_HISTORIES` settings that were used last are kept.
        """
        self._histories[settings] = history = self._histories.pop(settings, None) or begin()
        if len(self._histories) > MAX_HISTORIES:
            del self._histories[next(iter(self._histories))]
        return history
