"""Tests that the allowed tokens of every kind of tokenizer spell texts that the grammar accepts, and no others."""

from __future__ import annotations

import json
import math
import random
import re
import time
from contextlib import suppress
from functools import cache
from threading import Barrier, Thread

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.common.limits import MAX_GRAMMAR_BYTES, MAX_GRAMMARS
from dynatree.draft.text.detokenizer import Detokenizer
from dynatree.engine.grammar.compiler import GrammarCompiler, _KnownTokens
from dynatree.engine.grammar.state import GrammarState
from tests.support.allowed import allowed_tokens
from tests.support.costly_grammars import COSTLY, an_object, regex, schema
from tests.support.tokenizer_zoo import TEXTS, TOKENIZERS

WHOLE = ("embedded", "byte level", "llama 2", "phi 3", "gemma", "unigram")  # they spell any text
OTHERS = ("word piece", "tidy word piece", "words", "suffixes", "bytes")  # they spell few

SPECIAL = ("<|endoftext|>", "</s>", "<s>", "<|im_end|>", "<tool>")
HARD = (
    *TEXTS.values(),
    *SPECIAL,
    f"a{''.join(SPECIAL)} b",
    " leading",
    "   three",
    " ",
    "\n",
    "\t\r\x00\x01\x7f",
    "é",
    "🙂",
)


SCHEMAS = (
    {"enum": ["Oslo", " Łódź", "</s>", "<|im_end|>", 7, None, [1, {"a": "🙂"}]]},
    an_object(on={"type": "boolean"}, größe={"type": "integer", "minimum": -20, "maximum": 2500}),
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "maxProperties": 2},
    {"type": "object", "patternProperties": {"^é": {"type": "integer"}}, "minProperties": 1, "maxProperties": 2},
    {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": r"^\S\s?[^ab]{1,3}$"},
    {"type": "string", "format": "date-time"},
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "boolean"}]},
    {
        "$ref": "#/$defs/n",
        "$defs": {"n": an_object(to={"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1})},
    },
)
REGEXES = ("(yes|no|[A-Z]{3}-[0-9]{2,4})", " ?[a-z]{1,4}( [a-z]{1,4}){0,3}", "(</s>|né|日本|🙂|\t){1,3}", "a?")


@cache
def tokenizer(name):
    return TOKENIZERS[name]()


@cache
def compiler(name):
    return GrammarCompiler(tokenizer(name), [end_token(name)])


def end_token(name):
    return tokenizer(name).eos_token_id or 1


@cache
def known(name):
    return _KnownTokens(tokenizer(name), [end_token(name)])


def usable(state):
    """A state, or its error."""
    if state.error is not None:
        raise state.error
    return state


def allowed(state, size=2048):
    return allowed_tokens(usable(state), size)


def walked(state, end, choose, most=300):
    """The tokens of a random walk to an end token, which is taken one time in three; None if it does not end."""
    tokens = []
    while len(tokens) < most:
        following = allowed(state)
        if end in following and (len(following) == 1 or choose.random() < 0.3):
            return tokens
        token = choose.choice([each for each in following if each != end])
        tokens.append(token)
        state = state.after(token)
    return None


def served(name, token_ids):
    """The text of a completion after a prompt, as the draft service decodes it."""
    prompt = tokenizer(name)("a", add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer(name), prompt)
    return detokenizer.push(token_ids) + detokenizer.flush()


# Tokens of a text


@pytest.mark.parametrize("name", WHOLE)
@settings(deadline=None, max_examples=60)
@given(text=st.text(min_size=1, max_size=20) | st.sampled_from(HARD))
def test_tokens_spell_the_text(name, text):
    tokens = known(name)(text)
    assert b"".join(known(name).tokens[each] for each in tokens) == text.encode()
    assert not {*tokens} & {*known(name).special_token_ids}


# Walks


@pytest.mark.parametrize("name", WHOLE)
def test_random_walks_give_texts_that_the_grammar_accepts(name):
    ended = 0
    cases = [*((schema(each), each) for each in SCHEMAS), *((regex(each), each) for each in REGEXES)]
    for grammar, accepted in cases:
        for seed in range(6):
            tokens = walked(compiler(name).state(grammar), end_token(name), random.Random(seed))
            if tokens is None:
                continue
            text = served(name, tokens)
            if isinstance(accepted, str):
                assert re.fullmatch(accepted, text), (accepted, text)
            else:
                jsonschema_rs.validator_for(accepted, validate_formats=True).validate(json.loads(text))
            ended += 1
    assert ended > 5 * len(cases)


def test_all_kinds_of_tokenizers_are_here():
    assert {*WHOLE, *OTHERS} == {*TOKENIZERS}


@pytest.mark.parametrize("name", OTHERS)
def test_a_tokenizer_that_cannot_spell_every_text_takes_no_grammar(name):
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"tokenizer takes no grammar: .* no token for the byte 0x"):
            compiler(name).state(regex("a+"))


def without_rare_bytes():
    """The embedded pair's tokenizer without tokens for some control characters and for characters of rare planes."""
    backend = json.loads(tokenizer("embedded").backend_tokenizer.to_str())
    spelling = bytes_to_unicode()
    for byte in (0x04, 0x06, 0x1D, 0xF1, 0xF2):
        del backend["model"]["vocab"][spelling[byte]]
    found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))
    found.eos_token = tokenizer("embedded").eos_token
    return found


def test_a_tokenizer_that_lacks_rare_bytes_takes_grammars_that_do_not_need_them():
    found = without_rare_bytes()
    grammars = GrammarCompiler(found, [found.eos_token_id])
    for value in SCHEMAS:
        ended = [walked(grammars.state(schema(value)), found.eos_token_id, random.Random(seed)) for seed in range(6)]
        texts = [found.decode(tokens) for tokens in ended if tokens is not None]
        assert texts
        for text in texts:
            jsonschema_rs.validator_for(value, validate_formats=True).validate(json.loads(text))
    for text in ("\x04", "ab\x06", "a(\x1d|\x04)", "\U00050000"):
        with pytest.raises(InvalidArgumentError):
            walked(grammars.state(regex(text)), found.eos_token_id, random.Random(0))
    assert allowed(grammars.state(regex("a|\x04"))) == [found.convert_tokens_to_ids("a")]


def suffixed():
    """Byte fallback whose spaces come from a suffix of the token before."""
    suffixed = TOKENIZERS["gemma"]()
    backend = json.loads(suffixed.backend_tokenizer.to_str())
    backend["decoder"]["decoders"][0] = {"type": "BPEDecoder", "suffix": "aid"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="</s>")


def test_a_tokenizer_whose_tokens_depend_on_their_neighbours_takes_no_grammar():
    with pytest.raises(InvalidArgumentError, match="takes no grammar: the text of a token depends on its neighbours"):
        GrammarCompiler(suffixed(), [2]).state(regex("a+"))


@pytest.mark.parametrize("name", WHOLE)
def test_names_of_special_tokens_are_spelt_with_ordinary_ones(name):
    special = {*known(name).special_token_ids}
    for text in SPECIAL:
        tokens = walked(compiler(name).state(schema({"const": text})), end_token(name), random.Random(0))
        assert served(name, tokens) == json.dumps(text)
        assert not special & {*tokens}
        assert len(tokens) > 1


# States

WORDS = [f"{first}{rest}" for first in ("a", "the", "é") for rest in ("", "b", " said", "🙂")]


def test_every_end_token_is_allowed_exactly_where_the_text_is_complete():
    ends = [tokenizer("embedded").eos_token_id, *known("embedded").special_token_ids[-2:], 1500]
    state = GrammarCompiler(tokenizer("embedded"), ends).state(Grammar(GrammarKind.REGEX, "|".join(WORDS)))
    seen, left = set(), [(state, b"")]
    while left:
        state, text = left.pop()
        assert {state.allows(end) for end in ends} == {text.decode(errors="replace") in WORDS}
        seen.add(text.decode(errors="replace"))
        for token in {*allowed(state)} - {*ends}:
            left.append((state.after(token), text + known("embedded").tokens[token]))
    assert seen >= {*WORDS}


TALL = an_object(a=an_object(b={"enum": ["one", "once", 1.5]}), c={"type": "array", "items": {"type": "boolean"}})


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_states_of_a_tree_are_those_of_a_fresh_matcher(data):
    """Nodes are added in any order; no state changes when another is derived from it."""
    grammar = schema(TALL)
    paths, bits = [()], {}
    states = {(): compiler("embedded").state(grammar)}
    for _ in range(data.draw(st.integers(1, 25))):
        path = data.draw(st.sampled_from(paths))
        following = allowed(states[path])
        token = data.draw(st.sampled_from(following))
        bits.setdefault(path, states[path].bits)
        states[*path, token] = states[path].after(token)
        paths.append((*path, token))
    fresh = GrammarCompiler(tokenizer("embedded"), [end_token("embedded")])
    fresh._tokens = compiler("embedded")._tokens
    for path, state in states.items():
        following = allowed(state)
        assert state.forced == (following[0] if len(following) == 1 else None)
        assert state.after(next(each for each in range(2048) if each not in following)) is None
        assert bits.get(path, state.bits) == state.bits == fresh.state(grammar, path).bits
        assert all(state.allows(token) for token in following)
        assert not state.allows(10**6)


def test_tokens_that_do_not_follow_the_grammar_are_refused():
    with pytest.raises(InvalidArgumentError, match="do not follow"):
        compiler("embedded").state(regex("ab"), known("embedded")("b"))


def test_threads_share_states():
    """Matchers of llguidance raise an error when two threads use one at once."""
    opening = known("embedded")('{"')[0]
    found, errors = set(), []

    def use(state, barrier):
        try:
            barrier.wait()
            below = state.after(opening) or state
            found.add((state.bits, below.bits, compiler("embedded").state(grammar).bits))
        except BaseException as error:
            errors.append(error)

    for number in range(60):
        grammar = schema({"type": "object", "properties": {f"key {number}": {"type": "string", "pattern": "^[a-z]+$"}}})
        state, barrier = compiler("embedded").state(grammar), Barrier(3)
        state = GrammarState(state._matcher.deep_copy())  # its mask is not known yet
        threads = [Thread(target=use, args=(state, barrier)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(found) == 1
        found.clear()


# What the compiler of llguidance would answer wrongly


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({"enum": [1234567890123456789]}, "1234567890123456789"),
        ({"properties": {"id": {"const": 2**53 + 1}}}, "9007199254740993"),
        ({"type": "integer", "minimum": 2**53 + 1}, "9007199254740993"),
        ({"items": {"contentEncoding": "base64"}}, "contentEncoding"),
        ({"contentMediaType": "application/json"}, "contentMediaType"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf with alternatives that may overlap is not"),
        ({"type": "integer", "exclusiveMinimum": 1, "maximum": 1.5}, "minimum and maximum: integer interval"),
        ({"minProperties": 2}, "minProperties"),
        ({"const": {"a": ["\x01"]}}, "control character"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "lenient"),
        ({"x-guidance": 3}, "x-guidance"),
        ({"$ref": "#"}, "no token"),
        ({"not": {}}, "not"),
    ],
)
def test_what_would_be_answered_wrongly_is_refused_by_name(refused, words):
    with pytest.raises(InvalidArgumentError, match=words):
        compiler("embedded").state(schema(refused))


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (regex("(a"), "the regular expression is refused: the pattern (a: unclosed group"),
        (
            regex("b" * 5000 + "(a"),
            f"the regular expression is refused: the pattern {'b' * 95}…{'b' * 98}(a: unclosed group",
        ),
        (
            Grammar(GrammarKind.LARK, f"start: X\nX: /{'b' * 300}(/"),
            f"the grammar is refused: line 2, column 4: the pattern {'b' * 95}…{'b' * 99}(: unclosed group",
        ),
        (
            schema({"type": "string", "pattern": "(?!a)" + "b" * 5000}),
            f"the JSON schema is refused: the pattern (?!a){'b' * 90}…{'b' * 100}: look-around, including look-ahead "
            "and look-behind, is not supported",
        ),
        (
            regex("(?=a)b"),
            "the regular expression is refused: the pattern (?=a)b: look-around, including look-ahead and look-behind, "
            "is not supported",
        ),
        (
            regex(r"a\b"),
            r"the regular expression is refused: look-around and word boundaries are not supported: /a\b/",
        ),
        (
            regex(r"a\b" + "b" * 5000),
            "the regular expression is refused: look-around and word boundaries are not supported: "
            rf"/a\b{'b' * 43}…{'b' * 99}/",
        ),
        (Grammar(GrammarKind.LARK, "start: other"), 'the grammar is refused: line 1, column 8: unknown name: "other"'),
        (
            Grammar(GrammarKind.LARK, "start: X\nX: /(/"),
            "the grammar is refused: line 2, column 4: the pattern (: unclosed group",
        ),
        (Grammar(GrammarKind.LARK, 'begin: "a"'), "the grammar is refused: no rule is named start"),
        (schema({"if": {}, "then": {}}), 'the JSON schema is refused: these keywords are not supported: "if", "then"'),
        (
            schema({"properties": {"a": {"type": "string", "pattern": "(?!a)"}}}),
            "the JSON schema is refused: the pattern (?!a): look-around, including look-ahead and look-behind, is not "
            "supported",
        ),
        (schema({"$ref": "#/none"}), "the JSON schema is refused: $ref: '/none' is not in the schema"),
        (
            schema({"$ref": "https://a.org/b"}),
            "the JSON schema is refused: $ref: 'https://a.org/b' is in another document, which is not read",
        ),
        (
            schema({"type": "integer", "minimum": 5, "maximum": 4}),
            "the JSON schema is refused: no value follows the schema: minimum (5) is greater than maximum (4)",
        ),
        (
            schema({"type": "number", "minimum": "a"}),
            """the JSON schema is refused: expected a number for 'minimum', got "a\"""",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong_in_the_requests_own_terms(refused, words):
    with pytest.raises(InvalidArgumentError) as raised:
        compiler("embedded").state(refused)
    assert str(raised.value) == words


def lark(*schemas):
    names = [f"s{place}" for place in range(len(schemas))]
    rules = (f"{name}: %json {json.dumps(each, indent=1)}" for name, each in zip(names, schemas, strict=True))
    return Grammar(GrammarKind.LARK, "\n".join([f'start: "%json " | {" | ".join(names)}', *rules]))


KEYWORDS = [
    *("type", "properties", "patternProperties", "additionalProperties", "required", "minProperties", "items"),
    *("prefixItems", "minItems", "const", "enum", "allOf", "anyOf", "oneOf"),
    *("format", "pattern", "minLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "$ref", "$defs", "$id", "x-guidance"),
]
NAMES = st.sampled_from([*KEYWORDS, "a", "date", "time", "integer", "object", "#/$defs/a", "\\s", "(", "\ud800"])
NUMBERS = st.sampled_from([0, 1, -1, 0.5, True, 2**53 + 1, 10**40, 1e400, -1e400, math.nan])
VALUES = st.recursive(
    st.none() | NUMBERS | NAMES, lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=4)
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
@example({"properties": {"minimum": math.inf}})
@example({"exclusiveMinimum": 1, "anyOf": [{"maximum": math.nan}]})
def test_no_schema_is_a_fault_of_the_service(value):
    for grammar in (schema(value), lark(value)):
        with suppress(InvalidArgumentError):
            compiler("embedded").state(grammar)


def accepts(grammar, text):
    """Whether some tokens of a text are allowed, and an end token after them."""
    state, data = compiler("embedded").state(grammar), text.encode()
    states = {0: state}  # by place; the state depends on the text alone
    for place in range(len(data)):
        for end in range(place + 1, min(len(data), place + 16) + 1) if place in states else ():
            token = known("embedded")._ids.get(data[place:end])
            if token is not None and end not in states and (below := states[place].after(token)):
                states[end] = below
    return len(data) in states and states[len(data)].allows(end_token("embedded"))


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ({"properties": {"a\n": {"type": "integer"}}}, r'{"a\n": 1}', r'{"\u0061\u000a": "x"}'),
        ({"patternProperties": {"^é*$": {"type": "integer"}}}, '{"é": 1}', r'{"\u00e9": "x"}'),
        ({"format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"format": "time", "pattern": "Z$"}, '"23:59:59.5Z"', '"23:59:60Z"'),
        ({"format": "date-time"}, '"2024-12-31t23:59:59+01:00"', '"2023-02-29T00:00:00Z"'),
        ({"pattern": r"^\S$"}, '"–"', '"\ufeff"'),
        ({"pattern": r"^[\s]$"}, '"\ufeff"', '"\x85"'),
        ({"pattern": r"^\\s$"}, r'"\\s"', '" "'),
        ({"patternProperties": {r"^\s$": False}}, '{"\x85": 1}', '{"\ufeff": 1}'),
        ({"const": {"format": "date"}}, '{"format": "date"}', "{}"),
        ({"properties": {"format": {"const": "date"}}}, '{"format": "date"}', '{"format": "time"}'),
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a": 1, "b": 2}', '{"a": 1, "a": 2}'),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}, "3.0001", "3"),
        ({"type": "number", "exclusiveMaximum": -3.0, "exclusiveMinimum": -3.5}, "-3.25", "-3.0"),
        *(
            ({"properties": {name: {"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}}}, *texts)
            for name in ("default", "const", "enum", "examples")
            for texts in [(f'{{"{name}": 3.25}}', f'{{"{name}": 3}}')]
        ),
        (
            {
                "$ref": "#/$defs/enum",
                "$defs": {"enum": {"patternProperties": {"default": {"exclusiveMinimum": 3, "maximum": 3.5}}}},
            },
            *('{"default": 3.25}', '{"default": 3}'),
        ),
        ({"properties": {"properties": {"const": {"a": 3}}}}, '{"properties": {"a": 3}}', '{"properties": 3}'),
        (
            {"type": "number", "exclusiveMinimum": 2**40, "allOf": [{"maximum": 2**40 + 0.5}]},
            "1099511627776.5",
            f"{2**40}",
        ),
        ({"type": "number", "minimum": 1, "maximum": 1.5, "exclusiveMinimum": True}, "1.25", "1"),
        ({"properties": {"exclusiveMinimum": {"const": 0.5}}}, '{"exclusiveMinimum": 0.5}', '{"exclusiveMinimum": 0}'),
        (
            {"type": "number", "exclusiveMaximum": 1, "anyOf": [{"minimum": 0.5}, {"exclusiveMinimum": 0}]},
            *("0.25", "0"),
        ),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"x-guidance": {"item_separator": ","}}, '[1,"a"]', '[1, "a"]'),
        ({"x-guidance": {"item_separator": ","}, "properties": {"a": False}}, "{}", r'{"\u0061": 1}'),
    ],
)
def test_what_is_accepted_is_valid(grammar, yes, no):
    assert accepts(schema(grammar), yes)
    assert not accepts(schema(grammar), no)


BOUNDS = st.dictionaries(
    st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from([-2.5, -2, -1, -0.5, 0, 0.5, 1, 3]), max_size=2
)
BOUNDS = st.builds(
    lambda least, most, kind: least | most | kind,
    BOUNDS,
    st.dictionaries(
        st.sampled_from(["maximum", "exclusiveMaximum"]),
        st.sampled_from([-1, 0, 0.25, 1, 1.5, 2, 2.0, 7.25]),
        max_size=2,
    ),
    st.sampled_from([{}, {}, {"type": "integer"}, {"type": "number"}, {"multipleOf": 0.5}]),
)
BOUNDED = st.recursive(
    BOUNDS,
    lambda each: st.builds(
        lambda own, key, parts: own | {key: parts},
        BOUNDS,
        st.sampled_from(["allOf", "anyOf"]),
        st.lists(each, min_size=1),
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=150)
@given(BOUNDED, st.sampled_from(["integer", "number"]))
def test_numbers_that_are_accepted_are_within_all_bounds(bounds, kind):
    """The compiler merges the bounds of schemas that are combined; the schema may refer to them."""
    value = {"$ref": "#/$defs/a", "type": kind, "$defs": {"a": bounds}}
    try:
        state = compiler("embedded").state(schema(value))
    except InvalidArgumentError as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert re.search("[mM]inimum|[mM]axim|multiple|anyOf|allOf", reason)
        return
    validator = jsonschema_rs.validator_for(value)
    for text in {json.dumps(each) for step in range(-13, 40) for each in (step / 4, step)} | {"-0", "-0.0", "1e0"}:
        after = state.after_all(known("embedded")(text))
        if after is not None and after.allows(end_token("embedded")):
            assert validator.is_valid(json.loads(text)), text


def test_schemas_in_a_grammar_are_checked_too():
    """Grammars of calls of functions have them."""
    day, closed = {"format": "date", "type": "string"}, {"type": "object", "properties": {"a": False, "%json {": {}}}
    grammar = lark({"const": 1}, day, closed | {"x-guidance": {"key_separator": ": "}})
    for text in ("%json ", "1", '"2024-02-29"', '{"b": 1}'):
        assert accepts(grammar, text)
    for text in ("2", '"2023-02-29"', r'{"\u0061": 1}'):
        assert not accepts(grammar, text)
    with pytest.raises(InvalidArgumentError, match="contentEncoding"):
        compiler("embedded").state(lark({}, {"items": {"contentEncoding": "base64"}}))
    with pytest.raises(InvalidArgumentError, match="refused"):
        compiler("embedded").state(Grammar(GrammarKind.LARK, "start: %json {not JSON"))


@pytest.mark.parametrize(
    "named", ["<|padding|>", "<[1]>", "<[0-5]>", "<[*]>", "<[^7]>", 'x "b"\nx: (<|padding|> "c")?', '"<b>" | <[7,1]>']
)
@pytest.mark.parametrize("rest", ['"a"', '"/" // no "comment', ""])
def test_a_grammar_that_names_an_end_token_is_refused(named, rest):
    """The completion would end with the token, whatever the grammar wants after it."""
    with pytest.raises(InvalidArgumentError, match=r"names <\|padding\|>, which ends"):
        compiler("embedded").state(Grammar(GrammarKind.LARK, f"start: {named} {rest}"))


def test_a_grammar_may_name_other_tokens_and_spell_the_name_of_an_end_token():
    lark = 'start: <|endoftext|> "<|padding|>" /<[1]>/ "</" <[^1]> "é" // <|padding|>\n # <|padding|>\n%ignore /<[1]> /'
    state = compiler("embedded").state(Grammar(GrammarKind.LARK, lark))
    assert [*allowed(state)] == [0]


# Limits


SECONDS = 10  # for a compilation, and for a mask, which take at most 2 s and 0.1 s alone


def timed(work):
    """The result of work, or its error if a grammar is refused or fails; neither may take long."""
    began = time.monotonic()
    try:
        return work()
    except InvalidArgumentError as error:
        return error
    finally:
        assert time.monotonic() - began < SECONDS


REASONS = (
    "the (grammar|JSON schema|regular expression) is refused: |the JSON schema is not valid: "
    "|the grammar cannot be followed further: |no token of "
)


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_grammar_is_refused_or_followed_in_time(name):
    choose, state = random.Random(0), timed(lambda: compiler("embedded").state(COSTLY[name]))
    for _ in range(20):
        if isinstance(state, InvalidArgumentError):
            break
        token = choose.choice(allowed(state))
        state = timed(lambda state=state, token=token: usable(state.after(token)))
    if isinstance(state, InvalidArgumentError):
        assert re.match(REASONS, str(state))


def test_a_long_grammar_is_refused_before_it_is_compiled():
    with pytest.raises(InvalidArgumentError, match=str(MAX_GRAMMAR_BYTES)):
        schema({"enum": ["x" * 2**20]})


def test_a_grammar_that_becomes_too_complex_is_an_error_of_its_argument():
    """Neither None, which would lift the mask, nor an error of another kind."""
    state = compiler("embedded").state(regex("((a{1,100}){1,100}){1,100}"))
    for token in known("embedded")("a") * 10**4:
        if state.error is not None:
            break
        state = state.after(token)
    with pytest.raises(InvalidArgumentError, match="cannot be followed further"):
        raise state.error
    assert not allowed_tokens(state, 2048)
    assert state.forced is state.after(token) is None


def test_the_last_grammars_are_kept():
    compiled = compiler("embedded")._compiled
    for number in range(MAX_GRAMMARS + 3):
        compiler("embedded").state(regex(f"x{number}"))
    assert len(compiled) == MAX_GRAMMARS
    assert compiler("embedded").state(regex(f"x{number}")) is compiled[regex(f"x{number}")]


def test_the_last_64_grammars_are_kept():
    grammars = GrammarCompiler(tokenizer("embedded"), [end_token("embedded")])
    for length in range(1, 71):
        grammars.state(regex(f"a{{{length}}}"))
    assert [*grammars._compiled] == [regex(f"a{{{length}}}") for length in range(7, 71)]


def test_a_grammar_has_at_most_131072_bytes():
    regex("a" * 131_072)
    with pytest.raises(InvalidArgumentError, match="131073 bytes"):
        regex("a" * 131_073)
