"""The selective scan of Mamba-1 on a tree of tokens.

Along a path, the recurrence is (Gu and Dao 2023, Mamba, equation 2 and algorithm 2), for each channel c and state s,

    S_t[c, s] = exp(dt_t[c] A[c, s]) S_(t-1)[c, s] + B_t[s] v_t[c]   with   v_t = dt_t x_t
    y_t[c] = sum_s C_t[s] S_t[c, s]

Every channel and state has a decay of its own, so no matrix of tokens by tokens is shared. Instead, the states of a
tree's tokens are computed level by level, each from its parent's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from dynatree.engine.recurrent.linear_attention import Records
from dynatree.engine.recurrent.memory import KEPT

# By a number of tokens, the state before them, and that after them.
Passed: TypeAlias = dict[int, tuple[Tensor, Tensor]]


def selective_scan(
    a: Tensor,
    dt: Tensor,
    v: Tensor,
    b: Tensor,
    c: Tensor,
    kept: Records,
    ancestors: Tensor | None,
    state: Tensor,
    passed: Passed | None = None,
) -> tuple[Tensor, Records]:
    """Compute the outputs of `n` new tokens.

    Args:
        a: `[channels, states]`, negative.
        dt: Step sizes `[n, channels]`.
        v: Inputs times step sizes `[n, channels]`.
        b: Input projections `[n, states]`.
        c: Output projections `[n, states]`.
        kept: Records of `m` earlier tokens that are not in the state, which form a chain: step sizes, inputs times step
            sizes, input projections.
        ancestors: Bool `[n, m + n]`, true where a token descends from a kept or new token; parents come before their
            children. None means a chain: every token descends from all before it.
        state: `[channels, states]`, after all tokens before the kept ones.
        passed: Receives the state that a chain has before its last `KEPT` tokens, for the `fold` that follows.

    Returns:
        Outputs `[n, channels]`, and the records of the new tokens.
    """
    m, n = len(kept[0]), len(dt)
    outputs = torch.empty_like(v)
    if ancestors is None:
        for token, after in enumerate(_chain(a, fold(a, state, kept), (dt, v, b))):
            torch.mv(after, c[token], out=outputs[token])
            if passed is not None and token + 1 == n - KEPT:
                passed[m + token + 1] = state, after.clone()
        return outputs, (dt, v, b)
    # states of: the state itself, kept tokens, new tokens; a parent is the last ancestor
    states = state.new_empty(1 + m + n, *state.shape)
    states[0] = state
    for place, (step, value, projection) in enumerate(zip(*kept, strict=True)):
        states[place + 1] = _after(states[place], step, value, projection, a)
    places = torch.arange(1, 1 + m + n, device=ancestors.device)
    parents = places.where(ancestors, 0).amax(1)
    depths = ancestors[:, m:].sum(1)
    for depth in range(int(depths.max()) + 1):
        level = (depths == depth).nonzero()[:, 0]
        states[1 + m + level] = _after(states[parents[level]], dt[level], v[level], b[level], a)
    return (states[1 + m :] @ c[..., None])[..., 0], (dt, v, b)


def fold(a: Tensor, state: Tensor, records: Records, passed: Passed | None = None) -> Tensor:
    """Compute the state after a chain of tokens: `[channels, states]`, from the state before it and their records.

    The computation of the chain's outputs may have `passed` it, for this fold alone: another session may begin with the
    same state and go on with other tokens.
    """
    before, after = passed.pop(len(records[0]), (None, None)) if passed else (None, None)
    if before is state and after is not None:
        return after
    return deque(_chain(a, state, records), maxlen=1).pop() if len(records[0]) else state


def _chain(a: Tensor, state: Tensor, records: Records) -> Iterator[Tensor]:
    """Yield the state after each token of a chain, in one tensor that changes; its bits are those of `_after`."""
    state = state.clone()
    decay, added = torch.empty_like(state), torch.empty_like(state)
    steps, values, projections = records
    for step, value, projection in zip(steps[..., None], values[..., None], projections[:, None], strict=True):
        torch.mul(step, a, out=decay).exp_()
        torch.mul(value, projection, out=added)
        yield state.mul_(decay).add_(added)


def _after(state: Tensor, dt: Tensor, v: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Compute states after one token each: `[..., channels, states]`."""
    return (dt[..., None] * a).exp() * state + v[..., None] * b[..., None, :]
