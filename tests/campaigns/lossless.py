"""Is sampling lossless? A table of policies, schemes and cases.

    python -m tests.campaigns.lossless [--draws 20000] [--one-noise]

The cases are those of test_distribution.py, which tests a part of the table. With --one-noise, all nodes of one depth
share one row of noise, which is a fault; the table then shows that the test would detect it.
"""

import argparse
import math
import time

import dynatree.draft.growth.draft_model
from dynatree.common.sampling import Scheme
from tests.exactness.test_distribution import MIRROR, THREE, TIGHT, drawn
from tests.support.markov import chi_square, p_value

CASES = {"mirror": MIRROR, "three": THREE}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--one-noise", action="store_true")
    parser.add_argument("--schemes", nargs="*", default=[scheme.name.lower() for scheme in Scheme])
    parser.add_argument("--policies", nargs="*", default=list(TIGHT))
    options = parser.parse_args()
    if options.one_noise:
        dynatree.draft.growth.draft_model.node_of = lambda path: 0
    print("| policy | scheme | case | chi-square of pairs | of triples | p | sigma of the most wrong transition | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.policies:
        for scheme in options.schemes:
            for case, pair in CASES.items():
                print(row(name, Scheme[scheme.upper()], case, pair, options.draws), flush=True)


def row(name, scheme, case, pair, draws):
    started = time.perf_counter()
    counts, _ = drawn(pair, name, TIGHT[name], draws=draws, scheme=scheme)
    target = pair.target.double().softmax(-1)
    of_pairs, of_triples = counts.of.sum(0), (counts.of.flatten(0, 1), target.repeat(pair.vocabulary, 1))
    pairs, triples = chi_square(of_pairs, target), chi_square(*of_triples)
    p = min(p_value(of_pairs, target), p_value(*of_triples))
    cells = [f"{statistic:.0f} on {freedom}" for statistic, freedom in (pairs, triples)]
    cells += [f"{p:.2g}", f"{worst(counts.of, target):+.1f}", f"{time.perf_counter() - started:.0f}"]
    return "| " + " | ".join([name, scheme.name.lower(), case, *cells]) + " |"


def worst(counts, target):
    """The largest deviation of any P(next | before last, last), in standard deviations."""
    found = 0.0
    for before in range(len(counts)):
        for last in range(len(counts)):
            trials = counts[before, last].sum().item()
            for token, share in enumerate(target[last].tolist()):
                if trials * share * (1 - share) > 5:
                    sigma = (counts[before, last, token].item() - trials * share) / math.sqrt(
                        trials * share * (1 - share)
                    )
                    found = sigma if abs(sigma) > abs(found) else found
    return found


if __name__ == "__main__":
    main()
