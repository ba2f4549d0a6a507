"""Record plain decoding of prompts, and the draft's proposals along each completion and off it.

The proposals are those of the draft service: its `Drafter` reads the committed tokens and expands nodes below them.
Off the true path, the recorder expands below every position the nodes that are likely enough and the nodes that
policies with n-grams expand together with the root. It then adds the nodes that some policies ask for when they are
replayed on some machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import product

from dynatree.bench.methods import Method
from dynatree.common.decoding import Decoding
from dynatree.common.sampling import Sampling
from dynatree.common.tree import ROOT
from dynatree.draft.control.constants import DEFAULT_CONTROL
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal
from dynatree.draft.policies.ngram_index import NGramIndex
from dynatree.draft.target.target import Target
from dynatree.engine.engine import Engine
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from dynatree.replay.machines import Machine
from dynatree.replay.recording import RecordedRun
from dynatree.replay.runs import Settings, Task, groups, replay_group
from dynatree.replay.session import sampling_of
from dynatree.replay.table_model import Ask
from dynatree.verify.session import SessionRequest
from dynatree.verify.verifier import Part, Verifier, verdicts_of

BREADTH = 16  # proposals per node on the true path: the most that any policy asks for by default
LEAST_PROPOSALS = 4  # proposals kept per node off the true path: the most that `throughput` and `dynatree` ask for
MAX_DEPTH = 16
MOST_NODES = 4096  # largest number of nodes below one position
NGRAMS = ((8, 2), (4, 2))  # longest and shortest match of `throughput` and of `hybrid`
NGRAM_PROB = 0.1  # least probability assumed for the first token of a continuation
NEXT_NGRAM_PROB = 0.5  # least probability assumed for each later token
ASKING = tuple(Method(name, name) for name in ("throughput", "dynatree", "hybrid"))  # policies that are replayed


class Recorder:
    """Records completions of one pair of models.

    Args:
        target: Engine that decodes; it needs one session.
        draft: Engine that proposes; its one session needs `2 * MOST_NODES` scratch slots.
        least_prob: Least path probability, counted from the true path, of the nodes that are expanded. Proposals are
            kept down to a quarter of it, and at least `LEAST_PROPOSALS` of them.
    """

    def __init__(self, target: Engine, draft: Engine, least_prob: float) -> None:
        self.target = target
        self.draft = draft
        self._verifier = Verifier(target, max_tree_nodes=1)
        self._drafter = Drafter(EngineDraftModel(draft), MOST_NODES)
        known_ids = max(draft.tokenizer.get_vocab().values()) + 1
        self._vocab_size = Target.of(target.info, draft.info, known_ids, ahead=False).vocab_size
        self._least = math.log(least_prob)

    @classmethod
    def load(
        cls,
        target: str,
        draft: str,
        device: str,
        dtype: str,
        least_prob: float,
        weights: str = "auto",
        draft_weights: str = "auto",
    ) -> Recorder:
        """Load both models.

        Raises:
            StartupError: One of them cannot be served.
            FailedPreconditionError: Their tokenizers differ.
        """
        return cls(
            load_engine(ModelSettings(target, device, dtype, weights, sessions=1, speculative_slots=1)),
            load_engine(
                ModelSettings(
                    draft,
                    device,
                    dtype,
                    draft_weights,
                    sessions=1,
                    speculative_slots=2 * MOST_NODES,
                    chooses_tokens=False,
                )
            ),
            least_prob,
        )

    def record(
        self, text: int, prompt: int, prompt_ids: Sequence[int], new_tokens: int, temperature: float, seed: int
    ) -> RecordedRun:
        """Decode `new_tokens` tokens, and explore below each; end-of-sequence tokens are ignored."""
        sampling = Sampling(temperature=temperature, seed=seed if temperature else 0)
        completion = self._decode(prompt_ids, new_tokens, sampling)
        run = RecordedRun(text, prompt, temperature, seed if temperature else None, tuple(prompt_ids), completion)
        exploration = Exploration(run, self._least)
        session = self._drafter.open(prompt_ids, sampling, self._vocab_size)
        try:
            for position, token in enumerate(completion):
                exploration.position = position
                self._drafter.grow(session, exploration, MAX_DEPTH + 1, MOST_NODES)
                exploration.record()
                self._drafter.commit(session, [token])
        finally:
            self._drafter.close(session)
        return run

    def complete(
        self,
        runs: Sequence[RecordedRun],
        machines: Iterable[Machine],
        *,
        done: Callable[[], object] = lambda: None,
    ) -> None:
        """Add the nodes that the policies of `ASKING` ask for on these machines; call `done` after each policy."""
        with closing(_Asking(self._drafter, self._vocab_size)) as asking:
            for machine, group, method in product(machines, groups(runs), ASKING):
                for fresh in (False, True):
                    replay_group(Task(method, machine, group, Settings(fresh=fresh)), asking.of)
                done()

    def _decode(self, prompt_ids: Sequence[int], new_tokens: int, sampling: Sampling) -> tuple[int, ...]:
        request = SessionRequest(tuple(prompt_ids), len(prompt_ids) + new_tokens, frozenset(), Decoding(sampling))
        session = self._verifier.open(request)
        try:
            verdicts_of(self._verifier.run([Part(session, prompt_tokens=session.unread)])[0])
            while not session.finished:
                verdicts_of(self._verifier.run([Part(session)])[0])
            return tuple(session.committed[len(prompt_ids) :])
        finally:
            self._verifier.close(session)


class Exploration(Policy):
    """Expands, below each position in turn, the nodes that are recorded whatever the policies ask for.

    The node of the true token is left to the next position, whose root it is.

    Attributes:
        position: Number of committed tokens of the completion.
    """

    breadth = BREADTH

    def __init__(self, run: RecordedRun, least_log_prob: float) -> None:
        self.position = 0
        self._run = run
        self._least = least_log_prob
        self._indices = [NGramIndex(range(shortest, longest + 1)) for longest, shortest in NGRAMS]
        self._tree: GrowingTree
        self._true: set[int] = set()

    def start(self, tree: GrowingTree) -> list[int]:
        """Add the continuations that policies may expand with the root, and expand them with it."""
        self._tree = tree
        self._true = {ROOT}
        added: dict[tuple[int, int], int] = {}
        for index in self._indices:
            for _, tokens in index.continuations(tree.context, DEFAULT_CONTROL.expand_along, 1):
                node = ROOT
                for token in tokens:
                    if (node, token) not in added:
                        prob = NGRAM_PROB if node == ROOT else NEXT_NGRAM_PROB
                        added[node, token] = self._add(node, Proposal(token, math.log(prob)))
                    node = added[node, token]
        return [ROOT, *added.values()]

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add the proposals that are likely enough, and expand those off the true path."""
        if ROOT in level:
            tree.revalue([self._likelier(tree, node) for node in range(len(tree))])
        added = [
            self._add(node, proposal)
            for node in level
            for proposal in tree.proposals(node)
            if tree.path_log_prob(node) + proposal.log_prob >= self._least and not tree.has_child(node, proposal.token)
        ]
        return [node for node in added if node not in self._true]

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Select no node: nothing is verified."""
        return ()

    def record(self) -> None:
        """Record the expanded nodes of the last tree."""
        tree, run = self._tree, self._run
        run.set_proposals(self.position, tuple(tree.proposals(ROOT)))
        places = {ROOT: self.position}
        for node in range(len(tree)):
            if not tree.is_expanded(node):
                continue
            above, token = places[tree.parent(node)], tree.node(node).token
            known = run.child(above, token)
            places[node] = run.add(above, token, self._kept(node)) if known is None else known

    def _likelier(self, tree: GrowingTree, node: int) -> Proposal:
        """The node's token, with the draft's log-probability if that is higher than the assumed one."""
        token = tree.node(node).token
        log_probs = (each.log_prob for each in tree.proposals(tree.parent(node)) if each.token == token)
        return Proposal(token, max(tree.log_prob(node), *log_probs, -math.inf))

    def _add(self, parent: int, proposal: Proposal) -> int:
        next_ = self.position + self._tree.depth(parent)
        node = self._tree.add(parent, proposal)
        if parent in self._true and self._run.completion[next_ : next_ + 1] == (proposal.token,):
            self._true.add(node)
        return node

    def _kept(self, node: int) -> tuple[Proposal, ...]:
        least = self._least - math.log(4) - self._tree.path_log_prob(node)
        return tuple(
            proposal
            for rank, proposal in enumerate(self._tree.proposals(node))
            if rank < LEAST_PROPOSALS or proposal.log_prob >= least
        )


class _Asking:
    """Asks the draft about single contexts of runs; one position's session stays open for the next question."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._committed: tuple[int, ...] = ()
        self._session: DraftSession | None = None

    def of(self, run: RecordedRun) -> Ask:
        """A function that returns the proposals after a context of the run."""
        return partial(self._proposals, run)

    def close(self) -> None:
        """Close the session, if there is one."""
        if self._session is not None:
            self._drafter.close(self._session)
            self._session = None

    def _proposals(self, run: RecordedRun, position: int, path: Sequence[int]) -> tuple[Proposal, ...]:
        """The proposals after `position` tokens of the completion and the tokens of the path."""
        session = self._at((*run.prompt_ids, *run.completion[:position]), sampling_of(run))
        tree = self._drafter.new_tree(session, MOST_NODES, MOST_NODES)
        level = [ROOT]
        for token in path:
            level.append(tree.add(level[-1], Proposal(token, 0.0)))
        self._drafter.expand(session, tree, level, BREADTH)
        return tuple(tree.proposals(level[-1])[: 2 * LEAST_PROPOSALS])

    def _at(self, committed: tuple[int, ...], sampling: Sampling) -> DraftSession:
        session = self._session
        if session is None or committed != self._committed or sampling != session.sampling:
            self.close()
            session = self._session = self._drafter.open(committed, sampling, self._vocab_size)
            self._committed = committed
        return session
