"""Linear attention with decays on a tree of tokens: Mamba-2 (SSD), lightning attention, and the core of delta rules.

Along a path, the recurrence is S_t = exp(g_t) S_(t-1) + k_t v_t' and o_t = S_t' q_t. With D_ia the product of the
decays on the path from token a, without a, to its descendant i, and with D_i that of all tokens from the state to i,

    o_i = D_i S' q_i + sum_a D_ia (k_a . q_i) v_a        over a in the ancestors of i, or i itself
    S'  = D_leaf S + sum_a D_leaf,a k_a v_a'             the state after a path

which gives the outputs of all tokens of a tree in one pass. A chain is a tree with one path; for it, this is the
chunkwise form of the papers (Yang et al. 2024, Gated Linear Attention; Dao and Gu 2024, Mamba-2). Log-decays are summed
along each path, and never subtracted, so decays near 0 and 1 lose no digits.

Names in Mamba-2's module: q is C, k is B, v is dt * x, and g is dt * A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

# The keys [m, G, dk], values [m, H, dv] and log-decays [m, H] or [m, H, dk] of m tokens, in the order of their slots.
Records: TypeAlias = tuple[Tensor, ...]

CHUNK = 64  # tokens of a chain that are computed at once; the chunk of transformers' functions
_MOST_DECAYS = 1 << 22  # decays per channel that are computed at a time; 32 MiB


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, kept: Records, ancestors: Tensor | None, state: Tensor
) -> tuple[Tensor, Records]:
    """Compute the outputs of `n` new tokens.

    Args:
        q: Queries `[n, G, dk]`, scaled. G divides the number of heads H: heads of a group share queries and keys.
        k: Keys `[n, G, dk]`.
        v: Values `[n, H, dv]`.
        g: Logarithms of the decays, `[n, H]`, or `[n, H, dk]` for a decay per channel.
        kept: Records of `m` earlier tokens that are not in the state.
        ancestors: Bool `[n, m + n]`, true where a token descends from a kept or new token; parents come before their
            children. None means a chain: every token descends from all before it.
        state: `[H, dk, dv]`, after all tokens before the kept ones.

    Returns:
        Outputs `[n, H, dv]`, and the records of the new tokens.
    """
    if ancestors is None:
        return in_chunks(linear_attention, (q, k, v, g), kept, state)
    keys, values, decays = append(kept, (k, v, g))
    (weights,), entering = products((q,), keys, decays, seen(ancestors))
    return read(q, weights, entering, values, state), (k, v, g)


def fold(state: Tensor, records: Records) -> Tensor:
    """Compute the state after a chain of tokens: `[H, dk, dv]`, from the state before it and the chain's records."""
    keys, values, decays = records
    entering, between = _path_decays(decays, torch.ones(1, len(decays), dtype=torch.bool, device=decays.device))
    if decays.dim() == 2:
        entering, between = entering[..., None], between[..., None]
    keys = of_heads(keys, values.shape[1]) * between[0]
    return entering[0, ..., None] * state + torch.einsum("ahk,ahv->hkv", keys, values)


def append(kept: Records, new: Records) -> Records:
    """Join the records of kept and new tokens."""
    return tuple(torch.cat(pair) for pair in zip(kept, new, strict=True))


def seen(ancestors: Tensor) -> Tensor:
    """Add the tokens themselves to their ancestors: bool `[n, m + n]`."""
    n, columns = ancestors.shape
    return ancestors | torch.ones_like(ancestors).tril(columns - n).triu(columns - n)


def products(queries: Sequence[Tensor], keys: Tensor, decays: Tensor, seen: Tensor) -> tuple[list[Tensor], Tensor]:
    """Compute the products D_ia (q_i . k_a) of several kinds of queries.

    Args:
        queries: Each `[n, G, dk]`.
        keys: `[m + n, G, dk]`.
        decays: Log-decays `[m + n, H]` or `[m + n, H, dk]`.
        seen: Bool `[n, m + n]`, true for a token's ancestors and itself.

    Returns:
        Each `[H, n, m + n]`, zero where a token does not see another; and the decays D_i from the state to each token,
        `[n, H, 1]` or `[n, H, dk]`.
    """
    heads = decays.shape[1]
    if decays.dim() == 2:
        entering, between = _path_decays(decays, seen)
        between = between.permute(2, 0, 1)
        plain = [torch.einsum("igd,agd->gia", each, keys) for each in queries]
        return [each.repeat_interleave(heads // len(each), 0) * between for each in plain], entering[..., None]
    keys = of_heads(keys, heads)
    rows = [of_heads(each, heads) for each in queries]
    weights: list[list[Tensor]] = [[] for _ in queries]
    entries = []
    step = max(_MOST_DECAYS // (seen.numel() * keys.shape[2]), 1)
    for some in (slice(start, start + step) for start in range(0, heads, step)):
        entering, between = _path_decays(decays[:, some], seen)
        between *= keys[:, some]
        for results, each in zip(weights, rows, strict=True):
            results.append(torch.einsum("ihd,iahd->hia", each[:, some], between))
        entries.append(entering)
    return [torch.cat(each) for each in weights], torch.cat(entries, 1)


def read(q: Tensor, weights: Tensor, entering: Tensor, values: Tensor, state: Tensor) -> Tensor:
    """Compute outputs `[n, H, dv]` from what `products` returned, the values `[m + n, H, dv]` and the state."""
    q = of_heads(q, len(state)) * entering
    return torch.einsum("ihk,hkv->ihv", q, state) + torch.einsum("hia,ahv->ihv", weights, values)


def in_chunks(
    step: Callable[..., tuple[Tensor, Records]],
    tokens: Sequence[Tensor],
    kept: Records,
    state: Tensor,
    fold: Callable[[Tensor, Records], Tensor] = fold,
) -> tuple[Tensor, Records]:
    """Compute a chain by chunks, so that work and memory grow with its length and not with the length's square.

    Args:
        step: Computes one chunk, as `linear_attention` does.
        tokens: Its first arguments, one row a token.
        kept: Records of the earlier tokens.
        state: The state before them.
        fold: Computes the state after a chunk.
    """
    outputs, records = [], []
    for start in range(0, len(tokens[0]), CHUNK):
        pieces = [each[start : start + CHUNK] for each in tokens]
        m, n = len(kept[0]), len(pieces[0])
        chain = torch.ones(n, m + n, dtype=torch.bool, device=state.device).tril(m - 1)
        output, new = step(*pieces, kept, chain, state)
        outputs.append(output)
        records.append(new)
        if start + CHUNK < len(tokens[0]):
            state = fold(state, append(kept, new))
            kept = tuple(each[:0] for each in kept)
    return torch.cat(outputs), tuple(torch.cat(each) for each in zip(*records, strict=True))


def _path_decays(decays: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply decays along paths.

    Args:
        decays: Log-decays `[a, ...]`.
        seen: Bool `[n, a]`.

    Returns:
        The product of the decays of all tokens that a token sees, `[n, ...]`. And for each token that it sees, the
        product of the decays after that token, `[n, a, ...]`; it is zero for tokens that it does not see.
    """
    seen = seen.reshape(*seen.shape, *(1 for _ in decays.shape[1:]))
    later = decays.where(seen, decays.new_zeros(())).flip(1).cumsum(1).flip(1)  # of a token and those after it
    none = torch.zeros_like(later[:, :1])
    between = torch.cat((later, none), 1)
    return between[:, 0].exp(), between[:, 1:].exp().where(seen, decays.new_zeros(()))


def of_heads(each: Tensor, heads: int) -> Tensor:
    """Repeat a group's queries or keys for its heads: `[n, G, dk]` to `[n, H, dk]`."""
    return each if each.shape[1] == heads else each.repeat_interleave(heads // each.shape[1], 1)
