"""llama.cpp's server on the same checkpoints: a baseline of `dynatree bench compare --baseline-server`.

    python benchmarks/llama_cpp.py --target-model T --draft-model D [--type Q8_0] [--type Q4_K_M] [--work FOLDER] \\
      [-- dynatree bench compare --target-model T --draft-model D --prompts P --out runs/{type}.json]

builds it, converts both checkpoints, starts servers and prints their options for `compare`; they run until Ctrl-C.
With several types, the servers of one run after those of another, because they share the memory. A command runs beside
the servers of each type, with their options after it and the type for {type}. `make bench` does the same by itself.

llama.cpp comes in the sources of PyPI's `llama-cpp-python`. They are downloaded and built once, for this machine; that
takes cmake, ninja, a C++ compiler and a quarter of an hour on two cores. The checkpoints are converted to GGUF with
llama.cpp's own converter, in their own 16 bits; the target's file is then quantised by `llama-quantize`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import requests

VERSION = "0.3.36"  # of llama-cpp-python
TOOLS = ("cmake", "ninja", "c++")
DRAFTED = (3, 5, 8)  # tokens that llama.cpp drafts at a time
UNQUANTISED = "16-bit"  # a type: the checkpoint's own
FIRST_PORT = 18080
START_SECONDS = 600.0

# GCC 12.2 drops the stores to the tile configuration that `_tile_loadconfig` reads, and AMX then traps.
TILES, STORED = "_tile_loadconfig(&tc);", '__asm__ volatile("" : : "r"(&tc) : "memory");'
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


def build(work: Path) -> tuple[Path, Path]:
    """llama.cpp's server, built for this machine, and its sources."""
    source = work / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if not source.exists():
        # pip asks the sources for their metadata, and installs their build tools into an isolated environment.
        download = ["-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps"]
        run([sys.executable, *download, "-d", str(work), f"llama-cpp-python=={VERSION}"])
        with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
    server = work / "build" / "bin" / "llama-server"
    if not server.exists():
        kernels = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
        text = kernels.read_text()
        if STORED not in text:
            kernels.write_text(text.replace(TILES, f"{STORED} {TILES}"))
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise SystemExit(f"building llama.cpp needs {', '.join(missing)}")
        off = ["LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI"]
        settings = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in off)]
        run(["cmake", "-S", str(source), "-B", str(work / "build"), "-G", "Ninja", *settings])
        run(["ninja", "-C", str(work / "build"), "llama-server", "llama-quantize"])
    return server, source


def convert(source: Path, work: Path, model: str) -> Path:
    """A checkpoint as GGUF, in its own dtype."""
    output = work / f"{Path(model).name}.gguf"
    if output.exists():
        return output
    python = os.environ | {"PYTHONPATH": f"{source}:{source / 'gguf-py'}"}
    part = output.with_suffix(".part")
    arguments = [str(source / "convert_hf_to_gguf.py"), model, "--outfile", str(part), "--outtype", "auto"]
    subprocess.run([sys.executable, "-c", CONVERT, *arguments], env=python, check=True)
    part.replace(output)
    return output


def quantized(server: Path, model: Path, kind: str) -> Path:
    """A GGUF file's weights in another type, such as Q4_K_M."""
    output = model.with_suffix(f".{kind}.gguf")
    if not output.exists():
        part = output.with_suffix(".part")
        run([str(server.parent / "llama-quantize"), str(model), str(part), kind, str(os.cpu_count())])
        part.replace(output)
    return output


def run(command: Sequence[str]) -> None:
    """A command that must succeed; its output is shown."""
    subprocess.run(command, check=True)


@contextmanager
def llama_servers(
    work: Path, target: str, draft: str, drafted: Sequence[int], kind: str = UNQUANTISED
) -> Iterator[dict[str, str]]:
    """Start servers and yield their URLs by name: one that decodes plainly, and one for each number of drafted tokens.

    Args:
        work: Folder of the build and of the converted checkpoints.
        target: Folder of the target's checkpoint.
        draft: Folder of the draft's checkpoint.
        drafted: Numbers of tokens.
        kind: Type that the target's weights are quantised to, or `UNQUANTISED`.
    """
    work.mkdir(parents=True, exist_ok=True)
    binary, source = build(work)
    models = [convert(source, work, model) for model in (target, draft)]
    if kind != UNQUANTISED:
        models[0] = quantized(binary, models[0], kind)
    threads = str(os.cpu_count())
    command = [str(binary), "-m", str(models[0]), "-c", "2048", "-np", "1", "-t", threads, "--no-ui"]
    drafting = ["-md", str(models[1]), "--spec-type", "draft-simple", "-td", threads, "--spec-draft-n-max"]
    name = "llama.cpp" if kind == UNQUANTISED else f"llama.cpp {kind}"
    methods = {name: command}
    methods |= {f"{name}, drafting {count}": [*command, *drafting, str(count)] for count in drafted}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(llama_server(arguments, FIRST_PORT + number))
            for number, (name, arguments) in enumerate(methods.items())
        }


@contextmanager
def llama_server(command: Sequence[str], port: int) -> Iterator[str]:
    """The URL of a server of llama.cpp that has loaded its models."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not serves(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"llama-server did not start: {' '.join(command)}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def serves(url: str) -> bool:
    """Whether a server of llama.cpp has loaded its models."""
    try:
        return requests.get(f"{url}/health", timeout=10).ok
    except requests.RequestException:
        return False


def options_of(servers: Mapping[str, str]) -> list[str]:
    """The options of `dynatree bench compare` for servers, by their names."""
    return [option for name, url in servers.items() for option in ("--baseline-server", f"{name}={url}")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the servers of each type in turn, and run the command beside them or say where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-model", required=True, metavar="FOLDER")
    parser.add_argument("--draft-model", required=True, metavar="FOLDER")
    parser.add_argument(
        "--type",
        dest="types",
        action="append",
        metavar=f"{UNQUANTISED}|Q8_0|Q4_0|Q4_K_M",
        help=f"type of the target's weights, repeatable (default: {UNQUANTISED}, their own)",
    )
    parser.add_argument(
        "--drafted",
        type=int,
        nargs="+",
        default=DRAFTED,
        metavar="N",
        help="tokens that are drafted at a time, a server for each number (default: %(default)s)",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/llama.cpp"), help="folder of the build (default: build/llama.cpp)"
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="command to run beside the servers of each type")
    options = parser.parse_args(arguments)
    models = options.target_model, options.draft_model
    for kind in options.types or [UNQUANTISED]:
        with llama_servers(options.work, *models, options.drafted, kind) as servers:
            print(shlex.join(options_of(servers)), flush=True)
            if options.command:
                run([*(word.replace("{type}", kind) for word in options.command), *options_of(servers)])
            elif signal.sigwait({signal.SIGINT, signal.SIGTERM}) == signal.SIGTERM:
                break


if __name__ == "__main__":
    main()
