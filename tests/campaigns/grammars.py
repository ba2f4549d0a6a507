"""Completions under 60 JSON schemas with every policy, greedy and seeded: each that ended is valid, none differs.

    python -m tests.campaigns.grammars [--schemas N] [--target PATH --draft PATH] [--seed N]

The reference of a policy's tokens is plain decoding under the same schema. Without a target, the models are a random
one, and a noisy copy of it as its draft.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs

from dynatree.client import Client, Completion
from dynatree.draft.policies import policy_names, residual_policies
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

PLAIN = "autoregressive"
KEYS = ("id", "name", "größe", "雨", "a b", 'quo"te', "back\\slash", "_x9", "😀")
TOKENS = 90
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 11})


def schema(chooser: random.Random, depth: int = 5) -> dict[str, Any]:
    """Return a schema: objects, arrays, enums, bounded numbers, strings with patterns and lengths, anyOf and refs."""
    kinds = ["enum", "integer", "number", "pattern", "length", "boolean", "const", "format"]
    if depth:
        kinds += ["object", "object", "object", "array", "array", "any", "ref"]
    match chooser.choice(kinds):
        case "object":
            keys = chooser.sample(KEYS, chooser.randint(1, 3))
            required = keys[: chooser.randint(0, len(keys))]
            properties = {key: schema(chooser, depth - 1) for key in keys}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = chooser.randint(0, 2)
            items = schema(chooser, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + chooser.randint(0, 2)}
        case "any":
            return {"anyOf": [schema(chooser, depth - 1) for _ in range(chooser.randint(2, 3))]}
        case "ref":
            return {"type": "array", "items": {"$ref": f"#/$defs/d{chooser.randint(0, 2)}"}, "maxItems": 2}
        case "enum":
            return {
                "enum": chooser.sample([1, 2.5, "one", "two words", None, True, "łódź", "☂"], chooser.randint(2, 5))
            }
        case "integer":
            low = chooser.randint(-500, 500)
            return {"type": "integer", "minimum": low, "maximum": low + chooser.choice((1, 9, 1000))}
        case "number":
            return {"type": "number", "minimum": -10, "exclusiveMaximum": chooser.choice((0, 7.5)), "multipleOf": 0.5}
        case "pattern":
            return {
                "type": "string",
                "pattern": chooser.choice((r"^[a-c]{2,5}$", r"^[0-9]{3}-[A-Z]+x$", r"^(é|ü|☂){1,4}$")),
            }
        case "length":
            return {"type": "string", "minLength": chooser.randint(0, 3), "maxLength": chooser.randint(3, 9)}
        case "format":
            return {"type": "string", "format": chooser.choice(("date", "uuid", "ipv4"))}
        case "const":
            return {"const": chooser.choice(("a fixed text", 12, None, ["x", 1]))}
        case _:
            return {"type": "boolean"}


def cases(count: int, seed: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield prompts of token ids with schemas whose root is an object of several properties."""
    chooser = random.Random(seed)
    for _ in range(count):
        keys = chooser.sample(KEYS, chooser.randint(1, 4))
        properties = {key: schema(chooser) for key in keys}
        root = {"type": "object", "properties": properties, "required": keys, "additionalProperties": False}
        root["$defs"] = {f"d{number}": schema(chooser, 0) for number in range(3)}
        yield chooser.choices(range(20, 2000), k=chooser.randint(1, 12)), root


def is_valid(completion: Completion, root: dict[str, Any]) -> bool:
    """Whether a completion was cut off, or is valid JSON that follows the schema."""
    try:
        return completion.finish_reason == "length" or jsonschema_rs.is_valid(root, json.loads(completion.text))
    except ValueError:
        return False


def run(client: Client, count: int, seed: int) -> Counter[str]:
    """Run all cases, print what is wrong, and return the counts."""
    counts: Counter[str] = Counter()
    for place, (prompt, root) in enumerate(cases(count, seed)):
        for sampling in SAMPLINGS:
            asked = {"prompt": prompt, "json_schema": root, "max_new_tokens": TOKENS, **sampling}
            plain = client.generate(**asked, policy=PLAIN)
            for policy in (name for name in policy_names() if name != PLAIN):
                completion = client.generate(**asked, policy=policy)
                counts["completions"] += 1
                counts["ended"] += completion.finish_reason == "stop"
                counts["tokens"] += len(completion.token_ids)
                counts["rounds"] += completion.stats.rounds
                if completion.token_ids != plain.token_ids:
                    counts["different"] += 1
                    print("DIFFERENT", policy, sampling, place, json.dumps(root)[:300], flush=True)
                if not is_valid(completion, root):
                    counts["invalid"] += 1
                    print("INVALID", policy, place, completion.text[:300], json.dumps(root)[:300], flush=True)
            if sampling:
                for policy in residual_policies():
                    completion = client.generate(**asked, policy=policy, scheme="residual")
                    counts["residual"] += 1
                    counts["invalid"] += not is_valid(completion, root)
    return counts


def main() -> int:
    """Run the campaign; the exit status is 1 if a completion differs or is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = options.target or save_random_model(folder / "target", "gpt_neox", 1)
        draft = Path(options.draft) if options.draft else None
        if options.target is None:
            draft = save_noisy_copy(folder / "draft", target, 2, noise=0.03)
        began = time.perf_counter()
        with running_services(folder, target, draft) as services, Client(services.draft_address) as client:
            counts = run(client, options.schemas, options.seed)
    print(json.dumps({**counts, "seconds": round(time.perf_counter() - began)}))
    return 1 if counts["different"] or counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
