"""All measurements behind the figures of this repository, made again: `make bench` and `make bench-quick`.

    python benchmarks/suite.py --texts FOLDER [--quick] [--only NAME]

Each measurement is one `dynatree bench` command, and one file of `--out`. What is there already, of this code and this
machine, is not measured again, so that an interrupted suite goes on. Other programs must rest meanwhile.

The folder of texts holds wikitext-2.txt and wikitext-2-validation.txt (WikiText-2 raw), book.txt (a book that neither
model has seen), c4.jsonl, openwebtext.jsonl and spec-bench.jsonl, of which the suite leaves out what is missing.
The models are the shipped pair, grown to the shapes of Pythia-2.8B and Pythia-70M, unless others are named.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from figures import QUANTISED
from llama_cpp import DRAFTED, TOOLS, UNQUANTISED, llama_servers, options_of

from dynatree.bench.environment import environment
from dynatree.bench.figures import by_temperature, cells, frame
from dynatree.bench.methods import PLAIN
from dynatree.bench.record import load

ROOT = Path(__file__).parent.parent
CODE = ("common", "draft_service", "verify_service", "protos", "client/dynatree/client")  # what is measured
BESIDE = ("book", "wikitext-2")  # texts on which llama.cpp runs
LARGE = ("wikitext-2", "book", "c4", "openwebtext", "spec-bench")
GREEDY = ("--temperature", "0")
TRANSFORMERS = ("--baseline", "all")
PLAIN_TRANSFORMERS = ("--baseline", "transformers")


@dataclass(frozen=True)
class Suite:
    """Where things are: texts, models, results."""

    texts: Path
    target: str
    draft: str
    out: Path
    work: Path

    def text(self, name: str) -> Path | None:
        """A text by its name, None where it is missing."""
        found = sorted(self.texts.glob(f"{name}.*"))
        return found[0] if found else None

    def result(self, name: str) -> Path:
        """The file of a measurement."""
        return self.out / f"{name}.json.gz"


@dataclass(frozen=True)
class Measurement:
    """A file of results.

    Attributes:
        name: The file's, without suffix.
        minutes: What it takes on two cores of an AMD EPYC (Zen 4), 2.8B shape.
        text: Which text it needs, if any.
        command: The arguments after `dynatree bench`.
        servers: Type of the weights of llama.cpp's servers that are started for it; None starts none.
    """

    name: str
    minutes: float
    text: str | None
    command: Callable[[Suite], list[str]]
    servers: str | None = None


def compare(
    text: str, *more: str, count: int = 8, new: int = 100, tuned: bool = False, also: Sequence[str] = ()
) -> Callable[[Suite], list[str]]:
    """Policies on prompts of 128 tokens of a text of the large pair, greedy unless `more` says otherwise."""

    def command(suite: Suite) -> list[str]:
        policies = ["throughput", *(best_static(suite) if tuned else ()), *also]
        options = [each for policy in policies for each in ("--policy", policy)]
        prompts = ["--prompts", str(suite.text(text)), "--name", text.removesuffix("-validation")]
        sizes = ["--count", str(count), "--max-new-tokens", str(new), "--warmup", "1" if new < 1000 else "0"]
        greedy = () if "--temperature" in more else GREEDY
        return ["compare", *models(suite), *prompts, *sizes, *greedy, *options, *more]

    return command


def models(suite: Suite) -> list[str]:
    """The large pair."""
    return ["--target-model", suite.target, "--draft-model", suite.draft]


def best_static(suite: Suite) -> list[str]:
    """The fastest chain and the fastest tree of the sweep, which ran on other text."""
    report = load(suite.result("sweep"))
    [runs] = by_temperature(frame(report)).values()
    over_plain = cells(runs, "rate", over=PLAIN.label)
    ranked = sorted(over_plain, key=lambda label: -over_plain[label].median)
    return [next(label for label in ranked if label.startswith(policy)) for policy in ("linear:", "fixed:")]


def sweep(suite: Suite) -> list[str]:
    """Chains and trees, to be tuned."""
    policies = ["linear:depth=3/4/5/6/8", "fixed:depth=3/5/8,breadth=2/3,tau=0.1", "fixed:depth=5,breadth=2,tau=0.05"]
    prompts = ["--prompts", str(suite.text("wikitext-2-validation")), "--count", "4", "--max-new-tokens", "64"]
    return ["sweep", *models(suite), *prompts, *(each for policy in policies for each in ("--policy", policy))]


def costs(suite: Suite) -> list[str]:
    """Cost curves of the large pair."""
    return ["costs", *models(suite), "--max-nodes", "64", "--repetitions", "3"]


def random_draft(suite: Suite) -> list[str]:
    """A draft that knows nothing."""
    draft = make_random(suite.draft, suite.work / "random-draft")
    policies = ["throughput", *best_static(suite)]
    options = [each for policy in policies for each in ("--policy", policy)]
    prompts = ["--prompts", str(suite.text("wikitext-2")), "--name", "wikitext-2, random draft", "--count", "4"]
    return ["compare", "--target-model", suite.target, "--draft-model", draft, *prompts, *GREEDY, *options]


def many_clients(suite: Suite) -> list[str]:
    """Many at once."""
    prompts = ["--prompts", str(suite.text("book")), "--count", "16", "--max-new-tokens", "64"]
    loads = ["--clients", "1,2,4,8", "--rounds", "1", "--warmup", "0", *PLAIN_TRANSFORMERS]
    return ["load", *models(suite), *prompts, *loads]


def embedded(command: str, *more: str) -> Callable[[Suite], list[str]]:
    """The shipped pair on the book."""
    return lambda suite: [command, "--prompts", str(suite.text("book")), *more]


FEW = ("--policy", "throughput", "--policy", "dynatree", "--policy", "linear", "--policy", "ngram")
SAMPLING = ("--temperature", "0", "--temperature", "0.7", "--temperature", "1.0", "--policy", "dynatree")
MEASUREMENTS = (
    Measurement("sweep", 9, "wikitext-2-validation", sweep),
    Measurement("costs", 3, None, costs),
    *(Measurement(name, 19, name, compare(name, "--policy", "dynatree", *TRANSFORMERS, tuned=True)) for name in LARGE),
    Measurement("random-draft", 4, "wikitext-2", random_draft),
    Measurement("sampling", 13, "book", compare("book", *SAMPLING)),
    *(Measurement(f"llama-cpp-{name}", 6, name, compare(name, count=3), UNQUANTISED) for name in BESIDE),
    *(
        Measurement(f"llama-cpp-{name}-{kind}", 5, name, compare(name, "--weights", weights, count=3), kind)
        for kind, weights in QUANTISED.items()
        for name in BESIDE
    ),
    Measurement("t1500-wikitext-2", 12, "wikitext-2", compare("wikitext-2", count=2, new=1500)),
    Measurement("t1500-book", 12, "book", compare("book", count=2, new=1500)),
    Measurement("many-clients", 9, "book", many_clients),
    Measurement(
        "embedded",
        2,
        "book",
        embedded("compare", "--max-new-tokens", "128", "--count", "8", *GREEDY, *FEW, *TRANSFORMERS),
    ),
    Measurement("embedded-coupling", 1, "book", embedded("coupling", "--count", "4")),
    Measurement("embedded-ablation", 1, "book", embedded("ablation", "--count", "4")),
    Measurement("embedded-ranks", 1, "book", embedded("ranks")),
)
QUICK = (
    Measurement("costs", 3, None, costs),
    Measurement("book", 7, "book", compare("book", *PLAIN_TRANSFORMERS, count=4, also=["linear:depth=5"])),
    Measurement("embedded", 1, "book", embedded("compare", *GREEDY, "--count", "4", *PLAIN_TRANSFORMERS)),
)


REPLAYS = {"gpu": ["--machine", "gpu-flat-expected", "--temperature", "0"]}  # in benchmarks/replay, without a model


def main(arguments: Sequence[str] | None = None) -> None:
    """Say how long it will take, and measure what is missing."""
    options = parse(arguments)
    out = options.out or (ROOT / "build" / "bench-quick" if options.quick else ROOT / "benchmarks" / "results")
    work = ROOT / "build" / "models"
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    if not options.texts.is_dir():
        raise SystemExit(f"there is no folder {options.texts} of texts; {__doc__.split(chr(10) * 2)[3]}")
    suite = Suite(
        options.texts,
        options.target_model or str(work / "pythia-2.8b-shape"),
        options.draft_model or str(work / "pythia-70m-shape"),
        out,
        work,
    )
    chosen = [each for each in (QUICK if options.quick else MEASUREMENTS) if options.only in (None, each.name)]
    missing = [each for each in chosen if not is_there(suite, each)]
    wanted = [each for each in missing if can_run(suite, each)]
    left = sum(each.minutes for each in wanted)
    print(
        f"{len(chosen) - len(missing)} of {len(chosen)} measurements are there; {len(wanted)} take some {left:.0f} min"
    )
    if options.plan:
        return
    grow_models(options, suite)
    for each in wanted:
        print(f"== {each.name}: some {each.minutes:g} min; {left:.0f} min are left", flush=True)
        started = time.monotonic()
        run(suite, each)
        left -= each.minutes
        print(f"== {each.name}: {(time.monotonic() - started) / 60:.1f} min", flush=True)
    if not options.quick and options.only is None:
        replay()


def replay() -> None:
    """Policies on recorded rounds; the results are the same everywhere."""
    folder = ROOT / "benchmarks" / "replay"
    for name, arguments in REPLAYS.items():
        command = ["bench", "replay", str(folder / "books.npz"), *arguments, "--processes", "2"]
        dynatree([*command, "--out", str(folder / f"{name}.json")])


def dynatree(arguments: Sequence[str]) -> int:
    """Run a command of `dynatree`, and show it."""
    print("dynatree", *arguments, flush=True)
    return subprocess.run([sys.executable, "-m", "dynatree.cli.main", *arguments]).returncode


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, metavar="FOLDER", help="folder of the texts")
    parser.add_argument("--target-model", metavar="PATH|HUB_ID")
    parser.add_argument("--draft-model", metavar="PATH|HUB_ID")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of the results (default: benchmarks/results, or build/bench-quick with --quick)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check in a quarter of an hour whether this machine reaches the documented speed",
    )
    parser.add_argument("--only", metavar="NAME", help="run only this measurement")
    parser.add_argument("--plan", action="store_true", help="only print the measurements and their durations")
    return parser.parse_args(arguments)


def is_there(suite: Suite, measurement: Measurement) -> bool:
    """Whether there is a whole result of this code and this machine.

    Raises:
        SystemExit: There is one of other code or another machine, which must not stand beside new ones.
    """
    path = suite.result(measurement.name)
    if not path.exists():
        return False
    report = load(path)
    here = environment(None, None)
    changed = report["git"] is None or code_changed_since(report["git"]["commit"])
    if changed or report["machine"]["cpu"] != here.machine["cpu"]:
        raise SystemExit(f"{path} is of other code or another processor; move the results away, or name another --out")
    return report["complete"]


def code_changed_since(commit: str) -> bool:
    """Whether the code that is measured is not that of a commit."""
    difference = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *CODE]
    return subprocess.run(difference, stderr=subprocess.DEVNULL).returncode != 0


def can_run(suite: Suite, measurement: Measurement) -> bool:
    """Whether its text and its tools are there; says what is missing."""
    if measurement.text is not None and suite.text(measurement.text) is None:
        print(f"left out: {measurement.name}, for want of {suite.texts / measurement.text}.*")
        return False
    tools = [tool for tool in TOOLS if shutil.which(tool) is None] if measurement.servers is not None else []
    if tools:
        print(f"left out: {measurement.name}, for want of {', '.join(tools)}, which build llama.cpp")
    return not tools


def grow_models(options: argparse.Namespace, suite: Suite) -> None:
    """Make the large pair, unless it is there or others are named."""
    for named, shape, path in (
        (options.target_model, "pythia-2.8b", suite.target),
        (options.draft_model, "pythia-70m", suite.draft),
    ):
        if named is None and not Path(path).exists():
            print(f"growing {path}", flush=True)
            subprocess.run([sys.executable, "-m", "dynatree.bench.shipped_pair.grow", shape, path], check=True)


def make_random(draft: str, out: Path) -> str:
    """A model of the draft's shape and tokenizer, with random weights."""
    if not (out / "model.safetensors").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(draft)
        AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(out)
        AutoTokenizer.from_pretrained(draft).save_pretrained(out)
    return str(out)


def run(suite: Suite, measurement: Measurement) -> None:
    """One measurement, kept when it is whole."""
    part = suite.result(f"{measurement.name}.part")
    with baselines(suite, measurement) as arguments:
        status = dynatree(["bench", *measurement.command(suite), *arguments, "--out", str(part)])
    if status or not load(part)["complete"]:
        raise SystemExit(f"{measurement.name} failed; what there is of it is in {part}")
    part.replace(suite.result(measurement.name))


@contextmanager
def baselines(suite: Suite, measurement: Measurement) -> Iterator[Sequence[str]]:
    """The options that name llama.cpp's servers, which run meanwhile."""
    if measurement.servers is None:
        yield []
        return
    work = ROOT / "build" / "llama.cpp"
    with llama_servers(work, suite.target, suite.draft, DRAFTED, measurement.servers) as servers:
        yield options_of(servers)


if __name__ == "__main__":
    main()
