"""What histories gain on agents' requests: `python benchmarks/agents.py --target-model TARGET --out FILE`.

The requests are made here, from a fixed seed: an agent that works on one small code base reads a file, edits it, runs
the tests and corrects its edit, five requests a task. Each request holds the conversation so far; the agent's earlier
answers in it are written here, and the answer that is measured is the target's own. Tasks return to the same files, so
what one task's answers repeat of another's is what a history can foretell and the session's own text cannot.

Each request is completed in three ways in turns: plain decoding, and the policy with and without a history. The ways
without have a principal of their own for each request. No prompt is cached, so that the prefills are alike.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dynatree.bench.environment import environment
from dynatree.bench.memory import PeakMemory
from dynatree.cli.serve import pair_settings
from dynatree.cli.service_pair import service_pair
from dynatree.client import Client, Completion

START_SECONDS = 600.0
PLAIN, SESSION, HISTORY = "plain", "n-grams of the session", "and of the history"
WAYS = (PLAIN, SESSION, HISTORY)
TURNS = 5  # requests of a task
FILES = 4
THINGS = ("basket", "invoice", "parcel", "ticket", "ledger", "voucher", "shelf", "route")
FIELDS = ("amount", "weight", "label", "owner", "status", "region", "price", "count")
TOOLS = """You are a coding agent. You answer with exactly one call of a tool, as JSON.
{"tool": "read_file", "path": "..."} returns the text of a file.
{"tool": "edit_file", "path": "...", "text": "..."} replaces the text of a file.
{"tool": "run_tests", "path": "..."} returns the outcome of the tests of a file."""


@dataclass(frozen=True)
class CodeFile:
    """A file of the agent's code base: one class with a method for each field."""

    thing: str
    fields: tuple[str, ...]

    @property
    def path(self) -> str:
        """Where the file is."""
        return f"shop/{self.thing}.py"

    def text(self, renamed: str = "", name: str = "", check: str = "") -> str:
        """The file, with the field `renamed` under another name, and with a check of its values."""
        names = [name if field == renamed else field for field in self.fields]
        lines = [f"class {self.thing.title()}:", f"    def __init__(self, {', '.join(names)}):"]
        lines += [f"        self._{field} = {field}" for field in names]
        for field in names:
            lines += ["", f"    def get_{field}(self):", f"        return self._{field}"]
            lines += ["", f"    def set_{field}(self, value):"]
            if check and field == name:
                lines += [f"        if {check}:", f'            raise ValueError("{field} is wrong")']
            lines += [f"        self._{field} = value"]
        return "\n".join(lines) + "\n"


def requests(count: int) -> Iterator[list[dict[str, str]]]:
    """Yield the messages of each request."""
    rnd = random.Random(41)
    files = [CodeFile(thing, tuple(rnd.sample(FIELDS, 4))) for thing in rnd.sample(THINGS, FILES)]
    for number in range(-(-count // TURNS)):
        file = files[number % FILES]
        renamed = rnd.choice(file.fields)
        name = f"{rnd.choice(('net', 'gross', 'last', 'first'))}_{renamed}"
        check = rnd.choice(("value is None", "not value", "value == 0"))
        edit = {"tool": "edit_file", "path": file.path}
        failure = f"FAILED: set_{name} accepts a value for which `{check}` is true; expected ValueError"
        steps = [
            ("user", f"Rename {renamed} of {file.thing.title()} to {name}, in all methods, and run the tests."),
            ("assistant", json.dumps({"tool": "read_file", "path": file.path})),
            ("user", f"The file {file.path}:\n{file.text()}"),
            ("assistant", json.dumps({**edit, "text": file.text(renamed, name)})),
            ("user", "The file was written."),
            ("assistant", json.dumps({"tool": "run_tests", "path": file.path})),
            ("user", failure),
            ("assistant", json.dumps({**edit, "text": file.text(renamed, name, check)})),
            ("user", "The file was written."),
        ]
        for turn in range(min(TURNS, count - number * TURNS)):
            messages = [("system", TOOLS), *steps[: 2 * turn + 1]]
            yield [{"role": role, "content": content} for role, content in messages]


def complete(
    client: Client, messages: list[dict[str, str]], way: str, options: argparse.Namespace, *, chat: bool
) -> Completion:
    """Complete one request; a target without a chat template gets the messages as a text."""
    prompt = messages if chat else "\n".join(f"{each['role']}: {each['content']}" for each in messages) + "\nassistant:"
    policy = "autoregressive" if way == PLAIN else options.policy
    return client.generate(prompt, max_new_tokens=options.max_new_tokens, policy=policy, ignore_eos=options.ignore_eos)


def figures(completion: Completion) -> dict[str, float]:
    """A completion's figures; the rate is of the tokens after the first, so without the prefill."""
    stats = completion.stats
    return {
        "tokens": stats.generated_tokens,
        "rounds": stats.rounds,
        "tokens_per_round": stats.tokens_per_round,
        "seconds": stats.total_seconds - stats.time_to_first_token_seconds,
        "prefill_seconds": stats.time_to_first_token_seconds,
    }


def main() -> int:
    """Measure, write the report and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model", default="embedded")
    parser.add_argument("--draft-model", default="none")
    parser.add_argument("--policy", default="throughput")
    parser.add_argument("--requests", type=int, default=40, help="number of requests (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--ignore-eos", action="store_true", help="complete --max-new-tokens in any case")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = pair_settings(options.target_model, options.draft_model, prefix_cache="off", max_sessions=2)
    runs = []
    with service_pair(*settings, START_SECONDS) as pair, Client(pair.address, principal="agent") as agent:
        chat = agent.model_info().chat_template
        memory = PeakMemory({"draft": pair.draft_process})
        for number, messages in enumerate(requests(options.requests)):
            run, texts = {}, set()
            for turn in range(len(WAYS)):
                way = WAYS[(number + turn) % len(WAYS)]
                with Client(pair.address, principal=f"{way}-{number}") as fresh:
                    client = agent if way == HISTORY else fresh
                    completion = complete(client, messages, way, options, chat=chat)
                run[way] = figures(completion)
                texts.add(completion.token_ids)
            if len(texts) > 1:
                raise SystemExit(f"the tokens of request {number} differ")
            runs.append(run)
        peak = memory.read()
    report = {
        **vars(environment(threads=None, read_bandwidth=None)),
        "target": Path(options.target_model).name,
        "draft": Path(options.draft_model).name,
        "policy": options.policy,
        "max_new_tokens": options.max_new_tokens,
        "memory": peak,
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'':24}{'tokens a round':>16}{'tokens a second':>17}{'x plain':>9}{'median':>8}")
    for way in WAYS:
        tokens, rounds, seconds = (sum(run[way][each] for run in runs) for each in ("tokens", "rounds", "seconds"))
        count = len(runs)
        plain = sum(run[PLAIN]["seconds"] for run in runs)
        ratios = [run[PLAIN]["seconds"] / run[way]["seconds"] for run in runs if run[way]["seconds"]]
        print(
            f"{way:24}{(tokens - count) / max(rounds, 1):16.2f}{(tokens - count) / seconds:17.1f}"
            f"{plain / seconds:9.2f}{median(ratios):8.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
