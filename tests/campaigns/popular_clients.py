"""Run popular clients of OpenAI's API, unmodified, against `dynatree serve`, and count requests and errors of each.

    python -m venv ENV && ENV/bin/pip install openai langchain-openai litellm 'lm-eval[api]' transformers guidellm
    (cd FOLDER && npm install openai zod)
    python -m tests.campaigns.popular_clients --env ENV --node FOLDER

It installs nothing. A client that no environment has is reported as not installed; `--env` may be repeated. The model
is the embedded pair with a chat template. Requests and errors are those that the gateway counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from dynatree import embedded

SCRIPTS = Path(__file__).parent / "popular"
MODEL = "embedded-chat"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SECONDS = 600.0  # time limit of one client
_COUNTED = re.compile(r'dynatree_gateway_requests_total\{code="(\d+)",route="([^"]+)"\} (\S+)')
_WATCHING = ("/health", "/metrics")


@dataclass(frozen=True)
class Run:
    """A client's name, the module that its environment must have, and its arguments for Python."""

    name: str
    module: str
    arguments: Sequence[str]


def runs(url: str, folder: Path) -> list[Run]:
    """The runs of the clients that are written in Python."""
    scripts = [
        ("openai (Python)", "openai", "openai_python.py"),
        ("langchain-openai", "langchain_openai", "langchain_client.py"),
        ("litellm", "litellm", "litellm_client.py"),
    ]
    tokenizer = folder / "target"
    found = [Run(name, module, [str(SCRIPTS / script)]) for name, module, script in scripts]
    for kind, path, task in (
        ("local-completions", "completions", "tiny_choice,tiny_text"),
        ("local-chat-completions", "chat/completions", "tiny_text"),
    ):
        settings = f"model={MODEL},base_url={url}/v1/{path},tokenizer={tokenizer},num_concurrent=2,max_retries=1"
        settings += ",tokenized_requests=False"
        arguments = ["-m", "lm_eval", "--model", kind, "--tasks", task, "--include_path", str(folder / "tasks")]
        chat = ["--apply_chat_template"] if "chat" in kind else []
        found.append(Run(f"lm-eval {kind}", "lm_eval", [*arguments, "--model_args", settings, *chat]))
    for kind in ("/v1/completions", "/v1/chat/completions"):
        backend = f"kind=openai_http,target={url},model={MODEL},request_format={kind}"
        arguments = ["-m", "guidellm", "run", "--backend", backend, "--tokenizer", f"kind=hf_auto,model={tokenizer}"]
        arguments += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"]
        arguments += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16,turns=2"]
        found.append(Run(f"guidellm {kind}", "guidellm", arguments))
    return found


def write_models(folder: Path) -> None:
    """Write copies of the embedded pair with a chat template."""
    for name, path in (("target", embedded.target_path()), ("draft", embedded.draft_path())):
        shutil.copytree(path, folder / name)
        settings = folder / name / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))


def write_tasks(folder: Path) -> None:
    """Write two tasks for lm-eval that need no hub: one with multiple choice, one with generated text."""
    folder.mkdir()
    questions = [("The sea is", ["blue", "a tree"]), ("Two and two are", ["four", "seven"]), ("Birds", ["fly", "type"])]
    rows = [{"question": question, "choices": choices, "answer": 0} for question, choices in questions]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "rows.jsonl"}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
    (folder / "tiny_choice.yaml").write_text(
        f"""task: tiny_choice
output_type: multiple_choice
{common}doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
    )
    (folder / "tiny_text.yaml").write_text(
        f"""task: tiny_text
output_type: generate_until
{common}doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
    )


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run `dynatree serve` on the pair; yield the base URL of its HTTP API."""
    command = [sys.executable, "-m", "dynatree.cli.main", "serve", "--served-model-name", MODEL]
    command += ["--target-model", str(folder / "target"), "--draft-model", str(folder / "draft")]
    log = folder / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0"], stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        while not (found := re.search(r"HTTP +(http\S+)/v1", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def counted(url: str) -> dict[tuple[str, str], float]:
    """Number of requests so far, by route and status."""
    figures = requests.get(f"{url}/metrics", timeout=60).text
    return {(route, code): float(count) for code, route, count in _COUNTED.findall(figures) if route not in _WATCHING}


def row(name: str, command: Sequence[str], url: str, folder: Path) -> bool:
    """Run one client and print its row; return whether it succeeded without errors."""
    before = counted(url)
    address = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "MODEL": MODEL}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets"), "TOKENIZERS_PARALLELISM": "false"}
    log = folder / f"{re.sub(r'[^a-z]+', '-', name.lower())}.log"
    with log.open("wb") as file:
        try:
            environment = os.environ | address | offline
            ran = subprocess.run(command, stdout=file, stderr=file, env=environment, timeout=SECONDS, cwd=folder)
            ended = str(ran.returncode)
        except subprocess.TimeoutExpired:
            ended = "timeout"
    time.sleep(0.2)  # an aborted request is counted when the gateway has seen it
    new = {key: count - before.get(key, 0) for key, count in counted(url).items()}
    probes = new.pop(("other", "404"), 0)  # requests for routes of other servers, such as vLLM's /tokenizer_info
    errors = {f"{route} {code}": int(count) for (route, code), count in new.items() if code[0] in "45" and count}
    told = ", ".join(f"{what}: {count}" for what, count in errors.items())
    figures = f"{int(sum(new.values()))} | {sum(errors.values())} | {int(probes)}"
    print(f"| {name} | {figures} | {ended} | {told} |", flush=True)
    if ended != "0":
        print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), file=sys.stderr)
    return ended == "0" and not errors


def main() -> int:
    """Print the table; return 1 if a client failed or got an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--env",
        type=Path,
        action="append",
        default=[],
        metavar="ENV",
        help="environment with Python clients; repeatable",
    )
    parser.add_argument("--node", type=Path, metavar="FOLDER", help="folder in which npm installed openai")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_models(folder)
        write_tasks(folder / "tasks")
        well = True
        with serving(folder) as url:
            print("| client | requests | errors | other routes probed | exit status | which errors |")
            print("| --- | ---: | ---: | ---: | ---: | --- |")
            for run in runs(url, folder):
                pythons = [str(environment.absolute() / "bin" / "python") for environment in options.env]
                found = [each for each in pythons if _has(each, run.module)]
                if found:
                    well &= row(run.name, [found[0], *run.arguments], url, folder)
                else:
                    print(f"| {run.name} | | | | not installed | |")
            if options.node is not None:
                script = shutil.copy(SCRIPTS / "openai_node.mjs", options.node)
                well &= row("openai (Node)", ["node", str(Path(script).absolute())], url, folder)
    return 0 if well else 1


def _has(python: str, module: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look]).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
