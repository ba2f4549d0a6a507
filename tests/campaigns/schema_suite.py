"""JSON Schema's own test suite under grammars: `python -m tests.campaigns.schema_suite [FOLDER] [--walks N] [--under]`.

Each schema of drafts 2020-12 and 7 is refused by name, or accepted. Under an accepted schema each valid instance should
be accepted, token by token, and no invalid one may be. Random walks through the tokens that a schema allows must give
valid texts. FOLDER holds `draft2020-12` and `draft7`; without it, pip downloads the sdist of jsonschema, which has
them. The campaign prints a table, the reasons of refusals, and every invalid text that was accepted; if there is one,
it exits with 1. `--under` lists the valid instances that were not accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
from transformers import AutoTokenizer

from dynatree import embedded
from dynatree.common.errors import InvalidArgumentError
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.engine.grammar.compiler import GrammarCompiler
from dynatree.engine.grammar.state import GrammarState
from dynatree.engine.model.vocabulary import special_ids, token_bytes
from tests.support.allowed import allowed_tokens

SDIST = "jsonschema==4.26.0"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
WALK = 120  # tokens


@dataclass
class Tally:
    """What happened to the schemas of one draft.

    Attributes:
        counts: Number of schemas and instances by outcome.
        reasons: Number of refused schemas by reason.
        wrong: Descriptions of invalid texts that were accepted.
        under: Descriptions of valid instances that were not.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    under: list[str] = field(default_factory=list)


class Suite:
    """Tries schemas with the embedded pair's tokenizer."""

    def __init__(self, walks: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(embedded.target_path())
        self._walks = walks
        self._end = tokenizer.eos_token_id
        self._bytes = token_bytes(tokenizer)
        special = {*special_ids(tokenizer), self._end}
        self._ids = {data: id_ for id_, data in enumerate(self._bytes) if data and id_ not in special}
        self._compiler = GrammarCompiler(tokenizer, [self._end])

    def run(self, folder: Path, draft: str) -> Tally:
        """Try all schemas of a draft."""
        tally = Tally()
        for path in sorted((folder / draft).rglob("*.json")):
            for case in json.loads(path.read_text()):
                schema = case["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": DRAFTS[draft], **schema}
                self._try(tally, f"{draft} {path.stem}: {case['description']}", schema, case["tests"])
        return tally

    def _try(self, tally: Tally, name: str, schema: Any, tests: list[dict[str, Any]]) -> None:
        try:
            state = self._compiler.state(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        except InvalidArgumentError as error:
            tally.counts["refused"] += 1
            tally.reasons[_reason(str(error))] += 1
            return
        tally.counts["accepted"] += 1
        for test in tests:
            for text in dict.fromkeys(json.dumps(test["data"], ensure_ascii=each) for each in (False, True)):
                accepted = self._accepts(state, text.encode())
                tally.counts[f"{'valid' if test['valid'] else 'invalid'} {'accepted' if accepted else 'not'}"] += 1
                if accepted != test["valid"]:
                    (tally.wrong if accepted else tally.under).append(f"{name}: {test['description']}: {text}")
        for seed in range(self._walks):
            self._walk(tally, name, schema, state, random.Random(seed))

    def _accepts(self, start: GrammarState, data: bytes) -> bool:
        """Whether the grammar allows tokens of a text and an end token after them; its state depends on the text."""
        states = {0: start}
        for place in range(len(data)):
            if place not in states:
                continue
            for end in range(place + 1, min(len(data), place + 16) + 1):
                token = self._ids.get(data[place:end])
                following = None if token is None or end in states else states[place].after(token)
                if following is not None:
                    states[end] = following
        return len(data) in states and states[len(data)].allows(self._end)

    def _walk(self, tally: Tally, name: str, schema: Any, state: GrammarState, choose: random.Random) -> None:
        """Check the text of random tokens, if they end."""
        data = b""
        for _ in range(WALK):
            following = allowed_tokens(state, len(self._bytes))
            if self._end in following and (len(following) == 1 or choose.random() < 0.3):
                break
            token = choose.choice([each for each in following if each != self._end])
            data += self._bytes[token]
            after = state.after(token)
            assert after is not None
            if after.error is not None:
                tally.reasons[f"in a walk: {_reason(str(after.error))}"] += 1
                return
            state = after
        else:
            tally.counts["walks that did not end"] += 1
            return
        tally.counts["walks"] += 1
        try:
            validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError):
            tally.counts["walks of schemas that jsonschema_rs refuses"] += 1
            return
        try:
            valid = validator.is_valid(json.loads(data, parse_float=_finite))
        except ValueError:
            valid = False
        if not valid:
            tally.wrong.append(f"{name}: a random walk: {data.decode(errors='replace')}")


def _finite(number: str) -> float:
    """A number of JSON; the validator takes no infinity, which Python makes of a large one."""
    return min(max(float(number), -sys.float_info.max), sys.float_info.max)


def _reason(error: str) -> str:
    """The kind of a refusal: its first line, without what is particular to one schema."""
    error = error.removeprefix("the JSON schema is refused: ").splitlines()[0]
    for pattern, kind in (
        (r"[$]ref: '.*' is in another document.*", "a reference to another document"),
        (r"Anchor '.*", "an anchor"),
    ):
        error = re.sub(pattern, kind, error)
    return re.sub(r"(/.*/ and /.*/|range: .*|got .*|: -?\d+$|number \S+,)", "...", error)[:90]


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema", SDIST]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (archive,) = folder.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return next(folder.glob("jsonschema-*/json/tests"))


def _tallies(folder: Path | None, walks: int) -> Iterator[tuple[str, Tally]]:
    with tempfile.TemporaryDirectory() as temporary:
        tests = folder or _downloaded(Path(temporary))
        suite = Suite(walks)
        for draft in DRAFTS:
            yield draft, suite.run(tests, draft)


def main() -> int:
    """Run the suite and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--walks", type=int, default=10, metavar="N", help="random walks through each schema")
    parser.add_argument("--under", action="store_true", help="list the valid instances that were not accepted")
    options = parser.parse_args()
    tallies = dict(_tallies(options.folder, options.walks))
    for draft, tally in tallies.items():
        print(f"{draft}: " + ", ".join(f"{count} {name}" for name, count in sorted(tally.counts.items())))
    print("refused:")
    reasons = sum((tally.reasons for tally in tallies.values()), Counter[str]())
    for reason, count in reasons.most_common():
        print(f"{count:5d}  {reason}")
    for tally in tallies.values() if options.under else ():
        print(*(f"not accepted: {each}" for each in tally.under), sep="\n")
    wrong = [each for tally in tallies.values() for each in tally.wrong]
    print(*(f"WRONG: {each}" for each in wrong), f"{len(wrong)} invalid texts accepted", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
