"""Models and grammars that are tables, and chi-square tests of the tokens drawn from them."""

from types import SimpleNamespace

import numpy as np
import torch


class Table:
    """Stands in for an engine: the logits after a token are a row of the table, so it needs no KV cache."""

    def __init__(self, logits):
        self._logits = logits
        self.info = SimpleNamespace(context_length=1000, vocab_size=len(logits))
        self.kv_cache = SimpleNamespace(move=_nothing, forget=_nothing, device=torch.device("cpu"))

    def forward(self, segments):
        kept = [segment.keep if segment.keep is not None else range(len(segment.token_ids)) for segment in segments]
        return [
            self._logits[[segment.token_ids[place] for place in keep]]
            for segment, keep in zip(segments, kept, strict=True)
        ]

    level_runner = decider = None  # each level is a forward pass, and the host decides

    def synchronize(self):
        pass


class DecidingTable(Table):
    """Stands in for an engine whose device decides, where it leaves all choices to the host."""

    decider = object()

    def decide(self, segments, choosings):
        return self.forward(segments), [None] * len(segments)


def _nothing(*arguments):
    pass


class Following:
    """Stands in for the state of a grammar: a row of the table, `[last token, next token]`, says what may follow.

    States are computed once, because a walk asks each of them for every token.
    """

    error = None

    def __init__(self, table, last, states=None):
        self._table, self._states = table, {} if states is None else states
        self.bits = np.packbits(table[last].numpy(), bitorder="little").tobytes()
        self._allows = table[last].tolist()
        tokens = [token for token, allowed in enumerate(self._allows) if allowed]
        self.forced = tokens[0] if len(tokens) == 1 else None

    def allows(self, token):
        return self._allows[token]

    def after(self, token):
        if not self.allows(token):
            return None
        if token not in self._states:
            self._states[token] = Following(self._table, token, self._states)
        return self._states[token]

    def after_all(self, token_ids):
        state = self
        for token in token_ids:
            state = state and state.after(token)
        return state


def p_value(counts, probabilities):
    """Probability of a chi-square statistic at least as large."""
    statistic, freedom = chi_square(counts, probabilities)
    return torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)).item()


def chi_square(counts, probabilities):
    """Pearson's statistic over rows `[contexts, tokens]`, and its degrees of freedom.

    In each row, the cells with an expected count below five are merged into one.
    """
    statistic, freedom = 0.0, 0
    for observed, share in zip(counts, probabilities, strict=True):
        expected = share / share.sum() * observed.sum()
        small = expected < 5
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        keep = expected > 1e-4  # tokens that never occur have cells with an expected count near 0
        assert observed[~keep].sum() == 0
        statistic += ((observed - expected)[keep] ** 2 / expected[keep]).sum().item()
        freedom += max(int(keep.sum()) - 1, 0)
    return statistic, freedom
