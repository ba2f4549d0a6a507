"""Conversion between protobuf messages and values; only this module and the services use protobuf.

Decoding checks only conditions that a value needs to be constructed. Checks that depend on a model or a session are
left to its owner.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from dynatree.common.decoding import Decoding
from dynatree.common.errors import InvalidArgumentError
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.common.log_probs import TopLogProbs
from dynatree.common.messages import Commit, FinishReason, OpenSession, SessionOpened, VerifyTimings
from dynatree.common.model_info import ForwardCost, ModelInfo
from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.sampling import Sampling, Scheme, check_biases
from dynatree.common.tree import DraftDistribution, TokenTree, check_token_ids
from dynatree.v1 import draft_pb2, tree_pb2, verify_pb2

_FINISH_REASONS = {
    FinishReason.STOP: tree_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: tree_pb2.FINISH_REASON_LENGTH,
}


def model_info_to_pb(info: ModelInfo) -> tree_pb2.ModelInfo:
    """The message for a model's description; its costs are rounded to float32."""
    fields = dict(vars(info))
    fields["forward_costs"] = [
        tree_pb2.ForwardCost(rows=each.rows, seconds=each.seconds) for each in info.forward_costs
    ]
    return tree_pb2.ModelInfo(**fields)


def model_info_from_pb(message: tree_pb2.ModelInfo) -> ModelInfo:
    """A model's description from its message; missing fields become empty or 0, the repetition penalty 1."""
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    fields["forward_costs"] = tuple(ForwardCost(cost.rows, cost.seconds) for cost in message.forward_costs)
    fields["repetition_penalty"] = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    return ModelInfo(**fields)


def sampling_to_pb(sampling: Sampling) -> tree_pb2.SamplingOptions:
    """The message for sampling options, including the seed."""
    values = {each.name: getattr(sampling, each.name) for each in fields(Sampling)}
    values |= {"logit_bias": dict(sampling.logit_bias), "scheme": f"SAMPLING_SCHEME_{sampling.scheme.name}"}
    return tree_pb2.SamplingOptions(**values)


def sampling_from_pb(message: tree_pb2.SamplingOptions, *, default_seed: int, default_penalty: float = 1.0) -> Sampling:
    """Sampling options from a message; the defaults replace a missing seed or repetition penalty.

    Raises:
        InvalidArgumentError: An option is out of range.
    """
    schemes = {scheme.value: scheme for scheme in Scheme} | {
        tree_pb2.SAMPLING_SCHEME_UNSPECIFIED: Scheme.GUMBEL  # proto3 enums are open: any number may arrive
    }
    if message.scheme not in schemes:
        known = ", ".join(f"{scheme.value} ({scheme.name.lower()})" for scheme in Scheme)
        raise InvalidArgumentError(f"scheme is {message.scheme}, expected one of {known}")
    check_biases(len(message.logit_bias))  # before copying them
    values = {"seed": default_seed, "repetition_penalty": default_penalty, **_values(message, Sampling)}
    bias = MappingProxyType(dict(message.logit_bias))
    return Sampling(**{**values, "logit_bias": bias, "scheme": schemes[message.scheme]})


def grammar_to_pb(grammar: Grammar | None) -> tree_pb2.Grammar | None:
    """The message for a grammar; None if there is none."""
    return None if grammar is None else tree_pb2.Grammar(kind=f"GRAMMAR_KIND_{grammar.kind.name}", text=grammar.text)


def grammar_from_pb(message: tree_pb2.Grammar) -> Grammar:
    """A grammar from its message.

    Raises:
        InvalidArgumentError: The kind is unknown, or the text is empty or too long.
    """
    kinds = {kind.value: kind for kind in GrammarKind}  # proto3 enums are open: any number may arrive
    if message.kind not in kinds:
        known = ", ".join(f"{kind.value} ({kind.name.lower()})" for kind in GrammarKind)
        raise InvalidArgumentError(f"the grammar's kind is {message.kind}, expected one of {known}")
    return Grammar(kinds[message.kind], message.text)


def decoding_from_pb(
    message: verify_pb2.OpenSession | draft_pb2.GenerateRequest, *, default_seed: int, default_penalty: float = 1.0
) -> Decoding:
    """Decoding options from either message; the defaults replace a missing seed or repetition penalty.

    Raises:
        InvalidArgumentError: A sampling option is out of range, or the grammar's kind or length is wrong.
    """
    sampling = sampling_from_pb(message.sampling, default_seed=default_seed, default_penalty=default_penalty)
    stop = tuple(message.stop_token_ids)
    grammar = grammar_from_pb(message.grammar) if message.HasField("grammar") else None
    return Decoding(**{**_values(message, Decoding), "sampling": sampling, "stop_token_ids": stop, "grammar": grammar})


def _values(message: Message, record: type[Any]) -> dict[str, Any]:
    """The message's fields that the dataclass also has, without optional fields that are not set."""
    known = message.DESCRIPTOR.fields_by_name
    names = [each.name for each in fields(record) if each.name in known]
    return {name: getattr(message, name) for name in names if not known[name].has_presence or message.HasField(name)}


def open_session_to_pb(request: OpenSession) -> verify_pb2.OpenSession:
    """The message that opens a session."""
    decoding = {each.name: getattr(request.decoding, each.name) for each in fields(Decoding)}
    draft = request.draft
    return verify_pb2.OpenSession(
        prompt_ids=request.prompt_ids,
        draft=tree_pb2.ModelInfo(
            name=draft.name, tokenizer_fingerprint=draft.tokenizer_fingerprint, device_id=draft.device_id
        ),
        principal=request.principal,
        generated=request.generated,
        round=request.round,
        **{
            **decoding,
            "sampling": sampling_to_pb(request.decoding.sampling),
            "grammar": grammar_to_pb(request.decoding.grammar),
        },
    )


def open_session_from_pb(
    message: verify_pb2.OpenSession, *, default_seed: int, default_penalty: float = 1.0
) -> OpenSession:
    """A request for a session from its message; the defaults replace a missing seed or repetition penalty.

    Raises:
        InvalidArgumentError: A sampling option is out of range.
    """
    return OpenSession(
        prompt_ids=tuple(message.prompt_ids),
        decoding=decoding_from_pb(message, default_seed=default_seed, default_penalty=default_penalty),
        draft=model_info_from_pb(message.draft),
        principal=message.principal,
        generated=message.generated,
        round=message.round,
    )


def session_opened_to_pb(opened: SessionOpened) -> verify_pb2.SessionOpened:
    """The message that answers a request for a session."""
    return verify_pb2.SessionOpened(
        max_tree_nodes=opened.max_tree_nodes,
        commit=commit_to_pb(opened.commit),
        target=model_info_to_pb(opened.target),
        queue_seconds=opened.queue_seconds,
        cached_tokens=opened.cached_tokens,
        prompt_log_probs=opened.prompt_log_probs,
        prompt_top_log_probs=top_log_probs_to_pb(opened.prompt_top_log_probs),
    )


def session_opened_from_pb(message: verify_pb2.SessionOpened) -> SessionOpened:
    """The answer to a request for a session, from its message.

    Raises:
        InvalidArgumentError: The likeliest tokens do not fit the positions.
    """
    return SessionOpened(
        target=model_info_from_pb(message.target),
        max_tree_nodes=message.max_tree_nodes,
        commit=commit_from_pb(message.commit),
        queue_seconds=message.queue_seconds,
        cached_tokens=message.cached_tokens,
        prompt_log_probs=tuple(message.prompt_log_probs),
        prompt_top_log_probs=top_log_probs_from_pb(message.prompt_top_log_probs, len(message.prompt_log_probs)),
    )


def tree_to_pb(tree: TokenTree, *, round_: int, base_length: int) -> tree_pb2.TokenTree:
    """The message for a tree in round `round_` of a session with `base_length` committed tokens."""
    draws = [place for each in tree.candidates if each for place in each.draws]
    return tree_pb2.TokenTree(
        round=round_,
        base_length=base_length,
        token_ids=tree.token_ids,
        parents=tree.parents,
        log_probs=tree.log_probs,
        candidate_counts=[0 if each is None else len(each.token_ids) for each in tree.candidates],
        candidate_ids=[token for each in tree.candidates if each for token in each.token_ids],
        candidate_probs=[prob for each in tree.candidates if each for prob in each.probs],
        draw_counts=[0 if each is None else len(each.draws) for each in tree.candidates] if draws else (),
        draws=draws,
    )


def tree_from_pb(message: tree_pb2.TokenTree, *, max_nodes: int, max_depth: int, vocab_size: int) -> TokenTree:
    """The tree in a message; a message with too many nodes is refused before the tree is built.

    Raises:
        InvalidArgumentError: The tree has more than `max_nodes` nodes or `max_depth` levels, a token is outside the
            vocabulary, or the arrays do not form a tree.
    """
    nodes = max(len(message.token_ids), len(message.parents), len(message.log_probs))
    if nodes > max_nodes:
        raise InvalidArgumentError(f"the tree has {nodes} nodes, at most {max_nodes} are accepted (max_tree_nodes)")
    check_token_ids(message.token_ids, vocab_size, "token_ids")
    tree = TokenTree(
        tuple(message.token_ids),
        tuple(message.parents),
        tuple(message.log_probs),
        _distributions_from_pb(message, vocab_size),
    )
    if tree.depth > max_depth:
        raise InvalidArgumentError(
            f"the tree is {tree.depth} levels deep, at most {max_depth} fit before the length or context limit"
        )
    return tree


def _distributions_from_pb(message: tree_pb2.TokenTree, vocab_size: int) -> tuple[DraftDistribution | None, ...]:
    counts = message.candidate_counts
    expected = sum(counts) if len(counts) <= len(message.token_ids) + 1 else -1
    if not len(message.candidate_ids) == len(message.candidate_probs) == expected:
        raise InvalidArgumentError(
            f"{len(counts)} candidate_counts for {len(message.token_ids)} nodes, {len(message.candidate_ids)} "
            f"candidate_ids and {len(message.candidate_probs)} candidate_probs do not fit together"
        )
    draw_counts = message.draw_counts or [0] * len(counts)
    if len(draw_counts) != len(counts) or sum(draw_counts) != len(message.draws):
        raise InvalidArgumentError(
            f"{len(message.draw_counts)} draw_counts for {len(counts)} candidate_counts and {len(message.draws)} draws "
            "do not fit together"
        )
    check_token_ids(message.candidate_ids, vocab_size, "candidate_ids")
    ids, probs, draws = iter(message.candidate_ids), iter(message.candidate_probs), iter(message.draws)
    distributions: list[DraftDistribution | None] = []
    for count, drawn in zip(counts, draw_counts, strict=True):
        if drawn and not count:
            raise InvalidArgumentError(f"draw_counts names {drawn} draws where candidate_counts names no candidate")
        columns = tuple(islice(ids, count)), tuple(islice(probs, count)), tuple(islice(draws, drawn))
        distributions.append(DraftDistribution(*columns) if count else None)
    return tuple(distributions)


def commit_to_pb(commit: Commit) -> verify_pb2.Commit:
    """The message for a commit."""
    return verify_pb2.Commit(
        next_round=commit.next_round,
        base_length=commit.base_length,
        token_ids=commit.token_ids,
        accepted_nodes=commit.accepted_nodes,
        acceptance=verify_pb2.AcceptanceStatistics(trimmed=commit.trimmed),
        timings=verify_pb2.VerifyTimings(
            forward_seconds=commit.timings.forward,
            accept_seconds=commit.timings.accept,
            commit_seconds=commit.timings.commit,
            total_seconds=commit.timings.total,
            attributed_seconds=commit.timings.attributed,
        ),
        finish_reason=finish_reason_to_pb(commit.finish_reason),
        log_probs=commit.log_probs,
        top_log_probs=top_log_probs_to_pb(commit.top_log_probs),
        pass_statistics=verify_pb2.PassStatistics(
            sessions=commit.pass_statistics.sessions,
            rows=commit.pass_statistics.rows,
            row_price=commit.pass_statistics.row_price,
            hold_seconds=commit.pass_statistics.hold_seconds,
            open_sessions=commit.pass_statistics.open_sessions,
            kv_cache_usage=commit.pass_statistics.kv_cache_usage,
        ),
    )


def commit_from_pb(message: verify_pb2.Commit) -> Commit:
    """A commit from its message.

    Raises:
        InvalidArgumentError: The likeliest tokens do not fit the positions.
    """
    timings, pass_statistics = message.timings, message.pass_statistics
    return Commit(
        next_round=message.next_round,
        base_length=message.base_length,
        token_ids=tuple(message.token_ids),
        accepted_nodes=tuple(message.accepted_nodes),
        timings=VerifyTimings(
            forward=timings.forward_seconds,
            accept=timings.accept_seconds,
            commit=timings.commit_seconds,
            total=timings.total_seconds,
            attributed=timings.attributed_seconds,
        ),
        finish_reason=finish_reason_from_pb(message.finish_reason),
        log_probs=tuple(message.log_probs),
        top_log_probs=top_log_probs_from_pb(message.top_log_probs, len(message.log_probs)),
        trimmed=message.acceptance.trimmed,
        pass_statistics=PassStatistics(
            pass_statistics.sessions,
            pass_statistics.rows,
            pass_statistics.row_price,
            pass_statistics.hold_seconds,
            pass_statistics.open_sessions,
            pass_statistics.kv_cache_usage,
        ),
    )


def top_log_probs_to_pb(top: TopLogProbs) -> tree_pb2.TopLogProbs | None:
    """The message for the likeliest tokens of some positions; None if there are none."""
    if not top:
        return None
    return tree_pb2.TopLogProbs(
        token_ids=[token for place in top for token, _ in place],
        log_probs=[log_prob for place in top for _, log_prob in place],
    )


def top_log_probs_from_pb(message: tree_pb2.TopLogProbs, places: int) -> TopLogProbs:
    """The likeliest tokens of `places` positions from their message.

    Raises:
        InvalidArgumentError: The positions do not all have the same number of tokens, each with a log-probability.
    """
    count = len(message.token_ids) // places if places else 0  # per position
    if not len(message.token_ids) == len(message.log_probs) == places * count:
        raise InvalidArgumentError(
            f"{len(message.token_ids)} token_ids and {len(message.log_probs)} log_probs of top_log_probs at {places} "
            "positions do not fit together"
        )
    named = tuple(zip(message.token_ids, message.log_probs, strict=True))
    return tuple(named[place * count : (place + 1) * count] for place in range(places)) if count else ()


def finish_reason_to_pb(reason: FinishReason | None) -> tree_pb2.FinishReason:
    """The protobuf enum value; None becomes FINISH_REASON_UNSPECIFIED."""
    return tree_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def finish_reason_from_pb(value: tree_pb2.FinishReason) -> FinishReason | None:
    """The finish reason for a protobuf enum value; None if the value is unknown."""
    return next((reason for reason, each in _FINISH_REASONS.items() if each == value), None)
