"""The draft's proposals along plain decoding's completions and off them: the file that `bench replay` reads.

A run is one completion of one prompt at one temperature. Its nodes are the contexts that the draft was asked about:

    node j, j < new tokens    after the prompt and the first j tokens of the completion: a context on the true path
    every other node          after its parent's context and a token that plain decoding did not choose there

So the tree below a position of the completion consists of that position's own off-path nodes and, below the true token,
the tree of the next position: nothing is stored twice.

File, version 1: a NumPy archive (`.npz`, compressed) of these arrays, each of which concatenates the runs:

    header               JSON in UTF-8, uint8: "version", "models" and "git" as in a report (`dynatree.bench.record`),
                         "texts" [{"file", "data_set", "sha256", "field"}], "options" of the recorder, and "runs"
                         [{"text", "prompt", "temperature", "seed", "prompt_tokens", "new_tokens", "nodes"}]:
                         the number of the text, the prompt's in it, and a seed that is null when greedy
    token_ids            for each run: the tokens of the prompt and of the completion
    parents              for each node off the true path: the distance in places back to its parent, uint32
    tokens               for each node off the true path: the token that leads to it
    counts               for each node: the number of its proposals, uint8
    proposal_tokens      for each node: the draft's proposals, best first
    proposal_log_probs   the natural log-probability of each proposal, negated, in steps of 1 / 4096, uint16

Token ids are uint16, or uint32 if any id is 65,536 or more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynatree.draft.policies.growing_tree import Proposal

VERSION = 1
LOG_PROB_STEPS = 4096  # steps per nat
LEAST_LOG_PROB = -65535 / LOG_PROB_STEPS

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Node:
    """One context that the draft was asked about.

    Attributes:
        parent: Node of the context without its last token; -1 for the prompt's node.
        token: The context's last token.
        proposals: The draft's likeliest continuations, best first.
    """

    parent: int
    token: int
    proposals: tuple[Proposal, ...]


@dataclass(frozen=True)
class RecordedRun:
    """One completion of plain decoding, and the draft's proposals along it and off it.

    Attributes:
        text: Number of the text that the prompt is from.
        prompt: Number of the prompt in the text.
        temperature: Sampling temperature; 0 is greedy.
        seed: Sampling seed; None when greedy.
        prompt_ids: Tokens of the prompt, `[prompt_tokens]`.
        completion: Tokens that plain decoding generates, `[new_tokens]`.
        nodes: Recorded nodes: first one on the true path for each token of the completion, then the nodes off it;
            parents before children.
    """

    text: int
    prompt: int
    temperature: float
    seed: int | None
    prompt_ids: tuple[int, ...]
    completion: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list, repr=False)
    _children: dict[tuple[int, int], int] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.nodes:
            tokens = (self.prompt_ids[-1], *self.completion[:-1])
            self.nodes.extend(Node(place - 1, token, ()) for place, token in enumerate(tokens))
        self._children.update({(node.parent, node.token): place for place, node in enumerate(self.nodes)})

    def child(self, node: int, token: int) -> int | None:
        """The node of a context and one more token; None if it was not recorded."""
        return self._children.get((node, token))

    def add(self, parent: int, token: int, proposals: tuple[Proposal, ...]) -> int:
        """Record a context off the true path; return its node."""
        self._children[parent, token] = len(self.nodes)
        self.nodes.append(Node(parent, token, proposals))
        return len(self.nodes) - 1

    def set_proposals(self, node: int, proposals: tuple[Proposal, ...]) -> None:
        """Record the draft's proposals after a context on the true path."""
        self.nodes[node] = replace(self.nodes[node], proposals=proposals)

    def log_prob(self, node: int, token: int) -> float:
        """The draft's log-probability of a token after a node; minus infinity if it is not among the proposals."""
        proposals = self.nodes[node].proposals if node >= 0 else ()
        return next((each.log_prob for each in proposals if each.token == token), -math.inf)


@dataclass(frozen=True)
class Recording:
    """The runs of one file, and the file's header without the runs."""

    header: dict[str, Any]
    runs: tuple[RecordedRun, ...]


def save(recording: Recording, path: Path) -> None:
    """Write the file; log-probabilities are rounded to the nearest step.

    Raises:
        SystemExit: The file cannot be written.
    """
    nodes = [node for run in recording.runs for node in run.nodes]
    off_path = [
        (place - node.parent, node.token)
        for run in recording.runs
        for place, node in enumerate(run.nodes)
        if place >= len(run.completion)
    ]
    token_ids = [token for run in recording.runs for token in (*run.prompt_ids, *run.completion)]
    proposals = [proposal for node in nodes for proposal in node.proposals]
    tokens = [token for _, token in off_path]
    proposed = [proposal.token for proposal in proposals]
    log_probs = -LOG_PROB_STEPS * np.array([proposal.log_prob for proposal in proposals])
    largest = max((*token_ids, *tokens, *proposed), default=0)
    kind = np.uint16 if largest < 2**16 else np.uint32
    header = recording.header | {"version": VERSION, "runs": [_describe(run) for run in recording.runs]}
    arrays: dict[str, Ints] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "token_ids": np.array(token_ids, dtype=kind),
        "parents": np.array([steps for steps, _ in off_path], dtype=np.uint32),
        "tokens": np.array(tokens, dtype=kind),
        "counts": np.array([len(node.proposals) for node in nodes], dtype=np.uint8),
        "proposal_tokens": np.array(proposed, dtype=kind),
        "proposal_log_probs": log_probs.round().clip(0, 2**16 - 1).astype(np.uint16),
    }
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None


def load(path: Path) -> Recording:
    """Read a file.

    Raises:
        SystemExit: The file cannot be read, or is not a recording of this version.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays["header"].tobytes())
        if header["version"] != VERSION:
            raise SystemExit(f"{path} is a recording of version {header['version']}, expected {VERSION}")
        return Recording(header, tuple(_runs(header.pop("runs"), arrays)))
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # archive, compression, NumPy and JSON errors have a dozen types between them
        raise SystemExit(f"{path} is not a recording of dynatree bench record: {error}") from None


def _describe(run: RecordedRun) -> dict[str, Any]:
    return {
        "text": run.text,
        "prompt": run.prompt,
        "temperature": run.temperature,
        "seed": run.seed,
        "prompt_tokens": len(run.prompt_ids),
        "new_tokens": len(run.completion),
        "nodes": len(run.nodes),
    }


def _runs(described: Sequence[dict[str, Any]], arrays: dict[str, Ints]) -> list[RecordedRun]:
    nodes = _Slices(arrays["counts"], [run["nodes"] for run in described])
    off_path = [run["nodes"] - run["new_tokens"] for run in described]
    parents, tokens = _Slices(arrays["parents"], off_path), _Slices(arrays["tokens"], off_path)
    sizes = [int(counts.sum()) for counts in nodes]
    proposed = _Slices(arrays["proposal_tokens"], sizes)
    log_probs = _Slices(-arrays["proposal_log_probs"].astype(float) / LOG_PROB_STEPS, sizes)
    texts = _Slices(arrays["token_ids"], [run["prompt_tokens"] + run["new_tokens"] for run in described])
    runs = []
    for run, *of_run in zip(described, texts, nodes, parents, tokens, proposed, log_probs, strict=True):
        text, counts, steps, edges, guesses, chances = (values.tolist() for values in of_run)
        prompt_ids, completion = text[: run["prompt_tokens"]], text[run["prompt_tokens"] :]
        on_path = len(completion)
        ends = [0, *np.cumsum(counts, dtype=int).tolist()]
        proposals = [tuple(map(Proposal, guesses[start:stop], chances[start:stop])) for start, stop in pairwise(ends)]
        places = [
            *zip(range(-1, on_path - 1), [prompt_ids[-1], *completion[:-1]], strict=True),
            *((place - back, token) for place, (back, token) in enumerate(zip(steps, edges, strict=True), on_path)),
        ]
        if not all(-1 <= parent < place for place, (parent, _) in enumerate(places)):
            raise ValueError("a node comes before its parent")
        runs.append(
            RecordedRun(
                text=run["text"],
                prompt=run["prompt"],
                temperature=run["temperature"],
                seed=run["seed"],
                prompt_ids=tuple(prompt_ids),
                completion=tuple(completion),
                nodes=[Node(parent, token, each) for (parent, token), each in zip(places, proposals, strict=True)],
            )
        )
    return runs


class _Slices:
    """Consecutive slices of an array, of given sizes, that cover the whole array."""

    def __init__(self, values: Any, sizes: Sequence[int]) -> None:
        if sum(sizes) != len(values):
            raise ValueError(f"an array has {len(values)} entries, expected {sum(sizes)} for its runs")
        self._values = values
        self._ends = [0, *np.cumsum(sizes, dtype=int).tolist()]

    def __iter__(self) -> Any:
        return (self._values[start:stop] for start, stop in pairwise(self._ends))
