"""Tests `dynatree` and `fixed` against a transcript of DynaTree's Algorithm 1, tree by tree, in the real growth loop.

The transcript follows DRAFTTREE (lines 9 to 31), UPDATEHISTORY and ADJUST (line 7, by the formula of section 3.3), and
the rule of the authors' public repository; `test_accept.py` covers SELECTCOMMIT. This project's prefix in place of u0
(`root` committed) and removal in place of line 14 (`prune` remove) are two lines of the transcript.
"""

from __future__ import annotations

import math
import random
from collections import deque
from types import SimpleNamespace

import pytest

from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.tree import ROOT, DraftDistribution
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy
from dynatree.draft.policies.growing_tree import Proposal
from dynatree.engine.kv.kv_range import KVRange
from tests.support.growing import outcome_of

PROMPT = (3, 1, 4)
VOCABULARY = 7


# The transcript


def draft_tree(likeliest, x, s, *, strict):
    """DRAFTTREE: the (token, parent) of the nodes, in order of creation.

    `likeliest(text)` returns (token, probability) in the order in which children are taken. `strict` is version 003,
    which expands beyond D_0 if p(u) > rho_deep; 000 to 002 expand if p(u) >= rho_deep.
    """
    tree = []
    frontier = deque()

    def add(token, probability, parent, text, depth, p):
        if s.prune == "remove" and p * probability < s.tau:
            return  # this project's variant
        tree.append((token, parent))
        frontier.append((len(tree) - 1, (*text, token), depth, p * probability))

    if s.root == "single":
        token, probability = likeliest(x)[0]
        add(token, probability, ROOT, x, 0, 1.0)
    else:
        frontier.append((ROOT, x, 0, 1.0))  # this project's variant
    while frontier and len(tree) < s.n_max:
        u, text, d, p = frontier.popleft()
        if p < s.tau or d >= s.d_max or p < s.rho_stop:
            continue
        if d >= s.d_0 and (p <= s.rho_deep if strict else p < s.rho_deep):
            continue
        c = max(probability for _, probability in likeliest(text))
        b = s.b_min if c >= s.tau_h else s.b_max if c < s.tau_l else s.b_mid
        for token, probability in likeliest(text)[:b]:
            if len(tree) < s.n_max:
                add(token, probability, u, text, d + 1, p)
    return tree


def adjust(s, history, a):
    """UPDATEHISTORY and ADJUST after a round: the proportional update of section 3.3."""
    history.append(a)
    mean = sum(history[-s.window :]) / len(history[-s.window :])
    s.d_0 = min(max(s.d_0 + s.eta_d * (mean - s.target), 1), s.d_max - 1)
    s.tau_h = min(max(s.tau_h - s.eta_h * (mean - s.target), 0), 1)


def adjust_as_released(s, history, a):
    """Adjust as the public repository does after a completion."""
    history.append(a)
    del history[: -s.window]
    if len(history) < 5:
        return
    mean = sum(history) / len(history)
    if mean > s.target + 0.1:
        s.d_0 = min(s.d_0 + 1, s.d_max - 1)
        s.tau_h, s.rho_deep = max(s.tau_h - s.eta_h, 0.5), max(s.rho_deep - s.eta_h, 0.3)
    elif mean < s.target - 0.1:
        s.d_0 = max(s.d_0 - 1, 2)
        s.tau_h, s.rho_deep = min(s.tau_h + s.eta_h, 0.95), min(s.rho_deep + s.eta_h, 0.8)


# The models


class Table:
    """A `DraftModel` with a random distribution after each text; in residual sampling, a random order in each round.

    The distribution may be flat, or as peaked as that of a confident draft.
    """

    context_length = 10_000

    def __init__(self, seed, sampled):
        self.seed, self.sampled, self.round = seed, sampled, 0

    def likeliest(self, text):
        chance = random.Random(repr((self.seed, text)))
        peak = chance.choice((0.3, 1.0, 3.0, 10.0, 30.0))
        weights = [chance.random() ** peak + 1e-9 for _ in range(VOCABULARY)]
        row = [(token, weight / sum(weights)) for token, weight in enumerate(weights)]
        row.sort(key=lambda pair: -pair[1])
        if self.sampled:
            random.Random(repr((self.seed, self.round, text))).shuffle(row)
        return row

    def reserve(self, slots, prompt_ids, principal):
        return KVRange(0, slots), 0

    def release(self, kv, token_ids, principal):
        pass

    def move(self, kv, slots, start):
        pass

    def expand(self, expansions):
        for each in expansions:
            for index in each.nodes:
                path = [node.token for node in reversed(each.tree.path(index))]
                row = self.likeliest((*each.session.committed, *path))
                node = each.tree.node(index)
                node.proposals = tuple(Proposal(token, math.log(p)) for token, p in row[: each.breadth])
                if self.sampled:
                    node.candidates = DraftDistribution(*zip(*row, strict=True))
        return 0.0


def random_settings(chance, policy):
    """Return random settings of a policy, and the same settings for the transcript."""
    shape = {
        "tau": chance.choice((0.0, chance.uniform(0.0, 0.3))),
        "max_nodes": chance.choice((chance.randint(1, 12), 60)),
        "root": chance.choice(("committed", "single")),
        "prune": chance.choice(("remove", "expand")),
    }
    s = SimpleNamespace(tau=shape["tau"], n_max=shape["max_nodes"], root=shape["root"], prune=shape["prune"])
    if policy == "fixed":
        depth, breadth = chance.randint(1, 5), chance.randint(1, 3)
        s.b_min = s.b_mid = s.b_max = breadth
        s.d_0 = s.d_max = depth
        s.tau_l = s.tau_h = s.rho_stop = s.rho_deep = 0.0
        return {**shape, "depth": depth, "breadth": breadth}, s
    s.b_min, s.b_mid, s.b_max = sorted(chance.randint(1, 4) for _ in range(3))
    s.d_0 = chance.randint(1, 4)
    s.d_max = s.d_0 + chance.randint(1, 4)
    s.tau_l, s.tau_h = sorted(chance.uniform(0.05, 0.99) for _ in range(2))
    s.rho_stop, s.rho_deep = sorted(chance.uniform(0.01, 0.6) for _ in range(2))
    s.window, s.target = chance.randint(1, 8), chance.uniform(0.2, 0.9)
    s.eta_d, s.eta_h = chance.uniform(0.0, 3.0), chance.uniform(0.0, 0.3)
    return {
        **shape,
        **{"breadth_min": s.b_min, "breadth_mid": s.b_mid, "breadth_max": s.b_max},
        **{"base_depth": s.d_0, "max_depth": s.d_max, "tau_low": s.tau_l, "tau_high": s.tau_h},
        **{"rho_stop": s.rho_stop, "rho_deep": s.rho_deep, "window": s.window, "target_acceptance": s.target},
        **{"depth_step": s.eta_d, "tau_step": s.eta_h},
        "history": chance.choice((0, 1, "released")),
    }, s


def compare(seed, policy, sampled, *, rounds=3):
    """Grow the trees of some completions both ways, and check that they are equal; return the number of trees."""
    chance = random.Random(repr((seed, policy, sampled)))
    settings, s = random_settings(chance, policy)
    if sampled:
        s.prune = "expand"  # a draw must not be removed because of its token
    rule, history, most = settings.get("history", 0), [], s.d_0 + 2
    start = SimpleNamespace(**vars(s))
    costs, model = Costs(), Table(seed, sampled)
    sampling = Sampling(temperature=1.0, seed=1, scheme=Scheme.RESIDUAL) if sampled else Sampling()
    trees = 0
    for _ in range(15 if rule == "released" else 4):
        drafter = Drafter(model, 256)
        grower = create_policy(policy, settings, costs)
        session = drafter.open([*PROMPT, chance.randrange(VOCABULARY)], sampling, VOCABULARY)
        if rule == 1:
            s, history = SimpleNamespace(**vars(start)), []
        committed = 0
        for _ in range(rounds):
            tree = drafter.grow(session, grower, 64, 256).tree
            for strict in (True, False):
                expected = draft_tree(model.likeliest, tuple(session.committed), s, strict=strict)
                assert list(zip(tree.token_ids, tree.parents, strict=True)) == expected, (seed, settings)
            trees += 1
            path, tokens = accepted_path(chance, tree)
            drafter.commit(session, tokens)
            model.round += 1
            committed += len(tokens)
            grower.observe(outcome_of(tree, path, bonus=tokens[-1]))
            if rule == 1 and len(tree):
                adjust(s, history, len(path) / tree.depth)
        grower.end()
        if rule == "released":
            adjust_as_released(s, history, committed / (rounds * most))
    return trees


def accepted_path(chance, tree):
    """Return a path that a target may accept, and the tokens that it commits."""
    path, node = [], ROOT
    while (below := [child for child, parent in enumerate(tree.parents) if parent == node]) and chance.random() < 0.8:
        node = chance.choice(below)
        path.append(node)
    taken = {tree.token_ids[child] for child, parent in enumerate(tree.parents) if parent == node}
    free = [token for token in range(VOCABULARY) if token not in taken]
    return tuple(path), (*(tree.token_ids[node] for node in path), chance.choice(free or range(VOCABULARY)))


@pytest.mark.parametrize("sampled", [False, True], ids=["known", "drawn"])
@pytest.mark.parametrize("policy", ["dynatree", "fixed"])
def test_trees_are_those_of_algorithm_1(policy, sampled):
    assert sum(compare(seed, policy, sampled) for seed in range(30)) >= 30 * 12
