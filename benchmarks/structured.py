"""What a grammar costs and gains on calls of tools: `python benchmarks/structured.py --target-model TARGET --out FILE`.

The requests are made here, from a fixed seed: each asks for one call of one of three tools, whose arguments follow a
JSON schema. Each is completed in four ways in turns: plain decoding and the policy, free and under the grammar of the
call. Free completions have the length of the one under the grammar. No prompt is cached. Each way has another
principal, so that it does not draft from the tokens of the others. The masks of the same tokens are timed alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dynatree import embedded
from dynatree.bench.environment import environment
from dynatree.cli.serve import pair_settings
from dynatree.cli.service_pair import service_pair
from dynatree.client import Client, Completion
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.common.tree import ROOT, TokenTree
from dynatree.engine.grammar.compiler import GrammarCompiler
from dynatree.engine.model.tokenizer import load_tokenizer
from dynatree.verify.masked_logits import MaskedLogits
from dynatree.verify.node_states import NodeStates

START_SECONDS = 600.0
PLAIN = "autoregressive"
WAYS = ("plain, free", "policy, free", "plain, grammar", "policy, grammar")
CITIES = ("Oslo", "Rome", "Lagos", "Quito", "Osaka", "Turin", "Delhi", "Porto")


def string(most: int) -> dict[str, Any]:
    """A schema of a short text."""
    return {"type": "string", "minLength": 1, "maxLength": most}


def tool(name: str, **arguments: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call."""
    inner = {"type": "object", "properties": arguments, "required": [*arguments], "additionalProperties": False}
    properties = {"name": {"const": name}, "arguments": inner}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


TOOLS = {
    "get_weather_forecast": tool(
        "get_weather_forecast",
        city=string(20),
        days={"type": "integer", "minimum": 1, "maximum": 14},
        unit={"enum": ["celsius", "fahrenheit"]},
    ),
    "book_train_ticket": tool(
        "book_train_ticket",
        origin=string(20),
        destination=string(20),
        departure={"type": "string", "pattern": "^2026-[01][0-9]-[0-3][0-9]$"},
        passengers={"type": "integer", "minimum": 1, "maximum": 9},
        seat_class={"enum": ["first", "second"]},
    ),
    "send_message": tool(
        "send_message",
        recipient=string(24),
        subject=string(40),
        body=string(120),
        priority={"enum": ["low", "normal", "high"]},
    ),
}


def requests(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the prompt and the schema of each request."""
    chooser = random.Random(44)
    for _ in range(count):
        name = chooser.choice([*TOOLS])
        one, other = chooser.sample(CITIES, 2)
        wish = {
            "get_weather_forecast": f"What will the weather be in {one} over the next {chooser.randint(2, 9)} days?",
            "book_train_ticket": f"Book {chooser.randint(1, 4)} seats from {one} to {other} on the 3rd of May 2026.",
            "send_message": f"Tell Anna that the meeting in {one} moves to {other}, and that it is urgent.",
        }[name]
        yield f"Answer with one call of the tool {name} as JSON.\nUser: {wish}\nCall:", TOOLS[name]


def figures(completion: Completion) -> dict[str, float]:
    """A completion's figures; the rate is of the tokens after the first, so without the prefill."""
    stats = completion.stats
    return {
        "tokens": stats.generated_tokens,
        "rounds": stats.rounds,
        "seconds": stats.total_seconds - stats.time_to_first_token_seconds,
    }


def mask_seconds(compiler: GrammarCompiler, schema: dict[str, Any], token_ids: list[int], vocab_size: int) -> float:
    """Seconds of masking the rows of a path of these tokens, as a round does it."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    state = compiler.state(grammar)
    tree = TokenTree(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))
    logits = torch.zeros(1 + len(token_ids), vocab_size, dtype=torch.bfloat16)
    began = time.perf_counter()
    masked = MaskedLogits(logits, NodeStates(tree, state))
    for node in range(ROOT, len(token_ids) - 1):
        masked.after(node)
    return time.perf_counter() - began


def completed(
    address: str, number: int, prompt: str, schema: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Complete one request in every way; its figures by way, and the text and tokens under the grammar.

    Raises:
        SystemExit: A tree has changed the tokens.
    """
    run: dict[str, Any] = {}

    def complete(way: str, **asked: Any) -> Completion:
        policy = PLAIN if way.startswith("plain") else options.policy
        with Client(address, principal=way) as client:
            completion = client.generate(prompt, policy=policy, temperature=options.temperature, seed=number, **asked)
        run[way] = figures(completion)
        return completion

    plain, found = (complete(way, json_schema=schema, max_new_tokens=options.max_new_tokens) for way in WAYS[2:])
    length = len(plain.token_ids)
    free = [complete(way, max_new_tokens=length, ignore_eos=True).token_ids for way in WAYS[:2]]
    if plain.token_ids != found.token_ids or free[0] != free[1]:
        raise SystemExit(f"the tokens of request {number} differ")
    return {**run, "text": plain.text, "token_ids": list(plain.token_ids)}


def main() -> int:
    """Measure, write the report and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model", default="embedded")
    parser.add_argument("--draft-model", default="none")
    parser.add_argument("--policy", default="throughput")
    parser.add_argument("--requests", type=int, default=20, help="number of requests (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = pair_settings(options.target_model, options.draft_model, prefix_cache="off", max_sessions=2)
    runs = []
    with service_pair(*settings, START_SECONDS) as pair:
        with Client(pair.address) as client:
            vocab_size = client.model_info().target.vocab_size
            client.generate("a", json_schema={"const": 1}, max_new_tokens=4)  # both services read the vocabulary
        path = embedded.target_path() if options.target_model == "embedded" else options.target_model
        tokenizer = load_tokenizer(str(path))
        compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id])
        for number, (prompt, schema) in enumerate(requests(options.requests)):
            runs.append(completed(pair.address, number, prompt, schema, options))
    for (_, schema), run in zip(requests(options.requests), runs, strict=True):
        run["mask_seconds"] = mask_seconds(compiler, schema, run["token_ids"], vocab_size)
    report = {
        **vars(environment(threads=None, read_bandwidth=None)),
        "target": Path(options.target_model).name,
        "draft": Path(options.draft_model).name,
        "policy": options.policy,
        "temperature": options.temperature,
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(runs)
    return 0


def print_table(runs: list[dict[str, Any]]) -> None:
    """Print tokens a round and a second by way, and what masks cost."""
    print(f"{'':18}{'tokens a round':>16}{'tokens a second':>17}{'x plain':>9}{'median':>8}")
    for way in WAYS:
        tokens, rounds, seconds = (sum(run[way][each] for run in runs) for each in ("tokens", "rounds", "seconds"))
        base = f"plain, {way.partition(', ')[2]}"
        plain = sum(run[base]["seconds"] for run in runs)
        ratios = [run[base]["seconds"] / run[way]["seconds"] for run in runs if run[way]["seconds"]]
        print(
            f"{way:18}{(tokens - len(runs)) / max(rounds, 1):16.2f}{(tokens - len(runs)) / seconds:17.1f}"
            f"{plain / seconds:9.2f}{median(ratios):8.2f}"
        )
    masks, tokens = sum(run["mask_seconds"] for run in runs), sum(run[WAYS[2]]["tokens"] for run in runs)
    step = sum(run[WAYS[0]]["seconds"] for run in runs) / sum(run[WAYS[0]]["rounds"] for run in runs)
    print(f"masks: {1e3 * masks / tokens:.3f} ms a token, {100 * masks / tokens / step:.2f} % of a plain step")


if __name__ == "__main__":
    sys.exit(main())
