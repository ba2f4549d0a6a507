"""Compiles the grammars of requests for one tokenizer."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.common.limits import MAX_GRAMMARS
from dynatree.engine.grammar.state import GrammarState
from dynatree.engine.model.vocabulary import special_ids, token_bytes

log = logging.getLogger(__name__)

LONGEST_REASON = 500  # characters
# Before any byte of a text, some tokenizers insert a space; none does so behind an ordinary character.
_ANCHOR = "\n"


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last `MAX_GRAMMARS` of them. Thread-safe.

    Args:
        tokenizer: The target's tokenizer.
        end_tokens: Tokens that end a completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = sorted(end_tokens)
        self._tokens: LLTokenizer | None = None  # made at the first use, in about a second
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def state(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> GrammarState:
        """Return the state of a grammar after the tokens of a completion; this may take a second.

        Raises:
            InvalidArgumentError: The target has no end-of-sequence token, the grammar is wrong, too complex or not
                supported, or it does not allow the tokens.
        """
        if not self._end_tokens:
            raise InvalidArgumentError("the target has no end-of-sequence token, which a grammar needs")
        with self._lock:
            self._tokens = self._tokens or _tokens_of(self._tokenizer, self._end_tokens)
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = _compiled(grammar, self._tokens)
            with self._lock:
                self._compiled[grammar] = matcher
                while len(self._compiled) > MAX_GRAMMARS:
                    self._compiled.popitem(last=False)
        state = GrammarState(matcher).after_all(token_ids)
        if state is None:
            raise InvalidArgumentError("the tokens that the completion already has do not follow the grammar")
        return state


def _compiled(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
    try:
        source = _source(grammar)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the JSON schema is not valid: {error}") from error
    matcher = LLMatcher(tokens, source, log_level=0, limits=LLParserLimits())
    if matcher.is_error():
        reason = matcher.get_error().split("\n<state>")[0].strip()
        raise InvalidArgumentError(f"the grammar is refused: {reason[:LONGEST_REASON]}")
    for warning in matcher.get_grammar_warnings():
        log.debug("grammar: %s", warning)
    return matcher


def _source(grammar: Grammar) -> str:
    """Return a grammar in the form that the compiler of llguidance reads."""
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = json.loads(grammar.text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidArgumentError("the JSON schema is not an object")
    # the white space of Python's json.dumps: with free white space, a small model may write spaces without end
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )


def _tokens_of(tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> LLTokenizer:
    """Return the tokenizer in llguidance's form: the bytes of each token, and the tokens of a text."""
    known = _KnownTokens(tokenizer, end_tokens)
    return LLTokenizer(TokenizerWrapper(known), n_vocab=len(known.tokens), eos_token=list(end_tokens))


class _KnownTokens:
    """The attributes and the call that llguidance's `TokenizerWrapper` expects."""

    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> None:
        self.tokens = token_bytes(tokenizer)
        self.tokens += [b""] * (max(end_tokens) + 1 - len(self.tokens))
        self.eos_token_id = end_tokens[0]
        self.special_token_ids = sorted({*special_ids(tokenizer), *end_tokens})
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.tokens))
        special = set(self.special_token_ids)
        self._ids = {data: id_ for id_, data in enumerate(self.tokens) if data and id_ not in special}
        self._copy: Tokenizer | None = None
        if tokenizer.is_fast:  # a copy, since other threads use the tokenizer
            self._copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._copy.no_padding()
            self._copy.no_truncation()
            self._copy.encode_special_tokens = True

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text in the middle of a completion; their bytes are the text's.

        Raises:
            TypeError: The text is bytes: this tells the caller to send characters.
        """
        if isinstance(text, bytes):
            raise TypeError("expected characters")
        data = text.encode()
        token_ids = self._encoded(text)
        if self._bytes(token_ids) == data:
            return token_ids
        anchored = self._encoded(_ANCHOR + text)
        ends = accumulate(len(self.tokens[id_]) for id_ in anchored)
        for place, end in enumerate(ends, start=1):
            if self._bytes(anchored[:place]).lstrip(b" ") == _ANCHOR.encode():
                if self._bytes(anchored[place:]) == data:
                    return anchored[place:]
                break
            if end > len(_ANCHOR) + 1:
                break
        return list(self._greedy(data))

    def _encoded(self, text: str) -> list[int]:
        if self._copy is not None:
            return list(self._copy.encode(text, add_special_tokens=False).ids)
        return list(
            self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        )

    def _bytes(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(self.tokens[id_] for id_ in token_ids)

    def _greedy(self, data: bytes) -> Iterator[int]:
        """Yield the longest token at each place, for a tokenizer that cannot encode the middle of a text."""
        place = 0
        while place < len(data):
            for end in range(min(place + self._longest, len(data)), place, -1):
                id_ = self._ids.get(data[place:end])
                if id_ is not None:
                    yield id_
                    place = end
                    break
            else:
                return
