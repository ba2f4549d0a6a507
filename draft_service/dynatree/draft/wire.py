"""Conversion between messages of `DraftService` and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import exp

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.wire import finish_reason_to_pb, top_log_probs_to_pb
from dynatree.draft.completion.generation import Chunk, Completed, Generation, TracedRound
from dynatree.draft.completion.statistics import Statistics
from dynatree.draft.policies import Setting
from dynatree.draft.text.prompt_text import PromptText
from dynatree.v1 import draft_pb2


def policy_settings_from_pb(message: draft_pb2.Policy) -> dict[str, Setting]:
    """Merge the settings of the message's three maps.

    Raises:
        InvalidArgumentError: A name is in two of the maps.
    """
    kinds: dict[str, Mapping[str, Setting]] = {
        "number": message.settings,
        "list": {name: tuple(numbers.values) for name, numbers in message.list_settings.items()},
        "word": message.word_settings,
    }
    for one, other in combinations(kinds, 2):
        for name in sorted(kinds[one].keys() & kinds[other].keys()):
            raise InvalidArgumentError(f"setting {name} is given twice, as a {one} and as a {other}")
    return {name: value for settings in kinds.values() for name, value in settings.items()}


def started_to_pb(
    generation: Generation, seed: int, prompt_ids: Sequence[int], prompt_text: PromptText
) -> draft_pb2.Started:
    """Build the facts about a completion that its first response carries.

    Args:
        generation: The completion, opened.
        seed: The call's seed; 0 if the completion is greedy.
        prompt_ids: The prompt's tokens; empty if the client sent them.
        prompt_text: The prompt's text; empty if the client did not ask for it.
    """
    return draft_pb2.Started(
        seed=seed,
        prompt_ids=prompt_ids,
        target_fingerprint=generation.target.fingerprint,
        max_new_tokens=generation.max_new_tokens,
        prompt_log_probs=generation.prompt_log_probs,
        prompt_top_log_probs=top_log_probs_to_pb(generation.prompt_top_log_probs),
        prompt_text=prompt_text.text,
        prompt_text_offsets=prompt_text.offsets,
    )


def response_to_pb(
    event: Chunk | TracedRound | Completed, *, index: int, started: draft_pb2.Started | None = None
) -> draft_pb2.GenerateResponse:
    """Build the message of an event of completion `index`; the first chunk carries `started`."""
    match event:
        case Chunk():
            return draft_pb2.GenerateResponse(
                index=index,
                text=event.text,
                token_ids=event.token_ids,
                log_probs=event.log_probs,
                started=started,
                top_log_probs=top_log_probs_to_pb(event.top_log_probs),
                text_offsets=event.text_offsets if event.log_probs else (),
            )
        case TracedRound():
            return draft_pb2.GenerateResponse(index=index, trace=_trace_to_pb(event))
        case Completed():
            completion = draft_pb2.Completion(
                finish_reason=finish_reason_to_pb(event.finish_reason),
                prompt_tokens=event.prompt_tokens,
                statistics=_statistics_to_pb(event.statistics),
            )
            return draft_pb2.GenerateResponse(index=index, text=event.text, completion=completion)


def _trace_to_pb(traced: TracedRound) -> draft_pb2.RoundTrace:
    tree, commit = traced.round.tree, traced.round.commit
    return draft_pb2.RoundTrace(
        round=commit.next_round - 1,
        base_length=commit.base_length - len(commit.token_ids),
        token_ids=tree.token_ids,
        parents=tree.parents,
        probabilities=[exp(log_prob) for log_prob in tree.log_probs],
        texts=traced.node_texts,
        accepted_nodes=commit.accepted_nodes,
        committed_ids=commit.token_ids,
        committed_texts=traced.committed_texts,
        parameters=traced.parameters,
        draft_seconds=traced.round.draft_seconds,
        verify_seconds=commit.timings.total,
    )


def _statistics_to_pb(statistics: Statistics) -> draft_pb2.GenerationStatistics:
    figures = dict(vars(statistics))
    del figures["rounds_by_depth"]
    figures["round_parts"] = [draft_pb2.RoundPart(**vars(part)) for part in statistics.round_parts]
    return draft_pb2.GenerationStatistics(**figures)
