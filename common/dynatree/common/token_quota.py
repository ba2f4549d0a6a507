"""Quotas of tokens: a request is charged at entry for what it may use, and gets back in the end what it has not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dynatree.common.errors import QuotaError

SECONDS = 60.0  # of which a quota tells the tokens
SOON = 1.0  # seconds; as long as short completions take
LEAST_KEPT = 64  # principals that are remembered before those are looked for that need not be


@dataclass(frozen=True)
class TokenNeed:
    """What a request may use: tokens of its prompt, of what it goes on from, and new ones, over all its completions.

    Attributes:
        least: That it uses, if all its completions begin.
        most: That it may use.
        open_ended: Whether it named no number of new tokens, so that `most` is what the context allows.
    """

    least: int
    most: int
    open_ended: bool = False


class Charge:
    """What one request is charged. `use` says what it has used for certain; `end` gives the rest back.

    Invariant: `held` >= 0, and what a request was charged in the end is what it has used.
    """

    def __init__(self, allowance: Allowance | None = None, held: int = 0, *, covered: bool = True) -> None:
        self.covered = covered
        self.held = held
        self._allowance = allowance

    def use(self, tokens: int) -> None:
        """Note tokens that are used: a prompt's as soon as its prefill begins, new ones when they are made."""
        if self._allowance is not None:
            self._allowance.use(self, tokens)

    def end(self) -> None:
        """Give back what is not used. Whatever the request still used afterwards would be charged in full."""
        if self._allowance is not None:
            self._allowance.end(self)


NO_CHARGE = Charge()


class Allowance:
    """The tokens of one principal: `tokens` a minute, of which at most a minute's are saved up.

    A request may begin if what it may use is left, and that is held for it. Two kinds of request need less:

    - One that leaves its number of new tokens open begins if its prompt fits. It holds what is left, up to its most.
    - One that may use more than a minute's tokens begins when a whole minute's are left, and holds them.

    Such a request is not covered: it may use more than it holds, and then less than nothing is left. A principal has
    one of them at a time. So in any time t all requests use at most a minute's tokens, what the rate gives in t, and
    what those that are not covered use beyond what they hold.

    Invariant: what is left and what is held are together at most a minute's tokens.
    """

    def __init__(self, tokens: int, clock: Callable[[], float]) -> None:
        self._tokens = tokens
        self._clock = clock
        self._at = clock()
        self._left = float(tokens)
        self._held = 0  # whole tokens, so that nothing is lost in sums
        self._open: set[Charge] = set()

    @property
    def left(self) -> float:
        """Tokens that are neither used nor held; below 0 where more were used than there were."""
        now = self._clock()
        self._left = min(self._tokens - self._held, self._left + self._tokens / SECONDS * (now - self._at))
        self._at = now
        return self._left

    @property
    def untouched(self) -> bool:
        """Whether it is as that of a principal which never came."""
        return not self._open and self.left >= self._tokens

    def check(self, needed: int) -> None:
        """Refuse whoever needs more than is left; a whole minute's tokens are enough for everybody.

        Raises:
            QuotaError: Too little is left.
        """
        left, needed = self.left, min(needed, self._tokens)
        if needed <= left:
            return
        held = f", and {self._held} are held for requests that are open" if self._held else ""
        raise QuotaError(
            f"the request needs {needed} tokens or more; of this principal's {self._tokens} tokens a minute "
            f"{max(0, int(left))} are left{held}",
            retry_after=self._seconds_until(needed),
        )

    def charge(self, need: TokenNeed) -> Charge:
        """Charge a request that begins.

        Raises:
            QuotaError: Too little is left.
        """
        self.check(need.least if need.open_ended else need.most)
        covered = need.most <= self.left
        if not covered and any(not each.covered for each in self._open):
            raise QuotaError(
                f"the request may use {need.most} tokens, and another that is open may already use all that is left "
                f"of this principal's {self._tokens} tokens a minute; with fewer max_new_tokens it could begin",
                retry_after=self._seconds_until(min(need.most, self._tokens)),
            )
        charge = Charge(self, min(need.most, int(self.left)), covered=covered)
        self._open.add(charge)
        self._left -= charge.held
        self._held += charge.held
        return charge

    def _seconds_until(self, needed: int) -> float:
        """Until so many tokens are left; soon where requests that are open may give them back."""
        seconds = (needed - self.left) * SECONDS / self._tokens
        return max(0.0, min(seconds, SOON) if self._open else seconds)

    def use(self, charge: Charge, tokens: int) -> None:
        """Take tokens from what is held for a request, and those beyond from what is left."""
        left, held = self.left, min(tokens, charge.held)
        charge.held -= held
        self._held -= held
        self._left = left - (tokens - held)

    def end(self, charge: Charge) -> None:
        """Give back what is held for a request."""
        self._left = self.left + charge.held
        self._held -= charge.held
        charge.held = 0
        self._open.discard(charge)


class TokenQuota:
    """The allowances of all principals.

    Args:
        tokens: A minute, of each principal; None: any number.
        clock: Seconds.
    """

    def __init__(self, tokens: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self._most_kept = LEAST_KEPT

    def check(self, principal: str, needed: int) -> None:
        """Refuse a request that needs so many tokens or more, without charging it.

        Raises:
            QuotaError: Too little is left.
        """
        if principal in self._allowances:
            self._allowances[principal].check(needed)

    def charge(self, principal: str, need: TokenNeed) -> Charge:
        """Charge a request that begins.

        Raises:
            QuotaError: Too little is left.
        """
        if self._tokens is None:
            return NO_CHARGE
        if principal not in self._allowances:
            self._forget()
            self._allowances[principal] = Allowance(self._tokens, self._clock)
        return self._allowances[principal].charge(need)

    def _forget(self) -> None:
        """Forget those who have all of theirs, now and then."""
        if len(self._allowances) >= self._most_kept:
            self._allowances = {name: each for name, each in self._allowances.items() if not each.untouched}
            self._most_kept = max(LEAST_KEPT, 2 * len(self._allowances))
