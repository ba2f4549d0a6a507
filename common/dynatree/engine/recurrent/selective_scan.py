"""The selective scan of Mamba-1 on a tree of tokens.

Along a path, the recurrence is (Gu and Dao 2023, Mamba, equation 2 and algorithm 2), for each channel c and state s,

    S_t[c, s] = exp(dt_t[c] A[c, s]) S_(t-1)[c, s] + B_t[s] v_t[c]   with   v_t = dt_t x_t
    y_t[c] = sum_s C_t[s] S_t[c, s]

Every channel and state has a decay of its own, so no matrix of tokens by tokens is shared. Instead, the states of a
tree's tokens are computed level by level, each from its parent's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynatree.engine.recurrent.linear_attention import Records


def selective_scan(
    a: Tensor, dt: Tensor, v: Tensor, b: Tensor, c: Tensor, kept: Records, ancestors: Tensor | None, state: Tensor
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

    Returns:
        Outputs `[n, channels]`, and the records of the new tokens.
    """
    m, n = len(kept[0]), len(dt)
    outputs = torch.empty_like(v)
    if ancestors is None:
        state = fold(a, state, kept)
        for token in range(n):
            state = _after(state, dt[token], v[token], b[token], a)
            outputs[token] = state @ c[token]
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


def fold(a: Tensor, state: Tensor, records: Records) -> Tensor:
    """Compute the state after a chain of tokens: `[channels, states]`, from the state before it and their records."""
    for step, value, projection in zip(*records, strict=True):
        state = _after(state, step, value, projection, a)
    return state


def _after(state: Tensor, dt: Tensor, v: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Compute states after one token each: `[..., channels, states]`."""
    return (dt[..., None] * a).exp() * state + v[..., None] * b[..., None, :]
