"""Models that are tables, and the chi-square of what is drawn from them."""

from types import SimpleNamespace

import torch


class Table:
    """Stands in for an engine: the logits after a token are a row of its table, so there is nothing to remember."""

    def __init__(self, logits):
        self._logits = logits
        self.info = SimpleNamespace(context_length=1000, vocab_size=len(logits))
        self.arena = SimpleNamespace(move=lambda kv, sources, start: None)

    def forward(self, segments):
        kept = [segment.keep if segment.keep is not None else range(len(segment.token_ids)) for segment in segments]
        return [
            self._logits[[segment.token_ids[place] for place in keep]]
            for segment, keep in zip(segments, kept, strict=True)
        ]

    reader = decider = None  # each level is a forward, and the host decides

    def synchronize(self):
        pass


def p_value(counts, probabilities):
    """The probability of a chi-square that is as large."""
    statistic, freedom = chi_square(counts, probabilities)
    return torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)).item()


def chi_square(counts, probabilities):
    """Pearson's statistic over rows `[contexts, tokens]`, and its degrees of freedom.

    In each row the cells of fewer than five expected count as one.
    """
    statistic, freedom = 0.0, 0
    for observed, share in zip(counts, probabilities, strict=True):
        expected = share / share.sum() * observed.sum()
        small = expected < 5
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        keep = expected > 1e-4  # tokens that never come have cells of next to nothing
        assert observed[~keep].sum() == 0
        statistic += ((observed - expected)[keep] ** 2 / expected[keep]).sum().item()
        freedom += max(int(keep.sum()) - 1, 0)
    return statistic, freedom
