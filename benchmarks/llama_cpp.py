"""Beside llama.cpp: its plain and draft decoding and ours, in turns, on the same checkpoints, prompts and machine.

    python benchmarks/llama_cpp.py --target-model T --draft-model D --prompts A.txt --prompts B.txt --out FILE.jsonl

llama.cpp comes in the sources of PyPI's `llama-cpp-python`. They are downloaded and built once, for this machine, in
`--work`; that takes cmake, ninja, a C++ compiler and a quarter of an hour on two cores. Both checkpoints are converted
to GGUF with llama.cpp's own converter, in their own 16 bits.

All servers are loaded before the first prompt. Each prompt is completed by one after the other, and each prompt begins
with another one; the others rest. The seconds are those of the whole request: the prompt's forward and all new tokens.
A line of the output is one completion, or at last the summary.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dynatree.bench.prompts import Selection, load_tokenizer, read_prompts
from dynatree.cli.service_pair import service_pair
from dynatree.common.version import version

VERSION = "0.3.36"  # of llama-cpp-python
DRAFTED = (3, 5, 8)  # tokens that llama.cpp drafts at a time
FIRST_PORT = 18080
START_SECONDS = 600.0

# Their converter knows tokenizers by a hash; the grown pair's is GPT-2's kind. It also reads rotary_pct, which
# transformers 5 has renamed.
CONVERT = """
import runpy, sys
from conversion import base

def load_hparams(*arguments, _load=base.ModelBase.load_hparams):
    values = _load(*arguments)
    values.setdefault("rotary_pct", (values.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0))
    return values

base.ModelBase.load_hparams = staticmethod(load_hparams)
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Complete = Callable[[Sequence[int], int], list[int]]


def main() -> None:
    """Build, convert, start all servers, measure."""
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    server, source = build(options.work)
    target, draft = (convert(source, options.work, model) for model in (options.target_model, options.draft_model))
    encode = load_tokenizer(options.target_model).encode
    selection = Selection(options.count, options.prompt_tokens)
    prompts = [
        (path.stem, token_ids)
        for path in options.prompts
        for token_ids in read_prompts(path, selection, encode).token_ids
    ]
    with ExitStack() as stack:
        command = [str(server), "-m", str(target), "-c", "1024", "-np", "1", "-t", str(options.threads), "--no-ui"]
        drafting = ["-md", str(draft), "--spec-type", "draft-simple", "-td", str(options.threads), "--spec-draft-n-max"]
        methods = {"llama.cpp plain": stack.enter_context(llama_server(command, FIRST_PORT))}
        for number, drafted in enumerate(DRAFTED, start=1):
            arguments = [*command, *drafting, str(drafted)]
            methods[f"llama.cpp draft {drafted}"] = stack.enter_context(llama_server(arguments, FIRST_PORT + number))
        pair = stack.enter_context(
            service_pair(options.target_model, options.draft_model, ["--threads", str(options.threads)])
        )

        def ours(policy: str | None) -> Complete:
            def complete(token_ids: Sequence[int], count: int) -> list[int]:
                completion = pair.client.generate(token_ids, max_new_tokens=count, ignore_eos=True, policy=policy)
                return list(completion.token_ids)

            return complete

        methods |= {"DynaTree plain": ours("autoregressive"), "DynaTree default": ours(None)}
        with options.out.open("w") as out:
            summarize(measure(methods, prompts, options.max_new_tokens, out), methods, out)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-model", required=True, metavar="FOLDER")
    parser.add_argument("--draft-model", required=True, metavar="FOLDER")
    parser.add_argument("--prompts", required=True, action="append", type=Path, metavar="FILE", help="may be repeated")
    parser.add_argument("--count", type=int, default=3, help="prompts of each file (default: 3)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=Path("build/llama.cpp"), help="default: build/llama.cpp")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    return parser.parse_args()


def build(work: Path) -> tuple[Path, Path]:
    """llama.cpp's server, built for this machine, and its sources."""
    source = work / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if not source.exists():
        package = f"llama-cpp-python=={VERSION}"
        download = ["-m", "pip", "download", "--no-binary", ":all:", "--no-deps", "--no-build-isolation"]
        run([sys.executable, *download, "-d", str(work), package])
        with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
    server = work / "build" / "bin" / "llama-server"
    if not server.exists():
        missing = [tool for tool in ("cmake", "ninja", "c++") if shutil.which(tool) is None]
        if missing:
            raise SystemExit(f"building llama.cpp needs {', '.join(missing)}")
        off = ["LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI"]
        settings = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in off)]
        run(["cmake", "-S", str(source), "-B", str(work / "build"), "-G", "Ninja", *settings])
        run(["ninja", "-C", str(work / "build"), "llama-server"])
    return server, source


def convert(source: Path, work: Path, model: str) -> Path:
    """A checkpoint as GGUF, in its own dtype."""
    output = work / f"{Path(model).name}.gguf"
    if output.exists():
        return output
    python = os.environ | {"PYTHONPATH": f"{source}:{source / 'gguf-py'}"}
    arguments = [str(source / "convert_hf_to_gguf.py"), model, "--outfile", str(output), "--outtype", "auto"]
    subprocess.run([sys.executable, "-c", CONVERT, *arguments], env=python, check=True)
    return output


def run(command: Sequence[str]) -> None:
    """A command that must succeed; its output is shown."""
    subprocess.run(command, check=True)


@contextmanager
def llama_server(command: Sequence[str], port: int) -> Iterator[Complete]:
    """A server of llama.cpp; greedy completions by it, each without what it remembers of others."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def complete(token_ids: Sequence[int], count: int) -> list[int]:
        body = {
            "prompt": list(token_ids),
            "n_predict": count,
            "temperature": 0.0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        return list(ask(f"{url}/completion", body)["tokens"])

    try:
        deadline = time.monotonic() + START_SECONDS
        while not serves(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"llama-server did not start: {' '.join(command)}")
            time.sleep(0.5)
        yield complete
    finally:
        process.terminate()
        process.wait(timeout=30)


def serves(url: str) -> bool:
    """Whether a server of llama.cpp has loaded its models."""
    try:
        return bool(ask(f"{url}/health")["status"] == "ok")
    except (urllib.error.URLError, ConnectionError):
        return False


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What an HTTP server answers, as JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def measure(
    methods: dict[str, Complete], prompts: Sequence[tuple[str, tuple[int, ...]]], count: int, out: Any
) -> dict[str, list[float]]:
    """Tokens a second of every method, prompt by prompt."""
    for complete in methods.values():  # nobody's first request is measured
        complete(prompts[0][1][:16], 8)
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for index, (text, token_ids) in enumerate(prompts):
        turn = index % len(methods)
        outputs = {}
        for name in [*methods][turn:] + [*methods][:turn]:
            started = time.perf_counter()
            outputs[name] = methods[name](token_ids, count)
            seconds = time.perf_counter() - started
            rates[name].append(len(outputs[name]) / seconds)
            record = {"text": text, "prompt": index, "method": name, "tokens": len(outputs[name]), "seconds": seconds}
            plain = outputs.get(f"{name.split()[0]} plain")
            if plain is not None:
                record["same_as_plain"] = plain == outputs[name]
            print(json.dumps(record), file=out, flush=True)
            print(f"{text} {index}: {name}: {rates[name][-1]:.2f} tokens/s", flush=True)
    return rates


def summarize(rates: dict[str, list[float]], methods: dict[str, Complete], out: Any) -> None:
    """Medians of the rates, and of the ratios on the same prompt."""
    medians = {name: statistics.median(rates[name]) for name in methods}
    best = max((name for name in methods if name.startswith("llama.cpp draft")), key=medians.__getitem__)

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))

    summary = {
        "version": version(),
        "llama_cpp_python": VERSION,
        "cpu": cpu(),
        "tokens_per_second": medians,
        "plain_over_plain": ratio("DynaTree plain", "llama.cpp plain"),
        "best_draft": best,
        "default_over_best_draft": ratio("DynaTree default", best),
    }
    print(json.dumps(summary), file=out)
    print(json.dumps(summary, indent=1))


def cpu() -> str:
    """The processor's name and cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
