"""Tests how calls of functions are found in the text of an answer, however the text is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from dynatree import embedded
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.engine.grammar.compiler import GrammarCompiler
from dynatree.engine.model.vocabulary import token_bytes
from dynatree.gateway.requests import ChatRequest
from dynatree.gateway.tools import CALL_BEGIN, CALL_END, MAX_CALLS, CallReader, Tool, call_grammar
from tests.support.allowed import allowed_tokens

NAMES: dict[str, dict[str, Any]] = {name: {} for name in ("weather", "add", "f.g-h_1")}
Read = tuple[str, list[tuple[str, Any]]]  # the content, and the name and the arguments of each call


def read(pieces: Sequence[str], functions: Any = None, openings: Sequence[str] = (), **options: Any) -> Read:
    reader = CallReader(functions or NAMES, openings, **options)
    parts = [*map(reader.push, pieces), reader.end()]
    calls = [call for _, found in parts for call in found]
    assert reader.calls == len(calls)
    return "".join(content for content, _ in parts), [(call.name, json.loads(call.arguments)) for call in calls]


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def tagged(text: str) -> str:
    return f"{CALL_BEGIN}\n{text}\n{CALL_END}"


WORDS = st.sampled_from(
    [
        *("Hello", " ", "\n", "\n\n", "<", "<tool", "<tool_call", "</tool_call>", "<tool_call>", "{", "}", "[", "]"),
        *(
            '"',
            "\\",
            "é",
            "雨",
            "🙂",
            '{"name"',
            "[TOOL_CALLS]",
            "[TOOL",
            "<|python_tag|>",
            ";",
            ",",
            '"weather"',
            "null",
        ),
    ]
)
STRINGS = st.lists(WORDS | st.text(max_size=4), max_size=4).map("".join)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(STRINGS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(STRINGS, VALUES, max_size=2)
CALLS = st.builds(call, st.sampled_from(sorted(NAMES)), ARGUMENTS, st.sampled_from(["arguments", "parameters"]))
NAMED = st.builds(
    lambda name, marks, arguments: "{}{}{}{}{}{}".format(marks[0], name, *marks[1:], json.dumps(arguments)),
    st.sampled_from(sorted(NAMES)),
    st.sampled_from([("[TOOL_CALLS]", "[CALL_ID]", "a1b2c3d4e", "[ARGS]"), ("", "", "a1b2c3d4e", ""), ("",) * 4]),
    ARGUMENTS,
)
XML = st.lists(
    st.sampled_from(
        [
            *("<function=add>\n", "<parameter=a>\n", "1", "x", "\n</parameter>\n", "</function>", "\n", " ", "</para"),
            *(CALL_END, CALL_BEGIN, "<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n"),
        ]
    ),
    max_size=9,
).map(lambda parts: f"{CALL_BEGIN}\n<function=add>\n{''.join(parts)}")
ODD = st.builds(call, st.sampled_from(["unknown", ""]), VALUES) | VALUES.map(json.dumps)
BARE = CALLS | ODD | st.lists(CALLS | ODD, max_size=2).map(lambda some: f"[{', '.join(some)}]")
CUT = st.tuples(BARE, st.integers(0, 60)).map(lambda pair: pair[0][: pair[1]])
PIECES = (
    STRINGS | NAMED | XML | BARE | CUT | CALLS.map(tagged) | CUT.map(tagged) | BARE.map(lambda text: CALL_BEGIN + text)
)
TEXTS = st.lists(PIECES, max_size=5).map("".join)
FORMATS = ("hermes", "llama3", "mistral", "mistral_named", "qwen3_coder")


@settings(max_examples=500, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 400), max_size=12), st.sampled_from(FORMATS))
def test_how_a_text_is_cut_changes_nothing(text: str, cuts: list[int], tool_format: str) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]

    content, calls = read([text], tool_format=tool_format)

    assert read([text[begin:end] for begin, end in pairwise(places)], tool_format=tool_format) == (content, calls)
    assert read(list(text), tool_format=tool_format) == (content, calls)
    if not calls:
        assert content == text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS, st.from_regex("[a-zA-Z0-9]{9}", fullmatch=True))),
    st.sampled_from(["[TOOL_CALLS]{}[CALL_ID]{}[ARGS]{}", "[TOOL_CALLS]{0}[ARGS]{2}", "[TOOL_CALLS]{0}{2}"]),
    st.booleans(),
)
def test_calls_by_name_are_those_that_the_template_writes(
    calls: list[tuple[str, Any, str]], form: str, shown: bool
) -> None:
    """Marks are special tokens, which the text of an answer lacks."""
    if not shown:
        form = re.sub(r"\[[A-Z_]+\]", "", form)
    text = "".join(form.format(name, id_, json.dumps(arguments)) for name, arguments, id_ in calls)
    assert read([text]) == read(list(text)) == ("", [(name, arguments) for name, arguments, _ in calls])


PROSE = STRINGS.map(lambda text: text.replace("<", "").strip()).filter(bool).map(lambda text: f"I {text}.")
TYPED: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "text": ({"type": "string"}, STRINGS.filter(lambda text: "\n</parameter>\n" not in f"{text}\n")),
    "choice": ({"enum": ["1", "None", "é\n"]}, st.sampled_from(["1", "None", "é\n"])),
    "flag": ({"type": "boolean", "description": "Whether"}, st.booleans()),
    "count": ({"type": ["integer", "null"]}, st.none() | st.integers()),
    "size": ({"$ref": "#/$defs/size"}, st.floats(allow_nan=False, allow_infinity=False)),
    "some": ({"type": "array", "items": {}}, st.lists(VALUES, max_size=3)),
    "more": ({"anyOf": [{"type": "object"}, {"type": "boolean"}]}, st.dictionaries(STRINGS, VALUES, max_size=2)),
}
TYPES = {
    "type": "object",
    "properties": {name: schema for name, (schema, _) in TYPED.items()},
    "$defs": {"size": {"type": "number"}},
}


def xml_call(arguments: dict[str, Any], constant: Any = str) -> str:
    """A call as Qwen3-Coder's template writes it, or with constants as JSON has them."""
    values = {
        name: value
        if isinstance(value, str)
        else constant(value)
        if not isinstance(value, list | dict)
        else written(value)
        for name, value in arguments.items()
    }
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<function=typed>\n{parameters}</function>"


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({}, optional={name: values for name, (_, values) in TYPED.items()}), max_size=3),
    st.sampled_from([str, written]),
    PROSE | st.just(""),
)
def test_calls_in_xml_are_those_that_the_template_writes(calls: list[Any], constant: Any, prose: str) -> None:
    text = "\n".join([prose, *(tagged(xml_call(each, constant)) for each in calls)]).strip()
    for pieces in ([text], list(text)):
        assert read(pieces, {"typed": TYPES}) == (prose, [("typed", each) for each in calls])


SPELT = {
    "some": st.sampled_from([[], [1, {"é": ["</parameter>"]}]]),
    "more": st.sampled_from([{}, {"a": "</tool_call>"}]),
}


@settings(max_examples=12, deadline=None)
@given(st.fixed_dictionaries({}, optional={name: SPELT.get(name, values) for name, (_, values) in TYPED.items()}))
def test_a_grammar_of_calls_in_xml_allows_every_call(arguments: dict[str, Any]) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "typed", "parameters": TYPES}})
    grammar = call_grammar([tool], "qwen3_coder", several=False)
    assert "call_0_0_value" in grammar
    arguments = {name: arguments[name] for name in TYPED if name in arguments}  # in the schema's order
    assert allows(grammar, tagged(xml_call(arguments, written)))
    assert not allows(grammar, tagged(xml_call({"flag": 1})))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a$"},
        {"type": ["string", "null"]},
        {},
        {"$ref": "#"},
        {"enum": ["a\n</parameter>\n"]},
        {"enum": ["a", 1]},
        True,
    ],
)
def test_a_call_whose_values_xml_could_not_tell_apart_is_json(schema: Any) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    assert call_grammar([tool], "qwen3_coder", several=True) == call_grammar([tool], "hermes", several=True)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(PROSE, CALLS), max_size=3), st.sampled_from(["", "\n", " \n\n"]), st.sampled_from(["", "Done."])
)
def test_each_call_between_the_tags_is_found_and_the_rest_is_the_content(
    parts: list[tuple[str, str]], space: str, last: str
) -> None:
    text = "".join(f"{prose}{space}{tagged(called)}{space}" for prose, called in parts) + last

    content, calls = read([text])

    assert content == "".join(prose for prose, _ in parts) + last
    assert [(name, {"name": name, "arguments": arguments}) for name, arguments in calls] == [
        (found["name"], {"name": found["name"], "arguments": found.get("arguments", found.get("parameters"))})
        for found in (json.loads(called) for _, called in parts)
    ]


F = call("weather", {"city": "Łódź"})
G = call("add", {"a": {"b": [1, {"c": "}"}]}}, "parameters")
BOTH = [("weather", {"city": "Łódź"}), ("add", {"a": {"b": [1, {"c": "}"}]}})]


DESCRIBED = '{"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {}}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (F, "", BOTH[:1]),
        (f" \n{G}\n", "", BOTH[1:]),
        (f"{F}; {G}", "", BOTH),
        (f"{F}\n{G}", "", BOTH),
        (f"[{F}, {G}]", "", BOTH),
        (f"[ {F},{G} ]", "", BOTH),
        (f"[\n  {F}\n]", "", BOTH[:1]),
        (f"[TOOL_CALLS] [{F}, {G}]", "", BOTH),
        (f"<|python_tag|>{G}", "", BOTH[1:]),
        ('{"type": "function", "name": "add", "parameters": {}}', "", [("add", {})]),
        ('{ "arguments": {"a": 1},\n"name": "add"}', "", [("add", {"a": 1})]),
        (tagged(F) + tagged(G), "", BOTH),
        (f"{CALL_BEGIN}{F}{CALL_BEGIN}{G}", "", BOTH),  # without ends
        (f"{CALL_BEGIN}\n{tagged(F)}", CALL_BEGIN, BOTH[:1]),
        (f"So:\n{CALL_BEGIN}{F}", "So:", BOTH[:1]),
        (f"{CALL_BEGIN}{F[:-1]}", f"{CALL_BEGIN}{F[:-1]}", []),
        (f"{tagged('{}')}\n{tagged(F)}", tagged("{}"), BOTH[:1]),
        (
            tagged(call("add", {"a": CALL_END, "b": f'"{CALL_BEGIN}\\"'})),
            "",
            [("add", {"a": CALL_END, "b": f'"{CALL_BEGIN}\\"'})],
        ),
        (tagged(call("add", {"a": tagged(F)})), "", [("add", {"a": tagged(F)})]),
        (f'{CALL_BEGIN}{{"name": "add{CALL_END}\n{tagged(F)}', f'{CALL_BEGIN}{{"name": "add{CALL_END}', BOTH[:1]),
        (f"The tag {CALL_BEGIN} begins a call.", f"The tag {CALL_BEGIN} begins a call.", []),
        (f"{F} is a call", f"{F} is a call", []),
        ('{"name": ["add"], "arguments": {}}', '{"name": ["add"], "arguments": {}}', []),
        ('{"name": {}, "arguments": {}}', '{"name": {}, "arguments": {}}', []),
        (tagged('{"name": null, "arguments": {}}'), tagged('{"name": null, "arguments": {}}'), []),
        ('{"name": "add", "arguments": {"a": 1e999}}', '{"name": "add", "arguments": {"a": 1e999}}', []),
        ('{"name": "add", "arguments": {"a": NaN}}', '{"name": "add", "arguments": {"a": NaN}}', []),
        ('{"name": "add", "arguments": "{}"}', '{"name": "add", "arguments": "{}"}', []),
        ('{"name": "Oslo", "harbour": true}', '{"name": "Oslo", "harbour": true}', []),
        ('{"name": "weather"}', '{"name": "weather"}', []),
        ('{"name": "weather", "description": "Wet"}', '{"name": "weather", "description": "Wet"}', []),
        (f"[{DESCRIBED}, {DESCRIBED}]", f"[{DESCRIBED}, {DESCRIBED}]", []),
        (tagged('{"name": "weather"}'), "", [("weather", {})]),
        ('weather{"city": "Łódź"}add{"a": {"b": [1, {"c": "}"}]}}', "", BOTH),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Łódź"}\n[TOOL_CALLS]add[ARGS]{"a": {"b": [1, {"c": "}"}]}}', "", BOTH),
        ('[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Łódź"}', "", BOTH[:1]),
        ('weathera1b2c3d4e{"city": "Łódź"}', "", BOTH[:1]),
        ('weather{"city": "Łódź"} is a call', 'weather{"city": "Łódź"} is a call', []),
        ('weather{"city"', 'weather{"city"', []),
        ("weather[1]", "weather[1]", []),
        ('other{"city": "Łódź"}', 'other{"city": "Łódź"}', []),
        ("addition and", "addition and", []),
        ("add", "add", []),
        ("[]", "[]", []),
        ("[1, 2]", "[1, 2]", []),
        ("", "", []),
        (" \n", " \n", []),
    ],
)
def test_the_forms_of_calls(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert read([text]) == (content, calls)
    assert read(list(text)) == (content, calls)


X, Y = "<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n</function>", '{"b": [1, {"c": "}"}]}'
Y = f"<function=add><parameter=a>{Y}</parameter></function>"
NEW, WRONG = 'weather{"city": "Łódź"}', 'weather{"city": Łódź}'


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("qwen3_coder", f"\n\n{X}\n{CALL_END}", "", BOTH[:1]),
        ("qwen3_coder", f"So:\n\n{X}\n{CALL_END}\n{Y}\n{CALL_END}", "So:", BOTH),
        ("qwen3_coder", f"So:\n{X}\n{Y}", "So:", BOTH),
        ("qwen3_coder", f"{X}\n{CALL_END}\nDone.", "Done.", BOTH[:1]),
        ("qwen3_coder", f"Write {X} so.", f"Write {X} so.", []),
        (
            "qwen3_coder",
            f"{X.replace('weather', 'other')}\n{CALL_END}",
            f"{X.replace('weather', 'other')}\n{CALL_END}",
            [],
        ),
        ("qwen3_coder", "<function=weather", "<function=weather", []),
        ("hermes", f"\n\n{X}\n{CALL_END}", f"\n\n{X}\n{CALL_END}", []),
        ("hermes", tagged(Y), "", BOTH[1:]),
        ("mistral_named", f"Let me check.[TOOL_CALLS]weather[ARGS]{NEW[7:]}", "Let me check.", BOTH[:1]),
        ("mistral_named", f"Let me check.weathera1b2c3d4e{NEW[7:]}", "Let me check.", BOTH[:1]),
        ("mistral_named", f"Let me check.\n{NEW}add{G[30:-1]}", "Let me check.", BOTH),
        ("mistral_named", f"Write {NEW} so. ", f"Write {NEW} so. ", []),
        ("mistral_named", f"Let me check.{WRONG}", f"Let me check.{WRONG}", []),
        ("mistral_named", f"Let me use my_{NEW}", f"Let me use my_{NEW}", []),
        ("mistral_named", "The [weather] is [wet](https://example.org/a-b).", None, []),
        ("mistral", f"Let me check.[TOOL_CALLS] [{F}, {G}]", "Let me check.", BOTH),
        ("mistral", f"Let me check. [{F}]", "Let me check.", BOTH[:1]),
        ("mistral", f"Let me check. [ {{ {F[1:]}]\n", "Let me check.", BOTH[:1]),
        ("mistral", f"Write [{F}] so.", f"Write [{F}] so.", []),
        ("mistral", f"Tools: [{DESCRIBED}]", f"Tools: [{DESCRIBED}]", []),
        ("mistral", 'A list [1, [{"a": 2}]], and [TOOL.', None, []),
        ("hermes", f"Let me check. [{F}]", f"Let me check. [{F}]", []),
        ("llama3", f"Let me check.{NEW}", f"Let me check.{NEW}", []),
    ],
)
def test_calls_behind_text_are_those_of_the_format(
    tool_format: str, text: str, content: str | None, calls: list[tuple[str, Any]]
) -> None:
    expected = (text if content is None else content, calls)
    assert read([text], tool_format=tool_format) == read(list(text), tool_format=tool_format) == expected


@pytest.mark.parametrize(
    "value", ["cats", "\ncats\n", "cats</parameter>", "\ncats and\n\n dogs\n", "\n\n", "\n", "", " a "]
)
@pytest.mark.parametrize("between", ["", "\n"])
def test_a_parameter_may_stand_in_one_line(value: str, between: str) -> None:
    """At most one line break is dropped at each side of a value."""
    parts = ["<function=weather>", f"<parameter=city>{value}</parameter>", "<parameter=b>1</parameter>", "</function>"]
    stripped = value.removeprefix("\n").removesuffix("\n")
    for text in (tagged(between.join(parts)), f"{CALL_BEGIN}{between.join(parts)}"):
        assert read([text]) == read(list(text)) == ("", [("weather", {"city": stripped, "b": 1})])


TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
    for name, parameters in {
        "weather": {"properties": {"city": {"enum": ["Łódź", f"{CALL_END}\n"]}}, "required": ["city"]},
        "add": {"$defs": {"one": {"enum": [1, "}"]}}, "properties": {"a": {"$ref": "#/$defs/one"}}, "required": ["a"]},
        "f.g-h_1": {"properties": {"to": {"$ref": "#"}}},
    }.items()
]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_what_the_grammar_of_calls_allows_is_read_as_calls(tool_format: str, several: bool) -> None:
    """The texts are random walks through the grammar, which end as soon as they may."""
    grammar, found = Grammar(GrammarKind.LARK, call_grammar(TOOLS, tool_format, several=several)), []
    for text in walks(grammar, 12, on=0.5 if several else 0.0):
        content, calls = read([text], tool_format=tool_format)
        assert content == ""
        found.append(len(calls))
        for name, arguments in calls:
            [schema] = [tool.function.parameters for tool in TOOLS if tool.function.name == name]
            jsonschema_rs.validate(schema, arguments)
    assert min(found) == 1
    assert (max(found) > 1) == several


@cache
def bundled() -> tuple[PreTrainedTokenizerFast, GrammarCompiler, list[bytes]]:
    """The bundled tokenizer, a compiler for it, and the bytes of its tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded.target_path())
    return tokenizer, GrammarCompiler(tokenizer, [tokenizer.eos_token_id]), token_bytes(tokenizer)


def walks(grammar: Grammar, count: int, on: float = 0.0) -> Iterator[str]:
    """Yield texts of random walks through a grammar; where one may end, it goes on with the probability `on`."""
    tokenizer, compiler, vocabulary = bundled()
    random = Random(5)
    for _ in range(count):
        state: Any = compiler.state(grammar)
        data = b""
        while not state.allows(tokenizer.eos_token_id) or random.random() < on:
            allowed = allowed_tokens(state, len(vocabulary))
            token = random.choice([id_ for id_ in allowed if id_ != tokenizer.eos_token_id] or [-1])
            if token < 0:
                break
            state = state.after(token) or pytest.fail("an allowed token does not follow")
            data += vocabulary[token]
        yield data.decode()


def allows(grammar: str, text: str) -> bool:
    """Whether a grammar allows a text, in some spelling: the grammar may allow one alone."""
    tokenizer, compiler, vocabulary = bundled()
    ids = {data: id_ for id_, data in enumerate(vocabulary) if data}
    state: Any = compiler.state(Grammar(GrammarKind.LARK, grammar))
    rest = text.encode()
    while rest:
        ends = range(min(len(rest), 16), 0, -1)
        token = next((rest[:end] for end in ends if rest[:end] in ids and state.allows(ids[rest[:end]])), None)
        if token is None:
            return False
        state, rest = state.after(ids[token]), rest[len(token) :]
    return bool(state.allows(tokenizer.eos_token_id))


ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
OTHERS = '{"a": 1, "b": 2}'


@pytest.mark.parametrize(
    ("parameters", "arguments", "allowed"),
    [
        (ONE, '{"a": 1}', True),
        (ONE, OTHERS, False),
        ({name: value for name, value in ONE.items() if name != "type"}, OTHERS, False),
        ({**ONE, "additionalProperties": True}, OTHERS, True),
        ({**ONE, "additionalProperties": {"const": 2}}, OTHERS, True),
        ({"type": "object"}, OTHERS, True),
        ({"type": "object", "properties": {}}, "{}", True),
        ({**ONE, "required": ["a", "b"]}, OTHERS, True),
        ({**ONE, "required": ["a", "b"]}, '{"a": 1}', False),
        ({**ONE, "minProperties": 2}, OTHERS, True),
        ({"allOf": [ONE, {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}]}, OTHERS, True),
        ({"$defs": {"x": ONE}, "properties": {"x": {"$ref": "#/$defs/x"}}}, '{"x": {"a": 1}}', True),
        ({"$defs": {"x": ONE}, "properties": {"x": {"$ref": "#/$defs/x"}}}, f'{{"x": {OTHERS}}}', False),
        ({"properties": {"type": {"const": "object"}, "properties": ONE}}, f'{{"properties": {OTHERS}}}', False),
        ({"properties": {"x": {"const": ONE}}}, f'{{"x": {json.dumps(ONE)}}}', True),
        ({"properties": {"default": ONE}}, f'{{"default": {OTHERS}}}', False),
    ],
)
def test_a_forced_call_has_no_arguments_that_the_function_does_not_name(
    parameters: dict[str, Any], arguments: str, allowed: bool
) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    grammar = call_grammar([tool], "llama3", several=False)
    assert allows(grammar, f'{{"name": "f", "parameters": {arguments}}}') == allowed


def test_a_forced_answer_has_as_many_calls_as_a_message_may_have() -> None:
    grammar = call_grammar(TOOLS, "mistral", several=True)
    most = [G.replace("parameters", "arguments").replace('{"b": [1, {"c": "}"}]}', "1")] * MAX_CALLS
    assert allows(grammar, f"[{', '.join(most)}]")
    assert not allows(grammar, f"[{', '.join([*most, most[0]])}]")


def test_arguments_are_text_that_can_be_sent() -> None:
    """JSON can spell halves of surrogate pairs, which UTF-8 cannot."""
    reader = CallReader(NAMES)
    reader.push(r'{"name": "add", "arguments": {"a": "\ud800", "ł": "\u0142"}}')
    [found] = reader.end()[1]
    assert found.arguments.encode()
    assert json.loads(found.arguments) == {"a": "\ud800", "ł": "ł"}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"{tagged(F)}\n{tagged(G)}", ""),
        (f"So:\n{tagged(F)}\nand\n{tagged(G)}\nDone.", "So:andDone."),
        (tagged(f"[{F}, {G}]"), ""),
        (f"{F}; {G}", ""),
        (f"[TOOL_CALLS] [{F}, {G}]", ""),
        ('weather{"city": "Łódź"}add{"a": 1}', ""),
        (tagged(F), ""),
        ("No call.", "No call."),
    ],
)
def test_calls_behind_the_only_one_are_dropped(text: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert read(pieces, several=False) == (content, BOTH[: int("{" in text)])


def test_nesting_without_end_is_content() -> None:
    for text in ('{"name": "add", "arguments": {"a": ' + "[" * 100_000, tagged("[" * 100_000)):
        assert read([text]) == (text, [])
    for depth in range(850, 1000):  # near Python's own limit
        CallReader(NAMES).push(tagged(f'{{"name": "add", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}'))


STARTS = (
    "additionalto",
    "<function=weather>",
    '[{"name"',
    "[TOOL_CALLS]",
    CALL_BEGIN,
    '{"name":"',
    '{"arguments',
    '{"type',
    '[{"type',
)


@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "qwen3_coder"])
@pytest.mark.parametrize(
    "text",
    [
        "The sea is blue, 1 < 2, and <b>Łódź</b> is a town {here} [there]: <tool> <tool_callers>.",
        '{"answer": "Oslo", "name": "add"}',
        '{ "name" : "Oslo", "harbour": true}',
        '[{"town": 1}, 2]',
        "[1, 2, 3]",
        f"The tag {CALL_BEGIN} begins a call, and {CALL_END} ends it.",
        "additional towns {here}",
    ],
)
def test_a_stream_keeps_back_only_what_may_begin_a_call(text: str, tool_format: str) -> None:
    reader = CallReader(NAMES, tool_format=tool_format)
    told = ""
    for place, character in enumerate(text, 1):
        told += reader.push(character)[0]
        held = text[len(told) : place].strip()
        assert any(each.startswith("".join(held.split())) for each in STARTS), held
    assert told + reader.end()[0] == text


def test_each_call_is_told_as_soon_as_it_ends() -> None:
    reader = CallReader(NAMES)
    assert reader.push(f"So:\n{CALL_BEGIN}\n{F}\n{CALL_END[:-1]}") == ("So:", [])
    text, [found] = reader.push(CALL_END[-1])
    assert (text, found.name, reader.calls) == ("", "weather", 1)
    assert reader.push("\nAnd") == ("And", [])
    assert reader.push(" so on") == (" so on", [])


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_is_called_without_arguments(parameters: Any) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "a", "parameters": parameters}})

    grammar = call_grammar([tool], "hermes", several=False)

    schema = json.loads(grammar.partition("%json ")[2].partition("\n")[0])
    assert (schema["properties"], schema["additionalProperties"]) == ({}, False)


def test_the_limits_of_the_table_hold() -> None:
    base = {"messages": [{"role": "user", "content": "a"}]}
    tools = [{"type": "function", "function": {"name": f"f{each}"}} for each in range(129)]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fields: dict[str, tuple[list[Any], int]] = {"tools": (tools, 128), "guided_choice": (["a"] * 1025, 1024)}
    for name, (values, most) in fields.items():
        ChatRequest.model_validate({**base, name: values[:most]})
        with pytest.raises(ValidationError, match="at most"):
            ChatRequest.model_validate({**base, name: values[: most + 1]})
    for count in (128, 129):
        message = {"role": "assistant", "content": None, "tool_calls": [call] * count}
        with pytest.raises(ValidationError) if count > 128 else nullcontext():
            ChatRequest.model_validate({"messages": [*base["messages"], message]})


def test_two_functions_of_one_name_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(ValidationError, match="two functions have the name f"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": [tool, tool]})
