"""The gated delta rule on a tree of tokens (Qwen3-Next, Qwen3.5, OLMo hybrid; Kimi Linear with a decay per channel).

Along a path, the recurrence is (Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks, equation 10)

    S_t = exp(g_t) S_(t-1) + k_t u_t'   with   u_t = beta_t (v_t - (exp(g_t) S_(t-1))' k_t)   and   o_t = S_t' q_t

With the pseudo-values u_t in the place of values it is linear attention with decays. The pseudo-values of all tokens of
a tree solve one triangular system, because parents come before their children (D_i, D_ia: see `linear_attention`):

    u_i + beta_i sum_a D_ia (k_a . k_i) u_a = beta_i (v_i - D_i S' k_i)        over the ancestors a of i
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynatree.engine.recurrent.linear_attention import Records, append, fold, in_chunks, of_heads, products, read, seen

__all__ = ["fold", "gated_delta"]


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    kept: Records,
    ancestors: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Records]:
    """Compute the outputs of `n` new tokens.

    Args:
        q: Queries `[n, G, dk]`, normalised and scaled. G divides the number of heads H: heads of a group share queries
            and keys.
        k: Keys `[n, G, dk]`, normalised.
        v: Values `[n, H, dv]`.
        g: Logarithms of the decays, `[n, H]`, or `[n, H, dk]` for a decay per channel.
        beta: `[n, H]`.
        kept: Records of `m` earlier tokens that are not in the state: keys, pseudo-values, log-decays.
        ancestors: Bool `[n, m + n]`, true where a token descends from a kept or new token; parents come before their
            children. None means a chain: every token descends from all before it.
        state: `[H, dk, dv]`, after all tokens before the kept ones.

    Returns:
        Outputs `[n, H, dv]`, and the records of the new tokens.
    """
    if ancestors is None:
        return in_chunks(gated_delta, (q, k, v, g, beta), kept, state)
    m = len(kept[0])
    keys, decays = append((kept[0], kept[2]), (k, g))
    (by_query, by_key), entering = products((q, k), keys, decays, seen(ancestors))
    by_key *= beta.T[..., None]
    from_kept = torch.einsum("hia,ahv->hiv", by_key[..., :m], kept[1])
    right = torch.einsum("ihk,hkv->hiv", of_heads(k, len(state)) * entering, state)
    right = beta.T[..., None] * (v.transpose(0, 1) - right) - from_kept
    # the solver takes the diagonal as ones, and reads only what is below it
    u = torch.linalg.solve_triangular(by_key[..., m:], right, upper=False, unitriangular=True).transpose(0, 1)
    values = torch.cat((kept[1], u))
    return read(q, by_query, entering, values, state), (k, u, g)
