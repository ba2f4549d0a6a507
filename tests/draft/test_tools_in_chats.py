"""Tests functions in chats: templates in the styles of popular models, and one without functions."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dynatree import embedded
from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.text.prompts import Message, PromptEncoder

HERMES = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nFor each call, answer with <tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n' }}
{{- '</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools is not none %}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}{%- endfor %}"""
MISTRAL_NAMED = """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{- eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"""
QWEN3_CODER = """{%- if tools %}{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools>\\nAnswer with ' }}
{{- '<tool_call>\\n<function=NAME>\\n<parameter=P>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}{%- for message in messages %}
{%- if message.tool_calls %}{{- '<|im_start|>assistant' }}
{%- for call in message.tool_calls %}{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\\n' }}
{%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}
{{- value + '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SMOLLM = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
STYLES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral_named": MISTRAL_NAMED,
    "qwen3_coder": QWEN3_CODER,
    "none": SMOLLM,
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += [
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "[TOOL_CONTENT]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]


def described(text: str) -> str:
    parameters = {"type": "object", "properties": {f"city {text}": {"type": "string", "enum": ["Łódź", text]}}}
    return json.dumps(
        [{"type": "function", "function": {"name": "weather", "description": text, "parameters": parameters}}]
    )


def chat(text: str, id_: str = "a1b2c3d4e") -> list[Message]:
    """A chat with a call and its result; `text` is wherever text may be."""
    calls = [{"id": id_, "type": "function", "function": {"name": "weather", "arguments": {f"city {text}": text}}}]
    result = Message("tool", json.dumps({"sun": text}, ensure_ascii=False), "", "", id_)
    return [
        Message("user", f"Sun? {text}"),
        Message("assistant", "", "", json.dumps(calls), ""),
        result,
        Message("user", "So?"),
    ]


@pytest.fixture(scope="module", name="loaded")
def loaded_fixture() -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded.target_path())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


@pytest.fixture(name="tokenizer", params=STYLES)
def tokenizer_fixture(request: pytest.FixtureRequest, loaded: Any) -> Any:
    loaded.chat_template = STYLES[request.param]
    return loaded


def decoded(tokenizer: Any, messages: list[Message], tools: str, **options: Any) -> str:
    return str(tokenizer.decode(PromptEncoder(tokenizer).chat(messages, special_tokens=False, tools=tools, **options)))


def test_a_template_tells_how_it_writes_calls(loaded: Any) -> None:
    for style, template in STYLES.items():
        loaded.chat_template = template
        assert PromptEncoder(loaded).tool_format == ("hermes" if style == "none" else style)
    loaded.chat_template = {"default": SMOLLM, "tool_use": LLAMA3}
    assert PromptEncoder(loaded).tool_format == "llama3"
    for template in ("'[TOOL_CALLS]' + call.function.name", "'[TOOL_CALLS]' }}{{- tool_call['name']"):
        loaded.chat_template = f"{{{{ tools }}}} {{{{ {template} }}}}"
        assert PromptEncoder(loaded).tool_format == "mistral_named"


# How the templates of models spell calls, in their own words.
SPELT = {
    "Qwen2.5, Qwen3": ("hermes", r"""<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"""),
    "Hermes 2": ("hermes", """<tool_call>\n{"arguments": <args-dict>, "name": <function-name>}\n</tool_call>"""),
    "Hermes 3": (
        "hermes",
        r"""{{- '\n<tool_call>\n' }}
        {{- '{"name": "' + tool_call.name + '", "arguments": ' + tool_call.arguments|tojson + '}' }}""",
    ),
    "Hermes by its parts": (
        "hermes",
        r"""{{- '\n<tool_call>\n' }}
        {{- '{' }}{{- '"name": "' }}{{- tool_call.name }}""",
    ),
    "Qwen3-Coder": (
        "qwen3_coder",
        r"""<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>""",
    ),
    "Qwen3-Coder, by its code": ("qwen3_coder", r"""{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}"""),
    "Llama 3": (
        "llama3",
        """{{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}""",
    ),
    "Llama 3, in words": (
        "llama3",
        """'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'""",
    ),
    "Mistral 7B": ("mistral", """{{- "[TOOL_CALLS] [" }}{%- set out = tool_call.function|tojson %}"""),
    "Mistral Nemo": ("mistral", """{{- "[TOOL_CALLS][" }}{%- set out = tool_call.function|tojson %}"""),
    "Devstral Small 2": ("mistral_named", "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}"),
    "GLM 4.5": (
        None,
        r"""<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>
        {{- '\n<tool_call>' + tc.name }}{% set _args = tc.arguments %} "parameters": """,
    ),
    "Seed-OSS": (
        None,
        r"""<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>value_1""",
    ),
    "Command R7B": (
        None,
        """{"name": "{{ tool['function']['name'] }}", "description": "", "parameters": {{ tool }}
        {"tool_call_id": "{{ tool_idx.value }}", "tool_name": "{{ tc['function']['name'] }}", "parameters": """,
    ),
    "DeepSeek V3": (None, """'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']"""),
    "Kimi K2": (
        None,
        """<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments | tojson }}<|tool_call_end|>""",
    ),
    "MiniMax M1": (None, r"""<tool_calls>\n{"name": <tool-name>, "arguments": <args-json-object>}\n</tool_calls>"""),
    "MiniMax M2": (None, r"""<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">"""),
    "Phi-4-mini": (None, """<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>"""),
    "Functionary": (None, """<function=example_function_name>{example_parameters}</function>, "parameters": """),
    "Hunyuan": (None, r"""<tool_calls>\n<tool_call>' + name + '\n```json\n' + arguments"""),
    "Nemotron Nano 2": (None, """<TOOLCALL>[{"name": "tool_name1", "arguments": {"arg1": "val1"}}]</TOOLCALL>"""),
    "unknown": (None, "in an unknown form"),
}


@pytest.mark.parametrize("model", SPELT)
def test_a_template_whose_calls_are_of_no_known_form_gets_functions_as_text(loaded: Any, model: str) -> None:
    form, spelt = SPELT[model]
    loaded.chat_template = f"{{% if tools %}}{{{{ tools }}}}{{% raw %}}{spelt}{{% endraw %}}{{% endif %}}{SMOLLM}"
    assert PromptEncoder(loaded).tool_format == (form or "hermes")
    assert ("You may call functions." in decoded(loaded, chat("")[:1], described(""))) == (form is None)


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral", "mistral_named", "qwen3_coder"])
def test_functions_calls_and_results_are_what_the_template_makes_of_them(loaded: Any, style: str) -> None:
    loaded.chat_template = STYLES[style]
    messages, tools = chat("☂"), described("☂")
    expected = loaded.apply_chat_template(
        [each.fields for each in messages], tools=json.loads(tools), tokenize=False, add_generation_prompt=True
    )
    assert decoded(loaded, messages, tools) == expected
    key = "parameters" if style == "llama3" else "arguments"
    forms = {
        "mistral_named": 'weather[CALL_ID]a1b2c3d4e[ARGS]{"city ☂": "☂"}',
        "qwen3_coder": "<function=weather>\n<parameter=city ☂>\n☂\n</parameter>\n</function>",
    }
    assert forms.get(style, f'{{"name": "weather", "{key}": {{"city ☂": "☂"}}') in expected
    assert '"description": "☂"' in expected
    assert '"sun": "☂"' in expected.replace("\\", "")


def test_a_template_without_functions_gets_them_as_text(loaded: Any) -> None:
    loaded.chat_template = SMOLLM
    tools = described("☂")
    told = decoded(loaded, chat("☂"), tools)

    before = "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n<|im_start|>user\n"
    instructions, _, rest = told.removeprefix(before).partition("\n\n")
    assert instructions.startswith("You may call functions.")
    assert json.dumps(json.loads(tools)[0], ensure_ascii=False) in instructions
    assert rest == (
        "Sun? ☂<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city ☂": "☂"}}\n</tool_call>'
        "<|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"sun": "☂"}\n</tool_response>\nSo?<|im_end|>\n<|im_start|>assistant\n'
    )
    briefly = decoded(loaded, [Message("system", "Be brief."), *chat("☂")], tools)
    assert briefly == f"<|im_start|>system\nBe brief.\n\n{instructions}<|im_end|>\n<|im_start|>user\n{rest}"
    assert decoded(loaded, chat("☂"), "") == before + rest  # the calls of earlier turns are still shown
    spoken = Message("assistant", "Well.", "", json.dumps([{"function": {"name": "f", "arguments": {}}}]))
    shown = 'Well.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><'
    assert f"user\n{instructions}<|im_end|>\n<|im_start|>assistant\n{shown}" in decoded(loaded, [spoken], tools)


# As Gemma 2's and 3's, and Mistral's first.
STRICT = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- message.role + ': ' + message.content | trim + '\\n' }}{% endfor %}"""


def test_a_template_without_functions_may_refuse_messages_of_the_system(loaded: Any) -> None:
    loaded.chat_template = STRICT
    told = decoded(loaded, chat("☂")[:1], described("☂"))
    assert told.startswith("user: You may call functions.")
    assert told.endswith("</tool_call>\n\nSun? ☂\n")


def test_a_template_without_functions_may_refuse_two_users_in_a_row(loaded: Any) -> None:
    loaded.chat_template = STRICT
    call = json.loads(chat("☂")[1].tool_calls)[0]
    both = Message("assistant", "", "", json.dumps([call, call]))
    asked, _, *ends = chat("☂")
    results = [asked, both, Message("tool", "1"), Message("tool", "2")]
    responses = "".join(f"<tool_response>\n{each}\n</tool_response>\n" for each in "12")

    for tools in ("", described("☂")):
        assert decoded(loaded, results, tools).endswith(f"</tool_call>\nuser: {responses}")
        assert decoded(loaded, [*results, ends[-1]], tools).endswith(f"</tool_call>\nuser: {responses}So?\n")
        rounds = [*results, both, Message("tool", "1"), Message("tool", "2"), Message("assistant", "It is.")]
        assert decoded(loaded, rounds, tools).count(responses) == 2
    with pytest.raises(InvalidArgumentError, match="must alternate"):  # as without functions
        decoded(loaded, [asked, asked], described("☂"))


@pytest.mark.parametrize("arguments", ["not JSON", [1], None])
def test_arguments_that_a_template_needs_as_an_object_are_named(loaded: Any, arguments: Any) -> None:
    def with_arguments(value: Any) -> list[Message]:
        both: tuple[Any, ...] = ({}, value)
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": each}} for each in both]
        return [Message("user", "a"), Message("assistant", "", "", json.dumps(calls)), Message("user", "b")]

    loaded.chat_template = HERMES
    assert decoded(loaded, with_arguments(arguments), "")
    loaded.chat_template = QWEN3_CODER
    assert decoded(loaded, with_arguments({}), "")
    with pytest.raises(
        InvalidArgumentError, match=r"^messages\.1\.tool_calls\.1\.function\.arguments: expected a JSON"
    ):
        decoded(loaded, with_arguments(arguments), "")
    loaded.chat_template = QWEN3_CODER + "{{ raise_exception('one turn only') }}"
    with pytest.raises(InvalidArgumentError, match="refuses the messages: one turn only"):
        decoded(loaded, with_arguments({}), "")


def test_special_tokens_in_functions_calls_and_results_are_text(tokenizer: Any) -> None:
    """A description, an argument or a result cannot end its turn or speak for another role."""
    encoder = PromptEncoder(tokenizer)
    ids = tokenizer.convert_tokens_to_ids([*SPECIAL, tokenizer.eos_token])
    forged = "".join((*SPECIAL, tokenizer.eos_token))

    def special(text: str, **options: bool) -> list[int]:
        told = encoder.chat(chat(text), special_tokens=False, tools=described(text), **options)
        assert tokenizer.decode(told).count(text) == 7
        return [id_ for id_ in told if id_ in ids]

    assert special(forged) == special("plain")
    asked = encoder.chat(chat(forged), special_tokens=True, tools=described(forged))
    assert len([id_ for id_ in asked if id_ in ids]) == len(special("plain")) + 7 * len(ids)


def test_what_a_template_refuses_is_an_invalid_argument(loaded: Any) -> None:
    loaded.chat_template = MISTRAL
    encoder = PromptEncoder(loaded)
    with pytest.raises(InvalidArgumentError, match="length 9"):
        encoder.chat(chat("", "call_1"), special_tokens=False, tools=described(""))
    with pytest.raises(InvalidArgumentError, match="length 9"):
        encoder.chat([Message("tool", "3")], special_tokens=False)
    with pytest.raises(InvalidArgumentError, match="Only user and assistant"):
        encoder.chat([Message("system", "Hi")], special_tokens=False)
    loaded.chat_template = LLAMA3
    two = json.dumps(json.loads(chat("")[1].tool_calls) * 2)
    with pytest.raises(InvalidArgumentError, match="single tool-calls"):
        PromptEncoder(loaded).chat([Message("assistant", "", "", two)], special_tokens=False)


@pytest.mark.parametrize(
    "text",
    ["{", "{}", '"a"', "[1]", "[null]", f"[{'1' * 5000}]", "[" * 100_000, "null", f'[{{"a": {"[" * 600}{"]" * 600}}}]'],
)
def test_what_are_no_functions_or_calls_is_an_invalid_argument(tokenizer: Any, text: str) -> None:
    encoder = PromptEncoder(tokenizer)
    with pytest.raises(InvalidArgumentError):
        encoder.chat([Message("user", "Hi")], special_tokens=False, tools=text)
    with pytest.raises(InvalidArgumentError):
        encoder.chat([Message("assistant", "", "", text)], special_tokens=False)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"function": None},
        {"function": []},
        {"function": {"name": 5, "arguments": None}},
        {"name": "f"},
        {"function": "f"},
    ],
)
def test_a_call_of_another_form_is_text_or_an_invalid_argument(tokenizer: Any, call: Any) -> None:
    with suppress(InvalidArgumentError):
        decoded(tokenizer, [Message("user", "Hi"), Message("assistant", "", "", json.dumps([call])), *chat("")], "")


def test_the_last_message_may_go_on_behind_a_call(tokenizer: Any) -> None:
    messages = [*chat("☂")[:3], Message("assistant", "It is")]
    assert decoded(tokenizer, messages, described("☂"), continue_final_message=True).endswith("It is")
