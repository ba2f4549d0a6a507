"""Token quotas: a request is charged in advance for the most tokens it may use, and unused ones are refunded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dynatree.common.errors import QuotaError

SECONDS = 60.0  # period of a quota
SOON = 1.0  # seconds; about the duration of a short completion
LEAST_KEPT = 64  # number of remembered principals at which untouched allowances are first removed


@dataclass(frozen=True)
class TokenNeed:
    """Tokens that a request may use over all its completions: prompt, tokens it continues from, and new tokens.

    Attributes:
        least: Tokens that it uses at least, if all its completions begin.
        most: Tokens that it may use at most.
        open_ended: Whether it set no number of new tokens, so that the context limits `most`.
    """

    least: int
    most: int
    open_ended: bool = False


class Charge:
    """The charge of one request. `use` records used tokens; `end` refunds the rest.

    Invariant: `held` >= 0, and after `end` the request has been charged exactly for the tokens it used.
    """

    def __init__(self, allowance: Allowance | None = None, held: int = 0, *, covered: bool = True) -> None:
        self.covered = covered
        self.held = held
        self._allowance = allowance

    def use(self, tokens: int) -> None:
        """Record used tokens: a prompt's as soon as its prefill begins, new tokens when they are generated."""
        if self._allowance is not None:
            self._allowance.use(self, tokens)

    def end(self) -> None:
        """Refund the unused tokens. Tokens used after this are charged in full."""
        if self._allowance is not None:
            self._allowance.end(self)


NO_CHARGE = Charge()


class Allowance:
    """The tokens of one principal: `tokens` per minute, of which at most one minute's worth accumulates.

    A request may begin if the most tokens it may use are left; these tokens are then held for it. Two kinds of request
    need fewer:

    - A request without a number of new tokens begins if its prompt fits. It holds the tokens left, up to its maximum.
    - A request that may use more than a minute's tokens begins when a full minute's tokens are left, and holds them.

    Such a request is not covered: it may use more than it holds, and the balance may then fall below 0. A principal may
    have one uncovered request at a time. So in any time t, all requests together use at most a minute's tokens, the
    tokens that the rate adds in t, and the tokens that uncovered requests use beyond those held for them.

    Invariant: the tokens left and the tokens held are together at most a minute's tokens.
    """

    def __init__(self, tokens: int, clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._at = clock()
        self._left = float(tokens)
        self._held = 0  # an integer, so that sums are exact
        self._open: set[Charge] = set()

    @property
    def left(self) -> float:
        """Tokens that are neither used nor held; negative after an uncovered request has overdrawn."""
        now = self._clock()
        self._left = min(self._tokens - self._held, self._left + self._tokens / SECONDS * (now - self._at))
        self._at = now
        return self._left

    @property
    def untouched(self) -> bool:
        """Whether the state equals that of a new principal."""
        return not self._open and self.left >= self._tokens

    def check(self, needed: int) -> None:
        """Refuse a request that needs more tokens than are left; a full minute's tokens suffice for any request.

        Raises:
            QuotaError: Too few tokens are left.
        """
        left, needed = self.left, min(needed, self._tokens)
        if needed <= left:
            return
        held = f", and {self._held} are reserved for open requests" if self._held else ""
        raise QuotaError(
            f"the request needs at least {needed} tokens, but of this principal's {self._tokens} tokens per minute "
            f"{max(0, int(left))} are left{held}",
            retry_after=self._seconds_until(needed),
        )

    def charge(self, need: TokenNeed) -> Charge:
        """Charge a request that begins.

        Raises:
            QuotaError: Too few tokens are left, or another uncovered request is open.
        """
        self.check(need.least if need.open_ended else need.most)
        covered = need.most <= self.left
        if not covered and any(not each.covered for each in self._open):
            raise QuotaError(
                f"the request may use {need.most} tokens, but another open request may already use all that are left "
                f"of this principal's {self._tokens} tokens per minute; request fewer max_new_tokens",
                retry_after=self._seconds_until(min(need.most, self._tokens)),
            )
        charge = Charge(self, min(need.most, int(self.left)), covered=covered)
        self._open.add(charge)
        self._left -= charge.held
        self._held += charge.held
        return charge

    def _seconds_until(self, needed: int) -> float:
        """Seconds until `needed` tokens are left; at most `SOON` while open requests may refund some."""
        seconds = (needed - self.left) * SECONDS / self._tokens
        return max(0.0, min(seconds, SOON) if self._open else seconds)

    def use(self, charge: Charge, tokens: int) -> None:
        """Take tokens from those held for a request, and any excess from those left."""
        left, held = self.left, min(tokens, charge.held)
        charge.held -= held
        self._held -= held
        self._left = left - (tokens - held)

    def end(self, charge: Charge) -> None:
        """Refund the tokens held for a request."""
        self._left = self.left + charge.held
        self._held -= charge.held
        charge.held = 0
        self._open.discard(charge)


class TokenQuota:
    """The allowances of all principals.

    Args:
        tokens: Tokens per minute of each principal; None means no limit.
        clock: Time in seconds.
    """

    def __init__(self, tokens: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self._most_kept = LEAST_KEPT

    def check(self, principal: str, needed: int) -> None:
        """Refuse a request that needs at least `needed` tokens, without charging it.

        Raises:
            QuotaError: Too few tokens are left.
        """
        if principal in self._allowances:
            self._allowances[principal].check(needed)

    def charge(self, principal: str, need: TokenNeed) -> Charge:
        """Charge a request that begins.

        Raises:
            QuotaError: Too few tokens are left, or another uncovered request of the principal is open.
        """
        if self._tokens is None:
            return NO_CHARGE
        if principal not in self._allowances:
            self._forget()
            self._allowances[principal] = Allowance(self._tokens, self._clock)
        return self._allowances[principal].charge(need)

    def _forget(self) -> None:
        """Remove untouched allowances, whenever their number has doubled."""
        if len(self._allowances) >= self._most_kept:
            self._allowances = {name: each for name, each in self._allowances.items() if not each.untouched}
            self._most_kept = max(LEAST_KEPT, 2 * len(self._allowances))
