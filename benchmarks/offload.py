"""A target that does not fit the memory: `python benchmarks/offload.py --model FOLDER --draft FOLDER --out FILE`.

A verify service that streams the model's layers runs in a control group with a limit on its memory, so that the page
cache cannot hold the model either. Beside it runs a draft service without a limit. The same prompts are completed by
plain decoding and by policies; trees of one size after another show where arithmetic takes longer than the disk.
accelerate's disk offload decodes in a group of the same size afterwards. fio reads the layer cache before and after.
Needs root, fio, a memory controller of control groups (version 1), and the disk's room for the weights once more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dynatree.bench.environment import environment
from dynatree.client import Client
from dynatree.serving import healthcheck

GROUPS = Path("/sys/fs/cgroup/memory")
START_SECONDS = 1800.0
HERE = Path(__file__).parent
POLICIES = {
    "plain": ("autoregressive", {}),
    "dynatree": ("dynatree", {}),
    "dyspec:max_nodes=64": ("dyspec", {"max_nodes": 64}),
    "dyspec:max_nodes=256": ("dyspec", {"max_nodes": 256}),
    "default": ("throughput", {}),
}
ROWS_TOKENS = 12  # of a completion with trees of one size
OFFLOADED = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": sys.argv[2]}, offload_folder=sys.argv[3]
)
prompt = torch.tensor([json.loads(sys.argv[4])])
times = []
for _ in range(int(sys.argv[5])):
    began = time.perf_counter()
    with torch.inference_mode():
        model(prompt[:, :1] if times else prompt, use_cache=False, logits_to_keep=1)
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""


@contextmanager
def group(name: str, limit: int) -> Iterator[Path]:
    """A control group whose processes have so many bytes of memory, page cache included."""
    folder = GROUPS / name
    folder.mkdir(exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(str(limit))
    try:
        yield folder
    finally:
        for _ in range(100):
            if not (folder / "cgroup.procs").read_text().strip():
                break
            time.sleep(0.1)
        folder.rmdir()


def joined(folder: Path | None) -> dict[str, Any]:
    """What has a child join a group before it runs."""
    if folder is None:
        return {}
    return {"preexec_fn": lambda: (folder / "cgroup.procs").write_text(str(os.getpid()))}


@contextmanager
def service(arguments: list[str], address: str, log: Path, folder: Path | None = None) -> Iterator[int]:
    """A `dynatree` process that serves; its id."""
    command = [sys.executable, "-m", "dynatree.cli.main", *arguments, "--listen", address]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, **joined(folder))
    try:
        deadline = time.monotonic() + START_SECONDS
        while healthcheck.failure(address, timeout=1.0) is not None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text())
            time.sleep(0.5)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def read_bytes(process: int) -> int:
    """What a process has read from disks."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def prompts(count: int, size: int) -> list[list[int]]:
    """The first tokens of the recorded books: eight texts of one length."""
    texts = np.load(HERE / "replay" / "books.npz", allow_pickle=False)["token_ids"].reshape(8, -1)
    return [text[:size].tolist() for text in texts[:count]]


def disk(cache: Path) -> float:
    """Bytes a second that fio reads the layers' files at, past the page cache, each after the one before."""
    files = ":".join(map(str, sorted(cache.glob("*/layer-*.bin"))))
    command = ["fio", "--name=layers", f"--filename={files}", "--file_service_type=sequential", "--readonly"]
    command += ["--rw=read", "--bs=8M", "--direct=1", "--ioengine=io_uring", "--iodepth=4", "--fixedbufs=1"]
    command += [f"--size={sum(each.stat().st_size for each in cache.glob('*/layer-*.bin'))}", "--output-format=json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def completed(
    client: Client, process: int, prompt: list[int], tokens: int, name: str
) -> tuple[dict[str, Any], list[int]]:
    """One completion: what it took, and its tokens."""
    policy, settings = POLICIES[name] if name in POLICIES else ("dyspec", {"max_nodes": int(name)})
    before = read_bytes(process)
    result = client.generate(prompt, max_new_tokens=tokens, ignore_eos=True, policy=policy, policy_settings=settings)
    stats = result.stats
    run = {
        "policy": name,
        "tokens": stats.generated_tokens,
        "first token, s": stats.time_to_first_token_seconds,
        "tokens/s": 1 / stats.time_per_output_token_seconds,
        "rounds": stats.rounds,
        "tokens a round": stats.tokens_per_round,
        "nodes a round": stats.nodes_per_round,
        "round, s": (stats.total_seconds - stats.time_to_first_token_seconds) / stats.rounds,
        "bytes read a forward": (read_bytes(process) - before) / (stats.rounds + 1),
    }
    print(run, flush=True)
    return run, list(result.token_ids)


def main() -> int:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--layer-cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--memory", type=float, default=8.0, help="memory limit of the services in GiB (default: %(default)g)"
    )
    parser.add_argument("--resident-layers", default="auto")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--plain-tokens",
        type=int,
        default=64,
        help="new tokens of plain decoding, whose steps are all alike (default: %(default)s)",
    )
    parser.add_argument("--offloaded-steps", type=int, default=3)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 15, 31, 63, 95, 127, 191, 255, 383, 511])
    options = parser.parse_args()
    limit = int(options.memory * 2**30)
    report: dict[str, Any] = {**vars(environment(None, None)), "options": {k: str(v) for k, v in vars(options).items()}}
    given = prompts(options.prompts, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        verify, draft = f"unix:{here}/verify.sock", f"unix:{here}/draft.sock"
        arguments = ["verify", "--target-model", str(options.model), "--layer-cache", str(options.layer_cache)]
        arguments += ["--resident-layers", options.resident_layers, "--max-context", "1024", "--max-sessions", "1"]
        arguments += ["--max-tree-nodes", "512"]
        drafting = ["draft", "--draft-model", str(options.draft), "--verify", verify, "--max-tree-nodes", "512"]
        with (
            group("dynatree-offload", limit) as capped,
            service(arguments, verify, here / "verify.log", capped) as process,
            service(drafting, draft, here / "draft.log"),
            Client(draft) as client,
        ):
            report["disk before, bytes/s"] = disk(options.layer_cache)
            report["streamed bytes"] = client.model_info().target.streamed_bytes
            report["runs"] = []
            for prompt in given:
                found = {}
                for name in POLICIES:
                    tokens = options.plain_tokens if name == "plain" else options.new_tokens
                    run, found[name] = completed(client, process, prompt, tokens, name)
                    report["runs"].append(run)
                whole = found["default"]
                for run in report["runs"][-len(POLICIES) :]:
                    run["tokens equal the default's"] = found[run["policy"]] == whole[: run["tokens"]]
            report["rows"] = [
                completed(client, process, given[0][:16], ROWS_TOKENS, str(nodes))[0] for nodes in options.nodes
            ]
            report["peak of the group, bytes"] = int((capped / "memory.max_usage_in_bytes").read_text())
            report["verify log"] = (here / "verify.log").read_text().splitlines()[-8:]
        if options.offloaded_steps:
            with group("dynatree-offloaded", limit) as capped:
                command = [sys.executable, "-c", OFFLOADED, str(options.model), f"{options.memory - 3:.0f}GiB", folder]
                command += [json.dumps(given[0]), str(options.offloaded_steps)]
                done = subprocess.run(command, capture_output=True, text=True, **joined(capped))
                report["accelerate, s a step"] = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-800:]
                print("accelerate", report["accelerate, s a step"])
    report["disk after, bytes/s"] = disk(options.layer_cache)
    options.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
