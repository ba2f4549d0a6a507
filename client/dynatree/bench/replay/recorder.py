"""Recording: plain decoding of prompts, and what the draft proposes along each completion and below it.

The proposals are those of the draft service: its `Drafter` reads the committed tokens and grows a tree below every
position, by a policy that expands whatever some policy of the service may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dynatree.bench.replay.recording import Node, RecordedRun
from dynatree.common.engine import Engine, ModelSettings
from dynatree.common.sampling import Sampling
from dynatree.common.tree import ROOT, TokenTree
from dynatree.draft.drafter import Drafter
from dynatree.draft.growing_tree import GrowingTree, Proposal
from dynatree.draft.ngram_index import NGramIndex
from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.hybrid import READ_ALONG
from dynatree.verify.session import SessionRequest
from dynatree.verify.verifier import Verifier

BREADTH = 16  # the most proposals that a policy's defaults ask for
LEAST_PROPOSALS = 4  # of a node off the true path: what `throughput` and `dynatree` ask for
MAX_DEPTH = 16
MOST_NODES = 4096  # below one position
NGRAMS = ((8, 2), (4, 2))  # longest and shortest match, of `throughput` and `hybrid`
NGRAM_PROB = 0.1  # a continuation's first token counts as so likely, however unlikely the draft finds it
NEXT_NGRAM_PROB = 0.5  # and each later one


class Recorder:
    """Records completions of one pair of models.

    Args:
        target: Decodes; it needs one session.
        draft: Proposes; its one session needs `2 * MOST_NODES` scratch slots.
        least_expanded: The path probability, from where a context leaves the true path, down to which nodes are expanded.
        least_proposed: The same for proposals that are kept; a node keeps at least `LEAST_PROPOSALS`.
    """

    def __init__(self, target: Engine, draft: Engine, least_expanded: float, least_proposed: float) -> None:
        self._verifier = Verifier(target, max_tree_nodes=1)
        self._drafter = Drafter(draft, MOST_NODES, min(target.info.vocab_size, draft.info.vocab_size))
        self._least_expanded = math.log(least_expanded)
        self._least_proposed = math.log(least_proposed)

    @classmethod
    def load(
        cls, target: ModelSettings, draft: ModelSettings, least_expanded: float, least_proposed: float
    ) -> Recorder:
        """Load both models.

        Raises:
            StartupError: One of them cannot be served.
        """
        return cls(Engine.load(target), Engine.load(draft), least_expanded, least_proposed)

    def record(
        self, prompt: int, prompt_ids: Sequence[int], new_tokens: int, temperature: float, seed: int
    ) -> RecordedRun:
        """Decode so many new tokens, and ask the draft about every position; end-of-sequence tokens are ignored."""
        sampling = Sampling(temperature=temperature, seed=seed if temperature else 0)
        completion = self._decode(prompt_ids, new_tokens, sampling)
        nodes = _Nodes(prompt_ids, completion, self._least_proposed)
        exploration = Exploration(completion, self._least_expanded)
        session = self._drafter.open(prompt_ids, sampling)
        try:
            for position, token in enumerate(completion):
                exploration.position = position
                self._drafter.grow(session, exploration, MAX_DEPTH + 1, MOST_NODES)
                nodes.add_tree(position, exploration.tree)
                self._drafter.commit(session, [token])
        finally:
            self._drafter.close(session)
        return RecordedRun(
            prompt=prompt,
            temperature=temperature,
            seed=seed if temperature else None,
            prompt_ids=tuple(prompt_ids),
            completion=completion,
            nodes=nodes.nodes,
        )

    def _decode(self, prompt_ids: Sequence[int], new_tokens: int, sampling: Sampling) -> tuple[int, ...]:
        request = SessionRequest(tuple(prompt_ids), len(prompt_ids) + new_tokens, frozenset(), sampling)
        session, _, _ = self._verifier.open(request)
        try:
            while not session.finished:
                self._verifier.verify([(session, TokenTree())])
            return tuple(session.committed[len(prompt_ids) :])
        finally:
            self._verifier.close(session)


class Exploration(Policy):
    """Expands, below one position after the other, every node that some policy may.

    These are the nodes off the true path that are likely enough, and those that policies with n-grams read along with
    the root. The node of the true token is left to the next position, whose root it is.

    Attributes:
        position: Tokens of the completion that are committed.
        tree: The tree of the last growth.
    """

    breadth = BREADTH
    tree: GrowingTree

    def __init__(self, completion: Sequence[int], least_log_prob: float) -> None:
        self.position = 0
        self._completion = completion
        self._least = least_log_prob
        self._indices = [NGramIndex(shortest, longest) for longest, shortest in NGRAMS]
        self._true: set[int] = set()

    def start(self, tree: GrowingTree) -> list[int]:
        """Add the continuations that may be read along, and expand them with the root."""
        self.tree = tree
        self._true = {ROOT}
        added: dict[tuple[int, int], int] = {}
        for index in self._indices:
            for _, tokens in index.continuations(tree.context, READ_ALONG, 1):
                node = ROOT
                for token in tokens:
                    if (node, token) not in added:
                        prob = NGRAM_PROB if node == ROOT else NEXT_NGRAM_PROB
                        added[node, token] = self._add(node, Proposal(token, math.log(prob)))
                    node = added[node, token]
        return [ROOT, *added.values()]

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add the proposals that are likely enough, and expand those off the true path."""
        added = [
            self._add(node, proposal)
            for node in level
            for proposal in tree.proposals(node)
            if tree.path_log_prob(node) + proposal.log_prob >= self._least and not tree.has_child(node, proposal.token)
        ]
        return [node for node in added if node not in self._true]

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Nothing is sent."""
        return ()

    def _add(self, parent: int, proposal: Proposal) -> int:
        depth = self.tree.depth(parent)
        node = self.tree.add(parent, proposal)
        next_ = self.position + depth
        if parent in self._true and next_ < len(self._completion) and self._completion[next_] == proposal.token:
            self._true.add(node)
        return node


class _Nodes:
    """The nodes of a run as they are found."""

    def __init__(self, prompt_ids: Sequence[int], completion: Sequence[int], least_log_prob: float) -> None:
        tokens = (prompt_ids[-1], *completion[:-1])
        self.nodes = [Node(place - 1, token, ()) for place, token in enumerate(tokens)]
        self._places = {(node.parent, node.token): place for place, node in enumerate(self.nodes)}
        self._least = least_log_prob

    def add_tree(self, position: int, tree: GrowingTree) -> None:
        """Take in the expanded nodes of a tree below a position."""
        self.nodes[position] = Node(self.nodes[position].parent, self.nodes[position].token, tree.proposals(ROOT))
        places = {ROOT: position}
        for node in range(len(tree)):
            if not tree.is_read(node):
                continue
            edge = places[tree.parent(node)], tree.node(node).token
            place = self._places.setdefault(edge, len(self.nodes))
            places[node] = place
            if place == len(self.nodes):
                self.nodes.append(Node(*edge, self._kept(tree, node)))

    def _kept(self, tree: GrowingTree, node: int) -> tuple[Proposal, ...]:
        least = self._least - tree.path_log_prob(node)
        return tuple(
            proposal
            for rank, proposal in enumerate(tree.proposals(node))
            if rank < LEAST_PROPOSALS or proposal.log_prob >= least
        )


def recordings(
    recorder: Recorder, prompts: Sequence[Sequence[int]], new_tokens: int, temperatures: Sequence[float], seed: int
) -> Iterator[RecordedRun]:
    """Every prompt at every temperature; the seed of a prompt is `seed` + its number, as in `bench compare`."""
    for number, prompt_ids in enumerate(prompts):
        for temperature in temperatures:
            yield recorder.record(number, prompt_ids, new_tokens, temperature, seed + number)
