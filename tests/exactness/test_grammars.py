"""Completions under a grammar through both services: valid, and the tokens of masked plain decoding."""

import json
import random
from itertools import cycle

import jsonschema_rs
import pytest

from dynatree.client import Client
from dynatree.draft.policies import policy_names
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

pytestmark = pytest.mark.early
PLAIN = "autoregressive"


def an_object(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TOWN = an_object(name={"enum": ["Oslo", "Rome", "Łódź"]}, size={"type": "integer", "minimum": 3, "maximum": 250})
DEEP = an_object(a=an_object(b=an_object(c=an_object(d=an_object(e={"type": "boolean"})))))
LIST = {"type": "array", "items": {"enum": [1, "two", None, True]}, "minItems": 2, "maxItems": 4}
TREE = {
    "$defs": {
        "node": an_object(
            on={"type": "boolean"}, to={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
        )
    },
    "$ref": "#/$defs/node",
}
CHOICE = {"anyOf": [TOWN, {"type": "string", "pattern": "^[a-f]{2,6}$"}, {"type": "null"}]}
KEYS = an_object(**{"größe": {"type": "number", "multipleOf": 1, "minimum": -9, "maximum": 9}, "雨": {"const": "☂ ok"}})
SCHEMAS = (TOWN, DEEP, LIST, TREE, CHOICE, KEYS)

REGEX, LARK = r"(yes|no|[A-Z]{3}-[0-9]{2,4})", 'start: "if " NAME " then " ("go" | "stop")\nNAME: /[a-z]{1,8}/'
GRAMMARS = ({"json_schema": schema} for schema in SCHEMAS)
GRAMMARS = (*GRAMMARS, {"regex": REGEX}, {"grammar": LARK})
SAMPLINGS = ({}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 6})
PENALISED = {
    "temperature": 0.7,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logit_bias": {7: 1000.0},
    "seed": 7,
}
TOKENS = 60


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammars")
    target = save_random_model(folder / "target", "gpt_neox", 1)
    draft = save_noisy_copy(folder / "draft", target, 2, noise=0.03)
    with (
        running_services(folder, target, draft, dtype="float32", sessions=8) as services,
        Client(services.draft_address) as client,
    ):
        yield client, target, services


def cases(count):
    """Prompts with a grammar and sampling options."""
    chooser = random.Random(3)
    samplings = cycle((*SAMPLINGS, PENALISED))
    for grammar in [*GRAMMARS][:count]:
        yield {"prompt": chooser.choices(range(2, 2048), k=chooser.randint(1, 20)), **grammar, **next(samplings)}


def is_valid(completion, case):
    """Whether a text that ended is one that the grammar accepts."""
    assert completion.finish_reason == "stop"
    if "json_schema" in case:
        jsonschema_rs.validate(case["json_schema"], json.loads(completion.text))
    return True


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != PLAIN])
def test_trees_change_no_token_under_a_grammar(pair, policy):
    client, _, _ = pair
    accepted = 0
    for case in cases(8):
        plain = client.generate(**case, max_new_tokens=TOKENS, policy=PLAIN)
        tree = client.generate(**case, max_new_tokens=TOKENS, policy=policy)
        assert tree.token_ids == plain.token_ids, case
        assert tree.text == plain.text
        assert tree.finish_reason == "length" or is_valid(tree, case)
        accepted += tree.stats.draft_n_accepted
    assert accepted > 0
