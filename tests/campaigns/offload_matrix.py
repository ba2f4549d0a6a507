"""Compare tokens with none, half and all layers in memory: `python -m tests.campaigns.offload_matrix`.

The campaign runs real services with both dtypes and all policies. The tokens must equal those of plain decoding with
all layers in memory. All prompts are completed at once, so that they share each sweep over the offloaded layers. The
peak memory of each verify service is printed beside the bytes of weights that a step reads. The campaign takes about
half an hour for a target of 2.8B parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dynatree.bench.environment import environment
from dynatree.client import Client
from dynatree.draft.policies import policy_names
from tests.support.paths import BENCHMARKS
from tests.support.processes import service

BOOKS = BENCHMARKS / "replay" / "books.npz"
PLAIN = "autoregressive"
START_SECONDS = 900.0


def prompts(count: int, size: int) -> list[list[int]]:
    """`count` pieces of `size` tokens from the recorded books."""
    tokens = np.load(BOOKS, allow_pickle=False)["token_ids"].reshape(-1)
    step = len(tokens) // count
    return [tokens[each * step : each * step + size].tolist() for each in range(count)]


def completions(client: Client, given: Sequence[list[int]], policy: str, tokens: int) -> list[list[int]]:
    """Complete all prompts at once; return the new tokens of each."""

    def complete(prompt: list[int]) -> list[int]:
        return list(client.generate(prompt, policy=policy, max_new_tokens=tokens, ignore_eos=True).token_ids)

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(complete, given))


def peak_bytes(process: int) -> int:
    """Peak resident memory of a process, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> int:
    """Run the campaign; return 1 if any completion has other tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with the bundled tokenizer")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--layer-cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results as JSON")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=6)
    parser.add_argument("--tree-nodes", type=int, default=12, help="nodes of the largest tree (default: %(default)s)")
    options = parser.parse_args()
    layers = json.loads((options.model / "config.json").read_text())["num_hidden_layers"]
    given = prompts(options.prompts, options.prompt_tokens)
    limits = ["--max-sessions", str(options.prompts), "--max-tree-nodes", str(options.tree_nodes)]
    drafting = ["draft", "--draft-model", options.draft, *limits]
    runs = []
    for dtype in options.dtypes:
        expected = None
        for resident in (layers, layers // 2, 0):
            verifying = ["verify", "--target-model", str(options.model), "--dtype", dtype, *limits]
            verifying += ["--resident-layers", str(resident), "--layer-cache", str(options.layer_cache)]
            verifying += ["--max-context", "128"]
            with (
                tempfile.TemporaryDirectory() as name,
                service(Path(name), "verify", *verifying, seconds=START_SECONDS) as (verify, process, _),
                service(Path(name), "draft", *drafting, "--verify", verify) as (address, *_),
                Client(address) as client,
            ):
                target = client.model_info().target
                run = {"dtype": dtype, "resident layers": resident, "streamed bytes": target.streamed_bytes}
                began = time.monotonic()
                plain = completions(client, given, PLAIN, options.new_tokens)
                expected = expected or plain
                run["differing"] = {PLAIN: differing(plain, expected)}
                for policy in policy_names():
                    if policy != PLAIN:
                        found = completions(client, given, policy, options.new_tokens)
                        run["differing"][policy] = differing(found, expected)
                run["seconds"] = round(time.monotonic() - began, 1)
                run["peak, bytes"] = peak_bytes(process.pid)
                run["weights, bytes"] = target.step_bytes
            print(json.dumps(run), flush=True)
            runs.append(run)
    if options.out:
        report = {**vars(environment(threads=None, read_bandwidth=None)), "prompts": len(given), "runs": runs}
        options.out.write_text(json.dumps(report) + "\n")
    wrong = sum(sum(run["differing"].values()) for run in runs)
    completed = len(runs) * len(given) * len(policy_names())
    print(f"{completed} completions, {wrong} with other tokens")
    return int(wrong > 0)


def differing(found: Sequence[list[int]], expected: Sequence[list[int]]) -> int:
    """Number of completions that differ from the expected ones."""
    return sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))


if __name__ == "__main__":
    sys.exit(main())
