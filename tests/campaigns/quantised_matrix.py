"""Compare tokens of quantised targets with plain decoding: `python -m tests.campaigns.quantised_matrix --out FILE`.

Every kind of weights runs behind real services in this process: all policies, greedy and seeded, one session alone and
eight beside each other. The models are small and random, unless `--target` and `--draft` name others.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dynatree.bench.environment import environment
from dynatree.client import Client
from dynatree.draft.policies import policy_names
from tests.support.gguf_files import save_gguf
from tests.support.model_zoo import VOCAB_SIZE, save_noisy_copy, save_random_model
from tests.support.services import running_services

PLAIN = "autoregressive"
ROUNDED = ("int8", "int4")
KINDS = (*ROUNDED, "Q8_0", "Q4_K")
SESSIONS = 8
SAMPLINGS: Mapping[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 5}}


def pair(folder: Path, kind: str) -> tuple[Path, Path]:
    """Save a small target and draft of one kind of weights."""
    if kind not in ROUNDED:
        target = save_gguf(folder / "target.gguf", (kind,), seed=1)
        return target, target
    target = save_random_model(folder / "target", "llama", seed=1)
    return target, save_noisy_copy(folder / "draft", target, seed=2)


def completions(
    client: Client, prompts: Sequence[list[int]], sessions: int, **options: Any
) -> tuple[list[Sequence[int]], int]:
    """Complete all prompts, `sessions` at a time; return the tokens of each, and the sum of accepted nodes."""
    with ThreadPoolExecutor(sessions) as pool:
        done = list(pool.map(lambda prompt: client.generate(prompt, ignore_eos=True, **options), prompts))
    return [each.token_ids for each in done], sum(each.stats.draft_n_accepted for each in done)


def runs(client: Client, prompts: Sequence[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Compare every policy with plain decoding in one session."""
    found = []
    for sampling, options in SAMPLINGS.items():
        plain, _ = completions(client, prompts, 1, max_new_tokens=tokens, policy=PLAIN, **options)
        for policy in policy_names():
            for sessions in (1, SESSIONS):
                ours, accepted = completions(client, prompts, sessions, max_new_tokens=tokens, policy=policy, **options)
                wrong = sum(one != other for one, other in zip(ours, plain, strict=True))
                run = {"policy": policy, "sampling": sampling, "sessions": sessions}
                found.append({**run, "completions": len(ours), "differing": wrong, "accepted": accepted})
    return found


def main() -> int:
    """Run the campaign; return 1 if any completion has other tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, metavar="PATH", help="target; --kinds then says int8, int4 or auto")
    parser.add_argument("--draft", type=Path, metavar="PATH", help="draft of --target")
    parser.add_argument("--kinds", nargs="*", default=KINDS, help="kinds of weights (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results as JSON")
    options = parser.parse_args()
    chooser = random.Random(0)
    prompts = [chooser.choices(range(2, VOCAB_SIZE), k=chooser.randrange(1, 60)) for _ in range(options.prompts)]
    results = []
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as name:
            models = (options.target, options.draft or options.target) if options.target else pair(Path(name), kind)
            weights = kind if kind in ROUNDED else "auto"
            with (
                running_services(
                    Path(name), *models, dtype=options.dtype, weights=weights, sessions=SESSIONS, draft_weights=weights
                ) as services,
                Client(services.draft_address) as client,
            ):
                began = time.monotonic()
                result = {"kind": kind, "target": models[0].name, "numerics": services.target.info.numerics}
                result["runs"] = runs(client, prompts, options.tokens)
                result["seconds"] = round(time.monotonic() - began, 1)
        wrong = sum(run["differing"] for run in result["runs"])
        told = f"{wrong} completions with other tokens, {result['seconds']} s"
        print(f"{kind} ({result['numerics']}): {told}", flush=True)
        results.append(result)
    if options.out:
        report = {**vars(environment(threads=None, read_bandwidth=None)), "prompts": len(prompts), "results": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    every = [run for result in results for run in result["runs"]]
    wrong = sum(run["differing"] for run in every)
    print(f"{sum(run['completions'] for run in every)} completions, {wrong} with other tokens")
    return int(wrong > 0 or not all(any(run["accepted"] for run in result["runs"]) for result in results))


if __name__ == "__main__":
    sys.exit(main())
