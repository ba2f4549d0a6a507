"""Compiles the grammars of requests for one tokenizer."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from dynatree.common.errors import GrammarError
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.common.limits import MAX_GRAMMARS
from dynatree.engine.grammar.json_schema import prepared
from dynatree.engine.grammar.large_stack import on_large_stack
from dynatree.engine.grammar.reasons import reason_of
from dynatree.engine.grammar.state import GrammarState
from dynatree.engine.model.vocabulary import cleans_up, special_ids, token_bytes, vocabulary_of

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

# Before any byte of a text, some tokenizers insert a space; none does so after an ordinary character.
_ANCHOR = "\n"
_BYTES = {*range(0xF5)} - {0xC0, 0xC1}  # those of UTF-8
# Control characters, and bytes of planes without everyday characters: vocabularies that are otherwise whole lack some.
_RARE = ({*range(0x20), 0x7F} - {*b"\t\n\r"}) | {*range(0xF1, 0xF5)}
_SCHEMA = re.compile(r"%json\s*(?=\{)")  # in a Lark grammar
# Lexemes of a Lark grammar in which `<` is a character, and the tokens that it names
_NAMED_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|//.*|#.*|(<[^<>\s]+>)', re.MULTILINE)
_REFUSED = {
    GrammarKind.JSON_SCHEMA: "the JSON schema is refused: ",
    GrammarKind.REGEX: "the regular expression is refused: ",
    GrammarKind.LARK: "the grammar is refused: ",
}
_ESCAPES = 'nrbtf\\"'  # without \uXXXX, by which a property that the schema names would pass as another one
_JSON: JsonCompileOptions = {
    # the white space of Python's json.dumps: with free white space, a small model may write spaces without end
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": _ESCAPES,
}


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last `MAX_GRAMMARS` of them. Thread-safe.

    Args:
        tokenizer: The target's tokenizer.
        end_tokens: Tokens that end a completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = sorted(end_tokens)
        self._missing: frozenset[int] = frozenset()  # bytes without a token
        self._tokens: LLTokenizer | GrammarError | None = None  # found in about a second
        self._compiled: OrderedDict[Grammar, GrammarState] = OrderedDict()
        self._lock = threading.Lock()

    def read_ahead(self) -> None:
        """Begin to read the tokenizer on another thread, so that the first grammar does not wait for that."""
        if self._end_tokens:
            threading.Thread(target=self._read, name="grammar tokens", daemon=True).start()

    def _read(self) -> LLTokenizer | GrammarError:
        with self._lock:
            if self._tokens is None:
                self._tokens, self._missing = _tokens_of(self._tokenizer, self._end_tokens)
            return self._tokens

    def state(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> GrammarState:
        """Return the state of a grammar after the tokens of a completion; this may take a second.

        Raises:
            GrammarError: The target has no end-of-sequence token, or a tokenizer that takes no grammar; the
                grammar is wrong, too complex or not supported, or it does not allow the tokens.
        """
        if not self._end_tokens:
            raise GrammarError("the target has no end-of-sequence token, which a grammar needs")
        tokens = self._read()
        if isinstance(tokens, GrammarError):
            raise GrammarError(str(tokens))
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = on_large_stack(partial(_compiled, grammar, tokens, self._missing))
            if grammar.kind is GrammarKind.LARK:
                self._check_named_tokens(grammar.text, tokens)
            with self._lock:
                self._compiled[grammar] = compiled
                while len(self._compiled) > MAX_GRAMMARS:
                    self._compiled.popitem(last=False)
        state = compiled.after_all(token_ids)
        if state is None:
            raise GrammarError("the tokens that the completion already has do not follow the grammar")
        return state

    def _check_named_tokens(self, lark: str, tokens: LLTokenizer) -> None:
        """Refuse a Lark grammar that names an end token: the completion would end there, whatever should follow."""
        named = sorted({found[1] for found in _NAMED_TOKENS.finditer(lark) if found[1]})
        if not named:
            return
        state = GrammarState(LLMatcher(tokens, LLMatcher.grammar_from_lark(f"start: {' | '.join(named)}"), log_level=0))
        for end in filter(state.allows, self._end_tokens):
            name = self._tokenizer.convert_ids_to_tokens(end)
            raise GrammarError(f"the grammar names {name}, which ends every completion; expected other tokens")


def _compiled(grammar: Grammar, tokens: LLTokenizer, missing: frozenset[int]) -> GrammarState:
    """Return the state before the first token, whose mask is known; an error names the JSON schema at fault."""
    try:
        return _compiled_whole(grammar, tokens, missing)
    except GrammarError:
        for start, end, schema in _schemas(grammar.text) if grammar.kind is GrammarKind.LARK else ():
            try:
                _compiled_whole(Grammar(GrammarKind.JSON_SCHEMA, grammar.text[start:end]), tokens, missing)
            except GrammarError as error:
                reason = str(error).removeprefix(_REFUSED[GrammarKind.JSON_SCHEMA])
                words = f"{_REFUSED[grammar.kind]}the JSON schema {schema.get('title', '')!r}: {reason}"
                raise GrammarError(words) from error
        raise


def _compiled_whole(grammar: Grammar, tokens: LLTokenizer, missing: frozenset[int]) -> GrammarState:
    try:
        source = _source(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not valid: {error}") from error
    matcher = LLMatcher(tokens, source, log_level=0, limits=LLParserLimits())
    if matcher.is_error():
        raise GrammarError(_REFUSED[grammar.kind] + reason_of(matcher))
    for warning in matcher.get_grammar_warnings():
        log.debug("grammar: %s", warning)
    state = GrammarState(matcher, missing)
    if state.error is not None:  # a grammar that no token can begin is refused at once
        raise state.error
    return state


def _source(grammar: Grammar) -> str:
    """Return a grammar in the form that the compiler of llguidance reads."""
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(_with_prepared_schemas(grammar.text))
    schema = json.loads(grammar.text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("the JSON schema is not an object")
    return LLMatcher.grammar_from_json_schema(prepared(schema), defaults=_JSON)


def _with_prepared_schemas(lark: str) -> str:
    """Return a Lark grammar whose JSON schemas are prepared; what is no JSON stays as it is."""
    parts, place = [], 0
    for start, end, schema in _schemas(lark):
        schema = prepared(schema)
        schema["x-guidance"] = {"json_allowed_escapes": _ESCAPES, **schema.get("x-guidance", {})}
        parts += [lark[place:start], json.dumps(schema)]
        place = end
    return "".join([*parts, lark[place:]])


def _schemas(lark: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield where each JSON schema of a Lark grammar begins and ends, and the schema."""
    end = 0
    for found in _SCHEMA.finditer(lark):
        if found.end() >= end:  # not in the schema before
            with suppress(json.JSONDecodeError):
                schema, end = json.JSONDecoder().raw_decode(lark, found.end())
                yield found.end(), end, schema


def _tokens_of(
    tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]
) -> tuple[LLTokenizer | GrammarError, frozenset[int]]:
    """Return the tokenizer in llguidance's form, the bytes of each token and the tokens of a text, and missing bytes.

    The error says why the tokenizer takes no grammar.
    """
    known = _KnownTokens(tokenizer, end_tokens)
    reason = known.gap
    if reason is not None:
        return GrammarError(f"the target's tokenizer takes no grammar: {reason}"), known.missing
    tokens = LLTokenizer(TokenizerWrapper(known), n_vocab=len(known.tokens), eos_token=list(end_tokens))
    return tokens, known.missing


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


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
        self._special = set(self.special_token_ids)
        self._ids = {data: id_ for id_, data in enumerate(self.tokens) if data and id_ not in self._special}
        self._copy: Tokenizer | None = None
        if tokenizer.is_fast:  # a copy, since other threads use the tokenizer
            self._copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._copy.no_padding()
            self._copy.no_truncation()
            self._copy.encode_special_tokens = True

    @property
    def missing(self) -> frozenset[int]:
        """The bytes that no token stands for alone."""
        return frozenset(byte for byte in _BYTES if bytes([byte]) not in self._ids)

    @property
    def gap(self) -> str | None:
        """Why texts are not the joined bytes of their tokens, found by decoding all tokens in a row; None if they are.

        llguidance also needs a token for each byte. Else it allows wrong tokens where the text that must follow has no
        tokens. The states of grammars look for rare bytes, which some vocabularies lack.
        """
        missing = sorted(self.missing - _RARE)
        if missing:
            return f"its vocabulary has no token for the byte 0x{missing[0]:02X}"
        ids = [id_ for data, id_ in self._ids.items() if _is_text(data)]
        vocabulary = vocabulary_of(self._tokenizer, special_tokens=True)
        row = [token for id_ in ids for token in (id_, *vocabulary.anchor)]
        if cleans_up(self._tokenizer) or vocabulary.text_behind(row).encode() != self._bytes(row):
            return "the text of a token depends on its neighbours"
        return None

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
        """The bytes of tokens; those of a special token are no text, though some tokenizers read its name so."""
        return b"".join(b"\xff" if id_ in self._special else self.tokens[id_] for id_ in token_ids)

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
