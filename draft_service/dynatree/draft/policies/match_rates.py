"""The rates at which tokens that followed earlier matches are right."""

from __future__ import annotations

from bisect import bisect_right

from dynatree.draft.control.constants import DEFAULT_CONTROL, LEAST_PROB, ControlSettings


class Rate:
    """The share of right tokens, in (0, 1); it starts with `prior_trials` tokens at the prior rate.

    Args:
        prior: The prior rate.
        control: Tuned constants.
        fade: Weight of the past at each token.
        shared: A rate of other sessions too, which takes in the same tokens.
    """

    def __init__(
        self,
        prior: float,
        control: ControlSettings = DEFAULT_CONTROL,
        *,
        fade: float = 1.0,
        shared: Rate | None = None,
    ) -> None:
        self._right = control.prior_trials * prior
        self._expected = control.prior_trials
        self._fade = fade
        self._shared = shared

    @property
    def value(self) -> float:
        """The share, at least `LEAST_PROB` away from 0 and 1."""
        return min(max(self._right / self._expected, LEAST_PROB), 1.0 - LEAST_PROB)

    def add(self, right: bool, share: float = 1.0) -> None:
        """Take in a token that is right in `share` of the cases if the rate is 1."""
        self._right = self._right * self._fade + right
        self._expected = self._expected * self._fade + share
        if self._shared is not None:
            self._shared.add(right, share)


class MatchRates:
    """A rate for each bin of match lengths. It begins at 1 - 1 / match, or at the rate of its bin in `shared`."""

    def __init__(
        self,
        control: ControlSettings = DEFAULT_CONTROL,
        *,
        fade: float = 1.0,
        shared: MatchRates | None = None,
    ) -> None:
        self._bins = control.match_bins
        self._rates = [
            Rate(1.0 - 1.0 / match, control, fade=fade)
            if shared is None
            else Rate(shared.of(match).value, control, fade=fade, shared=shared.of(match))
            for match in self._bins
        ]

    def of(self, match: int) -> Rate:
        """The rate of a token after a match of `match` tokens, at least as many as the first bin's."""
        return self._rates[bisect_right(self._bins, match) - 1]

    def values(self, name: str) -> dict[str, float]:
        """The rate of each bin, under `name` and the bin's shortest match."""
        return {f"{name}_{match}": rate.value for match, rate in zip(self._bins, self._rates, strict=True)}
